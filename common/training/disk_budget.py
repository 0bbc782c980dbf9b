"""Training under a disk budget: shards come and go, in an order of packs that is fixed before any state is stored.

    round 0: epoch 1, 2, 3 | round 1: epoch 1, 2, 3 | ...     a pack has sequences of one round only

Tokens and facts are read from 02's schedule, states from the shards that 02 has entered in its manifest. A shard's
sequences are looked up by id, since 02 leaves out those whose states it failed to extract.
"""

import math
import time
from bisect import bisect_right
from collections.abc import Iterator
from functools import lru_cache
from itertools import chain
from pathlib import Path

import torch

from common.dataset.disk_budget import POLL_S, DiskBudget, find_disk_budget
from common.dataset.index import TRAIN, Index
from common.dataset.packs import Packs, pack_sequences
from common.dataset.shards import Shard
from common.pipeline.console import say
from common.pipeline.errors import SafetyStop, UserError
from common.pipeline.files import digest
from common.pipeline.manifest import HIDDEN, Manifest
from common.pipeline.settings import Train
from common.training.held_out import HeldOut
from common.training.ranks import Ranks, StopSignal


class FollowedPacks(Packs):
    """Packs under a disk budget. `rounds`: the index rows of each round's training samples."""

    def __init__(self, budget: DiskBudget, index: Index, pack_tokens: int):
        super().__init__(budget.folder, index, pack_tokens)
        self.budget = budget
        self.shard_names = [index.shards[shard] for shard in index.shard.tolist()]  # of each index row
        self.rounds: list[list[int]] = [[] for _ in budget.rounds]
        for row in index.rows(TRAIN):
            self.rounds[self.round_of(row)].append(row)
        self.written: set[str] = set()
        self.states = lru_cache(maxsize=64)(self._open)

    def _open(self, name: str) -> tuple[Shard, dict[str, int]]:
        """(a shard with states, the number in it of each sample id)."""
        shard = Shard(self.budget.hidden / name)
        return shard, {facts["id"]: number for number, facts in enumerate(shard.facts)}

    def round_of(self, row: int) -> int | None:
        return self.budget.round_of(self.shard_names[row])

    def find(self, row: int) -> tuple[Shard, int]:
        shard, numbers = self.states(self.shard_names[row])
        return shard, numbers[self.facts(row)["id"]]

    def missing(self, rows: list[int]) -> bool:
        """Whether 02 has yet to write a shard of these rows."""
        names = {self.shard_names[row] for row in rows}
        if names - self.written:
            self.written = set(Manifest.load(self.budget.hidden, HIDDEN).files)
        return bool(names - self.written)

    def with_states(self, rows: list[int]) -> list[int]:
        """The rows that have states; all shards of `rows` must be written."""
        return [row for row in rows if self.facts(row)["id"] in self.states(self.shard_names[row])[1]]

    def ready(self, rows: list[int]) -> list[int] | None:
        """What to load for a training pack, at least one row; None while a shard is missing.

        The number of steps is fixed, so the first sequence of the round that has states replaces a pack without any.
        Shards stay until their round ends, so the answer does not depend on when this is called.
        """
        number = self.round_of(rows[0])
        for candidates in chain([rows], ([row] for row in self.rounds[number])):
            if self.missing(candidates):
                return None
            if stored := self.with_states(candidates):
                return stored
        raise SafetyStop(f"02 has no states of any sample of round {number}; see {self.budget.hidden}/failures-*.jsonl")


class RoundOrder:
    """The training packs under a disk budget: `train.epochs` epochs over each round, each shuffled by the seed.

    `ends`: for each round, the number of optimizer steps after which its shards can be deleted.
    """

    def __init__(self, packs: FollowedPacks, settings: Train):
        self.epochs, each = settings.epochs, settings.packs_per_step
        self.packs: list[list[int]] = []
        borders = []  # packs until the end of each round
        for number, rows in enumerate(packs.rounds):
            for epoch in range(math.ceil(self.epochs)):
                seed = settings.seed * 1_000_003 + number * math.ceil(self.epochs) + epoch
                shuffled = pack_sequences(rows, packs.lengths, packs.pack_tokens, seed)
                self.packs += shuffled[: math.ceil(min(1.0, self.epochs - epoch) * len(shuffled))]
            borders.append(len(self.packs))
        steps = len(self.packs) // each
        if not steps:
            raise UserError(
                f"all rounds have {len(self.packs)} packs, too few for one step: lower --packs-per-step {each}"
            )
        self.ends = [min(math.ceil(border / each), steps) for border in borders]
        # The packs of a step are prefetched during the step before, whose rounds cannot be deleted yet.
        for step in range(steps):
            first, last = (bisect_right(borders, p) for p in (step * each, min(step + 2, steps) * each - 1))
            if last > first + 1:
                raise UserError(
                    f"two steps of {each} packs span all of round {first + 1} of {len(borders)}, but the disk budget "
                    "holds only two rounds: use a larger --window in 02, or a smaller --packs-per-step"
                )

    def at(self, number: int) -> tuple[float, list[int]]:
        """(epochs completed before it, index rows) of pack `number`."""
        return self.epochs * number / len(self.packs), self.packs[number]

    def count(self, epochs: float) -> int:
        """The number of packs in `epochs` epochs of all rounds."""
        return round(len(self.packs) * epochs / self.epochs)

    def rounds_done(self, step: int) -> int:
        """The number of rounds that training needs no more after `step`."""
        return sum(end <= step for end in self.ends)


