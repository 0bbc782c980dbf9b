"""Stage 04's side of a disk budget: packs whose shards come and go, in an order that is fixed before 02 writes any.

    round 0: epoch 1, 2, 3 | round 1: epoch 1, 2, 3 | ...     packs are drawn inside a round, never across two

Tokens and facts are read from 02's layout of all shards, states from the shards in 02's manifest. A sequence is found
there by its id, since 02 leaves out sequences whose extraction failed.
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
    """Packs under a disk budget. `rounds`: the training rows of each round, in the order of the index."""

    def __init__(self, window: DiskBudget, index: Index, pack_tokens: int):
        super().__init__(window.folder, index, pack_tokens)  # the layout: lengths, facts, token pairs
        self.window = window
        self.round_of = [window.round_of(index.shards[shard]) for shard in index.shard.tolist()]
        self.rounds: list[list[int]] = [[] for _ in window.rounds]
        for row in index.rows(TRAIN):
            self.rounds[self.round_of[row]].append(row)
        self.written: set[str] = set()
        self._states = lru_cache(maxsize=64)(self._open)

    def _open(self, name: str) -> tuple[Shard, dict[str, int]]:
        """(a shard with states, the number of each of its samples by id)."""
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
        """Shards of these rows that 02 has not written yet."""
        names = {self._name(row) for row in rows}
        if names - self.written:
            self.written = set(Manifest.load(self.window.hidden, HIDDEN).files)
        return names - self.written

    def with_states(self, rows: list[int]) -> list[int]:
        """Those of these rows whose states were extracted; all of their shards must be written."""
        return [row for row in rows if self._has_states(row)]

    def ready(self, rows: list[int]) -> list[int] | None:
        """The rows to load for a training pack, at least one; None while a shard is missing.

        If extraction failed for a whole pack, the round's first sequence with states replaces it, since the number of
        steps is fixed. Shards stay until their round's end, so the answer does not depend on the time of the call.
        """
        if self.missing(rows):
            return None
        if usable := self.with_states(rows):
            return usable
        number = self.round_of[rows[0]]
        for row in self.rounds[number]:
            if self.missing([row]):
                return None
            if self._has_states(row):
                return [row]
        raise SafetyStop(f"02 has no states of any sample of round {number}; see {self.window.hidden}/failures-*.jsonl")

    def close_shards(self) -> None:
        """Close mapped files: a deleted file frees its disk space only then."""
        self._states.cache_clear()


class RoundOrder:
    """The training packs under a disk budget: all epochs over a round, each shuffled by the seed, then the next round.

    `ends`: the optimizer step after which each round is no longer needed.
    """

    def __init__(self, packs: FollowedPacks, settings: Train):
        self.epochs, each = settings.epochs, settings.packs_per_step
        self.packs: list[list[int]] = []
        borders = []  # packs until each round's end
        for number, rows in enumerate(packs.rounds):
            for epoch in range(math.ceil(self.epochs)):
                seed = settings.seed * 1_000_003 + number * math.ceil(self.epochs) + epoch
                epoch_packs = pack_sequences(rows, packs.lengths, packs.pack_tokens, seed)
                self.packs += epoch_packs[: math.ceil(min(1.0, self.epochs - epoch) * len(epoch_packs))]
            borders.append(len(self.packs))
        steps = len(self.packs) // each
        if not steps:
            raise UserError(
                f"all rounds together have {len(self.packs)} packs, fewer than one step takes: "
                f"lower --packs-per-step {each}"
            )
        self.ends = [min(math.ceil(border / each), steps) for border in borders]
        # The packs of a step are prefetched while the step before it runs, when their rounds must not be deleted yet.
        for step in range(steps):
            ends = step * each, min(step + 2, steps) * each - 1
            first, last = (bisect_right(borders, pack) for pack in ends)
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
        """The number of rounds that are no longer needed after `step`."""
        return sum(end <= step for end in self.ends)


class Follower:
    """Waits for the shards of each step, and deletes the shards of rounds that are trained."""

    def __init__(self, window: DiskBudget, index: Index, pack_tokens: int, settings: Train, ranks: Ranks):
        self.window, self.ranks = window, ranks
        self.packs = FollowedPacks(window, index, pack_tokens)
        self.order = RoundOrder(self.packs, settings)

    def open(self, step: int, held_out: HeldOut) -> None:
        """Before the first step: delete shards that a killed run left, wait for the held-out shards.

        Raises UserError if shards that this step needs are deleted already.
        """
        done, released = self.order.rounds_done(step), self.window.released_rounds()
        if released > done:
            raise UserError(
                f"{released} rounds are trained on and deleted, but training resumes from step {step}, which needs "
                f"round {done}: put the newer checkpoint back, or start over with 02 --window --fresh"
            )
        self.release(step)
        if self.ranks.first and any(map(self.packs.missing, held_out.schedule)):
            say("  waiting for 02 --window to write the held-out shards")
        while any(map(self.packs.missing, held_out.schedule)):
            time.sleep(POLL_S)
        held_out.schedule = [usable for rows in held_out.schedule if (usable := self.packs.with_states(rows))]

    def ready(self, wanted: Iterator[list[list[int]]], stop: StopSignal) -> Iterator[list[list[int]]]:
        """The rows of each step's packs, once the shards of all ranks are written; ends early on a stop signal.

        Runs in the main thread with one all-reduce per poll, so that all ranks start a step together.
        """
        for step in wanted:
            message_shown = False
            while True:
                ready = [self.packs.ready(rows) for rows in step]
                waiting, asked = self.ranks.sum(torch.tensor([ready.count(None), int(stop.asked_here)])).tolist()
                if asked:
                    return
                if not waiting:
                    break
                if self.ranks.first and not message_shown:
                    say(f"  waiting for 02 --window to write round {self.packs.round_of[step[0][0]]}")
                    message_shown = True
                time.sleep(POLL_S)
            yield ready

    def release(self, step: int) -> None:
        """Delete the shards of the rounds that are no longer needed after a checkpointed step."""
        if (done := self.order.rounds_done(step)) == 0:
            return
        self.packs.close_shards()
        if self.ranks.first:
            self.window.release(done, step)


def follow(hidden: Path, dataset: Manifest, asked: bool, fresh: bool) -> DiskBudget | None:
    """The disk budget of this run, None of a run without; raises UserError where `--follow` contradicts it.

    `dataset`: 03's manifest; `fresh`: whether 04 starts over.
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
