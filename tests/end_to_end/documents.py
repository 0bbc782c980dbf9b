"""The commands of README.md, of the runbook and of configs/README.md, and what the rehearsal changes in them.

Every documented command runs. It runs as it is written, except for the changes in REWRITES; a command that cannot run
here is in EXEMPT; each entry of both says why. Sizes are cut in the config (EDITS), and there are few questions, so
that `--n 10000` need not be changed. PROMISES says what a command must print because the document says so.
tests/test_readme.py checks that every command is covered by these tables and that no entry of them is unused.

A command on its way, with PROMISES' pattern `--without-draft`:

    in the document   python 04_train.py --serve-eval http://localhost:8000 --without-draft http://localhost:8001
    as_run()          python 04_train.py --serve-eval http://localhost:41873 --without-draft http://localhost:39211
    must print        a line that matches `^ *speed-up +\\d`

To document a new command: write it into a bash block. If the test then asks for it, add a row to PROMISES (what a user
should see), and a row to REWRITES if the command names GPUs, ports or machines that do not exist here.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

from tests.support.stages import ROOT

README, RUNBOOK, CONFIGS = "README.md", "configs/GPU_NODE.md", "configs/README.md"
TOGETHER = "# side by side"  # as first line of a block: its commands run at the same time
# Sections whose commands run in a clone of their own, and its name. WINDOW's clone starts with the runbook's records.
NODES, WINDOW = "node0", "window"
FRESH = {"Several nodes": NODES, "A disk budget for the states": WINDOW}
PROGRAMS = {"python", "torchrun", "vllm", "hf", "cp", "df", "dd", "rm"}  # first words of commands, after REWRITES

EXEMPT = {  # pattern of a whole command: why the rehearsal does not run it
    r"make demo": "takes ten minutes; the tests run all four stages with its config on few samples",
    r"make test": "runs the tests, among them the one that reads this table",
    r"make rehearse": "is the rehearsal itself",
    r"nvidia-smi": "there is no GPU",
    r"python 04_train\.py --export-format speculators": "that layout has no MLA drafts; tests/export writes it",
    r"pip install --constraint constraints.txt --editable \.": "is what `make` does first",
}

REWRITES = [  # (pattern in a command, its replacement when the command runs, why); {} are ports of this rehearsal
    (r"(--nnodes 2 --nproc-per-node) 8", r"\1 1", "two nodes of one CPU rank each"),
    (
        r"(CUDA_VISIBLE_DEVICES=\S+ )?torchrun --nproc-per-node [48]",
        "torchrun --nproc-per-node 2",
        "two cores, no GPUs",
    ),
    (r"(--extract-urls http://localhost:)8001", r"\g<1>{extraction_port}", "where the extraction server listens"),
    (r"node0:29500", "localhost:{rendezvous_port}", "both nodes are this machine"),
    (
        r"rsync -a othernode:kimi-eagle3/(\S+) ",
        r"cp -a ../othernode/\1. ",
        "the other node is a folder beside this one",
    ),
    (r"(hf download) .*", r"\1 --help", "595 GB; --help shows that the command and its flag exist"),
    (r"count=256 oflag=direct", "count=2", "16 GB; and not every file system takes direct writes"),
    (
        r"vllm serve moonshotai/Kimi-K2.5",
        "vllm serve models/kimi-k2.5",
        "where the tiny Kimi is, as after the runbook's step 0",
    ),
    (r"(vllm serve .*)--tensor-parallel-size 8", r"\1", "two cores"),
    (r"(vllm serve .*--port) 8000", r"\1 {draft_port}", "the other servers still run, and 8000 may be in use"),
    (r"(--serve-eval http://localhost:)8000", r"\g<1>{draft_port}", "where the server above listens"),
    (r"(--without-draft http://localhost:)8001", r"\g<1>{generation_port}", "the target alone, which 01b asked"),
    (r"(runs/\S+/checkpoints)/step-00000200", r"\1/$(ls \1 | head -1)", "training ends before step 200 here"),
]

PROMISES = [  # (pattern in a command as documented, patterns of what it must print)
    (r"01b.*--print-server-command", [r"^vllm serve models/kimi-k2\.5 --port \d+", "--reasoning-parser kimi_k2"]),
    (r"01b.*--context-tokens 65536 --print", ["--max-model-len 65536"]),
    (r"02.*--print-server-command", [r"vllm serve models/kimi-k2\.5 --port \d+", "extract_hidden_states"]),
    (r"--probe", ["^verdict: ready$", "rebuilt ids +equal to the server's"]),
    (r"01b.*--n \d+( --part \d/\d)?$", [r"^01b: \d+ new samples", r"failed +0$", "field: reasoning"]),
    (r"02.*--window", [r"^ +disk budget +\d+ rounds"]),
    (r"02_extract\S+( --(config|n|part|extract-urls|window) \S+)*$", ["on policy .*first choice", r"failed +0$"]),
    (r"03\S+( --config \S+)?$", ["^03 done", r"longest +[\d,]+ tokens", "coverage "]),
    (r"torchrun.*04", ["^04 done", r"acceptance length, k=3 +\d\.\d{3}", r"untrained draft +\d", r"bigram floor +\d"]),
    (r"--check-export", ["servable with .*vLLM"]),
    (r"--export-only", ["^04 done", r"export +\S+/export: "]),
    (r"--without-draft", [r"^ *speed-up +\d"]),
    (r"--serve-eval", [r"acceptance length, k=3 +\d\.\d{3} over [\d,]+ drafts"]),
    (r"01b.*--n 10000 --dry-run", ["stored already, \\d+ to generate"]),
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
    "temperature": "0.0",  # 02 checks how likely the replies are, and so small a model gives others low probabilities
    "max_tokens": "24",
    "context_tokens": "2048",
    "outage_s": "20.0",  # commands that meet no server must fail soon
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
    text = (ROOT / document).read_text("utf-8")
    section = ""
    for heading, body in re.findall(r"^## ([^\n]+)$|^```bash\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        section = heading or section
        if body:
            lines = [line.strip() for line in body.replace("\\\n", " ").splitlines()]
            commands = [line for line in lines if line and not line.startswith("#")]
            yield Block(document, section, commands, lines[0].startswith(TOGETHER))


def inline_commands(document: str) -> list[str]:
    """Whole commands in the running text: `python 01b_generate_synthetic.py --n 10000`, `make demo`."""
    text = re.sub(r"^```.*?^```", "", (ROOT / document).read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    return re.findall(r"`((?:python|torchrun|make) [^`]+)`", text)


def exempt(command: str) -> str | None:
    """Why nothing runs this command, or None."""
    return next((why for pattern, why in EXEMPT.items() if re.fullmatch(pattern, command)), None)


def as_run(command: str, **ports: int) -> str:
    """The command as the rehearsal runs it: each row of REWRITES applied, in order."""
    for pattern, replacement, _ in REWRITES:
        command = re.sub(pattern, replacement.format(**ports), command)
    return command


def promised(command: str) -> list[str]:
    """Patterns of what a command, as the document has it, must print."""
    return [line for pattern, expected in PROMISES if re.search(pattern, command) for line in expected]


def smaller(config: str, **folders_and_ports: object) -> str:
    """The config with the values of EDITS; each of their keys must be in it exactly once."""
    for key, value in EDITS.items():
        line = f"{key} = {value.format(**folders_and_ports)}"
        config, count = re.subn(rf"^{key} = .*$", lambda _, line=line: line, config, flags=re.MULTILINE)
        assert count == 1, f"{key} is {count} times in the config"
    return config + SERVING
