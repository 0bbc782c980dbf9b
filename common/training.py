"""What the training loop calls: ranks, the draft's sizes, optimizer, schedule, packs in order, stop signals."""

import math
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from common.config import DraftModel, Train
from common.dataset import TRAIN, Pack, Packs
from common.draft import DraftConfig
from common.errors import SafetyStop
from common.ttt import loss_positions

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


# ---- ranks ----


@dataclass(frozen=True)
class Ranks:
    """This process among those that torchrun started; one of one without it."""

    rank: int
    world: int
    device: str

    @property
    def first(self) -> bool:
        return self.rank == 0

    def wait(self) -> None:
        """Until every rank is here."""
        if self.world > 1:
            dist.barrier()

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all ranks, on the CPU."""
        if self.world == 1:
            return values.cpu()
        values = values.to(self.device)
        dist.all_reduce(values)
        return values.cpu()


def start_ranks(device: str) -> Ranks:
    """Join torchrun's process group where there is one; nccl on GPUs, gloo on CPUs."""
    device = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    if "RANK" not in os.environ:
        return Ranks(0, 1, device)
    if device == "cuda":
        device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.startswith("cuda") else "gloo")
    return Ranks(dist.get_rank(), dist.get_world_size(), device)


# ---- draft, optimizer, schedule ----


def draft_config(shape: DraftModel, text: dict, eps: float, aux: int, draft_vocab_size: int) -> DraftConfig:
    """The draft's sizes: the target's own (`text` is its config) where the settings say 0."""
    heads = shape.attention_heads or text["num_attention_heads"]
    rope = text.get("rope_parameters") or {}
    scaling = text.get("rope_scaling") or ({k: v for k, v in rope.items() if k != "rope_theta"} if rope else None)
    if scaling and scaling.get("rope_type", scaling.get("type")) == "default":
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


def make_optimizer(module: nn.Module, settings: Train) -> torch.optim.Optimizer:
    """AdamW over float32 masters; norms are not decayed."""
    trained = [p for p in module.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": settings.weight_decay},
        {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=settings.learning_rate, betas=(0.9, 0.95), fused=True)


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
    """Packs of each step, read by a thread one step ahead, so that the step does not wait for the disk."""
    with ThreadPoolExecutor(1) as pool:

        def read(rows: list[list[int]]) -> list[Pack]:
            return [packs.load(r).to(device) for r in rows]

        ahead = None
        for rows in wanted:
            ready, ahead = ahead, pool.submit(read, rows)
            if ready is not None:
                yield ready.result()
        if ahead is not None:
            yield ahead.result()


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
