"""Attention of one unrolled step: step-0 keys through a fused kernel, later keys by hand, merged through the log-sum-exp.

A query of step s at position i sees the step-0 keys at positions <= i of its document, and of steps 1..s only the keys
of its own position:

    step-0 keys   0 .. i-1  i  |  own keys  1 .. s      softmax over both: exp(score - lse), with
                  [ flash kernel ]          [ s dots ]  lse = log(exp(lse_flash) + sum of exp(own scores))

Queries exist at loss positions only. They come in runs, a run being neighbouring loss positions of one document: usually
one run a document, its answer; any mask gives correct runs. Backward hands the kernel the *merged* output and lse, as ring
attention does: its probabilities exp(score - lse) are then the global ones, and rowsum(dout * out) is right for all keys.

Shapes: P query rows (all runs, end to end), T key rows (all documents, end to end), h heads = hk key heads x g,
d query and key width, dv value width.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from common.kernels import wide

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class Run(NamedTuple):
    """`length` neighbouring loss positions: from row `query` of the P, from row `row` of the T; its document starts at `document`."""

    query: int
    length: int
    row: int
    document: int


def _by_head(x: Tensor, key_heads: int) -> Tensor:
    """[n, h, d] -> [hk, h/hk, n, d], a view: key heads as the batch, so that grouped keys are broadcast and not copied"""
    return x.unflatten(1, (key_heads, -1)).permute(1, 2, 0, 3)


def _parts(runs: list[Run]):
    """(queries, keys, causal): the CPU kernel aligns causal masks top-left, so the keys before a run are a part of their own."""
    for run in runs:
        queries = slice(run.query, run.query + run.length)
        yield queries, slice(run.row, run.row + run.length), True
        if run.row > run.document:
            yield queries, slice(run.document, run.row), False


class _CpuKernel:
    """aten's flash attention for CPU, a call for each part."""

    @staticmethod
    def forward(q, k, v, runs, scale):
        """-> out [P, h, d], lse [P, h]"""
        key_heads, group = k.shape[1], q.shape[1] // k.shape[1]
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=wide(q.dtype))
        for queries, keys, first in _parts(runs):
            key, value = (_by_head(x[keys], key_heads).expand(-1, group, -1, -1) for x in (k, v))
            part, part_lse = _flash(_by_head(q[queries], key_heads), key, value, 0.0, first, scale=scale)
            part, part_lse = part.permute(2, 0, 1, 3).flatten(1, 2), part_lse.permute(2, 0, 1).flatten(1, 2)
            if first:
                out[queries], lse[queries] = part, part_lse
            else:
                both = torch.logaddexp(lse[queries], part_lse)
                out[queries] *= (lse[queries] - both).exp_().unsqueeze(-1)
                out[queries] += part * (part_lse - both).exp_().unsqueeze(-1)
                lse[queries] = both
        return out, lse, ()

    @staticmethod
    def backward(dout, q, k, v, out, lse, runs, scale, extra):
        """-> dq [P, h, d], dk, dv [T, hk, d]; out and lse are those over all keys"""
        key_heads, group = k.shape[1], q.shape[1] // k.shape[1]
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for queries, keys, first in _parts(runs):
            key, value = (_by_head(x[keys], key_heads).expand(-1, group, -1, -1) for x in (k, v))
            do, qs, o = (_by_head(x[queries], key_heads) for x in (dout, q, out))
            part_lse = lse[queries].unflatten(1, (key_heads, group)).permute(1, 2, 0).contiguous()
            grads = _flash_backward(do, qs, key, value, o, part_lse, 0.0, first, scale=scale)
            dq_part = grads[0].permute(2, 0, 1, 3).flatten(1, 2)
            if first:
                dq[queries] = dq_part
            else:
                dq[queries] += dq_part
            dk[keys] += grads[1].sum(1).transpose(0, 1)
            dv[keys] += grads[2].sum(1).transpose(0, 1)
        return dq, dk, dv


