"""Turns the rows of data sets and files into questions.

A row becomes a `Question`: the messages of its first prompt and, with `turns = "all"`, those before each later reply. A
row that cannot be asked becomes `Skipped` with a reason, so that every row is accounted for.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from common.pipeline.files import digest
from common.pipeline.settings import Questions
from common.questions.conversations import Unusable, chat_messages
from common.questions.rows import open_rows

DUPLICATE = "duplicate"


@dataclass(frozen=True)
class Question:
    """One conversation to ask."""

    key: str  # hash of its content: equal questions have equal keys
    opening: str  # hash of its first prompt; conversations with equal openings go to the same split
    messages: list[dict]  # up to the first reply
    followups: list[list[dict]]  # the new messages before each later reply
    source: dict  # dataset, split, row


@dataclass(frozen=True)
class Skipped:
    """A row that is not asked."""

    row: int
    reason: str
    detail: str = ""


class QuestionStream:
    """Iterates over the questions in the order of `shuffle_seed`; unusable and duplicate rows are `Skipped`.

    `rows`: the number of rows, None for a stream.
    """

    def __init__(self, settings: Questions):
        self.settings = settings
        self.rows, self._iterator = open_rows(settings)

    def __iter__(self) -> Iterator[Question | Skipped]:
        seen: set[int] = set()  # 64-bit hashes as numbers take a third of the memory of hex text
        for row, value in self._iterator:
            source = {"dataset": self.settings.dataset, "split": self.settings.split, "row": row}
            try:
                question = to_question(value, self.settings, source)
            except Unusable as error:
                yield Skipped(row, error.reason, error.detail)
                continue
            number = int(question.key, 16)
            yield Skipped(row, DUPLICATE) if number in seen else question
            seen.add(number)


def to_question(row, settings: Questions, source: dict) -> Question:
    """The question of one data set row; raises Unusable."""
    if row is None:
        raise Unusable("not JSON")
    messages = chat_messages(row, first_turn_only=settings.turns == "first")
    first_user = next((at for at, message in enumerate(messages) if message["role"] == "user"), len(messages))
    # The assistant's greetings before the first question are left out.
    messages = [m for at, m in enumerate(messages) if at > first_user or m["role"] != "assistant"]
    if settings.system_prompt and not (messages and messages[0]["role"] == "system"):
        messages = [{"role": "system", "content": settings.system_prompt}, *messages]
    prompts = split_turns(messages)
    if settings.turns == "first":
        prompts = prompts[:1]
    if not prompts or not any(message["role"] == "user" for message in prompts[0]):
        raise Unusable("no user turn")
    if any(m["role"] == "user" and not m["content"].strip() for prompt in prompts for m in prompt):
        raise Unusable("empty question")
    # Equal questions differ at most in the ids of tool results.
    content = [[[m["role"], m["content"], *filter(None, [m.get("tool_calls")])] for m in p] for p in prompts]
    return Question(digest(content)[:16], digest(content[:1])[:16], prompts[0], prompts[1:], source)


def split_turns(messages: list[dict]) -> list[list[dict]]:
    """The new messages before each reply that the target has to write; the replies are left out.

    An assistant turn with tool calls stays in the prompt, since the tool results after it answer those calls. The last
    turn of a chat is always written by the target, even if the data set has a tool call there.
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
