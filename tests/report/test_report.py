"""The report: well-formed, self-contained, hostile text escaped, the right headline, equal pages of equal figures."""

import json
import math
import re
import time
from html.parser import HTMLParser

import pytest

from common.report.plots import Line, line_chart
from common.report.report import fact, length_at, margin, smooth, thin, update_report, visible, write_report

HOSTILE = '<script>alert("x")</script><img src=//evil.example/x onerror=alert(1)>'
VOID = {"meta", "br"}
SERVING = {
    "server": f"vLLM {HOSTILE}",
    "model": "m",
    "temperature": 0,
    "concurrency": 8,
    "with_draft": {"questions": 64, "tokens": 5000, "seconds": 8.3, "tokens_s": 606.1, "k": 2, "drafts": 1000}
    | {"accepted_per_position": [700, 350], "length": 2.05, "length_cut_at": {"1": 1.7, "2": 2.05}},
    "without_draft": {"tokens": 4990, "seconds": 13.9, "tokens_s": 362.2},
    "identical": {"of": 64, "equal": 61},
    "speed_up": 1.67,
}


class Tags(HTMLParser):
    """Checks that tags balance; collects tags, attributes and text."""

    def __init__(self):
        super().__init__()
        self.open, self.tags, self.attributes, self.text = [], set(), [], []

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        self.attributes += attributes
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.add(tag)
        self.attributes += attributes

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, f"</{tag}> closes nothing"

    def handle_data(self, data):
        self.text.append(data)


def parsed(page: str) -> Tags:
    tags = Tags()
    tags.feed(page)
    tags.close()
    assert tags.open == []
    return tags


def evaluation(length: float = 2.25, **extra) -> dict:
    """An eval line whose walk at k = 3 has this length."""
    third = (length - 1) / 3
    walk = {str(k): {"length": 1 + k * third, "drafts": 1000, "accepted": [int(1000 * third)] * k} for k in range(1, 8)}
    per_position = {k: entry["length"] + 0.02 for k, entry in walk.items()}
    by_place = [{"from": 0, "to": 32, "length": 1.6, "starts": 9}, {"from": 32, "to": None, "length": 1.7, "starts": 8}]
    facts = {"kind": "eval", "loss": 2.9, "step_accuracy": [0.5] * 7, "walk": walk, "per_position": per_position}
    facts["speed_up"] = {k: entry["length"] / (1 + 0.05 * int(k)) for k, entry in walk.items()}
    facts |= {"by_part": {"reasoning": {"3": 1.5}, "content": {"3": None}}, "by_place": by_place}
    return facts | {"outside_vocab": 0.01, "seconds": 3.0} | extra


def training(step: int, **extra) -> dict:
    facts = {"kind": "train", "step": step, "epoch": step / 40, "tokens": step * 2000, "loss": 9 / step}
    facts |= {"step_loss": [3.0] * 7, "step_accuracy": [0.4] * 7, "learning_rate": 1e-3, "grad_norm": 0.8}
    return facts | {"tokens_s": 1200.0, "seconds": step * 1.6} | extra


FULL_FACTS = {
    "title": f"Demo {HOSTILE}",
    "target": HOSTILE,
    "draft": {"hidden_size": 576, HOSTILE: HOSTILE, "nested": {"a": [1, 2.5, None], "b": True}},
    "data": {"samples": 200},
    "train": {"learning_rate": 1e-3},
    "draft_cost": 0.05,
    "environment": {"torch": "2.8", "empty": {}},
    "lengths": [20, 500, 500, 1311],
    "baselines": {"untrained": evaluation(1.0), "bigram": evaluation(1.3)},
    "chosen_step": 80,
}
FULL_METRICS = [training(s) for s in range(1, 121)] + [evaluation(2 + s / 400, step=s) for s in (40, 80, 120)]
FULL_SAMPLES = [
    {
        "id": HOSTILE,
        "tokens": [
            {"text": "<|im_user|>", "id": 163587, "mask": 0, "part": "control", "accepted": None},
            {"text": HOSTILE, "id": 1, "mask": 0, "part": "prompt", "accepted": None},
            {"text": "a\n\nb\r\x00\ud800", "id": 2, "mask": 1, "part": "reasoning", "accepted": 2},
            {"text": "", "id": 3, "mask": 1, "part": '"><b>', "accepted": 0},
        ],
    }
]
OTHERS = {f"run {HOSTILE}": [evaluation(1.9, step=40), evaluation(2.4, step=90)], "empty run": []}


