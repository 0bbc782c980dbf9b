"""02, 03 and 04 as processes, as a user meets them: one line on stderr, the right exit code, never a traceback."""

import json
import os
import shutil

import pytest
from safetensors.torch import load_file

from common.dataset.draft_vocabulary import byte_tokens
from common.dataset.shards import Shard
from common.pipeline.manifest import Manifest
from tests.support import tiny_training
from tests.support.stages import DEMO, only_error, run_here, run_process

INPUTS = {"02": "01_synthetic", "03": "02_hidden", "04": "03_dataset"}


def fails(stage: str, *flags, code: int = 2) -> str:
    """The one line of a process that ends with `code`; nothing else on stderr."""
    done = run_process(stage, *flags)
    assert done.returncode == code, done.stderr
    assert only_error(done.stderr) == done.stderr.strip()
    return done.stderr


# ---- wrong use: every script, as processes (these end before anything heavy is imported) ----


@pytest.mark.parametrize("stage", sorted(INPUTS))
def test_wrong_use_is_one_line_and_exit_2(stage, tmp_path):
    assert "no such config: nowhere.toml" in fails(stage, "--config", "nowhere.toml")
    assert "did you mean '--run-dir'?" in fails(stage, "--config", DEMO, "--run-dri", "x")
    (tmp_path / "bad.toml").write_text("[target]\nmodle = 'x'\n")
    assert "did you mean 'model'?" in fails(stage, "--config", tmp_path / "bad.toml")
    assert f"no manifest.json in {tmp_path}/no/{INPUTS[stage]}" in fails(
        stage, "--config", DEMO, "--run-dir", tmp_path / "no"
    )
    (tmp_path / "file").write_text("a file where a folder should be")
    assert str(tmp_path / "file") in fails(stage, "--config", DEMO, "--run-dir", tmp_path / "file")
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize("stage", sorted(INPUTS))
def test_a_half_written_manifest_is_one_line_and_exit_2(stage, tmp_path):
    folder = tmp_path / INPUTS[stage]
    folder.mkdir()
    (folder / "manifest.json").write_text('{"stage": "' + INPUTS[stage])
    assert f"{folder}/manifest.json: not JSON" in fails(stage, "--config", DEMO, "--run-dir", tmp_path)


@pytest.mark.parametrize("stage", sorted(INPUTS))
def test_an_input_of_nothing_is_one_line_and_exit_2(stage, tmp_path, demo_target):
    """The stage before ran and found nothing, or was killed before its first file."""
    folder = tmp_path / INPUTS[stage]
    folder.mkdir()
    Manifest(INPUTS[stage], {"target.model": str(demo_target)}).save(folder)
    said = fails(stage, "--config", DEMO, "--run-dir", tmp_path)
    assert str(folder) in said
    assert not (tmp_path / "02_hidden").exists() or stage != "02"


def test_a_file_in_the_place_of_the_output_is_one_line(tiny_run, tmp_path):
    for stage in ("02_hidden", "03_dataset"):
        shutil.copytree(tiny_run / stage, tmp_path / stage)
    shutil.rmtree(tmp_path / "03_dataset")
    (tmp_path / "03_dataset").write_text("not a folder")
    code, _, stderr = run_here("03", "--config", DEMO, "--run-dir", tmp_path)
    assert code == 2 and "03_dataset" in only_error(stderr)


def test_a_folder_without_write_permission_is_one_line(monkeypatch, tmp_path):
    """Root may write everywhere, so the refusal is the system call's."""

    def refused(*_, **__):
        raise PermissionError(13, "Permission denied", "/some/folder")

    monkeypatch.setattr("common.pipeline.command_line._read_toml", refused)
    code, _, stderr = run_here("03", "--config", DEMO)
    assert code == 2 and "/some/folder: Permission denied" in only_error(stderr)


# ---- 02 ----


