"""The commands of README.md, of the runbook and of configs/README.md, and what the rehearsal changes in them.

Every command runs as it stands, but for REWRITES; what cannot run here is EXEMPT; both say why. Sizes are cut in the
config (EDITS), and there are few questions, so that `--n 10000` stands. What a command must print, because the document
says so, is in PROMISES. tests/test_readme.py holds these tables to the documents, both ways.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).resolve().parents[2]
README, RUNBOOK, CONFIGS = "README.md", "configs/GPU_NODE.md", "configs/README.md"
TOGETHER = "# side by side"  # first line of a block: its commands run at the same time
# Sections that need another run folder than the day's own, and the name of their clone; WINDOW starts with its records.
NODES, WINDOW = "node0", "window"
FRESH = {"Several nodes": NODES, "A disk budget for the states": WINDOW}
PROGRAMS = {"python", "torchrun", "vllm", "hf", "cp", "df", "dd", "rm"}  # what a command may start with, as it is run

EXEMPT = {  # a whole command: why no step runs it
    r"make demo": "ten minutes; the tests run its config's four stages in small",
    r"make test": "runs the tests, this one among them",
    r"make rehearse": "is what runs this",
    r"nvidia-smi": "there is no GPU",
    r"python 04_train\.py --export-format speculators": "no MLA draft has that layout; the fast tests write it",
    r"pip install --constraint constraints.txt --editable \.": "is what `make` does first",
}

REWRITES = [  # (part of a command, what stands there when it is run, why)
    (r"(--nnodes 2 --nproc-per-node) 8", r"\1 1", "two nodes of one CPU rank each"),
    (
        r"(CUDA_VISIBLE_DEVICES=\S+ )?torchrun --nproc-per-node [48]",
        "torchrun --nproc-per-node 2",
        "two cores, no GPUs",
    ),
    (r"(--extract-urls http://localhost:)8001", r"\g<1>{extraction_port}", "where the extraction server listens"),
    (r"node0:29500", "localhost:{rendezvous_port}", "both nodes are this machine"),
    (r"rsync -a othernode:kimi-eagle3/(\S+) ", r"cp -a ../othernode/\1. ", "the other node is the folder beside it"),
    (r"(hf download) .*", r"\1 --help", "595 GB; that the command and its flag exist can be seen without"),
    (r"count=256 oflag=direct", "count=2", "16 GB; and not every file system takes direct writes"),
    (r"vllm serve moonshotai/Kimi-K2.5", "vllm serve models/kimi-k2.5", "the tiny Kimi lies there, as step 0 says"),
    (r"(vllm serve .*)--tensor-parallel-size 8", r"\1", "two cores"),
    (r"(vllm serve .*--port) 8000", r"\1 {draft_port}", "8000 may be taken, and the other servers go on"),
    (r"(--serve-eval http://localhost:)8000", r"\g<1>{draft_port}", "where the server above listens"),
    (r"(--without-draft http://localhost:)8001", r"\g<1>{generation_port}", "the target alone, which 01b asked"),
    (r"(runs/\S+/checkpoints)/step-00000200", r"\1/$(ls \1 | head -1)", "few steps are taken here"),
]

PROMISES = [  # (part of a command, what it must print, each a regular expression)
    (r"01b.*--print-server-command", [r"^vllm serve models/kimi-k2\.5 --port \d+", "--reasoning-parser kimi_k2"]),
    (r"01b.*--context-tokens 65536 --print", ["--max-model-len 65536"]),
    (r"02.*--print-server-command", [r"vllm serve models/kimi-k2\.5 --port \d+", "extract_hidden_states"]),
    (r"--probe", ["^verdict: ready$", "rebuilt ids +equal to the server's"]),
    (r"01b.*--n \d+( --part \d/\d)?$", [r"^01b: \d+ new samples", r"failed +0$", "field: reasoning"]),
    (r"02.*--window", [r"^ +window +\d+ rounds"]),
    (r"02_extract\S+( --(config|n|part|extract-urls|window) \S+)*$", ["on policy .*first choice", r"failed +0$"]),
    (r"03\S+( --config \S+)?$", ["^03 done", r"packs .*\d% full", "coverage "]),
    (r"torchrun.*04", ["^04 done", r"acceptance length, k=3 +\d\.\d{3}", r"untrained draft +\d", r"bigram floor +\d"]),
    (r"--check-export", ["servable with .*vLLM"]),
    (r"--export-only", ["^04 done", r"export +\S+/export: "]),
    (r"--without-draft", [r"^ *speed-up +\d"]),
    (r"--serve-eval", [r"acceptance length, k=3 +\d\.\d{3} over [\d,]+ drafts"]),
    (r"01b.*--n 10000 --dry-run", ["there already, \\d+ to generate"]),
    (r"--dry-run", ["^the whole run, .* samples", "^hours with "]),
    (r"hf download", ["--local-dir"]),
    (r"^dd ", [r"copied, .*/s$"]),
    (r"^df ", [r"\d%"]),
]

QUESTIONS = 80  # more than the runbook's first 64, so that the command after it continues a run

EDITS = {  # settings of configs/kimi-k2.5.toml, as TOML; {} are folders and ports of this run
    "model": '"models/kimi-k2.5"',  # where the runbook downloads it to
    "tensor_parallel": "1",
    "dataset": '"questions.jsonl"',
    "base_urls": '["http://localhost:{generation_port}/v1"]',
    "temperature": "0.0",  # so small a model is sure of its greedy words only, and 02 asks how sure it is
    "max_tokens": "24",
    "context_tokens": "2048",
    "outage_s": "20.0",  # a server that is not there must not take the time of the rest
    "extract_urls": '["http://localhost:{extraction_port}/v1"]',
    "aux_layers": "[1, 3, 5]",
    "max_tokens_per_sample": "512",
    "spool": '"{spool}"',
    "draft_vocab_size": "2048",
    "holdout_share": "0.2",
    "sample_tokens": "256",
    "pack_tokens": "256",
    "form": '"mla"',  # vLLM's CPU build serves no Llama draft beside an MLA target
    "intermediate_size": "256",
    "attention_heads": "4",
    "key_value_heads": "4",
    "epochs": "2.0",
    "unrolled_steps": "3\neval_steps = 3\ncompile = false",
}
SERVING = "\n[serving]\neval_max_tokens = 8\n"


class Block(NamedTuple):
    """A bash block: its document, the heading above it, its commands, whether they run at the same time."""

    document: str
    section: str
    commands: list[str]
    together: bool


def blocks(document: str) -> Iterator[Block]:
    """The document's bash blocks in its order, continued lines joined, comments left out."""
    text = (REPOSITORY / document).read_text("utf-8")
    section = ""
    for heading, body in re.findall(r"^## ([^\n]+)$|^```bash\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        section = heading or section
        if body:
            lines = [line.strip() for line in body.replace("\\\n", " ").splitlines()]
            commands = [line for line in lines if line and not line.startswith("#")]
            yield Block(document, section, commands, lines[0].startswith(TOGETHER))


def inline_commands(document: str) -> list[str]:
    """Whole commands in the running text: `python 01b_generate_synthetic.py --n 10000`, `make demo`."""
    text = re.sub(r"^```.*?^```", "", (REPOSITORY / document).read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    return re.findall(r"`((?:python|torchrun|make) [^`]+)`", text)


def exempt(command: str) -> str | None:
    """Why nothing runs this command, or None."""
    return next((why for pattern, why in EXEMPT.items() if re.fullmatch(pattern, command)), None)


def as_run(command: str, **ports: int) -> str:
    """The command as the rehearsal runs it."""
    for pattern, replacement, _ in REWRITES:
        command = re.sub(pattern, replacement.format(**ports), command)
    return command


def promised(command: str) -> list[str]:
    """What the command, as it is written in the document, must print."""
    return [said for pattern, expected in PROMISES if re.search(pattern, command) for said in expected]


def smaller(config: str, **places: object) -> str:
    """The config with EDITS in place of its values, each of which must be there exactly once."""
    for key, value in EDITS.items():
        line = f"{key} = {value.format(**places)}"
        config, found = re.subn(rf"^{key} = .*$", lambda _, line=line: line, config, flags=re.MULTILINE)
        assert found == 1, f"{key} stands {found} times in the config"
    return config + SERVING
