"""Run folders of version 0.1: they resume where today's constants are what they were made with, or are refused."""

import json

import pytest

from common.pipeline.errors import UserError
from common.pipeline.manifest import MANIFEST, Manifest, open_stage
from common.pipeline.older_runs import CONSTANTS
from tests.support import tiny_training
from tests.support.stages import only_error

# What version 0.1 stored of [dataset], [draft] and [train] with its defaults, as far as it has changed since.
OLD = CONSTANTS | {"draft.fc_norm": True, "draft.norm_output": True, "dataset.pack_tokens": 64}


def as_version_0_1(folder, **changed) -> None:
    """Give a finished 04_draft the fingerprint that version 0.1 would have stored."""
    path = folder / "04_draft" / MANIFEST
    value = json.loads(path.read_text())
    new = {"draft.eagle", "dataset.sample_tokens", "train.pack_tokens"}
    value["fingerprint"] = {k: v for k, v in value["fingerprint"].items() if k not in new} | OLD | changed
    path.write_text(json.dumps(value))


def old_data(folder) -> None:
    """03_dataset with the fingerprint of version 0.1."""
    path = folder / "03_dataset" / MANIFEST
    value = json.loads(path.read_text())
    value["fingerprint"] |= {key: value for key, value in OLD.items() if key.startswith("dataset.")}
    path.write_text(json.dumps(value))


@pytest.fixture
def run(tmp_path, demo_target):
    folder = tiny_training.build(tmp_path / "run")
    old_data(folder)
    code, _, stderr = tiny_training.train(folder)
    assert code == 0, stderr
    return folder


def test_a_finished_run_of_version_0_1_goes_on(run):
    before = tiny_training.losses(run)
    as_version_0_1(run)
    code, out, stderr = tiny_training.train(run)
    assert code == 0, stderr
    assert "resumed from step-" in out
    assert tiny_training.losses(run) == before


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"train.train_head": False}, "train.train_head = False, which this version has no setting for"),
        ({"train.grad_clip": 2.0}, "train.grad_clip = 2.0"),
        ({"draft.norm_output": False}, "draft.fc_norm = True, draft.norm_output = False"),
    ],
)
def test_what_this_version_cannot_do_is_refused_and_names_the_version(run, changed, said):
    as_version_0_1(run, **changed)
    code, _, stderr = tiny_training.train(run)
    assert code == 2
    assert "was made by version 0.1 with" in only_error(stderr)
    assert said in stderr


def test_another_length_of_packs_is_a_difference(run):
    as_version_0_1(run, **{"dataset.pack_tokens": 32})
    code, _, stderr = tiny_training.train(run)
    assert code == 2
    assert "train.pack_tokens: 32 there, 64 now" in only_error(stderr)


def test_eagle_3_is_two_norms_less(tmp_path):
    Manifest("x", {"draft.fc_norm": False, "draft.norm_output": False}).save(tmp_path)
    assert open_stage(tmp_path, "x", {"draft.eagle": "3"}, {}).fingerprint == {"draft.eagle": "3"}
    with pytest.raises(UserError, match=r"draft\.eagle: '3' there, '3\.1' now"):
        open_stage(tmp_path, "x", {"draft.eagle": "3.1"}, {})
