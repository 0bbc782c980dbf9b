"""A window over the states: where the disk cannot hold them all, 02 and 04 run side by side and share what fits.

    RUN/02_hidden/plan/shard-00000.safetensors ...   tokens and facts of every shard to come, no states; manifest.json
    RUN/02_hidden/plan/trained.json                  how many rounds are trained and deleted; only 04 writes it

    held out | round 0 | round 1 | round 2 | ...     the shards, in the order in which 02 makes them
      kept      deleted   04 is     02 is            two rounds fit in the window: one to train on, one to fill
                          here      here

The plan is made once, before the first state: 03 builds from it, and 04 knows its steps. 02 begins a round when it fits
beside those not yet deleted. 04 passes over a round as often as `train.epochs` says, checkpoints, notes the round in
trained.json, and only then deletes its shards; what a kill leaves between note and deletion, the next start deletes.
"""

import re
import time
from pathlib import Path

from common.pipeline.console import gb, say
from common.pipeline.errors import UserError
from common.pipeline.files import read_json, write_json
from common.pipeline.manifest import HIDDEN, MANIFEST, Manifest
from common.pipeline.settings import Dataset

STAGE, PLAN, TRAINED = HIDDEN, "plan", "trained.json"
SPLIT = ("holdout_share",)  # settings of [dataset] that a plan fixes
UNITS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4}
BINARY = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
POLL_S = 0.5


def parse_size(text: str) -> int:
    """Bytes of "500GB", "400GiB", "1.5 TB"; 0 of an empty text. Raises UserError for what is no size."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([kmgt]?)(i?)b", text.strip(), re.IGNORECASE)
    if not match and text:
        raise UserError(f"extract.window {text!r} is no size; write it as 500GB, 400GiB or 2TB")
    if not match:
        return 0
    size = int(float(match[1]) * (BINARY if match[3] else UNITS)[match[2].lower()])
    if not size:
        raise UserError(f"extract.window {text!r} holds nothing; leave it out to keep all shards")
    return size


def plan_rounds(sizes: list[int], window: int) -> list[int]:
    """The round of each shard, for their sizes in order: as many to a round as fit in half the window [bytes]."""
    largest = max(sizes, default=0)
    if largest > window // 2:
        raise UserError(
            f"half a window must hold a shard, and the largest has {gb(largest)}: a --window of at least "
            f"{gb(2 * largest, up=True)}, or a smaller --shard-gib"
        )
    rounds, room = [], window // 2
    number = 0
    for size in sizes:
        if size > room:
            number, room = number + 1, window // 2
        rounds.append(number)
        room -= size
    return rounds


def tokens_folder(hidden: Path) -> Path:
    """Where the tokens and facts of all shards are: the plan of a windowed run, else the shards themselves."""
    return hidden / PLAN if (hidden / PLAN / MANIFEST).exists() else hidden


def find_window(hidden: Path) -> "Window | None":
    """The window of stage 02's folder; None of an ordinary run."""
    return Window(hidden) if tokens_folder(hidden) != hidden else None


def released_shards(hidden: Path) -> set[str]:
    """Names of shards that are trained on and deleted, or about to be; none of an ordinary run."""
    window = find_window(hidden)
    return window.released() if window else set()


def check_split(shards: Manifest, settings: Dataset) -> None:
    """Raise UserError where a plan's held-out samples are not those of these settings; other runs have no plan."""
    planned = shards.settings.get("dataset", {})
    for key in SPLIT:
        if key in planned and planned[key] != getattr(settings, key):
            raise UserError(
                f"dataset.{key}: {planned[key]!r} in the window's plan, {getattr(settings, key)!r} now. The plan keeps "
                f"its held-out shards; use its value, or set it in the config and make the plan anew with 02 --fresh"
            )


class Window:
    """The plan of a windowed run as 02 wrote it, and how far training has come through it.

    `held_out`: names of the shards that are never deleted; `rounds`: names of each round's shards; `limit` [bytes].
    """

    def __init__(self, hidden: Path):
        self.hidden, self.folder = hidden, hidden / PLAN
        self.plan = Manifest.load(self.folder, STAGE)
        self.limit = parse_size(self.plan.settings["extract"]["window"])
        names = sorted(self.plan.files, key=lambda name: (len(name), name))
        self.held_out = [name for name in names if self.round_of(name) is None]
        self.rounds: list[list[str]] = [[] for _ in range(self.plan.counts["rounds"])]
        for name in names:
            if (number := self.round_of(name)) is not None:
                self.rounds[number].append(name)

    def round_of(self, name: str) -> int | None:
        """The round of a shard; None of a held-out one."""
        return self.plan.files[name]["round"]

    def bytes_of(self, names: list[str]) -> int:
        """What shards take once they have their states."""
        return sum(self.plan.files[name]["shard_bytes"] for name in names)

    def still_needs(self, todo: int) -> int:
        """Bytes that must be free for `todo` bytes of shards: at most what the window and the held-out ones lack."""
        there = sum(path.stat().st_size for path in self.hidden.glob("shard-*.safetensors"))
        return max(0, min(todo, self.limit + self.bytes_of(self.held_out) - there))

    def lines(self) -> list[tuple[str, str]]:
        """The plan, to be printed."""
        return window_lines(self.limit, list(map(self.bytes_of, self.rounds)), self.bytes_of(self.held_out))

    # ---- what is trained on ----

    def released_rounds(self) -> int:
        """How many rounds are trained on; their states are deleted or about to be."""
        path = self.folder / TRAINED
        return read_json(path)["rounds"] if path.exists() else 0

    def released(self) -> set[str]:
        """Names of their shards."""
        return {name for names in self.rounds[: self.released_rounds()] for name in names}

    def release(self, rounds: int, step: int) -> None:
        """Note the first `rounds` rounds as trained on, durably, then delete their shards. For 04's first rank alone.

        The note lies in plan/, since 02 clears its own folder of unfinished files whenever it starts.
        """
        if rounds > self.released_rounds():
            write_json(self.folder / TRAINED, {"rounds": rounds, "step": step})
        self.delete_released()

    def delete_released(self) -> None:
        """Delete what is noted and still there."""
        released = self.released()
        for path in self.hidden.glob("shard-*.safetensors"):
            if path.name in released:
                path.unlink(missing_ok=True)  # both sides may be at it

    def wait_for_room(self, number: int) -> None:
        """Return once round `number` fits in the window beside the rounds before it. Nothing is open meanwhile."""
        waiting = False
        while True:
            ahead = range(self.released_rounds(), number)
            taken = sum(self.bytes_of(self.rounds[r]) for r in ahead)
            if taken + self.bytes_of(self.rounds[number]) <= self.limit:
                return
            if not waiting:
                say(f"  {gb(taken)} of {gb(self.limit)} filled; waiting for 04 --follow to train on round {ahead[0]}")
                waiting = True
            time.sleep(POLL_S)


def window_lines(limit: int, rounds: list[int], held_out: int) -> list[tuple[str, str]]:
    """The plan, to be printed; sizes in bytes."""
    largest = f"at most {gb(max(rounds, default=0))} each, half of {gb(limit)}"
    return [("window", f"{len(rounds)} rounds, {largest}; and {gb(held_out)} held out, which stay")]
