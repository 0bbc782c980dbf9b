"""Attention of one unrolled step: step-0 keys through a fused kernel, later keys by hand, merged by their log-sum-exp.

A query of step s at position i sees the step-0 keys at positions <= i of its document, and of steps 1..s only the keys
of its own position:

    step-0 keys   0 .. i-1  i  |  own keys  1 .. s      softmax over both: exp(score - lse), with
                  [ flash kernel ]          [ s dots ]  lse = log(exp(lse_flash) + sum of exp(own scores))

Queries exist at loss positions only. They come in runs, a run being neighbouring loss positions of one document:
usually one run a document, its answer; any mask gives correct runs. Backward uses the *merged* output and lse for the
step-0 keys, as ring attention does: exp(score - lse) are then the shares in the whole softmax, and rowsum(dout * out)
is right for all keys.

Shapes: P query rows (all runs, end to end), T key rows (all documents, end to end), h heads = hk key heads x g,
d query and key width, dv value width, n and L queries and keys of a block.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from common.dataset.loss_positions import LossRun
from common.draft.kernels import fused, wide


@fused(varying=(0, 1))
def _shares(scores, dshares, lse, mean, scale: float):
    """scores, dshares [rows, L], lse, mean [rows, 1] -> softmax shares and the gradient of the unscaled scores"""
    shares = (scores.to(lse.dtype) * scale - lse).exp()
    return shares.to(scores.dtype), (shares * (dshares.to(lse.dtype) - mean) * scale).to(scores.dtype)


class CpuKernel:
    """Blocks of queries: aten's flash attention forward; backward by plain products, half its kernel's time or less."""

    BLOCK = 256  # queries: smaller ones skip more of what is masked, larger ones make better products

    def __init__(self, runs: list[LossRun], device: torch.device):
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

    def _mask(self, queries: int, keys: int, dtype: torch.dtype) -> Tensor:
        """[n, L], causal with the last query at the last key; aten's own causal masks are aligned at the first ones"""
        mask = torch.zeros((queries, keys), dtype=dtype)
        mask[:, keys - queries :] = self.future[:queries, :queries]
        return mask

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor, tuple]:
        """-> out [P, h, d], lse [P, h], nothing else that backward needs"""
        group = q.shape[1] // k.shape[1]

        def by_head(x):  # [n, heads, d] -> [hk, heads/hk, n, d], a view: grouped keys are broadcast, not copied
            return x.unflatten(1, (k.shape[1], -1)).permute(1, 2, 0, 3)

        out, lse = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=wide(q.dtype))
        for queries, keys in self.blocks:
            count, seen = queries.stop - queries.start, keys.stop - keys.start
            mask = None if count == seen else self._mask(count, seen, q.dtype)
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
        """-> dq [P, h, d], dk, dv [T, hk, d]; out and lse are those over all keys"""
        heads, width = k.shape[1], q.shape[2]
        kind, future = wide(q.dtype), self.future.to(q.dtype)
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
            scores, dshares = rows @ key.transpose(1, 2), drows @ value.transpose(1, 2)  # [hk, g*n, L]
            scores.view(-1, count, seen)[:, :, seen - count :] += future[:count, :count]
            row_lse, row_mean = (by_head(x.unsqueeze(2)).reshape(-1, 1) for x in (lse, mean))
            shares, dscores = _shares(scores.flatten(0, 1), dshares.flatten(0, 1), row_lse, row_mean, scale)
            shares, dscores = shares.view_as(scores), dscores.view_as(scores)
            dq[queries] = (dscores @ key).reshape(-1, count, width).transpose(0, 1)
            dk[:, keys] += dscores.transpose(1, 2) @ rows
            dv[:, keys] += shares.transpose(1, 2) @ drows
        return dq, *(x.transpose(0, 1).to(q.dtype) for x in (dk, dv))


class CudaKernel:
    """aten's FlashAttention for variable lengths: one call for all runs; causal masks are aligned at the last keys."""

    def __init__(self, runs: list[LossRun], device: torch.device):
        lengths = torch.tensor([run.length for run in runs])
        key_lengths = torch.tensor([run.row + run.length - run.document for run in runs])
        rows = torch.cat([torch.arange(run.document, run.row + run.length) for run in runs])
        starts = [F.pad(x.cumsum(0), (1, 0)).int() for x in (lengths, key_lengths)]
        self.lengths = (*(x.to(device) for x in starts), int(lengths.max()), int(key_lengths.max()))
        self.rows = rows.to(device)  # which of the T rows each run's keys are; runs of a document share its keys

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
        dk, dv = (torch.zeros_like(x, dtype=wide(x.dtype)) for x in (k, v))
        dk.index_add_(0, self.rows, dkey.to(dk.dtype))
        dv.index_add_(0, self.rows, dvalue.to(dv.dtype))
        return dq, dk.to(k.dtype), dv.to(v.dtype)


