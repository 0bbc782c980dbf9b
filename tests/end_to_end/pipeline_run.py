"""How the rehearsal runs the four scripts: as processes on one run folder, with a log and with flags in common."""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from common.dataset.shards import Shard
from common.pipeline.manifest import Manifest
from tests.support.patched import words
from tests.support.stages import ROOT, SCRIPTS

STAGE_TIMEOUT_S = 900


class StageFailed(RuntimeError):
    """A script ended with an unexpected exit code; the message ends with the last lines of its output."""


class Run:
    """One run folder of the pipeline, and the flags that all its stages share."""

    def __init__(self, folder: Path, config: str, constants: dict[str, object] | None = None, **target: object):
        self.folder, self.config, self.constants, self.target = folder, config, constants or {}, target

    def command(self, stage: str, *flags: object, **settings: object) -> list[str]:
        common = ["--config", self.config, "--run-dir", self.folder, *as_flags(self.target)]
        flags = map(str, [*common, *as_flags(settings), *flags])
        return [sys.executable, *words(self.constants), SCRIPTS[stage].name, *flags]

    def start(self, stage: str, *flags: object, **settings: object) -> subprocess.Popen:
        """Start a stage; its output goes to the run's log."""
        self.folder.mkdir(parents=True, exist_ok=True)
        command = self.command(stage, *flags, **settings)
        with (self.folder / "log.txt").open("a") as log:
            log.write(f"\n$ python {shlex.join(command[1:])}\n")
            log.flush()
            return subprocess.Popen(
                command, cwd=ROOT, env=quiet(), stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
            )

    def __call__(self, stage: str, *flags: object, expect: int = 0, **settings: object) -> str:
        """Run a stage to its end; returns what it printed. Raises StageFailed for another exit code than `expect`."""
        command = self.command(stage, *flags, **settings)
        done = subprocess.run(command, cwd=ROOT, env=quiet(), capture_output=True, text=True, timeout=STAGE_TIMEOUT_S)
        output = done.stdout + done.stderr
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "log.txt").open("a") as log:
            log.write(f"\n$ python {shlex.join(command[1:])}\n{output}\nexit code {done.returncode}\n")
        if done.returncode != expect:
            tail = "\n".join(output.splitlines()[-15:])
            raise StageFailed(f"{SCRIPTS[stage].name} exited with {done.returncode}, not {expect}:\n{tail}")
        return output

    def manifest(self, stage: str) -> Manifest:
        return Manifest.load(self.folder / stage, stage)

    def records(self) -> list[dict]:
        parts = sorted((self.folder / "01_synthetic").glob("part-*.jsonl"))
        return [json.loads(line) for part in parts for line in part.read_text("utf-8").splitlines()]

    def sequences(self) -> Iterator[tuple[str, Tensor, Tensor, Tensor]]:
        """(sample id, token ids [T], aux states [T, A*H], last state [T, H]) of all shards in the manifest."""
        for name in sorted(self.manifest("02_hidden").files):
            shard = Shard(self.folder / "02_hidden" / name)
            for i, facts in enumerate(shard.facts):
                ids, _, states = shard.sequence(i)
                yield facts["id"], ids, states.aux, states.last


def as_flags(settings: dict) -> list[str]:
    """{"max_tokens": 3, "aux_layers": [1, 2]} -> ["--max-tokens", "3", "--aux-layers", "1", "2"]."""
    flags = []
    for name, value in settings.items():
        values = value if isinstance(value, list | tuple) else [value]
        flags += [f"--{name.replace('_', '-')}", *map(str, values)]
    return flags


def quiet() -> dict[str, str]:
    """The environment of every process of the rehearsal: two cores are shared, so waiting threads must not spin."""
    return os.environ | {"OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
