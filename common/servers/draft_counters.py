"""The counters of a vLLM server about its drafts, read from its /metrics page and compared over time.

    vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 2390.0
    vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 894.0

A data-parallel server has one line per engine; they are summed. Counters only grow, so the difference of two readings
covers every request in between, from whichever client.
"""

from collections import Counter
from dataclasses import dataclass
from itertools import accumulate, zip_longest

from prometheus_client.parser import text_string_to_metric_families

from common.pipeline.errors import UserError

PREFIX = "vllm:spec_decode_num_"


@dataclass(frozen=True)
class DraftCounts:
    """Counts of drafts, of draft tokens proposed and accepted, and of those accepted at each position of a draft."""

    drafts: int = 0
    proposed: int = 0
    accepted: int = 0
    accepted_per_position: tuple[int, ...] = ()

    @property
    def k(self) -> int:
        """Draft tokens per draft: the server has a counter for each position from its start."""
        return len(self.accepted_per_position)

    def lengths(self) -> list[float]:
        """Acceptance lengths for 1, 2 .. k draft tokens: the last is measured, the others follow from cutting the same
        drafts short."""
        return [1 + total / max(self.drafts, 1) for total in accumulate(self.accepted_per_position)]

    def since(self, before: "DraftCounts") -> "DraftCounts":
        """What was counted after `before`; raises UserError when the server was restarted in between."""
        now, then = ((c.drafts, c.proposed, c.accepted, *c.accepted_per_position) for c in (self, before))
        drafts, proposed, accepted, *each = changes = [new - old for new, old in zip_longest(now, then, fillvalue=0)]
        if min(changes) < 0:
            raise UserError("the server's counters went back: it was restarted during the measurement; run it again")
        return DraftCounts(drafts, proposed, accepted, tuple(each))


def draft_counts(page: str, model: str = "") -> DraftCounts | None:
    """The draft counters of a metrics page, summed over the server's engines; None for a server that does not draft.

    `model`: leave out the lines that name another model. Raises ValueError for a page that is not in the Prometheus
    text format.
    """
    sums: Counter[str] = Counter()
    positions: Counter[int] = Counter()
    for sample in (s for family in text_string_to_metric_families(page) for s in family.samples):
        counter = sample.name.removeprefix(PREFIX).removesuffix("_total")  # clients of Prometheus differ in the suffix
        if not sample.name.startswith(PREFIX) or (model and sample.labels.get("model_name", model) != model):
            continue
        if counter == "accepted_tokens_per_pos":
            positions[int(sample.labels.get("position", ""))] += int(sample.value)
        else:
            sums[counter] += int(sample.value)
    if "drafts" not in sums:
        return None
    each = tuple(positions[at] for at in sorted(positions))
    return DraftCounts(sums["drafts"], sums["draft_tokens"], sums["accepted_tokens"], each)
