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


def fused(body=None, *, varying: tuple[int, ...] = (0,), also: dict[int, tuple] | None = None, eager=None):
    """Run `body` compiled when that is switched on; the first failure to compile switches back for good.

    `varying` names the dimensions of its arguments that differ from call to call (`also`: further ones of one
    argument): a loop is compiled once for all of them, and what is fixed makes it faster. `eager` is the same function
    written for aten's ready-made passes.
    """
    if body is None:
        return functools.partial(fused, varying=varying, also=also, eager=eager)
    plain = eager or body

    @functools.cache
    def compiled():
        return torch.compile(body)

    @functools.wraps(body)
    def call(*args):
        if not _compiled:
            return plain(*args)
        for place, x in enumerate(args):
            if isinstance(x, Tensor):
                for dimension in (*varying, *((also or {}).get(place, ()))):
                    if dimension < x.dim():
                        torch._dynamo.maybe_mark_dynamic(x, dimension)
        try:
            return compiled()(*args)
        except Exception as error:  # whatever a missing or broken compiler raises, the eager body is right
            log.warning("no fused loops (%s: %s); continuing without", type(error).__name__, str(error).split("\n")[0])
            compile_bodies(False)
            return plain(*args)

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


class _Linear(torch.autograd.Function):
    """x W' for each W, plus `add` for a single one. The gradient of a W goes to its float32 master, so that unrolled
    steps add up in float32."""

    @staticmethod
    def forward(ctx, x, add, *weights):
        masters, lows = weights[0::2], weights[1::2]
        ctx.save_for_backward(x, *lows)
        ctx.master_dtype = masters[0].dtype
        return tuple(x @ low.t() if add is None else torch.addmm(add, x, low.t()) for low in lows)

    @staticmethod
    @once_differentiable
    def backward(ctx, *douts):
        x, *lows = ctx.saved_tensors
        dx, turned, dweights = None, None, []
        for place, (dout, low) in enumerate(zip(douts, lows, strict=True)):
            dweight = None
            if ctx.needs_input_grad[2 + 2 * place]:
                # oneDNN takes twice as long where it must transpose on the way: do the narrower of the two beforehand
                if x.shape[1] < dout.shape[1]:
                    turned = x.t().contiguous() if turned is None else turned
                    dweight = (turned @ dout).t()
                else:
                    dweight = dout.t().contiguous() @ x
                dweight = dweight.to(ctx.master_dtype)
            if ctx.needs_input_grad[0]:
                dx = dout @ low if dx is None else dx.addmm_(dout, low)
            dweights += [dweight, None]
        return dx, douts[0] if ctx.needs_input_grad[1] else None, *dweights


class Weight:
    """A matrix [out, in] in two precisions: the float32 master that learns, and the copy that computes."""

    def __init__(self, master: Tensor, dtype: torch.dtype):
        self.master = master
        self.low = master.detach().to(dtype).contiguous()

    def __call__(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        return _Linear.apply(x, add, self.master, self.low)[0]


def both(x: Tensor, first: Weight, second: Weight) -> tuple[Tensor, Tensor]:
    """x through two matrices: what their gradients share is done once."""
    return _Linear.apply(x, None, first.master, first.low, second.master, second.low)


@fused
def _rms_norm(x, weight, eps: float):
    y = x.to(wide(x.dtype))
    scale = torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    return (y * scale * weight).to(x.dtype), scale


@fused
def _rms_norm_backward(dy, dx, x, weight, scale):
    dy = dy.to(scale.dtype)
    unit = x.to(scale.dtype) * scale
    dunit = dy * weight
    dx = dx + scale * (dunit - unit * (dunit * unit).mean(-1, keepdim=True))
    return dx.to(x.dtype), (dy * unit).sum(0)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps):
        y, scale = _rms_norm(x, weight, eps)
        ctx.save_for_backward(x, weight, scale)
        return y, x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy, dx):
        x, weight, scale = ctx.saved_tensors
        dx, dweight = _rms_norm_backward(dy, dx, x, weight, scale)
        return dx, dweight.to(weight.dtype), None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x [n, H] over its root mean square, times weight [H]; and x again, for the residual that is read beside it: so
    their gradients meet inside one pass."""
    return _RMSNorm.apply(x, weight, eps)


@fused
def _swiglu(gate, up):
    wide_gate = gate.to(wide(gate.dtype))
    return (wide_gate * torch.sigmoid(wide_gate) * up).to(gate.dtype)


@fused
def _swiglu_backward(dy, gate, up):
    dy, z = dy.to(wide(gate.dtype)), gate.to(wide(gate.dtype))
    sigmoid = torch.sigmoid(z)
    return (dy * up * sigmoid * (1 + z * (1 - sigmoid))).to(gate.dtype), (dy * z * sigmoid).to(gate.dtype)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        return _swiglu(gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        return _swiglu_backward(dy, *ctx.saved_tensors)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, all [n, I]."""
    return _SwiGLU.apply(gate, up)


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
    """x [n, h, d] turned by angles, cos and sin [n, d/2]: (i, i + d/2) together as in Llama, or neighbours (pairs)."""
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
