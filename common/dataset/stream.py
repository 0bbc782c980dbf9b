"""One sample's exact token stream, as stage 02 stores it."""

from array import array
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Stream:
    """One sample's token stream. `mask` is 1 where the target wrote the token; `facts` travel with it."""

    id: str
    ids: array  # int32 [T]
    mask: array  # uint8 [T]
    facts: dict = field(default_factory=dict)  # question, finish, ids_from, source, reasoning, temperature, forced

    def __len__(self) -> int:
        return len(self.ids)
