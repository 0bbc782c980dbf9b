"""What the training loop calls: the draft's sizes, optimizer, schedule, packs in order, stop signals."""

import math
import signal
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from common.pipeline.settings import DraftModel, Train
from common.dataset.index import TRAIN, Pack, Packs, one_ahead
from common.draft.network import DraftConfig
from common.pipeline.errors import SafetyStop, UserError
from common.training.ranks import Ranks
from common.draft.unrolled_step import loss_positions

# Rotary scalings that training and both engines compute alike. A draft need not scale as its target does: of others
# (mrope, longrope, dynamic), it takes the plain angles.
SCALINGS = ("linear", "llama3", "yarn")
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


def draft_config(shape: DraftModel, text: dict, eps: float, aux: int, draft_vocab_size: int) -> DraftConfig:
    """The draft's sizes: the target's own (`text` is its config) where the settings say 0."""
    heads = shape.attention_heads or text["num_attention_heads"]
    rope = text.get("rope_parameters") or {}
    scaling = text.get("rope_scaling") or {k: v for k, v in rope.items() if k != "rope_theta"}
    if scaling.get("rope_type", scaling.get("type")) not in SCALINGS:
        scaling = None
    mla = {}
    if shape.form == "mla":
        names = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        mla = {name: text.get(name) or 0 for name in names}
    head_dim = shape.head_dim or text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]
    if shape.form == "mla" or "kv_lora_rank" in text:  # an MLA target's head sizes say nothing about Llama heads
        head_dim = shape.head_dim or 128
    return DraftConfig(
        form=shape.form,
        hidden_size=text["hidden_size"],
        intermediate_size=shape.intermediate_size or text["intermediate_size"],
        num_attention_heads=heads,
        num_key_value_heads=shape.key_value_heads or min(heads, text.get("num_key_value_heads") or heads),
        head_dim=head_dim,
        vocab_size=text["vocab_size"],
        draft_vocab_size=draft_vocab_size,
        num_aux=aux,
        rms_norm_eps=eps,
        rope_theta=float(text.get("rope_theta") or rope.get("rope_theta") or 10000.0),
        rope_scaling=scaling,
        max_position_embeddings=text.get("max_position_embeddings", 4096),
        norm_before_residual=shape.norm_before_residual,
        norm_before_fc=shape.norm_before_fc,
        fc_norm=shape.fc_norm,
        norm_output=shape.norm_output,
        **mla,
    )


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


# ---- packs in order ----


class PackOrder:
    """The endless sequence of training packs: epoch after epoch, each shuffled by the seed. Resume is a number."""

    def __init__(self, packs: Packs, seed: int):
        self.packs, self.seed = packs, seed
        self.plans: dict[int, list[list[int]]] = {}
        self.borders = [0]

    def _plan(self, epoch: int) -> list[list[int]]:
        if epoch not in self.plans:
            self.plans = {epoch: self.packs.plan(TRAIN, self.seed * 1_000_003 + epoch)}
            if len(self.borders) == epoch + 1:
                self.borders.append(self.borders[epoch] + len(self.plans[epoch]))
        return self.plans[epoch]

    def at(self, number: int) -> tuple[float, list[int]]:
        """(epochs done before it, rows) of pack `number`."""
        epoch = 0
        while True:
            if len(self.borders) <= epoch + 1:
                self._plan(epoch)
            if number < self.borders[epoch + 1]:
                plan = self._plan(epoch)
                at = number - self.borders[epoch]
                return epoch + at / len(plan), plan[at]
            epoch += 1

    def count(self, epochs: float) -> int:
        """Packs in so many epochs."""
        whole, total = math.floor(epochs), 0
        for epoch in range(whole):
            self._plan(epoch)
        total = self.borders[whole] if whole else 0
        if epochs > whole:
            total += math.ceil((epochs - whole) * len(self._plan(whole)))
        return total


def step_packs(order: PackOrder, step: int, settings: Train, ranks: Ranks) -> list[list[int]]:
    """The rows of this rank's packs of one optimizer step."""
    first = step * settings.packs_per_step
    return [order.at(first + i)[1] for i in range(ranks.rank, settings.packs_per_step, ranks.world)]


def prefetched(packs: Packs, wanted: Iterator[list[list[int]]], device: str) -> Iterator[list[Pack]]:
    """Packs of each step, read and moved one step ahead."""
    return one_ahead(lambda rows: [packs.load(r).to(device) for r in rows], wanted)


def global_counts(batch: list[Pack], steps: int, ranks: Ranks) -> Tensor:
    """Loss positions int64 [K] of an optimizer step over its packs and ranks; raises SafetyStop when there are none."""
    counts = torch.stack([loss_positions(p.loss_mask, p.offsets, steps).counts for p in batch]).sum(0)
    counts = ranks.sum(counts)
    if counts[0] == 0:
        raise SafetyStop(f"a batch without a supervised token: samples {', '.join(id for p in batch for id in p.ids)}")
    return counts


class StopSignal:
    """SIGTERM and the first Ctrl-C ask the loop to checkpoint and stop; a second Ctrl-C stops at once."""

    def __init__(self, ranks: Ranks):
        self.asked_here, self.ranks = False, ranks
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._ask)

    def _ask(self, number, frame) -> None:
        self.asked_here = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def asked(self) -> bool:
        """Whether any rank was asked, the same answer on every rank."""
        if self.ranks.world == 1:
            return self.asked_here
        return bool(self.ranks.sum(torch.tensor([int(self.asked_here)])))
