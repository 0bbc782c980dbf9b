"""What extraction asks of an extractor: streams in, each stream's states out, in any order."""

from collections.abc import Iterable, Iterator
from typing import Protocol, Self

from common.dataset.shards import States
from common.dataset.stream import Stream


class ExtractError(Exception):
    """The states of one sequence were not received; it is recorded as failed, and nothing of it is stored.

    `retry`: worth another try; `wait_s`: the server's Retry-After.
    """

    def __init__(self, message: str, retry: bool = True, wait_s: float | None = None):
        super().__init__(message)
        self.retry, self.wait_s = retry, wait_s


class Extractor(Protocol):
    """Computes states of whole streams. A context manager: between enter and exit it may be probed and asked for
    states; `description` is known from enter on. Exit ends requests in flight and frees what the extractor holds."""

    description: str

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error) -> None:
        """By default there is nothing to close."""

    def probe(self, stream: Stream) -> None:
        """Assert with one short request that the states are this config's; raises UserError."""

    def states(self, streams: Iterable[Stream]) -> Iterator[tuple[Stream, States | ExtractError]]: ...
