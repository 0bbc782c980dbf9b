"""The report of a training run: curves, tables and samples in one HTML file that needs nothing else.

Every number comes from metrics.jsonl or is derived from it here; whatever is missing or NaN shows as a dash.
"""

import math
from pathlib import Path
from statistics import median

from common.pipeline.files import write_text
from common.report.page import OVERLAYS, PARTS, document, facts_table, legend, samples_section, section, table, text_of
from common.report.plots import (
    HALF,
    RAMP,
    Column,
    Series,
    column_chart,
    fixed,
    histogram,
    line_chart,
    number,
    percent,
    plain,
    smooth,
    thin,
)
from common.report.serving_section import serving_slot

HEADLINE_K = "3"  # draft tokens a forward pass: what engines are mostly run with

ABOUT_LENGTH = (
    "Acceptance length is the number of tokens that the target gains per forward pass: one of its own plus the draft "
    "tokens it accepts; 1 means no speculation."
)
ABOUT_TABLE = (
    "The walk counts as an engine does: draft k tokens, keep the accepted ones and one of the target's, go on after "
    "them. Per position averages over every place to start; the last two columns are the floors to beat."
)
ABOUT_POSITIONS = (
    "How often a draft survives up to its 1st, 2nd, … token; engines log this as the per-position acceptance rate, "
    "and it shows where a larger k stops paying."
)
ABOUT_SAMPLES = "Prompt and reply together, in the target's tokens."


# ---- reading metrics ----


def by_step(metrics: list[dict], kind: str) -> list[dict]:
    """The lines of one kind by rising step; of two for a step (a resumed run) the later one counts."""
    lines = {m["step"]: m for m in metrics if m.get("kind") == kind and number(m.get("step")) is not None}
    return [lines[step] for step in sorted(lines)]


def ks_of(*evals: dict) -> list[str]:
    """Every k that some eval walked with, rising."""
    return sorted({k for e in evals for k in e.get("walk") or {}}, key=int)


def length_at(evaluation: dict | None, k: str, kind: str = "walk") -> float | None:
    """Acceptance length in tokens per target forward pass."""
    entry = ((evaluation or {}).get(kind) or {}).get(k)
    return number(entry.get("length") if isinstance(entry, dict) else entry)


def shares(evaluation: dict | None, k: str) -> list[float]:
    """Share 0..1 of drafts whose 1st, 2nd ... token was accepted."""
    entry = ((evaluation or {}).get("walk") or {}).get(k) or {}
    drafts = number(entry.get("drafts"))
    return [n / drafts for n in entry.get("accepted") or [] if number(n) is not None] if drafts else []


def margin(evaluation: dict | None, k: str) -> float | None:
    """Half width of the 95% interval of an acceptance length; exact from the counts, with drafts as independent."""
    kept = shares(evaluation, k)
    variance = sum((2 * i + 1) * share for i, share in enumerate(kept)) - sum(kept) ** 2
    return 1.96 * math.sqrt(max(variance, 0) / evaluation["walk"][k]["drafts"]) if kept else None


def points(lines: list[dict], name: str, at: int | None = None) -> list[tuple]:
    """[(step, value)] of a metric, or of entry `at` of a listed one."""
    values = [line.get(name) for line in lines]
    if at is not None:
        values = [v[at] if isinstance(v, list) and at < len(v) else None for v in values]
    return [(line["step"], value) for line, value in zip(lines, values, strict=True)]


def spread(index: int, count: int) -> str:
    """The colour of the index-th of `count` ordered lines: first and last are always the ramp's ends."""
    return f"c{round(index * (RAMP - 1) / max(count - 1, 1))}"


# ---- sections ----


def headline(own: dict | None, baselines: dict, k: str, step) -> str:
    """The one number, beside what costs nothing to train."""
    named = [
        ("this draft", own),
        ("bigram table", baselines.get("bigram")),
        ("untrained draft", baselines.get("untrained")),
    ]
    bars = ""
    for name, evaluation in named:
        length = length_at(evaluation, k)
        share = 0 if length is None else min(max((length - 1) / int(k), 0), 1)
        own_class = ' class="own"' if evaluation is own else ""
        bar = "" if length is None else f'<i{own_class} style="width:{100 * share:.1f}%"></i>'
        bars += f'<span>{name}</span><div class="track">{bar}</div><b>{fixed(length)}</b>'
    bars += (
        f'<span></span><div class="scale"><span>1 = no speculation</span><span>{int(k) + 1} = all accepted</span></div>'
    )
    half = margin(own, k)
    where = f"checkpoint of step {plain(step, 9)}" if own else "no evaluation of the chosen step yet"
    where += "" if half is None else f"; ± {fixed(half)} at 95%, from {plain(own['walk'][k]['drafts'])} drafts"
    note = f"Held-out text, {where}. {ABOUT_LENGTH} The speed-up is smaller, because drafting takes time too."
    own_text = f'<div class="big" id="headline">{fixed(length_at(own, k))}</div>'
    own_text += f"<p>tokens per target forward pass,<br>drafting k = {k} at a time</p>"
    return f'<div class="hero"><div>{own_text}</div><div class="bars">{bars}</div><p class="note">{note}</p></div>'


