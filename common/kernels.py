"""The element-wise parts of the draft, each with its own backward, so that few passes over memory are made.

A matrix product of this size takes as long as three or four passes over its result: on CPU the passes decide the speed.
Every pass here is a plain function of tensors ("body"); `fused` runs it as one loop where `compile_bodies(True)` was
called and a compiler exists, and eagerly otherwise. Both give the same numbers up to the order of rounding.

Shapes: n rows, H hidden, I intermediate, h heads, d head width.
"""

import ctypes
import functools
import logging
import sys

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

log = logging.getLogger(__name__)
_compiled = False


def compile_bodies(on: bool) -> None:
    """Switch fused loops on or off for the process, as torch.backends switches do: the results do not depend on it."""
    global _compiled
    _compiled = on


def fused(body):
    """Run `body` compiled when that is switched on; the first failure to compile switches back for good."""

    @functools.cache
    def compiled():
        return torch.compile(body)

    @functools.wraps(body)
    def call(*args):
        if not _compiled:
            return body(*args)
        for x in args:
            if isinstance(x, Tensor) and x.dim() > 1:
                torch._dynamo.maybe_mark_dynamic(x, 0)  # rows differ from pack to pack; fixed widths make faster loops
        try:
            return compiled()(*args)
        except Exception as error:  # whatever a missing or broken compiler raises, the eager body is right
            log.warning("no fused loops (%s: %s); continuing without", type(error).__name__, str(error).split("\n")[0])
            compile_bodies(False)
            return body(*args)

    return call


def keep_freed_memory() -> None:
    """Have glibc keep what a step frees for the next one, instead of returning it and faulting every page in again.

    Page faults cost more than the arithmetic otherwise: a [2048, 8192] bf16 product took 48 ms with them and 6 without.
    """
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none, and does not need it
        if mallopt is not None:
            trim_threshold, mmap_threshold = -1, -3
            mallopt(mmap_threshold, 1 << 30)
            mallopt(trim_threshold, (1 << 31) - 1)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type that sums are taken in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def weight_gradient(dy: Tensor, x: Tensor) -> Tensor:
    """dy' x [out, in] of dy [n, out], x [n, in]. The narrower is transposed in memory first, as oneDNN takes twice as long
    to do it on the way; the result may therefore be a transposed view."""
    if x.shape[1] < dy.shape[1]:
        return (x.t().contiguous() @ dy).t()
    return dy.t().contiguous() @ x


class _Linear(torch.autograd.Function):
    """add + x W'. The gradient of W goes to its float32 master, so that unrolled steps add up in float32."""

    @staticmethod
    def forward(ctx, x, master, low, add):
        ctx.save_for_backward(x, low)
        ctx.master_dtype = master.dtype
        return x @ low.t() if add is None else torch.addmm(add, x, low.t())

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, low = ctx.saved_tensors
        dx = dy @ low if ctx.needs_input_grad[0] else None
        dw = weight_gradient(dy, x).to(ctx.master_dtype) if ctx.needs_input_grad[1] else None
        return dx, dw, None, dy if ctx.needs_input_grad[3] else None


class Weight:
    """A matrix [out, in] in two precisions: the float32 master that learns, and the copy that computes."""

    def __init__(self, master: Tensor, dtype: torch.dtype):
        self.master = master
        self.low = master.detach().to(dtype).contiguous()

    def __call__(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        return _Linear.apply(x, self.master, self.low, add)


@fused
def _rms_norm(x, weight, eps: float):
    y = x.to(wide(x.dtype))
    scale = torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    return (y * scale * weight).to(x.dtype), scale


@fused
def _rms_norm_backward(dy, x, weight, scale):
    dy = dy.to(scale.dtype)
    unit = x.to(scale.dtype) * scale
    dunit = dy * weight
    dx = scale * (dunit - unit * (dunit * unit).mean(-1, keepdim=True))
    return dx.to(x.dtype), (dy * unit).sum(0)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps):
        y, scale = _rms_norm(x, weight, eps)
        ctx.save_for_backward(x, weight, scale)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, weight, scale = ctx.saved_tensors
        dx, dweight = _rms_norm_backward(dy, x, weight, scale)
        return dx, dweight.to(weight.dtype), None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [n, H] over its root mean square, times weight [H]."""
    return _RMSNorm.apply(x, weight, eps)


@fused
def _swiglu(gate_up):
    gate, up = gate_up.to(wide(gate_up.dtype)).chunk(2, -1)
    return (gate * torch.sigmoid(gate) * up).to(gate_up.dtype)


@fused
def _swiglu_backward(dy, gate_up):
    gate, up = gate_up.to(wide(gate_up.dtype)).chunk(2, -1)
    dy = dy.to(gate.dtype)
    sigmoid = torch.sigmoid(gate)
    dgate = dy * up * sigmoid * (1 + gate * (1 - sigmoid))
    return torch.cat([dgate, dy * gate * sigmoid], -1).to(gate_up.dtype)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate_up):
        ctx.save_for_backward(gate_up)
        return _swiglu(gate_up)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        return _swiglu_backward(dy, *ctx.saved_tensors)


def swiglu(gate_up: Tensor) -> Tensor:
    """[n, 2I], gate before up -> silu(gate) * up [n, I]."""
    return _SwiGLU.apply(gate_up)


@fused
def _rotate_halves(x, cos, sin):
    first, second = x.to(cos.dtype).chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


@fused
def _rotate_pairs(x, cos, sin):
    first, second = x.to(cos.dtype).unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.stack([first * cos - second * sin, second * cos + first * sin], -1).flatten(-2).to(x.dtype)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cos, sin, pairs):
        ctx.save_for_backward(cos, sin)
        ctx.body = _rotate_pairs if pairs else _rotate_halves
        return ctx.body(x, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        cos, sin = ctx.saved_tensors
        return ctx.body(dy, cos, -sin), None, None, None  # a rotation's transpose turns back


def rotate(x: Tensor, cos: Tensor, sin: Tensor, pairs: bool) -> Tensor:
    """x [n, h, d] turned by the angles of cos, sin [n, d/2]: (i, i + d/2) together as in Llama, or neighbours (pairs)."""
    return _Rotate.apply(x, cos, sin, pairs)


class _TakeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, rows):
        ctx.save_for_backward(rows)
        ctx.shape = x.shape
        return x.index_select(0, rows)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        (rows,) = ctx.saved_tensors
        return dy.new_zeros(ctx.shape).index_copy_(0, rows, dy), None


def take_rows(x: Tensor, rows: Tensor) -> Tensor:
    """x[rows] for rows that are all different: the gradient is copied, where indexing would add it up."""
    return _TakeRows.apply(x, rows)
