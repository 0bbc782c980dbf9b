"""A stage split over nodes: `--part 2/3` does a third of the samples, chosen by their ids, in a folder of its own.

    RUN/01_synthetic/part-1-of-3/{manifest.json, part-00000.jsonl, ...}    RUN/01_synthetic/part-2-of-3/...

Nothing is merged on disk: the next stage reads the parts as one stage through `load_stage`, whose manifest names files
as `part-1-of-3/part-00000.jsonl`. The samples are those of an unsplit run, whatever the number of parts.
"""

import re
from pathlib import Path
from typing import NamedTuple

from common.pipeline.errors import UserError
from common.pipeline.manifest import MANIFEST, Manifest, check_fingerprint

FOLDER = re.compile(r"part-(\d+)-of-(\d+)")
HELP = "I/N: only this share of the samples, in a folder of its own; the next stage reads all N as one"


class Part(NamedTuple):
    """Share `number` (from 1) of `count`."""

    number: int
    count: int

    def holds(self, id: str) -> bool:
        """Whether a sample belongs to this share; ids are hex digests, so the shares are even."""
        return int(id, 16) % self.count == self.number - 1


WHOLE = Part(1, 1)


def parse_part(text: str | None) -> Part:
    """The share that `--part` names; raises UserError for one that is none."""
    if text is None:
        return WHOLE
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if not match or not 1 <= int(match[1]) <= int(match[2]):
        raise UserError(f"--part {text}: must be I/N with 1 <= I <= N, as in --part 2/3")
    return Part(int(match[1]), int(match[2]))


def stage_folder(stage: Path, part: Part) -> Path:
    """Where this share's files go; raises UserError where the stage is there in another split."""
    counts = {count for count, _ in _parts(stage)} | ({1} if (stage / MANIFEST).exists() else set())
    if counts - {part.count}:
        there = "as one" if 1 in counts else f"in {max(counts - {part.count})} parts"
        wanted = "as one" if part.count == 1 else f"in {part.count}"
        raise UserError(f"{stage} was made {there}, not {wanted}; go on in that split, or use another --run-dir")
    return stage if part.count == 1 else stage / f"part-{part.number}-of-{part.count}"


def load_stage(folder: Path, stage: str) -> Manifest:
    """The manifest of a stage, its parts as one; raises UserError for a part that is missing or of other settings."""
    parts = _parts(folder)
    if not parts or (folder / MANIFEST).exists():
        return Manifest.load(folder, stage)
    count = max(count for count, _ in parts)
    missing = [number for number in range(1, count + 1) if not (folder / f"part-{number}-of-{count}").is_dir()]
    if missing or len(parts) != count:
        lost = ", ".join(f"part-{number}-of-{count}" for number in missing) or "parts of one split only"
        raise UserError(f"{folder} lacks {lost}; run them with --part, or copy them here")
    merged = None
    for _, path in parts:
        manifest = Manifest.load(path, stage)
        files = {f"{path.name}/{name}": facts for name, facts in manifest.files.items()}
        if merged is None:
            merged = manifest
            merged.files = files
            continue
        check_fingerprint(path, manifest.fingerprint, merged.fingerprint)
        merged.files |= files
        merged.complete &= manifest.complete
        merged.counts = _sum(merged.counts, manifest.counts)
    return merged


def stage_files(folder: Path, pattern: str) -> list[Path]:
    """The files of a stage in their order, those of its parts after one another."""
    return [path for place in (folder, *(part for _, part in _parts(folder))) for path in sorted(place.glob(pattern))]


def _parts(folder: Path) -> list[tuple[int, Path]]:
    """(parts of the split, folder) of each part, in order; folders that --fresh set aside have other names."""
    found = [(match, path) for path in folder.glob("part-*-of-*") if (match := FOLDER.fullmatch(path.name))]
    found = [item for item in found if (item[1] / MANIFEST).exists()]
    found.sort(key=lambda item: (int(item[0][2]), int(item[0][1])))
    return [(int(match[2]), path) for match, path in found]


def _sum(one: dict, other: dict) -> dict:
    """Counts of two parts together: numbers add up, tables by key; means (nll, top1) are left out."""
    total = {}
    for key in one.keys() & other.keys():
        if isinstance(one[key], dict):
            names = one[key].keys() | other[key].keys()
            total[key] = {name: one[key].get(name, 0) + other[key].get(name, 0) for name in names}
        elif type(one[key]) is int:
            total[key] = one[key] + other[key]
    return total
