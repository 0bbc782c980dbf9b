"""The rehearsal: the whole pipeline against a real vLLM, in everything but size (`make rehearse`).

    python -m tests.rehearse.run [--work runs/rehearse] [--only STEP ...]

Two targets: SmolLM2 (a real language model) and the tiny Kimi-K2.5 (Kimi's own config file, vocabulary, model class).
Each is asked, extracted, trained on, and served with its draft by vLLM 0.32's CPU build; what the pipeline says of
itself is held against what the engine does. Exits 1 when anything does not hold.
The last line is for scripts: passed= failed= engine_acceptance= offline_acceptance= seconds=
"""

import argparse
import shutil
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import transformers

from tests.rehearse import commands, kimi, smollm2
from tests.rehearse.check_engine import Checks
from tests.rehearse.server import REPOSITORY


class Rehearsal:
    """What the steps share: the work folder, the checks, the rows of the table, and figures by name."""

    def __init__(self, work: Path):
        self.work, self.check = work, Checks()
        self.spool = (work / "spool").resolve()
        self.rows: list[tuple[str, str]] = []
        self.figures: dict[str, float] = {}

    def note(self, what: str, figure: str) -> None:
        """A row of the table at the end."""
        self.rows.append((what, figure))
        print(f"       {what}: {figure}", flush=True)


STEPS: dict[str, Callable[[Rehearsal], None]] = {
    "kimi-build": kimi.build,
    "commands": commands.run,
    "kimi-chat": kimi.chat,
    "kimi-parser-off": kimi.parser_off,
    "kimi-extract": kimi.extract,
    "kimi-train": kimi.train,
    "kimi-serve": kimi.serve,
    "smollm2-generate": smollm2.generate,
    "smollm2-extract": smollm2.extract,
    "smollm2-train": smollm2.train,
    "smollm2-serve": smollm2.serve,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("runs/rehearse"))
    parser.add_argument("--only", nargs="+", choices=STEPS, help="these steps, on what earlier ones left in the folder")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if not args.only:
        shutil.rmtree(args.work, ignore_errors=True)
    (REPOSITORY / args.work).mkdir(parents=True, exist_ok=True)
    rehearsal, started = Rehearsal(args.work), time.monotonic()
    for name in args.only or STEPS:
        print(f"\n== {name} ({time.monotonic() - started:.0f} s)", flush=True)
        begun = time.monotonic()
        try:
            STEPS[name](rehearsal)
        except Exception as error:  # one broken step must not hide what the others find
            traceback.print_exc()
            rehearsal.check(f"{name} runs to its end", False, f"{type(error).__name__}: {error}".splitlines()[0])
        rehearsal.rows.append((f"seconds of {name}", f"{time.monotonic() - begun:.0f}"))
    return report(rehearsal, time.monotonic() - started)


def report(rehearsal: Rehearsal, seconds: float) -> int:
    check, width = rehearsal.check, max(len(what) for what, _ in rehearsal.rows)
    print("\n== what was measured")
    for what, figure in rehearsal.rows:
        print(f"  {what:<{width}}  {figure}")
    print(f"\n{check.passed} passed, {check.failed} failed")
    engine, offline = (rehearsal.figures.get(name, float("nan")) for name in ("engine", "offline"))
    print(
        f"passed={check.passed} failed={check.failed} engine_acceptance={engine:.3f} "
        f"offline_acceptance={offline:.3f} seconds={seconds:.0f}"
    )
    return 1 if check.failed else 0


if __name__ == "__main__":
    sys.exit(main())
