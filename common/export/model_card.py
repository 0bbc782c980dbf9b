"""The README.md in the served folder: what the draft is for, what it was made of, what it gains, how to serve it."""

import json
from pathlib import Path

from common.export.findings import SGLANG, VLLM, Findings
from common.pipeline.settings import Target
from common.pipeline.templates import render
from common.servers.commands import draft_command, sglang_command

PORT = 8000
TEMPLATE = Path(__file__).with_name("model_card.md.jinja")


def model_card(target: Target, served: str, facts: dict, figures: dict, draft_tokens: int, findings: Findings) -> str:
    """README.md. `facts`: the tables of report.html (draft, data, train) and the baselines; `figures`: an `eval` line.

    `findings`: of the engine check on the served folder; no command is printed for an engine that would not serve it.
    """
    commands = [
        (VLLM, "vLLM (0.32 or later)", draft_command(target, PORT, served, draft_tokens)),
        (SGLANG, "SGLang", sglang_command(target, PORT, served, draft_tokens)),
    ]
    return render(
        TEMPLATE,
        **{"target": target.model, "on_hub": not Path(target.model).exists(), "port": PORT},
        **{"facts": facts, "walk": figures["walk"], "baselines": facts["baselines"]},
        **{"commands": commands, "findings": findings, "cell": cell},
        tables=[("draft", facts["draft"]), ("data", facts["data"]), ("training", facts["train"])],
    )


def cell(value) -> str:
    """A setting's value as text in a Markdown table."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text.replace("|", "\\|").replace("\n", " ") or "–"
