"""The draft's head and its loss, over chunks of rows, so that no [rows, D] array of logits is ever kept.

Cross entropy against probabilities p, with logits z = hidden W', q = softmax(z), a row's weight w:

    loss = w (logsumexp(z) - p.z)      d loss / d z = w (q - p)

The gradients are computed along with the loss, while a chunk's logits are at hand; backward only scales them.

Shapes: K steps, P rows a step, D draft vocabulary, H hidden, c rows a chunk. Row n of step s has target row n + s: the
targets are one array for all steps, shifted.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from common.kernels import Weight, fused, wide

CHUNK_ROWS = 2048  # of all steps together: below this, products with a wide inner side lose half their speed on CPU


@fused
def _softmax_difference(logits, probabilities):
    """-> logsumexp [c] of the logits, which become q - p [c, D] in place"""
    q, best, kind = torch.softmax(logits, -1), logits.amax(-1), wide(logits.dtype)
    torch.sub(q, probabilities, out=logits)
    return best.to(kind) - q.amax(-1).to(kind).log()


def argmax(x: Tensor) -> Tensor:
    """First argmax of each row. Aten's own takes ten times as long as a maximum on CPU: look for the block first."""
    block = 128
    if x.is_cuda or x.shape[1] % block:
        return x.argmax(1)
    best = x.unflatten(1, (-1, block)).amax(2).argmax(1, keepdim=True)  # [n, 1]
    columns = best * block + torch.arange(block)
    return (best * block).squeeze(1) + x.gather(1, columns).argmax(1)


def _pieces(start: int, stop: int, rows: int):
    """The flat rows start..stop of [K, rows] as (slice within the chunk, first target row), cut where steps change."""
    while start < stop:
        step, row = divmod(start, rows)
        end = min(stop, (step + 1) * rows)
        yield start, end, row + step
        start = end


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, master, low, probabilities, row_weight, with_gradient):
        steps, rows, _ = hidden.shape
        flat, weight = hidden.flatten(0, 1), row_weight.flatten()
        losses = torch.empty_like(weight)
        choices = torch.empty_like(weight, dtype=torch.int64)
        dhidden = torch.empty_like(flat) if with_gradient else None
        dweight = master.new_zeros(master.shape[::-1]) if with_gradient and master.requires_grad else None
        # p.z = (p W).h: one product for all steps where the sums over p * z would be a pass over [rows, D] in each
        mean_row = probabilities @ low
        for start in range(0, len(flat), CHUNK_ROWS):
            chunk = slice(start, min(start + CHUNK_ROWS, len(flat)))
            x, logits = flat[chunk], flat[chunk] @ low.t()
            choices[chunk] = argmax(logits)
            for begin, end, target in _pieces(chunk.start, chunk.stop, rows):
                part = logits[begin - start : end - start]
                lse = _softmax_difference(part, probabilities[target : target + end - begin])
                wanted = (mean_row[target : target + end - begin].to(lse.dtype) * flat[begin:end]).sum(1)
                losses[begin:end] = lse - wanted
            if with_gradient:
                torch.mul(logits @ low, weight[chunk, None], out=dhidden[chunk])
            if dweight is not None:
                dweight += (x * weight[chunk, None]).to(x.dtype).t().contiguous() @ logits
        ctx.gradients = (dhidden, dweight)
        losses = torch.where(weight > 0, losses, 0).view(steps, rows)
        choices = choices.view(steps, rows)
        ctx.mark_non_differentiable(losses, choices)
        return (losses * row_weight).sum(), losses, choices

    @staticmethod
    @once_differentiable
    def backward(ctx, dloss, _losses, _choices):
        if ctx.gradients is None:
            raise RuntimeError("the head's gradients are scaled in place: backward can run once for a forward")
        dhidden, dweight = ctx.gradients
        ctx.gradients = None
        dhidden = dhidden.mul_(dloss).view(*_losses.shape, -1)
        return dhidden, None if dweight is None else dweight.mul_(dloss).t(), None, None, None, None


def head_loss(hidden: Tensor, head: Weight, probabilities: Tensor, row_weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """hidden [K, P, H], probabilities [P+K-1, D], row_weight [K, P], 0 for rows without loss
    -> loss (scalar, the weighted sum), cross entropy [K, P] of the rows with loss, the draft's choice [K, P]."""
    with_gradient = torch.is_grad_enabled() and (hidden.requires_grad or head.master.requires_grad)
    return _HeadLoss.apply(hidden, head.master, head.low, probabilities, row_weight, with_gradient)
