"""04 --serve-eval: counters read off a metrics page, questions asked, what is written; a server of the tests' own."""

import json
import shutil

import pytest

from common.pipeline.errors import UserError
from common.pipeline.manifest import Manifest
from common.report.report import fixed, write_report
from common.servers.draft_counters import DraftCounts, draft_counts
from common.servers.endpoints import Endpoint
from common.servers.measure_draft import ask, read_counts
from tests.support.draft_server import DraftServer, K
from tests.support.http_server import Pages
from tests.support.stages import DEMO, only_error, run_here

PAGE = r"""
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="a, \"b\" } c\\n"} 2390.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="m"} 1.76e+09
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 7170
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 1.282e+03 1700000000000
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 894.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="2"} 82.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 306.0
up NaN
"""


# ---- the metrics page ----


def test_a_page_with_labels_and_timestamps():
    assert draft_counts(PAGE, 'a, "b" } c\\n') == DraftCounts(drafts=2390)
    assert draft_counts(PAGE, "m") is None  # its lines count no drafts
    counts = draft_counts(PAGE)
    assert counts == DraftCounts(2390, 7170, 1282, (894, 306, 82)) and counts.k == 3
    assert [round(length, 3) for length in counts.lengths()] == [1.374, 1.502, 1.536]
    assert draft_counts("\n".join(PAGE.split("\n")).replace("_total", "")) == counts  # older clients


def test_engines_are_added_up_and_models_kept_apart():
    lines = [
        f'vllm:spec_decode_num_{name}{{engine="{engine}",model_name="{model}"{more}}} {value}'
        for engine, factor in (("0", 1), ("1", 10))
        for model, scale in (("m", 1), ("other", 100))
        for name, more, value in (
            ("drafts_total", "", 2 * factor * scale),
            ("draft_tokens_total", "", 4 * factor * scale),
            ("accepted_tokens_total", "", 1 * factor * scale),
            ("accepted_tokens_per_pos_total", ',position="0"', 1 * factor * scale),
            ("accepted_tokens_per_pos_total", ',position="1"', 0),
        )
    ]
    assert draft_counts("\n".join(lines), "m") == DraftCounts(22, 44, 11, (11, 0))
    assert draft_counts("\n".join(lines)).drafts == 2222


@pytest.mark.parametrize(
    "page",
    [
        b"<html>login</html>",
        b"not a line {of the format",
        b'vllm:spec_decode_num_drafts_total{engine="0"} many',
        b'vllm:spec_decode_num_drafts_total{engine="0"} NaN',
        b'vllm:spec_decode_num_drafts_total{engine="0"} +Inf',
        b'vllm:spec_decode_num_drafts_total{engine="0',
        b'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0"} 1.0',
    ],
)
def test_a_broken_page_is_one_line(page):
    with Pages({"/metrics": page}) as server, pytest.raises(UserError) as error:
        read_counts(Endpoint(server.url))
    assert str(error.value) == f"{server.root}/metrics is no page of counters but {page.decode()!r}"


@pytest.mark.parametrize(
    "page",
    [
        b"<html>",
        b"[]",
        {"choices": []},
        {"choices": [{"message": "text"}], "usage": {"completion_tokens": 1}},
        {"choices": [{"message": {}}], "usage": None},
        {"choices": [{"message": {}}], "usage": {"completion_tokens": "many"}},
    ],
)
def test_a_reply_that_is_none_is_a_failed_question(page):
    with Pages({"/v1/chat/completions": page}) as server:
        reply = ask(Endpoint(server.url), {})
    assert reply.error.startswith("not a chat completion: ") and reply.tokens == 0


def test_no_draft_counters_and_a_restart():
    assert draft_counts("up 1\n") is None
    with pytest.raises(UserError, match="restarted"):
        DraftCounts(1, 3, 0, (0,)).since(DraftCounts(2, 6, 1, (1,)))
    with pytest.raises(UserError, match="restarted"):
        DraftCounts(5, 5, 2, (2,)).since(DraftCounts(2, 6, 1, (1, 0, 1)))  # with another number of draft tokens
    assert DraftCounts(5, 5, 2, (2,)).since(DraftCounts(0, 0, 0, ())) == DraftCounts(5, 5, 2, (2,))


# ---- the whole ----


@pytest.fixture(autouse=True)
def counters_stand_still(monkeypatch):
    monkeypatch.setattr("common.servers.measure_draft.SETTLE_S", 0.001)


@pytest.fixture
def questions(tmp_path):
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"question {i}"}) + "\n" for i in range(12)))
    return path


def serve_eval(run, server, *flags):
    return run_here("04", "--config", DEMO, "--run-dir", run, "--serve-eval", server.root, *flags)


def result(run) -> dict:
    return json.loads((run / "04_draft/report.json").read_text())["serving"]


