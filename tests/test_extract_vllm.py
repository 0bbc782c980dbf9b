"""The vLLM extractor against a server of the tests' own (case 18): retried or refused, never stored; a clean spool."""

import fcntl
import os
import signal
import subprocess
import time
from array import array
from pathlib import Path

import pytest
import torch
from extraction_server import ExtractionServer
from stages import DEMO, ROOT, command, only_error, run_here

from common.config import Extract, Target
from common.errors import SafetyStop, UserError
from common.extract import find_fault
from common.extractors.interface import ExtractError
from common.extractors.vllm_server import VllmExtractor
from common.shards import Shard, ShardKind, States
from common.storage import Manifest
from common.streams import Stream
from common.target import TargetSizes

AUX, DEPTH, HIDDEN = (1, 2, 3), 6, 8
LAYERS = [*AUX, DEPTH]
SIZES = TargetSizes(HIDDEN, DEPTH, 1000, 1e-5, False, {})
KIND = ShardKind("t", "", HIDDEN, AUX)


def states_of(ids: list[int]) -> torch.Tensor:
    """Some states [T, layer ids, H] that tell ids, rows and layers apart."""
    generator = torch.Generator().manual_seed(sum(ids) * 31 + len(ids))
    return torch.randn(len(ids), len(LAYERS), HIDDEN, generator=generator).bfloat16()


def stream(number: int, tokens: int = 20) -> Stream:
    return Stream(f"s{number}", array("i", range(number, number + tokens)), array("B", [1] * tokens))


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr("common.extractors.vllm_server.LONGEST_PAUSE_S", 0.01)
    monkeypatch.setattr("common.extractors.vllm_server.RESTED_S", 0.2)
    monkeypatch.setattr("common.extractors.spool.FILE_GRACE_S", 0.05)


@pytest.fixture
def spool(tmp_path) -> Path:
    return tmp_path / "spool"


@pytest.fixture
def server(spool):
    with ExtractionServer(spool, states_of) as server:
        yield server


def extractor(*servers: ExtractionServer, spool: Path, **settings) -> VllmExtractor:
    known = {"extract_urls": tuple(server.url for server in servers), "spool": str(spool), "extract_timeout_s": 10.0}
    known |= {"max_tokens_per_sample": 1024, "extract_concurrency": 4}
    return VllmExtractor(Target(model="t"), Extract(**{**known, **settings}), AUX, SIZES)


def fetch(made: VllmExtractor, streams: list[Stream]) -> dict[str, States | ExtractError]:
    return {stream.id: result for stream, result in made.states(streams)}


def assert_right(found: States, stream: Stream) -> None:
    wanted = states_of(stream.ids.tolist())
    assert torch.equal(found.aux, wanted[:, :-1].reshape(len(stream), -1)) and torch.equal(found.last, wanted[:, -1])


def test_states_come_whole_and_the_spool_stays_small(server, spool):
    streams = [stream(n, tokens=1 + n) for n in range(24)]
    found = fetch(extractor(server, spool=spool), streams)
    assert list(found) != [] and found.keys() == {s.id for s in streams}
    for s in streams:
        assert_right(found[s.id], s)
    assert server.most_files <= 4 and list(spool.iterdir()) == []
    assert sorted(server.asked) == sorted(s.ids.tolist() for s in streams)  # each asked once