EMPTY_FACTS = {"title": "Empty", "target": "t", "draft": {}, "data": {}, "train": {}, "draft_cost": 0.05}
EMPTY_FACTS |= {"environment": {}, "lengths": [], "baselines": {}, "chosen_step": 0}
FULL = (FULL_FACTS, FULL_METRICS, FULL_SAMPLES, OTHERS)
MINIMAL = (EMPTY_FACTS | {"chosen_step": 1}, [training(1), evaluation(step=1)], [{"id": "a", "tokens": []}], {})
EMPTY = (EMPTY_FACTS, [], [], {})


@pytest.fixture
def render(tmp_path):
    def render(*args) -> str:
        write_report(tmp_path, *args)
        names = sorted(path.name for path in tmp_path.iterdir() if not path.name.startswith("."))
        assert names == ["report.html", "report.json"]
        return (tmp_path / "report.html").read_text("utf-8")

    return render


def headline(page: str) -> str:
    return re.search(r'id="headline">([^<]*)<', page)[1]


@pytest.mark.parametrize("args", [FULL, MINIMAL, EMPTY], ids=["full", "minimal", "empty"])
def test_is_well_formed_and_self_contained(render, tmp_path, args):
    render(*args)
    if args is FULL:
        assert update_report(tmp_path, serving=SERVING)
    page = (tmp_path / "report.html").read_text("utf-8")
    tags = parsed(page)
    assert not tags.tags & {"script", "img", "link", "iframe", "object", "embed", "a", "image", "base"}
    for name, value in tags.attributes:
        assert name not in ("src", "href", "srcset", "action") and not name.startswith("on")
        assert name != "xlink:href" or value.startswith("#"), "a tick mark that its own chart defines"
        assert name in ("title", "aria-label") or "//" not in (value or "")
    styles = re.findall(r"<style.*?>(.*?)</style>", page, re.S)
    assert len(styles) == 1 and not re.search(r"url\(|@import|//", styles[0])
    assert "default-src 'none'; style-src 'unsafe-inline'" in page
    # Only the hostile text of the full report says any of these, and there as text.
    assert args is FULL or not re.search(r"https?:|//|src=", page)
    assert not re.search(r"\b(nan|None|inf)\b", " ".join(tags.text)), "a missing value is shown as a dash"
    colours = set(re.findall(r"var\(--([a-z0-9-]+)\)", page))
    assert colours <= set(re.findall(r"--([a-z0-9-]+):", styles[0])), "each colour is one of the style sheet"
    assert "#0102" not in page


def test_hostile_text_is_text(render):
    page = render(*FULL)
    assert "<script" not in page and "<img" not in page
    assert page.count("&lt;script&gt;alert(&#34;x&#34;)&lt;/script&gt;") >= 6
    assert "a<u>↵</u><br><u>↵</u><br>b␍␀?" in page


def test_headline_is_the_chosen_evaluation(render):
    assert headline(render(FULL_FACTS, FULL_METRICS, [], {})) == "2.20"
    assert headline(render(FULL_FACTS | {"chosen_step": 40}, FULL_METRICS, [], {})) == "2.10"
    assert headline(render(FULL_FACTS | {"chosen_step": 77}, FULL_METRICS, [], {})) == "–", "never another checkpoint's"
    resumed = [*FULL_METRICS, evaluation(2.5, step=80)]
    assert headline(render(FULL_FACTS, resumed, [], {})) == "2.50", "a repeated step: the later line counts"


def test_nothing_held_out_is_dashes(render):
    page = render(EMPTY_FACTS | {"chosen_step": 3}, [training(s) for s in (1, 2, 3)], [], {})
    assert headline(page) == "–" and "Not measured: the chosen step has no evaluation" in page
    row = re.search(r'<tr class="main"><td>3</td>(.*?)</tr>', page)[1]
    assert re.findall(r"<td>([^<]*)</td>", row) == ["–"] * 6, "per position is no 1.000 where nothing was measured"
    assert page.count("no data yet") == 7  # all charts but loss, learning rate and gradient norm


