"""The answer in the raw body of a chat completion, wherever the server put the reasoning.

The body is parsed as plain JSON: the openai client's typed objects hide fields that they do not know, and `reasoning`
was once lost in them.
"""

import json

from common.generation.engine import Answer, EngineError
from common.servers.endpoints import excerpt
from common.target.protocol import Protocol

REASONING_FIELDS = ("reasoning", "reasoning_content")  # vLLM 0.16 and newer; SGLang and older vLLM
FINISHED = ("stop", "length", "tool_calls", "function_call", "content_filter")


def read_reply(text: str, protocol: Protocol, prompt_ids: list[int], server: str = "") -> Answer:
    """The answer in a chat completion's raw body; raises EngineError for any other body.

    A closing marker in the content is the target's own where the prompt leaves the reasoning open, or where the content
    begins with an opening marker. Then the content is split there.
    """
    try:
        body = json.loads(text)
        choice = body["choices"][0]
        message = choice["message"]
        finish_reason = choice["finish_reason"]
        content = message.get("content")
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):
        raise EngineError(f"no chat completion but {excerpt(text)}", retry=True) from None
    if finish_reason not in FINISHED:  # "abort", "error" or nothing: the server gave up on this request
        raise EngineError(f"the server finished with {finish_reason!r}", retry=True)
    if not isinstance(content, str | None):
        raise EngineError(f"the content is not text but {_kind(content)}", retry=False)
    field = next((name for name in REASONING_FIELDS if _kind(message.get(name)) == "text"), "")
    reasoning = message.get(field)
    opened = protocol.think_open_in_prompt(prompt_ids)
    begins = protocol.think_open is not None and (content or "").lstrip().startswith(protocol.think_open_text)
    if not field and content and (begins or (opened and protocol.think_close_text in content)):
        field = "content"
        reasoning, content = protocol.split_text(content, opened)
    elif field and begins:
        inner, rest = protocol.split_text(content, opened)
        if inner.strip() == reasoning.strip():  # some servers copy the reasoning out and leave the block where it was
            content = rest
    usage = body.get("usage")
    return Answer(
        finish_reason=finish_reason,
        prompt_ids=_ids(body.get("prompt_token_ids") or choice.get("prompt_token_ids")),
        output_ids=_ids(choice.get("token_ids") or message.get("token_ids")),
        reasoning=reasoning,
        content=content,
        reasoning_field=field,
        fields=field_kinds(message),
        usage=usage if isinstance(usage, dict) else None,
        server=server,
    )


def field_kinds(value: dict) -> dict[str, str]:
    """The kind of value in each field of a received object, for people: "text", "empty text", "null", "list" ..."""
    return {str(name): _kind(item) for name, item in value.items()}


def _kind(value) -> str:
    if value is None:
        return "null"
    name = "text" if isinstance(value, str) else type(value).__name__
    return f"empty {name}" if value in ("", [], {}) else name


def _ids(value) -> list[int] | None:
    return value if isinstance(value, list) and value and all(type(id) is int for id in value) else None
