"""Questions out of Hugging Face data sets or local files: every chat schema in use, cleaned and numbered.

A row becomes a `Question`: the messages of its first generation prompt and, for `turns = "all"`, the user turns that
follow. Rows that cannot be asked raise `Unusable` with the reason, so that the caller counts them: none vanishes.
"""

import json
import random
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from common.config import Questions
from common.errors import UserError
from common.storage import digest

ROLES = {
    "system": "system", "developer": "system",
    "human": "user", "user": "user", "prompter": "user",
    "gpt": "assistant", "assistant": "assistant", "model": "assistant", "chatgpt": "assistant", "bot": "assistant",
    "tool": "tool", "function": "tool", "observation": "tool", "function_response": "tool",
}  # fmt: skip


class Unusable(Exception):
    """A row that cannot be asked; the message is the reason that is counted."""


@dataclass(frozen=True)
class Question:
    """One conversation to ask. `key` is a hash of its content: equal questions have equal keys."""

    key: str
    messages: list[dict]  # up to the first reply
    followups: list[list[dict]] = field(default_factory=list)  # the user turns before each later reply
    source: dict = field(default_factory=dict)  # dataset, split, row


@dataclass(frozen=True)
class Skipped:
    """A row that is not asked, with its reason."""

    row: int
    reason: str


def read_questions(settings: Questions) -> Iterator[Question | Skipped]:
    """Questions in the order of `shuffle_seed`, duplicates by content once; unusable rows as `Skipped`."""
    seen = set()
    for row, value in _rows(settings):
        source = {"dataset": settings.dataset, "split": settings.split, "row": row}
        try:
            question = to_question(value, settings, source)
        except Unusable as reason:
            yield Skipped(row, str(reason))
            continue
        if question.key in seen:
            yield Skipped(row, "duplicate")
            continue
        seen.add(question.key)
        yield question


def to_question(row, settings: Questions, source: dict) -> Question:
    """The question of one data set row; raises Unusable."""
    messages = clean_messages(row)
    while messages and messages[0]["role"] == "assistant":  # a greeting before the first question asks nothing
        messages = messages[1:]
    if settings.system_prompt and not (messages and messages[0]["role"] == "system"):
        messages = [{"role": "system", "content": settings.system_prompt}, *messages]
    prompts: list[list[dict]] = [[]]
    for message in messages:
        if message["role"] == "assistant":
            if prompts[-1]:
                prompts.append([])
        else:
            prompts[-1].append(message)
    prompts = [prompt for prompt in prompts if prompt]
    if not prompts or not any(m["role"] == "user" for m in prompts[0]):
        raise Unusable("no user turn")
    if any(m["role"] == "user" and not m["content"].strip() for prompt in prompts for m in prompt):
        raise Unusable("empty question")
    if settings.turns == "first":
        prompts = prompts[:1]
    key = digest([[(m["role"], m["content"]) for m in prompt] for prompt in prompts])[:16]
    return Question(key, prompts[0], prompts[1:], source)


def clean_messages(row) -> list[dict]:
    """Chat messages (`role`, `content` as text) of a row in any schema in use; raises Unusable."""
    if isinstance(row, str):
        return [{"role": "user", "content": row}]
    if not isinstance(row, dict):
        raise Unusable("not an object")
    for key in ("conversations", "messages", "conversation", "prompt", "chosen"):
        if isinstance(row.get(key), list):
            return [_message(item) for item in row[key]]
    if isinstance(row.get("instruction"), str):
        text = "\n\n".join(filter(None, (row["instruction"], row.get("input"))))
        system = row.get("system")
        return ([{"role": "system", "content": system}] if system else []) + [{"role": "user", "content": text}]
    for key in ("prompt", "question", "query", "text"):
        if isinstance(row.get(key), str):
            return [{"role": "user", "content": row[key]}]
    raise Unusable("no known chat column")


def _message(item) -> dict:
    if not isinstance(item, dict):
        raise Unusable("a turn is not an object")
    role = ROLES.get(str(item.get("role") or item.get("from") or "").lower())
    if role is None:
        raise Unusable(f"unknown role {item.get('role') or item.get('from')!r}")
    if role == "tool" or item.get("tool_calls"):
        raise Unusable("tool turns")
    content = item.get("content", item.get("value"))
    if isinstance(content, list):
        if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
            raise Unusable("content that is not text")
        content = "".join(part["text"] for part in content)
    if content is None:
        content = ""
    if not isinstance(content, str):
        raise Unusable("content that is not text")
    return {"role": role, "content": content}


# ---- rows ----


def _rows(settings: Questions) -> Iterable[tuple[int, object]]:
    path = Path(settings.dataset)
    if path.suffix in (".jsonl", ".json", ".parquet"):
        if not path.is_file():
            raise UserError(f"questions.dataset: no such file: {path}")
        reader = {".jsonl": _jsonl_rows, ".json": _json_rows, ".parquet": _hub_rows}[path.suffix]
        return reader(settings)
    return _hub_rows(settings)


def _order(count: int, seed: int) -> Iterable[int]:
    if count == 0:
        raise UserError("questions.dataset is empty: no rows to ask")
    if seed < 0:
        return range(count)
    order = array("q", range(count))
    random.Random(seed).shuffle(order)
    return order


def _jsonl_rows(settings: Questions) -> Iterator[tuple[int, object]]:
    """Rows by their line offsets: a shuffled file of any size costs eight bytes a line."""
    offsets = array("q")
    with open(settings.dataset, "rb") as file:
        at = 0
        for line in file:
            if line.strip():
                offsets.append(at)
            at += len(line)
        for row in _order(len(offsets), settings.shuffle_seed):
            file.seek(offsets[row])
            try:
                yield row, json.loads(file.readline())
            except (json.JSONDecodeError, UnicodeDecodeError):
                yield row, None


def _json_rows(settings: Questions) -> Iterator[tuple[int, object]]:
    try:
        rows = json.loads(Path(settings.dataset).read_text("utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{settings.dataset}: not JSON ({error})") from None
    if not isinstance(rows, list):
        raise UserError(f"{settings.dataset}: must be a list of conversations")
    for row in _order(len(rows), settings.shuffle_seed):
        yield row, rows[row]


def _hub_rows(settings: Questions) -> Iterator[tuple[int, object]]:
    import datasets

    try:
        if settings.dataset.endswith(".parquet"):
            rows = datasets.Dataset.from_parquet(settings.dataset)
        else:
            rows = datasets.load_dataset(settings.dataset, split=settings.split)
    except Exception as error:  # the hub client raises a dozen kinds; each means that there are no questions
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(f"questions.dataset {settings.dataset!r} (split {settings.split!r}): {reason}") from None
    for row in _order(len(rows), settings.shuffle_seed):
        yield row, rows[row]
