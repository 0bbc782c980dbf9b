"""The whole pipeline on a laptop: the four scripts, one after the other, on the demo's config (`make demo`).

    python -m common.demo [flags that all four scripts have, such as --run-dir]

The last line holds `key=value` pairs for other programs to read.
"""

import subprocess
import sys
import time
from pathlib import Path

from common.draft.config import MAIN_K
from common.pipeline.command_line import load_settings
from common.pipeline.console import say
from common.pipeline.errors import UserError, guarded
from common.pipeline.manifest import DRAFT, HIDDEN, Manifest

CONFIG = "configs/demo.toml"
SCRIPTS = ("01b_generate_synthetic.py", "02_extract_hidden.py", "03_build_dataset.py", "04_train.py")


def main() -> int:
    started = time.monotonic()
    arguments = ["--config", CONFIG, *sys.argv[1:]]
    run_dir = load_settings(arguments, __doc__, ()).run_dir
    for script in SCRIPTS:
        say(f"\n$ python {script} {' '.join(arguments)}")
        code = subprocess.run([sys.executable, script, *arguments]).returncode
        if code:
            return code
    result = Manifest.load(run_dir / DRAFT, DRAFT).counts
    samples = Manifest.load(run_dir / HIDDEN, HIDDEN).counts["sequences"]
    figures = {"trained": result["acceptance"], **result["baselines"]}
    lengths = {name: walks["walk"][str(MAIN_K)]["length"] for name, walks in figures.items()}
    report = run_dir / DRAFT / "report.html"
    say(f"\nThe draft is in {run_dir / DRAFT / 'export'}; open {Path.cwd() / report} in a browser.")
    say(
        f"acceptance_length={lengths['trained']:.3f} untrained={lengths['untrained']:.3f} "
        f"bigram={lengths['bigram']:.3f} samples={samples} seconds={time.monotonic() - started:.0f} report={report}"
    )
    if lengths["trained"] <= max(lengths[name] for name in result["baselines"]):
        raise UserError(
            "the trained draft's acceptance length does not exceed the untrained draft's and the bigram floor"
        )
    return 0


if __name__ == "__main__":
    guarded(main)
