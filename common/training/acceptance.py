"""Acceptance as an engine counts it, from whether each draft step was right at every position (chain drafting).

Row r of a reply is position i; right[s, r] says whether the draft's step s there proposes the true x_{i+2+s} after the
true x_{i+1} .. x_{i+1+s}. A wrong token ends acceptance, and up to it the engine's draft reads true tokens as well, so
these teacher-forced steps give the engine's count exactly.

    walk:          draft at the first row; a = leading right steps, at most k; draft again a + 1 rows further on.
                   length = mean of a + 1 over the drafts: tokens per forward of the target, as an engine reports it
    per position:  1 + mean of a over all rows; differs, since a walk drafts at few rows of an accepted run
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from common.draft.config import MAIN_K

REPLY_BORDERS = (0, 32, 64, 128, 256, 512, 1024, 4096, 16384)  # tokens into the reply: sections of a table


@dataclass(frozen=True)
class ReplySteps:
    """Which draft steps were right along one reply: right bool [K, n] for n neighbouring rows; `closing` is the row
    that proposes the token that closes the reasoning (rows before it propose reasoning), n without such a row."""

    right: Tensor
    closing: int = 0


def accepted_lengths(right: Tensor, k: int) -> list[int]:
    """Leading right steps, at most k, of each row of right [K, n]."""
    return right[:k].int().cumprod(0).sum(0).tolist()


def walk(lengths: list[int]) -> Iterator[tuple[int, int]]:
    """(row, accepted) of each draft that an engine would make along one reply."""
    row = 0
    while row < len(lengths):
        yield row, lengths[row]
        row += lengths[row] + 1


@dataclass
class WalkCounts:
    """Sums over walks with one k."""

    k: int
    drafts: int = 0
    accepted: list[int] = field(default_factory=list)  # per draft position

    def add(self, accepted: int) -> None:
        self.accepted = self.accepted or [0] * self.k
        self.drafts += 1
        for position in range(accepted):
            self.accepted[position] += 1

    @property
    def length(self) -> float | None:
        return 1 + sum(self.accepted) / self.drafts if self.drafts else None

    def as_dict(self) -> dict:
        return {"length": self.length, "drafts": self.drafts, "accepted": self.accepted or [0] * self.k}


def measure(replies: list[ReplySteps]) -> dict:
    """Acceptance over replies for every k up to the number of unrolled steps: facts of an `eval` metrics line.

    by_part (reasoning or content) and by_place (tokens into the reply) are walks with k = MAIN_K.
    """
    steps = min((reply.right.shape[0] for reply in replies), default=0)
    walks = {k: WalkCounts(k) for k in range(1, steps + 1)}
    position_sums = dict.fromkeys(walks, 0)
    main_k = min(MAIN_K, steps)
    by_text = {"reasoning": WalkCounts(main_k), "content": WalkCounts(main_k)}
    by_border = [WalkCounts(main_k) for _ in REPLY_BORDERS]
    rows, right_rows = 0, torch.zeros(steps)
    for reply in replies:
        rows += reply.right.shape[1]
        right_rows += reply.right[:steps].sum(1)
        for k, counts in walks.items():
            lengths = accepted_lengths(reply.right, k)
            position_sums[k] += sum(lengths)
            for row, accepted in walk(lengths):
                counts.add(accepted)
                if k == main_k:
                    by_text["reasoning" if row <= reply.closing else "content"].add(accepted)
                    by_border[sum(row >= border for border in REPLY_BORDERS) - 1].add(accepted)
    spans = zip(REPLY_BORDERS, [*REPLY_BORDERS[1:], None], by_border, strict=True)
    return {
        "step_accuracy": [round(x, 5) for x in (right_rows / max(rows, 1)).tolist()],
        "walk": {k: counts.as_dict() for k, counts in walks.items()},
        "per_position": {k: 1 + total / max(rows, 1) for k, total in position_sums.items()},
        "by_part": {name: {main_k: counts.length} for name, counts in by_text.items()},
        "by_place": [
            {"from": start, "to": stop, "length": counts.length, "starts": counts.drafts}
            for start, stop, counts in spans
            if counts.drafts
        ],
    }


def figures_from_json(figures):
    """Figures as `measure` returns them, keyed by the number k; in JSON, the keys are strings."""
    if not isinstance(figures, dict):
        return figures
    return {int(key) if key.isdigit() else key: figures_from_json(value) for key, value in figures.items()}


def accepted_rows(right: Tensor, k: int) -> list[bool]:
    """For each row r (token x_{i+2} of the reply), whether that token is an accepted draft token of the walk."""
    accepted_row = [False] * right.shape[1]
    for row, accepted in walk(accepted_lengths(right, k)):
        for offset in range(min(accepted, len(accepted_row) - row)):
            accepted_row[row + offset] = True
    return accepted_row


class Bigram:
    """The floor that a draft must beat: it proposes the token that most often followed the last one in training."""

    def __init__(self, vocab_size: int, pairs: Iterator[tuple[Tensor, Tensor]]):
        previous, written = (torch.cat(side) for side in zip(*pairs, strict=True))
        codes, counts = torch.unique(previous * vocab_size + written, return_counts=True)
        self.best = torch.full((vocab_size,), -1, dtype=torch.int64)
        order = counts.argsort(stable=True)  # the most frequent successor of a token is written last
        for code in codes[order].tolist():
            self.best[code // vocab_size] = code % vocab_size

    def steps(self, ids: Tensor, first: int, rows: int, steps: int) -> Tensor:
        """right bool [K, n] along a reply; ids: int64 [T], `first`: the position i of row 0."""
        right = torch.zeros(steps, rows, dtype=torch.bool)
        hits = self.best[ids[:-1]] == ids[1:]  # hits[j]: x_{j+1} is predicted by x_j
        for step in range(steps):
            step_hits = hits[first + 1 + step : first + 1 + step + rows]
            right[step, : len(step_hits)] = step_hits
        return right
