"""One progress display for every long step: a tqdm bar in a terminal, a plain line every few seconds elsewhere."""

import math
import sys
import time
from fractions import Fraction

from tqdm import tqdm

PLAIN_LINE_EVERY_S = 10.0
WARM_UP_S = (2.0, 20.0)  # least and most time from the first finished units to the first ETA


class Progress:
    """Counts up to `total` units; shows the rate, the ETA and the caller's `facts`. A context manager.

    The rate is measured from the first finished units on, which wait for start-up, compilation or a whole batch. It is
    shown with an ETA only after two more updates and after as long again as the first one took (2 to 20 s).
    `shown=False`: prints nothing (ranks other than the first).
    """

    def __init__(self, label: str, total: int | None, unit: str, done: int = 0, shown: bool = True):
        self.label, self.total, self.unit, self.done, self.shown = label, total, unit, done, shown
        self.plain, self.facts = not sys.stderr.isatty(), ""
        self.started = self.last_line = time.monotonic()
        self.updates, self.first_at, self.first_done = 0, self.started, done
        self.bar = tqdm(
            total=total,
            desc=label,
            initial=done,
            disable=self.plain or not shown,
            dynamic_ncols=True,
            bar_format="{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}{postfix}]",
        )

    def update(self, count: int = 1, **facts) -> None:
        """`count` more units are done; 0 only shows new facts."""
        self.done += count
        self.facts = "  ".join(f"{key}={value}" for key, value in facts.items())
        now = time.monotonic()
        if count:
            self.updates += 1
            if self.updates == 1:
                self.first_at, self.first_done = now, self.done
        if self.plain:
            if now - self.last_line >= PLAIN_LINE_EVERY_S:
                self._line()
        else:
            self.bar.set_postfix_str(self._status(now), refresh=False)
            self.bar.update(count)

    def resize(self, total: int) -> None:
        """Correct the total once the real number of units is known."""
        self.total = self.bar.total = total

    def _status(self, now: float) -> str:
        warm_up_s = min(max(self.first_at - self.started, WARM_UP_S[0]), WARM_UP_S[1])
        texts = []
        if self.updates > 2 and now - self.first_at >= warm_up_s:
            rate = (self.done - self.first_done) / (now - self.first_at)
            texts.append(f"{rate:.3g} {self.unit}/s")
            if self.total and self.done < self.total:
                texts.append(f"ETA {tqdm.format_interval((self.total - self.done) / rate)}")
        return "  ".join([*texts, self.facts] if self.facts else texts)

    def _line(self) -> None:
        if not self.shown:
            return
        self.last_line = now = time.monotonic()
        of = f"/{self.total}" if self.total else ""
        line = f"{self.label}: {self.done}{of} {self.unit}  {now - self.started:.0f} s  {self._status(now)}"
        print(line.rstrip(), file=sys.stderr, flush=True)

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *error) -> None:
        if self.plain:
            self._line()
        self.bar.close()


def say(line: str = "") -> None:
    """Print a line on stdout without tearing a running bar."""
    tqdm.write(line, file=sys.stdout)
    sys.stdout.flush()


def table(rows: list[tuple[str, str]]) -> None:
    """Print aligned `name  value` lines."""
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        say(f"  {name:<{width}}  {value}")


def listed(counter: dict[str, int]) -> str:
    """Counts by name as text, the largest first."""
    return ", ".join(f"{name} {count}" for name, count in sorted(counter.items(), key=lambda item: -item[1])) or "none"


def share(count: int, total: int) -> str:
    """`3 of 10 (30.0%)`."""
    return f"{count} of {total}{f' ({count / total:.1%})' if total else ''}"


def percentiles(values, form: str) -> str:
    """The 10th, 50th, 90th and 99th percentile in the given number format."""
    values = sorted(values)
    picked = ((p, values[min(len(values) - 1, len(values) * p // 100)]) for p in (10, 50, 90, 99))
    return ", ".join(f"p{p} {value:{form}}" for p, value in picked)


def gb(size: int, up: bool = False) -> str:
    """A number of bytes as text in GB or MB; `up` rounds up, for a size that a user is told to reserve."""
    unit, digits, name = (10**9, 1, "GB") if size >= 1e8 else (10**6, 2, "MB")
    steps = Fraction(size * 10**digits, unit)
    return f"{(math.ceil(steps) if up else round(steps)) / 10**digits:.{digits}f} {name}"