def test_sections_stand_in_order(render, tmp_path):
    render(*FULL)
    update_report(tmp_path, serving=SERVING)
    titles = re.findall(r"<h2>([^<]*)</h2>", (tmp_path / "report.html").read_text())
    wanted = ["Acceptance length by number of draft tokens", "Charts", "Beside other runs", "On a running server"]
    assert titles == [*wanted, "Samples", "Facts"]
    charts = re.findall(r'<h3>([^<]*)</h3><p class="dim">', (tmp_path / "report.html").read_text())
    wanted = ["Acceptance length over training", "Loss", "Accuracy of each draft token", "Drafts accepted up to"]
    wanted += ["Thinking and answer", "Early and late", "Estimated speed-up", "Length of", "Learning rate", "Gradient"]
    assert all(title.startswith(start) for title, start in zip(charts, wanted, strict=True)), charts


def test_shows_other_runs_at_their_best(render):
    others = {"warm start": [evaluation(2.4, step=90), evaluation(2.1, step=95)]}
    page = render(FULL_FACTS, FULL_METRICS, [], others)
    row = re.search(r"<tr><td>warm start</td>(.*?)</tr>", page)[1]
    assert re.findall(r"<td>([^<]*)</td>", row)[:4] == ["90", "1.47", "1.93", "2.40"]
    assert "warm start, k = 3" in page


def test_shorter_and_longer_lists(render):
    for steps in (1, 2, 9):
        walk = {str(k): {"length": 1.5, "drafts": 10, "accepted": [1] * k} for k in range(1, steps + 1)}
        figures = {"walk": walk, "step_accuracy": [0.1] * steps, "by_part": {"content": {str(min(steps, 3)): 1.5}}}
        figures |= {"per_position": dict.fromkeys(walk, 1.4), "speed_up": dict.fromkeys(walk, 1.2)}
        page = render(EMPTY_FACTS | {"chosen_step": 1}, [evaluation(step=1) | figures], [], {})
        assert headline(page) == "1.50" and f"k = {min(steps, 3)}" in page
        parsed(page)


def test_margin_is_that_of_the_sample():
    # 4 drafts of k = 2 that accepted 0, 1, 2, 2 tokens: mean 5/4, variance 11/16.
    counted = {"walk": {"2": {"length": 2.25, "drafts": 4, "accepted": [3, 2]}}}
    assert length_at(counted, "2") == 2.25
    assert margin(counted, "2") == pytest.approx(1.96 * math.sqrt(11 / 16 / 4))


def test_equal_figures_give_an_equal_page(render, tmp_path):
    first = render(*FULL)
    time.sleep(1.1)  # a date in the page would have seconds
    assert render(*FULL) == first


def test_the_page_is_rendered_from_the_file_alone_and_serving_stays(render, tmp_path):
    assert update_report(tmp_path, serving=SERVING) is False, "no run's figures yet: no page"
    assert json.loads((tmp_path / "report.json").read_text())["serving"] == SERVING
    assert not (tmp_path / "report.html").exists()
    page = render(*MINIMAL)
    assert "On a running server" in page and "<td>with the draft</td><td>606.1</td>" in page
    assert update_report(tmp_path, serving=SERVING | {"model": "another"}) is True
    again = (tmp_path / "report.html").read_text("utf-8")
    assert again == page.replace(", m: 64 questions", ", another: 64 questions")


def test_a_long_run_is_a_small_file_without_losing_spikes(render, tmp_path):
    points = [(i, 9.0 if i == 4321 else 1.0) for i in range(10_000)]
    assert len(thin(points)) <= 2000 and (4321, 9.0) in thin(points)
    assert {y for _, y in smooth([(i, 1.0) for i in range(500)])} == {1.0}
    render(EMPTY_FACTS, [training(step) for step in range(1, 20_000)], [], {})
    assert all((tmp_path / name).stat().st_size < 400_000 for name in ("report.json", "report.html"))


def test_a_chart_of_nothing_is_empty_and_of_one_point_shows_it():
    assert line_chart([], "y") == line_chart([Line("a", [], "draft")], "y") == ""
    one = line_chart([Line("a", [(5, 2.0)], "draft")], "y")
    assert "var(--draft)" in one and 'aria-label="y by training step"' in one


def test_values_read_well():
    assert [fact(v) for v in (None, True, 12345, 2.5e-5, [1, 2], {"a": [1]}, "")] == (
        ["–", "yes", "12,345", "2.5e-05", "1, 2", "a 1", "–"]
    )
    assert visible("<\x07>") == "<␇>" and visible("") == "▫"