@pytest.mark.parametrize(
    "fault",
    ["half file", "zero tail", "other ids", "rows lost", "other layers", "float32", "lock without file", "no path",
     "killed while writing", "error 500", "html", "answer lost"],
)  # fmt: skip
def test_a_fault_is_tried_again(server, spool, fault):
    server.behave = lambda number, ids: fault if number < 2 else None
    streams = [stream(n) for n in range(5)]
    found = fetch(extractor(server, spool=spool, extract_concurrency=1), streams)
    for s in streams:
        assert_right(found[s.id], s)
    assert len(server.asked) == 7 and list(spool.iterdir()) == []


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("half file", "is not whole"),
        ("zero tail", "is not whole"),
        ("other ids", "the file of another request"),
        ("rows lost", "expected bfloat16 [20, 4, 8]"),
        ("other layers", "the server must extract layers [1, 2, 3, 6]"),
        ("lock without file", "the server died while writing"),
        ("no path", "no hidden_states_path"),
        ("error 500", "HTTP 500: {\"error\": \"the engine is dead\"}"),
        ("html", "JSONDecodeError"),
        ("answer lost", "APIConnectionError"),
    ],
)  # fmt: skip
def test_a_lasting_fault_is_reported_and_others_go_on(server, spool, fault, said):
    server.behave = lambda number, ids: fault if ids[0] == 1 else None
    found = fetch(extractor(server, spool=spool, extract_retries=1), [stream(n) for n in range(4)])
    assert isinstance(found["s1"], ExtractError) and said in str(found["s1"])
    for n in (0, 2, 3):
        assert_right(found[f"s{n}"], stream(n))
    assert len(server.asked) == 5 and list(spool.iterdir()) == []


@pytest.mark.parametrize(("fault", "said"), [("error 400", "HTTP 400"), ("other folder", "must be one folder")])
def test_what_another_try_cannot_mend_is_asked_once(server, spool, fault, said):
    server.behave = lambda number, ids: fault if ids[0] == 1 else None
    found = fetch(extractor(server, spool=spool), [stream(n) for n in range(3)])
    assert isinstance(found["s1"], ExtractError) and said in str(found["s1"])
    assert len(server.asked) == 3 and list(spool.iterdir()) == []
    elsewhere = spool.parent / "elsewhere"
    assert not elsewhere.exists() or len(list(elsewhere.iterdir())) == 1  # never read, never deleted


@pytest.mark.parametrize(("fault", "said"), [("nan", "aux states are not finite"), ("constant", "same at every token")])
def test_states_that_make_no_sense_are_found(server, spool, fault, said):
    server.behave = lambda number, ids: fault
    [(_, states)] = extractor(server, spool=spool).states([stream(0)])
    assert said in find_fault(stream(0), states, KIND)


# ---- locks ----


def test_a_lock_that_is_held_is_waited_for(server, spool):
    server.behave, server.held_s = lambda number, ids: "held", 0.6
    started = time.monotonic()
    [(_, states)] = extractor(server, spool=spool).states([stream(0)])
    assert_right(states, stream(0))
    assert 0.6 <= time.monotonic() - started < 3 and list(spool.iterdir()) == []


def test_a_lock_that_is_never_released_meets_the_deadline(server, spool):
    server.behave, server.held_s = lambda number, ids: "held" if ids[0] == 1 else None, 1.0
    made = extractor(server, spool=spool, extract_timeout_s=0.3, extract_retries=1, extract_concurrency=2)
    started, found = time.monotonic(), {}
    for s, result in made.states([stream(n) for n in range(4)]):
        found[s.id] = result
    assert "is still held at the deadline" in str(found["s1"])
    assert sum(isinstance(result, States) for result in found.values()) == 3
    assert time.monotonic() - started < 1.0  # twice the deadline, and not the lock's own time
    for writer in server.writers:
        writer.join()
    assert list(spool.glob("*.safetensors"))  # came after all, when nobody waited
    [(_, states)] = extractor(server, spool=spool).states([stream(2)])
    assert_right(states, stream(2))
    assert list(spool.iterdir()) == []  # swept by the next run


def test_a_file_that_comes_too_late_is_deleted_by_the_same_run(server, spool):
    server.behave, server.held_s = lambda number, ids: "held" if number == 0 else None, 0.5
    made = extractor(server, spool=spool, extract_timeout_s=0.2, extract_concurrency=1)
    server.delay_s = 0.1
    found = fetch(made, [stream(n) for n in range(8)])
    assert all(isinstance(result, States) for result in found.values())
    assert list(spool.iterdir()) == []


def test_a_lock_that_never_appears(server, spool):
    server.behave = lambda number, ids: "no lock"
    made = extractor(server, spool=spool, extract_timeout_s=0.2, extract_retries=0)
    [(_, problem)] = made.states([stream(0)])
    assert "never appeared at the deadline" in str(problem)


