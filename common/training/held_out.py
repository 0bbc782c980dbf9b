"""Acceptance on held-out replies, of a draft and of a bigram table, as facts of an `eval` metrics line."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from common.dataset.index import TRAIN
from common.dataset.packs import Pack, Packs
from common.draft.unrolled_step import UnrolledStep
from common.target.protocol import Protocol
from common.target.sample_view import token_sections
from common.training.acceptance import Bigram, ReplySteps, accepted_rows, measure
from common.training.ranks import Ranks, unsharded

DRAFT_COST = 0.05  # time of a draft step relative to one forward of the target


@dataclass
class HeldOut:
    """Held-out packs, read from the shards at each evaluation, since those of a large run would not fit in memory."""

    packs: Packs
    schedule: list[list[int]]  # the index rows of each pack
    think_open: int | None  # token ids
    think_close: int | None

    def replies(self, pack: Pack, right: Tensor, positions: Tensor) -> list[ReplySteps]:
        """right [K, P] of a pack, split into runs of neighbouring positions of one document."""
        document = torch.searchsorted(pack.offsets[1:], positions, right=True)
        breaks = torch.nonzero((positions.diff() != 1) | (document.diff() != 0)).flatten() + 1
        spans = torch.tensor_split(torch.arange(len(positions)), breaks.tolist())
        return [ReplySteps(right[:, span], self._closing(pack, positions[span])) for span in spans if len(span)]

    def _closing(self, pack: Pack, positions: Tensor) -> int:
        """The row that proposes the closing token. Without such a row: all rows are reasoning if it was opened."""
        rows = torch.nonzero(pack.input_ids[positions + 2] == self.think_close).flatten() if self.think_close else []
        if len(rows):
            return int(rows[0])
        border = pack.input_ids[positions[0] : positions[0] + 2].tolist()
        return len(positions) if self.think_open in border else -1


@torch.no_grad()
def evaluate(step: UnrolledStep, held_out: HeldOut, ranks: Ranks, steps: int) -> tuple[dict, list[list[ReplySteps]]]:
    """(facts of an `eval` metrics line, the replies of each pack) on held-out data, by walk and per position.

    `steps`: draft steps to unroll, which may be more or fewer than in training; the loss covers the smaller number.
    Each rank evaluates its share of the packs.
    """
    replies, outside, agreed = [], 0, torch.zeros(steps, dtype=torch.int64)
    sums, counts = torch.zeros(steps, dtype=torch.float64), torch.zeros(steps, dtype=torch.int64)
    in_draft_vocab = step.in_draft_vocab.cpu()
    with unsharded(step):
        for pack in held_out.packs.prefetch(ranks.share(held_out.schedule)):
            result = step(pack.to(ranks.device), steps=steps)
            sums, counts = sums + result.loss_sums.double().cpu(), counts + result.counts.cpu()
            positions = pack.loss_positions.positions
            outside += int((~in_draft_vocab[pack.input_ids[positions + 2]]).sum())
            agreed += result.right_argmax.long().cumprod(0).sum(1).cumsum(0).cpu()
            replies.append(held_out.replies(pack, result.right_token.cpu(), positions))
    replies, sums = ranks.collect(replies), ranks.sum(sums)
    counts, agreed, outside = (ranks.sum(x) for x in (counts, agreed, torch.tensor(outside)))
    weights = step.loss_weights(min(step.steps, steps))
    facts = measure([reply for pack_replies in replies for reply in pack_replies])
    facts["loss"] = float((weights * (sums / counts.clamp_min(1))[: len(weights)]).sum())
    # Agreement with the target's most probable token, which a sampled reply does not always follow.
    totals = zip(facts["walk"], agreed.tolist(), strict=False)  # without replies there is no walk
    facts["per_position_argmax"] = {k: 1 + total / max(int(counts[0]), 1) for k, total in totals}
    facts["speed_up"] = speed_ups(facts["walk"])
    facts["outside_vocab"] = int(outside) / max(int(counts[0]), 1)
    return facts, replies


def speed_ups(walk: dict[int, dict], draft_cost: float = DRAFT_COST) -> dict[int, float | None]:
    """Tokens a second with a draft relative to without one, for each k; None where nothing was measured.

    Assumes that the target takes as long for k + 1 tokens as for one, which holds for small batches, where its time
    goes into reading weights: k steps of the draft and one forward of the target give `length` tokens.
    """
    return {k: counts["length"] / (1 + k * draft_cost) if counts["length"] else None for k, counts in walk.items()}


def acceptance_rows(figures: dict, baselines: dict, k: int, step: int) -> list[tuple[str, str]]:
    """The summary of an evaluation; a dash where nothing is held out."""
    walk = {n: counts for n, counts in figures["walk"].items() if counts["length"]}
    main = walk.get(k, {"length": None, "drafts": 0, "accepted": []})
    floors = {name: facts["walk"].get(k, {}).get("length") for name, facts in baselines.items()}
    every, agreed = (figures[name].get(k) if walk else None for name in ("per_position", "per_position_argmax"))
    speeds = "  ".join(f"{n}: {figures['speed_up'][n]:.2f}x" for n in walk) or "-"
    return [
        (f"acceptance length, k={k}", f"{_shown(main['length'])} at step {step}, on held-out replies"),
        ("untrained draft", _shown(floors.get("untrained"))),
        ("bigram floor", _shown(floors.get("bigram"))),
        ("k = 1..", "  ".join(f"{n}: {counts['length']:.3f}" for n, counts in walk.items()) or "-"),
        ("per position", f"{_shown(every)}, {_shown(agreed)} against the target's first choice"),
        ("accepted by position", "  ".join(f"{n / main['drafts']:.0%}" for n in main["accepted"]) or "-"),
        ("estimated speed-up", f"{speeds}  (a draft step costs {DRAFT_COST:g} of a forward)"),
    ]


def _shown(length: float | None) -> str:
    return "-" if length is None else f"{length:.3f}"


def bigram_floor(packs: Packs, held_out: HeldOut, vocab_size: int, steps: int) -> dict:
    """The held-out acceptance of a bigram table built from the same training tokens."""
    bigram = Bigram(vocab_size, packs.token_pairs(TRAIN))
    replies = []
    for pack in held_out.packs.prefetch(held_out.schedule):
        positions = pack.loss_positions.positions
        ends = pack.offsets[1:][torch.searchsorted(pack.offsets[1:], positions, right=True)]
        right = bigram.steps(pack.input_ids, steps)[:, positions]
        inside = positions + 2 + torch.arange(steps)[:, None] < ends
        replies += held_out.replies(pack, right & inside, positions)
    return measure(replies)


def sample_views(held_out: HeldOut, replies: list[list[ReplySteps]], protocol: Protocol, k: int) -> Iterator[dict]:
    """Held-out samples for the report: of each token the text, the section of the chat that it belongs to, the mask,
    and whether a walk with `k` accepts it as a draft token."""
    for rows, pack_replies in zip(held_out.schedule, replies, strict=True):
        pack, row = held_out.packs.load(rows), 0
        for reply in pack_replies:
            first = int(pack.loss_positions.positions[row])
            row += reply.right.shape[1]
            document = int(torch.searchsorted(pack.offsets[1:], first, right=True))
            start, stop = pack.offsets[document : document + 2].tolist()
            accepted = {first + 2 + i: hit for i, hit in enumerate(accepted_rows(reply.right, k))}
            ids, mask = pack.input_ids[start:stop].tolist(), pack.loss_mask[start:stop].int().tolist()
            tokens = [
                {"text": protocol.decode([id]), "id": id, "mask": m, "part": section}
                | {"accepted": int(accepted.get(at, 0)) if m else None}  # prompt tokens are not drafted
                for at, id, m, section in zip(
                    range(start, stop), ids, mask, token_sections(ids, mask, protocol), strict=True
                )
            ]
            yield {"id": pack.ids[document], "tokens": tokens}
