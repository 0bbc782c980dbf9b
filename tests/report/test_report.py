"""The report: well-formed, self-contained, hostile text escaped, the right headline, and no value missing breaks it."""

import math
import re
from html.parser import HTMLParser

import pytest

from common.report.page import text_of
from common.report.plots import (
    Column,
    Series,
    column_chart,
    histogram,
    line_chart,
    plain,
    smooth,
    thin,
    tick_texts,
    ticks,
)
from common.report.report import length_at, margin, write_report

NAN = float("nan")
HOSTILE = '<script>alert("x")</script><img src=//evil.example/x onerror=alert(1)>'
VOID = {"meta", "br"}


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


@pytest.fixture
def render(tmp_path):
    def render(*args) -> str:
        write_report(tmp_path / "report.html", *args)
        assert [path.name for path in tmp_path.iterdir()] == ["report.html"]
        return (tmp_path / "report.html").read_text("utf-8")

    return render


def headline(page: str) -> str:
    return re.search(r'id="headline">([^<]*)<', page)[1]


MINIMAL = ({"title": "Minimal"}, [training(1), evaluation(step=1)], [{"id": "a", "tokens": []}])


@pytest.mark.parametrize("args", [(FULL_FACTS, FULL_METRICS, FULL_SAMPLES, OTHERS), MINIMAL, ({}, [], [])])
def test_is_well_formed_and_self_contained(render, args):
    page = render(*args)
    tags = parsed(page)
    assert not tags.tags & {"script", "img", "link", "iframe", "object", "embed", "a", "image", "use", "base"}
    for name, value in tags.attributes:
        assert name not in ("src", "href", "xlink:href", "srcset", "action") and not name.startswith("on")
        assert name in ("title", "aria-label") or "//" not in (value or "")
    style = re.search(r"<style>(.*)</style>", page, re.S)[1]
    assert "url(" not in style and "@import" not in style and "//" not in style
    # Only the hostile text of the full report says any of these, and there as text.
    assert args[0] is FULL_FACTS or not re.search(r"https?:|//|src=", page)
    assert not re.search(r"\b(nan|None|inf)\b", " ".join(tags.text)), "a missing value is shown as a dash"


def test_hostile_text_is_text(render):
    page = render(FULL_FACTS, FULL_METRICS, FULL_SAMPLES, OTHERS)
    assert "<script" not in page and "<img" not in page
    assert page.count("&lt;script&gt;alert(&quot;x&quot;)&lt;/script&gt;") >= 6
    assert "a<u>↵</u><br><u>↵</u><br>b␍␀?" in page


def test_headline_is_the_chosen_evaluation(render):
    assert headline(render(FULL_FACTS, FULL_METRICS, [])) == "2.20"
    assert headline(render(FULL_FACTS | {"chosen_step": 40}, FULL_METRICS, [])) == "2.10"
    assert headline(render({}, FULL_METRICS, [])) == "2.30", "without a choice, the last evaluation"
    assert headline(render({"chosen_step": 77}, FULL_METRICS, [])) == "–", "never another checkpoint's number"
    resumed = [*FULL_METRICS, evaluation(2.5, step=80)]
    assert headline(render(FULL_FACTS, resumed, [])) == "2.50", "a repeated step: the later line counts"


def test_sections_stand_in_order(render):
    page = render(FULL_FACTS, FULL_METRICS, FULL_SAMPLES, OTHERS)
    titles = re.findall(r"<h2>([^<]*)</h2>", page)
    wanted = ["length by k", "draft position", "Loss", "over training", "each draft step", "Learning rate", "Length of"]
    wanted += ["part and place", "Samples", "Facts"]
    assert len(titles) == len(wanted) and all(w in t for w, t in zip(wanted, titles, strict=True)), titles


def test_shows_other_runs_at_their_best(render):
    page = render(FULL_FACTS, FULL_METRICS, [], {"warm start": [evaluation(2.4, step=90), evaluation(2.1, step=95)]})
    row = re.search(r"<tr><td>warm start</td>(.*?)</tr>", page)[1]
    assert re.findall(r"<td>([^<]*)</td>", row)[:4] == ["90", "1.47", "1.93", "2.40"]
    assert "warm start, k = 3" in page