class _CudaKernel:
    """aten's FlashAttention for variable lengths: one call for all runs; causal masks are aligned bottom-right."""

    @staticmethod
    def _layout(q, runs):
        """Where each run's queries and keys begin, and which of the T rows its keys are."""
        lengths = torch.tensor([run.length for run in runs])
        key_lengths = torch.tensor([run.row + run.length - run.document for run in runs])
        rows = torch.cat([torch.arange(run.document, run.row + run.length) for run in runs])
        starts, key_starts = (F.pad(x.cumsum(0), (1, 0)).int() for x in (lengths, key_lengths))
        starts, key_starts, rows = (x.to(q.device, non_blocking=True) for x in (starts, key_starts, rows))
        return starts, key_starts, int(lengths.max()), int(key_lengths.max()), rows

    @classmethod
    def forward(cls, q, k, v, runs, scale):
        starts, key_starts, longest, longest_keys, rows = layout = cls._layout(q, runs)
        k, v = k[rows], v[rows]
        out, lse, *random = torch.ops.aten._flash_attention_forward(
            q, k, v, starts, key_starts, longest, longest_keys, 0.0, True, False, scale=scale
        )
        return out, lse.t(), (layout, random[:2])

    @staticmethod
    def backward(dout, q, k, v, out, lse, runs, scale, extra):
        (starts, key_starts, longest, longest_keys, rows), random = extra
        dq, dk_rows, dv_rows = torch.ops.aten._flash_attention_backward(
            *(dout, q, k[rows], v[rows], out, lse.t().contiguous(), starts, key_starts, longest, longest_keys),
            *(0.0, True, *random),
            scale=scale,
        )
        dk, dv = torch.zeros_like(k), torch.zeros_like(v)
        return dq, dk.index_add_(0, rows, dk_rows), dv.index_add_(0, rows, dv_rows)  # runs may share keys


def _pad(x: Tensor, width: int) -> Tensor:
    return F.pad(x, (0, width - x.shape[-1]))


class _MergedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, runs, scale, *own):
        value_width, key_heads = v.shape[-1], k.shape[1]
        kernel = _CudaKernel if q.is_cuda else _CpuKernel
        padded = _pad(v, q.shape[-1])  # the kernels want values as wide as keys; MLA's are narrower
        out, lse, extra = kernel.forward(q, k, padded, runs, scale)
        if own:
            out = _merge_own(out[..., :value_width], lse, q, own, key_heads, scale)
        else:
            out = out[..., :value_width].contiguous()
        ctx.save_for_backward(q, k, v, out, lse, *own)
        ctx.kernel, ctx.runs, ctx.scale, ctx.extra = kernel, runs, scale, extra
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        q, k, v, out, lse, *own = ctx.saved_tensors
        width, value_width = q.shape[-1], v.shape[-1]
        dout = dout.contiguous()
        padded = (_pad(x, width) for x in (v, out, dout))
        v_padded, out_padded, dout_padded = padded
        dq, dk, dv = ctx.kernel.backward(dout_padded, q, k, v_padded, out_padded, lse, ctx.runs, ctx.scale, ctx.extra)
        dv = dv[..., :value_width]
        down = []
        if own:
            dq, down = _own_backward(dq, dout, q, out, lse, own, k.shape[1], ctx.scale)
        return dq, dk, dv, None, None, *down


def _grouped(x: Tensor, key_heads: int) -> Tensor:
    """[P, h, d] -> [P, hk, g, d] in the type that sums are taken in"""
    return x.to(wide(x.dtype)).unflatten(1, (key_heads, -1))


def _merge_own(out, lse, q, own, key_heads, scale):
    """Add the own keys to (out, lse) of the step-0 keys; lse is updated in place, the new out is returned."""
    queries, result = _grouped(q, key_heads), _grouped(out, key_heads)
    keys, values = own[0::2], own[1::2]
    scores = [(queries * k.unsqueeze(2)).sum(-1) * scale for k in keys]  # [P, hk, g] each
    first = lse.unflatten(1, (key_heads, -1))
    total = torch.logsumexp(torch.stack([first, *scores]), 0)
    result = result * (first - total).exp().unsqueeze(-1)
    for score, v in zip(scores, values, strict=True):
        result += (score - total).exp().unsqueeze(-1) * v.unsqueeze(2)
    lse.copy_(total.flatten(1))
    return result.flatten(1, 2).to(out.dtype)


def _own_backward(dq, dout, q, out, lse, own, key_heads, scale):
    queries, grads, outputs = (_grouped(x, key_heads) for x in (q, dout, out))
    total = lse.unflatten(1, (key_heads, -1))
    mean = (grads * outputs).sum(-1)  # [P, hk, g]
    result, down = _grouped(dq, key_heads), []
    for k, v in zip(own[0::2], own[1::2], strict=True):
        probability = ((queries * k.unsqueeze(2)).sum(-1) * scale - total).exp()
        dscore = (probability * ((grads * v.unsqueeze(2)).sum(-1) - mean) * scale).unsqueeze(-1)
        result = result + dscore * k.unsqueeze(2)
        down += [(dscore * queries).sum(2).to(k.dtype), (probability.unsqueeze(-1) * grads).sum(2).to(v.dtype)]
    return result.flatten(1, 2).to(dq.dtype), down


def merged_attention(q: Tensor, k: Tensor, v: Tensor, own: list[Tensor], runs: list[Run], scale: float) -> Tensor:
    """q [P, h, d] over step-0 keys k, v [T, hk, d], [T, hk, dv] and own keys (k_1, v_1, ..., k_s, v_s), [P, hk, .] each -> [P, h, dv]"""
    return _MergedAttention.apply(q, k, v, runs, scale, *own)
