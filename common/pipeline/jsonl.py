"""JSONL files: repair of a torn last line, errors that name file and line, records spread over part files."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

from common.pipeline.errors import UserError

JSONL_TOKEN_BYTES = 12  # mean size of one token in a record of stage 01b: its id and its text


def repair_jsonl(path: Path) -> int:
    """Cut a torn last line off; returns the bytes removed. Only a kill in the middle of a write leaves one."""
    with open(path, "rb+") as file:
        size = end = file.seek(0, os.SEEK_END)
        while end > 0:
            start = max(0, end - 65536)
            file.seek(start)
            line_feed = file.read(end - start).rfind(b"\n")
            if line_feed >= 0:
                end = start + line_feed + 1
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
    """As read_jsonl, each record with the byte offset of its line."""
    offset = 0
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            try:
                record = json.loads(line)
            except (json.JSONDecodeError, UnicodeDecodeError):
                torn = "a torn last line; rerun the stage that writes it" if not line.endswith(b"\n") else "not JSON"
                raise UserError(f"{path}:{number}: {torn}") from None
            if not isinstance(record, dict):
                raise UserError(f"{path}:{number}: a record must be a JSON object, not {type(record).__name__}")
            yield offset, record
            offset += len(line)


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
        """Write one record as one line, unbuffered, so that a killed process loses no appended record."""
        if self.records >= self.part_records:
            self.close()
            self.index, self.records = self.index + 1, 0
        if self.file is None:
            self.file = open(self.folder / f"{self.prefix}-{self.index:05d}.jsonl", "ab", buffering=0)  # noqa: SIM115
        line = memoryview(json_line(record))
        while line:  # a full disk accepts only the beginning of a line, and the next write raises OSError
            line = line[self.file.write(line) :]
        self.records += 1

    def handle_to_sync(self) -> int | None:
        """A descriptor of the open part file for `os.fsync` in another thread; the caller closes it."""
        return os.dup(self.file.fileno()) if self.file is not None else None

    def close(self) -> None:
        """Make all appended records durable against a power cut too."""
        if self.file is not None:
            os.fsync(self.file.fileno())
            self.file.close()
            self.file = None
