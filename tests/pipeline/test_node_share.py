"""`--part I/N`: three processes make the set of one, in each stage, and the next stage reads them by itself."""

import json
import shutil
import subprocess

import pytest
import torch

from common.dataset.index import Index
from common.dataset.shards import Shard
from common.pipeline.errors import UserError
from common.pipeline.manifest import Manifest
from common.pipeline.node_share import WHOLE, NodeShare, load_stage, parse_node_share, stage_files, stage_folder
from tests.support.generation import check_sound
from tests.support.stages import DEMO, ROOT, command, only_error, run_here

CHAT = [{"role": role, "content": text} for role, text in [("user", "a"), ("assistant", "b"), ("user", "c")]]
QUESTIONS = [f"question {i}" for i in range(20)] + [{"messages": CHAT}, {"prompt": ""}, "question 3"]
PARTS = ("1/3", "2/3", "3/3")


@pytest.fixture
def place(place):
    return place.ask(QUESTIONS)


def essence(records: list[dict]) -> dict:
    return {record["id"]: (record["prompt_ids"], record["source"]["row"]) for record in records}


@pytest.mark.parametrize("flags", [(), ("--n=7", "--turns=all", "--repeats=2")])
def test_01b_three_processes_at_once_make_the_samples_of_one(place, tiny, flags):
    running = [
        subprocess.Popen(place.command(*flags, f"--part={part}"), cwd=ROOT, stdout=-3, stderr=subprocess.PIPE)
        for part in PARTS
    ]
    for process in running:
        _, err = process.communicate(timeout=60)
        assert process.returncode == 0, err.decode()
    parts = place.lines("part-*-of-3/part-*.jsonl")
    merged = load_stage(place.stage, "01_synthetic")
    assert merged.complete and merged.verify(place.stage) == [] and merged.counts["done"] == len(parts)
    check_sound(parts, tiny)
    shutil.move(place.stage, place.folder / "in parts")
    code, _, err = place.run(*flags)
    assert code == 0, err
    assert essence(parts) == essence(place.records) and merged.fingerprint == place.manifest["fingerprint"]


def test_01b_a_part_resumes_and_a_split_stays_as_it_is(place):
    assert place.run("--part=2/3")[0] == 0
    asked = len(place.server.bodies)
    code, out, err = place.run("--part=2/3")
    assert code == 0 and "0 new samples" in out, err
    assert len(place.server.bodies) == asked
    for flags, said in (((), "made in 3 parts, not as one"), (("--part=1/2",), "made in 3 parts, not in 2")):
        code, _, err = place.run(*flags)
        assert code == 2 and said in only_error(err)
    code, _, err = place.run("--part=4/3")
    assert code == 2 and "must be I/N with 1 <= I <= N" in only_error(err)


def split(folder, count: int) -> None:
    """Records made as one, laid out as parts."""
    stage = folder / "01_synthetic"
    manifest = Manifest.load(stage, "01_synthetic")
    lines = (stage / "part-00000.jsonl").read_text().splitlines(keepends=True)
    shutil.rmtree(stage)
    for number in range(1, count + 1):
        part = stage_folder(stage, NodeShare(number, count))
        part.mkdir(parents=True)
        own = [line for line in lines if NodeShare(number, count).holds(json.loads(line)["id"])]
        (part / "part-00000.jsonl").write_text("".join(own))
        manifest.files = {}
        manifest.add_file(part, "part-00000.jsonl")
        manifest.save(part)


def sequences(stage) -> dict:
    shards = [Shard(path) for path in stage_files(stage, "shard-*.safetensors")]
    return {shard.facts[i]["id"]: shard.sequence(i)[0].tolist() for shard in shards for i in range(len(shard))}


def test_02_and_03_read_parts_as_one(run_copy, tiny_run):
    """01b in two parts, 02 in three processes, 03 over all: the sequences, splits and counts of the unsplit run."""
    folder = run_copy("01_synthetic")
    split(folder, 2)
    common = ("--config", DEMO, "--run-dir", folder)
    extract = {part: command("02", *common, "--part", part) for part in PARTS}
    first = subprocess.run(extract["1/3"], cwd=ROOT, capture_output=True, text=True)
    assert first.returncode == 0, first.stderr
    code, _, err = run_here("03", *common)
    assert code == 2 and "lacks part-2-of-3, part-3-of-3; run them with --part, or copy them here" in only_error(err)
    at_once = [subprocess.Popen(extract[part], cwd=ROOT, stdout=-3, stderr=subprocess.PIPE) for part in PARTS[1:]]
    for process in at_once:
        _, err = process.communicate(timeout=120)
        assert process.returncode == 0, err.decode()
    assert sequences(folder / "02_hidden") == sequences(tiny_run / "02_hidden")

    flags = ("--draft-vocab-size", 2048, "--holdout-share", 0.3, "--sample-tokens", 256)
    code, _, err = run_here("03", *common, *flags)
    assert code == 0, err
    merged, single = (Manifest.load(run / "03_dataset", "03_dataset") for run in (folder, tiny_run))
    assert merged.counts == single.counts and merged.complete
    indexes = [Index.load(run / "03_dataset/index.safetensors") for run in (folder, tiny_run)]
    lengths = [sorted(zip(index.length.tolist(), index.split.tolist(), strict=True)) for index in indexes]
    assert lengths[0] == lengths[1]
    assert indexes[0].shards[0].startswith("part-1-of-3/") and torch.unique(indexes[0].shard).numel() > 1
    code, out, err = run_here("04", *common, "--dry-run")
    assert code == 0 and "held out" in out, err


def test_parts_of_other_settings_are_refused(run_copy):
    folder = run_copy("01_synthetic")
    split(folder, 2)
    part = folder / "01_synthetic/part-2-of-2"
    manifest = Manifest.load(part, "01_synthetic")
    manifest.fingerprint["generate.temperature"] = 0.7
    manifest.save(part)
    with pytest.raises(UserError, match=r"generate\.temperature"):
        load_stage(folder / "01_synthetic", "01_synthetic")


def test_parts_hold_each_id_once():
    parts = [parse_node_share(text) for text in PARTS]
    ids = [f"{number * 0x9E3779B97F4A7C15 % 2**64:016x}" for number in range(3000)]
    shares = [[id for id in ids if part.holds(id)] for part in parts]
    assert sorted(id for share in shares for id in share) == sorted(ids) and min(map(len, shares)) > 850
    assert parse_node_share(None) == WHOLE and all(WHOLE.holds(id) for id in ids)
    for wrong in ("0/3", "3", "a/b", "4/3", "-1/3"):
        with pytest.raises(UserError, match="I/N"):
            parse_node_share(wrong)
