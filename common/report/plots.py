"""Charts as inline SVG text, with the standard library only: lines, columns and a histogram, each with axes, ticks and
hover titles.

A colour is the name of a CSS class (`c0` .. `c6`, `o0` .. `o3`, a part's name), so that the page decides about light,
dark and print. Values may be None or NaN anywhere: such points are left out; a chart without points says so.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from itertools import pairwise

WIDE, HALF = 900, 440  # user units, about one CSS pixel at full page width
LEFT, RIGHT, TOP, BOTTOM = 52, 14, 30, 40  # margins around the plot, in user units
HOVER_BANDS = 120  # more would only be thinner than a pointer
RAMP = 7  # colours c0 .. c6


@dataclass
class Series:
    """One line: points [(x, y)], its colour, and whether it is drawn faint, dashed or with a dot at each point."""

    name: str
    points: list[tuple]
    colour: str
    faint: bool = False
    dashed: bool = False
    dots: bool = True


@dataclass
class Column:
    """One group of columns over one label: bars [(colour, value, hover text)]."""

    label: str
    bars: list[tuple[str, float | None, str]]


# ---- numbers ----


def number(value) -> float | None:
    """`value` when it is a finite number, else None."""
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return value if good else None


def plain(value, digits: int = 3) -> str:
    """A number as people write it, to so many significant digits; a dash for None and NaN."""
    if number(value) is None:
        return "–"
    if isinstance(value, int) or abs(value) >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    if 0 < abs(value) < 1e-3:
        return science(value, digits)
    return f"{value:.{digits}g}"


def science(value: float, digits: int = 3) -> str:
    """1e-3 rather than 1.00e-03."""
    mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}" if value else "0"


def fixed(value, decimals: int = 2) -> str:
    """A number with so many decimals; a dash for None and NaN."""
    return "–" if number(value) is None else f"{value:,.{decimals}f}"


def percent(value, decimals: int = 0) -> str:
    """A share 0..1 as percent; a dash for None and NaN."""
    return "–" if number(value) is None else f"{100 * value:.{decimals}f}%"


def ticks(low: float, high: float, count: int, whole: bool = False) -> list[float]:
    """About `count` round values, the first at or below `low` and the last at or above `high`."""
    if high <= low:
        high = low + (1 if whole else abs(low) / 10 or 1)
    rough = (high - low) / count
    power = 10 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * 0.999)
    if whole:
        step = max(1, round(step))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def tick_texts(values: list[float], shares: bool = False) -> list[str]:
    """Tick labels with as many decimals as the step between them needs; `shares` 0..1 as percent."""
    if shares:
        return [f"{text}%" for text in tick_texts([100 * value for value in values])]
    step = values[1] - values[0]
    if step < 5e-4 and max(map(abs, values)) < 0.01:
        return [science(v) for v in values]
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    return [f"{v:,.{decimals}f}" for v in values]


def clean(points: list[tuple]) -> list[tuple[float, float]]:
    """The points that can be drawn, by rising x."""
    return sorted((x, y) for x, y in points if number(x) is not None and number(y) is not None)


def smooth(points: list[tuple]) -> list[tuple[float, float]]:
    """Centred moving mean over a fortieth of the points; an exponential one would lag behind the true curve."""
    points = clean(points)
    reach = len(points) // 80
    windows = [points[max(0, i - reach) : i + reach + 1] for i in range(len(points))]
    return [(x, sum(y for _, y in window) / len(window)) for (x, _), window in zip(points, windows, strict=True)]


def thin(points: list[tuple], buckets: int = 300) -> list[tuple[float, float]]:
    """At most two points a bucket, its lowest and highest: a long run stays a small file and no spike is lost."""
    points = clean(points)
    if len(points) <= 2 * buckets:
        return points
    edges = [len(points) * i // buckets for i in range(buckets + 1)]
    return sorted(
        {pick(points[a:b], key=lambda p: p[1]) for a, b in pairwise(edges) for pick in (min, max)},
    )


# ---- the frame around every chart ----


class Frame:
    """Maps data to user units and draws axes. x, y: (low, high) in data units."""

    def __init__(self, width: int, height: int, x: tuple[float, float], y: tuple[float, float]):
        self.width, self.height, self.x, self.y = width, height, x, y
        self.right, self.bottom = width - RIGHT, height - BOTTOM

    def at_x(self, x: float) -> float:
        return round(LEFT + (x - self.x[0]) / (self.x[1] - self.x[0]) * (self.right - LEFT), 1)

    def at_y(self, y: float) -> float:
        return round(self.bottom - (y - self.y[0]) / (self.y[1] - self.y[0]) * (self.bottom - TOP), 1)

    def axes(self, x_ticks: list[tuple[float, str]], y_ticks: list[tuple[float, str]], x_label: str, y_label: str):
        """Gridlines, tick labels and both axes' names, as SVG."""
        out = []
        for value, text in y_ticks:
            y = self.at_y(value)
            out.append(f'<line class="grid" x1="{LEFT}" x2="{self.right}" y1="{y}" y2="{y}"/>')
            out.append(f'<text class="end" x="{LEFT - 8}" y="{y + 4}">{escape(text)}</text>')
        out.append(f'<line class="axis" x1="{LEFT}" x2="{self.right}" y1="{self.bottom}" y2="{self.bottom}"/>')
        for value, text in x_ticks:
            x = self.at_x(value)
            out.append(f'<line class="axis" x1="{x}" x2="{x}" y1="{self.bottom}" y2="{self.bottom + 4}"/>')
            out.append(f'<text class="middle" x="{x}" y="{self.bottom + 18}">{escape(text)}</text>')
        out.append(f'<text class="name" x="0" y="12">{escape(y_label)}</text>')
        out.append(f'<text class="name end" x="{self.right}" y="{self.height - 4}">{escape(x_label)}</text>')
        return "".join(out)

    def svg(self, body: str, label: str) -> str:
        box = f"0 0 {self.width} {self.height}"
        return f'<svg viewBox="{box}" role="img" aria-label="{escape(label)}">{body}</svg>'


