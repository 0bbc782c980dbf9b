"""The progress line, by a clock of its own."""

from types import SimpleNamespace

import pytest

from common.pipeline import console
from common.pipeline.console import Progress


@pytest.fixture
def clock(monkeypatch):
    """The time that Progress reads; each test sets `now`."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(console, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def test_no_eta_before_the_average_is_warm(clock, capsys):
    """A first step of 100 s, which compiles, and then 1 s a step: a run of four minutes, never an ETA of hours."""
    with Progress("train", 140, "steps") as progress:
        for clock.now in range(100, 239):
            progress.update()
    lines = capsys.readouterr().err.splitlines()
    first, early, later = lines[:3]
    assert first == "train: 1/140 steps  100 s"
    assert early == "train: 11/140 steps  110 s"
    assert later == "train: 21/140 steps  120 s  1 steps/s  ETA 01:59"


def test_a_batch_that_ends_at_once_is_no_rate(clock, capsys):
    """Eight replies a minute, all eight within a millisecond: no ETA until a second batch ended."""
    with Progress("generate", 32, "samples") as progress:
        for batch in range(1, 4):
            for reply in range(8):
                clock.now = 60 * batch + reply / 8000
                progress.update(failed=0)
    first, second, third, _ = capsys.readouterr().err.splitlines()
    assert first == "generate: 1/32 samples  60 s  failed=0"
    assert second == "generate: 9/32 samples  120 s  0.133 samples/s  ETA 02:52  failed=0"
    assert third == "generate: 17/32 samples  180 s  0.133 samples/s  ETA 01:52  failed=0"


def test_units_of_earlier_runs_count_as_done_and_not_as_speed(clock, capsys):
    with Progress("index", 100, "shards", done=50) as progress:
        for clock.now in (3, 6, 9, 12):
            progress.update()
    line, _ = capsys.readouterr().err.splitlines()
    assert line == "index: 54/100 shards  12 s  0.333 shards/s  ETA 02:18"


def test_nothing_left_shows_no_eta_and_a_hidden_bar_nothing(clock, capsys):
    for shown in (True, False):
        with Progress("index", 4, "shards", shown=shown) as progress:
            for second in range(1, 5):
                clock.now += 5 * second
                progress.update()
    assert capsys.readouterr().err.splitlines()[-1] == "index: 4/4 shards  50 s  0.0667 shards/s"
