"""Files that survive: atomic writes, manifests, hashes, free-space check, JSONL append and torn-tail repair.

The rules that every stage keeps: write under a temporary name, fsync, rename; never a final name on a partial file;
resume only under the same fingerprint; verify before trusting; never delete silently.
"""

import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from common.pipeline.errors import SafetyStop, UserError

FORMAT_VERSION = 1
MANIFEST = "manifest.json"


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """A temporary path beside `path`; renamed onto it, durably, when the block ends without an error."""
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        yield temporary
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.rename(temporary, path)
        sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a whole text file atomically."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, "utf-8")


def write_json(path: Path, value) -> None:
    """Write JSON atomically; NaN is refused because no JSON reader would take it back."""
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def sync_folder(folder: Path) -> None:
    """Make renames inside `folder` durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sha256(path: Path) -> str:
    """Hex SHA-256 of a file's bytes."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest(value) -> str:
    """Hex SHA-256 of a JSON value in canonical form."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def read_json(path: Path):
    """Parse a JSON file; raises UserError that names it."""
    try:
        return json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise UserError(f"no such file: {path}") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not JSON ({error}); delete or repair it") from None


@dataclass
class Manifest:
    """What a stage's folder holds: the fingerprint it was made under, its files with size and SHA-256, its counts."""

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
        """The manifest of a stage's folder; raises UserError when it is missing, foreign or of another format."""
        path = folder / MANIFEST
        if not path.exists():
            raise UserError(f"no {MANIFEST} in {folder}: run the stage that makes it first ({stage})")
        value = read_json(path)
        try:
            manifest = cls(**value)
        except TypeError as error:
            raise UserError(f"{path}: not a manifest of this project ({error})") from None
        if manifest.format != FORMAT_VERSION or manifest.stage != stage:
            raise UserError(
                f"{path}: stage {manifest.stage!r}, format {manifest.format}; expected {stage!r}, {FORMAT_VERSION}"
            )
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
    for leftover in folder.glob(".*.tmp-*"):  # of a killed process: the caller holds the stage's lock
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
    """Raise UserError that lists each setting in which a stored run differs from the wanted one."""
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
    """Hold the folder alone; the lock dies with the process, so a kill leaves nothing to clean up."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"another process is writing to {folder}; wait for it or stop it") from None
        yield


def check_free_space(folder: Path, wanted_bytes: int) -> None:
    """Raise SafetyStop unless `folder` can take so many more bytes."""
    existing = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    free = shutil.disk_usage(existing).free
    if free < wanted_bytes:
        raise SafetyStop(
            f"{folder}: {wanted_bytes / 2**30:.2f} GiB needed, {free / 2**30:.2f} GiB free; "
            "free some space or lower --n, then run the same command again"
        )


# ---- JSONL: appended record by record, durable as each line ends ----


def repair_jsonl(path: Path) -> int:
    """Cut a torn last line off; returns the bytes removed. Only a kill in the middle of a write leaves one."""
    with open(path, "rb+") as file:
        size = end = file.seek(0, os.SEEK_END)
        while end > 0:
            start = max(0, end - 65536)
            file.seek(start)
            at = file.read(end - start).rfind(b"\n")
            if at >= 0:
                end = start + at + 1
                break
            end = start
        if end < size:
            file.truncate(end)
            os.fsync(file.fileno())
        return size - end


def read_jsonl(path: Path) -> Iterator[dict]:
    """The records of a JSONL file; raises UserError with file and line for one that does not parse."""
    return (record for _, record in read_jsonl_at(path))


def read_jsonl_at(path: Path) -> Iterator[tuple[int, dict]]:
    """The same, each with the byte offset where it begins."""
    at = 0
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            try:
                record = json.loads(line)
            except (json.JSONDecodeError, UnicodeDecodeError):
                torn = "a torn last line; rerun the stage that writes it" if not line.endswith(b"\n") else "not JSON"
                raise UserError(f"{path}:{number}: {torn}") from None
            if not isinstance(record, dict):
                raise UserError(f"{path}:{number}: a record must be a JSON object, not {type(record).__name__}")
            yield at, record
            at += len(line)


def json_line(record: dict) -> bytes:
    """A record as one line of UTF-8, line feed included."""
    try:
        text = json.dumps(record, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError:  # a lone surrogate, which UTF-8 cannot hold but a JSON escape can
        text = json.dumps(record, allow_nan=False).encode()
    return text + b"\n"


class JsonlParts:
    """Appends records to part-00000.jsonl, part-00001.jsonl ... of a folder, a new part each `part_records`."""

    def __init__(self, folder: Path, part_records: int = 10_000, prefix: str = "part"):
        self.folder, self.prefix, self.part_records = folder, prefix, part_records
        self.torn_bytes = sum(repair_jsonl(path) for path in self.paths())
        parts = self.paths()
        self.index = max(len(parts) - 1, 0)
        self.records = parts[-1].read_bytes().count(b"\n") if parts else 0
        self.file = None

    def paths(self) -> list[Path]:
        return sorted(self.folder.glob(f"{self.prefix}-*.jsonl"))

    def read(self) -> Iterator[dict]:
        for path in self.paths():
            yield from read_jsonl(path)

    def append(self, record: dict) -> None:
        """Write one record as one line and hand it to the kernel: a killed process loses nothing that it appended."""
        if self.records >= self.part_records:
            self.close()
            self.index, self.records = self.index + 1, 0
        if self.file is None:
            self.file = open(self.folder / f"{self.prefix}-{self.index:05d}.jsonl", "ab", buffering=0)  # noqa: SIM115
        line = memoryview(json_line(record))
        while line:  # a disk that is just full takes half a line; the next write raises
            line = line[self.file.write(line) :]
        self.records += 1

    def handle_to_sync(self) -> int | None:
        """A descriptor of the open part for `os.fsync` in another thread; the caller closes it."""
        return os.dup(self.file.fileno()) if self.file is not None else None

    def close(self) -> None:
        """Make all appended records durable against a power cut too."""
        if self.file is not None:
            os.fsync(self.file.fileno())
            self.file.close()
            self.file = None