def test_with_and_without_the_draft(tmp_path, questions):
    with DraftServer() as server, DraftServer(drafts=False) as plain:
        flags = ("--questions", questions, "--eval-concurrency", 3, "--eval-max-tokens", 25)
        code, out, err = serve_eval(tmp_path, server, "--without-draft", f"{plain.url}/", *flags)
        assert code == 0, err
        facts, own = result(tmp_path), result(tmp_path)["with_draft"]
        asked = server.bodies[-12:]
    assert {body["messages"][0]["content"] for body in asked} == {f"question {i}" for i in range(12)}
    assert all(body["temperature"] == 0 and body["max_tokens"] == 25 and body["model"] == "target" for body in asked)
    assert asked[0]["chat_template_kwargs"] == {"thinking": True}
    assert own["k"] == K and own["questions"] == 12 and own["failed"] == 0
    assert own["proposed"] == own["drafts"] * K and own["accepted"] == sum(own["accepted_per_position"])
    assert own["length"] == pytest.approx(1 + own["accepted"] / own["drafts"], abs=1e-5)
    assert own["length_cut_at"]["3"] == own["length"] > own["length_cut_at"]["1"] > 1
    assert own["tokens_s"] == pytest.approx(own["tokens"] / own["seconds"], rel=0.05)
    assert facts["without_draft"]["tokens"] == own["tokens"] and facts["speed_up"] > 0
    assert facts["identical"] == {"of": 12, "equal": 12} and facts["server"] == "vLLM 0.32.0"
    assert f"{own['length']:.3f} over" in out and "12 of 12 the same with and without the draft" in out


def test_counts_are_those_of_the_questions_alone(tmp_path, questions):
    """What the server counted before, and the warm-up, is left out."""
    with DraftServer() as server, DraftServer() as fresh:
        server.count(500, 0)
        assert serve_eval(tmp_path, server, "--questions", questions, "--n", 4)[0] == 0
        found = result(tmp_path)["with_draft"]
        fresh.engines = [[0, [0] * K] for _ in range(2)]
        for body in server.bodies[-4:]:
            fresh.answer(body)
        wanted = draft_counts(fresh.metrics(), "target")
    assert (found["drafts"], found["accepted_per_position"]) == (wanted.drafts, list(wanted.accepted_per_position))
    assert found["questions"] == 4


def test_differing_replies_and_sampling(tmp_path, questions):
    with DraftServer() as server, DraftServer(drafts=False, different=True) as plain:
        flags = ("--without-draft", plain.root, "--questions", questions)
        assert serve_eval(tmp_path, server, *flags)[0] == 0
        assert result(tmp_path)["identical"] == {"of": 12, "equal": 0}
        assert serve_eval(tmp_path, server, *flags, "--eval-temperature", 0.7)[0] == 0
        assert result(tmp_path)["identical"] is None and server.bodies[-1]["top_p"]


def test_failed_questions(tmp_path, questions):
    with DraftServer(fail=("question 3", "question 4")) as server:
        code, out, err = serve_eval(tmp_path, server, "--questions", questions)
        assert code == 1 and "2 of 12 questions failed" in only_error(err) and "HTTP 500: out of luck" in out
        assert result(tmp_path)["with_draft"]["failed"] == 2
    with DraftServer(fail=tuple(f"question {i}" for i in range(12))) as server:
        shutil.rmtree(tmp_path / "04_draft")
        code, _, err = serve_eval(tmp_path, server, "--questions", questions)
        assert code == 2 and "no question was answered" in only_error(err)
        assert not (tmp_path / "04_draft").exists()


def test_wrong_servers(tmp_path, questions):
    with DraftServer(drafts=False) as plain, DraftServer() as server:
        code, _, err = serve_eval(tmp_path, plain, "--questions", questions)
        assert code == 2 and "counts no drafts: start the server with --speculative-config" in only_error(err)
        code, _, err = serve_eval(tmp_path, server, "--questions", questions, "--without-draft", server.root)
        assert code == 2 and "drafts, too" in only_error(err)
        code, _, err = serve_eval(tmp_path, server, "--questions", tmp_path / "nowhere.jsonl")
        assert code == 2 and "no such file" in only_error(err)
        code, out, _ = serve_eval(tmp_path, server, "--questions", questions, "--dry-run")
        assert code == 0 and "12 of" in out and not server.bodies
    code, _, err = serve_eval(tmp_path, server, "--questions", questions)
    assert code == 2 and f"no server answers at {server.url}" in only_error(err)
    assert [path.name for path in tmp_path.iterdir()] == ["questions.jsonl"]


def test_the_report_gets_a_section_and_keeps_it(tmp_path, questions):
    folder = tmp_path / "04_draft"
    folder.mkdir()
    facts = {"title": "t", "draft": {}, "data": {}, "train": {}, "draft_cost": 0.1, "environment": {}, "lengths": []}
    facts |= {"baselines": {}, "chosen_step": 1}
    write_report(folder, facts, [], [], {})
    manifest = Manifest("04_draft", {})
    for name in ("report.json", "report.html"):
        manifest.add_file(folder, name)
    manifest.save(folder)
    assert "On a running server" not in (folder / "report.html").read_text()
    with DraftServer() as server:
        for _ in range(2):
            code, out, _ = serve_eval(tmp_path, server, "--questions", questions)
            assert code == 0
            assert "report.html: has a section on the server" in out
            text = (folder / "report.html").read_text()
            assert text.count("On a running server") == 1
            assert fixed(result(tmp_path)["with_draft"]["length"]) in text
            assert Manifest.load(folder, "04_draft").verify(folder) == []
    write_report(folder, facts, [], [], {})  # the run's next report
    assert (folder / "report.html").read_text() == text
