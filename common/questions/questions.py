"""Questions out of the rows of data sets and files, cleaned and numbered.

A row becomes a `Question`: the messages of its first generation prompt and, for `turns = "all"`, the messages before
each later reply. Rows that cannot be asked come out as `Skipped` with the reason: none vanishes.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from common.pipeline.files import digest
from common.pipeline.settings import Questions
from common.questions.conversations import Unusable, chat_messages
from common.questions.rows import open_rows
from common.target.messages import canonical

DUPLICATE = "duplicate"


@dataclass(frozen=True)
class Question:
    """One conversation to ask. `key` is a hash of its content: equal questions have equal keys.

    `opening`: the same of its first prompt alone. Conversations that part later share it, and with it their split.
    """

    key: str
    opening: str
    messages: list[dict]  # up to the first reply
    followups: list[list[dict]] = field(default_factory=list)  # what stands before each later reply
    source: dict = field(default_factory=dict)  # dataset, split, row


@dataclass(frozen=True)
class Skipped:
    """A row that is not asked, with its reason."""

    row: int
    reason: str
    detail: str = ""


class QuestionStream:
    """Questions in the order of `shuffle_seed`, duplicates by content once; unusable rows as `Skipped`.

    `rows`: how many rows there are; None for a stream, which nobody has counted.
    """

    def __init__(self, settings: Questions):
        self.settings = settings
        self.rows, self._iterator = open_rows(settings)

    def __iter__(self) -> Iterator[Question | Skipped]:
        seen: set[int] = set()  # 64 bits of hash as a number: a third of the memory of the hex text
        for row, value in self._iterator:
            source = {"dataset": self.settings.dataset, "split": self.settings.split, "row": row}
            try:
                question = to_question(value, self.settings, source)
            except Unusable as error:
                yield Skipped(row, error.reason, error.detail)
                continue
            number = int(question.key, 16)
            if number in seen:
                yield Skipped(row, DUPLICATE)
                continue
            seen.add(number)
            yield question


def to_question(row, settings: Questions, source: dict) -> Question:
    """The question of one data set row; raises Unusable."""
    if row is None:
        raise Unusable("not JSON")
    messages = chat_messages(row, first_turn_only=settings.turns == "first")
    asked = next((at for at, message in enumerate(messages) if message["role"] == "user"), len(messages))
    greetings = [at for at in range(asked) if messages[at]["role"] == "assistant"]  # they answer nothing
    messages = [message for at, message in enumerate(messages) if at not in greetings]
    if settings.system_prompt and not (messages and messages[0]["role"] == "system"):
        messages = [{"role": "system", "content": settings.system_prompt}, *messages]
    prompts = split_turns(messages)
    if settings.turns == "first":
        prompts = prompts[:1]
    if not prompts or not any(message["role"] == "user" for message in prompts[0]):
        raise Unusable("no user turn")
    if any(m["role"] == "user" and not m["content"].strip() for prompt in prompts for m in prompt):
        raise Unusable("empty question")
    essence = [[_essence(m) for m in prompt] for prompt in prompts]
    key, opening = (digest(part)[:16] for part in (essence, essence[:1]))
    return Question(key, opening, prompts[0], prompts[1:], source)


def split_turns(messages: list[dict]) -> list[list[dict]]:
    """The messages before each reply that the target shall write, the replies themselves left out.

    An assistant turn with tool calls is no reply but context: its tool's results answer that very call. The last turn
    of a chat is always the target's, even where it was a call.
    """
    prompts: list[list[dict]] = [[]]
    for message in messages:
        if message["role"] == "assistant" and not message.get("tool_calls"):
            prompts.append([])
        else:
            prompts[-1].append(message)
    while prompts[-1] and prompts[-1][-1]["role"] == "assistant":
        prompts[-1].pop()
    return [prompt for prompt in prompts if prompt]


def _essence(message: dict) -> list:
    """What makes two messages the same question."""
    calls = canonical(message).get("tool_calls")
    return [message["role"], message["content"], *([calls] if calls else [])]