def strip(trains: list[dict], own: dict | None) -> str:
    """The run in a line."""
    last = trains[-1] if trains else {}
    speeds = [t["tokens_s"] for t in trains if number(t.get("tokens_s")) is not None]
    seconds = number(last.get("seconds"))
    units = ((5400, 3600, "h"), (100, 60, "min"), (-math.inf, 1, "s"))
    took = "–" if seconds is None else next(f"{seconds / u:.1f} {name}" for low, u, name in units if seconds >= low)
    outside = None if own is None else own.get("outside_vocab")
    items = [
        (plain(last.get("step")), "steps"),
        (fixed(last.get("epoch"), 1), "epochs"),
        (plain(last.get("tokens")), "training tokens"),
        (took, "training time"),
        (plain(median(speeds)) if speeds else "–", "tokens/s (median)"),
        (percent(outside, 2), "of tokens outside the draft vocabulary"),
    ]
    return f'<div class="strip">{"".join(f"<div><b>{value}</b>{name}</div>" for value, name in items)}</div>'


def length_table(own: dict | None, baselines: dict, ks: list[str], main: str) -> str:
    """Acceptance length by k: as an engine walks, averaged over every position, and the two floors."""
    rows = []
    for k in ks:
        half, kept = margin(own, k), shares(own, k)
        walked = fixed(length_at(own, k)) + ("" if half is None else f" <small>± {fixed(half)}</small>")
        floors = [fixed(length_at(baselines.get(name), k)) for name in ("bigram", "untrained")]
        accepted = percent(sum(kept) / int(k) if kept else None)
        rows.append([k, walked, accepted, fixed(length_at(own, k, "per_position")), *floors])
    head = [
        "draft tokens k",
        "acceptance length (walk)",
        "draft tokens accepted",
        "per position",
        "bigram",
        "untrained",
    ]
    return table(head, rows, ks.index(main) if main in ks else None) if rows else "<p class='empty'>no data yet</p>"


def position_chart(own: dict | None, ks: list[str]) -> str:
    """Share of drafts accepted up to each position, at the largest k."""
    kept = shares(own, ks[-1]) if ks else []
    columns = []
    for i, (share, before) in enumerate(zip(kept, [1, *kept], strict=False), 1):
        after = f", {percent(share / before)} of those with the one before" if i > 1 and before else ""
        columns.append(Column(str(i), [("c1", share, f"draft token {i}: {percent(share, 1)} of drafts{after}")]))
    return column_chart(columns, "draft position", "accepted share of drafts", percent, shares=True, high=1)


def loss_section(trains: list[dict], evals: list[dict], mark) -> str:
    raw = points(trains, "loss")
    series = [
        Series("training, each step", thin(raw), "c1", faint=True, dots=False),
        Series("training, smoothed", thin(smooth(raw)), "c1", dots=False),
        Series("held-out", points(evals, "loss"), "c6"),
    ]
    sentence = "Weighted sum of the draft steps' cross-entropy against the target; held-out should fall with training."
    chart = line_chart(series, "step", "loss (nats)", lambda v: fixed(v, 3), mark=mark)
    return section("Loss", sentence, legend(series[1:], lambda v: fixed(v, 3)), chart)


def acceptance_section(evals: list[dict], others: dict, ks: list[str], main: str, own: dict | None, mark) -> str:
    """Walk lengths over training; other runs at the main k only, since three lines a run would be a thicket."""
    shown = [k for k in ks if k in ("1", main, ks[-1])]
    series = [
        Series(f"k = {k}", [(e["step"], length_at(e, k)) for e in evals], spread(i, len(shown)))
        for i, k in enumerate(shown)
    ]
    rows = [["this run", plain(own["step"], 9), *(fixed(length_at(own, k)) for k in ks)]] if own else []
    for i, (name, lines) in enumerate(others.items()):
        theirs = by_step(lines, "eval")
        curve = [(e["step"], length_at(e, main)) for e in theirs]
        series.append(Series(f"{name}, k = {main}", curve, f"o{i % OVERLAYS}", dashed=True))
        best = max(theirs, key=lambda e: length_at(e, main) or 0, default=None)
        cells = [plain(best["step"], 9) if best else "–", *(fixed(length_at(best, k)) for k in ks)]
        rows.append([text_of(name), *cells])
    sentence = "Acceptance length on held-out text, counted as an engine walks, at each evaluation."
    body = [
        legend(series, fixed),
        line_chart(series, "step", "acceptance length (tokens per pass)", fixed, low=1, mark=mark),
    ]
    if others:
        body.append(f"<h3>Beside other runs</h3><p class='note'>Each at its best step by k = {main}.</p>")
        body.append(table(["run", "step", *(f"k = {k}" for k in ks)], rows, 0 if own else None))
    return section("Acceptance over training", sentence, *body)


