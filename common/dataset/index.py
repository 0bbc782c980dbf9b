"""The training index: where each sequence lies in the shards, its length and its split. No state is copied."""

import hashlib
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from common.dataset.shards import Shard
from common.pipeline.files import atomic_path
from common.pipeline.settings import Dataset

TRAIN, HELD_OUT = 0, 1
SPLIT_SEED = 0
MIN_SUPERVISED = 2  # a loss position needs two tokens written by the target: its input and what follows


@dataclass
class Index:
    """One row per sequence, int64 [n]: where it lies, its length in tokens, its split."""

    shard: Tensor
    number: Tensor  # of the sequence in its shard
    start: Tensor  # first row in its shard
    length: Tensor
    supervised: Tensor  # tokens written by the target
    split: Tensor  # TRAIN or HELD_OUT
    shards: list[str] = field(default_factory=list)

    def save(self, path: Path) -> None:
        tensors = {k: v for k, v in vars(self).items() if isinstance(v, Tensor)}
        with atomic_path(path) as temporary:
            save_file(tensors, temporary, {"shards": "\n".join(self.shards)})

    @classmethod
    def load(cls, path: Path) -> "Index":
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, not a dict
            return cls(**tensors, shards=file.metadata()["shards"].split("\n"))

    def rows(self, split: int) -> list[int]:
        return torch.nonzero(self.split == split).flatten().tolist()


class IndexBuilder:
    """Adds shards to an index, one after the other. `counts` int64 [V]: how often the target wrote each token."""

    def __init__(self, settings: Dataset, vocab_size: int):
        self.settings = settings
        self.counts = torch.zeros(vocab_size, dtype=torch.int64)
        self.dropped: Counter = Counter()
        self.columns: list[Tensor] = []  # int64 [6, n] of each shard, in the order of Index
        self.names: list[str] = []

    def add(self, name: str, shard: Shard) -> None:
        """Index one shard's usable sequences."""
        ids = shard.read("input_ids", 0, shard.offsets[-1])
        mask = shard.read("loss_mask", 0, shard.offsets[-1]).bool()
        written = torch.cat([torch.zeros(1, dtype=torch.int64), mask.cumsum(0)])
        offsets = torch.tensor(shard.offsets)
        start, whole = offsets[:-1], offsets.diff()
        length = whole.clamp_max(self.settings.sample_tokens)
        supervised = written[start + length] - written[start]  # after the cut

        usable = supervised >= MIN_SUPERVISED
        if dropped := int((~usable).sum()):
            self.dropped[f"fewer than {MIN_SUPERVISED} tokens written by the target"] += dropped
        split = torch.tensor([HELD_OUT if held_out(f["question"], self.settings) else TRAIN for f in shard.facts])
        numbers = torch.arange(len(whole))
        columns = (torch.full_like(numbers, len(self.names)), numbers, start, length, supervised, split)
        self.columns.append(torch.stack(columns)[:, usable])
        self.names.append(name)

        trained = usable & (split == TRAIN)
        borders = torch.zeros(len(ids) + 1, dtype=torch.int32)  # +1 at starts, -1 at ends: the running sum is 1 inside
        borders.index_add_(0, start[trained], torch.ones_like(start[trained], dtype=torch.int32))
        borders.index_add_(0, (start + length)[trained], -torch.ones_like(start[trained], dtype=torch.int32))
        inside = borders.cumsum(0)[:-1] > 0
        self.counts += torch.bincount(ids[inside & mask], minlength=len(self.counts))

    def build(self) -> Index:
        columns = torch.cat(self.columns, 1) if self.columns else torch.zeros(6, 0, dtype=torch.int64)
        return Index(*(column.clone() for column in columns), shards=self.names)


def held_out(question: str, settings: Dataset) -> bool:
    """Whether a question is held out for evaluation: by a stable hash, so that it is never in both splits."""
    value = int.from_bytes(hashlib.sha256(f"{SPLIT_SEED}:{question}".encode()).digest()[:8], "big")
    return value < settings.holdout_share * 2**64
