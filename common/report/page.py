"""The pieces of the report's page: style, escaping, sections, legends, tables, and a token stream as flowing text.

Nothing is fetched: no script, no font, no picture; the page's own content policy forbids them, so that text from a data
set cannot fetch anything either.
"""

from collections.abc import Callable
from html import escape

from common.report.plots import RAMP, Series, number, plain

SHOWN_TOKENS = 3000  # of each sample
PARTS = ("prompt", "reasoning", "content", "control")
OVERLAYS = 4  # colours o0 .. o3 for other runs
POLICY = "default-src 'none'; style-src 'unsafe-inline'"

STYLE = """
:root{--page:#fbfbf9;--card:#fff;--ink:#1d2125;--dim:#656d76;--line:#e3e3de;--grid:#ededea;--good:#15803d;
--c0:#2b3a9e;--c1:#2563c9;--c2:#1c86c2;--c3:#128f8c;--c4:#3a9a54;--c5:#8f9a22;--c6:#cc7a12;
--o0:#b0307a;--o1:#7a5230;--o2:#6b7280;--o3:#c2410c;
--prompt:#eceef1;--reasoning:#f8ecd4;--content:#dfebfd;--prompt-bar:#9aa3ad;--reasoning-bar:#d99a2b;--content-bar:#3b7ddd}
@media screen and (prefers-color-scheme:dark){:root{color-scheme:dark;
--page:#14171a;--card:#1b1f23;--ink:#e4e7ea;--dim:#9aa4ae;--line:#30363c;--grid:#272c31;--good:#4ade80;
--c0:#93a4ff;--c1:#6aa9ff;--c2:#4bc0ea;--c3:#3fcfc0;--c4:#73d78c;--c5:#c3cf5a;--c6:#f2b457;
--o0:#f28bc4;--o1:#d0a379;--o2:#a8b0ba;--o3:#fb8a5c;
--prompt:#2a3037;--reasoning:#40341d;--content:#1d3353;--prompt-bar:#77818c;--reasoning-bar:#d9a441;--content-bar:#5b9bf5}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);font:16px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,
"Noto Sans","DejaVu Sans",sans-serif;-webkit-print-color-adjust:exact;print-color-adjust:exact}
main{max-width:960px;margin:0 auto;padding:56px 24px 80px}
h1{font-size:30px;line-height:1.2;margin:0 0 4px;letter-spacing:-.01em;overflow-wrap:anywhere}
h2{font-size:20px;margin:0 0 4px}h3{font-size:15px;margin:24px 0 4px}
section{margin-top:60px}p{margin:0 0 16px;max-width:76ch}.dim,.note{color:var(--dim)}.note{font-size:14px}
.hero{display:grid;grid-template-columns:auto 1fr;gap:16px 48px;align-items:center;margin-top:36px;padding:32px;
background:var(--card);border:1px solid var(--line);border-radius:12px}
.big{font-size:76px;line-height:1;font-weight:650;letter-spacing:-.03em;font-variant-numeric:tabular-nums}
.hero p{margin:8px 0 0;max-width:30ch}.hero .note{grid-column:1/-1;max-width:none;margin:0}
.bars{display:grid;grid-template-columns:auto 1fr auto;gap:10px 14px;align-items:center;font-size:15px}
.bars b{font-variant-numeric:tabular-nums;text-align:right}
.track{height:16px;background:var(--grid);border-radius:4px}
.track i{display:block;height:100%;min-width:2px;border-radius:4px;background:var(--dim)}
.track .own{background:var(--c1)}
.scale{display:flex;justify-content:space-between;gap:24px;font-size:12.5px;color:var(--dim)}
.strip{display:flex;flex-wrap:wrap;gap:12px 44px;margin:28px 0 0}.strip div{font-size:13px;color:var(--dim)}
.strip b{display:block;font-size:18px;color:var(--ink);font-weight:600;font-variant-numeric:tabular-nums}
.scroll{overflow-x:auto}table{border-collapse:collapse;width:100%;font-size:15px;font-variant-numeric:tabular-nums}
th,td{padding:7px 12px;border-bottom:1px solid var(--line);text-align:right;vertical-align:top}
th{font-weight:600;font-size:13px;color:var(--dim);vertical-align:bottom}
th:first-child,td:first-child{text-align:left;padding-left:10px}
tr.main td{font-weight:650;background:var(--content)}
small{color:var(--dim);font-weight:400}
.facts{display:grid;grid-template-columns:1fr 1fr;gap:0 48px}.facts table{font-size:14px;font-variant-numeric:normal}
.facts td{text-align:left;padding:5px 0;overflow-wrap:anywhere}.facts td:first-child{color:var(--dim);width:42%;
padding-right:12px}
.pair{display:grid;grid-template-columns:1fr 1fr;gap:24px 32px}
svg{display:block;width:100%;height:auto;overflow:visible}svg text{font-size:12px;fill:var(--dim)}
svg .name{font-weight:600}svg .end{text-anchor:end}svg .middle{text-anchor:middle}svg .value{fill:var(--ink)}
.grid{stroke:var(--grid)}.axis{stroke:var(--line)}.mark{stroke:var(--dim);stroke-dasharray:2 4}
.line{fill:none;stroke-width:2;stroke-linejoin:round;stroke-linecap:round}.line.faint{opacity:.3;stroke-width:1}
.line.dashed{stroke-dasharray:6 5}.band rect{fill:transparent}.band line{stroke:var(--dim);opacity:0}
.band:hover line{opacity:.7}
.empty{display:grid;place-items:center;min-height:120px;max-width:none;margin:0;padding:12px;color:var(--dim);
border:1px dashed var(--line);border-radius:8px;font-size:14px}.empty span{font-size:12px;font-weight:600}
.key{display:flex;flex-wrap:wrap;gap:4px 20px;font-size:13px;margin:0 0 10px;max-width:none;color:var(--dim)}
.key i{display:inline-block;width:18px;height:0;border-top:3px solid;vertical-align:middle;margin-right:7px}
.key i.dashed{border-top-style:dashed}.key b{color:var(--ink);font-variant-numeric:tabular-nums}
.text{font-size:15px;line-height:1.75;white-space:pre-wrap;overflow-wrap:anywhere;unicode-bidi:isolate;max-width:none;
max-height:440px;overflow:auto;background:var(--card);border:1px solid var(--line);border-radius:8px;padding:18px 22px}
.t{padding:2px 0}.t.prompt{background:var(--prompt)}.t.reasoning{background:var(--reasoning)}
.t.content{background:var(--content)}.t.hit{border-bottom:2px solid var(--good)}.t u{text-decoration:none;opacity:.45}
.t.control{font:12px ui-monospace,"DejaVu Sans Mono",monospace;border:1px solid var(--dim);border-radius:5px;
padding:1px 5px;margin:0 3px;color:var(--dim)}.t.control.hit{border-bottom:2px solid var(--good)}
.key .t{color:var(--ink);padding:1px 6px}
@media(max-width:720px){.hero,.pair,.facts{grid-template-columns:1fr}.big{font-size:60px}}
@page{margin:14mm}
@media print{body{background:none;font-size:13px}main{padding:0;max-width:none}section{margin-top:32px}
.hero,svg,.scroll,.key,.strip,.facts>div{break-inside:avoid}.scroll td{padding:4px 12px}.strip{gap:8px 28px}
h2,h3,h2+p,.key{break-after:avoid}.text{max-height:none}}
"""
COLOURS = [f"c{i}" for i in range(RAMP)] + [f"o{i}" for i in range(OVERLAYS)]
STYLE += "".join(f".line.{c}{{stroke:var(--{c})}}.fill.{c}{{fill:var(--{c})}}" for c in COLOURS)
STYLE += "".join(f".fill.{part}{{fill:var(--{part}-bar)}}" for part in PARTS[:3])


