"""One data set row of any chat schema in use -> chat messages in one form: role, content as text, tool calls.

Schemas meet in one file, so each row is looked at on its own.
"""

import json

from common.chat import clean_text

ROLES = {
    "system": "system", "developer": "system",
    "human": "user", "user": "user", "prompter": "user",
    "gpt": "assistant", "assistant": "assistant", "model": "assistant", "chatgpt": "assistant", "bot": "assistant",
    "tool": "tool", "function": "tool", "observation": "tool", "function_response": "tool",
    "function_call": "call", "tool_call": "call",
}  # fmt: skip
LISTS = ("conversations", "messages", "conversation", "prompt", "chosen", "turns")
TEXTS = ("prompt", "question", "query", "text")


class Unusable(Exception):
    """A row that cannot be asked: the reason that is counted, and what there is to say about this very row."""

    def __init__(self, reason: str, detail: str = ""):
        super().__init__(reason)
        self.reason, self.detail = reason, detail


def chat_messages(row, first_turn_only: bool = False) -> list[dict]:
    """The row's messages; raises Unusable. `first_turn_only`: what comes after the first reply is not looked at."""
    if isinstance(row, str):
        return [_user(row)]
    if not isinstance(row, dict):
        raise Unusable("not an object")
    if row.get("images") or row.get("image"):
        raise Unusable("images")
    messages = _turns(row, first_turn_only)
    system = row.get("system") or row.get("system_prompt")
    if isinstance(system, str) and not (messages and messages[0]["role"] == "system"):
        messages = [{"role": "system", "content": clean_text(system)}, *messages]
    return messages


def _turns(row: dict, first_turn_only: bool) -> list[dict]:
    lists = [row[key] for key in LISTS if isinstance(row.get(key), list)]
    turns = next(filter(None, lists), None)
    if turns:
        return _from_list(turns, first_turn_only)
    if isinstance(row.get("instruction"), str):
        parts = [row["instruction"], row.get("input")]
        return [_user("\n\n".join(part for part in parts if isinstance(part, str) and part))]
    text = next((row[key] for key in TEXTS if isinstance(row.get(key), str)), None)
    if text is not None:
        return [_user(text)]
    raise Unusable("no user turn" if lists else "no known chat column")


def _from_list(turns: list, first_turn_only: bool) -> list[dict]:
    messages: list[dict] = []
    for turn in turns:
        if isinstance(turn, str):  # bare texts are a user's turns, each of which wants its own reply
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
        raise Unusable("a turn is not an object")
    name = turn.get("role") or turn.get("from")
    role = ROLES.get(str(name).lower()) if name else None
    if role is None:
        raise Unusable("unknown role", str(name)[:100])
    content = next((turn[key] for key in ("content", "value", "text") if turn.get(key) is not None), "")
    if role == "call":
        return {"role": "assistant", "content": "", "tool_calls": _calls([_call_in_text(content)], before)}
    if role == "assistant" and turn.get("tool_calls"):
        return {"role": role, "content": _text(content), "tool_calls": _calls(turn["tool_calls"], before)}
    if role == "assistant":
        return {"role": role, "content": ""}  # the target writes this turn itself: what it was is of no interest
    message = {"role": role, "content": _text(content)}
    if role == "tool":
        message["tool_call_id"] = turn.get("tool_call_id") or _open_call(before)
    return message


def _text(content) -> str:
    """The text of a content, which may be a list of typed parts."""
    if isinstance(content, str):
        return clean_text(content)
    if not isinstance(content, list):
        raise Unusable("content that is not text")
    for part in content:
        if not isinstance(part, dict) or not isinstance(part.get("text"), str):
            kind = str(part.get("type", "")) if isinstance(part, dict) else ""
            raise Unusable("images" if "image" in kind else "content that is not text")
    return clean_text("".join(part["text"] for part in content))


# ---- tool calls ----


def _calls(calls, before: list[dict]) -> list[dict]:
    """Tool calls in the OpenAI form; a call without an id gets one in Kimi's form, functions.NAME:NUMBER."""
    if not isinstance(calls, list):
        raise Unusable("tool calls that are no list")
    number = sum(len(message.get("tool_calls", ())) for message in before)
    formed = []
    for call in calls:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise Unusable("tool calls without a name")
        id = call.get("id") or f"functions.{function['name']}:{number + len(formed)}"
        arguments = function.get("arguments")
        formed.append({
            "id": id, "type": "function",
            "function": {"name": function["name"], "arguments": {} if arguments is None else arguments},
        })  # fmt: skip
    return formed


def _call_in_text(content) -> dict:
    try:
        return json.loads(content)
    except (TypeError, ValueError):
        raise Unusable("tool calls that are not JSON") from None


def _open_call(before: list[dict]) -> str:
    """The id of the first call that has no result yet."""
    calls = [call["id"] for message in before for call in message.get("tool_calls", ())]
    answered = {message.get("tool_call_id") for message in before}
    return next((id for id in calls if id not in answered), "")
