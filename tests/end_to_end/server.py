"""A real vLLM server as a context manager, for tests that serve, kill and restart one.

    with VllmServer(model, work / "vllm.log", "--language-model-only", "--reasoning-parser", "kimi_k2") as server:
        urlopen(server.base_url + "/v1/models")

vLLM needs another environment than ours (its transformers is older), so the server is `.venv-vllm/bin/python`, or what
KIMI_EAGLE3_VLLM_PYTHON names. The server, its engine and its workers form one process group. A guard process ends that
group when the test that started the server ends, even by SIGKILL.
"""

import contextlib
import http.client
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

from tests.support.stages import ROOT

VLLM_PYTHON = Path(os.environ.get("KIMI_EAGLE3_VLLM_PYTHON", ROOT / ".venv-vllm/bin/python"))
START_TIMEOUT_S = 300
STOP_TIMEOUT_S = 20
WRITE_DELAY_S = 0.05  # each state file comes this much later than the answer: a client that does not wait must fail
CONNECTOR = {  # vLLM's own needs CUDA; this subclass of it replaces one method (cpu_connector.py)
    "kv_connector": "CpuHiddenStatesConnector",
    "kv_connector_module_path": "tests.end_to_end.cpu_connector",
}
LOG_TAIL_LINES = 30

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "PYTHONPATH": str(ROOT),  # for kv_connector_module_path = tests.end_to_end.cpu_connector
}
FLAGS = ["--dtype", "bfloat16", "--enforce-eager", "--max-model-len", "2048", "--max-num-seqs", "16"]

# Reads until end of file, which comes when its parent ends, and then kills the server's process group.
GUARD = "import os, sys; sys.stdin.read(); os.killpg(int(sys.argv[1]), 9)"


class ServerDied(RuntimeError):
    """The server ended or stayed silent before it was healthy; the message ends with its log's tail."""


class VllmServer:
    """Serves `model` on `port` or a free local one, the same after restarts; `flags` come after FLAGS and beat them."""

    def __init__(self, model: Path, log: Path, *flags: str, env: dict[str, str] | None = None, port: int | None = None):
        self.log = Path(log)
        self.port = port or free_port()
        self.base_url = f"http://127.0.0.1:{self.port}"
        self.command = [str(VLLM_PYTHON), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
        self.command += ["--host", "127.0.0.1", "--port", str(self.port), *FLAGS, *flags]
        self.env = os.environ | ENVIRONMENT | (env or {})
        self.process: subprocess.Popen | None = None
        self.guard: subprocess.Popen | None = None

    @property
    def pid(self) -> int:
        """Process id of the API server, and of the group that its engine and workers belong to."""
        assert self.process is not None, "the server was not started"
        return self.process.pid

    def __enter__(self) -> "VllmServer":
        self.start()
        return self

    def __exit__(self, *_) -> None:
        self.stop()

    def start(self) -> None:
        """Start the server and wait until it is healthy; the log is appended to."""
        assert self.process is None, "the server is running"
        if not VLLM_PYTHON.exists():
            raise ServerDied(f"{VLLM_PYTHON} does not exist: make the vLLM environment or set KIMI_EAGLE3_VLLM_PYTHON")
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self.env,
                cwd=self.log.parent,
                start_new_session=True,
            )
        guard = [sys.executable, "-c", GUARD, str(self.pid)]
        self.guard = subprocess.Popen(guard, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True)
        try:
            self._wait_until_healthy()
        except BaseException:  # Ctrl-C as well: __exit__ is not called when __enter__ fails
            self.kill()
            raise

    def stop(self) -> None:
        """SIGTERM, a grace period, then SIGKILL to what is left of the group. Harmless when not running."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL to the server, its engine and its workers at once, as a crashed node would: nothing is flushed.

        Returns when all of them have ended. Harmless when not running.
        """
        self._end(signal.SIGKILL)

    def restart(self) -> None:
        """Start again on the same port, after kill() or a running server's stop()."""
        self.stop()
        self.start()

    def log_tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:])

    def _wait_until_healthy(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            if (code := self.process.poll()) is not None:
                raise ServerDied(f"vLLM exited with {code} while starting; {self.log} ends:\n{self.log_tail()}")
            try:
                with urllib.request.urlopen(self.base_url + "/health", timeout=5):
                    return
            except (urllib.error.URLError, http.client.HTTPException, OSError):
                time.sleep(0.5)
        raise ServerDied(f"vLLM is not healthy after {START_TIMEOUT_S} s; {self.log} ends:\n{self.log_tail()}")

    def _end(self, first: signal.Signals) -> None:
        """Send `first`, wait, kill what still lives, and unlink the shared memory that vLLM leaves behind even when it
        is asked to stop (400 MB a server)."""
        if self.process is None:
            return
        shared = shared_memory(self.pid)
        for sent in (first, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):  # the group may have ended by itself
                os.killpg(self.pid, sent)
            deadline = time.monotonic() + STOP_TIMEOUT_S
            while self.process.poll() is None or living_processes(self.pid):
                if time.monotonic() > deadline:
                    break
                time.sleep(0.05)
        for path in shared:
            path.unlink(missing_ok=True)
        self._release_guard()
        self.process = None

    def _release_guard(self) -> None:
        """End the guard before its pipe closes: the group's number may belong to someone else later."""
        self.guard.kill()
        self.guard.wait()
        self.guard.stdin.close()
        self.guard = None


def printed_server(
    printed: str,
    log: Path,
    *flags: str,
    delay_s: float = WRITE_DELAY_S,
    folder: Path = ROOT,
    port: int | None = None,
) -> VllmServer:
    """The server that a stage's `--print-server-command` describes, with another port and the CPU connector.

    `folder`: where a user would type the command, for a model given as a relative path; `port`: a free one if None.
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


def free_port() -> int:
    """A TCP port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def living_processes(group: int) -> list[int]:
    """Process ids in a process group, without those that have ended and wait to be reaped."""
    pids = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # ended while we looked
            state, _parent, its_group = stat.read_text().rpartition(")")[2].split()[:3]  # after "pid (name)"
            if int(its_group) == group and state != "Z":
                pids.append(int(stat.parent.name))
    return pids


def shared_memory(group: int) -> set[Path]:
    """The files under /dev/shm that processes of a group have mapped."""
    paths = set()
    for pid in living_processes(group):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
            paths |= {Path(line.split(maxsplit=5)[5]) for line in lines if "/dev/shm/" in line}
    return {path for path in paths if path.exists()}  # most are unlinked, "(deleted)", while still mapped
