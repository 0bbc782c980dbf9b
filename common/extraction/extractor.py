"""What extraction asks of an extractor: streams in, each stream's states out, in any order."""

from collections.abc import Iterable, Iterator
from typing import Protocol

from common.dataset.shards import States
from common.dataset.stream import Stream


class ExtractError(Exception):
    """One sequence's states could not be had; it is recorded, never stored."""


class Extractor(Protocol):
    """Computes states of whole streams."""

    description: str

    def probe(self, stream: Stream) -> None:
        """Assert with one short request that the states are this config's; raises UserError."""

    def states(self, streams: Iterable[Stream]) -> Iterator[tuple[Stream, States | ExtractError]]: ...
