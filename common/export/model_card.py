"""The README.md in the served folder: what the draft is for, what it was made of, what it gains, how to serve it."""

import json
import shlex
from pathlib import Path

from common.export.findings import SGLANG, VLLM, Findings
from common.pipeline.settings import Target
from common.servers.commands import draft_command

PORT = 8000


def sglang_command(target: Target, port: int, draft_folder: str, draft_tokens: int) -> str:
    """Serve the target with a trained draft in SGLang: a chain of `draft_tokens`, as the draft was measured."""
    words = [["python", "-m", "sglang.launch_server", "--model-path", target.model, "--port", str(port)]]
    words += [["--trust-remote-code"]] if "--trust-remote-code" in target.server_flags else []
    words += [["--tp-size", str(target.tensor_parallel)]] if target.tensor_parallel > 1 else []
    words += [["--reasoning-parser", target.reasoning_parser]] if target.reasoning_parser else []
    words += [["--speculative-algorithm", "EAGLE3"], ["--speculative-draft-model-path", draft_folder]]
    words += [["--speculative-num-steps", str(draft_tokens)], ["--speculative-eagle-topk", "1"]]
    words += [["--speculative-num-draft-tokens", str(draft_tokens + 1)]]  # the root counts as one there
    return " \\\n  ".join(" ".join(map(shlex.quote, line)) for line in words)


def model_card(target: Target, served: str, facts: dict, figures: dict, draft_tokens: int, findings: Findings) -> str:
    """README.md. `facts`: what report.html says too (draft, data, train, baselines), `figures`: an `eval` line.

    `findings`: of draft_check, on the served folder; no command is printed for an engine that would not serve it.
    """
    name = target.model if not Path(target.model).exists() else ""
    head = ["---", *([f"base_model: {name}"] if name else []), "tags: [eagle3, speculative-decoding]", "---", ""]
    measure = f"python 04_train.py --config CONFIG --serve-eval http://localhost:{PORT} --questions FILE.jsonl"
    return "\n".join(
        [
            *head,
            f"# EAGLE-3 draft for {target.model}",
            "",
            "A draft model for speculative decoding: the target writes the same text, in fewer forward passes.",
            f"Trained and measured with kimi-eagle3; the checkpoint of step {facts['chosen_step']:,}.",
            "",
            "## What it gains",
            "",
            *_acceptance(figures, facts.get("baselines") or {}),
            "",
            "## Serve it",
            "",
            "vLLM (0.32 or later):",
            "",
            *_command(VLLM, draft_command(target, PORT, served, draft_tokens), findings),
            "",
            "SGLang:",
            "",
            *_command(SGLANG, sglang_command(target, PORT, served, draft_tokens), findings),
            "",
            "Acceptance and speed on the running vLLM server, over your own questions:",
            "",
            *_code(measure),
            "",
            "## What it was made of",
            "",
            *_table("draft", facts["draft"]),
            *_table("data", facts["data"]),
            *_table("training", facts["train"]),
        ]
    )


def _acceptance(figures: dict, baselines: dict) -> list[str]:
    """Acceptance length by k beside the two floors."""
    walk = {k: entry for k, entry in (figures.get("walk") or {}).items() if entry.get("length")}
    if not walk:
        return ["Not measured: the run had no held-out replies."]
    rows = [
        f"| {k} | **{entry['length']:.3f}** | {_share(entry)} | {_length(baselines.get('bigram'), k)} "
        f"| {_length(baselines.get('untrained'), k)} | {entry['drafts']:,} |"
        for k, entry in sorted(walk.items(), key=lambda item: int(item[0]))
    ]
    return [
        "Acceptance length on held-out replies: tokens that the target gains a forward pass, one of its own included,",
        "walked as an engine does. The floors: a bigram table of the same training tokens, and the draft untrained.",
        "",
        "| draft tokens k | acceptance length | draft tokens accepted | bigram | untrained | drafts |",
        "|---|---|---|---|---|---|",
        *rows,
    ]


def _share(entry: dict) -> str:
    proposed = entry["drafts"] * len(entry["accepted"])
    return f"{sum(entry['accepted']) / proposed:.1%}" if proposed else "–"


def _length(figures: dict | None, k: str) -> str:
    length = ((figures or {}).get("walk") or {}).get(k, {}).get("length")
    return f"{length:.3f}" if length else "–"


def _command(engine: str, command: str, findings: Findings) -> list[str]:
    """How to serve with an engine, or why it would not serve the draft as it was trained."""
    if engine in findings.servable():
        return [*_code(command), *(f"- {finding.text}" for finding in findings if engine in finding.engine)]
    return [f"Not as it was trained: {why}." for why in findings.errors(engine)]


def _code(command: str) -> list[str]:
    return ["```bash", command, "```"]


def _table(title: str, facts: dict) -> list[str]:
    rows = [f"| {name} | {_cell(value)} |" for name, value in facts.items()]
    return [f"| {title} | |", "|---|---|", *rows, ""] if rows else []


def _cell(value) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text.replace("|", "\\|").replace("\n", " ") or "–"
