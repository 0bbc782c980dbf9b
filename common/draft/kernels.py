"""Element-wise loops and matrix products of the draft, each with its own backward, to make few passes over memory.

A matrix product of this size takes as long as three or four passes over its result: on CPU the passes decide the speed.
Every pass is a plain function of tensors (`body`) under `fused`, which torch.compile turns into one loop after
`compile_loops()`; otherwise it runs eagerly. Both give the same numbers up to the order of rounding.

Shapes: n rows, H hidden, I intermediate, h heads, d head width.
"""

import ctypes
import functools
import importlib.util
import os
import shutil
import sys

import torch
from torch import Tensor

from common.pipeline.errors import UserError

_compiled = False


def compile_loops(on: bool = True) -> None:
    """Process-wide switch, for the start of a script: whether fused loops are compiled."""
    global _compiled
    _compiled = on


def missing_compiler(device: str) -> str:
    """A sentence that names what torch.compile needs for `device` and is not installed; empty where it has all."""
    compilers = [os.environ.get("CXX", "g++")]
    if device.startswith("cuda"):
        if importlib.util.find_spec("triton") is None:
            return "Triton is not installed"
        compilers = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"]
    return "" if any(map(shutil.which, compilers)) else f"{' or '.join(compilers)} is not installed"


def keep_freed_memory() -> None:
    """Process-wide switch, for the start of a script: glibc reuses freed memory instead of returning it to the system.

    Otherwise page faults cost more than the arithmetic: a [2048, 8192] bf16 product took 48 ms with them, 6 without.
    """
    if sys.platform == "linux":
        libc, trim_threshold, mmap_threshold = ctypes.CDLL(None), -1, -3
        libc.mallopt(mmap_threshold, 1 << 30)
        libc.mallopt(trim_threshold, (1 << 31) - 1)


def fused(body=None, *, varying: tuple[int, ...] = (0,), also: dict[int, tuple] | None = None, eager=None):
    """Run `body` as one compiled loop after `compile_loops()`. Raises UserError where the compiler fails.

    `varying`: dimensions, of every tensor argument, whose sizes change from call to call; `also`: further such
    dimensions of single arguments, by the argument's number. A loop is compiled once for all these sizes; fixed sizes
    make it faster. `eager`: the same function in terms of torch's operators, for uncompiled runs.
    """
    if body is None:
        return functools.partial(fused, varying=varying, also=also, eager=eager)

    @functools.cache
    def compiled():
        return torch.compile(body)

    @functools.wraps(body)
    def call(*args):
        if not _compiled:
            return (eager or body)(*args)
        for number, x in enumerate(args):
            if isinstance(x, Tensor):
                for dimension in (*varying, *((also or {}).get(number, ()))):
                    if dimension < x.dim():
                        torch._dynamo.maybe_mark_dynamic(x, dimension)
        try:
            return compiled()(*args)
        except torch._dynamo.exc.TorchDynamoException as error:
            reason = str(error).strip().split("\n")[0]
            raise UserError(f"torch.compile failed ({reason}); run again with --no-compile") from None

    return call


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which sums over values of `dtype` are taken: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class _Linear(torch.autograd.Function):
    """x W' for each matrix W, plus `add` (None with several matrices). The gradient of each W goes to its float32
    master, so that the gradients of the unrolled steps are summed in float32."""

    @staticmethod
    def forward(ctx, x, add, *weights):
        masters, lows = weights[0::2], weights[1::2]
        ctx.save_for_backward(x, *lows)
        ctx.master_dtype = masters[0].dtype
        return tuple(x @ low.t() if add is None else torch.addmm(add, x, low.t()) for low in lows)

    @staticmethod
    def backward(ctx, *douts):
        x, *lows = ctx.saved_tensors
        dx, transposed, dweights = None, None, []
        for dout, low, trained in zip(douts, lows, ctx.needs_input_grad[2::2], strict=True):
            dweight = None
            if trained:
                # oneDNN takes twice as long where it must transpose: transpose the narrower matrix first
                if x.shape[1] < dout.shape[1]:
                    transposed = x.t().contiguous() if transposed is None else transposed
                    dweight = (transposed @ dout).t()
                else:
                    dweight = dout.t().contiguous() @ x
                dweight = dweight.to(ctx.master_dtype)
            if ctx.needs_input_grad[0]:
                dx = dout @ low if dx is None else dx.addmm_(dout, low)
            dweights += [dweight, None]
        return dx, douts[0] if ctx.needs_input_grad[1] else None, *dweights