def test_02_refuses_half_written_and_changed_records(run_copy):
    folder = run_copy("01_synthetic")
    part = folder / "01_synthetic/part-00000.jsonl"
    whole = part.read_bytes()
    for content in (whole[: len(whole) // 2], whole.replace(b'"id"', b'"ID"', 1)):
        part.write_bytes(content)
        assert "part-00000.jsonl differs from what 01b wrote" in fails("02", "--config", DEMO, "--run-dir", folder)
    manifest = Manifest.load(folder / "01_synthetic", "01_synthetic")
    manifest.files = {}  # killed before its first manifest, or still running
    manifest.save(folder / "01_synthetic")
    assert "01b did not finish; rerun it" in fails("02", "--config", DEMO, "--run-dir", folder)


def rewrite(folder, change) -> None:
    """The records of 01b, each changed, with a manifest that fits."""
    stage = folder / "01_synthetic"
    records = [json.loads(line) for line in (stage / "part-00000.jsonl").read_text().splitlines()]
    (stage / "part-00000.jsonl").write_text("".join(json.dumps(change(record)) + "\n" for record in records))
    manifest = Manifest.load(stage, "01_synthetic")
    manifest.add_file(stage, "part-00000.jsonl")
    manifest.save(stage)


def test_02_a_doubled_opener_in_every_row_is_an_error(run_copy):
    folder = run_copy("01_synthetic")
    rewrite(folder, lambda record: record | {"output_ids": [15, *record["output_ids"]]})
    code, _, stderr = run_here("02", "--config", DEMO, "--run-dir", folder)
    said = only_error(stderr)
    assert code == 2 and "no usable record" in said and "occurs twice" in said and ": 10}" in said
    assert not (folder / "02_hidden").exists()


def test_case_9_02_a_file_of_rows_without_a_reply_is_an_error(run_copy):
    folder = run_copy("01_synthetic")
    rewrite(folder, lambda record: record | {"output_ids": []})
    code, _, stderr = run_here("02", "--config", DEMO, "--run-dir", folder)
    assert code == 2 and "no usable record" in only_error(stderr)


def test_02_a_target_that_is_not_there(run_copy):
    folder = run_copy("01_synthetic")
    said = fails("02", "--config", DEMO, "--run-dir", folder, "--model", "runs/no-such-target")
    assert "no such folder: runs/no-such-target" in said
    said = fails("02", "--config", DEMO, "--run-dir", folder, "--aux-layers", 2, 15, 30)
    assert "must rise and lie in 0..29" in said


def test_02_dry_run_touches_nothing(run_copy):
    folder = run_copy("01_synthetic")
    before = sorted(folder.rglob("*"))
    code, out, stderr = run_here("02", "--config", DEMO, "--run-dir", folder, "--n", 3, "--dry-run")
    assert code == 0, stderr
    assert "input of 2, 15, 27 of 30" in out and "3 to do" in out and "4,613 bytes a token" in out
    assert sorted(folder.rglob("*")) == before


def test_02_and_03_as_processes_say_what_they_made(tiny_run):
    """The tiny run is made by processes; here is what they left."""
    hidden, dataset = (Manifest.load(tiny_run / name, name) for name in ("02_hidden", "03_dataset"))
    assert hidden.complete and hidden.counts["sequences"] == 10 and hidden.counts["top1"] > 0.9
    assert hidden.settings["extract"]["extractor"] == "local"
    assert dataset.complete and dataset.counts["train"] + dataset.counts["held_out"] == 10
    assert dataset.settings["dataset"]["draft_vocab_size"] == dataset.counts["draft_vocab_size"] == 2048
    assert dataset.verify(tiny_run / "03_dataset") == []


# ---- 03 ----


def build(folder, *flags) -> tuple[int, str, str]:
    return run_here("03", "--config", DEMO, "--run-dir", folder, "--sample-tokens", 256, *flags)


def test_03_refuses_damaged_shards(run_copy):
    folder = run_copy("02_hidden")
    path = folder / "02_hidden/shard-00000.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    assert "shard-00000.safetensors is damaged or missing; rerun 02" in fails(
        "03", "--config", DEMO, "--run-dir", folder
    )


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--draft-vocab-size", 2), "must lie between 3 and 49152"),
        (("--draft-vocab-size", 50_000), "must lie between 238 and 49152"),
        (("--holdout-share", 1), "no sample of"),
        (("--model", "HuggingFaceTB/other"), "target.model: 'runs/smollm2-thinking' there, 'HuggingFaceTB/other' now"),
        (("--sample-tokens", 0), "--sample-tokens must be at least 1, not 0"),
        (("--sample-tokens", 4), "'fewer than 2 tokens written by the target': 10"),
    ],
)
def test_03_settings_that_leave_nothing(run_copy, flags, said):
    folder = run_copy("02_hidden")
    code, _, stderr = build(folder, *flags)
    assert code == 2 and said in only_error(stderr)
    assert not (folder / "03_dataset").exists()


