"""Greedy decoding in vLLM with and without drafts. Runs in vLLM's own environment; reads and writes JSON.

    .venv-vllm/bin/python -m tests.rehearse.speculate JOB.json RESULT.json

JOB: {"target", "prompts": [[ids]], "max_tokens", "flags": {LLM arguments}, "engines": [null | {"draft", "k"}]}.
RESULT: an entry an engine, in order: {"outputs": [[ids]], "seconds", "drafts", "proposed", "accepted": [per position]}.
"""

import gc
import json
import os
import sys
import time
from pathlib import Path

# One process for engine and caller: the seven engines of a sweep would else import torch and vLLM seven times.
os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory

DEFAULTS = {"dtype": "bfloat16", "enforce_eager": True, "max_model_len": 1024, "max_num_seqs": 16, "seed": 0}


def run(job: dict, engine: dict | None) -> dict:
    """All prompts through one engine, and what it counted."""
    speculative = engine and {"method": "eagle3", "model": engine["draft"], "num_speculative_tokens": engine["k"]}
    llm = LLM(
        model=job["target"], speculative_config=speculative, disable_log_stats=False, **DEFAULTS | job.get("flags", {})
    )
    prompts = [{"prompt_token_ids": ids} for ids in job["prompts"]]
    started = time.monotonic()
    outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=job["max_tokens"]), use_tqdm=False)
    result = {"outputs": [list(o.outputs[0].token_ids) for o in outputs], "seconds": time.monotonic() - started}
    if engine:
        result |= counted(llm)
    del llm
    gc.collect()
    cleanup_dist_env_and_memory()
    return result


def counted(llm: LLM) -> dict:
    metrics = {metric.name: metric for metric in llm.get_metrics()}
    prefix = "vllm:spec_decode_num_"
    return {
        "drafts": metrics[f"{prefix}drafts"].value,
        "proposed": metrics[f"{prefix}draft_tokens"].value,
        "accepted": metrics[f"{prefix}accepted_tokens_per_pos"].values,
    }


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