class Weight:
    """A matrix [out, in] in two precisions: the float32 master that is trained, and the copy used in products."""

    def __init__(self, master: Tensor, dtype: torch.dtype):
        self.master = master
        self.low = master.detach().to(dtype).contiguous()

    def __call__(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        return _Linear.apply(x, add, self.master, self.low)[0]


def two_linears(x: Tensor, first: Weight, second: Weight) -> tuple[Tensor, Tensor]:
    """x through two matrices; backward transposes x once for both and sums its gradient in place."""
    return _Linear.apply(x, None, first.master, first.low, second.master, second.low)


@fused
def _rms_norm(x, weight, eps: float):
    y = x.to(accumulation_dtype(x.dtype))
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
    """x [n, H] over its root mean square, times weight [H]; also returns x for the residual branch, so that one fused
    backward adds both gradients."""

    @staticmethod
    def forward(ctx, x, weight, eps):
        y, scale = _rms_norm(x, weight, eps)
        ctx.save_for_backward(x, weight, scale)
        return y, x.view_as(x)

    @staticmethod
    def backward(ctx, dy, dx):
        x, weight, scale = ctx.saved_tensors
        dx, dweight = _rms_norm_backward(dy, dx, x, weight, scale)
        return dx, dweight.to(weight.dtype), None


rms_norm = _RMSNorm.apply


@fused
def _swiglu(gate, up):
    z = gate.to(accumulation_dtype(gate.dtype))
    return (z * torch.sigmoid(z) * up).to(gate.dtype)


@fused
def _swiglu_backward(dy, gate, up):
    dy, z = dy.to(accumulation_dtype(gate.dtype)), gate.to(accumulation_dtype(gate.dtype))
    sigmoid = torch.sigmoid(z)
    return (dy * up * sigmoid * (1 + z * (1 - sigmoid))).to(gate.dtype), (dy * z * sigmoid).to(gate.dtype)


class _SwiGLU(torch.autograd.Function):
    """silu(gate) * up, all [n, I]."""

    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        return _swiglu(gate, up)

    @staticmethod
    def backward(ctx, dy):
        return _swiglu_backward(dy, *ctx.saved_tensors)


swiglu = _SwiGLU.apply


@fused
def _rotated(x, cos, sin, pairs: bool):
    sizes, dimension = ((-1, 2), -1) if pairs else ((2, -1), -2)
    first, second = x.to(cos.dtype).unflatten(-1, sizes).unbind(dimension)
    cos, sin = cos[:, None], sin[:, None]
    return torch.stack([first * cos - second * sin, second * cos + first * sin], dimension).flatten(-2).to(x.dtype)


class _Rotate(torch.autograd.Function):
    """x [n, h, d] rotated by angles with cos and sin [n, d/2]: dimensions (i, i + d/2) together as in Llama, or, with
    `pairs`, neighbouring dimensions."""

    @staticmethod
    def forward(ctx, x, cos, sin, pairs):
        ctx.save_for_backward(cos, sin)
        ctx.pairs = pairs
        return _rotated(x, cos, sin, pairs)

    @staticmethod
    def backward(ctx, dy):
        cos, sin = ctx.saved_tensors
        return _rotated(dy, cos, -sin, ctx.pairs), None, None, None  # the transpose of a rotation is its inverse


rotate = _Rotate.apply


class _TakeRows(torch.autograd.Function):
    """x[rows] for distinct rows: backward copies the gradient, where indexing would have to accumulate it."""

    @staticmethod
    def forward(ctx, x, rows):
        ctx.save_for_backward(rows)
        ctx.shape = x.shape
        return x.index_select(0, rows)

    @staticmethod
    def backward(ctx, dy):
        (rows,) = ctx.saved_tensors
        return dy.new_zeros(ctx.shape).index_copy_(0, rows, dy), None


take_rows = _TakeRows.apply