def test_case_24_03_is_made_anew_for_every_vocabulary(run_copy):
    folder = run_copy("02_hidden")
    counts = None
    for size in (16, 32, 0):
        code, _, stderr = build(folder, "--draft-vocab-size", size)
        assert code == 0, stderr
        vocab = load_file(folder / "03_dataset/vocab.safetensors")
        assert len(vocab["d2t"]) == int(vocab["t2d"].sum()) == (size or 49152)
        assert vocab["t2d"][[2, 15, 16]].all()  # end and both markers, written or not
        assert counts is None or bool((vocab["counts"] == counts).all())
        counts = vocab["counts"]
        manifest = Manifest.load(folder / "03_dataset", "03_dataset")
        assert manifest.verify(folder / "03_dataset") == [] and manifest.complete
        assert manifest.counts["draft_vocab_size"] == (size or 49152)
    assert manifest.counts["coverage"] == 1.0


def test_03_keeps_every_single_byte(tiny_run, protocol):
    vocab = load_file(tiny_run / "03_dataset/vocab.safetensors")
    assert vocab["t2d"][byte_tokens(protocol.tokenizer)].all()


def test_03_twice_gives_the_same_bytes(run_copy):
    folder, files = run_copy("02_hidden"), ("index.safetensors", "vocab.safetensors", "target.json", "manifest.json")
    runs = []
    for _ in range(2):
        assert build(folder)[0] == 0
        runs.append([(folder / "03_dataset" / name).read_bytes() for name in files])
    assert runs[0] == runs[1]


def test_03_counts_what_the_target_wrote(run_copy):
    folder = run_copy("02_hidden")
    assert build(folder, "--holdout-share", 0)[0] == 0
    shard = Shard(folder / "02_hidden/shard-00000.safetensors")
    want = sum(int(shard.sequence(i)[1].sum()) for i in range(len(shard)))
    assert int(load_file(folder / "03_dataset/vocab.safetensors")["counts"].sum()) == want
    assert Manifest.load(folder / "03_dataset", "03_dataset").counts["supervised"] == want


# ---- 04 ----


def test_04_trains_on_the_demo_target_and_goes_on_when_asked_again(run_copy):
    """The whole draft at the demo's size, as a process; the second call finds nothing left to do."""
    folder = run_copy("02_hidden", "03_dataset")
    flags = ("--config", DEMO, "--run-dir", folder, "--epochs", 1, "--unrolled-steps", 2, "--no-compile")
    first = run_process("04", *flags)
    assert first.returncode == 0, first.stderr
    for said in ("draft vocabulary 2,048 of 49,152", "untrained draft", "bigram floor", "acceptance length, k=3"):
        assert said in first.stdout
    manifest = Manifest.load(folder / "04_draft", "04_draft")
    assert manifest.complete and manifest.verify(folder / "04_draft") == []
    lines = (folder / "04_draft/metrics.jsonl").read_bytes()
    code, out, stderr = run_here("04", *flags)
    assert code == 0, stderr
    assert "resumed from" in out and (folder / "04_draft/metrics.jsonl").read_bytes() == lines


def test_04_a_run_that_another_process_holds(tmp_path, demo_target):
    from common.pipeline.manifest import stage_lock

    folder = tiny_training.build(tmp_path / "run")
    with stage_lock(folder / ".04_draft-0"):
        said = fails("04", "--config", DEMO, "--run-dir", folder)
    assert "another process is writing" in said
    assert os.listdir(folder / ".04_draft-0") == [".lock"]
