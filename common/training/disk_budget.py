"""Stage 04's side of a window: packs whose shards come and go, in an order that is known before any of them is there.

    round 0: epoch 1, 2, 3 | round 1: epoch 1, 2, 3 | ...     packs are drawn inside a round, never across two

Tokens and facts are read from the plan, states from the shards that 02 has entered in its manifest. There a sequence is
found by its id, since 02 leaves out those whose states it could not have.
"""

import math
import time
from bisect import bisect_right
from collections.abc import Iterator
from functools import lru_cache
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
    """Packs of a windowed run. `rounds`: the training rows of each round, in the order of the index."""

    def __init__(self, window: DiskBudget, index: Index, pack_tokens: int):
        super().__init__(window.folder, index, pack_tokens)  # the plan: lengths, facts, token pairs
        self.window = window
        self.round_of = [window.round_of(index.shards[shard]) for shard in index.shard.tolist()]
        self.rounds: list[list[int]] = [[] for _ in window.rounds]
        for row in index.rows(TRAIN):
            self.rounds[self.round_of[row]].append(row)
        self.written: set[str] = set()
        self._states = lru_cache(maxsize=64)(self._open)

    def _open(self, name: str) -> tuple[Shard, dict[str, int]]:
        """(a shard with states, the number of each sample that it has)."""
        shard = Shard(self.window.hidden / name)
        return shard, {facts["id"]: number for number, facts in enumerate(shard.facts)}

    def find(self, row: int) -> tuple[Shard, int]:
        shard, numbers = self._states(self._name(row))
        return shard, numbers[self.facts(row)["id"]]

    def _name(self, row: int) -> str:
        return self.index.shards[int(self.index.shard[row])]

    def _has_states(self, row: int) -> bool:
        return self.facts(row)["id"] in self._states(self._name(row))[1]

    def missing(self, rows: list[int]) -> set[str]:
        """Shards of these rows that 02 has yet to write."""
        names = {self._name(row) for row in rows}
        if names - self.written:
            self.written = set(Manifest.load(self.window.hidden, HIDDEN).files)
        return names - self.written

    def with_states(self, rows: list[int]) -> list[int]:
        """Those of these rows whose states 02 could have; no shard of theirs is missing."""
        return [row for row in rows if self._has_states(row)]

    def ready(self, rows: list[int]) -> list[int] | None:
        """What to load for a training pack, at least one row; None while a shard is missing.

        Where 02 lost a whole pack, the round's first sequence that it has stands in: the number of steps is fixed. All
        of a round stays until its end, so the answer does not depend on when it is asked for.
        """
        if self.missing(rows):
            return None
        if kept := self.with_states(rows):
            return kept
        number = self.round_of[rows[0]]
        for row in self.rounds[number]:
            if self.missing([row]):
                return None
            if self._has_states(row):
                return [row]
        raise SafetyStop(f"02 has no states of any sample of round {number}; see {self.window.hidden}/failures-*.jsonl")

    def close_shards(self) -> None:
        """Let go of mapped files: the disk has the room of a deleted one only then."""
        self._states.cache_clear()


class RoundOrder:
    """The training packs of a windowed run: so many epochs over each round, every one shuffled by the seed.

    `ends`: the optimizer step after which each round is not needed any more.
    """

    def __init__(self, packs: FollowedPacks, settings: Train):
        self.epochs, each = settings.epochs, settings.packs_per_step
        self.packs: list[list[int]] = []
        borders = []  # packs until each round's end
        for number, rows in enumerate(packs.rounds):
            for epoch in range(math.ceil(self.epochs)):
                seed = settings.seed * 1_000_003 + number * math.ceil(self.epochs) + epoch
                plan = pack_sequences(rows, packs.lengths, packs.pack_tokens, seed)
                self.packs += plan[: math.ceil(min(1.0, self.epochs - epoch) * len(plan))]
            borders.append(len(self.packs))
        steps = len(self.packs) // each
        if not steps:
            raise UserError(
                f"{len(self.packs)} packs in all rounds are less than a step of --packs-per-step {each}: lower it"
            )
        self.ends = [min(math.ceil(border / each), steps) for border in borders]
        # The packs of a step are read while the step before is computed, and its rounds can't be deleted yet.
        for step in range(steps):
            ends = step * each, min(step + 2, steps) * each - 1
            first, last = (bisect_right(borders, pack) for pack in ends)
            if last > first + 1:
                raise UserError(
                    f"two steps of {each} packs reach over round {first + 1} of {len(borders)}, and only two rounds "
                    "fit in the window: a larger --window in 02, or a smaller --packs-per-step"
                )

    def at(self, number: int) -> tuple[float, list[int]]:
        """(epochs done before it, rows) of pack `number`."""
        return self.epochs * number / len(self.packs), self.packs[number]

    def count(self, epochs: float) -> int:
        """Packs in so many epochs of all rounds."""
        return round(len(self.packs) * epochs / self.epochs)

    def rounds_done(self, step: int) -> int:
        """How many rounds are not needed after `step`."""
        return sum(end <= step for end in self.ends)


