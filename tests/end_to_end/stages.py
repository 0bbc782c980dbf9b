"""How the rehearsal runs the four scripts, and the servers that their own `--print-server-command` prints."""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from common.dataset.shards import Shard
from common.pipeline.manifest import Manifest
from tests.end_to_end.server import REPOSITORY, VllmServer
from tests.support.patched import words

SCRIPTS = {path.name[:2]: path.name for path in sorted(REPOSITORY.glob("0*.py"))}  # "01", "02", "03", "04"
STAGE_TIMEOUT_S = 900
WRITE_DELAY_S = 0.05  # each state file comes so much after the answer: a client that does not wait must fail
CONNECTOR = {  # the stock one needs CUDA; this subclass of it replaces one method (cpu_connector.py)
    "kv_connector": "CpuHiddenStatesConnector",
    "kv_connector_module_path": "tests.end_to_end.cpu_connector",
}


class StageFailed(RuntimeError):
    """A script ended with another exit code than it should; the message ends with what it said."""


class Run:
    """One run folder of the pipeline, and the flags that all its stages share."""

    def __init__(self, folder: Path, config: str, constants: dict[str, object] | None = None, **target: object):
        self.folder, self.config, self.constants, self.target = folder, config, constants or {}, target

    def command(self, stage: str, *flags: object, **settings: object) -> list[str]:
        common = ["--config", self.config, "--run-dir", self.folder, *as_flags(self.target)]
        flags = map(str, [*common, *as_flags(settings), *flags])
        return [sys.executable, *words(self.constants), SCRIPTS[stage], *flags]

    def start(self, stage: str, *flags: object, **settings: object) -> subprocess.Popen:
        """Start a stage; its output goes to the run's log."""
        self.folder.mkdir(parents=True, exist_ok=True)
        command = self.command(stage, *flags, **settings)
        with (self.folder / "log.txt").open("a") as log:
            log.write(f"\n$ python {shlex.join(command[1:])}\n")
            log.flush()
            return subprocess.Popen(
                command, cwd=REPOSITORY, env=quiet(), stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
            )

    def __call__(self, stage: str, *flags: object, expect: int = 0, **settings: object) -> str:
        """Run a stage to its end; returns what it printed. Raises StageFailed for another exit code than `expect`."""
        command = self.command(stage, *flags, **settings)
        done = subprocess.run(
            command, cwd=REPOSITORY, env=quiet(), capture_output=True, text=True, timeout=STAGE_TIMEOUT_S
        )
        said = done.stdout + done.stderr
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "log.txt").open("a") as log:
            log.write(f"\n$ python {shlex.join(command[1:])}\n{said}\nexit code {done.returncode}\n")
        if done.returncode != expect:
            tail = "\n".join(said.splitlines()[-15:])
            raise StageFailed(f"{SCRIPTS[stage]} exited with {done.returncode}, not {expect}:\n{tail}")
        return said

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
    flags = []
    for name, value in settings.items():
        values = value if isinstance(value, list | tuple) else [value]
        flags += [f"--{name.replace('_', '-')}", *map(str, values)]
    return flags


def quiet() -> dict[str, str]:
    """The environment of every process here: two cores are shared, so waiting threads must not spin."""
    return os.environ | {"OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}


def printed_server(
    printed: str,
    log: Path,
    *flags: str,
    delay_s: float = WRITE_DELAY_S,
    folder: Path = REPOSITORY,
    port: int | None = None,
) -> VllmServer:
    """The server that a stage's `--print-server-command` describes, its port and its connector replaced.

    `folder`: where the command would be typed, for a model given as a relative path; `port`: a free one if None.
    """
    lines = "\n".join(line for line in printed.splitlines() if not line.startswith("#"))
    words = shlex.split(lines.replace("\\\n", " "))  # shlex knows no continued lines
    start = words.index("serve")
    env = dict(word.split("=", 1) for word in words[: start - 1])
    model, given = words[start + 1], words[start + 2 :]
    at = given.index("--port")
    del given[at : at + 2]
    if "--kv-transfer-config" in given:
        at = given.index("--kv-transfer-config") + 1
        transfer = json.loads(given[at])
        transfer["kv_connector_extra_config"]["write_delay_s"] = delay_s
        given[at] = json.dumps(transfer | CONNECTOR)
    ranks = int(given[given.index("--tensor-parallel-size") + 1]) if "--tensor-parallel-size" in given else 1
    if ranks > 1:  # a core each, in place of the step's own
        env["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(map(str, range(ranks)))
    env["OMP_WAIT_POLICY"] = "PASSIVE"
    return VllmServer((folder / model).resolve(), log.resolve(), *given, *flags, env=env, port=port)


def token_distances(found: Tensor, wanted: Tensor) -> Tensor:
    """Each token's own relative distance [T - 1]; the first, whose state is huge in some models, is left out."""
    found, wanted = found[1:].float(), wanted[1:].float()
    return (found - wanted).norm(dim=-1) / wanted.norm(dim=-1)


def distance(found: Tensor, wanted: Tensor, share: float | None = None) -> float:
    """Relative distance over all tokens but the first.

    `share`: within what distance so many of the tokens lie, each by itself. In a mixture of experts rounding decides
    where two experts are nearly tied, so that single tokens differ widely between two right engines.
    """
    if share is not None:
        return float(token_distances(found, wanted).quantile(share))
    found, wanted = found[1:].float(), wanted[1:].float()
    return float((found - wanted).norm() / wanted.norm())


def run_distance(one: Run, other: Run, share: float | None = None) -> tuple[float, int]:
    """(distance of two runs' states, sequences compared): the worst sequence's, or what `share` of all tokens keep.

    Infinite where the runs do not hold the same samples with the same ids.
    """
    theirs = {id: (ids, aux, last) for id, ids, aux, last in other.sequences()}
    worst, tokens, compared = 0.0, [], 0
    for id, ids, aux, last in one.sequences():
        if id not in theirs or not torch.equal(ids, theirs[id][0]):
            return float("inf"), compared
        for mine, yours in ((aux, theirs[id][1]), (last, theirs[id][2])):
            worst = max(worst, distance(mine, yours))
            tokens.append(token_distances(mine, yours))
        compared += 1
    off = worst if share is None else float(torch.cat(tokens).quantile(share))
    return (off, compared) if compared == len(theirs) else (float("inf"), compared)
