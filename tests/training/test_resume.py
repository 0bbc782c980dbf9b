"""Killed and resumed training gives the losses, weights and export of an unbroken run. Case 26 of tests/CASES.md."""

import json
import shutil
import signal
import subprocess
import time

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from common.export.engine_check import inspect
from common.pipeline.errors import UserError
from common.pipeline.files import sha256
from common.pipeline.manifest import Manifest
from common.pipeline.settings import Train
from common.training.checkpoint import checkpoints, load_checkpoint, prune, save_checkpoint
from common.training.optimizer import make_optimizer
from tests.support import tiny_training
from tests.support.stages import DEMO, ROOT, command, only_error
from tests.support.tiny_training import losses

FLAGS = ("--unrolled-steps", 3, "--epochs", 5, "--eval-every", 1)
KEEP = {"common.training.checkpoint.KEEP_CHECKPOINTS": 99}


def train(folder, *flags) -> tuple[int, str, str]:
    return tiny_training.train(folder, *FLAGS, *flags, constants=KEEP)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory, demo_target):
    folder = tiny_training.build(tmp_path_factory.mktemp("unbroken") / "run")
    code, _, stderr = train(folder)
    assert code == 0, stderr
    return folder


@pytest.fixture
def killed(unbroken, tmp_path):
    """The run as SIGKILL leaves it some steps after its checkpoint of `step`."""

    def make(step: int):
        folder = tmp_path / f"killed-{step}"
        shutil.copytree(unbroken, folder)
        for path in checkpoints(folder / "04_draft/checkpoints"):
            if int(path.name[5:]) > step:
                shutil.rmtree(path)
        for name in ("export", "report.html"):
            path = folder / "04_draft" / name
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        manifest = Manifest.load(folder / "04_draft", "04_draft")
        manifest.files, manifest.counts, manifest.complete = {}, {}, False
        manifest.save(folder / "04_draft")
        (folder / f"04_draft/checkpoints/.step-{step + 1:08d}.tmp").mkdir()  # it was writing the next one
        return folder

    return make


def same_run(folder, unbroken) -> None:
    assert losses(folder) == losses(unbroken)
    for name in ("model.safetensors", "config.json"):
        assert sha256(folder / "04_draft/export" / name) == sha256(unbroken / "04_draft/export" / name)
    both = [Manifest.load(path / "04_draft", "04_draft").counts for path in (folder, unbroken)]
    for counts in both:
        del counts["seconds"]
    assert both[0] == both[1]
    assert Manifest.load(folder / "04_draft", "04_draft").verify(folder / "04_draft") == []


def test_the_unbroken_run_is_whole(unbroken):
    steps = [json.loads(step) for kind, step, *_ in losses(unbroken) if kind == '"train"']
    assert steps == list(range(1, 26))  # five epochs of five packs
    assert inspect(unbroken / "04_draft/export").faults() == []
    manifest = Manifest.load(unbroken / "04_draft", "04_draft")
    assert manifest.complete and manifest.counts["steps"] == 25


@pytest.mark.parametrize("step", [5, 7, 8, 24])
def test_resumed_after_a_checkpoint(killed, unbroken, step):
    """Exactly at an epoch's end, in its middle, right after an evaluation, before the last step."""
    folder = killed(step)
    code, out, stderr = train(folder)
    assert code == 0, stderr
    assert f"resumed from step-{step:08d}" in out
    same_run(folder, unbroken)


def test_killed_before_the_first_checkpoint(killed, unbroken):
    folder = killed(0)
    assert train(folder)[0] == 0
    same_run(folder, unbroken)


def test_a_torn_metrics_line_is_no_obstacle(killed, unbroken):
    folder = killed(7)
    with open(folder / "04_draft/metrics.jsonl", "a") as file:
        file.write('{"kind": "train", "st')
    code, _, stderr = train(folder)
    assert code == 0, stderr
    same_run(folder, unbroken)


