"""What is to be generated: questions and repeats with the ids of their records, those that are there already left out.

Planning is lazy: a unit is drawn when a worker is free, so that memory does not grow with the number of questions.
"""

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path

from common.generation.engine import Sampling
from common.generation.record_folder import Counts, FailureList
from common.pipeline.files import digest, sha256
from common.pipeline.node_share import WHOLE, Part
from common.pipeline.settings import Generate, Questions
from common.questions.conversations import Unusable
from common.questions.questions import DUPLICATE, Question, Skipped
from common.target.protocol import Protocol, Unrenderable

TOKENIZER_SAMPLE = "Naïve Übung, 12345 tokens;\n\n  日本語 中文 한국어 🙂 don't <b>stop</b>"  # tells tokenizers apart


@dataclass(frozen=True)
class Conversation:
    """One conversation to generate: a question and the number of its repeat. `ids`: one record id a turn."""

    question: Question
    repeat: int
    ids: list[str]
    prompt_ids: list[int]  # of the first turn; empty where its record is there already


def sampling_of(settings: Generate) -> Sampling:
    """The part of the settings that decides what a reply is."""
    names = ("thinking", "thinking_budget", "temperature", "top_p", "max_tokens")
    return Sampling(**{name: getattr(settings, name) for name in names})


class Planner:
    """Units of a part in the order of the questions, `n` samples at most over all parts; unusable rows are counted.

    `takes_ids`: the engine is asked with token ids; else it tokenizes the rendered messages by itself.
    `finished`: every unit was drawn.
    """

    def __init__(
        self,
        questions: Iterable[Question | Skipped],
        settings: Generate,
        protocol: Protocol,
        takes_ids: bool,
        n: int | None,
        stored,
        counts: Counts,
        failures: FailureList | None,
        part: Part = WHOLE,
    ):
        self.part, self.numbered = part, 0
        self.settings, self.protocol, self.takes_ids, self.n = settings, protocol, takes_ids, n
        self.stored, self.counts, self.failures = stored, counts, failures
        self.finished = False
        self._units: Iterator[Conversation] = self._plan(questions)

    def __iter__(self) -> Iterator[Conversation]:
        return self._units

    def has_work(self) -> bool:
        """Whether anything is missing: without, no server is needed and no model loaded."""
        first = next(self._units, None)
        self._units = chain([first] if first else [], self._units)
        return first is not None

    def _plan(self, questions: Iterable[Question | Skipped]) -> Iterator[Conversation]:
        sampling = asdict(sampling_of(self.settings)) | {"seed": self.settings.seed}
        counts = self.counts
        for question in questions:
            if isinstance(question, Skipped):
                self.skip(question.reason, question.detail, row=question.row)
                continue
            turns = range(1 + len(question.followups))
            prompt_ids: list[int] = []
            for repeat in range(self.settings.repeats):
                ids = [digest([question.key, sampling, repeat, turn])[:16] for turn in turns]
                if self.n is not None:
                    ids = ids[: self.n - self.numbered]
                if not ids:
                    self.finished = True
                    return
                there = [id in self.stored for id in ids]
                if not there[0] and not prompt_ids:
                    try:
                        prompt_ids = self.prompt_ids(question.messages)
                    except Unusable as error:
                        self.skip(error.reason, error.detail, source=question.source)
                        break
                self.numbered += len(ids)  # over all parts, so that each part knows where --n ends
                if not self.part.holds(ids[0]):  # a conversation stays together
                    continue
                counts.planned += len(ids)
                if not all(there):
                    yield Conversation(question, repeat, ids, [] if there[0] else prompt_ids)
        self.finished = True

    def prompt_ids(self, messages: list[dict]) -> list[int]:
        """Ids of the generation prompt; raises Unusable where the target can't be asked."""
        tools = any(message["role"] == "tool" or message.get("tool_calls") for message in messages)
        if tools and not self.protocol.renders_tools:
            raise Unusable("tool turns that the chat template cannot render")
        # A server tokenizes the rendered text, so that a quoted control token would become a real one: a fake turn, an
        # early end. With ids as the prompt text stays text; a chat server takes none, so the row is left out.
        if not self.takes_ids and self.protocol.quotes_control(messages):
            raise Unusable("control tokens in the text")
        try:
            prompt_ids = self.protocol.prompt_ids(messages, self.settings.thinking)
        except Unrenderable as error:
            raise Unusable("refused by the chat template", str(error)) from None
        if len(prompt_ids) >= self.settings.context_tokens:
            raise Unusable("longer than the context", f"{len(prompt_ids)} tokens")
        return prompt_ids

    def skip(self, reason: str, detail: str = "", **where) -> None:
        """Count what is not asked, and list it; a duplicate is asked elsewhere, so nothing is missing."""
        self.counts.skipped[reason] += 1
        if self.failures is not None and reason != DUPLICATE:
            self.failures.append("skipped", reason, detail, **where)


def input_fingerprint(questions: Questions, protocol: Protocol) -> dict:
    """What changes content beside the settings: a local questions file, and how the target tokenizes a chat.

    The tokenizer is known by what it does, not by its file: library versions write the same one differently. No whole
    prompt is taken, since some templates print the date: a run must go on after midnight.
    """
    path = Path(questions.dataset)
    local = {"questions.sha256": sha256(path)} if path.is_file() else {}
    tokens = sorted(protocol.added.items())
    tails = [protocol.prompt_tail(thinking) for thinking in (True, False)]
    spoken = [protocol.tokenizer.chat_template, tokens, protocol.text_ids(TOKENIZER_SAMPLE), tails]
    return local | {"protocol.sha256": digest(spoken)}
