"""Turns one data set row of any common chat schema into chat messages: role, content as text, tool calls.

One file may mix schemas, so the schema is detected for each row.
"""

import json
import math

from common.target.messages import clean_text, parse_arguments

ROLES = {
    "system": "system", "developer": "system",
    "human": "user", "user": "user", "prompter": "user",
    "gpt": "assistant", "assistant": "assistant", "model": "assistant", "chatgpt": "assistant", "bot": "assistant",
    "tool": "tool", "function": "tool", "observation": "tool", "function_response": "tool",
    "function_call": "call", "tool_call": "call",
}  # fmt: skip
CONVERSATION_COLUMNS = ("conversations", "messages", "conversation", "prompt", "chosen", "turns")
QUESTION_COLUMNS = ("instruction", "prompt", "question", "query", "text")
MAX_ARGUMENT_DEPTH = 100  # tool arguments that nest far deeper would exceed the recursion limit of JSON readers


class Unusable(Exception):
    """A row that cannot be asked. `reason` is counted over all rows; `detail` describes this row."""

    def __init__(self, reason: str, detail: str = ""):
        super().__init__(reason)
        self.reason, self.detail = reason, detail


def is_row(value: dict) -> bool:
    """Whether an object is a conversation itself and not a wrapper around a file's rows."""
    return any(isinstance(value.get(key), str) for key in QUESTION_COLUMNS) or any(
        _is_turns(value[key]) for key in CONVERSATION_COLUMNS if isinstance(value.get(key), list)
    )


def chat_messages(row, first_turn_only: bool = False) -> list[dict]:
    """The row's messages; raises Unusable. `first_turn_only`: messages after the first reply are not read."""
    if isinstance(row, str):
        return [_user(row)]
    if isinstance(row, list):
        row = {"messages": row}
    if not isinstance(row, dict):
        raise Unusable("not an object")
    if row.get("images") or row.get("image"):
        raise Unusable("images")
    if _as_list(row.get("tools")) or _as_list(row.get("functions")):
        raise Unusable("tool definitions, which are not supported")
    messages = [m for m in _turns(row, first_turn_only) if m["role"] != "system" or m["content"].strip()]
    system = next((row[key] for key in ("system", "system_prompt") if _is_text(row.get(key))), None)
    if system and not (messages and messages[0]["role"] == "system"):
        messages = [{"role": "system", "content": clean_text(system)}, *messages]
    return messages


def _turns(row: dict, first_turn_only: bool) -> list[dict]:
    lists = [row[key] for key in CONVERSATION_COLUMNS if isinstance(row.get(key), list)]
    turns = next(filter(None, lists), None)
    if turns:
        return _from_list(turns, first_turn_only)
    main = next((key for key in QUESTION_COLUMNS if isinstance(row.get(key), str)), None)
    if main is None:
        raise Unusable("no user turn" if lists else "no known chat column")
    role = ROLES.get(str(row.get("role")).lower())  # None: the column is missing or means something else
    if role not in (None, "user"):
        raise Unusable("a single message that is not a user's")
    if role and row.get("parent_id"):
        raise Unusable("a single message without the conversation before it")
    context = row.get("context")
    if context and not isinstance(context, str):
        raise Unusable("a context that is not text")
    asked, input = row[main], row.get("input") if main == "instruction" else None
    if not _is_text(asked) and not _is_text(input):
        raise Unusable("empty question")
    text = "\n\n".join(filter(_is_text, (asked, context, input)))
    return [*_history(row.get("history")), _user(text)]


def _history(history) -> list[dict]:
    """The messages of a `history` column: pairs of question and answer before the row's question."""
    messages = []
    for pair in _as_list(history):
        if not isinstance(pair, list) or len(pair) != 2 or not isinstance(pair[0], str):
            raise Unusable("a history that is not a list of text pairs")
        messages += [_user(pair[0]), {"role": "assistant", "content": ""}]
    return messages


def _as_list(value) -> list:
    """The list in a column, which may be JSON text; any other value becomes a list of one, an empty value []."""
    if isinstance(value, str):
        try:
            value = json.loads(value or "null")
        except (ValueError, RecursionError):
            return [value]
    return value if isinstance(value, list) else [value] if value else []


