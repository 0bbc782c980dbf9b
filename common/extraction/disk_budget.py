"""Stage 02's side of a window: the plan, made once, and its rounds, each as soon as there is room for it.

The samples are shuffled by a hash of their ids, since a round is all that training sees for a while: in the order of
the records it could be one data set's, or one topic's. Held-out samples come first, in shards of their own.
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

from common.dataset.disk_budget import PLAN, SPLIT, STAGE, Window, find_window, parse_size, plan_rounds, window_lines
from common.dataset.index import held_out
from common.dataset.shard_layout import ShardKind, shard_bytes
from common.dataset.shards import Shard
from common.dataset.stream import Stream
from common.extraction.loop import ShardPlan, plan_shards
from common.extraction.streams import Place, StreamReader
from common.pipeline.command_line import Settings
from common.pipeline.errors import UserError
from common.pipeline.files import atomic_folder, digest
from common.pipeline.manifest import Manifest
from common.pipeline.settings import Dataset


def open_window(
    folder: Path, reader: StreamReader, places: list[Place], kind: ShardKind, settings: Settings, fingerprint: dict
) -> Window:
    """The window of this run, its plan made where there is none, what was left to delete deleted.

    Raises UserError where half a window cannot hold a shard, or the plan is of other samples.
    """
    if not find_window(folder):
        _write_plan(folder, reader, places, kind, settings, fingerprint)
    window, samples = Window(folder), _samples(places)
    if window.plan.counts["samples"] != samples:
        raise UserError(
            f"{folder / PLAN} is the plan of {window.plan.counts['sequences']} samples, now there are {len(places)}, "
            "or others, or other replies: the plan of a window is fixed. Use the same records and --n to resume, or "
            "--fresh to plan anew"
        )
    window.delete_released()
    return window


def rounds_to_come(window: Window, places: list[Place], manifest: Manifest) -> Iterator[list[ShardPlan]]:
    """The shards that are still to be extracted: the held-out ones, then each round, once it fits in the window.

    Whole rounds and not shards: an extractor must never be kept waiting with streams that it holds, for 04 may wait for
    their shard.
    """
    by_id = {place.id: place for place in places}
    for number, names in enumerate([window.held_out, *window.rounds], -1):
        todo = [name for name in names if name not in manifest.files]
        if todo and number >= 0:
            window.wait_for_room(number)
        released = window.released()  # a damaged shard's round may have been trained on meanwhile
        plans = [ShardPlan(n, [by_id[f["id"]] for f in Shard(window.folder / n).facts]) for n in todo]
        if plans := [plan for plan in plans if plan.name not in released]:
            yield plans
    window.delete_released()  # what was written when 04 had ended already: its last packs may fill no step


def planned_lines(folder: Path, places: list[Place], kind: ShardKind, settings: Settings) -> list[tuple[str, str]]:
    """The plan that is there or would be made, to be printed; headers of shards are not in what is not there yet."""
    if not settings.fresh and (window := find_window(folder)):
        return window.lines()
    groups, limit = _shards(places, kind, settings), parse_size(settings.extract.window)
    kept, trained = ([kind.bytes_per_token() * sum(p.tokens for p in s.places) for s in shards] for shards in groups)
    rounds = plan_rounds(trained, limit)
    sizes = [sum(s for s, r in zip(trained, rounds, strict=True) if r == number) for number in sorted(set(rounds))]
    return window_lines(limit, sizes, sum(kept))


def _shards(places: list[Place], kind: ShardKind, settings: Settings) -> tuple[list[ShardPlan], list[ShardPlan]]:
    """(held-out shards, training shards), numbered in this order."""
    dataset: Dataset = settings.dataset
    shuffled = sorted(places, key=lambda place: hashlib.sha256(place.id.encode()).digest())
    kept = [place for place in shuffled if held_out(place.question, dataset)]
    trained = [place for place in shuffled if not held_out(place.question, dataset)]
    first = plan_shards(kept, kind, settings.extract.shard_gib, 0)
    return first, plan_shards(trained, kind, settings.extract.shard_gib, len(first))


def _write_plan(
    folder: Path, reader: StreamReader, places: list[Place], kind: ShardKind, settings: Settings, fingerprint: dict
) -> None:
    """Write the plan's files into a folder that gets its name when it is whole."""
    kept, trained = _shards(places, kind, settings)
    split = {key: getattr(settings.dataset, key) for key in SPLIT}
    plan = Manifest(STAGE, fingerprint, settings.as_dict() | {"dataset": split})
    with atomic_folder(folder / PLAN) as temporary:
        for shard in kept + trained:
            streams = list(reader.load(iter(shard.places)))
            _write_tokens(temporary / shard.name, streams, kind)
            sizes = {"tokens": sum(map(len, streams)), "shard_bytes": shard_bytes(kind, streams)}
            plan.add_file(temporary, shard.name, sequences=len(streams), round=None, **sizes)
        names = [shard.name for shard in trained]
        rounds = plan_rounds([plan.files[name]["shard_bytes"] for name in names], parse_size(settings.extract.window))
        for name, number in zip(names, rounds, strict=True):
            plan.files[name]["round"] = number
        tokens = sum(place.tokens for place in places)
        plan.counts = {
            "sequences": len(places),
            "tokens": tokens,
            "rounds": len(set(rounds)),
            "samples": _samples(places),
        }
        plan.complete = True
        plan.save(temporary)


def _write_tokens(path: Path, streams: list[Stream], kind: ShardKind) -> None:
    """What a shard says of its sequences, without states: common/dataset/shards.py reads it as one."""
    tensors = {
        "input_ids": torch.cat([torch.frombuffer(s.ids, dtype=torch.int32) for s in streams]),
        "loss_mask": torch.cat([torch.frombuffer(s.mask, dtype=torch.uint8) for s in streams]),
        "offsets": torch.tensor([0] + [len(s) for s in streams]).cumsum(0),
    }
    save_file(tensors, path, kind.shard_metadata(streams))


def _samples(places: list[Place]) -> str:
    """What a plan is of: every sample, its length and its tokens."""
    return digest({place.id: [place.tokens, place.crc] for place in places})
