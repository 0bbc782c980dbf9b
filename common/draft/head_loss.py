"""The draft's head and its loss, computed over chunks of rows, so that memory never holds the logits of all steps.

Cross entropy against probabilities p, with logits z = hidden W', q = softmax(z), a row's weight w:

    loss = w (logsumexp(z) - p.z)      d loss / d z = w (q - p)

Forward computes the gradients together with the loss, while it has a chunk's logits; backward only scales them.

Shapes: K steps, P rows a step, D draft vocabulary, H hidden, c = k x r rows a chunk: k whole steps, or r rows of one.
Row n of step s has target row n + s: the targets are one array, which all steps read through overlapping views.
"""

import torch
from torch import Tensor

from common.draft.config import CHUNK_ROWS
from common.draft.kernels import Weight, accumulation_dtype, fused


def block_maxima(x: Tensor) -> Tensor:
    """[..., D] -> [..., b], the maxima of blocks of 128 columns, or of the whole row if 128 does not divide D"""
    return x.unflatten(-1, (-1, 128) if x.shape[-1] % 128 == 0 else (1, -1)).amax(-1)


def first_argmax(x: Tensor, block_max: Tensor) -> Tensor:
    """First argmax of each row of x [n, D], given the maximum of each block [n, b].

    On CPU torch.argmax is about ten times slower than amax, so only the block with the highest maximum is searched.
    """
    block = x.shape[1] // block_max.shape[1]
    best = block_max.argmax(1, keepdim=True) * block  # [n, 1]
    return best.squeeze(1) + x.gather(1, best + torch.arange(block, device=x.device)).argmax(1)


def _softmax_difference_aten(logits, probabilities):
    q = torch.softmax(logits, -1)
    total = 1 / q.amax(-1, keepdim=True).to(accumulation_dtype(q.dtype))
    return total, block_maxima(logits), q.sub_(probabilities)


@fused(varying=(0, 1), eager=_softmax_difference_aten)
def _softmax_difference(logits, probabilities):
    """-> total [k, r, 1], the maxima of blocks of logits [k, r, b], and q - p [k, r, D] in the logits' type

    logsumexp = max + log(total); the caller applies log(), which would stop the compiler from fusing all into one loop.
    """
    z = logits.to(accumulation_dtype(logits.dtype))
    block_max = block_maxima(z)
    exp = (z - block_max.amax(-1, keepdim=True)).exp()
    total = exp.sum(-1, keepdim=True)
    return total, block_max, (exp * (1 / total) - probabilities.to(z.dtype)).to(logits.dtype)


def _chunks(steps: int, rows: int):
    """Pairs of slices (steps, rows) of about CHUNK_ROWS rows: several whole steps, or an equal share of one step."""
    chunk_steps = -(-CHUNK_ROWS // max(rows, 1))
    chunk_rows = -(-rows // max(1, rows // CHUNK_ROWS))
    for step in range(0, steps, chunk_steps):
        for start in range(0, rows, max(chunk_rows, 1)):
            yield slice(step, min(step + chunk_steps, steps)), slice(start, min(start + chunk_rows, rows))


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, master, low, probabilities, row_weight):
        (steps, rows, _), with_gradient = hidden.shape, ctx.needs_input_grad[0]
        losses = torch.empty_like(row_weight)
        choices = torch.empty_like(row_weight, dtype=torch.int64)
        dhidden = torch.empty_like(hidden) if with_gradient else None
        dweight = master.new_zeros(master.shape[::-1]) if with_gradient and ctx.needs_input_grad[1] else None
        # p.z = (p W).h: one product for all steps, cheaper than a pass over [P, D] to sum p * z in each step
        mean_row = probabilities @ low  # [P+K-1, H]

        # [K, P, .]: row n of step s is row n + s; overlapping views, never written
        targets, mean_rows = (x.unfold(0, rows, 1).transpose(1, 2) for x in (probabilities, mean_row))
        for chunk in _chunks(steps, rows):
            x, weight = hidden[chunk].flatten(0, 1), row_weight[chunk].reshape(-1, 1)
            logits = x @ low.t()
            total, block_max, difference = _softmax_difference(logits.view_as(targets[chunk]), targets[chunk])
            choices[chunk] = first_argmax(logits, block_max.flatten(0, 1)).view_as(choices[chunk])
            target_logit = (mean_rows[chunk] * hidden[chunk]).sum(-1, dtype=total.dtype)
            losses[chunk] = block_max.amax(-1) + total.squeeze(-1).log() - target_logit
            if with_gradient:
                difference = difference.flatten(0, 1)
                dhidden[chunk] = (difference @ low).mul_(weight).view_as(hidden[chunk])
            if dweight is not None:  # summed as [H, D]: transposing x, the narrower factor, is cheap
                dweight += (x * weight).to(x.dtype).t().contiguous() @ difference
        ctx.gradients = (dhidden, dweight)
        losses = torch.where(row_weight > 0, losses, 0)
        ctx.mark_non_differentiable(losses, choices)
        return (losses * row_weight).sum(), losses, choices

    @staticmethod
    def backward(ctx, dloss, _losses, _choices):
        dhidden, dweight = ctx.gradients
        ctx.gradients = None  # scaled in place: a second backward must fail
        return dhidden.mul_(dloss), None if dweight is None else dweight.mul_(dloss).t(), None, None, None


def head_loss(hidden: Tensor, head: Weight, probabilities: Tensor, row_weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """hidden [K, P, H], probabilities [P+K-1, D], row_weight [K, P], 0 for rows without loss
    -> loss (scalar, the weighted sum), cross entropy [K, P] (0 where row_weight is 0), argmax of the logits [K, P]"""
    return _HeadLoss.apply(hidden, head.master, head.low, probabilities, row_weight)
