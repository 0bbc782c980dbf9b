"""Where a pack has a loss: a function of mask and document borders alone, so that every thread and rank can know it.

Position i of a document with tokens x and mask m (1 where the target wrote the token) proposes x_{i+2+s} at step s:

    P_s = {i : m_{i+1} .. m_{i+1+s} all 1 and i+2+s inside the document}        P_0 contains P_1 contains P_2 ...
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class LossRun(NamedTuple):
    """Neighbouring positions of P_0 in one document."""

    query: int  # first of its rows among the P
    length: int
    row: int  # the same position among the T
    document: int  # where its document starts among the T


class LossPositions(NamedTuple):
    """The sets P_s of one pack, for any number of steps K. All tensors are on the CPU."""

    positions: Tensor  # int64 [P] flat indices of P_0
    tokens_left_in_run: Tensor  # int64 [P] itself included: a position is in P_s where this is above s
    runs: list[LossRun]

    def in_step(self, steps: int) -> Tensor:
        """bool [K, P]: whether a position of P_0 is in P_s."""
        return self.tokens_left_in_run > torch.arange(steps).unsqueeze(1)

    def counts(self, steps: int) -> Tensor:
        """int64 [K]: |P_s|."""
        return self.in_step(steps).sum(1)


def loss_positions(loss_mask: Tensor, offsets: Tensor) -> LossPositions:
    """loss_mask: bool [T]; offsets: int64 [n+1], document borders."""
    inside = torch.zeros(loss_mask.numel(), dtype=torch.bool)
    inside[:-1] = loss_mask.cpu().bool()[1:]
    starts, ends = offsets[:-1], offsets[1:]
    for back in (1, 2):  # the last two positions of a document have no x_{i+2}
        inside[torch.maximum(ends - back, starts)[ends > starts]] = False
    positions = inside.nonzero().squeeze(1)
    first = torch.ones(positions.numel(), dtype=torch.bool)
    first[1:] = positions.diff() > 1  # true between documents too, as the last two positions are never inside
    begins = first.nonzero().squeeze(1)
    lengths = F.pad(begins, (0, 1), value=positions.numel()).diff()
    tokens_left = (begins + lengths).repeat_interleave(lengths) - torch.arange(positions.numel())
    documents = starts[torch.searchsorted(ends, positions[begins], right=True)]
    columns = (column.tolist() for column in (begins, lengths, positions[begins], documents))
    return LossPositions(positions, tokens_left, [LossRun(*run) for run in zip(*columns, strict=True)])
