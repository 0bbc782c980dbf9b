"""Greedy decoding in vLLM with and without drafts. Runs in vLLM's own environment; reads and writes JSON.

    .venv-vllm/bin/python -m tests.end_to_end.speculate JOB.json RESULT.json

JOB: {"target", "prompts": [[ids]], "max_tokens", "flags": {of LLM}, "engines": [null | {"draft", "k", "alone"}]}.
RESULT: an entry an engine, in order: {"outputs": [[ids]], "seconds", "drafts", "proposed", "accepted": [per position]};
with "alone", every prompt is run once more by itself: "alone": [{"output", "steps": [new tokens], "accepted": [...]}].
"""

import gc
import json
import sys
import time
from pathlib import Path

from vllm import LLM, SamplingParams

DEFAULTS = {"dtype": "bfloat16", "enforce_eager": True, "max_model_len": 1024, "max_num_seqs": 16, "seed": 0}


def run(job: dict, engine: dict | None) -> dict:
    """All prompts through one engine, and what it counted."""
    speculative = engine and {"method": "eagle3", "model": engine["draft"], "num_speculative_tokens": engine["k"]}
    llm = LLM(
        model=job["target"], speculative_config=speculative, disable_log_stats=False, **DEFAULTS | job.get("flags", {})
    )
    prompts = [{"prompt_token_ids": ids} for ids in job["prompts"]]
    greedy = {"temperature": 0.0, "max_tokens": job["max_tokens"]}
    before = counted(llm) if engine else {}
    started = time.monotonic()
    outputs = llm.generate(prompts, SamplingParams(**greedy), use_tqdm=False)
    result = {"outputs": [list(o.outputs[0].token_ids) for o in outputs], "seconds": time.monotonic() - started}
    if engine:
        result |= difference(counted(llm), before)
        if engine.get("alone"):
            result["alone"] = [alone(llm, prompt, SamplingParams(**greedy), str(i)) for i, prompt in enumerate(prompts)]
    llm.llm_engine.engine_core.shutdown()
    del llm
    gc.collect()
    return result


def alone(llm: LLM, prompt: dict, sampling: SamplingParams, name: str) -> dict:
    """One prompt by itself, step by step: the first step is the prompt's, each further one verifies a draft."""
    before = counted(llm)
    llm.llm_engine.add_request(name, prompt, sampling)
    steps, output = [], []
    while llm.llm_engine.has_unfinished_requests():
        for answer in llm.llm_engine.step():
            longer = list(answer.outputs[0].token_ids)
            steps.append(len(longer) - len(output))
            output = longer
    return {"output": output, "steps": steps} | difference(counted(llm), before)


def counted(llm: LLM) -> dict:
    metrics = {metric.name: metric for metric in llm.get_metrics()}
    prefix = "vllm:spec_decode_num_"
    return {
        "drafts": metrics[f"{prefix}drafts"].value,
        "proposed": metrics[f"{prefix}draft_tokens"].value,
        "accepted": metrics[f"{prefix}accepted_tokens_per_pos"].values,
    }


def difference(after: dict, before: dict) -> dict:
    """The counters belong to this process, not to an engine: what was added between."""
    added = {key: after[key] - before[key] for key in ("drafts", "proposed")}
    earlier = [*before["accepted"], *[0] * len(after["accepted"])]
    return added | {"accepted": [a - b for a, b in zip(after["accepted"], earlier, strict=False)]}


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    results = []
    for engine in job["engines"]:
        started = time.monotonic()
        results.append(run(job, engine))
        print(f"engine {engine}: {time.monotonic() - started:.0f} s", flush=True)
    Path(sys.argv[2]).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