def test_a_damaged_checkpoint_is_named_and_the_one_before_serves(killed, unbroken):
    folder = killed(7)
    path = folder / "04_draft/checkpoints/step-00000007"
    content = bytearray((path / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (path / "model.safetensors").write_bytes(content)
    code, _, stderr = train(folder)
    assert code == 2 and f"{path}/model.safetensors is damaged" in only_error(stderr)
    shutil.rmtree(path)
    assert train(folder)[0] == 0
    same_run(folder, unbroken)


def wait_for_lines(folder, count: int, process) -> None:
    path = folder / "04_draft/metrics.jsonl"
    for _ in range(6000):
        if path.exists() and path.read_bytes().count(b"\n") >= count:
            return
        assert process.poll() is None, "the run ended before it could be killed"
        time.sleep(0.01)
    raise AssertionError("no steps came")


def test_sigkill_then_sigterm_then_the_end(tmp_path, unbroken):
    """Two real processes, stopped in the middle in two ways, and the rest: the unbroken run's numbers."""
    folder = tiny_training.build(tmp_path / "run")
    flags = ("--config", DEMO, "--run-dir", folder, *tiny_training.FLAGS, *FLAGS)
    for stop, lines in ((signal.SIGKILL, 3), (signal.SIGTERM, 6)):
        with subprocess.Popen(
            command("04", *flags, constants=KEEP), cwd=ROOT, stderr=subprocess.PIPE, text=True
        ) as process:
            wait_for_lines(folder, lines, process)
            process.send_signal(stop)
            stderr = process.communicate()[1]
        assert process.returncode == {signal.SIGKILL: -9, signal.SIGTERM: 130}[stop]
    assert "interrupted" in stderr and "Traceback" not in stderr
    steps = [json.loads(step) for kind, step, *_ in losses(folder) if kind == '"train"']
    assert checkpoints(folder / "04_draft/checkpoints")[-1].name == f"step-{steps[-1]:08d}" != "step-00000025"
    code, out, stderr = train(folder)
    assert code == 0, stderr
    assert "resumed from" in out
    same_run(folder, unbroken)


# ---- checkpoints ----


def module(sizes=(3, 2)) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(*sizes), nn.LayerNorm(sizes[1]))


def step(model: nn.Module, optimizer) -> None:
    model(torch.ones(4, 3)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_a_checkpoint_gives_weights_and_moments_back(tmp_path):
    model = module()
    optimizer = make_optimizer(model, Train())
    for _ in range(3):
        step(model, optimizer)
    path = save_checkpoint(tmp_path, model, optimizer, {"step": 3, "best": 1.5})
    again = module()
    resumed = make_optimizer(again, Train())
    assert load_checkpoint(path, again, resumed)["best"] == 1.5
    for _ in range(2):
        step(model, optimizer)
        step(again, resumed)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000003"]


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors"])
def test_a_file_of_another_checkpoint_is_refused(tmp_path, name):
    model = module()
    path = save_checkpoint(tmp_path, model, make_optimizer(model, Train()), {"step": 1})
    save_file({key: t + 1 for key, t in load_file(path / name).items()} or {"x": torch.zeros(1)}, path / name)
    with pytest.raises(UserError, match=f"{name} is damaged"):
        load_checkpoint(path, module(), None)


def test_another_draft_is_refused(tmp_path):
    model = module()
    path = save_checkpoint(tmp_path, model, make_optimizer(model, Train()), {"step": 1})
    with pytest.raises(UserError, match="does not match this draft"):
        load_checkpoint(path, nn.Linear(3, 2), None)
    with pytest.raises(UserError, match=r"the shapes of 0\.bias, 0\.weight"):
        load_checkpoint(path, module((3, 5)), None)


def test_only_complete_checkpoints_count_and_the_best_is_kept(tmp_path, monkeypatch):
    model = module()
    optimizer = make_optimizer(model, Train())
    for number in (1, 2, 10, 3):
        save_checkpoint(tmp_path, model, optimizer, {"step": number})
    (tmp_path / ".step-00000011.tmp").mkdir()
    (tmp_path / "step-00000012").mkdir()  # copied without its state
    names = [path.name for path in checkpoints(tmp_path)]
    assert names == [f"step-{number:08d}" for number in (1, 2, 3, 10)]
    monkeypatch.setattr("common.training.checkpoint.KEEP_CHECKPOINTS", 1)
    prune(tmp_path, tmp_path / "step-00000001")
    assert [path.name for path in checkpoints(tmp_path)] == ["step-00000001", "step-00000010"]
