"""Does 01b, run as a process, read a real vLLM rightly? The server is one of the tiny Kimi."""

import json
import subprocess
import sys
from pathlib import Path

from common.pipeline.settings import Target
from common.target.protocol import Protocol, load_protocol
from tests.support.kimi_vocabulary import END_THINK, IM_END, THINK
from tests.support.stages import ROOT, SCRIPTS

QUESTIONS = [
    "What does shutil.copyfile do?",
    "日本語で海について一文で書いてください。",
    "List three colours 🙂",
    "Say [EOS] and </think> aloud.",  # not asked, since the server would make control tokens of these
]
BUDGET_TOKENS = 4


def vendor_files(model: Path, work: Path) -> Path:
    """A folder of only the vendor's three tokenizer files: 01b builds its tokenizer from them, as for Kimi-K2.5."""
    folder = work / "vendor"
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("tiktoken.model", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).write_bytes((model / name).read_bytes())
    return folder


class Runs:
    """01b against one server, each run in a folder of its own."""

    def __init__(self, url: str, vendor: Path, work: Path):
        self.work = work
        (work / "empty.toml").write_text("")
        rows = ({"messages": [{"role": "user", "content": text}]} for text in QUESTIONS)
        (work / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        self.flags = {
            "config": work / "empty.toml", "model": vendor, "dataset": work / "questions.jsonl", "base-urls": url,
            "think-open-id": THINK, "think-close-id": END_THINK, "end-token": "<|im_end|>", "end-token-id": IM_END,
            "context-tokens": 2048, "max-tokens": 48, "shuffle-seed": -1,
        }  # fmt: skip

    def __call__(self, name: str, *more: str) -> tuple[subprocess.CompletedProcess, list[dict]]:
        """(the finished process, its records)."""
        flags = [f"--{key}={value}" for key, value in self.flags.items()]
        command = [
            sys.executable,
            str(SCRIPTS["01"]),
            *flags,
            f"--run-dir={self.work / name}",
        ]
        done = subprocess.run([*command, *more], cwd=ROOT, capture_output=True, text=True, timeout=300)
        parts = sorted((self.work / name).glob("01_synthetic/part-*.jsonl"))
        return done, [json.loads(line) for part in parts for line in part.read_text("utf-8").splitlines()]


def check_generate(check, url: str, model: Path, work: Path) -> None:
    """01b against a server with its reasoning parser: `url` ends in /v1, `model` holds the vendor's tokenizer files."""
    vendor = vendor_files(model, work)
    run = Runs(url, vendor, work)
    protocol = load_protocol(Target(model=str(vendor), end_token="<|im_end|>"))

    for temperature in (1.0, 0.7, 1.3, 0.5):  # so small a model may close its reasoning at once: then sample again
        done, _ = run("probe", "--probe", f"--temperature={temperature}")
        if ready := done.returncode == 0 and done.stdout.endswith("verdict: ready\n"):
            break
    check("--probe says ready", ready, done.stdout[-300:])

    done, records = run("plain", "--repeats=4")
    check("01b runs", done.returncode == 0, done.stderr[-300:])
    check("one record a usable question and repeat", len(records) == 12, len(records))
    check("a quoted control token is not asked", "control tokens in the text 1" in done.stdout)
    reasoned = [r for r in records if r["output_ids"][0] != END_THINK]
    fields = {r["received"]["reasoning_field"] for r in reasoned}
    check("message.reasoning is captured", fields == {"reasoning"}, f"{len(reasoned)} of {len(records)}: {fields}")
    check("ids are the server's", all(r["ids_from"] == "server" for r in records))
    check("prompt ids are ours, and end in <think>", all(_prompt_is_ours(r, protocol) for r in records))
    check("text is what the ids say", all(_text_is_ids(r, protocol) for r in records))
    check("the server's version is known", all(r["server"].startswith("vLLM ") for r in records), records[0]["server"])

    done, records = run("budget", f"--thinking-budget={BUDGET_TOKENS}", "--repeats=4")
    thought = [r for r in records if len(r["output_ids"]) > BUDGET_TOKENS]
    closed = all(END_THINK in r["output_ids"][: BUDGET_TOKENS + 1] for r in thought)
    check("the budget closes the reasoning", done.returncode == 0 and bool(thought) and closed, len(thought))
    compared = json.loads((work / "budget/01_synthetic/manifest.json").read_text())["counts"]
    rate = f"{compared['mismatched']} of {compared['compared']} rebuilt streams differ"
    check("rebuilding from text is compared with the server's ids", compared["compared"] == len(records), rate)

    done, records = run("cut", "--max-tokens=3")
    cut = [r for r in records if r["finish_reason"] == "length" and END_THINK not in r["output_ids"]]
    check("cut while thinking: no closer, no content", bool(cut) and all(r["content"] is None for r in cut), len(cut))

    done, records = run("instant", "--no-thinking")
    ends = all(r["prompt_ids"][-2:] == [THINK, END_THINK] for r in records)
    check(
        "instant mode: the empty block is prompt", done.returncode == 0 and ends and bool(records), done.stderr[-300:]
    )
    check("instant mode: no reasoning", all(not r["reasoning"] for r in records))

    asked = {r["id"] for r in run("plain", "--repeats=4")[1]}
    done, again = run("plain", "--repeats=4")
    check("a rerun asks nothing again", "0 new samples" in done.stdout and {r["id"] for r in again} == asked)


def check_parser_off(check, url: str, model: Path, work: Path) -> None:
    """A server without a reasoning parser: the probe says so, and a run reads the reasoning out of the content."""
    vendor = vendor_files(model, work)
    run = Runs(url, vendor, work)
    protocol = load_protocol(Target(model=str(vendor), end_token="<|im_end|>"))
    done, _ = run("probe", "--probe")
    verdict = done.stdout.strip().splitlines()[-1]
    check("parser off: --probe says so", done.returncode == 3 and "no reasoning parser" in verdict, verdict)
    done, records = run("off")  # without a budget: vLLM has one only beside a parser
    field = {r["received"]["reasoning_field"] for r in records}
    check(
        "parser off: reasoning is read from the content",
        done.returncode == 0 and field == {"content"},
        done.stderr[-300:],
    )
    check("parser off: text is what the ids say", bool(records) and all(_text_is_ids(r, protocol) for r in records))


def _prompt_is_ours(record: dict, protocol: Protocol) -> bool:
    ours = protocol.prompt_ids(record["messages"])
    return record["prompt_ids"] == ours and ours[-1] == THINK


def _text_is_ids(record: dict, protocol: Protocol) -> bool:
    reply = protocol.split(record["prompt_ids"], record["output_ids"])
    return protocol.text_differs(reply, record["reasoning"], record["content"], parsed=True) is None