def empty(y_label: str) -> str:
    """What stands in place of a chart without points."""
    return f'<p class="empty"><span>{escape(y_label)}</span>no data yet</p>'


# ---- charts ----


def line_chart(
    series: list[Series],
    x_label: str,
    y_label: str,
    show: Callable[[float], str] = plain,
    shares: bool = False,
    low: float | None = None,
    mark: tuple[float, str] | None = None,
    width: int = WIDE,
    height: int = 280,
) -> str:
    """Lines over a whole-numbered x. `low`: where y starts (None: near the lowest point). `show` writes a value in the
    hover text; `shares` 0..1 get an axis in percent. `mark`: (x, text) of a vertical line."""
    series = [Series(s.name, clean(s.points), s.colour, s.faint, s.dashed, s.dots) for s in series]
    every = [point for s in series for point in s.points]
    if not every:
        return empty(y_label)
    xs, ys = [x for x, _ in every], [y for _, y in every]
    room = 1 if len(set(xs)) == 1 else 0  # a lone point stands in the middle
    x_ticks = ticks(max(0, min(xs) - room), max(xs) + room, 8 if width == WIDE else 4, whole=True)
    y_ticks = ticks(min(ys) if low is None else low, max(ys), 5)
    x_range = (x_ticks[0], max(xs) + room)
    frame = Frame(width, height, x_range, (y_ticks[0], y_ticks[-1]))
    y_texts = tick_texts(y_ticks, shares)
    shown = [(v, t) for v, t in zip(x_ticks, tick_texts(x_ticks), strict=True) if v <= x_range[1]]
    body = [frame.axes(shown, list(zip(y_ticks, y_texts, strict=True)), x_label, y_label)]
    if mark and number(mark[0]) is not None and x_range[0] <= mark[0] <= x_range[1]:
        x = frame.at_x(mark[0])
        side, shift = ("end", -5) if x > width / 2 else ("", 5)
        body.append(f'<line class="mark" x1="{x}" x2="{x}" y1="{TOP - 10}" y2="{frame.bottom}"/>')
        body.append(f'<text class="{side}" x="{x + shift}" y="{TOP - 2}">{escape(mark[1])}</text>')
    for s in series:
        look = s.colour + " faint" * s.faint + " dashed" * s.dashed
        path = " ".join(f"{frame.at_x(x)},{frame.at_y(y)}" for x, y in s.points)
        if len(s.points) > 1:
            body.append(f'<polyline class="line {look}" points="{path}"/>')
        if len(s.points) == 1 or (s.dots and len(s.points) <= 60):
            dots = (f'<circle cx="{frame.at_x(x)}" cy="{frame.at_y(y)}" r="3.2"/>' for x, y in s.points)
            body.append(f'<g class="fill {look}">{"".join(dots)}</g>')
    body.append(hover_bands(frame, [s for s in series if not s.faint], x_label, show))
    return frame.svg("".join(body), f"{y_label} by {x_label}")


