"""The draft's head and its loss, over chunks of rows, so that logits of all steps are never kept.

Cross entropy against probabilities p, with logits z = hidden W', q = softmax(z), a row's weight w:

    loss = w (logsumexp(z) - p.z)      d loss / d z = w (q - p)

The gradients are computed along with the loss, while a chunk's logits are at hand; backward only scales them.

Shapes: K steps, P rows a step, D draft vocabulary, H hidden, c = k x r rows a chunk: k whole steps, or r rows of one.
Row n of step s has target row n + s: the targets are one array for all steps, read through overlapping windows.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from common.draft.kernels import Weight, fused, wide

# Below this many rows, products with a wide inner side lose half their speed on CPU; many more only take memory
CHUNK_ROWS = 2000


def blocks_of(columns: int) -> tuple[int, int]:
    """columns as (blocks, columns a block), where they divide"""
    return (-1, 128) if columns % 128 == 0 else (1, columns)


def first_argmax(x: Tensor, block_max: Tensor) -> Tensor:
    """First argmax of each row of x [n, D], given its blocks' maxima [n, b]: aten's own takes as long as ten maxima."""
    block = x.shape[1] // block_max.shape[1]
    best = block_max.argmax(1, keepdim=True) * block  # [n, 1]
    return best.squeeze(1) + x.gather(1, best + torch.arange(block, device=x.device)).argmax(1)


def argmax(x: Tensor) -> Tensor:
    return first_argmax(x, x.unflatten(1, blocks_of(x.shape[1])).amax(2))


def _softmax_difference_aten(logits, probabilities):
    q = torch.softmax(logits, -1)
    total = 1 / q.amax(-1, keepdim=True).to(wide(q.dtype))
    return total, logits.unflatten(-1, blocks_of(logits.shape[-1])).amax(-1), q.sub_(probabilities)


@fused(varying=(0, 1), eager=_softmax_difference_aten)
def _softmax_difference(logits, probabilities):
    """-> total [k, r, 1], the maxima of blocks of logits [k, r, b], and q - p [k, r, D] in the logits' type

    logsumexp = max + log(total), but the logarithm is left to the caller: it would keep all this from being one loop.
    """
    z = logits.to(wide(logits.dtype))
    block_max = z.unflatten(-1, blocks_of(z.shape[-1])).amax(-1)
    exp = (z - block_max.amax(-1, keepdim=True)).exp()
    total = exp.sum(-1, keepdim=True)
    return total, block_max, (exp * (1 / total) - probabilities.to(z.dtype)).to(logits.dtype)


def _chunks(steps: int, rows: int):
    """(steps, rows) as pairs of slices: several whole steps where they are short, else even shares of one."""
    together = -(-CHUNK_ROWS // max(rows, 1))
    size = -(-rows // max(1, rows // CHUNK_ROWS))
    for step in range(0, steps, together):
        for start in range(0, rows, max(size, 1)):
            yield slice(step, min(step + together, steps)), slice(start, min(start + size, rows))


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, master, low, probabilities, row_weight, with_gradient):
        steps, rows, _ = hidden.shape
        losses = torch.empty_like(row_weight)
        choices = torch.empty_like(row_weight, dtype=torch.int64)
        dhidden = torch.empty_like(hidden) if with_gradient else None
        dweight = master.new_zeros(master.shape[::-1]) if with_gradient and master.requires_grad else None
        # p.z = (p W).h: one product for all steps, where the sums over p * z are one more pass over [P, D] for each
        mean_row = probabilities @ low  # [P+K-1, H]

        def window(x):  # [P+K-1, .] -> [K, P, .], rows n + s; a view, read only
            return x.as_strided((steps, rows, x.shape[1]), (x.stride(0), x.stride(0), 1))

        targets, mean_rows = window(probabilities), window(mean_row)
        for chunk in _chunks(steps, rows):
            x, weight = hidden[chunk].flatten(0, 1), row_weight[chunk].reshape(-1, 1)
            logits = x @ low.t()
            total, block_max, difference = _softmax_difference(logits.view_as(targets[chunk]), targets[chunk])
            choices[chunk] = first_argmax(logits, block_max.flatten(0, 1)).view_as(choices[chunk])
            wanted = (mean_rows[chunk] * hidden[chunk]).sum(-1, dtype=total.dtype)
            losses[chunk] = block_max.amax(-1) + total.squeeze(-1).log() - wanted
            if with_gradient:
                difference = difference.flatten(0, 1)
                dhidden[chunk] = (difference @ low).mul_(weight).view_as(hidden[chunk])
            if dweight is not None:  # transposed, since the narrow side is the cheap one to transpose
                dweight += (x * weight).to(x.dtype).t().contiguous() @ difference
        ctx.gradients = (dhidden, dweight)
        losses = torch.where(row_weight > 0, losses, 0)
        ctx.mark_non_differentiable(losses, choices)
        return (losses * row_weight).sum(), losses, choices

    @staticmethod
    @once_differentiable
    def backward(ctx, dloss, _losses, _choices):
        if ctx.gradients is None:
            raise RuntimeError("the head's gradients are scaled in place: backward can run once for a forward")
        dhidden, dweight = ctx.gradients
        ctx.gradients = None
        return dhidden.mul_(dloss), None if dweight is None else dweight.mul_(dloss).t(), None, None, None, None


def head_loss(hidden: Tensor, head: Weight, probabilities: Tensor, row_weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """hidden [K, P, H], probabilities [P+K-1, D], row_weight [K, P], 0 for rows without loss
    -> loss (scalar, the weighted sum), cross entropy [K, P] of the rows with loss, the draft's choice [K, P]."""
    with_gradient = torch.is_grad_enabled() and (hidden.requires_grad or head.master.requires_grad)
    return _HeadLoss.apply(hidden, head.master, head.low, probabilities, row_weight, with_gradient)
