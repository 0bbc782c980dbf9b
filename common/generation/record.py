"""The records of stage 01b: made out of checked answers, counted, found again, and the list of what is missing.

`Counts` sees every record of the folder, those of earlier runs too, so that a manifest tells of the whole stage.
"""

import json
from array import array
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from common.generation.engine import Answer, EngineError, Request, Sampling
from common.generation.completion import REASONING_FIELDS
from common.pipeline.errors import UserError
from common.target.protocol import Protocol, Reply
from common.pipeline.manifest import json_line, read_jsonl_at

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
        thinking = protocol.opener_in_prompt(record["prompt_ids"])
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


def make_record(
    request: Request,
    answer: Answer,
    source: dict,
    sampling: Sampling,
    protocol: Protocol,
    model: str,
    seconds: float,
    compare: bool,
) -> dict:
    """The record of an answer; raises EngineError for one that contradicts itself.

    `compare`: ids that were received are also rebuilt from text, to measure how good rebuilding is.
    """
    known = answer.prompt_ids is not None and answer.output_ids is not None
    prompt_ids = answer.prompt_ids if known else request.prompt_ids
    reply = protocol.split(prompt_ids, answer.output_ids) if known else None
    thought = reply and reply.reasoning_ids
    if not sampling.thinking and not answer.content and protocol.closer_in_prompt(prompt_ids) and not thought:
        # The parser waited for a closing token, which stands in the prompt, and took the whole reply for reasoning.
        answer = replace(answer, reasoning=None, content=answer.reasoning, reasoning_field="")
    rebuilt = None
    if compare or not known:
        rebuilt = protocol.reconstruct(prompt_ids, answer.reasoning, answer.content, answer.finish_reason)
    output_ids = answer.output_ids if known else rebuilt
    if not output_ids:
        raise EngineError("an empty reply", retry=False)
    if known:
        reasoning, content, field = _read_by_ids(reply, answer, sampling, protocol)
    else:
        reasoning, content, field = answer.reasoning, answer.content, answer.reasoning_field
    equal = None
    if known and compare:
        equal = rebuilt == output_ids
    elif not known and (counted := counted_tokens(answer.usage)) is not None:
        equal = counted == len(rebuilt)
    said = (answer.usage or {}).get("prompt_tokens")
    as_ours = prompt_ids == request.prompt_ids if known else said in (None, len(prompt_ids))
    return {
        "id": request.id,
        "source": source,
        "messages": request.messages,
        "reasoning": reasoning or "",
        "content": content,
        "finish_reason": answer.finish_reason,
        "prompt_ids": prompt_ids,
        "output_ids": output_ids,
        "ids_from": "server" if known else "reconstructed",
        "received": {
            "reasoning_field": field,
            "prompt_as_ours": as_ours,
            "rebuilt_equal": equal,
        },
        "usage": answer.usage,
        "sampling": asdict(sampling) | {"seed": request.seed},
        "model": model,
        "server": answer.server,
        "seconds": round(seconds, 3),
    }


def counted_tokens(usage: dict | None) -> int | None:
    """The tokens of a reply as the server counts them, where it does."""
    counted = (usage or {}).get("completion_tokens")
    return counted if type(counted) is int else None


def check_rebuilt(record: dict) -> None:
    """Raise EngineError where ids were rebuilt from text that is not all that the server wrote.

    Not part of `make_record`: of replies without reasoning the whole run has more to say.
    """
    counted, rebuilt = counted_tokens(record["usage"]), len(record["output_ids"])
    if record["ids_from"] == "server" or counted is None:
        return
    if abs(counted - rebuilt) > 16 + 0.2 * counted:  # another spelling of the same text differs by less
        raise EngineError(
            f"the server counts {counted} completion_tokens, the text it sent makes {rebuilt}: something was lost on "
            "the way; --probe looks at one reply closely",
            retry=False,
        )


def _read_by_ids(
    reply: Reply, answer: Answer, sampling: Sampling, protocol: Protocol
) -> tuple[str | None, str | None, str]:
    """(reasoning, content, where reasoning stood) of an answer whose ids are known; raises EngineError where ids,
    counts, protocol and text contradict each other."""
    usage = answer.usage or {}
    for name, ids in (("completion_tokens", answer.output_ids), ("prompt_tokens", answer.prompt_ids)):
        if usage.get(name) not in (None, len(ids)):
            raise EngineError(f"the server counts {usage[name]} {name} and sent {len(ids)} ids", retry=False)
    tail = protocol.prompt_tail(sampling.thinking)
    if answer.prompt_ids[-len(tail) :] != tail:
        raise EngineError(
            f"the server's prompt ends in {answer.prompt_ids[-len(tail) :]}, the target's in {tail}: "
            "another chat template, or chat_template_kwargs did not arrive",
            retry=False,
        )
    if protocol.opener_in_prompt(answer.prompt_ids) and answer.output_ids[0] == protocol.think_open:
        raise EngineError("the reply repeats the opening token that ends its prompt", retry=False)
    parsed = answer.reasoning_field in REASONING_FIELDS
    problem = protocol.text_differs(reply, answer.reasoning, answer.content, parsed)
    if problem:
        raise EngineError(f"the reply contradicts itself: {problem}", retry=False)
    if answer.reasoning and not reply.reasoning_ids:  # the parser took for reasoning what the target wrote as content
        return None, protocol.decode(reply.content_ids), ""
    if parsed or answer.reasoning_field == "ids" or not reply.reasoning_ids:
        return answer.reasoning, answer.content, answer.reasoning_field
    # No parser split it, or not where the target did: a reply cut inside its reasoning shows no marker in its text.
    shown = not reply.closed or protocol.closer in (answer.content or "")
    in_content = bool(answer.reasoning or (answer.content and shown))
    reasoning, content = protocol.decode(reply.reasoning_ids), protocol.decode(reply.content_ids) or None
    return reasoning, content, "content" if in_content else "ids"
