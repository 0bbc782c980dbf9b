"""The rehearsal's step that runs every command of the runbook and of README.md, as a user would, on the tiny Kimi.

A folder takes the part of the clone on a node: scripts, common/ and configs/ as here, except that
configs/kimi-k2.5.toml has small sizes. The servers are the ones that the documents' commands print; each runs until the
end, so that it loads once. documents.py says what is changed in a command and in the config, and what a command prints.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from tests.end_to_end import kimi
from tests.end_to_end.documents import (
    CONFIGS,
    FRESH,
    QUESTIONS,
    README,
    RUNBOOK,
    WINDOW,
    Block,
    as_run,
    blocks,
    exempt,
    promised,
    smaller,
)
from tests.end_to_end.pipeline_run import quiet
from tests.end_to_end.server import ServerDied, free_port, printed_server
from tests.support.stages import ROOT, SCRIPTS

TIMEOUT_S = 240
OTHER_NODE = r"01b.*--part 2/2"  # runs in another folder, from which the documented rsync fetches its records

# 02_extract_hidden.py in a clone: stage 02 with a higher limit, since so small a model gives its own tokens low
# probabilities.
EXTRACT = """import runpy
from common.extraction import on_policy
on_policy.MAX_NLL = 6.0
runpy.run_path({script!r}, run_name="__main__")
"""


class Running(NamedTuple):
    """A command that was started, and the file of its stdout; stderr is beside it, as .err."""

    command: str  # as the document has it
    process: subprocess.Popen
    out: Path
    started: float

    def output(self) -> str:
        return self.out.read_text(errors="replace") + self.out.with_suffix(".err").read_text(errors="replace")


class Clones:
    """Folders that take the part of clones, the servers that their commands printed, and the commands run in them."""

    def __init__(self, rehearsal, stack: ExitStack):
        self.check, self.work, self.stack = rehearsal.check, rehearsal.work / "commands", stack
        self.ports = {f"{name}_port": free_port() for name in ("generation", "extraction", "draft", "rendezvous")}
        self.config = smaller(kimi.config(rehearsal).read_text(), spool=rehearsal.spool, **self.ports)
        self.target = kimi.folder(rehearsal).resolve()
        self.served: set[int] = set()
        self.count = 0

    def folder(self, name: str) -> Path:
        """The clone of this name; made at its first use."""
        folder = (self.work / name).resolve()
        if not folder.exists():
            shutil.copytree(ROOT / "configs", folder / "configs")
            config = "kimi-k2.5-nvfp4" if name == WINDOW else "kimi-k2.5"  # what the section's commands name
            (folder / f"configs/{config}.toml").write_text(self.config)
            (folder / f"configs/{config}.config.json").unlink()  # Kimi's sizes; the tiny Kimi has its own config.json
            for source in (SCRIPTS["01"], SCRIPTS["03"], SCRIPTS["04"], ROOT / "common"):
                (folder / source.name).symlink_to(source)
            (folder / SCRIPTS["02"].name).write_text(EXTRACT.format(script=str(SCRIPTS["02"])))
            (folder / "models").mkdir()
            (folder / "models/kimi-k2.5").symlink_to(self.target)
            questions = (ROOT / kimi.QUESTIONS).read_text("utf-8").splitlines(keepends=True)
            (folder / "questions.jsonl").write_text("".join(questions[:QUESTIONS]), "utf-8")
            if name == WINDOW:
                records = self.folder("runbook") / "runs/kimi-k2.5/01_synthetic"
                shutil.copytree(records, folder / f"runs/{config}/01_synthetic")
        return folder

    def clone(self, block: Block, command: str) -> Path:
        """The clone that a command runs in: the document's, the section's if it is in FRESH, or the other node's."""
        if re.search(OTHER_NODE, command):
            return self.folder("othernode")
        return self.folder(FRESH.get(block.section) or ("runbook" if block.document == RUNBOOK else "readme"))

    def run(self, block: Block) -> None:
        """The block's commands one after the other, or at the same time where it says so."""
        waiting = []
        for command in block.commands:
            if exempt(command):
                continue
            if command.startswith("vllm "):
                self.serve(as_run(command, **self.ports), self.clone(block, command))
                continue
            copies = 2 if "--nnodes 2" in command else 1  # the same command on each node
            waiting += [self.start(command, self.clone(block, command)) for _ in range(copies)]
            if not block.together:
                self.judge(waiting)
                waiting = []
        self.judge(waiting)

    def start(self, command: str, folder: Path) -> Running:
        self.count += 1
        out = folder / f"command-{self.count:02d}.out"
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        with out.open("w") as stdout, out.with_suffix(".err").open("w") as stderr:
            process = subprocess.Popen(
                ["bash", "-c", as_run(command, **self.ports)], cwd=folder, env=quiet() | {"PATH": path},
                stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, start_new_session=True,
            )  # fmt: skip
        self.stack.callback(end, process)
        return Running(command, process, out, time.monotonic())

    def judge(self, commands: list[Running]) -> None:
        """Wait for commands that run at the same time. Each must exit with 0 and print what is promised; of a command
        that runs on two nodes, the two together."""
        for each in commands:
            try:
                code = each.process.wait(TIMEOUT_S)
            except subprocess.TimeoutExpired:
                end(each.process)
                code = f"not done after {TIMEOUT_S} s"
            seen = f"{time.monotonic() - each.started:.0f} s"
            if code != 0:
                seen = f"{code}: " + " / ".join(each.output().splitlines()[-4:])
            self.check(f"$ {each.command}", code == 0, seen)
        for command in dict.fromkeys(each.command for each in commands):
            output = "\n".join(each.output() for each in commands if each.command == command)
            for wanted in promised(command):
                match = re.search(wanted, output, re.MULTILINE)
                self.check(f"  prints {wanted}", bool(match), match[0].strip()[:90] if match else output[-300:])
            if "--print-server-command" in command:
                each = next(each for each in commands if each.command == command)
                self.serve(each.out.read_text(), each.out.parent)

    def serve(self, printed: str, folder: Path) -> None:
        """Start the server that a command printed, unless one of an earlier command runs on its port."""
        port = int(re.search(r"--port (\d+)", printed)[1])
        if port in self.served:
            return
        self.served.add(port)
        server = printed_server(printed, folder / f"vllm-{port}.log", folder=folder, port=port)
        started = time.monotonic()
        try:
            self.stack.enter_context(server)
            seen = f"{time.monotonic() - started:.0f} s"
        except ServerDied as error:
            seen = str(error)
        self.check(f"  serves: {printed.split(' --')[0]}", server.process is not None, seen)


def end(process: subprocess.Popen) -> None:
    """Kill a command and what it started, if it still runs."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def run(rehearsal) -> None:
    """The runbook first: its commands print the servers that README's four commands ask."""
    shutil.rmtree(rehearsal.work / "commands", ignore_errors=True)
    with ExitStack() as stack:
        clones = Clones(rehearsal, stack)
        for document in (RUNBOOK, README, CONFIGS):
            for block in blocks(document):
                clones.run(block)
