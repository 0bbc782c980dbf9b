"""What generation asks of an engine, and what it gets back. An engine answers one request at a time, many at once."""

from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True)
class Sampling:
    """How replies are drawn; part of every record's id. `temperature` 0 is greedy."""

    thinking: bool
    thinking_budget: int  # tokens, 0: no limit
    temperature: float
    top_p: float
    max_tokens: int


@dataclass(frozen=True)
class Request:
    """One generation prompt: as messages, for servers, and as ids, for the local engine and the records."""

    id: str
    messages: list[dict]
    prompt_ids: list[int]
    seed: int
    max_tokens: int  # what the sampling allows, or less where the context ends first


@dataclass(frozen=True)
class Answer:
    """What was received. Ids are None where the server sends none; `reasoning_field` names where reasoning stood."""

    finish_reason: str
    prompt_ids: list[int] | None = None
    output_ids: list[int] | None = None
    reasoning: str | None = None
    content: str | None = None
    reasoning_field: str = ""
    fields: dict[str, str] = field(default_factory=dict)  # what the message held, for the diagnosis of silence
    usage: dict | None = None
    server: str = ""  # version of what answered


class EngineError(Exception):
    """A request failed. `retry`: worth another try; `wait_s`: what the server asked for; `lost`: it never arrived."""

    def __init__(self, message: str, retry: bool, wait_s: float | None = None, lost: bool = False):
        super().__init__(message)
        self.retry, self.wait_s, self.lost = retry, wait_s, lost


class Engine(Protocol):
    """`async with engine` starts and stops it; `answer` may be awaited `concurrency` times at once."""

    concurrency: int
    model: str
    version: str

    async def __aenter__(self) -> "Engine": ...

    async def __aexit__(self, *error) -> None: ...

    async def answer(self, request: Request, sampling: Sampling) -> Answer: ...

    async def wait_until_back(self, patience_s: float) -> bool:
        """After a lost request: True as soon as one can arrive, False when `patience_s` have passed."""
