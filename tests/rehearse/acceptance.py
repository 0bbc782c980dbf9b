"""The trained draft in vLLM: greedy output with and without it, and its acceptance beside stage 04's offline walk."""

import json
import subprocess
from pathlib import Path

import torch

from common.dataset import HELD_OUT, Index
from common.shards import Shard
from common.target import read_tensors
from tests.rehearse.server import ENVIRONMENT, REPOSITORY, VLLM_PYTHON
from tests.rehearse.stages import Run, quiet

TIMEOUT_S = 1200
LENGTH_OFF, SHARE_OFF = 0.02, 0.03  # what engine and walk may differ by: in length; in drafts and accepted tokens
COUNT_OFF = 5  # of a sparse position 3 % would be less than one reply's end
TIE_LOGITS = 0.25  # bf16 logits near 20 have steps of 0.125: two tokens so close may change places with the batch


def held_out_records(run: Run) -> list[dict]:
    """The records that 03 held out, in the order of the index."""
    index = Index.load(run.folder / "03_dataset" / "index.safetensors")
    shards = [Shard(run.folder / "02_hidden" / name) for name in index.shards]
    rows = index.rows(HELD_OUT)
    ids = [shards[int(index.shard[row])].facts[int(index.number[row])]["id"] for row in rows]
    records = {record["id"]: record for record in run.records()}
    return [records[id] for id in ids]


def decode(run: Run, name: str, target: Path, prompts: list[list[int]], max_tokens: int, engines: list) -> list[dict]:
    """Greedy outputs and counters of each engine (speculate.py), run by vLLM's own Python."""
    job, result = run.folder / f"{name}.job.json", run.folder / f"{name}.result.json"
    result.unlink(missing_ok=True)
    facts = {"target": str(target.resolve()), "prompts": prompts, "max_tokens": max_tokens, "engines": engines}
    job.write_text(json.dumps(facts))
    command = [str(VLLM_PYTHON), "-m", "tests.rehearse.speculate", str(job.resolve()), str(result.resolve())]
    with (run.folder / f"{name}.log").open("w") as log:
        done = subprocess.run(
            command, cwd=REPOSITORY, env=quiet() | ENVIRONMENT, stdout=log, stderr=log, timeout=TIMEOUT_S
        )
    if done.returncode or not result.exists():
        tail = "\n".join((run.folder / f"{name}.log").read_text(errors="replace").splitlines()[-15:])
        raise RuntimeError(f"{command[2]} ended with {done.returncode}:\n{tail}")
    return json.loads(result.read_text())


# ---- losslessness ----


def check_lossless(check, name: str, run: Run, records: list[dict], plain: list, drafted: list) -> None:
    """Identical token by token; where not, both tokens must be the target's first choice within a bf16 tie."""
    differ = [i for i, (a, b) in enumerate(zip(plain, drafted, strict=True)) if a != b]
    ties = [tie_gap(run, records[i], plain[i], drafted[i]) for i in differ]
    seen = f"{len(plain) - len(differ)} of {len(plain)} identical"
    seen += "".join(f"; {records[i]['id'][:6]} parts at {at}: {gap}" for i, (at, gap) in zip(differ, ties, strict=True))
    check(f"{name}: greedy output with and without the draft is the same", not differ or all_ties(ties), seen)
    stored = sum(out == record["output_ids"] for out, record in zip(plain, records, strict=True))
    check(f"{name}: and mostly what the server wrote for 01b", stored >= 0.8 * len(plain), f"{stored} of {len(plain)}")


def all_ties(ties: list[tuple[int, str]]) -> bool:
    return all(gap.startswith("tie") for _, gap in ties)


def tie_gap(run: Run, record: dict, plain: list[int], drafted: list[int]) -> tuple[int, str]:
    """(first place where two outputs part, how far apart the target's logits for the two tokens are there).

    The stored states are those of the recorded reply, so the place must lie within what it shares with both.
    """
    at = next((i for i, (a, b) in enumerate(zip(plain, drafted, strict=False)) if a != b), None)
    if at is None:
        return min(len(plain), len(drafted)), "one is longer"
    if plain[:at] != record["output_ids"][:at]:
        return at, "behind an earlier fork from the record"
    row = len(record["prompt_ids"]) + at - 1
    last = next(last for id, _, _, last in run.sequences() if id == record["id"])[row].float()
    logits = head_logits(run, last)
    gap = abs(float(logits[plain[at]] - logits[drafted[at]]))
    ranks = [int((logits > logits[token]).sum()) for token in (plain[at], drafted[at])]
    word = "tie" if gap <= TIE_LOGITS and max(ranks) <= 1 else "NO TIE"
    return at, f"{word}, logits {gap:.3f} apart, ranks {ranks}"


def head_logits(run: Run, last: torch.Tensor) -> torch.Tensor:
    """The target's logits [V] of one state before the final norm."""
    from common.config import Target
    from common.target import read_sizes

    target = Target(model=str(run.target["model"]))
    tensors = read_tensors(target, "norm", "lm_head")
    normed = torch.nn.functional.rms_norm(last, last.shape, None, read_sizes(target).eps).bfloat16()
    return ((normed * tensors["norm"].bfloat16()) @ tensors["lm_head"].bfloat16().T).float()


# ---- acceptance ----


def engine_length(counted: dict) -> float:
    return 1 + sum(counted["accepted"]) / counted["drafts"] if counted["drafts"] else 1.0


def check_acceptance(check, name: str, engine: dict, walk: dict, strict: bool = True) -> str:
    """One engine's counters beside the walk's; returns a row for the table. Reported only where not `strict`."""
    length, drafts, accepted = engine_length(engine), int(engine["drafts"]), [int(n) for n in engine["accepted"]]
    row = f"engine {length:.3f} ({drafts}, {accepted}), "
    row += f"offline {walk['length']:.3f} ({walk['drafts']}, {walk['accepted']})"
    if strict:
        check(f"{name}: acceptance length within {LENGTH_OFF}", abs(length - walk["length"]) <= LENGTH_OFF, row)
        pairs = [(drafts, walk["drafts"]), *zip(accepted, walk["accepted"], strict=True)]
        worst = max(abs(a - b) / max(b, 1) for a, b in pairs)
        holds = all(abs(a - b) <= max(SHARE_OFF * b, COUNT_OFF) for a, b in pairs)
        check(f"{name}: drafts and accepted per position within {SHARE_OFF:.0%}", holds, f"worst {worst:.1%}")
    return row
