"""Stage 04 as a whole: which checkpoint is served, what stops it, and that nothing stale is picked up."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file

from common.dataset.shards import Shard
from common.draft.config import draft_config
from common.export.engine_check import inspect
from common.pipeline.manifest import Manifest
from common.pipeline.settings import DraftModel
from tests.support import tiny_training
from tests.support.stages import only_error
from tests.support.tiny_training import exported, metrics, train


def test_case_24_nothing_stale_of_another_vocabulary(run):
    """Same folder, draft vocabulary 16, then 32, then full: each refused with the difference, then made anew."""
    for before, size in ((None, 16), (16, 32), (32, 0)):
        tiny_training.build(run, draft_vocab_size=size)
        if before:
            code, _, stderr = train(run)
            assert code == 2 and f"dataset.draft_vocab_size: {before} there, {size} now" in only_error(stderr)
        code, _, stderr = train(run, "--fresh")
        assert code == 0, stderr
        tensors = exported(run)
        assert len(tensors["lm_head.weight"]) == (size or tiny_training.VOCAB)
        assert ("d2t" in tensors) == ("t2d" in tensors) == bool(size)
        if size:
            wanted = load_file(run / "03_dataset/vocab.safetensors")
            assert all(torch.equal(tensors[name], wanted[name]) for name in ("d2t", "t2d"))
        assert inspect(run / "04_draft/export").faults() == []
        assert len(metrics(run, "train")) == metrics(run, "train")[-1]["step"] == 5
    assert len(list(run.glob("04_draft.before-*"))) == 2


def test_another_learning_rate_is_refused_with_the_difference(run):
    assert train(run)[0] == 0
    weights = (run / "04_draft/export/model.safetensors").read_bytes()
    code, _, stderr = train(run, "--learning-rate", 0.01)
    assert code == 2 and "train.learning_rate: 0.02 there, 0.01 now" in only_error(stderr)
    assert (run / "04_draft/export/model.safetensors").read_bytes() == weights


def test_case_27_the_checkpoint_with_the_best_acceptance_is_served(run, monkeypatch):
    """Loss falls to the end while acceptance peaks at step 2."""
    import common.training.trainer as module

    lengths = iter([1.0, 1.2, 1.9, 1.5, 1.4, 1.3, 1.9])  # the untrained draft first, the chosen one last
    real = module.evaluate

    def peaked(*args):
        figures, replies = real(*args)
        length = next(lengths)
        return figures | {"walk": {3: {"length": length, "drafts": 1, "accepted": [1, 0, 0]}}}, replies

    monkeypatch.setattr(module, "evaluate", peaked)
    monkeypatch.setattr("common.training.checkpoint.KEEP_CHECKPOINTS", 1)
    code, out, stderr = train(run, "--eval-every", 1)
    assert code == 0, stderr
    assert "at step 2, on held-out replies" in out
    kept = sorted(path.name for path in (run / "04_draft/checkpoints").iterdir())
    assert kept == ["step-00000002", "step-00000005"]
    best = load_file(run / "04_draft/checkpoints/step-00000002/model.safetensors")
    assert torch.equal(exported(run)["fc.weight"], best["fc.weight"].bfloat16())
    assert Manifest.load(run / "04_draft", "04_draft").counts["chosen_step"] == 2


def test_the_report_counts_what_the_target_wrote(run):
    """Prompt tokens are nobody's draft; of each made-up reply, all but the first five are written."""
    assert train(run)[0] == 0
    report = (run / "04_draft/report.html").read_text()
    counted = re.findall(r"(\d+) tokens, (\d+) of (\d+) written ones", report)
    assert len(counted) == 3
    assert all(int(written) == int(tokens) - 5 >= int(hits) for tokens, hits, written in counted)


