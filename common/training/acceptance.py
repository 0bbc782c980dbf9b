"""Acceptance as an engine would count it, from what a draft got right at every position (chain drafting).

Row r of a reply is position i; right[s, r] says whether the draft's step s there proposes the true x_{i+2+s} after the
true x_{i+1} .. x_{i+1+s}. A wrong token ends acceptance, so these teacher-forced steps are exact (the
"training-time test" of the EAGLE-3 paper, arXiv 2503.01840).

    walk:          start at the first row; a = leading right steps, at most k; the next start is a + 1 further on.
                   length = mean of a + 1 over the starts: tokens per forward of the target, what an engine reports
    per position:  1 + mean over all rows of a; starts follow accepted runs, so this is not the same
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

PLACES = (0, 32, 64, 128, 256, 512, 1024, 4096, 16384)  # borders of the places in a reply, in tokens


@dataclass(frozen=True)
class ReplySteps:
    """What a draft got right along one reply: right bool [K, n] for n rows in a row; `closing` is the row whose
    proposal is the closing token (rows before it propose reasoning), n when there is none."""

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


def measure(replies: list[ReplySteps], main_k: int = 3) -> dict:
    """Acceptance over replies for every k up to the steps that were unrolled; the form of an `eval` metrics line.

    `main_k`: the k of the tables by part and by place.
    """
    steps = min((reply.right.shape[0] for reply in replies), default=0)
    walks = {k: WalkCounts(k) for k in range(1, steps + 1)}
    position_sums = dict.fromkeys(walks, 0)
    main_k = min(main_k, steps)
    parts = {"reasoning": WalkCounts(main_k), "content": WalkCounts(main_k)}
    places = [WalkCounts(main_k) for _ in PLACES]
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
                    parts["reasoning" if row <= reply.closing else "content"].add(accepted)
                    places[sum(row >= border for border in PLACES) - 1].add(accepted)
    borders = [*PLACES[1:], None]
    return {
        "step_accuracy": [round(x, 5) for x in (right_rows / max(rows, 1)).tolist()],
        "walk": {str(k): counts.as_dict() for k, counts in walks.items()},
        "per_position": {str(k): 1 + total / max(rows, 1) for k, total in position_sums.items()},
        "by_part": {name: {str(main_k): counts.length} for name, counts in parts.items()},
        "by_place": [
            {"from": start, "to": stop, "length": counts.length, "starts": counts.drafts}
            for start, stop, counts in zip(PLACES, borders, places, strict=True)
            if counts.drafts
        ],
    }


def accepted_rows(right: Tensor, k: int) -> list[bool]:
    """For each row of a reply, whether an engine would have accepted the token that row proposes at step 0 or that an
    earlier draft proposed for it; row r stands for token x_{i+2}."""
    marked = [False] * right.shape[1]
    for row, accepted in walk(accepted_lengths(right, k)):
        for offset in range(min(accepted, len(marked) - row)):
            marked[row + offset] = True
    return marked


class Bigram:
    """The floor that a draft must beat: for each token, the one that most often followed it in training."""

    def __init__(self, vocab_size: int, pairs: Iterator[tuple[Tensor, Tensor]]):
        previous, written = (torch.cat(side) for side in zip(*pairs, strict=True))
        codes, counts = torch.unique(previous * vocab_size + written, return_counts=True)
        self.best = torch.full((vocab_size,), -1, dtype=torch.int64)
        order = counts.argsort(stable=True)  # the most frequent pair of a token is written last and stays
        for code in codes[order].tolist():
            self.best[code // vocab_size] = code % vocab_size

    def steps(self, ids: Tensor, first: int, rows: int, steps: int) -> Tensor:
        """right bool [K, n] along a reply: ids int64 [T], `first` the position i of row 0."""
        right = torch.zeros(steps, rows, dtype=torch.bool)
        hits = self.best[ids[:-1]] == ids[1:]  # hits[j]: x_{j+1} is predicted by x_j
        for step in range(steps):
            of_step = hits[first + 1 + step : first + 1 + step + rows]
            right[step, : len(of_step)] = of_step
        return right
