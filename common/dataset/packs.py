"""Packs: several streams trained as one batch; how they are planned, read and prefetched."""

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

PACK_WINDOW = 512  # sequences that are packed together by length; whole epochs would put equal lengths side by side


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


def plan_packs(rows: list[int], lengths: list[int], pack_tokens: int, seed: int | None) -> list[list[int]]:
    """Packs of rows with at most `pack_tokens` tokens each: first-fit decreasing inside shuffled windows.

    seed None keeps the order of the rows' windows (evaluation).
    """
    order = list(rows)
    rng = random.Random(seed) if seed is not None else None
    if rng:
        rng.shuffle(order)
    packs: list[list[int]] = []
    for at in range(0, len(order), PACK_WINDOW):
        window: list[list[int]] = []
        room: list[int] = []
        for row in sorted(order[at : at + PACK_WINDOW], key=lambda r: -lengths[r]):
            fit = next((i for i, free in enumerate(room) if lengths[row] <= free), None)
            if fit is None:
                window.append([row])
                room.append(pack_tokens - lengths[row])
            else:
                window[fit].append(row)
                room[fit] -= lengths[row]
        packs += window
    if rng:
        rng.shuffle(packs)
    return packs


def one_ahead(read: Callable, wanted: Iterable) -> Iterator:
    """read(x) for each x, by a thread that is one ahead, so that nobody waits for the disk."""
    with ThreadPoolExecutor(1) as pool:
        coming = None
        for each in wanted:
            ready, coming = coming, pool.submit(read, each)
            if ready is not None:
                yield ready.result()
        if coming is not None:
            yield coming.result()


class Packs:
    """Reads packs out of the mapped shards of a run."""

    def __init__(self, folder: Path, index: Index, pack_tokens: int):
        self.folder, self.index, self.pack_tokens = folder, index, pack_tokens
        self.lengths = index.length.tolist()
        self._shard = lru_cache(maxsize=64)(lambda number: Shard(folder / index.shards[number]))

    def plan(self, split: int, seed: int | None) -> list[list[int]]:
        return plan_packs(self.index.rows(split), self.lengths, self.pack_tokens, seed)

    def ahead(self, plan: Iterable[list[int]]) -> Iterator[Pack]:
        """The packs of a plan, each read while the one before is in use."""
        return one_ahead(self.load, plan)

    def load(self, rows: list[int]) -> Pack:
        """The pack of these sequences."""
        parts = {"input_ids": [], "loss_mask": [], "aux_hidden": [], "last_hidden": []}
        ids = []
        for row in rows:
            shard, number = self.find(row)
            start = shard.offsets[number]
            for name, tensors in parts.items():
                tensors.append(shard.read(name, start, start + self.lengths[row]))
            ids.append(shard.facts[number]["id"])
        tensors = {name: torch.cat(values) for name, values in parts.items()}
        return Pack(
            tensors["input_ids"].long(),
            tensors["loss_mask"].bool(),
            tensors["aux_hidden"],
            tensors["last_hidden"],
            torch.tensor([0] + [self.lengths[row] for row in rows]).cumsum(0),
            ids,
        )

    def find(self, row: int) -> tuple[Shard, int]:
        """The shard with a sequence's states, and its number there."""
        return self._shard(int(self.index.shard[row])), int(self.index.number[row])

    def facts(self, row: int) -> dict:
        """What stage 02 noted of a sequence."""
        return self._shard(int(self.index.shard[row])).facts[int(self.index.number[row])]

    def token_pairs(self, split: int) -> Iterator[tuple[Tensor, Tensor]]:
        """(previous token, written token) of every token that the target wrote, a sequence at a time."""
        for row in self.index.rows(split):
            shard, start = self._shard(int(self.index.shard[row])), int(self.index.start[row])
            ids = shard.read("input_ids", start, start + self.lengths[row]).long()
            mask = shard.read("loss_mask", start, start + self.lengths[row]).bool()
            yield ids[:-1][mask[1:]], ids[1:][mask[1:]]