@pytest.mark.parametrize(
    ("scaling", "kept"),
    [
        ({"rope_type": "llama3", "factor": 8.0}, True),
        ({"type": "linear", "factor": 8.0}, True),
        ({"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 4096}, True),
        ({"rope_type": "default"}, False),
        ({"type": "mrope", "mrope_section": [16, 24, 24]}, False),
        ({"type": "su", "long_factor": [1.0], "short_factor": [1.0]}, False),
        ({"rope_type": "longrope", "long_factor": [1.0], "short_factor": [1.0]}, False),
        ({"type": "dynamic", "alpha": 1000.0}, False),
        ({"full_attention": {"rope_type": "linear", "factor": 8.0}}, False),
        ({}, False),
    ],
)
@pytest.mark.parametrize("where", ["rope_scaling", "rope_parameters"])
def test_a_draft_scales_as_its_target_where_all_engines_agree(scaling, kept, where):
    config = draft_config(DraftModel(), tiny_training.TEXT | {where: scaling}, 1e-5, 3, 32)
    assert config.rope_scaling == (scaling if kept else None)


def test_without_held_out_samples_the_last_step_is_served(run):
    tiny_training.build(run, holdout_share=0.0)
    code, out, stderr = train(run)
    assert code == 0, stderr
    last = sorted((run / "04_draft/checkpoints").iterdir())[-1]
    weights = load_file(last / "model.safetensors")
    assert torch.equal(exported(run)["fc.weight"], weights["fc.weight"].bfloat16())
    assert re.search("per position +-, - against", out)
    assert metrics(run, "eval") == [] and (run / "04_draft/report.html").stat().st_size > 1000


def test_a_state_that_is_not_finite_stops_before_the_update(run):
    path = run / "02_hidden" / tiny_training.SHARD
    shard = Shard(path)
    row = 0
    start = shard.offsets[row] + 6
    raw = bytearray(path.read_bytes())
    header = int.from_bytes(raw[:8], "little")
    at = 8 + header + json.loads(raw[8 : 8 + header])["last_hidden"]["data_offsets"][0]
    for token in range(start, shard.offsets[row + 1] - 1):
        raw[at + token * 2 * tiny_training.HIDDEN : at + token * 2 * tiny_training.HIDDEN + 2] = b"\xff\x7f"  # NaN
    path.write_bytes(raw)
    code, _, stderr = train(run, "--epochs", 2)
    assert code == 3, stderr
    said = only_error(stderr)
    assert "not applied" in said and shard.facts[row]["id"] in said
    assert not (run / "04_draft/export").exists()


def test_packs_that_ranks_cannot_share_are_the_users_mistake(run, monkeypatch):
    from common.training.ranks import Ranks

    for packs, ranks in ((3, 2), (1, 8)):
        monkeypatch.setattr("common.training.ranks.start_ranks", lambda device, ranks=ranks: Ranks(0, ranks, "cpu"))
        code, _, stderr = train(run, "--packs-per-step", packs)
        assert code == 2 and f"packs_per_step {packs} must be a multiple of the ranks, {ranks}" in only_error(stderr)


def test_a_dry_run_touches_nothing(run):
    before = sorted(run.rglob("*"))
    code, out, stderr = train(run, "--dry-run")
    assert code == 0, stderr
    assert "dry run" in out and "5 of 1 packs" in out
    assert sorted(run.rglob("*")) == before


def test_a_damaged_or_unfinished_data_set_is_refused(run):
    path = run / "03_dataset/vocab.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + b"\x07")
    code, _, stderr = train(run)
    assert code == 2 and "vocab.safetensors is not what 03 wrote; rerun 03" in only_error(stderr)
    path.write_bytes(whole)
    manifest = Manifest.load(run / "03_dataset", "03_dataset")
    manifest.files, manifest.complete = {}, False  # 03 was killed between its first file and its last
    manifest.save(run / "03_dataset")
    code, _, stderr = train(run)
    assert code == 2 and "is not complete; rerun 03" in only_error(stderr)


def test_shards_that_are_gone_are_named(run):
    (run / "02_hidden" / tiny_training.SHARD).unlink()
    code, _, stderr = train(run)
    assert code == 2 and tiny_training.SHARD in only_error(stderr)


def test_without_a_compiler_04_says_so_and_trains_eagerly(run, monkeypatch):
    monkeypatch.setenv("CXX", "/nowhere/g++")
    code, out, stderr = train(run, "--compile")
    assert code == 0, stderr
    assert "/nowhere/g++ is not installed, so torch.compile is off" in out
