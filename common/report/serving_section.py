"""The report's section on a running server: what `04 --serve-eval` measured, kept in serve_eval.json beside it."""

import re
from pathlib import Path

from common.pipeline.files import read_json, write_text
from common.report.page import section, table, text_of
from common.report.plots import fixed, number, percent, plain

RESULT = "serve_eval.json"
BEGIN, END = "<!--serving-->", "<!--/serving-->"  # the section can be put in, or replaced, without the run's data


def serving_slot(report: Path) -> str:
    """The section between its marks; empty between them where nothing was measured."""
    result = report.with_name(RESULT)
    return f"{BEGIN}{serving_section(read_json(result)) if result.is_file() else ''}{END}"


def refresh(report: Path) -> bool:
    """Put the section of serve_eval.json into a report that is there; False where there is none with the marks."""
    if not report.is_file():
        return False
    text = report.read_text("utf-8")
    new, count = re.subn(f"{BEGIN}.*?{END}", lambda _: serving_slot(report), text, count=1, flags=re.DOTALL)
    if count:
        write_text(report, new)
    return bool(count)


def serving_section(facts: dict) -> str:
    """Acceptance by k as the server counted it, and tokens/s with and without the draft."""
    own, other = facts["with_draft"], facts.get("without_draft")
    drafts = number(own.get("drafts")) or 0
    rows = [
        [
            str(k),
            fixed(own["length_cut_at"].get(str(k))),
            percent(accepted / drafts if drafts else None),
            plain(accepted),
        ]
        for k, accepted in enumerate(own["accepted_per_position"], 1)
    ]
    head = ["draft token", "acceptance length up to it", "accepted share of drafts", "accepted"]
    speeds = [["with the draft", *_speed(own), fixed(facts.get("speed_up"))]]
    speeds += [["without", *_speed(other), "1"]] if other else []
    same, text = facts.get("identical"), ""
    if same:
        text = f" {same['equal']:,} of {same['of']:,} greedy replies are the same with and without the draft"
        text += "." if same["equal"] == same["of"] else "; rounding, which depends on the batch, decides near ties."
    sampled = f"temperature {facts['temperature']:g}" if facts["temperature"] else "greedy"
    sentence = (
        f"{text_of(facts['server'])}, {text_of(facts['model'])}: {plain(own['questions'])} questions, {sampled}, "
        f"{plain(facts['concurrency'])} at a time, {plain(drafts)} drafts of {own['k']} tokens. The server's own "
        f"counters: acceptance length {fixed(own['length'])}. Shorter drafts start more often, so that the lengths "
        f"before the last row are what these drafts would have given, cut.{text}"
    )
    return section(
        "On a running server",
        sentence,
        table(head, rows, len(rows) - 1 if rows else None),
        table(["", "tokens/s", "tokens", "seconds", "speed-up"], speeds),
    )


def _speed(facts: dict) -> list[str]:
    return [fixed(facts["tokens_s"], 1), plain(facts["tokens"]), fixed(facts["seconds"], 1)]
