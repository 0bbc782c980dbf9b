"""What the training loop calls: the draft's sizes, optimizer, schedule, packs in order, stop signals."""

import math

import torch
from torch import nn

from common.pipeline.errors import UserError
from common.pipeline.settings import Train
from common.training.ranks import Ranks

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


# ---- settings, draft, optimizer, schedule ----


def check_settings(s: Train, ranks: Ranks) -> None:
    """Raise UserError for settings that contradict each other or the ranks."""
    if s.packs_per_step % ranks.world:
        raise UserError(f"train.packs_per_step {s.packs_per_step} must be a multiple of the ranks, {ranks.world}")
    if s.step_weights and len(s.step_weights) != s.unrolled_steps:
        raise UserError(f"train.step_weights has {len(s.step_weights)} entries for {s.unrolled_steps} unrolled steps")
    if s.step_weights and not s.step_weights[0]:
        raise UserError("train.step_weights must weight the first step: every later one builds on it")
    if s.hard_label_share > 1:
        raise UserError(f"train.hard_label_share must be at most 1, not {s.hard_label_share:g}")


class Optimizers:
    """Several optimizers that step as one; each has its own parameters and keeps their state."""

    def __init__(self, *parts: torch.optim.Optimizer):
        self.parts = parts

    @property
    def param_groups(self) -> list[dict]:
        return [group for part in self.parts for group in part.param_groups]

    def step(self) -> None:
        for part in self.parts:
            part.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none=set_to_none)


def make_optimizer(module: nn.Module, settings: Train) -> Optimizers:
    """AdamW over float32 masters, norms not decayed; with Muon for the matrices between embedding and head, if asked.

    Muon's updates are scaled to AdamW's size, so that one learning rate serves both.
    """
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    inner = {n for n, p in trained.items() if p.ndim == 2 and n.startswith(("midlayer.", "fc."))}
    matrices = inner if settings.optimizer == "muon" else set()
    rest = [p for name, p in trained.items() if name not in matrices]
    groups = [
        {"params": [p for p in rest if p.ndim > 1], "weight_decay": settings.weight_decay},
        {"params": [p for p in rest if p.ndim <= 1], "weight_decay": 0.0},
    ]
    parts = [torch.optim.AdamW(groups, lr=settings.learning_rate, betas=(0.9, 0.95), fused=True)]
    if matrices:
        if not hasattr(torch.optim, "Muon"):
            raise UserError(f"train.optimizer muon needs torch 2.9 or newer, this is {torch.__version__}")
        muon = {"lr": settings.learning_rate, "weight_decay": settings.weight_decay}
        parts.append(torch.optim.Muon([trained[n] for n in sorted(matrices)], **muon, adjust_lr_fn="match_rms_adamw"))
    return Optimizers(*parts)


def learning_rate(step: int, total: int, settings: Train) -> float:
    """Linear warm-up, then a cosine to zero; `step` counts from 0."""
    warmup = max(1, round(settings.warmup_share * total))
    if step < warmup:
        return settings.learning_rate * (step + 1) / warmup
    return settings.learning_rate * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, total - warmup)))
