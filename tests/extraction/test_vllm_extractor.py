"""The vLLM extractor against a server of the tests' own (case 18): retried or refused, never stored; a clean spool."""

import fcntl
import os
import time
from collections.abc import Iterator

import pytest
import torch

from common.dataset.shard_layout import ShardKind
from common.dataset.shards import States
from common.dataset.stream import Stream
from common.extraction.extractor import ExtractError
from common.extraction.loop import find_fault
from common.extraction.spool import Spool
from common.extraction.vllm_extractor import VllmExtractor
from common.pipeline.errors import SafetyStop
from tests.support.extraction_server import ExtractionServer
from tests.support.tiny_extractor import AUX, HIDDEN, extractor, states_of, stream

KIND = ShardKind("t", "", HIDDEN, AUX)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr("common.servers.retries.LONGEST_PAUSE_S", 0.01)
    monkeypatch.setattr("common.extraction.vllm_extractor.RETRY_SERVER_AFTER_S", 0.2)
    monkeypatch.setattr("common.extraction.spool.FILE_GRACE_S", 0.05)


def results(made: VllmExtractor, streams: list[Stream]) -> Iterator[tuple[Stream, States | ExtractError]]:
    with made:
        yield from made.states(streams)


def fetch(made: VllmExtractor, streams: list[Stream]) -> dict[str, States | ExtractError]:
    return {stream.id: result for stream, result in results(made, streams)}


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
    found = fetch(extractor(server, spool=spool, RETRIES=1), [stream(n) for n in range(4)])
    assert isinstance(found["s1"], ExtractError) and said in str(found["s1"])
    for n in (0, 2, 3):
        assert_right(found[f"s{n}"], stream(n))
    if fault == "answer lost":  # the server may write the file when the run is over: the next run deletes it
        for writer in server.writers:
            writer.join()
        Spool(spool).close()
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
    [(_, states)] = results(extractor(server, spool=spool), [stream(0)])
    assert said in find_fault(stream(0), states, KIND)


# ---- locks ----


def test_a_lock_that_is_held_is_waited_for(server, spool):
    server.behave, server.held_s = lambda number, ids: "held", 0.6
    started = time.monotonic()
    [(_, states)] = results(extractor(server, spool=spool), [stream(0)])
    assert_right(states, stream(0))
    assert 0.6 <= time.monotonic() - started < 3 and list(spool.iterdir()) == []


def test_a_lock_that_is_never_released_meets_the_deadline(server, spool):
    server.behave, server.held_s = lambda number, ids: "held" if ids[0] == 1 else None, 3.0
    made = extractor(server, spool=spool, SAMPLE_TIMEOUT_S=0.3, RETRIES=1, extract_concurrency=2)
    started, found = time.monotonic(), {}
    for s, result in results(made, [stream(n) for n in range(4)]):
        found[s.id] = result
    assert "is still held at the deadline" in str(found["s1"])
    assert sum(isinstance(result, States) for result in found.values()) == 3
    assert time.monotonic() - started < server.held_s  # two deadlines and a pause, not the time that the lock is held
    for writer in server.writers:
        writer.join()
    assert list(spool.glob("*.safetensors"))  # came after all, when nobody waited
    [(_, states)] = results(extractor(server, spool=spool), [stream(2)])
    assert_right(states, stream(2))
    assert list(spool.iterdir()) == []  # swept by the next run


def test_a_file_that_comes_too_late_is_deleted_by_the_same_run(server, spool):
    server.behave, server.held_s = lambda number, ids: "held" if number == 0 else None, 0.5
    made = extractor(server, spool=spool, SAMPLE_TIMEOUT_S=0.2, extract_concurrency=1)
    server.delay_s = 0.1
    found = fetch(made, [stream(n) for n in range(8)])
    assert all(isinstance(result, States) for result in found.values())
    assert list(spool.iterdir()) == []


def test_a_lock_that_never_appears(server, spool):
    server.behave = lambda number, ids: "no lock"
    made = extractor(server, spool=spool, SAMPLE_TIMEOUT_S=0.2, RETRIES=0)
    [(_, problem)] = results(made, [stream(0)])
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
    made = extractor(server, spool=spool, RETRIES=1, MAX_CONSECUTIVE_FAILURES=5)
    seen = []
    with pytest.raises(SafetyStop, match=r"5 samples failed in a row.*APIConnectionError.*rerun to resume"):
        for s, result in results(made, [stream(n) for n in range(40)]):
            seen.append((s, result))
            server.stop()
    assert sum(isinstance(result, States) for _, result in seen) >= 1 and len(seen) < 20
    assert list(spool.iterdir()) == []


def test_a_server_that_comes_back_loses_nothing(server, spool):
    made = extractor(server, spool=spool, RETRIES=60)
    found = {}
    for s, result in results(made, [stream(n) for n in range(20)]):
        found[s.id] = result
        if len(found) == 5:
            server.stop()
            time.sleep(0.2)
            server.start()
    assert len(found) == 20 and all(isinstance(result, States) for result in found.values())


def test_one_of_two_servers_dies(server, spool):
    with ExtractionServer(spool, states_of) as other:
        found = {}
        for s, result in results(extractor(server, other, spool=spool), [stream(n) for n in range(40)]):
            found[s.id] = result
            if len(found) == 6:
                other.stop()
        assert len(found) == 40 and all(isinstance(result, States) for result in found.values())
        assert len(server.asked) > 20 and len(other.asked) > 2
    assert list(spool.iterdir()) == []
