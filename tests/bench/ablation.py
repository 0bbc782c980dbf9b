"""What each training default is worth: one setting changed at a time, by the held-out walk at equal tokens.

    python tests/bench/ablation.py                     on the demo's data (`make demo` first); minutes a row
    python tests/bench/ablation.py --epochs 2 --only base AdamW

Stage 04 runs on the data set of runs/demo with the demo's settings, each row in runs/demo-ablation/EPOCHS-ROW. The
difference between two seeds of the base is what chance makes. A row that was trained before is read, not trained again.
The last line is for scripts: base= best= best_row= spread=
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

import repository

from common.pipeline.manifest import Manifest

SOURCE, FOLDER, K = Path("runs/demo"), Path("runs/demo-ablation"), "3"
ROWS: dict[str, tuple[object, ...]] = {
    "base": (),
    "base, another seed": ("--seed", 1),
    "AdamW": ("--optimizer", "adamw"),
    "EAGLE-3": ("--eagle", "3"),
    "step weight 1": ("--step-weight", 1),
    "5 steps": ("--unrolled-steps", 5),
    "7 steps": ("--unrolled-steps", 7),
    "learning rate 2e-3": ("--learning-rate", 2e-3),
    "learning rate 5e-3": ("--learning-rate", 5e-3),
}


def train(name: str, flags: tuple[object, ...], epochs: float) -> dict:
    """The counts in the row's manifest; stage 04 runs if it has not finished this row yet."""
    folder = FOLDER / f"{epochs:g}-{name.replace(', ', '-').replace(' ', '-')}"
    folder.mkdir(parents=True, exist_ok=True)
    for stage in ("02_hidden", "03_dataset"):
        if not (folder / stage).exists():
            (folder / stage).symlink_to((SOURCE / stage).resolve())
    done = folder / "04_draft" / "manifest.json"
    if not (done.exists() and Manifest.load(done.parent, "04_draft").complete):
        script = [sys.executable, "04_train.py", "--config", "configs/demo.toml", "--run-dir", str(folder)]
        flags = ("--epochs", epochs, *flags)
        with open(folder / "log.txt", "w") as log:
            subprocess.run([*script, *map(str, flags)], check=True, stdout=log, stderr=log)
    return Manifest.load(done.parent, "04_draft").counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=float, default=3.0, help="passes over the training split (default 3)")
    parser.add_argument("--only", nargs="+", choices=ROWS, metavar="ROW", help=f"of: {', '.join(ROWS)}")
    args = parser.parse_args()
    os.chdir(repository.ROOT)
    if not (SOURCE / "03_dataset" / "manifest.json").exists():
        sys.exit(f"{SOURCE} has no data set; run `make demo` first")
    walks = {}
    print(f"{'row':<34}{'walk':>8}{'per position':>14}{'tokens':>10}{'seconds':>9}")
    for name in args.only or ROWS:
        counts = train(name, ROWS[name], args.epochs)
        figures = counts["acceptance"]
        walks[name] = figures["walk"][K]["length"]
        per_position = figures["per_position_argmax"][K]
        print(f"{name:<34}{walks[name]:>8.3f}{per_position:>14.3f}{counts['tokens']:>10,}{counts['seconds']:>9.0f}")
        sys.stdout.flush()
    base, other = (walks.get(name, float("nan")) for name in ("base", "base, another seed"))
    best = max(walks, key=walks.get)
    print(f"base={base:.3f} best={walks[best]:.3f} best_row={best.replace(' ', '_')} spread={abs(base - other):.3f}")


if __name__ == "__main__":
    main()
