"""A stage's folder: its manifest, how a stage starts or resumes in it, and its lock.

Every stage writes under a temporary name, syncs and renames, so that a partial file never has a final name. It resumes
only under the same fingerprint, verifies files before it trusts them, and never deletes without saying so.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from filelock import FileLock, Timeout

from common.pipeline.errors import UserError
from common.pipeline.files import read_json, sha256, write_json
from common.pipeline.older_runs import in_todays_keys

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
# The folders of a run, one a stage. The same words name the stage inside its manifest.
SYNTHETIC, HIDDEN, DATASET, DRAFT = "01_synthetic", "02_hidden", "03_dataset", "04_draft"


@dataclass
class Manifest:
    """What a stage's folder holds: the fingerprint of its settings and inputs, files with size and SHA-256, counts."""

    stage: str
    fingerprint: dict
    settings: dict = field(default_factory=dict)
    counts: dict = field(default_factory=dict)
    files: dict[str, dict] = field(default_factory=dict)
    complete: bool = False
    format: int = FORMAT_VERSION

    def save(self, folder: Path) -> None:
        write_json(folder / MANIFEST, asdict(self))

    def add_file(self, folder: Path, name: str, **facts) -> None:
        """Record a finished file of `folder` (relative name, so that a run folder can be moved)."""
        path = folder / name
        self.files[name] = {"bytes": path.stat().st_size, "sha256": sha256(path), **facts}

    @classmethod
    def load(cls, folder: Path, stage: str) -> "Manifest":
        """The manifest of a stage's folder; raises UserError when it is missing or of another stage or format."""
        path = folder / MANIFEST
        if not path.exists():
            raise UserError(f"no {MANIFEST} in {folder}: run stage {stage[:2]} first ({stage})")
        value = read_json(path)
        try:
            manifest = cls(**value)
        except TypeError as error:
            raise UserError(f"{path}: not a manifest of this project ({error})") from None
        if manifest.format != FORMAT_VERSION or manifest.stage != stage:
            raise UserError(
                f"{path}: stage {manifest.stage!r}, format {manifest.format}; expected {stage!r}, {FORMAT_VERSION}"
            )
        manifest.fingerprint = in_todays_keys(manifest.fingerprint, folder)
        return manifest

    def verify(self, folder: Path, hashes: bool = True) -> list[str]:
        """Names of files that are missing, of another size or (with `hashes`) of another content."""
        bad = []
        for name, facts in self.files.items():
            path = folder / name
            sound = path.is_file() and path.stat().st_size == facts["bytes"]
            if not sound or (hashes and sha256(path) != facts["sha256"]):
                bad.append(name)
        return bad


def open_stage(folder: Path, stage: str, fingerprint: dict, settings: dict, fresh: bool = False) -> Manifest:
    """Start or resume a stage in `folder`; raises UserError that shows the difference under another fingerprint.

    `fresh` sets an existing folder aside under a new name and starts an empty one.
    """
    if fresh and folder.exists():
        stamp, number = time.strftime("%Y%m%d-%H%M%S", time.gmtime()), 1
        while (aside := folder.with_name(f"{folder.name}.before-{stamp}" + f"-{number}" * (number > 1))).exists():
            number += 1
        os.rename(folder, aside)
        print(f"{folder} set aside as {aside}")
    folder.mkdir(parents=True, exist_ok=True)
    for leftover in folder.glob(".*.tmp-*"):  # of a killed process: the caller holds the lock
        leftover.unlink()
    if not (folder / MANIFEST).exists():
        manifest = Manifest(stage, fingerprint, settings)
        manifest.save(folder)
        return manifest
    manifest = Manifest.load(folder, stage)
    check_fingerprint(folder, manifest.fingerprint, fingerprint)
    manifest.settings = settings
    return manifest


def check_fingerprint(folder: Path, stored: dict, wanted: dict) -> None:
    """Raise UserError that lists each setting in which a stored run differs from this one."""
    differences = [
        f"{key}: {stored.get(key, 'absent')!r} there, {wanted.get(key, 'absent')!r} now"
        for key in sorted(stored.keys() | wanted.keys())
        if stored.get(key) != wanted.get(key)
    ]
    if differences:
        raise UserError(
            f"{folder} was made under other settings ({'; '.join(differences)}). "
            "Use the same settings to resume, another --run-dir, or --fresh to set the old folder aside"
        )


@contextmanager
def stage_lock(folder: Path) -> Iterator[None]:
    """Keep other processes out of the folder. A killed process loses its lock, so there is nothing to clean up."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / ".lock", blocking=False)
    try:
        lock.acquire()
    except Timeout:
        raise UserError(f"another process is writing to {folder}; wait for it or stop it") from None
    try:
        yield
    finally:
        lock.release()