def text_of(value) -> str:
    """Any text as HTML: escaped, control characters made visible."""
    return escape("".join(chr(0x2400 + ord(c)) if ord(c) < 32 and c not in "\n\t" else c for c in str(value)))


def section(title: str, sentence: str, *body: str) -> str:
    return f"<section><h2>{title}</h2><p class='dim'>{sentence}</p>{''.join(body)}</section>"


def legend(series: list[Series], show: Callable[[float], str] = plain) -> str:
    """One entry a line, with its last value."""
    items = []
    for s in series:
        values = [y for _, y in s.points if number(y) is not None]
        last = f" <b>{show(values[-1])}</b>" if values else ""
        style = f' style="border-color:var(--{s.colour})"'
        items.append(f"<span><i{' class=dashed' * s.dashed}{style}></i>{text_of(s.name)}{last}</span>")
    return f'<p class="key">{"".join(items)}</p>'


def table(head: list[str], rows: list[list[str]], main: int | None = None) -> str:
    """A table of ready HTML cells; row `main` stands out."""
    lines = "".join(
        f"<tr{' class=main' if i == main else ''}>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>"
        for i, row in enumerate(rows)
    )
    head = "".join(f"<th>{cell}</th>" for cell in head)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table></div>'


def document(title: str, body: str) -> str:
    """The whole page."""
    head = (
        f'<meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        f'<meta name="viewport" content="width=device-width,initial-scale=1"><title>{text_of(title)}</title>'
    )
    page = f'<html lang="en"><head>{head}<style>{STYLE}</style></head><body><main>{body}</main></body></html>'
    return f"<!doctype html>\n{page}\n".encode("utf-8", "replace").decode()  # lone surrogates become "?"


