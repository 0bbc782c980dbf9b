"""Packs: several streams trained as one batch; how streams are packed, read and prefetched."""

import random
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from common.dataset.index import Index
from common.dataset.loss_positions import LossPositions, loss_positions
from common.dataset.shards import Shard

PACK_GROUP = 512  # sequences packed together, longest first; in larger groups a pack would hold only similar lengths


@dataclass
class Pack:
    """One packed batch: documents end to end. T tokens, n documents."""

    input_ids: Tensor  # int64 [T]
    loss_mask: Tensor  # bool [T], where the target wrote the token
    aux_hidden: Tensor  # bf16 [T, A*H]
    last_hidden: Tensor  # bf16 [T, H], before the target's final norm
    offsets: Tensor  # int64 [n+1], document borders, on the CPU
    ids: list[str]  # sample ids, for messages
    loss_positions: LossPositions | None = None  # computed from mask and offsets: once, by the thread that reads ahead

    def __post_init__(self):
        if self.loss_positions is None:
            self.loss_positions = loss_positions(self.loss_mask, self.offsets)

    def to(self, device: str) -> "Pack":
        """The same pack with its tensors on `device`, except the offsets and loss positions."""
        names = ("input_ids", "loss_mask", "aux_hidden", "last_hidden")
        return replace(self, **{name: getattr(self, name).to(device, non_blocking=True) for name in names})


def pack_sequences(rows: list[int], lengths: list[int], pack_tokens: int, seed: int | None) -> list[list[int]]:
    """Packs of rows with at most `pack_tokens` tokens each: first-fit decreasing inside groups of shuffled rows.

    seed None keeps the order of the groups (evaluation). The result depends on nothing else, so that every rank and
    every resumed run computes the same packs.
    """
    order = list(rows)
    rng = random.Random(seed) if seed is not None else None
    if rng:
        rng.shuffle(order)
    packs: list[list[int]] = []
    for start in range(0, len(order), PACK_GROUP):
        group: list[list[int]] = []
        room: list[int] = []
        for row in sorted(order[start : start + PACK_GROUP], key=lambda r: -lengths[r]):
            fit = next((i for i, free in enumerate(room) if lengths[row] <= free), None)
            if fit is None:
                group.append([row])
                room.append(pack_tokens - lengths[row])
            else:
                group[fit].append(row)
                room[fit] -= lengths[row]
        packs += group
    if rng:
        rng.shuffle(packs)
    return packs


def prefetch(read: Callable, items: Iterable) -> Iterator:
    """read(item) for each item, computed by a thread that is one item ahead, so that training never waits for disk."""
    with ThreadPoolExecutor(1) as pool:
        pending = None
        for item in items:
            ready, pending = pending, pool.submit(read, item)
            if ready is not None:
                yield ready.result()
        if pending is not None:
            yield pending.result()


class Packs:
    """Reads packs out of the mapped shards of a run."""

    def __init__(self, folder: Path, index: Index, pack_tokens: int):
        self.folder, self.index, self.pack_tokens = folder, index, pack_tokens
        self.lengths = index.length.tolist()
        self._shard = lru_cache(maxsize=64)(lambda number: Shard(folder / index.shards[number]))

    def pack_split(self, split: int, seed: int | None) -> list[list[int]]:
        """The rows of each pack of one pass over a split."""
        return pack_sequences(self.index.rows(split), self.lengths, self.pack_tokens, seed)

    def prefetch(self, packs: Iterable[list[int]]) -> Iterator[Pack]:
        """Load these packs; a thread reads each pack while the caller uses the previous one."""
        return prefetch(self.load, packs)

    def load(self, rows: list[int]) -> Pack:
        """One pack of the sequences of these index rows."""
        columns = {"input_ids": [], "loss_mask": [], "aux_hidden": [], "last_hidden": []}
        ids = []
        for row in rows:
            shard, number = self.find(row)
            start = shard.offsets[number]
            for name, tensors in columns.items():
                tensors.append(shard.read(name, start, start + self.lengths[row]))
            ids.append(shard.facts[number]["id"])
        tensors = {name: torch.cat(values) for name, values in columns.items()}
        tensors |= {"input_ids": tensors["input_ids"].long(), "loss_mask": tensors["loss_mask"].bool()}
        return Pack(**tensors, offsets=torch.tensor([0] + [self.lengths[row] for row in rows]).cumsum(0), ids=ids)

    def find(self, row: int) -> tuple[Shard, int]:
        """The shard that holds an index row's states, and the sequence's number in that shard."""
        return self._location(row)

    def facts(self, row: int) -> dict:
        """The facts that stage 02 stored with the sequence of an index row."""
        shard, number = self._location(row)
        return shard.facts[number]

    def _location(self, row: int) -> tuple[Shard, int]:
        """As `find`, but always in `folder`, whose shards have tokens and facts but no states under a disk budget."""
        return self._shard(int(self.index.shard[row])), int(self.index.number[row])

    def token_pairs(self, split: int) -> Iterator[tuple[Tensor, Tensor]]:
        """(previous token, written token) of every token that the target wrote, a sequence at a time."""
        for row in self.index.rows(split):
            (shard, _), start = self._location(row), int(self.index.start[row])
            ids = shard.read("input_ids", start, start + self.lengths[row]).long()
            mask = shard.read("loss_mask", start, start + self.lengths[row]).bool()
            yield ids[:-1][mask[1:]], ids[1:][mask[1:]]
