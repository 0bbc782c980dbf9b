"""A stage split over several nodes: `--part 2/3` does a third of the samples, chosen by their ids.

    RUN/01_synthetic/part-1-of-3/{manifest.json, part-00000.jsonl, ...}    RUN/01_synthetic/part-2-of-3/...

Each node share has its own folder, and nothing is merged on disk: `load_stage` gives the next stage one manifest, which
names files as `part-1-of-3/part-00000.jsonl`. All shares together hold exactly the samples of a run without --part.
"""

import re
from functools import reduce
from pathlib import Path
from typing import NamedTuple

from common.pipeline.errors import UserError
from common.pipeline.manifest import MANIFEST, Manifest, check_fingerprint

FOLDER = re.compile(r"part-(\d+)-of-(\d+)")
PART_HELP = "I/N: process only node share I of N, in its own folder; the next stage reads all N folders"


class NodeShare(NamedTuple):
    """Share `number` (from 1) of `count`."""

    number: int
    count: int

    def holds(self, id: str) -> bool:
        """Whether a sample belongs to this share; ids are hex digests, so the shares are even."""
        return int(id, 16) % self.count == self.number - 1


WHOLE = NodeShare(1, 1)


def parse_node_share(text: str | None) -> NodeShare:
    """The share that `--part` names; raises UserError for an invalid one."""
    if text is None:
        return WHOLE
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if not match or not 1 <= int(match[1]) <= int(match[2]):
        raise UserError(f"--part {text}: must be I/N with 1 <= I <= N, as in --part 2/3")
    return NodeShare(int(match[1]), int(match[2]))


def stage_folder(stage: Path, share: NodeShare) -> Path:
    """The folder for the files of this share; raises UserError where the stage was begun with another split."""
    counts = {count for count, _ in _share_folders(stage)} | ({1} if (stage / MANIFEST).exists() else set())
    if other := counts - {share.count}:
        stored = "as one" if 1 in other else f"in {max(other)} parts"
        wanted = "as one" if share.count == 1 else f"in {share.count}"
        raise UserError(f"{stage} was made {stored}, not {wanted}; use the same --part, or another --run-dir")
    return stage if share.count == 1 else stage / f"part-{share.number}-of-{share.count}"


def load_stage(folder: Path, stage: str) -> Manifest:
    """One manifest for all node shares of a stage; raises UserError for a missing share or differing settings."""
    shares = _share_folders(folder)
    if not shares or (folder / MANIFEST).exists():
        return Manifest.load(folder, stage)
    count = max(count for count, _ in shares)
    names = {path.name for _, path in shares}
    missing = [name for i in range(count) if (name := f"part-{i + 1}-of-{count}") not in names]
    if missing:
        raise UserError(f"{folder} lacks {', '.join(missing)}; run them with --part, or copy them here")
    if len(shares) > count:
        raise UserError(f"{folder} mixes two splits; keep the part-I-of-{count} folders and move the others away")
    manifests = {path: Manifest.load(path, stage) for _, path in shares}
    merged, *others = manifests.values()
    for path, manifest in manifests.items():
        check_fingerprint(path, manifest.fingerprint, merged.fingerprint)
    merged.files = {
        f"{path.name}/{name}": facts for path, each in manifests.items() for name, facts in each.files.items()
    }
    merged.complete = all(manifest.complete for manifest in manifests.values())
    merged.counts = reduce(_add_counts, [manifest.counts for manifest in others], merged.counts)
    return merged


def stage_files(folder: Path, pattern: str) -> list[Path]:
    """The files of a stage in their order, node share by node share."""
    folders = (folder, *(path for _, path in _share_folders(folder)))
    return [path for each in folders for path in sorted(each.glob(pattern))]


def _share_folders(folder: Path) -> list[tuple[int, Path]]:
    """(number of shares, folder) of each node share, in order; folders that --fresh set aside do not match."""
    matches = [(match, path) for path in folder.glob("part-*-of-*") if (match := FOLDER.fullmatch(path.name))]
    shares = [(int(match[2]), int(match[1]), path) for match, path in matches if (path / MANIFEST).exists()]
    return [(count, path) for count, _, path in sorted(shares)]


def _add_counts(one: dict, other: dict) -> dict:
    """The sums of two shares' counts, tables key by key; means (nll, top1), which cannot be added, are left out."""
    total = {}
    for key in one.keys() & other.keys():
        if isinstance(one[key], dict):
            names = one[key].keys() | other[key].keys()
            total[key] = {name: one[key].get(name, 0) + other[key].get(name, 0) for name in names}
        elif type(one[key]) is int:
            total[key] = one[key] + other[key]
    return total
