"""report.json, the figures of a training run, and report.html, the page that is rendered from report.json alone.

04_train.py writes the run's figures at every evaluation; `--serve-eval` adds what it measured on a running server.
"""

import json
import math
from collections import Counter, defaultdict
from itertools import accumulate
from pathlib import Path
from statistics import median

from filelock import FileLock

from common.draft.config import MAIN_K
from common.pipeline.files import read_json, write_text
from common.pipeline.templates import render
from common.report.plots import OTHERS, RAMP, Line, bar_chart, histogram, line_chart

FORMAT = 1
MAX_POINTS = 2000  # of one curve
MAX_BINS = 50  # of the histogram of sample lengths
SHOWN_TOKENS = 3000  # of one sample
TEMPLATE = Path(__file__).with_name("page.html.jinja")


def write_report(
    folder: Path, facts: dict, metrics: list[dict], samples: list[dict], others: dict[str, list[dict]]
) -> None:
    """Write report.json and report.html. `metrics`: the lines of metrics.jsonl; `others`: those of other runs by name.

    `facts` has the step of the chosen checkpoint (`chosen_step`), the baselines and the tables of the section "Facts";
    `samples` are held-out replies as tokens. Figures that --serve-eval measured stay in report.json.
    """
    trains = by_step(metrics, "train")
    curves = {name: [(t["step"], t[name]) for t in trains] for name in ("loss", "learning_rate", "grad_norm")}
    curves["smooth_loss"] = smooth(curves["loss"])
    update_report(
        folder,
        **{name: value for name, value in facts.items() if name != "lengths"},
        lengths=lengths(facts["lengths"]),
        curves={name: thin(points) for name, points in curves.items()},
        last=trains[-1] if trains else None,
        evals=by_step(metrics, "eval"),
        samples=[sample | shown(sample["tokens"]) for sample in samples],
        others={name: by_step(lines, "eval") for name, lines in others.items()},
    )