def hover_bands(frame: Frame, series: list[Series], x_label: str, show: Callable[[float], str]) -> str:
    """Invisible full-height bands whose titles list every line's value there: no script, and no small dot to hit."""
    xs = sorted({x for s in series for x, _ in s.points})
    size = math.ceil(len(xs) / HOVER_BANDS)
    groups = [xs[i : i + size] for i in range(0, len(xs), size or 1)]
    centres = [(group[0] + group[-1]) / 2 for group in groups]
    edges = [frame.x[0], *((a + b) / 2 for a, b in pairwise(centres)), frame.x[1]]
    lookup = [(s.name, dict(s.points)) for s in series]
    out = []
    for group, left, right in zip(groups, edges, edges[1:], strict=False):
        span = plain(group[0], 9) + (f" to {plain(group[-1], 9)}" if len(group) > 1 else "")
        rows = [f"{x_label} {span}"]
        for name, values in lookup:
            here = [values[x] for x in group if x in values]
            rows += [f"{name}: {show(here[-1])}"] if here else []
        x, x1, x2 = frame.at_x((group[0] + group[-1]) / 2), frame.at_x(left), frame.at_x(right)
        band = f'<rect x="{x1}" y="{TOP}" width="{max(x2 - x1, 0.5):.1f}" height="{frame.bottom - TOP}"/>'
        guide = f'<line x1="{x}" x2="{x}" y1="{TOP}" y2="{frame.bottom}"/>'
        out.append(f'<g class="band">{band}{guide}<title>{escape(chr(10).join(rows))}</title></g>')
    return "".join(out)


def column_chart(
    columns: list[Column],
    x_label: str,
    y_label: str,
    show: Callable[[float], str] = fixed,
    shares: bool = False,
    low: float = 0,
    high: float | None = None,
    width: int = WIDE,
    height: int = 240,
) -> str:
    """Grouped columns that rise from `low` to at most `high` (None: the highest), each with its value on top."""
    values = [v for column in columns for _, v, _ in column.bars if number(v) is not None]
    if not values:
        return empty(y_label)
    y_ticks = ticks(low, max([*values, low] if high is None else [high]), 4)
    frame = Frame(width, height, (0, len(columns)), (y_ticks[0], y_ticks[-1]))
    y_texts = tick_texts(y_ticks, shares)
    labels = [(i + 0.5, column.label) for i, column in enumerate(columns)]
    body = [frame.axes(labels, list(zip(y_ticks, y_texts, strict=True)), x_label, y_label)]
    slot = (frame.right - LEFT) / len(columns)
    wide = min(slot * 0.7 / max(len(c.bars) for c in columns), 56)
    for i, column in enumerate(columns):
        start = LEFT + slot * (i + 0.5) - wide * len(column.bars) / 2
        for j, (colour, value, hover) in enumerate(column.bars):
            if number(value) is None:
                continue
            x, y = start + wide * j, frame.at_y(max(value, low))
            bar = f'<rect x="{x + 1:.1f}" y="{y}" width="{wide - 2:.1f}" height="{frame.bottom - y:.1f}" rx="2"/>'
            text = f'<text class="middle value" x="{x + wide / 2:.1f}" y="{y - 5:.1f}">{escape(show(value))}</text>'
            body.append(f'<g class="fill {colour}"><title>{escape(hover)}</title>{bar}</g>{text}')
    return frame.svg("".join(body), f"{y_label} by {x_label}")


def histogram(values: list, x_label: str, y_label: str, width: int = WIDE, height: int = 220) -> str:
    """How many of the whole numbers `values` fall into each of at most 60 equal bins from 0."""
    values = [v for v in values if number(v) is not None and v >= 0]
    if not values:
        return empty(y_label)
    edges = ticks(0, max(values) + 1, 60, whole=True)
    size = edges[1]
    counts = [0] * (len(edges) - 1)
    for value in values:
        counts[int(value // size)] += 1
    y_ticks = ticks(0, max(counts), 4, whole=True)
    frame = Frame(width, height, (0, edges[-1]), (0, y_ticks[-1]))
    x_ticks = [v for v in ticks(0, edges[-1], 8, whole=True) if v <= edges[-1]]
    names = [list(zip(v, tick_texts(v), strict=True)) for v in (x_ticks, y_ticks)]
    body = [frame.axes(*names, x_label, y_label)]
    for left, count in zip(edges, counts, strict=False):
        if count:
            x, x2, y = frame.at_x(left), frame.at_x(left + size), frame.at_y(count)
            title = f"<title>{left:,.0f} to {left + size - 1:,.0f}: {count:,}</title>"
            bar = f'<rect x="{x + 0.5:.1f}" y="{y}" width="{x2 - x - 1:.1f}" height="{frame.bottom - y:.1f}"/>'
            body.append(f'<g class="fill c1">{title}{bar}</g>')
    return frame.svg("".join(body), f"{y_label} by {x_label}")
