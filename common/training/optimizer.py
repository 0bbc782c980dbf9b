"""The optimizer, its learning rate, and checks of the settings of training."""

import math

import torch
from torch import nn

from common.dataset.index import Index
from common.pipeline.errors import UserError
from common.pipeline.settings import Train
from common.training.ranks import Ranks

GRAD_CLIP = 1.0  # highest gradient norm
WARMUP_SHARE = 0.05  # share of the steps with a rising learning rate
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def check_settings(s: Train, ranks: Ranks) -> None:
    """Raise UserError for settings that contradict each other or the ranks."""
    if s.packs_per_step % ranks.world:
        raise UserError(f"train.packs_per_step {s.packs_per_step} must be a multiple of the ranks, {ranks.world}")


def check_pack_tokens(index: Index, pack_tokens: int) -> None:
    """Raise UserError where a sample is longer than a pack: it would need more memory than the setting promises."""
    longest = int(index.length.max())
    if longest > pack_tokens:
        raise UserError(
            f"train.pack_tokens is {pack_tokens}, but the longest sample of 03_dataset has {longest} tokens; set "
            f"--pack-tokens {longest} or more, or run 03 again with --sample-tokens {pack_tokens}, which cuts samples"
        )


class Optimizers:
    """Several optimizers that step as one; each has its own parameters and keeps their state."""

    def __init__(self, *optimizers: torch.optim.Optimizer):
        self.optimizers = optimizers

    @property
    def param_groups(self) -> list[dict]:
        return [group for inner in self.optimizers for group in inner.param_groups]

    def step(self) -> None:
        for inner in self.optimizers:
            inner.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for inner in self.optimizers:
            inner.zero_grad(set_to_none=set_to_none)


def make_optimizer(module: nn.Module, settings: Train) -> Optimizers:
    """AdamW over float32 masters; with Muon for the matrices between embedding and head, if asked.

    Muon's updates are scaled to AdamW's size, so that one learning rate serves both.
    """
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    inner = {n for n, p in trained.items() if p.ndim == 2 and n.startswith(("midlayer.", "fc."))}
    matrices = inner if settings.optimizer == "muon" else set()
    rest = [p for name, p in trained.items() if name not in matrices]
    groups = [{"params": [p for p in rest if p.ndim > 1]}, {"params": [p for p in rest if p.ndim <= 1]}]
    optimizers = [torch.optim.AdamW(groups, lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True)]
    if matrices:
        muon = {"lr": settings.learning_rate, "weight_decay": 0.0}
        optimizers.append(
            torch.optim.Muon([trained[n] for n in sorted(matrices)], **muon, adjust_lr_fn="match_rms_adamw")
        )
    return Optimizers(*optimizers)


def learning_rate(step: int, total: int, settings: Train) -> float:
    """Linear warm-up, then a cosine to zero; `step` counts from 0."""
    warmup = max(1, round(WARMUP_SHARE * total))
    if step < warmup:
        return settings.learning_rate * (step + 1) / warmup
    return settings.learning_rate * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, total - warmup)))
