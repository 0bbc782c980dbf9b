"""The trained draft in vLLM: greedy output with and without it, and its acceptance beside stage 04's offline walk."""

import json
import subprocess
from pathlib import Path

import torch

from common.dataset.index import HELD_OUT, Index
from common.dataset.shards import Shard
from tests.end_to_end.server import ENVIRONMENT, REPOSITORY, VLLM_PYTHON
from tests.end_to_end.stages import Run, quiet

TIMEOUT_S = 1200
LENGTH_OFF, SHARE_OFF = 0.02, 0.03  # what engine and walk may differ by: in length; in drafts and accepted tokens
COUNT_OFF = 3  # of a sparse position 3 % would be less than one token
TIE_LOGITS = 0.5  # bf16 logits near 20 have steps of 0.125, and 30 layers of bf16 move them by a few


def held_out_records(run: Run) -> list[dict]:
    """The records that 03 held out, in the order of the index."""
    index = Index.load(run.folder / "03_dataset" / "index.safetensors")
    shards = [Shard(run.folder / "02_hidden" / name) for name in index.shards]
    rows = index.rows(HELD_OUT)
    ids = [shards[int(index.shard[row])].facts[int(index.number[row])]["id"] for row in rows]
    records = {record["id"]: record for record in run.records()}
    return [records[id] for id in ids]


def decode(
    run: Run, name: str, target: Path, prompts: list[list[int]], max_tokens: int, engines: list, **flags: object
) -> list[dict]:
    """Greedy outputs and counters of each engine (speculate.py), run by vLLM's own Python with these LLM arguments."""
    job, result = run.folder / f"{name}.job.json", run.folder / f"{name}.result.json"
    result.unlink(missing_ok=True)
    facts = {"target": str(target.resolve()), "prompts": prompts, "max_tokens": max_tokens, "engines": engines}
    facts["flags"] = flags
    job.write_text(json.dumps(facts))
    command = [str(VLLM_PYTHON), "-m", "tests.end_to_end.speculate", str(job.resolve()), str(result.resolve())]
    with (run.folder / f"{name}.log").open("w") as log:
        done = subprocess.run(
            command, cwd=REPOSITORY, env=quiet() | ENVIRONMENT, stdout=log, stderr=log, timeout=TIMEOUT_S
        )
    if done.returncode or not result.exists():
        tail = "\n".join((run.folder / f"{name}.log").read_text(errors="replace").splitlines()[-15:])
        raise RuntimeError(f"{command[2]} ended with {done.returncode}:\n{tail}")
    return json.loads(result.read_text())


# ---- losslessness ----


def same_outputs(one: list, other: list) -> int:
    return sum(a == b for a, b in zip(one, other, strict=True))


def check_lossless(check, name: str, records: list[dict], plain: list, drafted: list) -> None:
    """Identical token by token, and the reply that 01b recorded."""
    same, recorded = same_outputs(plain, drafted), same_outputs(plain, [r["output_ids"] for r in records])
    check(f"{name}: output with and without the draft is identical", same == len(plain), f"{same} of {len(plain)}")
    check(f"{name}: it is the reply that 01b recorded", recorded == len(plain), f"{recorded} of {len(plain)}")


def check_ties(check, name: str, model, prompts: list[list[int]], plain: list, drafted: list) -> str:
    """Where bf16 outputs part, both tokens must be near equal choices of the target; returns a row for the table.

    A draft's tokens are verified several at a time: other shapes, other kernels, other rounding of the logits. `model`:
    the target in float32, where there is hardly any.
    """
    gaps, ranks = [], []
    for prompt, one, other in zip(prompts, plain, drafted, strict=True):
        at = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
        if at is None:
            continue
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([prompt + one[:at]]), logits_to_keep=1).logits[0, -1]
        gaps.append(float((logits[one[at]] - logits[other[at]]).abs()))
        ranks.append(max(int((logits > logits[token]).sum()) for token in (one[at], other[at])))
    row = f"{same_outputs(plain, drafted)} of {len(plain)} identical"
    if gaps:
        row += f"; {len(gaps)} part at ties, logits at most {max(gaps):.2f} apart, none below choice {1 + max(ranks)}"
    holds = max(gaps, default=0.0) <= TIE_LOGITS and max(ranks, default=0) <= 2
    check(f"{name}: bf16 outputs part only at ties", holds, row)
    return row


# ---- acceptance ----


def engine_length(counted: dict) -> float:
    return 1 + sum(counted["accepted"]) / counted["drafts"] if counted["drafts"] else 1.0


def row_of(engine: dict, walk: dict) -> str:
    """A row for the table: length, drafts, accepted per position; the engine's and the walk's."""
    accepted = [int(n) for n in engine["accepted"]]
    row = f"engine {engine_length(engine):.3f} ({int(engine['drafts'])}, {accepted}), "
    return row + f"offline {engine_length(walk):.3f} ({walk['drafts']}, {walk['accepted']})"


def check_acceptance(check, name: str, engine: dict, walk: dict) -> str:
    """One engine's counters are the walk's, within the limits; returns a row for the table."""
    row, off = row_of(engine, walk), abs(engine_length(engine) - engine_length(walk))
    check(f"{name}: acceptance length within {LENGTH_OFF}", off <= LENGTH_OFF, row)
    pairs = [(engine["drafts"], walk["drafts"]), *zip(engine["accepted"], walk["accepted"], strict=True)]
    worst = max(pairs, key=lambda pair: abs(pair[0] - pair[1]) / max(pair[1], 1))
    holds = all(abs(a - b) <= max(SHARE_OFF * b, COUNT_OFF) for a, b in pairs)
    seen = f"furthest: {worst[0]:.0f} beside {worst[1]}"
    check(f"{name}: drafts and accepted per position within {SHARE_OFF:.0%}", holds, seen)
    return row


def inside_replies(alone: list[dict], records: list[dict], walks: dict[str, list[int]], k: int) -> tuple[dict, dict]:
    """(the engine's counts, the walk's) over replies that are equal, without what lies behind a reply's end.

    vLLM counts tokens as accepted that it then cuts off (behind the end token, beyond max_tokens); with short replies
    these are many. `alone`: each prompt's new tokens by step, and counters (speculate.py).
    """
    engine, offline = ({"drafts": 0, "accepted": [0] * k} for _ in range(2))
    for one, record in zip(alone, records, strict=True):
        if one["output"] != record["output_ids"] or record["id"] not in walks:
            continue
        *earlier, last = [0, *one["steps"][1:]]  # the first step's token comes of the prompt, not of a draft
        taken = [new - 1 for new in earlier[1:]]
        if len(one["steps"]) > 1:
            taken.append(min(int(sum(one["accepted"])) - sum(taken), last))
        for counts, accepted in ((engine, taken), (offline, walks[record["id"]])):
            counts["drafts"] += len(accepted)
            counts["accepted"] = [n + sum(a > at for a in accepted) for at, n in enumerate(counts["accepted"])]
    return engine, offline