def fact(value) -> str:
    """A setting's value as HTML: nested dicts and lists in one line."""
    if isinstance(value, dict):
        return " · ".join(f"{text_of(name)} {fact(inner)}" for name, inner in value.items()) or "–"
    if isinstance(value, list | tuple):
        return ", ".join(fact(inner) for inner in value) or "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return plain(value, 4)
    if isinstance(value, int):
        return f"{value:,}" if abs(value) >= 10_000 else str(value)
    return "–" if value is None else text_of(value)


def facts_table(title: str, facts: dict) -> str:
    rows = "".join(f"<tr><td>{text_of(k).replace('_', ' ')}</td><td>{fact(v)}</td></tr>" for k, v in facts.items())
    return f"<div><h3>{text_of(title)}</h3><table><tbody>{rows}</tbody></table></div>"


def token(entry: dict) -> str:
    """One token of a sample; its id, and whether it was trained on and drafted, in the hover text."""
    part = entry.get("part") if entry.get("part") in PARTS else "content"
    hit = (number(entry.get("accepted")) or 0) > 0
    notes = [f"id {entry.get('id')}", part]
    notes += ["drafted and accepted"] if hit else []
    notes += [] if entry.get("mask", 1) else ["not trained on"]
    text = text_of(entry.get("text") or "▫").replace("\n", "<u>↵</u><br>")
    return f'<span class="t {part}{" hit" * hit}" title="{text_of(", ".join(notes))}">{text}</span>'


def sample_text(sample: dict) -> str:
    """A token stream as people read it, under its id and the share of written tokens that came from the draft."""
    tokens = sample.get("tokens") or []
    judged = [t["accepted"] for t in tokens if number(t.get("accepted")) is not None]
    count = f"{len(tokens):,} tokens"
    if judged:
        hits = sum(1 for accepted in judged if accepted > 0)
        count += f", {hits:,} of {len(judged):,} written ones drafted and accepted ({100 * hits / len(judged):.0f}%)"
    rest = len(tokens) - SHOWN_TOKENS
    more = f"<p class='note'>… and {rest:,} more tokens</p>" if rest > 0 else ""
    flow = "".join(token(entry) for entry in tokens[:SHOWN_TOKENS])
    name = f"<h3>{text_of(sample.get('id', '–'))} <small>{count}</small></h3>"
    return f'{name}<div class="text" dir="auto">{flow}</div>{more}'


def samples_section(samples: list[dict]) -> str:
    key = "".join(f'<span><span class="t {part}">{part}</span></span>' for part in PARTS)
    key += '<span><span class="t hit">drafted and accepted</span></span>'
    texts = [sample_text(sample) for sample in samples] or ["<p class='empty'>no data yet</p>"]
    sentence = "Held-out text as the target wrote it; an engine would have taken the underlined tokens from the draft."
    return section("Samples", sentence, f'<p class="key">{key}</p>', *texts)
