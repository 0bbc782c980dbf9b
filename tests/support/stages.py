"""How tests run the four scripts: as processes, as a user does, or in this process with names replaced."""

import contextlib
import importlib.util
import io
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

from tests.support.patched import patched, words

ROOT = Path(__file__).resolve().parents[2]
DEMO = "configs/demo.toml"
SCRIPTS = {path.name[:2]: path for path in sorted(ROOT.glob("0*.py"))}  # "01", "02", "03", "04"

STAGE_SECTIONS = {
    "01": ("target", "questions", "generate", "forecast"),
    "02": ("target", "extract", "forecast"),
    "03": ("target", "dataset", "forecast"),
    "04": ("target", "draft", "train", "serving", "forecast"),
}


def command(stage: str, *flags: object, constants: dict[str, object] | None = None) -> list[str]:
    return [sys.executable, *words(constants or {}), str(SCRIPTS[stage]), *map(str, flags)]


def run_process(stage: str, *flags: object, timeout: float = 120) -> subprocess.CompletedProcess:
    """One script as a process, from the repository's root."""
    return subprocess.run(command(stage, *flags), cwd=ROOT, capture_output=True, text=True, timeout=timeout)


def script_module(stage: str):
    """The script as a module, its main not run."""
    spec = importlib.util.spec_from_file_location(f"script_{stage}", SCRIPTS[stage])
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_here(
    stage: str, *flags: object, constants: dict[str, object] | None = None, **replaced
) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of a script's guarded main in this process; `replaced`: the script's names to set;
    `constants`: names of modules to set.

    Working directory, sys.argv and the handlers of SIGTERM and SIGINT are as before afterwards.
    """
    from common.pipeline.errors import guarded

    module = script_module(stage)
    for name, value in replaced.items():
        assert hasattr(module, name), name
        setattr(module, name, value)
    before, out, err, code = sys.argv, io.StringIO(), io.StringIO(), None
    sys.argv = [str(SCRIPTS[stage]), *map(str, flags)]
    folder, handlers = os.getcwd(), [(number, signal.getsignal(number)) for number in (signal.SIGTERM, signal.SIGINT)]
    os.chdir(ROOT)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), patched(constants or {}):
            guarded(module.main)
    except SystemExit as exit:
        code = exit.code
    finally:
        sys.argv = before
        os.chdir(folder)
        if threading.current_thread() is threading.main_thread():  # 04 takes over both signals
            for number, handler in handlers:
                signal.signal(number, handler)
    return code, out.getvalue(), err.getvalue()


def only_error(stderr: str) -> str:
    """The one line that a user sees; fails on a traceback, on two errors and on none."""
    assert "Traceback" not in stderr, stderr
    errors = [line for line in stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, stderr
    return errors[0]
