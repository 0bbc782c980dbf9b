"""What a vLLM server counted about its drafts: the text of its /metrics page, read and compared over time.

    vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 2390.0
    vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 894.0

A data-parallel server has a line for each engine: they are added up. Counters only grow, so two readings' difference
is what happened in between, whoever asked for it.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from common.pipeline.errors import UserError

PREFIX = "vllm:spec_decode_num_"
SAMPLE = re.compile(r"([a-zA-Z_:][\w:]*)\s*(?:\{(.*)\})?\s+(\S+)(?:\s+-?\d+)?\s*")
LABEL = re.compile(r'([a-zA-Z_]\w*)\s*=\s*"((?:[^"\\]|\\.)*)"')
ESCAPES = {r"\\": "\\", r"\"": '"', r"\n": "\n"}


@dataclass(frozen=True)
class DraftCounts:
    """Drafts made, tokens proposed and accepted, and accepted at each position."""

    drafts: int = 0
    proposed: int = 0
    accepted: int = 0
    per_position: tuple[int, ...] = ()

    @property
    def k(self) -> int:
        """Draft tokens a forward pass: a position has a counter from the start."""
        return len(self.per_position)

    def lengths(self) -> list[float]:
        """Acceptance length for 1, 2 .. k draft tokens; only the last is a count, the others cut the same drafts."""
        kept, lengths = 0, []
        for accepted in self.per_position:
            kept += accepted
            lengths.append(1 + kept / self.drafts if self.drafts else 1.0)
        return lengths

    def since(self, before: "DraftCounts") -> "DraftCounts":
        """What was counted after `before`; raises UserError when the server was restarted in between."""
        pairs = zip(self.per_position, before.per_position or (0,) * self.k, strict=True)
        change = DraftCounts(
            self.drafts - before.drafts,
            self.proposed - before.proposed,
            self.accepted - before.accepted,
            tuple(now - then for now, then in pairs),
        )
        if min(change.drafts, change.proposed, change.accepted, *change.per_position) < 0:
            raise UserError("the server's counters went back: it was restarted during the measurement; run it again")
        return change


def samples(text: str) -> Iterator[tuple[str, dict[str, str], float]]:
    """(name, labels, value) of each line of a metrics page; lines that are none are passed over."""
    for line in text.splitlines():
        match = None if line.startswith("#") else SAMPLE.fullmatch(line)
        if not match:
            continue
        labels = {name: re.sub(r"\\.", _unescape, value) for name, value in LABEL.findall(match[2] or "")}
        try:
            yield match[1], labels, float(match[3])
        except ValueError:
            continue


def _unescape(match: re.Match) -> str:
    return ESCAPES.get(match[0], match[0])


def draft_counts(text: str, model: str = "") -> DraftCounts | None:
    """The draft counters of a metrics page, all engines together; None where there are none: it does not draft.

    `model`: only the lines of this model, where they name one. Newer clients end a counter's name in `_total`.
    """
    sums: dict[str, float] = {}
    positions: dict[int, float] = {}
    for name, labels, value in samples(text):
        if not name.startswith(PREFIX) or name.endswith("_created"):
            continue
        if model and labels.get("model_name", model) != model:
            continue
        kind = name.removeprefix(PREFIX).removesuffix("_total")
        if kind != "accepted_tokens_per_pos":
            sums[kind] = sums.get(kind, 0) + value
        elif labels.get("position", "").isdigit():
            positions[int(labels["position"])] = positions.get(int(labels["position"]), 0) + value
    if "drafts" not in sums:
        return None
    per_position = tuple(int(positions.get(at, 0)) for at in range(max(positions, default=-1) + 1))
    proposed, accepted = int(sums.get("draft_tokens", 0)), int(sums.get("accepted_tokens", 0))
    return DraftCounts(int(sums["drafts"]), proposed, accepted, per_position)