def _is_text(value) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _is_turns(values: list) -> bool:
    """Whether a list is one conversation, made of plain texts or of objects with a role."""
    return bool(values) and all(
        isinstance(value, str) or (isinstance(value, dict) and ("role" in value or "from" in value)) for value in values
    )


def _from_list(turns: list, first_turn_only: bool) -> list[dict]:
    messages: list[dict] = []
    for turn in turns:
        if isinstance(turn, str):  # plain texts are user turns, each followed by a reply
            messages += [_user(turn), {"role": "assistant", "content": ""}]
        else:
            messages.append(_message(turn, messages))
        reply = messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls")
        if first_turn_only and reply and any(m["role"] == "user" for m in messages):
            break
    return messages


def _user(text: str) -> dict:
    return {"role": "user", "content": clean_text(text)}


def _message(turn, before: list[dict]) -> dict:
    if not isinstance(turn, dict):
        raise Unusable("a turn that is not an object")
    name = str(turn.get("role") or turn.get("from") or "")
    role = ROLES.get(name.lower())
    if role is None:
        raise Unusable("unknown role", clean_text(name)[:100])
    content = next((turn[key] for key in ("content", "value", "text") if turn.get(key) is not None), "")
    if role == "call":
        try:
            call = json.loads(content)
        except (TypeError, ValueError, RecursionError):
            raise Unusable("tool calls that are not JSON") from None
        return {"role": "assistant", "content": "", "tool_calls": _calls([call], before)}
    if role == "assistant" and (calls := turn.get("tool_calls") or _as_list(turn.get("function_call"))):
        return {"role": role, "content": _text(content), "tool_calls": _calls(calls, before)}
    if role == "assistant":
        return {"role": role, "content": ""}  # the target replaces this reply by its own, so its text is not needed
    message = {"role": role, "content": _text(content)}
    if role == "tool":
        message["tool_call_id"] = _answered_call(turn.get("tool_call_id"), before)
    return message


def _text(content) -> str:
    """The text of a message's content, which may be a list of typed items; raises Unusable for images and the like."""
    if isinstance(content, str):
        return clean_text(content)
    if not isinstance(content, list):
        raise Unusable("content that is not text")
    for item in content:
        if not isinstance(item, dict) or not isinstance(item.get("text"), str):
            kind = str(item.get("type")) if isinstance(item, dict) else ""
            raise Unusable("images" if "image" in kind else "content that is not text")
    return clean_text("".join(item["text"] for item in content))


# ---- tool calls ----


def _calls(calls, before: list[dict]) -> list[dict]:
    """Tool calls in the OpenAI form. A call without an id gets one in Kimi's form, functions.NAME:NUMBER."""
    if not isinstance(calls, list):
        raise Unusable("tool calls that are not a list")
    number = sum(len(message.get("tool_calls", ())) for message in before)
    formed = []
    for call in calls:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise Unusable("tool calls without a name")
        id = call.get("id")
        name = clean_text(function["name"])
        formed.append({
            "id": clean_text(id) if _is_text(id) else f"functions.{name}:{number + len(formed)}", "type": "function",
            "function": {"name": name, "arguments": _json_value(parse_arguments(function.get("arguments")))},
        })  # fmt: skip
    return formed


def _json_value(value, depth: int = 0):
    """Tool arguments with clean texts; raises Unusable for a value that JSON cannot represent."""
    if isinstance(value, str):
        return clean_text(value)
    if value is None or isinstance(value, int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    if isinstance(value, list) and depth < MAX_ARGUMENT_DEPTH:
        return [_json_value(item, depth + 1) for item in value]
    if isinstance(value, dict) and depth < MAX_ARGUMENT_DEPTH:
        return {clean_text(key): _json_value(item, depth + 1) for key, item in value.items()}
    raise Unusable("tool calls that are not JSON")


def _answered_call(id, before: list[dict]) -> str:
    """The id of the tool call that a result answers: the call that the result names, else the first unanswered one."""
    calls = [call["id"] for message in before for call in message.get("tool_calls", ())]
    if isinstance(id, str) and clean_text(id) in calls:
        return clean_text(id)
    answered = {message.get("tool_call_id") for message in before}
    if unanswered := [call for call in calls if call not in answered]:
        return unanswered[0]
    raise Unusable("a tool result without its call")
