"""Attention of one unrolled step: a flash kernel over step-0 keys, dot products with later keys, merged by log-sum-exp.

A query of step s at position i sees the step-0 keys at positions <= i of its document, and of steps 1..s only the keys
of position i:

    step-0 keys   0 .. i-1  i  |  later keys  1 .. s      softmax over both: exp(score - lse), with
                  [ flash kernel ]            [ s dots ]  lse = log(exp(lse_flash) + sum of exp(later scores))

Queries exist at loss positions only, in runs of neighbouring loss positions of one document: usually one run for each
document, its reply; any mask is correct. Backward uses the *merged* output and lse for the step-0 keys, as ring
attention does: exp(score - lse) is then the weight in the whole softmax, and rowsum(dout * out) holds for all keys.

Private operators of torch, whose signatures a new version may change; tested with torch 2.13:
    CPU    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu (forward only)
    CUDA   torch.ops.aten._flash_attention_forward, torch.ops.aten._flash_attention_backward

Shapes: P query rows (all runs, end to end), T key rows (all documents, end to end), h heads = hk key heads x g,
d query and key width, dv value width, s later steps, n and L queries and keys of a block.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from common.dataset.loss_positions import LossRun
from common.draft.kernels import accumulation_dtype, fused


@fused(varying=(0, 1))
def _softmax_backward(scores, dweights, lse, mean, scale: float):
    """scores, dweights [rows, L], lse, mean [rows, 1] -> softmax weights and the gradient of the unscaled scores"""
    weights = (scores.to(lse.dtype) * scale - lse).exp()
    return weights.to(scores.dtype), (weights * (dweights.to(lse.dtype) - mean) * scale).to(scores.dtype)


class CpuKernel:
    """Attention in blocks of queries: forward by torch's flash attention, backward in plain matrix products, at least
    twice as fast as torch's backward kernel."""

    BLOCK = 256  # queries; smaller blocks skip more masked keys, larger blocks multiply faster

    def __init__(self, runs: list[LossRun]):
        self.blocks = [
            (
                slice(run.query + start, run.query + min(start + self.BLOCK, run.length)),
                slice(run.document, run.row + min(start + self.BLOCK, run.length)),
            )
            for run in runs
            for start in range(0, run.length, self.BLOCK)
        ]
        longest = max((queries.stop - queries.start for queries, _ in self.blocks), default=0)
        self.future = torch.full((longest, longest), float("-inf")).triu_(1)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor, tuple]:
        """-> out [P, h, d], lse [P, h], and the kernel's random state, which `backward` needs: empty on CPU"""
        group, future = q.shape[1] // k.shape[1], self.future.to(q.dtype)

        def by_head(x):  # [n, heads, d] -> [hk, heads/hk, n, d], a view: grouped keys are broadcast, not copied
            return x.unflatten(1, (k.shape[1], -1)).permute(1, 2, 0, 3)

        out, lse = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=accumulation_dtype(q.dtype))
        for queries, keys in self.blocks:
            rows, columns = queries.stop - queries.start, keys.stop - keys.start
            # the last query sees the last key, but torch's causal mask aligns the first query and the first key
            mask = None if rows == columns else F.pad(future[:rows, :rows], (columns - rows, 0))
            block, block_lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                by_head(q[queries]),
                *(by_head(x[keys]).expand(-1, group, -1, -1) for x in (k, v)),
                is_causal=mask is None,
                attn_mask=mask,
                scale=scale,
            )
            out[queries] = block.permute(2, 0, 1, 3).flatten(1, 2)
            lse[queries] = block_lse.permute(2, 0, 1).flatten(1, 2)
        return out, lse, ()

    def backward(self, dout, q, k, v, out, lse, scale, extra) -> tuple[Tensor, Tensor, Tensor]:
        """-> dq [P, h, d], dk, dv [T, hk, d]; the arguments out and lse are merged: they cover the later keys, too"""
        heads, width = k.shape[1], q.shape[2]
        kind, future = accumulation_dtype(q.dtype), self.future.to(q.dtype)
        mean = (dout * out).sum(-1, dtype=kind)  # [P, h]
        dq = torch.empty_like(q)
        k, v = (x.transpose(0, 1).contiguous() for x in (k, v))  # [hk, T, d]
        dk, dv = (torch.zeros_like(x, dtype=kind) for x in (k, v))
        for queries, keys in self.blocks:
            count, seen = queries.stop - queries.start, keys.stop - keys.start

            def by_head(x, queries=queries):  # [P, h, .] -> [hk, g*n, .]
                return x[queries].transpose(0, 1).reshape(heads, -1, x.shape[2])

            rows, drows = by_head(q), by_head(dout)
            key, value = k[:, keys], v[:, keys]
            scores, dweights = rows @ key.transpose(1, 2), drows @ value.transpose(1, 2)  # [hk, g*n, L]
            scores.view(-1, count, seen)[:, :, seen - count :] += future[:count, :count]
            row_lse, row_mean = (by_head(x.unsqueeze(2)).reshape(-1, 1) for x in (lse, mean))
            flat = _softmax_backward(scores.flatten(0, 1), dweights.flatten(0, 1), row_lse, row_mean, scale)
            weights, dscores = (x.view_as(scores) for x in flat)
            dq[queries] = (dscores @ key).reshape(-1, count, width).transpose(0, 1)
            dk[:, keys] += dscores.transpose(1, 2) @ rows
            dv[:, keys] += weights.transpose(1, 2) @ drows
        return dq, *(x.transpose(0, 1).to(q.dtype) for x in (dk, dv))


