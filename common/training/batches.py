"""The order of packs over epochs, steps and ranks; a thread prefetches them."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from common.dataset.index import TRAIN
from common.dataset.packs import Pack, Packs, prefetch
from common.pipeline.errors import SafetyStop
from common.pipeline.settings import Train
from common.training.ranks import Ranks


class PackOrder:
    """The endless sequence of training packs: epoch after epoch, each shuffled by the seed. Its state is one number."""

    def __init__(self, packs: Packs, seed: int):
        self.packs, self.seed = packs, seed
        self.epochs: dict[int, list[list[int]]] = {}  # the packs of the epoch in use
        self.borders = [0]  # packs until the start of each epoch

    def _packs(self, epoch: int) -> list[list[int]]:
        if epoch not in self.epochs:
            self.epochs = {epoch: self.packs.pack_split(TRAIN, self.seed * 1_000_003 + epoch)}
            if len(self.borders) == epoch + 1:
                self.borders.append(self.borders[epoch] + len(self.epochs[epoch]))
        return self.epochs[epoch]

    def at(self, number: int) -> tuple[float, list[int]]:
        """(epochs completed before it, index rows) of pack `number`."""
        epoch = 0
        while True:
            if len(self.borders) <= epoch + 1:
                self._packs(epoch)
            if number < self.borders[epoch + 1]:
                packs, index = self._packs(epoch), number - self.borders[epoch]
                return epoch + index / len(packs), packs[index]
            epoch += 1

    def count(self, epochs: float) -> int:
        """The number of packs in `epochs` epochs."""
        whole = math.floor(epochs)
        for epoch in range(whole):
            self._packs(epoch)
        rest = math.ceil((epochs - whole) * len(self._packs(whole))) if epochs > whole else 0
        return self.borders[whole] + rest


def step_packs(order: PackOrder, step: int, settings: Train, ranks: Ranks) -> list[list[int]]:
    """The index rows of this rank's packs of one optimizer step."""
    first = step * settings.packs_per_step
    return [order.at(first + i)[1] for i in range(ranks.rank, settings.packs_per_step, ranks.world)]


def prefetched(packs: Packs, wanted: Iterator[list[list[int]]], device: str) -> Iterator[list[Pack]]:
    """The packs of each step on `device`, read by a thread while the step before is computed."""
    return prefetch(lambda rows: [packs.load(r).to(device) for r in rows], wanted)


def global_counts(batch: list[Pack], steps: int, ranks: Ranks) -> Tensor:
    """Loss positions int64 [K] of an optimizer step over its packs and ranks; raises SafetyStop when there are none."""
    counts = torch.stack([p.loss_positions.counts(steps) for p in batch]).sum(0)
    counts = ranks.sum(counts)
    if counts[0] == 0:
        raise SafetyStop(
            f"no sample of this batch has a supervised token: {', '.join(id for p in batch for id in p.ids)}"
        )
    return counts
