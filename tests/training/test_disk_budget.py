"""A window over the states: 02 and 04 side by side, on less disk than all shards take, and what a kill leaves."""

import json
import math
import random
import re
import shutil
import threading
import time
from collections import Counter

import pytest
import torch

from common.dataset.disk_budget import DiskBudget, find_disk_budget
from common.dataset.index import HELD_OUT, TRAIN, Index
from common.dataset.shards import Shard, States
from common.export.engine_check import inspect
from common.pipeline.manifest import Manifest
from common.pipeline.settings import Train
from tests.support.random_target import RandomTargetRun

WINDOW, EPOCHS = 110_000, 2  # bytes: six shards of 17,000, so four rounds of three
LIMIT = f"{WINDOW // 1000}kB"


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """This process computes on one thread, as the processes beside it do: the same bits from all."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def place(records, tmp_path):
    """Runs a stage in a run folder of this test's own."""
    return RandomTargetRun(records, tmp_path / "run")


def noted_training(monkeypatch) -> Counter:
    """How often each sample is in a pack that this process trains on."""
    from common.training.trainer import Trainer

    trained, real = Counter(), Trainer.check_finite

    def noted(self, batch, results, norm):
        trained.update(id for pack in batch for id in pack.ids)
        return real(self, batch, results, norm)

    monkeypatch.setattr(Trainer, "check_finite", noted)
    return trained


@pytest.fixture(scope="module")
def unbroken(one_thread, records, tmp_path_factory):
    """02 beside 04, nothing in their way: (the run, how often each sample was trained on, most bytes of shards)."""
    place, sizes, over = RandomTargetRun(records, tmp_path_factory.mktemp("unbroken") / "run"), [], threading.Event()

    def watch():
        while not over.wait(0.002):
            sizes.append(place.bytes_there())

    with pytest.MonkeyPatch.context() as patch:
        trained = noted_training(patch)
        thread = threading.Thread(target=watch)
        thread.start()
        extraction = place.beside("02", "--window", LIMIT)
        try:
            place.until(place.planned, extraction)
            place.done("03")
            place.done("04", "--follow")
            assert extraction.wait(60) == 0, place.logs()
        finally:
            over.set()
            thread.join()
            extraction.kill()
    return place, trained, max(sizes)


def test_every_sample_is_trained_as_often_as_asked_on_less_disk(unbroken):
    place, trained, most = unbroken
    window = DiskBudget(place.hidden)
    index = Index.load(place.run / "03_dataset/index.safetensors")
    planned = {name: [fact["id"] for fact in Shard(window.folder / name).facts] for name in window.schedule.files}
    wanted = {planned[index.shards[index.shard[row]]][index.number[row]] for row in index.rows(TRAIN)}
    assert trained == dict.fromkeys(wanted, EPOCHS) and len(wanted) == 30
    assert len(window.rounds) == 4 and window.released_rounds() == 4

    held_out = {id for name in window.held_out for id in planned[name]}
    assert len(held_out) == len(index.rows(HELD_OUT)) == 36 - 30 and not held_out & wanted
    assert place.shards() == window.held_out
    assert WINDOW / 2 < most - window.bytes_of(window.held_out) <= WINDOW
    assert sum(map(window.bytes_of, window.rounds)) > 1.4 * WINDOW
    files = Manifest.load(place.hidden, "02_hidden").files
    assert all(files[name]["bytes"] == window.bytes_of([name]) for name in files) and files.keys() == planned.keys()

    assert inspect(place.run / "04_draft/export").faults() == []
    assert place.metrics()[-1]["tokens"] == EPOCHS * int(index.length[index.rows(TRAIN)].sum())
    assert "waiting for 04 --follow to train on round 0" in place.logs()


def test_both_stages_again_find_nothing_to_do(unbroken):
    place, _, _ = unbroken
    before = place.losses(), place.shards()
    assert "0 to do" in place.done("02", "--window", LIMIT)
    assert "resumed from" in place.done("04", "--follow")
    assert (place.losses(), place.shards()) == before


def test_sigkill_of_either_side_changes_no_bit(place, unbroken):
    """04 is killed after some steps; while it starts again, 02 is killed too."""
    extraction = place.beside("02", "--window", LIMIT)
    processes = [extraction]
    try:
        place.until(place.planned, extraction)
        place.done("03")
        training = place.beside("04", "--follow")
        processes.append(training)
        place.until(lambda: len(place.metrics()) >= 8, extraction, training)
        training.kill()
        training.wait()
        written = place.written()
        processes.append(place.beside("04", "--follow"))
        time.sleep(0.3 * random.random())
        extraction.kill()
        extraction.wait()
        assert written < len(DiskBudget(place.hidden).schedule.files)
        assert len(place.metrics()) < len(unbroken[0].metrics())
        place.done("02", "--window", LIMIT)
        assert processes[-1].wait(60) == 0, place.logs()
    finally:
        for process in processes:
            process.kill()
    assert place.losses() == unbroken[0].losses()
    assert place.shards() == unbroken[0].shards()


def test_what_a_kill_left_between_note_and_deletion_is_deleted(unbroken, tmp_path):
    place = RandomTargetRun(unbroken[0].config.parent, tmp_path / "run")
    shutil.rmtree(place.run)
    shutil.copytree(unbroken[0].run, place.run)
    last = place.hidden / DiskBudget(place.hidden).rounds[-1][0]
    for stage, *flags in (("02", "--window", LIMIT), ("04", "--follow")):
        last.touch()
        place.done(stage, *flags)
        assert not last.exists()


