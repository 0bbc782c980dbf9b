"""Stage 02 under a disk budget: the schedule, written once, and its rounds, each extracted once there is room for it.

Samples are shuffled by a hash of their ids: training sees one round at a time, and in the order of the records a round
could hold a single data set or topic. Held-out samples come first, in shards of their own.
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

from common.dataset.disk_budget import SCHEDULE, DiskBudget, assign_rounds, budget_rows, find_disk_budget, parse_size
from common.dataset.index import held_out
from common.dataset.shard_layout import ShardKind, shard_bytes
from common.dataset.shards import Shard
from common.dataset.stream import Stream
from common.extraction.loop import PendingShard, assign_shards
from common.extraction.streams import RecordLocation, StreamReader
from common.pipeline.command_line import Settings
from common.pipeline.errors import UserError
from common.pipeline.files import atomic_folder, digest
from common.pipeline.manifest import HIDDEN, Manifest


def open_disk_budget(
    folder: Path,
    reader: StreamReader,
    locations: list[RecordLocation],
    kind: ShardKind,
    settings: Settings,
    fingerprint: dict,
) -> DiskBudget:
    """The disk budget of this run. Writes the schedule if there is none, deletes shards that are trained on.

    Raises UserError where half the budget cannot hold a shard, or the schedule is of other samples.
    """
    if not find_disk_budget(folder):
        _write_schedule(folder, reader, locations, kind, settings, fingerprint)
    budget = DiskBudget(folder)
    if budget.schedule.counts["samples"] != _samples_digest(locations):
        raise UserError(
            f"{budget.folder} schedules {budget.schedule.counts['sequences']} samples; the {len(locations)} of this "
            "run are other ones, or have other replies. The schedule is fixed: use the same records and --n to resume, "
            "or --fresh to start over"
        )
    budget.delete_released()
    return budget


def pending_rounds(
    budget: DiskBudget, locations: list[RecordLocation], manifest: Manifest
) -> Iterator[list[PendingShard]]:
    """The shards that are still to be extracted: the held-out ones, then each round once it fits in the budget.

    It waits before a round starts, never inside it: otherwise 02 could block on 04 while 04 blocks on 02 (deadlock).
    """
    by_id = {location.id: location for location in locations}
    for number, names in enumerate([budget.held_out, *budget.rounds], -1):
        missing = [name for name in names if name not in manifest.files]
        if missing and number >= 0:
            budget.wait_for_room(number)
        released = budget.released_shards()  # read after the wait: 04 may have trained on a damaged shard's round
        pending = [
            PendingShard(name, [by_id[facts["id"]] for facts in Shard(budget.folder / name).facts])
            for name in missing
            if name not in released
        ]
        if pending:
            yield pending
    budget.delete_released()  # 04 may have ended before the last round was written: its last packs fill no step


def schedule_rows(
    folder: Path, locations: list[RecordLocation], kind: ShardKind, settings: Settings
) -> list[tuple[str, str]]:
    """Table rows that describe the schedule. If it is not written yet, sizes are estimated without shard headers."""
    if not settings.fresh and (budget := find_disk_budget(folder)):
        return budget.lines()
    limit = parse_size(settings.extract.window)
    held_out_sizes, sizes = (
        [kind.bytes_per_token() * sum(location.tokens for location in shard.locations) for shard in shards]
        for shards in _split_shards(locations, kind, settings)
    )
    rounds = assign_rounds(sizes, limit)
    totals = [sum(s for s, r in zip(sizes, rounds, strict=True) if r == number) for number in sorted(set(rounds))]
    return budget_rows(limit, totals, sum(held_out_sizes))


def _split_shards(
    locations: list[RecordLocation], kind: ShardKind, settings: Settings
) -> tuple[list[PendingShard], list[PendingShard]]:
    """(held-out shards, training shards), numbered in this order."""
    shuffled = sorted(locations, key=lambda location: hashlib.sha256(location.id.encode()).digest())
    groups: dict[bool, list[RecordLocation]] = {True: [], False: []}
    for location in shuffled:
        groups[held_out(location.question, settings.dataset)].append(location)
    first = assign_shards(groups[True], kind, settings.extract.shard_gib, 0)
    return first, assign_shards(groups[False], kind, settings.extract.shard_gib, len(first))


def _write_schedule(
    folder: Path,
    reader: StreamReader,
    locations: list[RecordLocation],
    kind: ShardKind,
    settings: Settings,
    fingerprint: dict,
) -> None:
    held_out_shards, shards = _split_shards(locations, kind, settings)
    split = {"dataset": {"holdout_share": settings.dataset.holdout_share}}  # 03 must hold out the same samples
    schedule = Manifest(HIDDEN, fingerprint, settings.as_dict() | split)
    with atomic_folder(folder / SCHEDULE) as temporary:
        for shard in held_out_shards + shards:
            streams = list(reader.load(shard.locations))
            _write_tokens(temporary / shard.name, streams, kind)
            sizes = {"tokens": sum(map(len, streams)), "shard_bytes": shard_bytes(kind, streams)}
            schedule.add_file(temporary, shard.name, sequences=len(streams), round=None, **sizes)
        files = [schedule.files[shard.name] for shard in shards]
        rounds = assign_rounds([file["shard_bytes"] for file in files], parse_size(settings.extract.window))
        for file, number in zip(files, rounds, strict=True):
            file["round"] = number
        schedule.counts = {
            "sequences": len(locations),
            "tokens": sum(location.tokens for location in locations),
            "rounds": len(set(rounds)),
            "samples": _samples_digest(locations),
        }
        schedule.complete = True
        schedule.save(temporary)


def _write_tokens(path: Path, streams: list[Stream], kind: ShardKind) -> None:
    """A shard without its states, which common/dataset/shards.py can open: tokens, masks and facts."""
    tensors = {
        "input_ids": torch.cat([torch.frombuffer(s.ids, dtype=torch.int32) for s in streams]),
        "loss_mask": torch.cat([torch.frombuffer(s.mask, dtype=torch.uint8) for s in streams]),
        "offsets": torch.tensor([0] + [len(s) for s in streams]).cumsum(0),
    }
    save_file(tensors, path, kind.shard_metadata(streams))


def _samples_digest(locations: list[RecordLocation]) -> str:
    """A hash of every sample's id, length and tokens."""
    return digest({location.id: [location.tokens, location.crc] for location in locations})