def attention_kernel(runs: list[LossRun], device: torch.device) -> "CpuKernel | CudaKernel":
    """The kernel for these runs: made once a pack, used by all of its steps. No runs, nothing to compute: the CPU's."""
    return (CudaKernel if device.type == "cuda" and runs else CpuKernel)(runs, device)


@fused(also={3: (2,), 4: (2,)})
def _merge(out, lse, q, own_k, own_v, scale: float):
    """out [P, h, dv], lse [P, h] over the step-0 keys; own_k, own_v [P, hk, s, .] -> both over all keys"""
    heads, kind = own_k.shape[1], lse.dtype
    scores = (q.to(kind).unflatten(1, (heads, -1)).unsqueeze(3) * own_k.to(kind).unsqueeze(2)).sum(-1) * scale
    first = lse.unflatten(1, (heads, -1)).unsqueeze(-1)  # [P, hk, g, 1]
    best = torch.maximum(first, scores.amax(-1, keepdim=True))
    total = best + ((first - best).exp() + (scores - best).exp().sum(-1, keepdim=True)).log()
    own = ((scores - total).exp().unsqueeze(-1) * own_v.to(kind).unsqueeze(2)).sum(3)
    merged = (first - total).exp() * out.to(kind).unflatten(1, (heads, -1)) + own
    return merged.flatten(1, 2).to(out.dtype), total.flatten(1)


@fused(also={5: (2,), 6: (2,)})
def _merge_backward(dq, dout, q, out, lse, own_k, own_v, scale: float):
    """dq [P, h, d] of the step-0 keys -> dq of all keys, gradients of own_k, own_v"""
    heads, kind = own_k.shape[1], lse.dtype
    rows, drows, outs = (x.to(kind).unflatten(1, (heads, -1)).unsqueeze(3) for x in (q, dout, out))
    keys, values = own_k.to(kind).unsqueeze(2), own_v.to(kind).unsqueeze(2)
    shares = ((rows * keys).sum(-1) * scale - lse.unflatten(1, (heads, -1)).unsqueeze(-1)).exp()  # [P, hk, g, s]
    dscores = shares * ((drows * values).sum(-1) - (drows * outs).sum(-1)) * scale
    dq = dq.to(kind).unflatten(1, (heads, -1)) + (dscores.unsqueeze(-1) * keys).sum(3)
    dk = (dscores.unsqueeze(-1) * rows).sum(2).to(own_k.dtype)
    dv = (shares.unsqueeze(-1) * drows).sum(2).to(own_v.dtype)
    return dq.flatten(1, 2).to(q.dtype), dk, dv


def _widen(x: Tensor, width: int) -> Tensor:
    """Zeros up to `width`: the kernels want values as wide as keys, and MLA's are narrower."""
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))


class _MergedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, kernel, scale, *own):
        width, value_width = q.shape[-1], v.shape[-1]
        out, lse, ctx.extra = kernel.forward(q, k, _widen(v, width), scale)
        out = out[..., :value_width].contiguous()
        stacked = [torch.stack(x, 2) for x in (own[0::2], own[1::2])] if own else []
        if own:
            out, lse = _merge(out, lse, q, *stacked, scale)
        ctx.save_for_backward(q, k, v, out, lse, *stacked)
        ctx.kernel, ctx.scale = kernel, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        q, k, v, out, lse, *stacked = ctx.saved_tensors
        dout, width = dout.contiguous(), q.shape[-1]
        widened = (_widen(dout, width), q, k, _widen(v, width), _widen(out, width))
        dq, dk, dv = ctx.kernel.backward(*widened, lse, ctx.scale, ctx.extra)
        down = []
        if stacked:
            dq, *down = _merge_backward(dq, dout, q, out, lse, *stacked, ctx.scale)
            down = [x for pair in zip(*(x.unbind(2) for x in down), strict=True) for x in pair]
        return dq, dk, dv[..., : v.shape[-1]], None, None, *down


def merged_attention(q: Tensor, k: Tensor, v: Tensor, own: list[Tensor], kernel, scale: float) -> Tensor:
    """q [P, h, d], step-0 keys and values [T, hk, .], own = [k_1, v_1, ..., k_s, v_s] of [P, hk, .] -> [P, h, dv]"""
    return _MergedAttention.apply(q, k, v, kernel, scale, *own)
