"""Held-out acceptance of a draft, and of the bigram floor, in the form of an `eval` metrics line."""

from dataclasses import dataclass

import torch
from torch import Tensor

from common.dataset.index import HELD_OUT, TRAIN
from common.dataset.packs import Pack, Packs
from common.draft.unrolled_step import UnrolledStep
from common.target.protocol import Protocol
from common.target.sample_view import token_sections
from common.training.acceptance import Bigram, ReplySteps, accepted_rows, measure
from common.training.ranks import Ranks, gathered

DRAFT_COST = 0.05  # time of a draft step relative to one forward of the target


@dataclass
class HeldOut:
    """Held-out packs, read from the mapped shards at each evaluation: of a large run, they would not fit in memory."""

    packs: Packs
    plan: list[list[int]]
    opening_id: int | None
    closing_id: int | None

    @classmethod
    def of(cls, packs: Packs, opening_id: int | None, closing_id: int | None) -> "HeldOut":
        return cls(packs, packs.plan(HELD_OUT, None), opening_id, closing_id)

    def replies(self, pack: Pack, right: Tensor, positions: Tensor) -> list[ReplySteps]:
        """right [K, P] of a pack, cut into its documents' runs."""
        document = torch.searchsorted(pack.offsets[1:], positions, right=True)
        breaks = torch.nonzero((positions.diff() != 1) | (document.diff() != 0)).flatten() + 1
        spans = torch.tensor_split(torch.arange(len(positions)), breaks.tolist())
        return [ReplySteps(right[:, span], self._closing(pack, positions[span])) for span in spans if len(span)]

    def _closing(self, pack: Pack, positions: Tensor) -> int:
        """The row that proposes the closing token; without one, all rows are reasoning where it was opened."""
        at = torch.nonzero(pack.input_ids[positions + 2] == self.closing_id).flatten() if self.closing_id else []
        if len(at):
            return int(at[0])
        border = pack.input_ids[positions[0] : positions[0] + 2].tolist()
        return len(positions) if self.opening_id in border else -1


@torch.no_grad()
def evaluate(step: UnrolledStep, held_out: HeldOut, ranks: Ranks, steps: int) -> tuple[dict, list[list[ReplySteps]]]:
    """(an `eval` metrics line, the steps of each pack's replies): walk and per-position acceptance on held-out data.

    `steps`: draft steps that are unrolled, whatever the number in training; the loss is that of the trained ones.
    The packs are shared out to the ranks.
    """
    replies, outside, agreed = [], 0, torch.zeros(steps, dtype=torch.int64)
    sums, counts = torch.zeros(steps, dtype=torch.float64), torch.zeros(steps, dtype=torch.int64)
    known = step.known.cpu()
    trained, step.steps = step.steps, steps
    try:
        with gathered(step):
            for pack in held_out.packs.ahead(ranks.share(held_out.plan)):
                result = step(pack.to(ranks.device))
                sums, counts = sums + result.loss_sums.double().cpu(), counts + result.counts.cpu()
                positions = result.positions.cpu()
                outside += int((~known[pack.input_ids[positions + 2]]).sum())
                agreed += result.right_argmax.long().cumprod(0).sum(1).cumsum(0).cpu()
                replies.append(held_out.replies(pack, result.right_token.cpu(), positions))
    finally:
        step.steps = trained
    replies, sums = ranks.collect(replies), ranks.sum(sums)
    counts, agreed, outside = (ranks.sum(x) for x in (counts, agreed, torch.tensor(outside)))
    weights = step.loss_weights(min(trained, steps))
    facts = measure([reply for pack_replies in replies for reply in pack_replies])
    facts["loss"] = float((weights * (sums / counts.clamp_min(1))[: len(weights)]).sum())
    # against the target's own first choice, which greedy replies consist of; sampled ones also hold other tokens
    totals = zip(facts["walk"], agreed.tolist(), strict=False)  # no walk without replies
    facts["per_position_argmax"] = {k: 1 + total / max(int(counts[0]), 1) for k, total in totals}
    facts["speed_up"] = speed_ups(facts["walk"])
    facts["outside_vocab"] = int(outside) / max(int(counts[0]), 1)
    return facts, replies


def speed_ups(walk: dict[str, dict], draft_cost: float = DRAFT_COST) -> dict[str, float | None]:
    """Tokens a second with a draft over without one, for each k.

    A round is k steps of the draft and one forward of the target, which takes as long for k + 1 tokens as for one:
    true while the target's time goes into reading its weights, so for small batches.
    """
    return {k: counts["length"] / (1 + int(k) * draft_cost) if counts["length"] else None for k, counts in walk.items()}


def bigram_floor(packs: Packs, held_out: HeldOut, vocab_size: int, steps: int) -> dict:
    """The held-out acceptance of a bigram table built from the same training tokens."""
    bigram = Bigram(vocab_size, packs.token_pairs(TRAIN))
    replies = []
    for pack in held_out.packs.ahead(held_out.plan):
        positions = pack.loss_positions.positions
        ends = pack.offsets[1:][torch.searchsorted(pack.offsets[1:], positions, right=True)]
        right = bigram.steps(pack.input_ids, 0, len(pack.input_ids), steps)[:, positions]
        inside = positions + 2 + torch.arange(steps)[:, None] < ends
        replies += held_out.replies(pack, right & inside, positions)
    return measure(replies)


def sample_views(
    held_out: HeldOut, replies: list[list[ReplySteps]], protocol: Protocol, k: int, count: int
) -> list[dict]:
    """The first `count` held-out samples for the report: each token's text, part, mask, and whether a draft gave it."""
    views = []
    for rows, pack_replies in zip(held_out.plan, replies, strict=True):
        pack = held_out.packs.load(rows)
        positions = pack.loss_positions.positions
        for number, reply in enumerate(pack_replies):
            if len(views) == count:
                return views
            first = int(positions[sum(r.right.shape[1] for r in pack_replies[:number])])
            document = int(torch.searchsorted(pack.offsets[1:], first, right=True))
            start, stop = pack.offsets[document : document + 2].tolist()
            accepted = {first + 2 + row: hit for row, hit in enumerate(accepted_rows(reply.right, k))}
            ids, mask = pack.input_ids[start:stop].tolist(), pack.loss_mask[start:stop].int().tolist()
            tokens = [
                {"text": protocol.decode([id]), "id": id, "mask": m, "part": part}
                | {"accepted": int(accepted.get(at, 0)) if m else None}  # nobody drafts what the prompt says
                for at, id, m, part in zip(
                    range(start, stop), ids, mask, token_sections(ids, mask, protocol), strict=True
                )
            ]
            views.append({"id": pack.ids[document], "tokens": tokens})
    return views
