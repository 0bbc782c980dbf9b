"""The rehearsal's step that runs every command of the runbook and of README.md, as a user would, on the tiny Kimi.

A folder stands for the clone on a node: scripts, common/ and configs/ as here, but configs/kimi-k2.5.toml cut in
size. Servers are those that the documents' own commands print; they go on till the end, so that each is loaded once.
What is changed in a command and in the config, and what a command must print, is in documents.py.
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
from tests.end_to_end.server import REPOSITORY, ServerDied, free_port
from tests.end_to_end.stages import SCRIPTS, printed_server, quiet

TIMEOUT_S = 240
OTHER_NODE = r"01b.*--part 2/2"  # "the second on the other": rsync has something to fetch there


# Stage 02 with a limit for so small a model, which is not sure of its own words.
UNSURE = """import runpy
from common.extraction import on_policy
on_policy.MAX_NLL = 6.0
runpy.run_path({script!r}, run_name="__main__")
"""


class Running(NamedTuple):
    """A command that was started, and where its output goes."""

    command: str  # as the document has it
    process: subprocess.Popen
    out: Path
    started: float

    def said(self) -> str:
        return self.out.read_text(errors="replace") + self.out.with_suffix(".err").read_text(errors="replace")


class Clones:
    """The folders that stand for clones, the servers that their commands printed, and the commands run there."""

    def __init__(self, rehearsal, stack: ExitStack):
        self.check, self.work, self.stack = rehearsal.check, rehearsal.work / "commands", stack
        self.ports = {f"{name}_port": free_port() for name in ("generation", "extraction", "draft", "rendezvous")}
        self.config = smaller(kimi.config(rehearsal).read_text(), spool=rehearsal.spool, **self.ports)
        self.target = kimi.folder(rehearsal).resolve()
        self.served: set[int] = set()
        self.count = 0

    def folder(self, name: str) -> Path:
        """The clone of this name; made when it is first asked for."""
        folder = (self.work / name).resolve()
        if not folder.exists():
            shutil.copytree(REPOSITORY / "configs", folder / "configs")
            config = "kimi-k2.5-nvfp4" if name == WINDOW else "kimi-k2.5"  # what the section's commands name
            (folder / f"configs/{config}.toml").write_text(self.config)
            (folder / f"configs/{config}.config.json").unlink()  # Kimi's own sizes, which the tiny one has not
            for own in (*SCRIPTS.values(), "common"):
                (folder / own).symlink_to(REPOSITORY / own)
            (folder / SCRIPTS["02"]).unlink()
            (folder / SCRIPTS["02"]).write_text(UNSURE.format(script=str(REPOSITORY / SCRIPTS["02"])))
            (folder / "models").mkdir()
            (folder / "models/kimi-k2.5").symlink_to(self.target)
            questions = (REPOSITORY / kimi.QUESTIONS).read_text("utf-8").splitlines(keepends=True)
            (folder / "questions.jsonl").write_text("".join(questions[:QUESTIONS]), "utf-8")
            if name == WINDOW:
                records = self.folder("runbook") / "runs/kimi-k2.5/01_synthetic"
                shutil.copytree(records, folder / f"runs/{config}/01_synthetic")
        return folder

    def place(self, block: Block, command: str) -> Path:
        """README's commands and those of a FRESH section have a clone of their own; one command is the other node's."""
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
                self.serve(as_run(command, **self.ports), self.place(block, command))
                continue
            copies = 2 if "--nnodes 2" in command else 1  # the same command on each node
            waiting += [self.start(command, self.place(block, command)) for _ in range(copies)]
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
        """Wait for commands that run at the same time: each ends well and, copies as one, prints what is promised."""
        for each in commands:
            try:
                code = each.process.wait(TIMEOUT_S)
            except subprocess.TimeoutExpired:
                end(each.process)
                code = f"not done after {TIMEOUT_S} s"
            seen = f"{time.monotonic() - each.started:.0f} s"
            if code != 0:
                seen = f"{code}: " + " / ".join(each.said().splitlines()[-4:])
            self.check(f"$ {each.command}", code == 0, seen)
        for command in dict.fromkeys(each.command for each in commands):
            said = "\n".join(each.said() for each in commands if each.command == command)
            for wanted in promised(command):
                found = re.search(wanted, said, re.MULTILINE)
                self.check(f"  prints {wanted}", bool(found), found[0].strip()[:90] if found else said[-300:])
            if "--print-server-command" in command:
                each = next(each for each in commands if each.command == command)
                self.serve(each.out.read_text(), each.out.parent)

    def serve(self, printed: str, folder: Path) -> None:
        """Start what a command printed, unless its port is served: then it was a variant of a server that runs."""
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
    """End a command and what it started, if it still runs."""
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
