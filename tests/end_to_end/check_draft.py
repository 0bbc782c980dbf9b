"""The trained draft in vLLM: greedy output with and without it, and its acceptance beside stage 04's offline walk."""

import json
import subprocess
from pathlib import Path

import torch

from common.dataset.index import HELD_OUT, Index
from common.dataset.shards import Shard
from tests.end_to_end.pipeline_run import Run, quiet
from tests.end_to_end.server import ENVIRONMENT, VLLM_PYTHON
from tests.support.stages import ROOT

TIMEOUT_S = 1200
# How far the engine's counters may be from the offline walk's. The acceptance length is 1 + accepted / drafts. So the
# count of a position may be off by a share of the drafts, where that is more than 3 % of the count itself: 1 % of the
# drafts moves the length by 0.01. Late positions are reached seldom (85 of 960 drafts, say), and the walk reads stored
# states, which are bf16, where the server has its own in float32: some choices of the draft differ, which can be more
# than 3 % of 85.
LENGTH_OFF = 0.02  # tokens
COUNT_OFF, DRAFTS_OFF = 0.03, 0.01  # shares: of the count, of the drafts
TIE_LOGITS = 0.5  # bf16 logits near 20 have steps of 0.125, and 30 layers in bf16 move them by a few steps


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
    """Greedy outputs and counters of each engine, from speculate.py under vLLM's own Python.

    `engines` as in speculate.py; `flags` are arguments of vLLM's LLM.
    """
    job, result = run.folder / f"{name}.job.json", run.folder / f"{name}.result.json"
    result.unlink(missing_ok=True)
    facts = {"target": str(target.resolve()), "prompts": prompts, "max_tokens": max_tokens, "engines": engines}
    facts["flags"] = flags
    job.write_text(json.dumps(facts))
    command = [str(VLLM_PYTHON), "-m", "tests.end_to_end.speculate", str(job.resolve()), str(result.resolve())]
    with (run.folder / f"{name}.log").open("w") as log:
        done = subprocess.run(command, cwd=ROOT, env=quiet() | ENVIRONMENT, stdout=log, stderr=log, timeout=TIMEOUT_S)
    if done.returncode or not result.exists():
        tail = "\n".join((run.folder / f"{name}.log").read_text(errors="replace").splitlines()[-15:])
        raise RuntimeError(f"{command[2]} ended with {done.returncode}:\n{tail}")
    return json.loads(result.read_text())


# ---- losslessness ----


def same_outputs(one: list, other: list) -> int:
    return sum(a == b for a, b in zip(one, other, strict=True))


def check_lossless(check, name: str, records: list[dict], plain: list, drafted: list) -> None:
    """The outputs are identical, token by token, with and without the draft, and are the replies that 01b recorded."""
    same, recorded = same_outputs(plain, drafted), same_outputs(plain, [r["output_ids"] for r in records])
    check(f"{name}: output with and without the draft is identical", same == len(plain), f"{same} of {len(plain)}")
    check(f"{name}: it is the reply that 01b recorded", recorded == len(plain), f"{recorded} of {len(plain)}")


def check_ties(check, name: str, model, prompts: list[list[int]], plain: list, drafted: list) -> str:
    """Where two bf16 outputs part, both tokens must be nearly equal choices of the target; returns a row for the table.

    An engine verifies several tokens of a draft at a time: other shapes, other kernels, another rounding of the logits.
    `model` is the target in float32, which says how far apart the two tokens are.
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
    """An engine's counters are the walk's, within the limits above; returns a row for the table."""
    row, off = row_of(engine, walk), abs(engine_length(engine) - engine_length(walk))
    check(f"{name}: acceptance length within {LENGTH_OFF}", off <= LENGTH_OFF, row)
    drafts = walk["drafts"]
    seen = f"{engine['drafts']:.0f} beside {drafts}"
    check(f"{name}: drafts within {COUNT_OFF:.0%}", abs(engine["drafts"] - drafts) <= COUNT_OFF * drafts, seen)
    pairs = list(zip(engine["accepted"], walk["accepted"], strict=True))
    holds = all(abs(a - b) <= max(COUNT_OFF * b, DRAFTS_OFF * drafts) for a, b in pairs)
    worst = max(pairs, key=lambda pair: abs(pair[0] - pair[1]))
    seen = f"furthest: {worst[0]:.0f} beside {worst[1]}"
    limits = f"{COUNT_OFF:.0%} of the count or {DRAFTS_OFF:.0%} of the drafts"
    check(f"{name}: accepted per position within {limits}", holds, seen)
    return row


def inside_replies(alone: list[dict], records: list[dict], walks: dict[str, list[int]], k: int) -> tuple[dict, dict]:
    """(the engine's counts, the walk's) over equal replies, without the accepted tokens after a reply's end.

    vLLM also counts accepted tokens that it then cuts off (after the end token, beyond max_tokens); of short replies
    these are many. `alone` has each prompt's new tokens by step, and its counters (speculate.py).
    """
    engine, offline = ({"drafts": 0, "accepted": [0] * k} for _ in range(2))
    for one, record in zip(alone, records, strict=True):
        if one["output"] != record["output_ids"] or record["id"] not in walks:
            continue
        *earlier, last = [0, *one["steps"][1:]]  # the first step's token follows the prompt, no draft proposed it
        taken = [new - 1 for new in earlier[1:]]
        if len(one["steps"]) > 1:
            taken.append(min(int(sum(one["accepted"])) - sum(taken), last))
        for counts, accepted in ((engine, taken), (offline, walks[record["id"]])):
            counts["drafts"] += len(accepted)
            counts["accepted"] = [n + sum(a > at for a in accepted) for at, n in enumerate(counts["accepted"])]
    return engine, offline