def accuracy_section(evals: list[dict], mark) -> str:
    count = max((len(e.get("step_accuracy") or []) for e in evals), default=0)
    series = [Series(f"step {i + 1}", points(evals, "step_accuracy", i), spread(i, count)) for i in range(count)]
    sentence = (
        "Share of held-out positions where each draft step proposes the token that the target wrote, "
        "given the true tokens before it; later steps build on the draft's own states."
    )
    chart = line_chart(series, "step", "accuracy", lambda v: percent(v, 1), shares=True, low=0, mark=mark)
    return section("Accuracy of each draft step", sentence, legend(series, lambda v: percent(v, 1)), chart)


def optimizer_section(trains: list[dict]) -> str:
    charts = [
        line_chart([Series(label, thin(points(trains, name)), colour, dots=False)], "step", label, low=0, width=HALF)
        for name, label, colour in (("learning_rate", "learning rate", "c2"), ("grad_norm", "gradient norm", "c6"))
    ]
    sentence = "What the optimizer did; a gradient norm that keeps rising is the first sign of trouble."
    return section("Learning rate and gradient norm", sentence, f'<div class="pair">{"".join(charts)}</div>')


def where_section(own: dict | None, main: str) -> str:
    """Acceptance by part and by place, on one scale, where the evaluation has them."""
    by_part, by_place = [], []
    for part, lengths in ((own or {}).get("by_part") or {}).items():
        colour = part if part in PARTS[:3] else "c2"
        by_part.append(Column(part, [(colour, v, f"{part}, k = {k}: {fixed(v)}") for k, v in (lengths or {}).items()]))
    for place in (own or {}).get("by_place") or []:
        start, stop, length = plain(place.get("from"), 9), plain(place.get("to"), 9), place.get("length")
        hover = f"tokens {start} to {stop}: {fixed(length)} over {plain(place.get('starts'))} drafts"
        by_place.append(Column(start, [("c1", length, hover)]))
    values = [value for column in by_part + by_place for _, value, _ in column.bars if number(value) is not None]
    charts = "".join(
        column_chart(columns, name, "acceptance length", low=1, high=max(values, default=2), width=HALF)
        for columns, name in ((by_part, "part of the reply"), (by_place, "tokens into the reply, from"))
        if columns
    )
    sentence = f"Where in a reply the draft does well (k = {main}): thinking or answering, early or late."
    return section("Acceptance by part and place", sentence, f'<div class="pair">{charts}</div>') if charts else ""


def write_report(
    path: Path, facts: dict, metrics: list[dict], samples: list[dict], others: dict[str, list[dict]] | None = None
) -> None:
    """Write report.html. `metrics`: the lines of metrics.jsonl; `others`: those of runs to compare with, by name.

    The chosen checkpoint is facts["chosen_step"], or the last evaluated one where that is missing.
    """
    trains, evals = by_step(metrics, "train"), by_step(metrics, "eval")
    step = facts.get("chosen_step")
    if step is None and evals:
        step = evals[-1]["step"]
    own = next((e for e in evals if e["step"] == step), None)
    baselines = {name: value for name, value in (facts.get("baselines") or {}).items() if value}
    ks = ks_of(*evals, *baselines.values())
    main = HEADLINE_K if HEADLINE_K in ks or not ks else ks[-1]
    mark = (step, f"chosen, step {plain(step, 9)}") if own else None
    title = facts.get("title") or "EAGLE-3 draft"
    target = f"<p class='dim'>EAGLE-3 draft for {text_of(facts['target'])}</p>" if facts.get("target") else ""
    names = (("draft", "Draft"), ("data", "Data"), ("train", "Training"), ("environment", "Environment"))
    tables = "".join(facts_table(label, facts[name]) for name, label in names if facts.get(name))
    lengths = [n for n in facts.get("lengths") or [] if number(n) is not None]
    extent = f" Median {median(lengths):,.0f}, longest {max(lengths):,}." if lengths else ""
    body = [
        f"<header><h1>{text_of(title)}</h1>{target}</header>",
        headline(own, baselines, main, step),
        strip(trains, own),
        section("Acceptance length by k", ABOUT_TABLE, length_table(own, baselines, ks, main)),
        section(
            f"Accepted share by draft position{f', k = {ks[-1]}' if ks else ''}",
            ABOUT_POSITIONS,
            position_chart(own, ks),
        ),
        loss_section(trains, evals, mark),
        acceptance_section(evals, others or {}, ks, main, own, mark),
        accuracy_section(evals, mark),
        optimizer_section(trains),
        section("Length of the training samples", ABOUT_SAMPLES + extent, histogram(lengths, "tokens", "samples")),
        where_section(own, main),
        serving_slot(path),
        samples_section(samples),
        section("Facts", "What this run was made of.", f'<div class="facts">{tables}</div>') if tables else "",
    ]
    write_text(path, document(title, "".join(body)))