@pytest.mark.parametrize("bad", [None, NAN, math.inf])
def test_missing_and_nan_values_do_not_crash(render, bad):
    walks = {"3": {"length": bad, "drafts": bad, "accepted": [bad, 3]}, "7": None}
    broken = evaluation(step=40, loss=bad, step_accuracy=[bad, 0.5], walk=walks, per_position={"3": bad})
    broken |= {"outside_vocab": bad, "by_place": [{"from": 0, "to": bad, "length": bad, "starts": bad}]}
    bare = {"kind": "eval", "step": 60, "walk": None, "step_accuracy": None, "by_part": None, "per_position": None}
    train = training(1, loss=bad, learning_rate=bad, grad_norm=bad, tokens_s=bad, seconds=bad, epoch=bad, tokens=bad)
    for chosen in (40, 60):
        facts = {"chosen_step": chosen, "baselines": {"untrained": None, "bigram": broken}, "lengths": [bad, 5]}
        page = render(facts, [train, broken, bare], [{"id": None, "tokens": [{"text": None, "accepted": bad}]}])
        assert headline(page) == "–"
        assert not re.search(r"\b(nan|inf)\b", page)
        parsed(page)


def test_shorter_and_longer_lists(render):
    for steps in (1, 2, 9):
        walk = {str(k): {"length": 1.5, "drafts": 10, "accepted": [1] * k} for k in range(1, steps + 1)}
        page = render({}, [evaluation(step=1, walk=walk, step_accuracy=[0.1] * steps)], [])
        assert headline(page) == "1.50" and f"k = {min(steps, 3)}" in page
        parsed(page)


def test_margin_is_that_of_the_sample():
    # 4 drafts of k = 2 that accepted 0, 1, 2, 2 tokens: mean 5/4, variance 11/16.
    counted = {"walk": {"2": {"length": 2.25, "drafts": 4, "accepted": [3, 2]}}}
    assert length_at(counted, "2") == 2.25
    assert margin(counted, "2") == pytest.approx(1.96 * math.sqrt(11 / 16 / 4))


# ---- charts ----


@pytest.mark.parametrize("low,high", [(0, 1), (1, 1.0004), (3, 3), (-2.5, 1e6), (0, 3e-5), (7, 8)])
def test_ticks_enclose_the_data_and_read_differently(low, high):
    values = ticks(low, high, 5)
    assert values[0] <= low and values[-1] >= high and 2 <= len(values) <= 8
    for shares in (False, True):
        assert len(set(tick_texts(values, shares))) == len(values)


def test_whole_ticks_are_whole():
    assert ticks(0, 1, 8, whole=True) == [0, 1]
    assert ticks(49, 51, 8, whole=True) == [49, 50, 51]


def test_thin_keeps_spikes_and_smooth_keeps_the_level():
    points = [(i, 9.0 if i == 4321 else 1.0) for i in range(10_000)]
    assert len(thin(points)) <= 600 and (4321, 9.0) in thin(points)
    assert {y for _, y in smooth([(i, 1.0) for i in range(500)])} == {1.0}
    assert thin([(2, NAN), (1, None), (0, 5)]) == smooth([(2, NAN), (0, 5)]) == [(0, 5)]


def test_charts_of_nothing_say_so_and_of_one_point_show_it():
    assert all("no data yet" in chart for chart in (line_chart([], "x", "y"), column_chart([], "x", "y")))
    assert "no data yet" in histogram([], "x", "y") and "no data yet" in line_chart(
        [Series("a", [(1, NAN)], "c0")], "x", "y"
    )
    one = line_chart([Series("a", [(5, 2.0)], "c0")], "step", "y")
    assert one.count("<circle") == 1 and "step 5\na: 2" in one
    assert "two: 2.00" not in one and "hover text" in column_chart([Column("l", [("c0", 2.0, "hover text")])], "x", "y")
    assert histogram([0, 0, 7], "x", "y").count("<title>") == 2


def test_numbers_read_well():
    assert [plain(v) for v in (None, NAN, 0, 12345, 0.001, 2.5e-5, 3.14159, 1234.5)] == (
        ["–", "–", "0", "12,345", "0.001", "2.5e-5", "3.14", "1,234"]
    )
    assert tick_texts([0, 0.002, 0.004], shares=True) == ["0.0%", "0.2%", "0.4%"]
    assert text_of("<\x07>") == "&lt;␇&gt;"
