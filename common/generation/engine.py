"""What stage 01b asks of an engine. An engine answers many requests at the same time."""

from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True)
class Sampling:
    """How replies are drawn; part of every record's id. `temperature` 0 is greedy."""

    thinking: bool
    thinking_budget: int  # tokens of reasoning; 0: no limit
    temperature: float
    top_p: float
    max_tokens: int


@dataclass(frozen=True)
class Request:
    """One generation prompt: messages for servers, token ids for the local engine and the record."""

    id: str
    source: dict  # of the record: which row, turn and repeat is asked
    messages: list[dict]
    prompt_ids: list[int]
    seed: int
    max_tokens: int  # the limit of the sampling settings or the free rest of the context, whichever is less


@dataclass(frozen=True)
class Answer:
    """What an engine returned. Ids are None where the server sends none."""

    finish_reason: str
    prompt_ids: list[int] | None = None
    output_ids: list[int] | None = None
    reasoning: str | None = None
    content: str | None = None
    reasoning_field: str = ""  # the field that held the reasoning
    fields: dict[str, str] = field(default_factory=dict)  # field of the message -> kind of its value
    usage: dict | None = None
    server: str = ""  # version of the engine
    budget_closed: bool | None = None  # the thinking budget wrote the closing token; None: the engine does not tell

    @property
    def has_ids(self) -> bool:
        return self.prompt_ids is not None and self.output_ids is not None


class EngineError(Exception):
    """A request failed. `retry`: it may succeed later; `wait_s`: the server's Retry-After; `lost`: it never arrived."""

    def __init__(self, message: str, retry: bool, wait_s: float | None = None, lost: bool = False):
        super().__init__(message)
        self.retry, self.wait_s, self.lost = retry, wait_s, lost


class Engine(AbstractAsyncContextManager, Protocol):
    """`async with engine` starts and stops it. `answer` may run `concurrency` times at once."""

    concurrency: int
    model: str
    version: str

    async def answer(self, request: Request, sampling: Sampling) -> Answer: ...

    async def wait_until_back(self, patience_s: float) -> bool:
        """After a lost request: True once a server accepts connections again, False after `patience_s`."""
