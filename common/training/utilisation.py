"""Utilisation: the operations of a training step over those that this machine's matrix products reach in its time."""

import time

import torch

from common.dataset.packs import Pack
from common.draft.config import DraftConfig
from common.draft.flops import step_flops


def pack_flops(draft: DraftConfig, pack: Pack, steps: int) -> float:
    """Floating point operations of a pack's forward and backward."""
    positions, ends = pack.loss_positions.positions, pack.offsets[1:]
    starts = pack.offsets[torch.searchsorted(ends, positions, right=True)]
    return step_flops(draft, int(ends[-1]), len(positions), int((positions - starts + 1).sum()), steps)


def matmul_rate(device: str, dtype: torch.dtype) -> float:
    """Floating point operations a second of large matrix products on this device; the best of a few runs."""
    cuda = device.startswith("cuda")
    size, best = 8192 if cuda else 1024, float("inf")
    a = torch.randn(size, size, device=device).to(dtype)
    for _ in range(6):  # the first runs warm up
        started = time.perf_counter()
        a @ a
        if cuda:
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - started)
    return 2 * size**3 / best
