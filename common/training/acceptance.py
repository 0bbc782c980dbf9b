"""Acceptance as an engine counts it, from whether each draft step was right at every position (chain drafting).

Row r of a reply is position i; right[s, r] says whether the draft's step s there proposes the true x_{i+2+s} after the
true x_{i+1} .. x_{i+1+s}. A wrong token ends acceptance, and up to it the engine's draft reads true tokens as well, so
these teacher-forced steps give the engine's count exactly.

    walk:          draft at the first row; a = leading right steps, at most k; draft again a + 1 rows further on.
                   length = mean of a + 1 over the drafts: tokens per forward of the target, as an engine reports it
    per position:  1 + mean of a over all rows; differs, since a walk drafts at few rows of an accepted run
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from common.draft.config import MAIN_K

REPLY_BORDERS = (0, 32, 64, 128, 256, 512, 1024, 4096, 16384)  # tokens into the reply: sections of a table


@dataclass(frozen=True)
class ReplySteps:
    """Which draft steps were right along one reply: right bool [K, n] for n neighbouring rows. Rows up to `closing`,
    which proposes the token that closes the reasoning, propose reasoning; without that row it is n or -1."""

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


def mean_length(drafts: Counter[int]) -> float | None:
    """Acceptance length of walks, from how many of their drafts had 0, 1, 2 ... accepted tokens."""
    return 1 + sum(a * n for a, n in drafts.items()) / drafts.total() if drafts else None


def measure(replies: list[ReplySteps]) -> dict:
    """Acceptance over replies for every k up to the number of unrolled steps: facts of an `eval` metrics line.

    by_part (reasoning or content) and by_place (tokens into the reply) are walks with k = MAIN_K.
    """
    steps = min((reply.right.shape[0] for reply in replies), default=0)
    main_k = min(MAIN_K, steps)
    # Each counter: how many drafts had 0, 1, 2 ... accepted tokens.
    walks: dict[int, Counter[int]] = {k: Counter() for k in range(1, steps + 1)}
    by_text, by_border = {"reasoning": Counter(), "content": Counter()}, [Counter() for _ in REPLY_BORDERS]
    rows, right_rows, position_sums = 0, torch.zeros(steps), Counter()
    for reply in replies:
        rows += reply.right.shape[1]
        right_rows += reply.right[:steps].sum(1)
        for k, drafts in walks.items():
            lengths = accepted_lengths(reply.right, k)
            position_sums[k] += sum(lengths)
            for row, accepted in walk(lengths):
                drafts[accepted] += 1
                if k == main_k:
                    by_text["reasoning" if row <= reply.closing else "content"][accepted] += 1
                    by_border[bisect_right(REPLY_BORDERS, row) - 1][accepted] += 1
    spans = zip(REPLY_BORDERS, [*REPLY_BORDERS[1:], None], by_border, strict=True)
    return {
        "step_accuracy": [round(x, 5) for x in (right_rows / max(rows, 1)).tolist()],
        "walk": {
            k: {
                "length": mean_length(drafts),
                "drafts": drafts.total(),
                "accepted": [sum(n for a, n in drafts.items() if a > position) for position in range(k)],
            }
            for k, drafts in walks.items()
        },
        "per_position": {k: 1 + position_sums[k] / max(rows, 1) for k in walks},
        "by_part": {name: {main_k: mean_length(drafts)} for name, drafts in by_text.items()},
        "by_place": [
            {"from": start, "to": stop, "length": mean_length(drafts), "starts": drafts.total()}
            for start, stop, drafts in spans
            if drafts
        ],
    }


def figures_from_json(figures):
    """Figures as `measure` returns them, keyed by the number k; in JSON, the keys are strings."""
    if not isinstance(figures, dict):
        return figures
    return {int(key) if key.isdigit() else key: figures_from_json(value) for key, value in figures.items()}


def accepted_rows(right: Tensor, k: int) -> list[bool]:
    """For each row of right [K, n] (position i), whether x_{i+2} is an accepted draft token of the walk with `k`."""
    hits = {hit for row, accepted in walk(accepted_lengths(right, k)) for hit in range(row, row + accepted)}
    return [row in hits for row in range(right.shape[1])]


class Bigram:
    """A lower bound for any draft: proposes the token that most often followed the last token in the training data."""

    def __init__(self, vocab_size: int, pairs: Iterator[tuple[Tensor, Tensor]]):
        previous, written = (torch.cat(side) for side in zip(*pairs, strict=True))
        codes, counts = torch.unique(previous * vocab_size + written, return_counts=True)
        self.best = torch.full((vocab_size,), -1, dtype=torch.int64)
        order = counts.argsort(stable=True)  # the most frequent successor of a token is written last
        for code in codes[order].tolist():
            self.best[code // vocab_size] = code % vocab_size

    def steps(self, ids: Tensor, steps: int) -> Tensor:
        """right bool [K, T] at every position of ids int64 [T]; False where the ids end before the proposed token."""
        hits = self.best[ids[:-1]] == ids[1:]  # hits[j]: x_j predicts x_{j+1}
        return torch.cat([hits, hits.new_zeros(steps + 1)])[1:].unfold(0, len(ids), 1)  # right[s, i] = hits[i+1+s]