def test_files_of_others_are_left_alone(server, spool):
    spool.mkdir(exist_ok=True)
    living, dead = "kimi-eagle3-0000aaaa", "kimi-eagle3-0000bbbb"
    names = [f"cmpl-{run}-7--0-1234.safetensors" for run in (living, dead)]
    for name in [*names, f"{names[1]}.lock", "notes.txt", ".tmpNEW"]:
        (spool / name).touch()
    (spool / ".tmpOLD").touch()
    os.utime(spool / ".tmpOLD", (0, 0))
    with open(spool / f".{living}.alive", "wb") as alive:
        fcntl.flock(alive, fcntl.LOCK_EX)
        fetch(extractor(server, spool=spool), [stream(0)])
        left = {path.name for path in spool.iterdir()}
    assert left == {names[0], f".{living}.alive", "notes.txt", ".tmpNEW"}


def test_a_server_that_names_its_files_itself_is_served_too(server, spool):
    server.names_files = False
    assert_right(fetch(extractor(server, spool=spool), [stream(0)])["s0"], stream(0))
    assert list(spool.iterdir()) == []


# ---- servers ----


def test_a_dead_server_stops_the_run(server, spool):
    made = extractor(server, spool=spool, extract_retries=1, extract_breaker=5)
    seen = []
    with pytest.raises(SafetyStop, match=r"5 samples failed in a row.*APIConnectionError.*rerun to go on"):
        for s, result in made.states([stream(n) for n in range(40)]):
            seen.append((s, result))
            server.stop()
    assert sum(isinstance(result, States) for _, result in seen) >= 1 and len(seen) < 20
    assert list(spool.iterdir()) == []


def test_a_server_that_comes_back_loses_nothing(server, spool):
    made = extractor(server, spool=spool, extract_retries=60)
    found = {}
    for s, result in made.states([stream(n) for n in range(20)]):
        found[s.id] = result
        if len(found) == 5:
            server.stop()
            time.sleep(0.2)
            server.start()
    assert len(found) == 20 and all(isinstance(result, States) for result in found.values())


def test_one_of_two_servers_dies(server, spool):
    with ExtractionServer(spool, states_of) as other:
        found = {}
        for s, result in extractor(server, other, spool=spool).states([stream(n) for n in range(40)]):
            found[s.id] = result
            if len(found) == 6:
                other.stop()
        assert len(found) == 40 and all(isinstance(result, States) for result in found.values())
        assert len(server.asked) > 20 and len(other.asked) > 2
    assert list(spool.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tells": {"layer_ids": [2, 3, 4, 6]}}, "extracts layers [2, 3, 4, 6], this config needs [1, 2, 3, 6]"),
        (
            {"tells": {"layer_ids": LAYERS, "shared_storage_path": "/tmp/other"}},
            "writes to /tmp/other, extract.spool is",
        ),
        ({"max_model_len": 1024}, "takes 1024 tokens"),
    ],
)
def test_a_server_for_another_config_is_refused(server, spool, change, said):
    server.tells = {"layer_ids": LAYERS, "shared_storage_path": str(spool)}
    assert "does not say" not in extractor(server, spool=spool).description
    for name, value in change.items():
        setattr(server, name, value)
    with pytest.raises(UserError) as error:
        extractor(server, spool=spool)
    assert said in str(error.value)


def test_a_server_that_tells_nothing_is_probed(server, spool):
    assert "does not say which layers it extracts" in extractor(server, spool=spool).description
    extractor(server, spool=spool).probe(stream(0, tokens=50))
    assert server.asked == [list(range(16))]
    server.behave = lambda number, ids: "other layers"
    with pytest.raises(UserError, match="the server must extract layers"):
        extractor(server, spool=spool).probe(stream(0))
    server.stop()
    with pytest.raises(UserError, match="no server answers at"):
        extractor(server, spool=spool)


# ---- 02 with such a server ----


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
    code, _, stderr = run_here("02", *flags(folder, smollm2_server, "--extract-retries", 1))
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
