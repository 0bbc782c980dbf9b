"""Two ranks on the CPU, DDP and FSDP2: the steps of one rank, each other's checkpoints, one bar."""

import shutil
import subprocess
import sys

import pytest
from safetensors.torch import load_file

from common.export.engine_check import inspect
from common.pipeline.manifest import Manifest
from common.training.checkpoint import checkpoints
from tests.support import tiny_training
from tests.support.patched import words
from tests.support.stages import DEMO, ROOT, SCRIPTS, run_here
from tests.support.tiny_training import metrics

FLAGS = (*tiny_training.FLAGS, "--epochs", 4, "--packs-per-step", 4, "--eval-every", 1)
KEEP = {"common.training.checkpoint.KEEP_CHECKPOINTS": 99}


@pytest.fixture
def flags(run) -> list[str]:
    return ["--config", DEMO, "--run-dir", str(run), *map(str, FLAGS)]


def two_ranks(*flags: str) -> subprocess.CompletedProcess:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*torchrun, *words(KEEP), SCRIPTS["04"], *flags], cwd=ROOT, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    return done


def cut(folder, step: int) -> None:
    """As a run that was killed after its checkpoint of `step`."""
    for path in checkpoints(folder / "checkpoints"):
        if int(path.name[5:]) > step:
            shutil.rmtree(path)
    manifest = Manifest.load(folder, "04_draft")
    manifest.files, manifest.counts, manifest.complete = {}, {}, False
    manifest.save(folder)


def test_two_ranks_take_the_steps_of_one_and_go_on_from_each_others_checkpoints(flags, tmp_path):
    """One rank; DDP from the start; FSDP2 from DDP's step 2; one rank from FSDP2's step 3: the same losses.

    Two packs a rank and step, so that gradients add up; Muon, which needs whole matrices, beside AdamW.
    """
    run, folder = tmp_path / "run", tmp_path / "run/04_draft"
    flags += ["--optimizer", "muon"]
    assert run_here("04", *flags, constants=KEEP)[0] == 0
    alone, held_out = metrics(run, "train"), metrics(run, "eval")
    weights = load_file(folder / "export/model.safetensors")
    assert len(alone) == 5

    def same() -> None:
        found = metrics(run, "train")
        assert [line["step"] for line in found] == [1, 2, 3, 4, 5]
        for name in ("loss", "grad_norm"):
            assert [line[name] for line in found] == pytest.approx([line[name] for line in alone], rel=1e-3), name
        assert [line["tokens"] for line in found] == [line["tokens"] for line in alone]
        losses = [[line["loss"] for line in lines] for lines in (metrics(run, "eval"), held_out)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-3)  # over packs shared out to the ranks
        assert inspect(folder / "export").faults() == []
        for name, tensor in load_file(folder / "export/model.safetensors").items():
            assert float((tensor.double() - weights[name].double()).abs().max()) < 0.01, name

    done = two_ranks(*flags, "--fresh", "--parallel", "ddp")
    same()
    assert len(list(run.glob("04_draft.before-*"))) == 1  # one rank sets the old folder aside, not both
    assert done.stderr.count("train: 5/5") == 1 and done.stdout.count("04 done") == 1
    cut(folder, 2)
    done = two_ranks(*flags, "--parallel", "fsdp")
    assert done.stdout.count("resumed from step-00000002") == 1
    same()
    cut(folder, 3)
    code, out, stderr = run_here("04", *flags, constants=KEEP)
    assert code == 0 and "resumed from step-00000003" in out, stderr
    same()
