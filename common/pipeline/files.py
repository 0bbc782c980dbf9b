"""Files that are either whole or absent: written under a temporary name, synced, renamed; hashes; free space."""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from common.pipeline.errors import SafetyStop, UserError


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """A temporary path beside `path`; renamed onto it, durably, when the block ends without an error."""
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        yield temporary
        sync(temporary)
        os.rename(temporary, path)
        sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """A temporary folder beside `folder`; it replaces `folder`, durably, when the block ends.

    An error inside the block leaves `folder` as it was and removes the temporary one.
    """
    temporary = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)  # left by a killed process
    temporary.mkdir(parents=True)
    try:
        yield temporary
        for path in temporary.rglob("*"):
            sync(path)
        sync(temporary)
        shutil.rmtree(folder, ignore_errors=True)  # killed here: no folder, which the next run builds again
        os.rename(temporary, folder)
        sync(folder.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write_text(path: Path, text: str) -> None:
    """Write a whole text file atomically."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, "utf-8")


def write_json(path: Path, value) -> None:
    """Write JSON atomically; NaN is refused because no JSON reader would take it back."""
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def sync(path: Path) -> None:
    """Make a file's content, or the renames inside a folder, durable."""
    handle = os.open(path, os.O_RDONLY)
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


def check_free_space(folder: Path, wanted_bytes: int) -> None:
    """Raise SafetyStop unless `wanted_bytes` are free on the disk of `folder`."""
    existing = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    free = shutil.disk_usage(existing).free
    if free < wanted_bytes:
        raise SafetyStop(
            f"{folder}: {wanted_bytes / 2**30:.2f} GiB needed, {free / 2**30:.2f} GiB free; "
            "free some space or lower --n, then run the same command again"
        )
