"""What 02 asks of its records before it extracts: that they are the ones whose states are there, and the target's."""

import json

import pytest

from common.dataset.shards import Shard
from common.pipeline.manifest import Manifest
from tests.support.random_target import RandomTargetRun

LIMIT = 20  # tokens: cuts most of the records


@pytest.fixture
def place(records, tmp_path):
    """Runs a stage in a run folder of this test's own."""
    return RandomTargetRun(records, tmp_path / "run")


def rewrite(place: RandomTargetRun, change) -> list[dict]:
    """The records, each changed by `change(number, record)`, as 01b would have left them."""
    folder = place.run / "01_synthetic"
    records = [json.loads(line) for line in (folder / "part-00000.jsonl").read_text("utf-8").splitlines()]
    for number, record in enumerate(records):
        change(number, record)
    (folder / "part-00000.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records), "utf-8")
    manifest = Manifest.load(folder, "01_synthetic")
    manifest.add_file(folder, "part-00000.jsonl")
    manifest.save(folder)
    return records


def stored(place: RandomTargetRun) -> dict[str, list[int]]:
    """By id, the tokens of every sequence that has states."""
    shards = [Shard(place.hidden / name) for name in Manifest.load(place.hidden, "02_hidden").files]
    return {shard.facts[i]["id"]: shard.sequence(i)[0].tolist() for shard in shards for i in range(len(shard))}


@pytest.mark.parametrize("window", [(), ("--window", "1MB")], ids=["all", "window"])
def test_replies_that_were_made_anew_under_the_same_ids_are_refused(place, window):
    """01b --fresh where the target answers otherwise: ids and settings stay, tokens don't."""
    flags = ("--max-tokens-per-sample", LIMIT, *window)
    place.done("02", *flags)

    def in_what_is_cut_away(number, record):
        if len(record["prompt_ids"] + record["output_ids"]) > LIMIT:
            record["output_ids"][-1] += 1

    rewrite(place, in_what_is_cut_away)
    assert "; 0 to do" in place.done("02", *flags)

    def one_token(number, record):
        record["output_ids"][2] += number in (5, 7)

    records = rewrite(place, one_token)
    for more in [()] if window else [(), ("--dry-run",)]:
        said = place.refused("02", *flags, *more)
        assert "other replies" in said and "--fresh" in said
        assert window or f"2 samples changed since their states were extracted, the first is {5:064x}" in said
    assert "36 to do" in place.done("02", *flags, "--fresh", "--dry-run")
    place.done("02", *flags, "--fresh")
    assert stored(place) == {r["id"]: (r["prompt_ids"] + r["output_ids"])[:LIMIT] for r in records}


@pytest.mark.parametrize("stage", ["02", "03"])
def test_another_target_than_the_one_that_wrote_the_replies_is_refused(place, stage):
    """The same weights under another path are the same target: the names of folder and repository are compared."""
    place.done("02")
    folder = place.run / {"02": "01_synthetic", "03": "02_hidden"}[stage]
    manifest = Manifest.load(folder, folder.name)
    written = manifest.fingerprint["target.model"]
    flags = ("--fresh",) if stage == "02" else ()
    for model in ("org/target", "/elsewhere/Target/", "/hub/models--org--Target/snapshots/0123"):
        manifest.fingerprint["target.model"] = model
        manifest.save(folder)
        place.done(stage, *flags)
    for model in ("org/target-NVFP4", "org/other", "/elsewhere/target/0123"):
        manifest.fingerprint["target.model"] = model
        manifest.save(folder)
        for more in ((), ("--dry-run",)):
            assert f"target.model: '{model}' there, '{written}' now" in place.refused(stage, *flags, *more)


def test_a_resumed_run_knows_its_samples_in_shards_that_lost_some(place, monkeypatch):
    """Where states could not be had, a shard is written without them; --n and --part leave samples out."""
    from common.extraction import local_extractor as local
    from common.extraction.extractor import ExtractError

    real = local.LocalExtractor.states
    lost = {f"{number:064x}" for number in (0, 1, 2, 8, 17)}

    def states(self, streams):
        for stream, found in real(self, streams):
            yield stream, ExtractError("lost") if stream.id in lost else found

    with monkeypatch.context() as patch:
        patch.setattr(local.LocalExtractor, "states", states)
        place.done("02", MAX_FAILED_SHARE=1.0)
    assert stored(place).keys().isdisjoint(lost) and len(stored(place)) == 31
    assert "; 4 to do" in place.done("02", "--n", 9)
    assert "; 1 to do" in place.done("02") and len(stored(place)) == 36