def interrupted(*_) -> None:
    raise KeyboardInterrupt


def test_two_ranks_wait_and_release_as_one(place):
    """02 is stopped by Ctrl-C before its first round, so both ranks wait; then each round waits for their release."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DiskBudget, "wait_for_room", interrupted)
        code, _, stderr = place.here("02", "--window", LIMIT)
    assert code == 130 and place.shards() == DiskBudget(place.hidden).held_out, stderr
    place.done("03")
    training = place.beside("04", "--follow", "--packs-per-step", 2, "--eval-every", 99, ranks=2)
    try:
        place.until(lambda: "waiting for 02 --window to write round 0" in place.logs(), training)
        place.done("02", "--window", LIMIT)
        assert training.wait(60) == 0, place.logs()
    finally:
        training.terminate()
    assert place.shards() == DiskBudget(place.hidden).held_out
    assert len(place.metrics()) == place.metrics()[-1]["step"] > 8


# ---- sequences without states ----


def test_lost_sequences_are_left_out_and_the_steps_stay(place, monkeypatch):
    """02 loses all of round 0 but one sequence, and one of a held-out shard: whole shards and packs are empty."""
    import common.extraction.local_extractor as local

    real, lost = local.LocalExtractor.states, set()

    def states(self, streams):
        window = DiskBudget(place.hidden)
        shards = [*window.rounds[0], window.held_out[0]]
        ids = [fact["id"] for name in shards for fact in Shard(window.folder / name).facts]
        kept = len(Shard(window.folder / window.held_out[0]).facts)
        lost.update(ids[:-kept][1:] + ids[-1:])
        for stream, found in real(self, streams):
            yield stream, States(found.aux * math.nan, found.last) if stream.id in lost else found

    monkeypatch.setattr(local.LocalExtractor, "states", states)
    everything = f"{WINDOW * 3}kB"
    place.done("02", "--window", everything, MAX_FAILED_SHARE=1.0)
    failures = [json.loads(line)["id"] for line in (place.hidden / "failures-00000.jsonl").read_text().splitlines()]
    assert sorted(failures) == sorted(lost)
    sizes = [facts["sequences"] for facts in Manifest.load(place.hidden, "02_hidden").files.values()]
    assert 0 in sizes
    assert "0 to do" in place.done("02", "--window", everything)
    place.done("03")
    trained = noted_training(monkeypatch)
    place.done("04", "--follow")
    assert not trained.keys() & lost and len(trained) == 1 and trained.most_common(1)[0][1] == len(place.metrics())


# ---- refusals ----


def test_what_does_not_fit_is_refused(place, tmp_path):
    assert "is not a valid size; expected for example 500GB" in place.refused("02", "--window", "500 potatoes")
    assert "--window and --part exclude each other" in place.refused("02", "--window", LIMIT, "--part", "1/2")
    said = place.refused("02", "--window", "20kB")
    assert "half the disk budget must hold a shard" in said and "--window of at least 0.0" in said
    assert not place.hidden.exists()
    code, out, stderr = place.here("02", "--window", LIMIT, "--dry-run")
    assert code == 0 and re.search(r"disk budget +\d rounds, at most 0.05 MB each, half of 0.11 MB", out), stderr
    assert not place.hidden.exists()

    place.done("02", "--window", "1MB", "--n", 20)
    said = place.refused("02", "--window", "1MB")
    assert "schedules 20 samples; the 36 of this run are other ones" in said and "--fresh" in said
    assert "extract.window: '1MB' there, '2MB' now" in place.refused("02", "--window", "2MB", "--n", 20)
    assert "extract.window: '1MB' there, '' now" in place.refused("02", "--n", 20)
    said = place.refused("03", "--holdout-share", 0.4)
    assert "dataset.holdout_share: 0.2 in the schedule of 02 --window, 0.4 now" in said
    place.done("03")
    assert f"{1:064x}" in place.done("03", "--inspect", f"{1:064x}")
    assert "train with --follow" in place.refused("04")
    place.done("04", "--follow")
    assert "are trained on and deleted" in place.refused("04", "--follow", "--fresh")
    shutil.rmtree(place.run / "04_draft")
    assert "training resumes from step 0, which needs round 0" in place.refused("04", "--follow")
    assert "--packs-per-step 999" in place.refused("04", "--follow", "--packs-per-step", 999)
    place.done("02", "--window", "1MB", "--n", 10, "--fresh")
    assert "is not the schedule that 03 read" in place.refused("04", "--follow")


def test_follow_without_a_window_is_refused(place):
    place.done("02")
    place.done("03")
    assert "has no schedule of a disk budget" in place.refused("04", "--follow")
    assert find_disk_budget(place.hidden) is None


# ---- stopped while waiting ----


def test_a_stop_ends_the_waiting(place):
    """Ctrl-C while no shard comes: the steps end, and what was trained is checkpointed by the loop."""
    from common.training.disk_budget import Follower
    from common.training.ranks import Ranks

    place.done("02", "--window", "1MB")
    place.done("03")
    manifest = Manifest.load(place.hidden, "02_hidden")
    manifest.files = {}
    manifest.save(place.hidden)
    index = Index.load(place.run / "03_dataset/index.safetensors")
    follower = Follower(DiskBudget(place.hidden), index, 64, Train(), Ranks(0, 1, "cpu"))

    class Stop:
        asked_here = False

    threading.Timer(0.1, lambda: setattr(Stop, "asked_here", True)).start()
    assert list(follower.ready(iter([[index.rows(TRAIN)[:1]]]), Stop)) == []
