"""Chat messages as plain data: their canonical form, the texts inside them, the same messages with other texts."""

import json
from collections.abc import Callable, Iterator


def clean_text(text: str) -> str:
    """Text that UTF-8 can hold: a lone surrogate, which JSON can carry and no tokenizer takes, becomes U+FFFD."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace") if not _sound(text) else text


def canonical(message: dict) -> dict:
    """The message as templates expect it: "" for null, which they would print as None; tool arguments as objects."""
    if message.get("tool_calls"):  # parsed first: an escape inside a JSON string is a lone surrogate only then
        message = message | {"tool_calls": [_call(call, parse_arguments) for call in message["tool_calls"]]}
    message = map_text(message, clean_text)
    return message if message.get("content") is not None else message | {"content": ""}


def on_the_wire(message: dict) -> dict:
    """The message as the OpenAI API wants it: tool arguments as a JSON string."""
    if not message.get("tool_calls"):
        return message
    return message | {"tool_calls": [_call(call, _dump_arguments) for call in message["tool_calls"]]}


def texts(value) -> Iterator[str]:
    """Every text inside messages, keys of tool arguments included."""
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
    """The same messages with `change` applied to every text."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [map_text(item, change) for item in value]
    if isinstance(value, dict):
        return {change(key): map_text(item, change) for key, item in value.items()}
    return value


def _sound(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _call(call: dict, change: Callable) -> dict:
    function = call.get("function")
    if not isinstance(function, dict):
        return call
    return call | {"function": function | {"arguments": change(function.get("arguments"))}}


def parse_arguments(arguments):
    """Tool arguments as an object where they are JSON of one; other text stays as it is."""
    if not isinstance(arguments, str):
        return {} if arguments is None else arguments
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def _dump_arguments(arguments) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
