"""Chat messages as plain data: their canonical form, their form in a request, and the texts inside them."""

import json
from collections.abc import Callable


def clean_text(text: str) -> str:
    """The text with U+FFFD for lone surrogates, which JSON allows and neither UTF-8 nor a tokenizer accepts."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def canonical(message: dict) -> dict:
    """The message as templates expect it: content "" for null, which they print as None; tool arguments as objects."""
    # Texts are cleaned last, since parsing the arguments turns escapes in their JSON into surrogates.
    message = map_text(_with_arguments(message, parse_arguments), clean_text)
    return message if message.get("content") is not None else message | {"content": ""}


def on_the_wire(message: dict) -> dict:
    """The message as the OpenAI API expects it: tool arguments as a JSON string."""
    return _with_arguments(message, lambda a: a if isinstance(a, str) else json.dumps(a, ensure_ascii=False))


def texts(value) -> list[str]:
    """All texts inside messages, the keys of tool arguments included."""
    collected: list[str] = []
    map_text(value, collected.append)
    return collected


def map_text(value, change: Callable[[str], object]):
    """A copy of messages with `change` applied to every text and key."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [map_text(item, change) for item in value]
    if isinstance(value, dict):
        return {change(key): map_text(item, change) for key, item in value.items()}
    return value


def _with_arguments(message: dict, change: Callable) -> dict:
    """The message with `change` applied to the arguments of its tool calls."""

    def changed(function: dict) -> dict:
        return function | {"arguments": change(function["arguments"])}

    calls = message.get("tool_calls")
    return message | {"tool_calls": [c | {"function": changed(c["function"])} for c in calls]} if calls else message


def parse_arguments(arguments):
    """Tool arguments as an object if they are the JSON of one; other text is returned unchanged."""
    if not isinstance(arguments, str):
        return {} if arguments is None else arguments
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments
