"""The rehearsal: the whole pipeline against a real vLLM, in everything but size (`make rehearse`).

    python -m tests.end_to_end.run [--work runs/rehearse] [--only STEP ...]

There are two targets: SmolLM2, a real language model, and the tiny Kimi-K2.5, which has Kimi's config file, vocabulary
and model class. Each goes through all four stages, and vLLM 0.32's CPU build serves it, alone and with its draft. What
the pipeline reports is compared with what the engine does. Exits 1 when a check fails.
Two steps run at a time. Each has a process and a core of its own for its engines, since starting an engine, which takes
most of the time, is the work of one thread.
The last line is for scripts: passed= failed= engine_acceptance= offline_acceptance= seconds=
"""

import argparse
import multiprocessing
import os
import shutil
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from pathlib import Path
from typing import NamedTuple

import transformers

from tests.end_to_end import commands, kimi, smollm2
from tests.end_to_end.checks import Checks
from tests.support.stages import ROOT


class Rehearsal:
    """What a step is given: the work folder, a spool and checks of its own. It adds rows to the table, and figures."""

    def __init__(self, work: Path, step: str):
        self.work, self.check = work, Checks(step)
        self.spool = (work / f"spool-{step}").resolve()
        self.rows: list[tuple[str, str]] = []
        self.figures: dict[str, float] = {}

    def note(self, what: str, figure: str) -> None:
        """Add a row to the table at the end, and print it now."""
        self.rows.append((what, figure))
        self.check.say(f"       {what}: {figure}")


class Step(NamedTuple):
    """A step, and the names of the steps whose results it needs."""

    run: Callable[[Rehearsal], None]
    after: tuple[str, ...] = ()


STEPS = {  # the first step that may start does: long chains stand first, so that no core is idle at the end
    "kimi-build": Step(kimi.build),
    "kimi-chat": Step(kimi.chat, ("kimi-build",)),
    "smollm2-generate": Step(smollm2.generate, ("kimi-chat",)),  # its server is shown the tiny Kimi's records too
    "kimi-extract": Step(kimi.extract, ("kimi-chat",)),
    "kimi-train": Step(kimi.train, ("kimi-extract",)),
    "kimi-serve": Step(kimi.serve, ("kimi-train",)),
    "smollm2-extract": Step(smollm2.extract, ("smollm2-generate",)),
    "smollm2-train": Step(smollm2.train, ("smollm2-extract",)),
    "commands": Step(commands.run, ("kimi-build",)),
    "smollm2-serve": Step(smollm2.serve, ("smollm2-train",)),
    "kimi-parser-off": Step(kimi.parser_off, ("kimi-build",)),
}


class Outcome(NamedTuple):
    """The checks of a step that has ended, its rows and its figures."""

    passed: int
    failed: int
    rows: list[tuple[str, str]]
    figures: dict[str, float]


def perform(work: Path, name: str) -> Outcome:
    """Run one step, in a worker's process."""
    rehearsal, begun = Rehearsal(work, name), time.monotonic()
    check = rehearsal.check
    check.say("begins")
    try:
        STEPS[name].run(rehearsal)
    except Exception as error:  # the other steps run on, whatever breaks one of them
        check.say(traceback.format_exc())
        check(f"{name} runs to its end", False, f"{type(error).__name__}: {error}".splitlines()[0])
    rehearsal.rows.append((f"seconds of {name}", f"{time.monotonic() - begun:.0f}"))
    return Outcome(check.passed, check.failed, rehearsal.rows, rehearsal.figures)


def take_core(cores) -> None:
    """Runs when a worker starts. Its engines, all children of this process, compute on the core that it takes."""
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = str(cores.get())


def run_steps(work: Path, names: list[str]) -> dict[str, Outcome]:
    """Run two steps at a time, each after the steps of `names` that it needs. Outcomes are in STEPS' order."""
    waiting, running, done = [name for name in STEPS if name in names], {}, {}
    cores = sorted(os.sched_getaffinity(0))[:2]
    forked = multiprocessing.get_context("fork")  # safe: no thread runs yet. Workers need not import again
    queue = forked.SimpleQueue()
    for core in cores:
        queue.put(core)
    with ProcessPoolExecutor(len(cores), forked, take_core, (queue,)) as pool:
        while waiting or running:
            unfinished = {*waiting, *running.values()}
            ready = [name for name in waiting if not unfinished & set(STEPS[name].after)]
            for name in ready[: len(cores) - len(running)]:
                waiting.remove(name)
                running[pool.submit(perform, work, name)] = name
            ended, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in ended:
                done[running.pop(future)] = future.result()
    return {name: done[name] for name in STEPS if name in done}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("runs/rehearse"))
    parser.add_argument("--only", nargs="+", choices=STEPS, help="only these steps, on what others left in the folder")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if not args.only:
        shutil.rmtree(args.work, ignore_errors=True)
    (ROOT / args.work).mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    outcomes = run_steps(args.work, args.only or list(STEPS))
    return report(outcomes, time.monotonic() - started)


def report(steps: dict[str, Outcome], seconds: float) -> int:
    """Print the table and the last line; returns the exit code."""
    rows = [row for outcome in steps.values() for row in outcome.rows]
    width = max(len(what) for what, _ in rows)
    print("\n== what was measured")
    for what, figure in rows:
        print(f"  {what:<{width}}  {figure}")
    passed, failed = (sum(getattr(outcome, name) for outcome in steps.values()) for name in ("passed", "failed"))
    print(f"\n{passed} passed, {failed} failed")
    figures = {name: figure for outcome in steps.values() for name, figure in outcome.figures.items()}
    engine, offline = (figures.get(name, float("nan")) for name in ("engine", "offline"))
    print(
        f"passed={passed} failed={failed} engine_acceptance={engine:.3f} "
        f"offline_acceptance={offline:.3f} seconds={seconds:.0f}"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
