"""The folder of stage 01b: its records, their counts, the list of failures and the manifest."""

import json
from array import array
from collections import Counter
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

from common.generation.record import Record
from common.pipeline.errors import UserError
from common.pipeline.jsonl import JsonlParts, json_line, read_jsonl_at
from common.pipeline.manifest import Manifest
from common.questions.questions import DUPLICATE
from common.target.protocol import Protocol

FAILURES = "failures.jsonl"


@dataclass
class Counts:
    """Counts over all records of the folder, earlier runs included, for the progress bar, summary and manifest."""

    done: int = 0  # records in the folder
    new: int = 0  # records that this run made
    planned: int = 0  # samples that this run should end with, stored ones included
    dropped: int = 0  # later turns of conversations that ended early
    failed: int = 0
    skipped: Counter = field(default_factory=Counter)
    prompt_tokens: int = 0
    output_tokens: int = 0
    new_output_tokens: int = 0
    with_reasoning: int = 0
    open_reasoning: int = 0  # replies that ended by themselves without a closing token
    tool_calls: int = 0
    tool_calls_in_reasoning: int = 0
    other_prompt: int = 0  # records whose prompt has other tokens on the server than by our template
    compared: int = 0  # replies whose rebuilt ids were compared with the server's ids, or with their number
    mismatched: int = 0
    finish_reasons: Counter = field(default_factory=Counter)
    reasoning_fields: Counter = field(default_factory=Counter)
    ids_from: Counter = field(default_factory=Counter)
    lengths: array = field(default_factory=lambda: array("l"))
    seconds: array = field(default_factory=lambda: array("f"))

    def add(self, record: Record, protocol: Protocol) -> None:
        """Count one record of the folder."""
        received, prompt_ids, output_ids = record.received, record.prompt_ids, record.output_ids
        reply = protocol.split(prompt_ids, output_ids)
        self.done += 1
        self.prompt_tokens += len(prompt_ids)
        self.output_tokens += len(output_ids)
        self.with_reasoning += bool(record.reasoning)
        self.open_reasoning += protocol.think_open_in_prompt(prompt_ids) and reply.ended and not reply.closed
        self.tool_calls += not protocol.tool_ids.isdisjoint(output_ids)
        self.tool_calls_in_reasoning += not protocol.tool_ids.isdisjoint(reply.reasoning_ids)
        self.other_prompt += not received["prompt_as_ours"]
        self.compared += received["rebuilt_equal"] is not None
        self.mismatched += received["rebuilt_equal"] is False
        self.finish_reasons[record.finish_reason] += 1
        self.reasoning_fields[received["reasoning_field"] or "none"] += 1
        self.ids_from[record.ids_from] += 1
        self.lengths.append(len(output_ids))
        self.seconds.append(record.seconds)

    @property
    def silent_share(self) -> float:
        """Share of the records without reasoning."""
        return 1 - self.with_reasoning / self.done if self.done else 0.0

    def as_dict(self) -> dict:
        """Plain counts for the manifest."""
        return {k: dict(v) if isinstance(v, Counter) else v for k, v in vars(self).items() if not isinstance(v, array)}


class StoredRecords:
    """The records of a folder, read when needed: memory holds only their counts and their offsets in the files."""

    def __init__(self, paths: list[Path], protocol: Protocol):
        self.paths, self.protocol, self.counts = paths, protocol, Counts()
        self._offsets: dict[int, int] = {}  # id as a number -> file number * 2**40 + byte offset
        for number, path in enumerate(paths):
            for offset, value in read_jsonl_at(path):
                try:
                    record = Record(**value)
                    self._offsets[int(record.id, 16)] = number << 40 | offset
                    self.counts.add(record, protocol)
                except (KeyError, TypeError, ValueError) as error:
                    reason = f"byte {offset}: not a record of this stage ({type(error).__name__}: {error})"
                    raise UserError(f"{path}: {reason}; use --fresh or another --run-dir") from None

    def __len__(self) -> int:
        return len(self._offsets)

    def __contains__(self, id: str) -> bool:
        return int(id, 16) in self._offsets

    def record(self, id: str) -> Record:
        number, offset = divmod(self._offsets[int(id, 16)], 2**40)
        with open(self.paths[number], "rb") as file:
            file.seek(offset)
            return Record(**json.loads(file.readline()))

    def skip(self, reason: str, detail: str = "", **where) -> None:
        """Count a question that is not asked."""
        self.counts.skipped[reason] += 1


class RecordFolder(StoredRecords, AbstractContextManager):
    """The folder of stage 01b, open for writing. A context manager: leaving it saves the counts in the manifest.

    failures.jsonl begins empty in each run, since each run checks all questions again.
    """

    def __init__(self, folder: Path, manifest: Manifest, protocol: Protocol):
        self.folder, self.manifest, self.lines = folder, manifest, JsonlParts(folder)
        super().__init__(self.lines.paths(), protocol)
        self.failures = open(folder / FAILURES, "wb", buffering=0)  # noqa: SIM115

    def __exit__(self, *error) -> None:
        self.lines.close()
        self.failures.close()
        *full, last = self.lines.paths() or [None]
        before = self.manifest.files
        self.manifest.files = {path.name: before[path.name] for path in full if path.name in before}
        for path in [*full, last] if last else []:  # a full file never changes, so its hash in the manifest stays
            if path == last or before.get(path.name, {}).get("bytes") != path.stat().st_size:
                self.manifest.add_file(self.folder, path.name)
        self.manifest.counts = self.counts.as_dict()
        self.manifest.save(self.folder)

    def append(self, record: Record) -> None:
        """Store one new record."""
        self.lines.append(vars(record))
        self.counts.add(record, self.protocol)
        self.counts.new += 1
        self.counts.new_output_tokens += len(record.output_ids)

    def skip(self, reason: str, detail: str = "", **where) -> None:
        """Count and list a question that is not asked. A duplicate is counted but not listed."""
        super().skip(reason, detail, **where)
        if reason != DUPLICATE:
            self._list("skipped", reason, detail=detail, **where)

    def fail(self, id: str, source: dict, reason: str) -> None:
        """Count and list a sample whose request failed; a rerun asks for it again."""
        self.counts.failed += 1
        self._list("failed", reason, detail="", id=id, source=source)

    def _list(self, kind: str, reason: str, **more) -> None:
        self.failures.write(json_line({"kind": kind, "reason": reason, **more}))
