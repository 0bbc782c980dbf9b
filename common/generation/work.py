"""The conversations that are still to be generated: all repeats of all questions, without the stored ones.

A conversation is made only when a worker is free, so that memory does not grow with the number of questions.
"""

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from itertools import chain
from pathlib import Path

from common.generation.engine import Sampling
from common.generation.record_folder import StoredRecords
from common.pipeline.files import digest, sha256
from common.pipeline.node_share import NodeShare
from common.pipeline.settings import Generate, Questions
from common.questions.conversations import Unusable
from common.questions.questions import Question, Skipped
from common.target.protocol import Protocol, Unrenderable

# Two tokenizers of the same vocabulary size give other ids for this text.
TOKENIZER_SAMPLE = "Naïve Übung, 12345 tokens;\n\n  日本語 中文 한국어 🙂 don't <b>stop</b>"


@dataclass(frozen=True)
class Conversation:
    """A question and the number of its repeat."""

    question: Question
    repeat: int
    ids: list[str]  # record ids, one for each turn
    prompt_ids: list[int]  # of the first turn; empty where its record is stored

    def source(self, turn: int) -> dict:
        """The `source` of a turn's record. Its `question` is a hash that all turns and repeats share."""
        return self.question.source | {"turn": turn, "repeat": self.repeat, "question": self.question.opening}


def sampling_of(settings: Generate) -> Sampling:
    """The settings that a reply depends on."""
    return Sampling(**{field.name: getattr(settings, field.name) for field in fields(Sampling)})


@dataclass
class PendingConversations:
    """Iterates over the conversations of one node share that are not stored yet, in the order of the questions.

    Questions that cannot be asked are reported to `records.skip`.
    """

    questions: Iterable[Question | Skipped]
    settings: Generate
    protocol: Protocol
    records: StoredRecords
    n: int | None  # the largest number of samples over all node shares
    node_share: NodeShare
    numbered: int = 0  # samples so far, over all node shares
    finished: bool = False  # every conversation was drawn

    def __post_init__(self):
        self._conversations = self._pending()

    def __iter__(self) -> Iterator[Conversation]:
        return self._conversations

    def has_work(self) -> bool:
        """Whether any conversation is pending; otherwise no server is needed and no model is loaded."""
        first = next(self._conversations, None)
        self._conversations = chain([first] if first else [], self._conversations)
        return first is not None

    def _pending(self) -> Iterator[Conversation]:
        sampling = asdict(sampling_of(self.settings)) | {"seed": self.settings.seed}
        for question in self.questions:
            if isinstance(question, Skipped):
                self.records.skip(question.reason, question.detail, row=question.row)
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
                stored = [id in self.records for id in ids]
                if not stored[0] and not prompt_ids:
                    try:
                        prompt_ids = self.prompt_ids(question.messages)
                    except Unusable as error:
                        self.records.skip(error.reason, error.detail, source=question.source)
                        break
                self.numbered += len(ids)  # of all node shares, so that each stops at the same question for --n
                if not self.node_share.holds(ids[0]):  # a conversation stays together
                    continue
                self.records.counts.planned += len(ids)
                if not all(stored):
                    yield Conversation(question, repeat, ids, [] if stored[0] else prompt_ids)
        self.finished = True

    def prompt_ids(self, messages: list[dict]) -> list[int]:
        """Token ids of the generation prompt; raises Unusable where the target cannot be asked."""
        tools = any(message["role"] == "tool" or message.get("tool_calls") for message in messages)
        if tools and not self.protocol.renders_tools:
            raise Unusable("tool turns that the chat template cannot render")
        # A server tokenizes rendered text, so it would turn a quoted control token into a real one: a fake turn or an
        # early end. The local engine takes token ids, in which the quote stays text; a chat server does not.
        if self.settings.engine != "local" and self.protocol.quotes_control(messages):
            raise Unusable("control tokens in the text")
        try:
            prompt_ids = self.protocol.prompt_ids(messages, self.settings.thinking)
        except Unrenderable as error:
            raise Unusable("refused by the chat template", str(error)) from None
        if len(prompt_ids) >= self.settings.context_tokens:
            raise Unusable("longer than the context", f"{len(prompt_ids)} tokens")
        return prompt_ids


def input_fingerprint(questions: Questions, protocol: Protocol) -> dict:
    """Fingerprint of a local questions file and of the target's tokenization, the inputs that no setting describes.

    The tokenizer's output is hashed, not its file: transformers versions save the same tokenizer differently. A
    rendered prompt is not hashed, since some templates print the date and a run must resume after midnight.
    """
    path = Path(questions.dataset)
    local = {"questions.sha256": sha256(path)} if path.is_file() else {}
    tails = [protocol.prompt_tail(thinking) for thinking in (True, False)]
    added = sorted(protocol.added.items())
    chat = [protocol.tokenizer.chat_template, added, protocol.text_ids(TOKENIZER_SAMPLE), tails]
    return local | {"protocol.sha256": digest(chat)}
