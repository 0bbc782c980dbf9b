"""Fixtures of several test files. What takes long to build is built once for all of pytest's workers."""

import fcntl
import os
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

os.environ["OMP_WAIT_POLICY"] = "PASSIVE"  # before torch: two workers share two cores, waiting threads must not spin
os.environ["HF_HUB_OFFLINE"] = "1"  # before any hub library: a dry run in this process would wait for retries
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import pytest

from tests.support.stages import DEMO, ROOT, run_process

# A shell's background processes ignore SIGINT, and the scripts that tests interrupt would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
TINY_DATASET = ("--draft-vocab-size", 2048, "--holdout-share", 0.3, "--sample-tokens", 256)


@contextmanager
def locked(path: Path):
    """Hold a lock on `path`, so that one of pytest's workers builds what all of them use."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@pytest.fixture(scope="session")
def demo_target() -> Path:
    """Folder of the demo's target, relative to the repository's root: SmolLM2 with Kimi's thinking tokens."""
    folder = Path("runs/smollm2-thinking")
    with locked(ROOT / "runs/.demo_target.lock"):
        if not (ROOT / folder / "config.json").exists():
            build = [sys.executable, "-m", "common.demo.target", str(folder)]
            subprocess.run(build, cwd=ROOT, check=True, capture_output=True, text=True)
    return folder


@pytest.fixture(scope="session")
def tiny_run(demo_target, tmp_path_factory, worker_id) -> Path:
    """A run folder after stages 01b, 02 and 03 on ten questions. All tests share it: change a `run_copy` instead."""
    return built_once("tiny_run", build_tiny_run, tmp_path_factory, worker_id)


def build_tiny_run(folder: Path) -> None:
    reply = ("--n", 10, "--max-tokens", 40, "--thinking-budget", 12, "--engine", "local")
    for stage, flags in (("01", reply), ("02", ()), ("03", TINY_DATASET)):
        done = run_process(stage, "--config", DEMO, "--run-dir", folder, *flags)
        assert done.returncode == 0, f"stage {stage}: {done.stderr}\n{done.stdout}"


def built_once(name: str, build, tmp_path_factory, worker_id) -> Path:
    """A folder that `build(folder)` makes, once for all workers of this test run."""
    base = tmp_path_factory.getbasetemp()
    folder = (base if worker_id == "master" else base.parent) / name
    with locked(folder.with_name(f"{name}.lock")):
        if not folder.exists():
            temporary = folder.with_name(f"{name}.tmp")
            build(temporary)
            temporary.rename(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory, worker_id) -> Path:
    """Folder of a tokenizer with Kimi's chat form and a vocabulary of bytes, which loads in milliseconds."""
    from tests.support.targets import build_tiny_target

    return built_once("tiny_target", build_tiny_target, tmp_path_factory, worker_id)


@pytest.fixture(scope="session")
def tiny(tiny_target):
    """The token protocol of `tiny_target`."""
    from tests.support.targets import tiny_protocol

    return tiny_protocol(tiny_target)


@pytest.fixture
def place(tiny, tiny_target, tmp_path):
    """A run of 01b against a server that answers as the test tells it."""
    from tests.support.fault_server import FaultServer
    from tests.support.generation import GenerationRun

    with FaultServer(tiny) as server:
        yield GenerationRun(tmp_path, tiny_target, server)


@pytest.fixture
def spool(tmp_path) -> Path:
    """Folder in which an extraction server leaves states."""
    return tmp_path / "spool"


@pytest.fixture
def server(spool):
    """An extraction server with the states of a made-up target."""
    from tests.support.extraction_server import ExtractionServer
    from tests.support.patched import patched
    from tests.support.tiny_extractor import CONSTANTS, states_of

    constants = {f"common.extraction.vllm_extractor.{name}": value for name, value in CONSTANTS.items()}
    with patched(constants), ExtractionServer(spool, states_of) as server:
        yield server


@pytest.fixture(scope="session")
def records(tmp_path_factory) -> Path:
    """Folder with everything that 02 needs: a target with random weights, its config, made-up records."""
    from tests.support.random_target import build

    folder = tmp_path_factory.mktemp("records")
    build(folder)
    return folder


@pytest.fixture
def run(tmp_path, demo_target) -> Path:
    """A run folder with what 02 and 03 leave of made-up states: 04 takes milliseconds a step on it."""
    from tests.support import tiny_training

    return tiny_training.build(tmp_path / "run")


@pytest.fixture(scope="session")
def kimi_folder(tmp_path_factory, worker_id) -> Path:
    """Folder of Kimi's three tokenizer files with the real vocabulary."""
    from tests.support.targets import build_kimi

    return built_once("kimi", build_kimi, tmp_path_factory, worker_id)


@pytest.fixture(scope="session")
def kimi(kimi_folder):
    """The token protocol of the real Kimi vocabulary."""
    from tests.support.targets import kimi_protocol

    return kimi_protocol(kimi_folder)


@pytest.fixture
def run_copy(tiny_run, tmp_path):
    """A function that copies stages of the tiny run into a run folder that only this test uses."""

    def copy(*stages: str) -> Path:
        for stage in stages:
            shutil.copytree(tiny_run / stage, tmp_path / "run" / stage)
        return tmp_path / "run"

    return copy


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 8 MiB, which a test can fill; mounting it needs root, else the test is skipped."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"no small disk can be mounted here: {mounted.stderr.decode().strip()}")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)  # lazy: shards may still be mapped


@pytest.fixture(scope="session")
def smollm2(demo_target):
    """The demo's target in bf16, loaded once in each worker."""
    from common.pipeline.settings import Target
    from common.target.local_model import load_model

    os.chdir(ROOT)
    return load_model(Target(model=str(demo_target)), "cpu")


@pytest.fixture
def root_folder(monkeypatch) -> Path:
    """The repository's root, made the working directory: the configs' relative paths start there."""
    monkeypatch.chdir(ROOT)
    return ROOT


@pytest.fixture(scope="session")
def protocol(demo_target):
    """The token protocol of the demo's target: <think> is 15, </think> 16, <|im_end|> 2."""
    from common.pipeline.settings import Target
    from common.target.protocol import load_protocol

    return load_protocol(Target(str(ROOT / demo_target), think_open_id=15, think_close_id=16, end_token_id=2))
