"""Servers that fail, runs that are killed: a rerun does only what is missing. Cases 13 and 14 of tests/CASES.md."""

import email.utils
import os
import random
import signal
import subprocess
import threading
import time

import pytest

from tests.support.fault_server import FaultServer, Reply
from tests.support.generation import GenerationRun, asked, check_sound
from tests.support.stages import ROOT, only_error

HTML = Reply(body=b"<html>Bad gateway</html>", headers={"content-type": "text/html"})
ERROR_BODY = Reply(body={"error": {"message": "engine is dead", "code": 500}})


@pytest.fixture(autouse=True)
def quick_pauses(monkeypatch):
    """Pauses between tries of milliseconds; what a server asks for is waited for in full."""
    monkeypatch.setattr("common.servers.retries.LONGEST_PAUSE_S", 0.01)
    monkeypatch.setattr("common.generation.openai_engine.POLL_S", 0.05)


def rerun_does_only_the_rest(place: GenerationRun, tiny, n: int) -> None:
    """With a sound server the same command asks what is missing, once each, and all is there."""
    place.server.behave = lambda number, body: None
    there, before = len(place.records), len(place.server.bodies)
    code, _, err = place.run()
    assert code == 0, err
    assert len(place.server.bodies) - before == n - there
    assert len(place.records) == n and place.manifest["complete"] and place.counts["done"] == n
    assert place.counts["new"] == n - there
    check_sound(place.records, tiny)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (Reply(503, {"error": "overloaded"}), "HTTP 503"),
        (Reply(429, {"error": "slow down"}, {"retry-after": "0.01"}), "HTTP 429"),
        (Reply(429, {"error": "slow down"}, {"retry-after": "soon"}), "HTTP 429"),
        (Reply(body=b'{"choices": [', cut=5), "closed connection"),
        (HTML, "<html>"),
        (ERROR_BODY, "engine is dead"),
        (Reply(body=b""), "empty body"),
        (Reply(body={"choices": []}), "no chat completion"),
        (Reply(body={"choices": [{"message": {"content": "x"}, "finish_reason": "abort"}]}), "abort"),
        (Reply(silent=True), "no answer within 1 s"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_one_in_ten_never_works(place, tiny, fault, said):
    """Case 13: the same tenth fails at each try; the others are kept."""
    place.ask(30)
    place.server.behave = lambda number, body: fault if asked(body).endswith("0") else None
    deadline_s = 1 if fault.silent else 60
    started = time.monotonic()
    code, _, err = place.run(f"--request-timeout-s={deadline_s}", "--concurrency=8", RETRIES=2)
    assert code == 1 and "3 of 30 samples failed" in only_error(err)
    assert time.monotonic() - started < 20
    asked_for = [asked(body) for body in place.server.bodies]
    assert all(asked_for.count(f"question {i}") == (3 if i % 10 == 0 else 1) for i in range(30))
    assert len(place.records) == 27 and not place.manifest["complete"]
    assert [f["kind"] for f in place.failures] == ["failed"] * 3 and said in place.failures[0]["reason"]
    rerun_does_only_the_rest(place, tiny, 30)
    assert place.failures == []


def test_failures_within_the_allowed_share(place):
    place.server.behave = lambda number, body: Reply(400, {"error": "no"}) if asked(body) == "question 3" else None
    assert place.ask(40).run()[0] == 0
    assert place.manifest["complete"] and place.counts["failed"] == 1 and len(place.records) == 39


def test_bad_request_is_not_retried(place):
    """Case 14."""
    message = "This model's maximum context length is 2048 tokens"
    place.server.behave = lambda number, body: Reply(400, {"error": {"message": message}})
    assert place.ask(3).run(RETRIES=4)[0] == 1
    assert len(place.server.bodies) == 3 and message in place.failures[0]["reason"]


def test_all_requests_fail(place, tiny):
    """Case 13: the breaker stops the run, with a bounded number of requests."""
    place.server.behave = lambda number, body: Reply(503)
    code, _, err = place.ask(100).run("--concurrency=4", RETRIES=2, MAX_CONSECUTIVE_FAILURES=10)
    assert code == 3 and "10 requests failed in a row" in only_error(err) and "HTTP 503" in err
    assert len(place.server.bodies) <= 14 * 3 and place.records == []
    rerun_does_only_the_rest(place, tiny, 100)


def test_retry_after_is_honoured(place):
    """Seconds, and a date."""

    def behave(number, body):
        date = email.utils.formatdate(time.time() + 2, usegmt=True)  # whole seconds: one to two from now
        return {0: Reply(429, headers={"retry-after": "0.8"}), 1: Reply(503, headers={"retry-after": date})}.get(number)

    place.server.behave = behave
    assert place.ask(1).run(RETRIES=2)[0] == 0
    first, second, third = place.server.at
    assert second - first >= 0.8 and third - second >= 0.9


def test_server_that_dies_for_good(place, tiny):
    """Case 13: finished samples stay; what never arrived counts as no try."""

    def behave(number, body):
        if number == 20:
            place.server.loop.create_task(place.server._stop())
        return None

    place.server.behave = behave
    code, _, err = place.ask(100).run("--concurrency=4", "--outage-s=0.5", RETRIES=3)
    assert code == 3 and "no server for 0.5 s" in only_error(err)
    assert 15 <= len(place.records) <= 24 and len(place.server.bodies) <= 25
    check_sound(place.records, tiny)
    place.server.start()
    rerun_does_only_the_rest(place, tiny, 100)


def test_server_that_dies_and_comes_back(place, tiny):
    def behave(number, body):
        if number == 20:
            place.server.loop.create_task(place.server._stop())
            threading.Timer(0.5, place.server.start).start()
        return None

    place.server.behave = behave
    code, _, err = place.ask(60).run("--concurrency=4", RETRIES=2)
    assert code == 0, err
    assert len(place.records) == 60 and len(place.server.bodies) <= 64 and place.counts["failed"] == 0
    check_sound(place.records, tiny)


def test_a_proxy_may_show_its_own_page_until_the_server_is_back(place, tiny):
    models = place.server.models

    def behave(number, body):
        if number == 20:
            place.server.models = b"<html>starting</html>"
            place.server.loop.create_task(place.server._stop())
            threading.Timer(0.2, place.server.start).start()
            threading.Timer(0.8, setattr, (place.server, "models", models)).start()
        return None

    place.server.behave = behave
    code, _, err = place.ask(60).run("--concurrency=4", "--outage-s=10", RETRIES=2)
    assert code == 0, err
    assert len(place.records) == 60 and place.counts["failed"] == 0
    check_sound(place.records, tiny)


def test_two_servers_share_the_load_and_one_may_die(place, tiny):
    with FaultServer(tiny, delay_s=0.01) as other:
        place.server.delay_s = 0.03
        urls = ["--base-urls", place.server.url, other.url]
        assert place.ask(80).run(*urls, "--concurrency=8")[0] == 0
        slow, fast = len(place.server.bodies), len(other.bodies)
        assert slow + fast == 80 and fast > slow > 10  # by load: the faster one takes more
        other.behave = lambda number, body: other.loop.create_task(other._stop()) and None
        assert place.ask(160).run(*urls, "--fresh", "--concurrency=8", RETRIES=1)[0] == 0
        check_sound(place.records, tiny)
        assert len(place.records) == 160 and len(place.server.bodies) - slow > 150


def test_concurrency_is_what_was_asked_for(place):
    place.server.delay_s = 0.1
    assert place.ask(60).run("--concurrency=20")[0] == 0
    assert place.server.most_in_flight == 20


def test_no_server_at_start(place):
    place.server.stop()
    code, _, err = place.ask(1).run()
    assert code == 2 and "no server answers at" in only_error(err)
    code, _, err = place.run("--base-urls=localhost:1")
    assert code == 2 and "must start with http" in only_error(err)


def test_finished_run_needs_no_server(place):
    place.ask(3).run()
    place.server.stop()
    code, out, _ = place.run()
    assert code == 0 and "0 new samples, 3 in all" in out and place.manifest["complete"]
    code, _, err = place.run("--n=4", "--repeats=1")
    assert code == 0 and err == ""


def test_raising_n_without_a_server_breaks_nothing(place):
    place.ask(3).run("--n=2")
    place.server.stop()
    code, _, err = place.run()
    assert code == 2 and "no server answers" in only_error(err)
    assert place.manifest["complete"] and len(place.records) == 2


def test_n_counts_what_is_there(place):
    """`--n` caps what is asked, resumed samples included; raising it goes on."""
    place.ask(["a", {"messages": []}, "b", "c", "a", "d"])
    for n, made in ((2, 2), (2, 0), (3, 1)):
        assert place.run(f"--n={n}")[0] == 0
        assert (place.counts["new"], place.counts["done"], len(place.records)) == (made, n, n)
    assert place.run()[0] == 0
    assert len(place.records) == 4 and place.counts["skipped"] == {"no user turn": 1, "duplicate": 1}
    assert [failure["reason"] for failure in place.failures] == ["no user turn"]


def test_resume_under_other_settings_is_refused(place):
    assert place.ask(2).run()[0] == 0
    for flags in (["--temperature=0.1"], ["--temperature=0.1", "--dry-run"]):
        code, _, err = place.run(*flags)
        assert code == 2 and "generate.temperature: 1.0 there, 0.1 now" in only_error(err)
    place.ask(3)
    code, _, err = place.run()
    assert code == 2 and "questions.sha256" in only_error(err)
    assert place.run("--fresh")[0] == 0 and len(place.records) == 3


def test_dry_run_touches_nothing(place):
    code, out, _ = place.ask(5).run("--dry-run", "--max-tokens=100")
    assert code == 0 and "5 wanted, 0 stored already, 5 to generate" in out and "at most 500" in out
    assert not (place.folder / "run").exists() and place.server.bodies == []
    place.run("--n=2", "--max-tokens=100")
    before = sorted((path, path.stat().st_mtime_ns) for path in place.stage.parent.rglob("*"))
    assert "5 wanted, 2 stored already, 3 to generate" in place.run("--dry-run", "--max-tokens=100")[1]
    assert sorted((path, path.stat().st_mtime_ns) for path in place.stage.parent.rglob("*")) == before


def test_killed_at_ten_moments(place, tiny):
    """kill -9, resume, ten times: the ids of an unbroken run, none twice, no torn line. A fork saves the start-up."""
    place.ask(600)
    place.server.delay_s = 0.02
    rng = random.Random(5)
    for moment in range(10):
        there = len(place.server.bodies)
        child = os.fork()
        if child == 0:
            place.run("--concurrency=4")
            os._exit(0)
        while moment and len(place.server.bodies) == there:  # the first dies before it asks anything
            time.sleep(0.002)
        time.sleep(rng.uniform(0.0, 0.2))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert 0 < len(place.records) < 600
    assert place.run("--concurrency=64")[0] == 0
    broken = {record["id"]: record["output_ids"] for record in place.records}
    assert len(place.records) == len(broken) == 600 and place.manifest["complete"]
    place.folder = place.folder / "unbroken"
    place.folder.mkdir()
    assert place.ask(600).run("--concurrency=64")[0] == 0
    assert {record["id"]: record["output_ids"] for record in place.records} == broken


def test_ctrl_c_keeps_what_is_finished(place, tiny):
    place.server.delay_s = 0.02
    run = subprocess.Popen(place.ask(2000).command("--concurrency=4"), cwd=ROOT, stderr=subprocess.PIPE, text=True)
    while len(place.server.bodies) < 30:
        time.sleep(0.01)
    os.kill(run.pid, signal.SIGINT)
    _, err = run.communicate(timeout=20)
    assert run.returncode == 130 and "interrupted" in err and "Traceback" not in err
    there = len(place.records)
    assert there >= 25 and place.counts["done"] == there and not place.manifest["complete"]
    check_sound(place.records, tiny)
    files = place.manifest["files"]
    assert files["part-00000.jsonl"]["bytes"] == (place.stage / "part-00000.jsonl").stat().st_size
