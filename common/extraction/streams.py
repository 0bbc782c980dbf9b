"""Records of stage 01b become exact token streams: located in a first pass, loaded by offset in a second.

    stream = prompt ids + output ids, cut to a limit; loss mask 1 exactly where the target wrote the token

The first pass checks every record and keeps only where it lies, so that memory does not grow with the replies.
"""

import json
import re
import zlib
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from common.dataset.stream import Stream
from common.pipeline.errors import UserError
from common.pipeline.node_share import stage_files
from common.target.protocol import Protocol

REQUIRED = {"id": str, "prompt_ids": list, "output_ids": list, "source": dict, "finish_reason": str}


@dataclass(frozen=True)
class RecordLocation:
    """Where a record's line begins, and a summary of its stream.

    The id hashes the question and the sampling settings, not the reply. Rerunning 01b with --fresh gives different
    replies the same ids, so samples are compared by checksum.
    """

    id: str
    path: Path
    offset: int  # bytes
    tokens: int  # after cutting
    question: str = ""
    crc: int = 0  # CRC-32 of the token ids after cutting


class StreamReader:
    """Locates and loads the streams of a folder of records. `dropped` lists {id, reason}, `cut` counts cut streams."""

    def __init__(self, folder: Path, protocol: Protocol, vocab_size: int, max_tokens: int):
        self.folder, self.protocol, self.vocab_size, self.max_tokens = folder, protocol, vocab_size, max_tokens
        self.dropped: list[dict] = []
        self.cut = 0

    def locate(self, n: int | None) -> list[RecordLocation]:
        """The first `n` usable records in file order; raises UserError for a malformed record."""
        locations: list[RecordLocation] = []
        seen: set[str] = set()
        for path in stage_files(self.folder, "part-*.jsonl"):
            offset = 0
            with open(path, "rb") as file:
                for number, line in enumerate(file, 1):
                    if n is not None and len(locations) >= n:
                        return locations
                    record = _parse(path, number, line)
                    id, ids = record["id"], record["prompt_ids"] + record["output_ids"]
                    problem = "duplicate id" if id in seen else self._problem(record)
                    seen.add(id)
                    if problem:
                        self.dropped.append({"id": id, "reason": problem})
                    else:
                        self.cut += bool(self.max_tokens) and len(ids) > self.max_tokens
                        ids = array("i", ids[: self.max_tokens or None])
                        crc = zlib.crc32(ids)
                        locations.append(RecordLocation(id, path, offset, len(ids), _question(record), crc))
                    offset += len(line)
        return locations

    def drop_counts(self) -> dict[str, int]:
        """How many records were dropped, by reason; reasons that differ only in a number count as one."""
        return dict(Counter(re.sub(r"\d+", "N", drop["reason"]) for drop in self.dropped))

    def _problem(self, record: dict) -> str | None:
        problem = self.protocol.check_stream(record["prompt_ids"], record["output_ids"], self.vocab_size)
        if not problem and self.max_tokens and len(record["prompt_ids"]) >= self.max_tokens:
            problem = f"the prompt alone reaches the limit of {self.max_tokens} tokens"
        return problem

    def load(self, locations: Iterable[RecordLocation]) -> Iterator[Stream]:
        """The streams of these records, in their order. Each part file is opened once and stays open until the end."""
        with ExitStack() as stack:
            files = {}
            for location in locations:
                if location.path not in files:
                    files[location.path] = stack.enter_context(open(location.path, "rb"))
                files[location.path].seek(location.offset)
                record = json.loads(files[location.path].readline())
                if record["id"] != location.id:
                    raise UserError(
                        f"{location.path} changed while it was read: record {record['id']} lies where {location.id} "
                        "was; let 01b finish, then rerun 02"
                    )
                yield self._stream(record)

    def _stream(self, record: dict) -> Stream:
        prompt_ids, output_ids = record["prompt_ids"], record["output_ids"]
        ids, mask = self.protocol.stream(prompt_ids, output_ids, self.max_tokens)
        reply = self.protocol.split(prompt_ids, output_ids)
        sampling = record.get("sampling") or {}
        budget_closed = record.get("budget_closed")
        if budget_closed is None:  # a record from before this field: inferred from the length of its reasoning
            budget_closed = reply.closed and 0 < sampling.get("thinking_budget", 0) <= len(reply.reasoning_ids)
        facts = {
            "question": _question(record),
            "source": record["source"].get("dataset", ""),
            "finish": record["finish_reason"],
            "ids_from": record.get("ids_from", "server"),
            "reasoning": len(reply.reasoning_ids),
            "temperature": sampling.get("temperature"),
            # index of a closing token that the thinking budget wrote, not the target
            "forced": len(prompt_ids) + output_ids.index(self.protocol.think_close) if budget_closed else None,
        }
        return Stream(record["id"], array("i", ids), array("B", mask), facts)


def _question(record: dict) -> str:
    return record["source"].get("question", record["id"])


def _parse(path: Path, number: int, line: bytes) -> dict:
    try:
        record = json.loads(line)
    except ValueError:
        raise UserError(f"{path}:{number}: not a whole JSON record; rerun 01b, which repairs a torn line") from None
    for key, kind in REQUIRED.items():
        if not isinstance(record, dict) or not isinstance(record.get(key), kind):
            raise UserError(f"{path}:{number}: a record needs {key!r} as {kind.__name__}; was it written by 01b?")
    if not all(type(id) is int for key in ("prompt_ids", "output_ids") for id in record[key]):
        raise UserError(f"{path}:{number}: record {record['id']}: token ids must be integers")
    return record
