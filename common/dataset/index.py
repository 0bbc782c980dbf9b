"""The training index, the split, packing, and packs read from mapped shards.

Nothing is copied: the index says where each sequence lies. An epoch's plan is a list of packs (sequence numbers) that
comes from the seed alone, so every rank and every resumed run computes the same one.
"""

import hashlib
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from common.pipeline.settings import Dataset
from common.pipeline.errors import UserError
from common.dataset.shards import Shard
from common.pipeline.manifest import atomic_path

TRAIN, HELD_OUT = 0, 1
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

    def to(self, device: str) -> "Pack":
        """The same pack with its tensors on `device`, except the offsets."""
        names = ("input_ids", "loss_mask", "aux_hidden", "last_hidden")
        return replace(self, **{name: getattr(self, name).to(device, non_blocking=True) for name in names})


@dataclass
class Index:
    """One row a sequence: where it lies, how long it is (int tensors [n]), which split it is in."""

    shard: Tensor
    number: Tensor  # of the sequence in its shard
    start: Tensor  # first row in its shard
    length: Tensor
    supervised: Tensor
    split: Tensor
    shards: list[str] = field(default_factory=list)

    def save(self, path: Path) -> None:
        tensors = {k: v for k, v in vars(self).items() if isinstance(v, Tensor)}
        with atomic_path(path) as temporary:
            save_file(tensors, temporary, {"shards": "\n".join(self.shards)})

    @classmethod
    def load(cls, path: Path) -> "Index":
        from safetensors import safe_open

        with safe_open(path, "pt") as file:
            names = file.metadata()["shards"].split("\n")
        return cls(**load_file(path), shards=names)

    def rows(self, split: int) -> list[int]:
        return torch.nonzero(self.split == split).flatten().tolist()


class IndexBuilder:
    """Reads shards one after the other into an index and counts what the target wrote."""

    def __init__(self, settings: Dataset, vocab_size: int):
        self.settings = settings
        self.counts = torch.zeros(vocab_size, dtype=torch.int64)
        self.dropped: Counter = Counter()
        self.columns: list[Tensor] = []  # [6, n] a shard, in the order of Index
        self.names: list[str] = []
        try:
            self.pattern = re.compile(settings.source_pattern) if settings.source_pattern else None
        except re.error as error:
            raise UserError(f"dataset.source_pattern {settings.source_pattern!r} is no regex: {error}") from None

    def add(self, name: str, shard: Shard) -> None:
        """Index one shard's usable sequences."""
        ids = shard.read("input_ids", 0, shard.offsets[-1])
        mask = shard.read("loss_mask", 0, shard.offsets[-1]).bool()
        written = torch.cat([torch.zeros(1, dtype=torch.int64), mask.cumsum(0)])
        offsets = torch.tensor(shard.offsets)
        start, whole = offsets[:-1], offsets.diff()
        length = whole.clamp_max(self.settings.pack_tokens)
        supervised = written[start + length] - written[start]  # behind the cut nothing is trained on

        kept = torch.ones(len(whole), dtype=torch.bool)
        for reason, bad in self._drops(shard.facts, whole, supervised):
            dropped = int((bad & kept).sum())
            if dropped:
                self.dropped[reason] += dropped
            kept &= ~bad
        split = torch.tensor([HELD_OUT if held_out(f["question"], self.settings) else TRAIN for f in shard.facts])
        numbers = torch.arange(len(whole))
        columns = (torch.full_like(numbers, len(self.names)), numbers, start, length, supervised, split)
        self.columns.append(torch.stack(columns)[:, kept])
        self.names.append(name)

        trained = kept & (split == TRAIN)
        borders = torch.zeros(len(ids) + 1, dtype=torch.int32)  # sequences do not overlap: a running sum of 1 is inside
        borders.index_add_(0, start[trained], torch.ones_like(start[trained], dtype=torch.int32))
        borders.index_add_(0, (start + length)[trained], -torch.ones_like(start[trained], dtype=torch.int32))
        inside = borders.cumsum(0)[:-1] > 0
        self.counts += torch.bincount(ids[inside & mask], minlength=len(self.counts))

    def _drops(self, facts: list[dict], length: Tensor, supervised: Tensor) -> Iterator[tuple[str, Tensor]]:
        """(reason, bool [n] which sequences it drops); the first that fits is the one that counts."""
        s = self.settings
        least = max(2, s.min_supervised)  # of a single one, the draft would have to propose what follows the end
        yield f"fewer than {least} tokens written by the target", supervised < least
        if s.max_tokens:
            yield f"longer than {s.max_tokens} tokens", length > s.max_tokens
        if s.drop_cut:
            yield "cut at the token limit", torch.tensor([f["finish"] == "length" for f in facts])
        if s.min_reasoning_share:
            reasoning = torch.tensor([f["reasoning"] for f in facts])
            yield (
                f"reasoning below {s.min_reasoning_share:.0%}",
                reasoning < s.min_reasoning_share * supervised.double(),
            )
        if self.pattern:
            found = {source: bool(self.pattern.search(source)) for source in {f["source"] for f in facts}}
            yield "source does not match", torch.tensor([not found[f["source"]] for f in facts])

    def build(self) -> Index:
        columns = torch.cat(self.columns, 1) if self.columns else torch.zeros(6, 0, dtype=torch.int64)
        return Index(*(column.clone() for column in columns), shards=self.names)


def held_out(question: str, settings: Dataset) -> bool:
    """Whether a question is kept for evaluation; by a stable hash, so that it is never in both splits."""
    value = int.from_bytes(hashlib.sha256(f"{settings.split_seed}:{question}".encode()).digest()[:8], "big")
    return value < settings.holdout_share * 2**64


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
