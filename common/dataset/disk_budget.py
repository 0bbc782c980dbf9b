"""A disk budget: where the disk cannot hold all states, 02 --window and 04 --follow run side by side and share it.

    RUN/02_hidden/plan/shard-00000.safetensors ...   tokens and facts of every shard to come, no states; manifest.json
    RUN/02_hidden/plan/trained.json                  how many rounds are trained on; only 04 writes it

    held out | round 0 | round 1 | round 2 | ...     the shards, in the order in which 02 writes them
     stays     deleted   04 trains  02 writes        two rounds fit in the budget: one to train on, one to fill

The schedule (the files above) is fixed before the first state: 03 builds from it, and 04 knows its steps. 02 begins a
round once it fits beside those not yet deleted. 04 trains `train.epochs` epochs on a round, writes a checkpoint, notes
the round in trained.json, and only then deletes its shards; after a kill, the next start deletes what was noted.
"""

import re
import time
from pathlib import Path

from common.pipeline.console import gb, say
from common.pipeline.errors import UserError
from common.pipeline.files import read_json, write_json
from common.pipeline.manifest import HIDDEN, MANIFEST, Manifest
from common.pipeline.settings import Dataset

SCHEDULE, TRAINED = "plan", "trained.json"
POLL_S = 0.5


def parse_size(text: str) -> int:
    """Bytes of "500GB", "400GiB", "1.5 TB"; 0 for an empty text. Raises UserError for anything else."""
    if not text:
        return 0
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([kmgt]?)(i?)b", text.strip(), re.IGNORECASE)
    size = int(float(match[1]) * (1024 if match[3] else 1000) ** " kmgt".index(match[2].lower() or " ")) if match else 0
    if not size:
        raise UserError(f"extract.window {text!r} is not a valid size; expected for example 500GB, 400GiB or 2TB")
    return size


def assign_rounds(sizes: list[int], budget: int) -> list[int]:
    """The round of each shard, for their sizes in order: a round is as many as fit in half the budget [bytes]."""
    largest = max(sizes, default=0)
    if largest > budget // 2:
        raise UserError(
            f"half the disk budget must hold a shard, and the largest has {gb(largest)}; use a --window of at least "
            f"{gb(2 * largest, up=True)}, or a smaller --shard-gib"
        )
    rounds, number, room = [], 0, budget // 2
    for size in sizes:
        if size > room:
            number, room = number + 1, budget // 2
        rounds.append(number)
        room -= size
    return rounds


def tokens_folder(hidden: Path) -> Path:
    """The folder with the tokens and facts of all shards: the schedule under a disk budget, else the shards' folder."""
    return hidden / SCHEDULE if (hidden / SCHEDULE / MANIFEST).exists() else hidden


def find_disk_budget(hidden: Path) -> "DiskBudget | None":
    """The disk budget of stage 02's folder; None for a run that keeps all shards."""
    return DiskBudget(hidden) if tokens_folder(hidden) != hidden else None


def check_split(shards: Manifest, settings: Dataset) -> None:
    """Raise UserError where a schedule holds out other samples than these settings do."""
    scheduled = shards.settings.get("dataset")  # only a schedule has this section
    if scheduled and scheduled["holdout_share"] != settings.holdout_share:
        raise UserError(
            f"dataset.holdout_share: {scheduled['holdout_share']!r} in the schedule of 02 --window, "
            f"{settings.holdout_share!r} now. The held-out shards are fixed: use the same value, or rerun 02 --fresh"
        )


class DiskBudget:
    """The schedule that 02 wrote, and how many of its rounds are trained on.

    `held_out`: names of the shards that are never deleted; `rounds`: names of each round's shards; `limit` [bytes].
    """

    def __init__(self, hidden: Path):
        self.hidden, self.folder = hidden, hidden / SCHEDULE
        self.schedule = Manifest.load(self.folder, HIDDEN)
        self.limit = parse_size(self.schedule.settings["extract"]["window"])
        names = sorted(self.schedule.files, key=lambda name: (len(name), name))
        self.held_out = [name for name in names if self.round_of(name) is None]
        self.rounds: list[list[str]] = [[] for _ in range(self.schedule.counts["rounds"])]
        for name in names:
            if (number := self.round_of(name)) is not None:
                self.rounds[number].append(name)

    def round_of(self, name: str) -> int | None:
        """The round of a shard; None for a held-out one."""
        return self.schedule.files[name]["round"]

    def bytes_of(self, names: list[str]) -> int:
        """Size of these shards with their states."""
        return sum(self.schedule.files[name]["shard_bytes"] for name in names)

    def free_bytes_needed(self, remaining: int) -> int:
        """Bytes that must be free to write `remaining` bytes of shards without ever exceeding the budget."""
        stored = sum(path.stat().st_size for path in self.hidden.glob("shard-*.safetensors"))
        return max(0, min(remaining, self.limit + self.bytes_of(self.held_out) - stored))

    def lines(self) -> list[tuple[str, str]]:
        """The schedule as table rows."""
        return budget_rows(self.limit, list(map(self.bytes_of, self.rounds)), self.bytes_of(self.held_out))

    # ---- rounds that are trained on ----

    def released_rounds(self) -> int:
        """The number of rounds that are trained on; their shards are deleted or will be next."""
        path = self.folder / TRAINED
        return read_json(path)["rounds"] if path.exists() else 0

    def released_shards(self) -> set[str]:
        """Names of the shards of all rounds that are trained on."""
        return {name for names in self.rounds[: self.released_rounds()] for name in names}

    def release(self, rounds: int, step: int) -> None:
        """Note the first `rounds` rounds as trained on, durably, then delete their shards. Only rank 0 of 04 calls it.

        The note lies beside the schedule, since 02 clears its own folder of unfinished files whenever it starts.
        """
        if rounds > self.released_rounds():
            write_json(self.folder / TRAINED, {"rounds": rounds, "step": step})
        self.delete_released()

    def delete_released(self) -> None:
        """Delete the shards of all rounds that are noted as trained on."""
        released = self.released_shards()
        for path in self.hidden.glob("shard-*.safetensors"):
            if path.name in released:
                path.unlink(missing_ok=True)  # 02 and 04 may both delete it

    def wait_for_room(self, number: int) -> None:
        """Return once round `number` fits in the disk budget together with the earlier rounds that are not yet deleted.

        Call it with no shard file open, so that deleted files free their disk space.
        """
        announced = False
        while True:
            waiting = range(self.released_rounds(), number)
            taken = sum(self.bytes_of(self.rounds[r]) for r in waiting)
            if taken + self.bytes_of(self.rounds[number]) <= self.limit:
                return
            if not announced:
                say(f"  {gb(taken)} of {gb(self.limit)} filled; waiting for 04 --follow to train on round {waiting[0]}")
                announced = True
            time.sleep(POLL_S)


def budget_rows(limit: int, rounds: list[int], held_out: int) -> list[tuple[str, str]]:
    """A schedule as table rows, from sizes in bytes."""
    largest = f"at most {gb(max(rounds, default=0))} each, half of {gb(limit)}"
    return [("disk budget", f"{len(rounds)} rounds, {largest}; and {gb(held_out)} held out, which stay")]