def update_report(folder: Path, **changes) -> bool:
    """Replace figures of report.json; render report.html if report.json has a run's figures, and return whether it has.

    The lock is needed because --serve-eval may change the figures (`serving`) while the run still trains.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "report.json"
    with FileLock(folder / ".report.lock"):
        figures = read_json(path) if path.is_file() else {"format": FORMAT, "serving": None}
        text = json.dumps(figures | changes, allow_nan=False)
        write_text(path, text + "\n")
        figures = json.loads(text)
        if "curves" in figures:
            write_text(folder / "report.html", page(figures))
    return "curves" in figures


# ---- figures ----


def by_step(metrics: list[dict], kind: str) -> list[dict]:
    """The metrics lines of one kind by rising step; the later of two lines for a step counts."""
    lines = {line["step"]: line for line in metrics if line["kind"] == kind}
    return [lines[step] for step in sorted(lines)]


def smooth(points: list[tuple]) -> list[tuple]:
    """Centred moving mean over a fortieth of the points; an exponential one would lag behind the true curve."""
    sums, reach, count = [0, *accumulate(value for _, value in points)], len(points) // 80, len(points)
    spans = [(max(0, i - reach), min(count, i + reach + 1)) for i in range(count)]
    return [(step, (sums[b] - sums[a]) / (b - a)) for (step, _), (a, b) in zip(points, spans, strict=True)]


def thin(points: list[tuple]) -> list[tuple]:
    """At most MAX_POINTS points: the lowest and the highest of each bucket, so that no spike is lost."""
    if len(points) <= MAX_POINTS:
        return points
    edges = range(0, len(points), math.ceil(2 * len(points) / MAX_POINTS))
    buckets = [points[start : start + edges.step] for start in edges]
    return sorted({pick(bucket, key=lambda p: p[1]) for bucket in buckets for pick in (min, max)})


def lengths(values: list[int]) -> dict | None:
    """Histogram of the training samples' lengths in tokens."""
    if not values:
        return None
    size = max(values) // MAX_BINS + 1
    starts, counts = zip(*sorted(Counter(size * (value // size) for value in values).items()), strict=True)
    return {"starts": starts, "counts": counts, "size": size, "median": median(values), "longest": max(values)}


def shown(tokens: list[dict]) -> dict:
    """A sample's first tokens, and how many tokens it has, the target wrote and the draft proposed rightly."""
    judged = [token["accepted"] for token in tokens if token["accepted"] is not None]
    counts = {"count": len(tokens), "written": len(judged), "accepted": sum(hit > 0 for hit in judged)}
    return {"tokens": tokens[:SHOWN_TOKENS], **counts}


def length_at(evaluation: dict | None, k: str) -> float | None:
    """Acceptance length in tokens per target forward pass; None where it was not measured."""
    return evaluation["walk"].get(k, {}).get("length") if evaluation else None


def shares(evaluation: dict, k: str) -> list[float]:
    """Share 0 to 1 of drafts whose 1st, 2nd, ... token was accepted."""
    entry = evaluation["walk"][k]
    return [accepted / entry["drafts"] for accepted in entry["accepted"]]


def margin(evaluation: dict, k: str) -> float:
    """Half width of the 95% interval of an acceptance length, in tokens, when drafts are taken as independent."""
    accepted = shares(evaluation, k)
    variance = sum((2 * i + 1) * share for i, share in enumerate(accepted)) - sum(accepted) ** 2
    return 1.96 * math.sqrt(max(variance, 0) / evaluation["walk"][k]["drafts"])


# ---- page ----


def page(figures: dict) -> str:
    """report.html of the figures in report.json."""
    evals, baselines, others = (figures[name] for name in ("evals", "baselines", "others"))
    own = next((e for e in evals if e["step"] == figures["chosen_step"]), None)
    measured = [own] if own else [*evals, *baselines.values()]
    ks = sorted({k for e in measured for k in e["walk"]}, key=int)
    main = str(MAIN_K) if str(MAIN_K) in ks or not ks else ks[-1]
    best = {name: max(lines, key=lambda e: length_at(e, main) or 0, default=None) for name, lines in others.items()}
    charts = training_charts(figures, own, ks, main)
    helpers = {f.__name__: f for f in (length_at, shares, margin, fixed, percent, duration, fact, visible)}
    names = {"own": own, "baselines": baselines, "ks": ks, "main": main, "best": best, "charts": charts}
    text = render(TEMPLATE, figures=figures, **names, **helpers)
    return text.encode("utf-8", "replace").decode()  # half characters (lone surrogates) become "?"


def training_charts(figures: dict, own: dict | None, ks: list[str], main: str) -> list[dict]:
    """The charts in the page's order: name, lines of the legend, SVG ("" without data), step of the vertical line."""
    curves, evals, baselines = figures["curves"], figures["evals"], figures["baselines"]
    mark, length = own and own["step"], "acceptance length (tokens per target pass)"
    loss = [
        Line("training, each step", curves["loss"], "training", faint=True),
        Line("training, smoothed", curves["smooth_loss"], "training"),
        Line("held out", [(e["step"], e["loss"]) for e in evals], "draft"),
    ]
    colours = {"1": RAMP[0], main: "draft"} | dict.fromkeys(ks[-1:], RAMP[-1])
    walks = [Line(f"k = {k}", curve(evals, k), colour) for k, colour in colours.items() if k in ks]
    for name in ("bigram", "untrained"):
        if floor := length_at(baselines.get(name), main):
            points = [(evals[i]["step"], floor) for i in (0, -1) if evals]
            walks.append(Line(f"{name}, k = {main}", points, name, dashed=True))
    for i, (name, lines) in enumerate(figures["others"].items()):
        walks.append(Line(f"{name}, k = {main}", curve(lines, main), OTHERS[i % len(OTHERS)], dashed=True))
    accuracies = defaultdict(list)  # draft token -> [(step, accuracy)]
    for e in evals:
        for i, accuracy in enumerate(e["step_accuracy"]):
            accuracies[i].append((e["step"], accuracy))
    steps = [Line(f"draft token {i + 1}", points, RAMP[i % len(RAMP)]) for i, points in accuracies.items()]
    positions = [(str(i), share, "draft") for i, share in enumerate(shares(own, ks[-1]), 1)] if own and ks else []
    parts = [(part, of[main], f"{part}-bar") for part, of in own["by_part"].items() if of.get(main)] if own else []
    starts = [(f"{bin['from']:,}", bin["length"], "draft") for bin in own["by_place"]] if own else []
    speeds = [(k, speed, "draft") for k, speed in own["speed_up"].items() if speed] if own else []
    rate, norm = (Line(name, curves[name], "training") for name in ("learning_rate", "grad_norm"))
    bins = figures["lengths"]
    charts = [
        ("walks", walks, line_chart(walks, length, low=1, mark=mark)),
        ("loss", loss[1:], line_chart(loss, "loss (nats)", mark=mark)),
        ("accuracy", steps, line_chart(steps, "share of held-out tokens proposed right", True, low=0, mark=mark)),
        ("positions", [], bar_chart(positions, "draft token", "share of drafts", percent=True)),
        ("parts", [], bar_chart(parts, "part of the reply", length, low=1)),
        ("starts", [], bar_chart(starts, "tokens into the reply, from", length, low=1)),
        ("speeds", [], bar_chart(speeds, "draft tokens k", "times as fast as without a draft")),
        ("lengths", [], bins and histogram(bins["starts"], bins["counts"], bins["size"], "tokens", "training samples")),
        ("rate", [], line_chart([rate], "learning rate", low=0)),
        ("norm", [], line_chart([norm], "gradient norm, before clipping", low=0)),
    ]
    return [{"name": name, "legend": legend, "svg": svg, "mark": mark} for name, legend, svg in charts]


def curve(evals: list[dict], k: str) -> list[tuple]:
    """[(step, acceptance length)] over a run's evaluations."""
    return [(e["step"], length_at(e, k)) for e in evals if length_at(e, k)]


def fixed(value: float | None, decimals: int = 2) -> str:
    """A number with this many decimals; a dash where it was not measured."""
    return "–" if value is None else f"{value:,.{decimals}f}"


def percent(share: float | None, decimals: int = 0) -> str:
    """A share 0 to 1 as percent; a dash where it was not measured."""
    return "–" if share is None else f"{100 * share:.{decimals}f}%"


def duration(seconds: float) -> str:
    """Seconds in the unit that suits a reader."""
    units = ((5400, 3600, "h"), (100, 60, "min"), (0, 1, "s"))
    return next(f"{seconds / unit:.1f} {name}" for least, unit, name in units if seconds >= least)


def fact(value) -> str:
    """A setting's value as text: nested dicts and lists in one line."""
    if isinstance(value, dict):
        return " · ".join(f"{name} {fact(inner)}" for name, inner in value.items()) or "–"
    if isinstance(value, list):
        return ", ".join(map(fact, value)) or "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return f"{value:,}" if isinstance(value, int) and value >= 10_000 else f"{value:.6g}"
    return "–" if value is None else value or "–"


def visible(text: str) -> str:
    """A token's text, with control characters as their pictures and spaces kept; an empty one as a small square."""
    return "".join(chr(0x2400 + ord(c)) if ord(c) < 32 and c not in "\n\t" else c for c in text) or "▫"
