"""01b against the tests' own server: its flags, and readers of what it wrote."""

import json
from dataclasses import dataclass
from pathlib import Path

from common.target.protocol import Protocol
from tests.support.fault_server import FaultServer
from tests.support.stages import command, run_here


@dataclass
class GenerationRun:
    """One run folder, one questions file and one server for 01b."""

    folder: Path
    target: Path
    server: FaultServer

    def ask(self, questions: int | list[str | dict]) -> "GenerationRun":
        """Write the questions file: rows, texts, or this many made-up questions."""
        if isinstance(questions, int):
            questions = [f"question {i}" for i in range(questions)]
        rows = ({"prompt": row} if isinstance(row, str) else row for row in questions)
        (self.folder / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return self

    def flags(self, *more: object) -> list[str]:
        (self.folder / "empty.toml").touch()
        fixed = {"config": "empty.toml", "dataset": "q.jsonl", "run-dir": "run"}
        flags = [f"--{name}={self.folder / value}" for name, value in fixed.items()]
        flags += [f"--model={self.target}", "--end-token=<|im_end|>", f"--base-urls={self.server.url}"]
        return [*flags, "--shuffle-seed=-1", *map(str, more)]

    def run(self, *more: object, **constants: object) -> tuple[int, str, str]:
        """(exit code, stdout, stderr) of 01b in this process; `constants` of its loop."""
        return run_here("01", *self.flags(*more), constants=of_the_loop(constants))

    def command(self, *more: object) -> list[str]:
        return command("01", *self.flags(*more), constants=of_the_loop({}))

    @property
    def stage(self) -> Path:
        return self.folder / "run/01_synthetic"

    def lines(self, pattern: str) -> list[dict]:
        return [json.loads(line) for path in sorted(self.stage.glob(pattern)) for line in path.read_text().splitlines()]

    @property
    def records(self) -> list[dict]:
        return self.lines("part-*.jsonl")

    @property
    def failures(self) -> list[dict]:
        return self.lines("failures.jsonl")

    @property
    def manifest(self) -> dict:
        return json.loads((self.stage / "manifest.json").read_text())

    @property
    def counts(self) -> dict:
        return self.manifest["counts"]


def of_the_loop(constants: dict[str, object]) -> dict[str, object]:
    """Full names; a request that fails is not tried again unless a test says so."""
    return {f"common.generation.loop.{name}": value for name, value in ({"RETRIES": 0} | constants).items()}


def asked(body: dict) -> str:
    """The last question of a request."""
    return body["messages"][-1]["content"]


def check_sound(records: list[dict], protocol: Protocol) -> None:
    """No record twice, and every stream is one that the protocol knows."""
    ids = [record["id"] for record in records]
    assert len(ids) == len(set(ids))
    for record in records:
        assert protocol.check_stream(record["prompt_ids"], record["output_ids"], 300) is None
        reply = protocol.split(record["prompt_ids"], record["output_ids"])
        assert protocol.decode(reply.reasoning_ids).strip() == record["reasoning"].strip()
        assert protocol.decode(reply.content_ids).strip() == (record["content"] or "").strip()
        assert (record["prompt_ids"] + record["output_ids"]).count(protocol.think_open) <= 1 + record["source"]["turn"]
