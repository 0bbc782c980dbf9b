"""The folder of records: what is stored already, the counts of what it holds, and the list of failures."""

import json
from array import array
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from common.pipeline.errors import UserError
from common.pipeline.jsonl import json_line, read_jsonl_at
from common.target.protocol import Protocol

FAILURES = "failures.jsonl"


@dataclass
class Counts:
    """What is in the folder and what happened in this run, for the progress bar, the summary and the manifest."""

    done: int = 0  # records in the folder
    new: int = 0  # of which this run made
    planned: int = 0  # samples that this run wants, those that are there already included
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
    other_prompt: int = 0  # the server's prompt is not the one that our template makes
    compared: int = 0  # replies whose rebuilt ids could be held against the server's ids, or their number
    mismatched: int = 0
    finish_reasons: Counter = field(default_factory=Counter)
    reasoning_fields: Counter = field(default_factory=Counter)
    ids_from: Counter = field(default_factory=Counter)
    lengths: array = field(default_factory=lambda: array("l"))
    seconds: array = field(default_factory=lambda: array("f"))

    def add(self, record: dict, protocol: Protocol) -> None:
        """Count one record of the folder."""
        received, output_ids = record["received"], record["output_ids"]
        reply = protocol.split(record["prompt_ids"], output_ids)
        self.done += 1
        self.prompt_tokens += len(record["prompt_ids"])
        self.output_tokens += len(output_ids)
        self.with_reasoning += bool(record["reasoning"])
        thinking = protocol.think_open_in_prompt(record["prompt_ids"])
        self.open_reasoning += thinking and reply.ended and not reply.closed
        self.tool_calls += not protocol.tool_ids.isdisjoint(output_ids)
        self.tool_calls_in_reasoning += not protocol.tool_ids.isdisjoint(reply.reasoning_ids)
        self.other_prompt += not received["prompt_as_ours"]
        self.compared += received["rebuilt_equal"] is not None
        self.mismatched += received["rebuilt_equal"] is False
        self.finish_reasons[record["finish_reason"]] += 1
        self.reasoning_fields[received["reasoning_field"] or "none"] += 1
        self.ids_from[record["ids_from"]] += 1
        self.lengths.append(len(output_ids))
        self.seconds.append(record["seconds"])

    def as_dict(self) -> dict:
        """Plain counts for the manifest."""
        return {k: dict(v) if isinstance(v, Counter) else v for k, v in vars(self).items() if not isinstance(v, array)}


class Stored:
    """The records that are in the folder already, by id: where each begins, not what it says, so memory stays flat."""

    def __init__(self, paths: list[Path], counts: Counts, protocol: Protocol):
        self.paths = paths
        self.places: dict[int, int] = {}  # id as a number -> part * 2**40 + offset
        for number, path in enumerate(self.paths):
            for at, record in read_jsonl_at(path):
                try:
                    self.places[int(record["id"], 16)] = number << 40 | at
                    counts.add(record, protocol)
                except (KeyError, TypeError, ValueError) as error:
                    reason = f"byte {at}: no record of this stage ({type(error).__name__}: {error})"
                    raise UserError(f"{path}: {reason}; use --fresh or another --run-dir") from None

    def __len__(self) -> int:
        return len(self.places)

    def __contains__(self, id: str) -> bool:
        return int(id, 16) in self.places

    def record(self, id: str) -> dict:
        place = self.places[int(id, 16)]
        with open(self.paths[place >> 40], "rb") as file:
            file.seek(place & (2**40 - 1))
            return json.loads(file.readline())


class FailureList:
    """failures.jsonl: what this run did not get, and why. Each run begins it anew, since each looks at all rows."""

    def __init__(self, folder: Path):
        self.file = open(folder / FAILURES, "wb", buffering=0)  # noqa: SIM115

    def append(self, kind: str, reason: str, detail: str = "", **where) -> None:
        """`kind`: "skipped" (can't be asked) or "failed" (was asked; a rerun asks again)."""
        self.file.write(json_line({"kind": kind, "reason": reason, "detail": detail, **where}))

    def close(self) -> None:
        self.file.close()
