"""The order of packs over epochs, steps and ranks; packs are prefetched by a thread."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from common.dataset.index import TRAIN
from common.dataset.packs import Pack, Packs, one_ahead
from common.pipeline.errors import SafetyStop
from common.pipeline.settings import Train
from common.training.ranks import Ranks


class PackOrder:
    """The endless sequence of training packs: epoch after epoch, each shuffled by the seed. Resume is a number."""

    def __init__(self, packs: Packs, seed: int):
        self.packs, self.seed = packs, seed
        self.plans: dict[int, list[list[int]]] = {}
        self.borders = [0]

    def _plan(self, epoch: int) -> list[list[int]]:
        if epoch not in self.plans:
            self.plans = {epoch: self.packs.plan(TRAIN, self.seed * 1_000_003 + epoch)}
            if len(self.borders) == epoch + 1:
                self.borders.append(self.borders[epoch] + len(self.plans[epoch]))
        return self.plans[epoch]

    def at(self, number: int) -> tuple[float, list[int]]:
        """(epochs done before it, rows) of pack `number`."""
        epoch = 0
        while True:
            if len(self.borders) <= epoch + 1:
                self._plan(epoch)
            if number < self.borders[epoch + 1]:
                plan = self._plan(epoch)
                at = number - self.borders[epoch]
                return epoch + at / len(plan), plan[at]
            epoch += 1

    def count(self, epochs: float) -> int:
        """Packs in so many epochs."""
        whole, total = math.floor(epochs), 0
        for epoch in range(whole):
            self._plan(epoch)
        total = self.borders[whole] if whole else 0
        if epochs > whole:
            total += math.ceil((epochs - whole) * len(self._plan(whole)))
        return total


def step_packs(order: PackOrder, step: int, settings: Train, ranks: Ranks) -> list[list[int]]:
    """The rows of this rank's packs of one optimizer step."""
    first = step * settings.packs_per_step
    return [order.at(first + i)[1] for i in range(ranks.rank, settings.packs_per_step, ranks.world)]


def prefetched(packs: Packs, wanted: Iterator[list[list[int]]], device: str) -> Iterator[list[Pack]]:
    """Packs of each step, read and moved one step ahead."""
    return one_ahead(lambda rows: [packs.load(r).to(device) for r in rows], wanted)


def global_counts(batch: list[Pack], steps: int, ranks: Ranks) -> Tensor:
    """Loss positions int64 [K] of an optimizer step over its packs and ranks; raises SafetyStop when there are none."""
    counts = torch.stack([p.loss_positions.counts(steps) for p in batch]).sum(0)
    counts = ranks.sum(counts)
    if counts[0] == 0:
        raise SafetyStop(f"a batch without a supervised token: samples {', '.join(id for p in batch for id in p.ids)}")
    return counts
