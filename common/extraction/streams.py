"""Records to exact token streams: found by place in their part file, checked, cut to the limit, loaded when needed.

    stream = prompt ids + output ids, one opener, the target's own ids; loss mask 1 exactly where the target wrote.

A first pass over the records keeps some bytes a record; ids are read again when a stream is due, so that memory does
not grow with the run.
"""

import json
import re
import zlib
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from common.dataset.stream import Stream
from common.pipeline.errors import UserError
from common.pipeline.node_share import stage_files
from common.target.protocol import Protocol

REQUIRED = {"id": str, "prompt_ids": list, "output_ids": list, "source": dict, "finish_reason": str}


@dataclass(frozen=True)
class Place:
    """Where a record's line lies, the tokens of its stream after cutting, their CRC-32, and which question it answers.

    An id says what was asked, and not what came: 01b made anew gives other replies under the same ids.
    """

    id: str
    path: Path
    offset: int
    tokens: int
    question: str = ""
    crc: int = 0


class StreamReader:
    """Finds and loads the streams of a folder of records. `rejected` counts what was dropped, by reason."""

    def __init__(self, folder: Path, protocol: Protocol, vocab_size: int, max_tokens: int):
        self.folder, self.protocol, self.vocab_size, self.max_tokens = folder, protocol, vocab_size, max_tokens
        self.rejected: Counter = Counter()
        self.rejects: list[dict] = []
        self.cut = 0

    def places(self, n: int | None) -> list[Place]:
        """The usable records in file order, the first `n` of them; raises UserError for a record that is malformed."""
        found: list[Place] = []
        seen: set[str] = set()
        for path in stage_files(self.folder, "part-*.jsonl"):
            offset = 0
            with open(path, "rb") as file:
                for number, line in enumerate(file, 1):
                    if n is not None and len(found) >= n:
                        return found
                    record = _parse(path, number, line)
                    problem = "its id stood before" if record["id"] in seen else self._problem(record)
                    seen.add(record["id"])
                    if problem:
                        self.rejected[re.sub(r"\d+", "N", problem)] += 1  # one line a reason, not one a length
                        self.rejects.append({"id": record["id"], "reason": problem})
                    else:
                        ids = record["prompt_ids"] + record["output_ids"]
                        self.cut += bool(self.max_tokens) and len(ids) > self.max_tokens
                        ids = array("i", ids[: self.max_tokens or None])
                        found.append(Place(record["id"], path, offset, len(ids), _question(record), zlib.crc32(ids)))
                    offset += len(line)
        return found

    def _problem(self, record: dict) -> str | None:
        problem = self.protocol.check_stream(record["prompt_ids"], record["output_ids"], self.vocab_size)
        if not problem and self.max_tokens and len(record["prompt_ids"]) >= self.max_tokens:
            problem = f"prompt of {self.max_tokens} tokens or more: nothing of the reply is left"
        return problem

    def load(self, places: Iterator[Place]) -> Iterator[Stream]:
        """The streams at `places`, in their order."""
        for place in places:
            with open(place.path, "rb") as file:
                file.seek(place.offset)
                record = json.loads(file.readline())
            if record["id"] != place.id:
                raise UserError(f"{place.path} changed while it was read: {record['id']} stands where {place.id} stood")
            ids, mask = self.protocol.stream(record["prompt_ids"], record["output_ids"], self.max_tokens)
            reply = self.protocol.split(record["prompt_ids"], record["output_ids"])
            sampling = record.get("sampling") or {}
            by_budget = record.get("budget_closed")
            if by_budget is None:  # a record from before this field: guessed from the length of its reasoning
                by_budget = reply.closed and 0 < sampling.get("thinking_budget", 0) <= len(reply.reasoning_ids)
            forced = None  # index of a closing token that the thinking budget wrote, not the target
            if by_budget:
                forced = len(record["prompt_ids"]) + record["output_ids"].index(self.protocol.think_close)
            facts = {
                "question": _question(record),
                "source": record["source"].get("dataset", ""),
                "finish": record["finish_reason"],
                "ids_from": record.get("ids_from", "server"),
                "reasoning": len(reply.reasoning_ids),
                "temperature": sampling.get("temperature"),
                "forced": forced,
            }
            yield Stream(record["id"], array("i", ids), array("B", mask), facts)


def _question(record: dict) -> str:
    return record["source"].get("question", record["id"])


def _parse(path: Path, number: int, line: bytes) -> dict:
    try:
        record = json.loads(line)
    except ValueError:
        raise UserError(f"{path}:{number}: not a whole JSON record; rerun 01b, which repairs a torn line") from None
    for key, kind in REQUIRED.items():
        if not isinstance(record, dict) or not isinstance(record.get(key), kind):
            raise UserError(f"{path}:{number}: a record needs {key!r} as {kind.__name__}; made by 01b of this project?")
    if not all(type(id) is int for key in ("prompt_ids", "output_ids") for id in record[key]):
        raise UserError(f"{path}:{number}: record {record['id']}: token ids must be integers")
    return record