class Follower:
    """What a windowed run does beside an ordinary one: waits for shards, and releases those it is through with."""

    def __init__(self, window: DiskBudget, index: Index, pack_tokens: int, settings: Train, ranks: Ranks):
        self.window, self.ranks = window, ranks
        self.packs = FollowedPacks(window, index, pack_tokens)
        self.order = RoundOrder(self.packs, settings)

    def open(self, step: int, held_out: HeldOut) -> None:
        """Before the first step: raise UserError where shards that are needed again are deleted, delete what a kill
        left, wait for the held-out shards."""
        done, released = self.order.rounds_done(step), self.window.released_rounds()
        if released > done:
            raise UserError(
                f"{released} rounds were trained on and deleted, but training goes on from step {step}, which needs "
                f"round {done}: put the newer checkpoint back, or start over with 02 --window --fresh"
            )
        self.release(step)
        if self.ranks.first and any(map(self.packs.missing, held_out.schedule)):
            say("  waiting for 02 --window to write the held-out shards")
        while any(map(self.packs.missing, held_out.schedule)):
            time.sleep(POLL_S)
        held_out.schedule = [kept for rows in held_out.schedule if (kept := self.packs.with_states(rows))]

    def ready(self, wanted: Iterator[list[list[int]]], stop: StopSignal) -> Iterator[list[list[int]]]:
        """The rows of each step's packs, once all ranks' shards are there; ends early when a stop is asked for.

        In the main thread, in step on all ranks: a rank alone would train while another one still asks.
        """
        for step in wanted:
            told = False
            while True:
                ready = [self.packs.ready(rows) for rows in step]
                waiting, asked = self.ranks.sum(torch.tensor([ready.count(None), int(stop.asked_here)])).tolist()
                if asked:
                    return
                if not waiting:
                    break
                if self.ranks.first and not told:
                    say(f"  waiting for 02 --window to write round {self.packs.round_of[step[0][0]]}")
                    told = True
                time.sleep(POLL_S)
            yield ready

    def release(self, step: int) -> None:
        """Delete the shards of the rounds that are done at a checkpointed step."""
        if (done := self.order.rounds_done(step)) == 0:
            return
        self.packs.close_shards()
        if self.ranks.first:
            self.window.release(done, step)


def follow(hidden: Path, dataset: Manifest, asked: bool, fresh: bool) -> DiskBudget | None:
    """The window that 04 is to follow, None of an ordinary run; raises UserError where `--follow` does not fit.

    `dataset`: 03's manifest; `fresh`: whether 04 is to start over.
    """
    window = find_disk_budget(hidden)
    if asked and not window:
        raise UserError(f"--follow: {hidden} has no plan of a window; leave --follow out, or extract with 02 --window")
    if window and not asked:
        raise UserError(f"{hidden} is a window over the shards, made by 02 --window: train with --follow, beside 02")
    planned = window and digest({name: facts["sha256"] for name, facts in window.schedule.files.items()})
    if window and dataset.fingerprint.get("shards") != planned:
        raise UserError(f"{window.folder} is not the plan that 03 read: rerun 03")
    if window and fresh and window.released_rounds():
        raise UserError(
            f"--fresh: {window.released_rounds()} rounds of {hidden} are trained on and deleted, so training can't "
            "start over; make them again with 02 --window --fresh, then 04 --follow --fresh"
        )
    return window
