"""One progress display for every long step: a tqdm bar in a terminal, a plain line every few seconds elsewhere."""

import math
import sys
import time
from fractions import Fraction

from tqdm import tqdm

PLAIN_LINE_EVERY_S = 10.0


class Progress:
    """Counts up to `total` units with rate, ETA and free `facts` beside them. A context manager.

    `shown=False`: prints nothing (ranks other than the first).
    """

    def __init__(self, label: str, total: int | None, unit: str, done: int = 0, shown: bool = True):
        self.shown, self.plain = shown, not sys.stderr.isatty()
        self.bar = tqdm(
            total=total,
            desc=label,
            unit=f" {unit}",
            initial=done,
            disable=self.plain or not shown,
            dynamic_ncols=True,
            smoothing=0.1,
        )
        self.label, self.total, self.unit, self.initial, self.done = label, total, unit, done, done
        self.started = self.last_line = time.monotonic()
        self.facts = ""

    def update(self, count: int = 1, **facts) -> None:
        self.done += count
        self.facts = "  ".join(f"{key}={value}" for key, value in facts.items())
        if self.plain:
            if time.monotonic() - self.last_line >= PLAIN_LINE_EVERY_S:
                self._line()
        else:
            self.bar.set_postfix_str(self.facts, refresh=False)
            self.bar.update(count)

    def resize(self, total: int) -> None:
        """Correct the total when more or less turns out to be there."""
        self.total = self.bar.total = total

    def _line(self) -> None:
        if not self.shown:
            return
        self.last_line = time.monotonic()
        elapsed = self.last_line - self.started
        rate = (self.done - self.initial) / elapsed if elapsed > 0 else 0.0
        of = f"/{self.total}" if self.total else ""
        eta = f"  ETA {tqdm.format_interval((self.total - self.done) / rate)}" if self.total and rate else ""
        facts = f"  {self.facts}" if self.facts else ""
        line = f"{self.label}: {self.done}{of} {self.unit}  {rate:.3g} {self.unit}/s  {elapsed:.0f} s{eta}{facts}"
        print(line, file=sys.stderr, flush=True)

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
    """Print aligned `name  value` lines: a plan or a summary."""
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        say(f"  {name:<{width}}  {value}")


def gb(size: int, up: bool = False) -> str:
    """Bytes as people write them in `--window`; `up`: rounded up, so that a size that is advised is enough."""
    unit, digits, name = (10**9, 1, "GB") if size >= 1e8 else (10**6, 2, "MB")
    steps = Fraction(size * 10**digits, unit)
    return f"{(math.ceil(steps) if up else round(steps)) / 10**digits:.{digits}f} {name}"
