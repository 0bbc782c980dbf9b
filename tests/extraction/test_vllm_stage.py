"""Stage 02 as a process against an extraction server of the tests' own: killed, stopped, resumed, refused."""

import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch

from common.dataset.shards import Shard
from common.pipeline.manifest import Manifest
from tests.support.extraction_server import ExtractionServer
from tests.support.stages import DEMO, ROOT, command, only_error, run_here

RETRIES = "common.extraction.vllm_extractor.RETRIES"


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr("common.servers.retries.LONGEST_PAUSE_S", 0.01)
    monkeypatch.setattr("common.extraction.spool.FILE_GRACE_S", 0.05)


@pytest.fixture(scope="module")
def wanted(tiny_run) -> dict[str, tuple]:
    """By sample id, what the local extractor stored of the tiny run: (ids, aux, last)."""
    folder = tiny_run / "02_hidden"
    shards = [Shard(folder / name) for name in sorted(Manifest.load(folder, "02_hidden").files)]
    found = {}
    for shard in shards:
        for i, facts in enumerate(shard.facts):
            ids, _, states = shard.sequence(i)
            found[facts["id"]] = ids.tolist(), states.aux, states.last
    return found


@pytest.fixture
def smollm2_server(wanted, spool):
    states = {tuple(ids): torch.cat([aux, last], 1).view(len(ids), 4, -1) for ids, aux, last in wanted.values()}

    def known(ids: list[int]) -> torch.Tensor:
        return next(rows[: len(ids)] for key, rows in states.items() if list(key[: len(ids)]) == ids)

    with ExtractionServer(spool, known) as server:
        server.tells = {"layer_ids": [2, 15, 27, 30], "shared_storage_path": str(spool)}
        yield server


def flags(folder: Path, server: ExtractionServer, *more: object) -> list[object]:
    urls = ["--extract-urls", server.url, "--spool", server.spool, "--shard-gib", 200 * 4613 / 2**30]
    return ["--config", DEMO, "--run-dir", folder, "--extractor", "vllm", *urls, "--extract-concurrency", 3, *more]


def test_each_round_of_a_window_has_a_client_of_its_own(run_copy, wanted, smollm2_server):
    folder = run_copy("01_synthetic")
    window = sum(len(ids) for ids, _, _ in wanted.values()) * 4613 * 11 // 10 // 1000  # two rounds, both fit
    code, out, stderr = run_here("02", *flags(folder, smollm2_server, "--window", f"{window}kB"))
    assert code == 0, stderr
    rounds = 1 + Manifest.load(folder / "02_hidden/plan", "02_hidden").counts["rounds"]  # held-out shards come first
    assert out.count("extractor: vLLM") == rounds > 2
    assert_stored(folder, wanted)
    assert list(smollm2_server.spool.iterdir()) == []


def assert_stored(folder: Path, wanted: dict[str, tuple]) -> None:
    manifest = Manifest.load(folder / "02_hidden", "02_hidden")
    assert manifest.verify(folder / "02_hidden") == []
    found = {}
    for name in manifest.files:
        shard = Shard(folder / "02_hidden" / name)
        found |= {facts["id"]: shard.sequence(i) for i, facts in enumerate(shard.facts)}
    assert found.keys() == wanted.keys()
    for id, (ids, _, states) in found.items():
        assert ids.tolist() == wanted[id][0]
        assert torch.equal(states.aux, wanted[id][1]) and torch.equal(states.last, wanted[id][2])


def test_02_stores_nothing_wrong_and_a_rerun_completes_it(smollm2_server, run_copy, wanted):
    folder, sick = run_copy("01_synthetic"), {2: "nan", 5: "nan", 7: "half file", 9: "other ids"}
    smollm2_server.behave = lambda number, ids: sick.get(number)
    code, _, stderr = run_here("02", *flags(folder, smollm2_server), constants={RETRIES: 1})
    assert code == 1 and "2 of 10 sequences failed" in only_error(stderr)
    bad = {id for id, (ids, *_) in wanted.items() if ids in (smollm2_server.asked[2], smollm2_server.asked[5])}
    assert_stored(folder, {id: value for id, value in wanted.items() if id not in bad})
    smollm2_server.behave = lambda number, ids: None
    code, _, stderr = run_here("02", *flags(folder, smollm2_server))
    assert code == 0, stderr
    assert_stored(folder, wanted)
    assert list(smollm2_server.spool.iterdir()) == []


def test_02_killed_and_stopped_leaves_a_clean_spool_to_its_successor(smollm2_server, run_copy, wanted):
    folder = run_copy("01_synthetic")
    smollm2_server.held_s = 60.0
    smollm2_server.behave = lambda number, ids: "held" if number > 4 and len(ids) > 16 else None  # not the probe
    for how, code in ((signal.SIGKILL, -9), (signal.SIGINT, 130)):
        asked = len(smollm2_server.asked)
        process = subprocess.Popen(
            command("02", *flags(folder, smollm2_server)), cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL
        )
        while len(smollm2_server.asked) < max(asked + 2, 7):
            assert process.poll() is None
            time.sleep(0.01)
        started = time.monotonic()
        process.send_signal(how)
        said = process.communicate(timeout=30)[1].decode()
        assert process.returncode == code and time.monotonic() - started < 5, said
    smollm2_server.behave = lambda number, ids: None
    code, _, stderr = run_here("02", *flags(folder, smollm2_server))
    assert code == 0, stderr
    assert_stored(folder, wanted)
    assert list(smollm2_server.spool.iterdir()) == []


def test_02_refuses_a_server_with_other_layers(smollm2_server, run_copy):
    folder = run_copy("01_synthetic")
    code, _, stderr = run_here("02", *flags(folder, smollm2_server, "--aux-layers", 3, 16, 28))
    assert code == 2 and "extracts layers [2, 15, 27, 30], this config needs [3, 16, 28, 30]" in stderr
    assert not list((folder / "02_hidden").glob("shard-*"))