class Follower:
    """Waits for the shards that 02 writes under a disk budget, and deletes those that training needs no more."""

    def __init__(self, budget: DiskBudget, index: Index, pack_tokens: int, settings: Train, ranks: Ranks):
        self.budget, self.ranks = budget, ranks
        self.packs = FollowedPacks(budget, index, pack_tokens)
        self.order = RoundOrder(self.packs, settings)

    def open(self, step: int, held_out: HeldOut) -> None:
        """Before the first step: delete the shards that a killed run left, and wait for the held-out shards.

        Raises UserError where shards that training still needs are deleted.
        """
        done, released = self.order.rounds_done(step), self.budget.released_rounds()
        if released > done:
            raise UserError(
                f"{released} rounds are trained on and deleted, but training resumes from step {step}, which needs "
                f"round {done}: restore the newer checkpoint, or start over with 02 --window --fresh"
            )
        self.release(step)
        rows = list(chain.from_iterable(held_out.schedule))
        if self.packs.missing(rows) and self.ranks.first:
            say("  waiting for 02 --window to write the held-out shards")
        while self.packs.missing(rows):
            time.sleep(POLL_S)
        held_out.schedule = [stored for rows in held_out.schedule if (stored := self.packs.with_states(rows))]

    def ready(self, wanted: Iterator[list[list[int]]], stop: StopSignal) -> Iterator[list[list[int]]]:
        """The index rows of each step's packs, once all ranks have their shards; ends early after a stop signal.

        All ranks wait together, in their main threads: a rank that trained alone would wait for the others in vain.
        """
        for step in wanted:
            announced = False
            while True:
                ready = [self.packs.ready(rows) for rows in step]
                waiting, asked = self.ranks.sum(torch.tensor([ready.count(None), int(stop.asked_here)])).tolist()
                if asked:
                    return
                if not waiting:
                    break
                if self.ranks.first and not announced:
                    say(f"  waiting for 02 --window to write round {self.packs.round_of(step[0][0])}")
                    announced = True
                time.sleep(POLL_S)
            yield ready

    def release(self, step: int) -> None:
        """Delete the shards of the rounds that training needs no more after `step`, which has a checkpoint."""
        if done := self.order.rounds_done(step):
            self.packs.states.cache_clear()  # a deleted file frees its disk space only when it is unmapped
            if self.ranks.first:
                self.budget.release(done, step)


def follow(hidden: Path, dataset: Manifest, asked: bool, fresh: bool) -> DiskBudget | None:
    """The disk budget of 02's folder, None where 02 keeps all shards; raises UserError where `--follow` does not fit.

    `dataset`: 03's manifest; `asked` and `fresh`: whether --follow and --fresh are set.
    """
    budget = find_disk_budget(hidden)
    if asked and not budget:
        raise UserError(f"--follow: {hidden} has no schedule of a disk budget; leave --follow out, or use 02 --window")
    if not budget:
        return None
    if not asked:
        raise UserError(f"{hidden} has a disk budget, made by 02 --window: train with --follow, while 02 runs")
    if dataset.fingerprint.get("shards") != digest({n: facts["sha256"] for n, facts in budget.schedule.files.items()}):
        raise UserError(f"{budget.folder} is not the schedule that 03 read: rerun 03")
    if fresh and (released := budget.released_rounds()):
        raise UserError(
            f"--fresh: {released} rounds of {hidden} are trained on and deleted, so training cannot start over; "
            "extract them again with 02 --window --fresh, then run 04 --follow --fresh"
        )
    return budget