class CudaKernel:
    """torch's FlashAttention for variable lengths: one call for all runs; its mask aligns the last query and key."""

    def __init__(self, runs: list[LossRun], device: torch.device):
        lengths = torch.tensor([run.length for run in runs])
        key_lengths = torch.tensor([run.row + run.length - run.document for run in runs])
        rows = torch.cat([torch.arange(run.document, run.row + run.length) for run in runs])
        starts = [F.pad(x.cumsum(0), (1, 0)).int() for x in (lengths, key_lengths)]
        self.lengths = (*(x.to(device) for x in starts), int(lengths.max()), int(key_lengths.max()))
        self.rows = rows.to(device)  # the key rows of each run, among the T; runs of one document share key rows

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor, tuple]:
        out, lse, *random = torch.ops.aten._flash_attention_forward(
            q, k[self.rows], v[self.rows], *self.lengths, 0.0, True, False, scale=scale
        )
        return out, lse.t(), random[:2]

    def backward(self, dout, q, k, v, out, lse, scale, extra) -> tuple[Tensor, Tensor, Tensor]:
        key, value, lse = k[self.rows], v[self.rows], lse.t().contiguous()
        dq, dkey, dvalue = torch.ops.aten._flash_attention_backward(
            dout, q, key, value, out, lse, *self.lengths, 0.0, True, *extra, scale=scale
        )
        sums = (torch.zeros_like(x, dtype=accumulation_dtype(x.dtype)) for x in (k, v))
        pairs = zip(sums, (dkey, dvalue), strict=True)
        return dq, *(x.index_add_(0, self.rows, dx.to(x.dtype)).to(k.dtype) for x, dx in pairs)


@fused(also={3: (2,), 4: (2,)})
def _merge(out, lse, q, later_k, later_v, scale: float):
    """out [P, h, dv], lse [P, h] over the step-0 keys; later_k, later_v [P, hk, s, .] -> both over all keys"""
    heads, kind = later_k.shape[1], lse.dtype
    scores = (q.to(kind).unflatten(1, (heads, -1)).unsqueeze(3) * later_k.to(kind).unsqueeze(2)).sum(-1) * scale
    first = lse.unflatten(1, (heads, -1)).unsqueeze(-1)  # [P, hk, g, 1]
    highest = torch.maximum(first, scores.amax(-1, keepdim=True))
    total = highest + ((first - highest).exp() + (scores - highest).exp().sum(-1, keepdim=True)).log()
    later = ((scores - total).exp().unsqueeze(-1) * later_v.to(kind).unsqueeze(2)).sum(3)
    merged = (first - total).exp() * out.to(kind).unflatten(1, (heads, -1)) + later
    return merged.flatten(1, 2).to(out.dtype), total.flatten(1)


@fused(also={5: (2,), 6: (2,)})
def _merge_backward(dq, dout, q, out, lse, later_k, later_v, scale: float):
    """dq [P, h, d] of the step-0 keys -> dq of all keys, gradients of later_k, later_v"""
    heads, kind = later_k.shape[1], lse.dtype
    rows, drows, outs = (x.to(kind).unflatten(1, (heads, -1)).unsqueeze(3) for x in (q, dout, out))
    keys, values = later_k.to(kind).unsqueeze(2), later_v.to(kind).unsqueeze(2)
    weights = ((rows * keys).sum(-1) * scale - lse.unflatten(1, (heads, -1)).unsqueeze(-1)).exp()  # [P, hk, g, s]
    dscores = weights * ((drows * values).sum(-1) - (drows * outs).sum(-1)) * scale
    dq = dq.to(kind).unflatten(1, (heads, -1)) + (dscores.unsqueeze(-1) * keys).sum(3)
    dk = (dscores.unsqueeze(-1) * rows).sum(2).to(later_k.dtype)
    dv = (weights.unsqueeze(-1) * drows).sum(2).to(later_v.dtype)
    return dq.flatten(1, 2).to(q.dtype), dk, dv


def _padded(x: Tensor, width: int) -> Tensor:
    """x with zeros up to `width`: the kernels need values as wide as keys, and MLA's values are narrower."""
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))


class _MergedAttention(torch.autograd.Function):
    """q [P, h, d], step-0 keys and values [T, hk, .], later = k_1, v_1, ..., k_s, v_s, each [P, hk, .]
    -> [P, h, dv], the attention over all keys"""

    @staticmethod
    def forward(ctx, q, k, v, kernel, scale, *later):
        width, value_width = q.shape[-1], v.shape[-1]
        out, lse, ctx.extra = kernel.forward(q, k, _padded(v, width), scale)
        out = out[..., :value_width].contiguous()
        stacked = [torch.stack(x, 2) for x in (later[0::2], later[1::2])] if later else []
        if later:
            out, lse = _merge(out, lse, q, *stacked, scale)
        ctx.save_for_backward(q, k, v, out, lse, *stacked)
        ctx.kernel, ctx.scale = kernel, scale
        return out

    @staticmethod
    def backward(ctx, dout):
        q, k, v, out, lse, *stacked = ctx.saved_tensors
        dout, width = dout.contiguous(), q.shape[-1]
        widened = (_padded(dout, width), q, k, _padded(v, width), _padded(out, width))
        dq, dk, dv = ctx.kernel.backward(*widened, lse, ctx.scale, ctx.extra)
        dlater = []
        if stacked:
            dq, *dlater = _merge_backward(dq, dout, q, out, lse, *stacked, ctx.scale)
            dlater = [x for pair in zip(*(x.unbind(2) for x in dlater), strict=True) for x in pair]
        return dq, dk, dv[..., : v.shape[-1]], None, None, *dlater


merged_attention = _MergedAttention.apply
