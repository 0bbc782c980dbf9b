"""Charts of the report, drawn by matplotlib as SVG text for the page.

Colours are names of the page's CSS variables, so that one style sheet decides about charts, tables, light and dark.
"""

import io
import re
from dataclasses import dataclass

WIDTH, HEIGHT = 460, 270  # user units of the SVG: one CSS pixel each when the chart has half of a wide page
RAMP = tuple(f"step{i}" for i in range(1, 8))  # ordered colours: draft tokens 1 to 7
OTHERS = ("other1", "other2", "other3")
COLOURS = ("ink", "dim", "rule", "grid", "draft", "training", "bigram", "untrained", "reasoning-bar", "content-bar")
COLOURS += RAMP + OTHERS
MARKED_POINTS = 60  # lines of at most this many points have a dot at each


@dataclass
class Line:
    """One line: points [(step, value)], the name of its colour, and how it is drawn."""

    name: str
    points: list[tuple[float, float]]
    colour: str
    faint: bool = False
    dashed: bool = False


def placeholder(colour: str) -> str:
    """The colour that stands for a CSS variable until the SVG text is complete."""
    return f"#0102{COLOURS.index(colour):02x}"


class Chart:
    """An empty chart. `axes` is drawn on with matplotlib, `svg()` returns the markup. y values are shares 0 to 1 where
    `percent` is set."""

    def __init__(self, x_label: str, y_label: str, percent: bool = False):
        from matplotlib import rc_context
        from matplotlib.figure import Figure
        from matplotlib.ticker import FuncFormatter, MaxNLocator

        ink, dim, rule, grid = map(placeholder, ("ink", "dim", "rule", "grid"))
        self.style = {
            **{"svg.fonttype": "none", "svg.hashsalt": "report", "path.simplify_threshold": 0.3, "font.size": 13},
            **{"axes.edgecolor": rule, "axes.labelcolor": dim, "text.color": ink, "grid.color": grid},
            **{"axes.titlecolor": dim, "axes.titlesize": 13, "axes.titlepad": 10, "axes.labelsize": 13},
            **{"xtick.color": rule, "ytick.color": rule, "xtick.labelcolor": dim, "ytick.labelcolor": dim},
            **{"ytick.major.size": 0, "axes.spines.top": False, "axes.spines.right": False, "axes.spines.left": False},
            **{"axes.grid": True, "axes.grid.axis": "y", "axes.axisbelow": True},
        }
        self.label = f"{y_label} by {x_label}"
        with rc_context(self.style):
            self.figure = Figure(figsize=(WIDTH / 72, HEIGHT / 72))
            self.axes = self.figure.add_axes((0.11, 0.17, 0.87, 0.72))  # a computed layout takes twice the time
            self.axes.set_title(y_label, x=-0.12, loc="left")
            self.axes.set_xlabel(x_label, loc="right")
            number = FuncFormatter(lambda value, _: f"{value:,.10g}".replace("e-0", "e-"))
            share = FuncFormatter(lambda value, _: f"{100 * value:.4g}%")
            self.axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, steps=(1, 2, 5, 10)))
            self.axes.xaxis.set_major_formatter(number)
            self.axes.yaxis.set_major_locator(MaxNLocator(5, steps=(1, 2, 2.5, 5, 10)))
            self.axes.yaxis.set_major_formatter(share if percent else number)

    def svg(self) -> str:
        """The chart as markup: equal data give equal text; colours are CSS variables, fonts and width the page's."""
        from matplotlib import rc_context

        text = io.StringIO()
        with rc_context(self.style):
            metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
            self.figure.savefig(text, format="svg", transparent=True, metadata=metadata)
        drawing = text.getvalue().split("</style>\n </defs>", 1)[1].rsplit("</svg>", 1)[0]
        drawing = re.sub(r"#0102(..)", lambda found: f"var(--{COLOURS[int(found[1], 16)]})", drawing)
        drawing = re.sub(r" id=\"[a-z0-9.]+_\d+\"|font-family: [^;\"]*;? ?|\n *(?=<)", "", drawing)
        return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{self.label}">{drawing}</svg>'


def line_chart(
    lines: list[Line], y_label: str, percent=False, low: float | None = None, mark: int | None = None
) -> str:
    """Lines over the training step from `low` up, with a vertical line at step `mark`; "" where no line has points."""
    lines = [line for line in lines if line.points]
    if not lines:
        return ""
    chart = Chart("training step", y_label, percent)
    for line in lines:
        few = len(line.points) <= MARKED_POINTS and not line.faint
        chart.axes.plot(
            *zip(*line.points, strict=True),
            color=placeholder(line.colour),
            alpha=0.3 if line.faint else 1,
            linewidth=1 if line.faint else 2,
            linestyle=(0, (4, 2.5)) if line.dashed else "-",
            marker="o" if few and (not line.dashed or len(line.points) == 1) else "",
            markersize=4,
        )
    if mark is not None:
        chart.axes.axvline(mark, color=placeholder("dim"), linewidth=1, linestyle=(0, (1, 3)))
    if low is not None:
        chart.axes.set_ylim(bottom=low)
    return chart.svg()


def bar_chart(bars: list[tuple[str, float, str]], x_label: str, y_label: str, percent=False, low: float = 0) -> str:
    """One bar for each (label, value, colour), from `low` up, with its value on top. "" without bars."""
    if not bars:
        return ""
    labels, values, colours = zip(*bars, strict=True)
    chart = Chart(x_label, y_label, percent)
    heights = [value - low for value in values]
    drawn = chart.axes.bar(labels, heights, bottom=low, width=0.62, color=[placeholder(c) for c in colours])
    texts = [f"{100 * value:.0f}%" if percent else f"{value:.2f}" for value in values]
    chart.axes.bar_label(drawn, texts, padding=3, fontsize=13, color=placeholder("ink"))
    chart.axes.set_xticks(range(len(labels)), labels)
    chart.axes.set_ylim(low, low + 1.15 * max(*heights, 0.05))
    return chart.svg()


def histogram(starts: list[int], counts: list[int], size: int, x_label: str, y_label: str) -> str:
    """One bar for each bin: the number of values from its start to `start + size`."""
    chart = Chart(x_label, y_label)
    chart.axes.bar(starts, counts, width=0.9 * size, align="edge", color=placeholder("training"))
    return chart.svg()
