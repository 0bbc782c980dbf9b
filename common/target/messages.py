"""Chat messages as plain data: their canonical form, their form in a request, and the texts inside them."""

import json
from collections.abc import Callable, Iterator


def clean_text(text: str) -> str:
    """The text with U+FFFD for lone surrogates, which JSON allows and neither UTF-8 nor a tokenizer accepts."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def canonical(message: dict) -> dict:
    """The message as templates expect it: content "" for null, which they print as None; tool arguments as objects."""
    if message.get("tool_calls"):  # parsed before cleaning: parsing turns escapes in a JSON string into surrogates
        message = message | {"tool_calls": [_call(call, parse_arguments) for call in message["tool_calls"]]}
    message = map_text(message, clean_text)
    return message if message.get("content") is not None else message | {"content": ""}


def on_the_wire(message: dict) -> dict:
    """The message as the OpenAI API expects it: tool arguments as a JSON string."""
    if not message.get("tool_calls"):
        return message
    return message | {"tool_calls": [_call(call, _dump_arguments) for call in message["tool_calls"]]}


def texts(value) -> Iterator[str]:
    """All texts inside messages, the keys of tool arguments included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from texts(item)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from texts(item)


def map_text(value, change: Callable[[str], str]):
    """A copy of messages with `change` applied to every text and key."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [map_text(item, change) for item in value]
    if isinstance(value, dict):
        return {change(key): map_text(item, change) for key, item in value.items()}
    return value


def _call(call: dict, change: Callable) -> dict:
    function = call.get("function")
    if not isinstance(function, dict):
        return call
    return call | {"function": function | {"arguments": change(function.get("arguments"))}}


def parse_arguments(arguments):
    """Tool arguments as an object if they are the JSON of one; other text is returned unchanged."""
    if not isinstance(arguments, str):
        return {} if arguments is None else arguments
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def _dump_arguments(arguments) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
