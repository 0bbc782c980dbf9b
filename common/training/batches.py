"""The order of packs over epochs, steps and ranks, and the loss positions of a step."""

import itertools
import math
from functools import lru_cache

import torch
from torch import Tensor

from common.dataset.index import TRAIN
from common.dataset.packs import Pack, Packs
from common.pipeline.errors import SafetyStop
from common.pipeline.settings import Train
from common.training.ranks import Ranks


class PackOrder:
    """The endless sequence of training packs: epoch after epoch, each shuffled by the seed."""

    def __init__(self, packs: Packs, seed: int):
        # Only the current epoch is stored, since a large data set has many packs.
        self._packs = lru_cache(maxsize=1)(lambda epoch: packs.pack_split(TRAIN, seed * 1_000_003 + epoch))
        self._starts = [0]

    def _start(self, epoch: int) -> int:
        """The number of packs before an epoch."""
        for before in range(len(self._starts) - 1, epoch):
            self._starts.append(self._starts[-1] + len(self._packs(before)))
        return self._starts[epoch]

    def at(self, number: int) -> tuple[float, list[int]]:
        """(epochs completed before it, index rows) of pack `number`."""
        epoch = next(epoch for epoch in itertools.count() if number < self._start(epoch + 1))
        packs, index = self._packs(epoch), number - self._start(epoch)
        return epoch + index / len(packs), packs[index]

    def count(self, epochs: float) -> int:
        """The number of packs in `epochs` epochs."""
        whole = math.floor(epochs)
        rest = math.ceil((epochs - whole) * len(self._packs(whole))) if epochs > whole else 0
        return self._start(whole) + rest


def step_packs(order: PackOrder, step: int, settings: Train, ranks: Ranks) -> list[list[int]]:
    """The index rows of this rank's packs of one optimizer step."""
    first = step * settings.packs_per_step
    return [order.at(first + i)[1] for i in range(ranks.rank, settings.packs_per_step, ranks.world)]


def global_counts(batch: list[Pack], steps: int, ranks: Ranks) -> Tensor:
    """Loss positions int64 [K] of an optimizer step over its packs and ranks; raises SafetyStop when there are none."""
    counts = ranks.sum(torch.stack([pack.loss_positions.counts(steps) for pack in batch]).sum(0))
    if counts[0] == 0:
        ids = ", ".join(id for pack in batch for id in pack.ids)
        raise SafetyStop(f"no sample of this step has a token to train on: {ids}; check their loss masks in 02_hidden")
    return counts
