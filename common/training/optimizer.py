"""The optimizer, its learning rate, and checks of the settings of training."""

import math

import torch
from torch import nn

from common.pipeline.errors import UserError
from common.pipeline.settings import Train
from common.training.ranks import Ranks

GRAD_CLIP = 1.0  # highest gradient norm
WARMUP_SHARE = 0.05  # share of the steps with a rising learning rate
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def check_settings(s: Train, ranks: Ranks, longest: int) -> None:
    """Raise UserError for settings that do not fit the ranks or the longest sample [tokens] of the data set."""
    if s.packs_per_step % ranks.world:
        raise UserError(f"train.packs_per_step {s.packs_per_step} must be a multiple of the ranks, {ranks.world}")
    if longest > s.pack_tokens:
        raise UserError(
            f"train.pack_tokens is {s.pack_tokens}, but the longest sample of 03_dataset has {longest} tokens; set "
            f"--pack-tokens {longest} or more, or run 03 again with --sample-tokens {s.pack_tokens}, which cuts samples"
        )


class Optimizers:
    """Several optimizers that step together, each with its own parameters."""

    def __init__(self, *optimizers: torch.optim.Optimizer):
        self.optimizers = optimizers

    @property
    def param_groups(self) -> list[dict]:
        return [group for inner in self.optimizers for group in inner.param_groups]

    def step(self) -> None:
        for inner in self.optimizers:
            inner.step()

    def zero_grad(self) -> None:
        for inner in self.optimizers:
            inner.zero_grad()


def make_optimizer(module: nn.Module, settings: Train) -> Optimizers:
    """AdamW over float32 masters; with `train.optimizer` "muon", Muon for the matrices between embedding and head.

    Muon's updates are scaled to AdamW's size, so that both use one learning rate.
    """
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    inner = {n: p for n, p in sorted(trained.items()) if p.ndim == 2 and n.startswith(("midlayer.", "fc."))}
    matrices, options = inner if settings.optimizer == "muon" else {}, {"lr": settings.learning_rate, "weight_decay": 0}
    rest = [p for name, p in trained.items() if name not in matrices]
    groups = [{"params": [p for p in rest if p.ndim > 1]}, {"params": [p for p in rest if p.ndim <= 1]}]
    adamw = torch.optim.AdamW(groups, **options, betas=(0.9, 0.95), fused=True)
    muon = [torch.optim.Muon(matrices.values(), **options, adjust_lr_fn="match_rms_adamw")] if matrices else []
    return Optimizers(adamw, *muon)


def learning_rate(step: int, total: int, settings: Train) -> float:
    """Linear warm-up, then a cosine to zero; `step` counts from 0."""
    warmup = max(1, round(WARMUP_SHARE * total))
    if step < warmup:
        return settings.learning_rate * (step + 1) / warmup
    return settings.learning_rate * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, total - warmup)))
