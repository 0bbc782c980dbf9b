"""What `--store-dtype fp8` costs: error of the states, training loss and acceptance, compared with bf16.

    python tests/bench/store_dtype.py                  on the demo's records (`make demo` first); 10 minutes

Stages 02 to 04 run again on the records of runs/demo, in runs/demo-fp8. Only the type of the stored states differs;
seed, packs and steps are the same, so that every difference is due to the states.
The last line is for scripts: state_error= loss_bf16= loss_fp8= acceptance_bf16= acceptance_fp8= gib_bf16= gib_fp8=
"""

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

import repository
import torch

from common.dataset.shards import Shard
from common.pipeline.jsonl import read_jsonl
from common.pipeline.manifest import Manifest

CONFIG = "configs/demo.toml"
LAST_STEPS = 50  # training losses that are averaged


def sequences(folder: Path) -> dict:
    """sample id -> (shard, number) of all sequences in the manifest."""
    shards = [Shard(folder / name) for name in sorted(Manifest.load(folder, "02_hidden").files)]
    return {facts["id"]: (shard, i) for shard in shards for i, facts in enumerate(shard.facts)}


def state_errors(one: Path, other: Path) -> torch.Tensor:
    """Relative error of the aux states [A], over all tokens but a sequence's first, whose state is huge."""
    ours, theirs = sequences(one), sequences(other)
    assert ours.keys() == theirs.keys(), "the two runs hold other samples"
    layers = len(next(iter(ours.values()))[0].metadata["aux_layers"])
    off, whole = torch.zeros(layers, dtype=torch.float64), torch.zeros(layers, dtype=torch.float64)
    for id, (shard, i) in ours.items():
        (ids, _, exact), (same_ids, _, stored) = shard.sequence(i), theirs[id][0].sequence(theirs[id][1])
        assert torch.equal(ids, same_ids) and torch.equal(exact.last, stored.last), id
        exact, stored = (x.aux[1:].double().unflatten(1, (layers, -1)) for x in (exact, stored))
        off += (exact - stored).square().sum((0, 2))
        whole += exact.square().sum((0, 2))
    return (off / whole).sqrt()


def figures(run: Path) -> dict:
    """Held-out loss and acceptance length of the exported draft, mean of the last training losses, GiB of states."""
    manifest = Manifest.load(run / "04_draft", "04_draft")
    acceptance = manifest.counts["acceptance"]
    losses = [line["loss"] for line in read_jsonl(run / "04_draft/metrics.jsonl") if line["kind"] == "train"]
    files = Manifest.load(run / "02_hidden", "02_hidden").files.values()
    return {
        "loss": acceptance["loss"],
        "training_loss": sum(losses[-LAST_STEPS:]) / len(losses[-LAST_STEPS:]),
        "acceptance": acceptance["walk"]["3"]["length"],
        "gib": sum(facts["bytes"] for facts in files) / 2**30,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--run-dir", type=Path, default=Path("runs/demo"), help="the finished demo (default %(default)s)"
    )
    parser.add_argument("--epochs", help="passes over the training split, where the run's are not the config's")
    args = parser.parse_args()
    os.chdir(repository.ROOT)
    run = args.run_dir.with_name(f"{args.run_dir.name}-fp8")
    shutil.rmtree(run, ignore_errors=True)
    shutil.copytree(args.run_dir / "01_synthetic", run / "01_synthetic")
    for script, flags in (
        ("02_extract_hidden.py", ["--store-dtype", "fp8"]),
        ("03_build_dataset.py", []),
        ("04_train.py", ["--epochs", args.epochs] if args.epochs else []),
    ):
        subprocess.run([sys.executable, script, "--config", CONFIG, "--run-dir", str(run), *flags], check=True)
    errors = state_errors(args.run_dir / "02_hidden", run / "02_hidden")
    print("relative error of the aux states, by layer:", " ".join(f"{error:.4f}" for error in errors.tolist()))
    results = {"bf16": figures(args.run_dir), "fp8": figures(run)}
    for name, facts in results.items():
        print(f"{name}: " + "  ".join(f"{key} {value:.4f}" for key, value in facts.items()))
    pairs = {"state_error": float(errors.max())}
    for key in ("loss", "acceptance", "gib"):
        pairs |= {f"{key}_{name}": facts[key] for name, facts in results.items()}
    print(" ".join(f"{key}={value:.4f}" for key, value in pairs.items()))


if __name__ == "__main__":
    main()
