"""The on-policy check: do the stored states predict the tokens that the target itself wrote?

lm_head(final_norm(last_hidden at i)) is the target's distribution for token i+1. Over its own output tokens the mean
negative log-likelihood must be low and the first choice mostly theirs. Read one token too early or too late, the same
states must do clearly worse. Wrong ids, layers, norm or alignment fail here instead of training a draft that accepts
nothing.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import rms_norm

from common.dataset.shards import Shard
from common.pipeline.errors import SafetyStop

CHECK_FIRST = 8  # sequences of a shard that are checked
MAX_NLL = 2.0  # nat/token: above it, the run stops
MIN_TOP1 = 0.5  # below this share of first choices, the run stops
POSITIONS = 256  # of a sequence, from its first reply token on: bounds the cost of a large head
CHUNK = 64  # positions whose logits exist at once
TIES = 2  # bf16 ties that fall the other way are no finding where a shard has but a few positions
GREEDY_TOP1 = 0.9  # a greedy reply is the target's first choice everywhere but at bf16 ties


@dataclass
class OnPolicy:
    """Sums over checked positions; `nll` in nat, `top1` counts, by shift of the token that is compared."""

    positions: int = 0
    greedy: bool = True
    nll: float = 0.0
    top1: float = 0.0
    early_nll: float = 0.0  # against the token one earlier: the position's own
    late_nll: float = 0.0  # against the token one later
    shifted_positions: int = 0

    def line(self) -> str:
        n = max(self.positions, 1)
        s = max(self.shifted_positions, 1)
        return (
            f"{self.positions} tokens of the target's own: {self.nll / n:.3f} nat/token, first choice "
            f"{self.top1 / n:.1%} (one token early {self.early_nll / s:.1f} nat, late {self.late_nll / s:.1f} nat)"
        )

    def problem(self) -> str | None:
        """What is wrong with the figures, or None."""
        if not self.positions:
            return None
        nll, top1 = self.nll / self.positions, self.top1 / self.positions
        least = max(MIN_TOP1, GREEDY_TOP1 if self.greedy else 0.0)
        if nll > MAX_NLL:
            return f"{nll:.2f} nat/token is above the limit of {MAX_NLL:g}"
        if self.top1 + TIES < least * self.positions:
            return f"first choice {top1:.1%} is below {least:.0%}"
        early, late = self.early_nll / self.positions, self.late_nll / max(self.shifted_positions, 1)
        if early <= nll or (self.shifted_positions and late <= nll):  # replies of one token have no later one
            return "the states fit the neighbouring token as well: they are shifted against the ids"
        return None


class OnPolicyCheck:
    """Checks sequences as stored. norm [H], head [V, H] are the target's own, `eps` its norm's."""

    def __init__(self, norm: Tensor, head: Tensor, eps: float):
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.norm, self.head = norm.to(self.device, torch.bfloat16), head.to(self.device, torch.bfloat16)
        self.eps, self.total = eps, OnPolicy()

    def check_shard(self, shard: Shard) -> None:
        """Check the shard's first sequences; raises SafetyStop when their figures are beyond the limits."""
        figures = OnPolicy()
        for i in range(min(len(shard), CHECK_FIRST)):
            self._add(shard, i, figures)
        problem = figures.problem()
        for key, value in vars(figures).items():
            together = self.total.greedy and value if key == "greedy" else getattr(self.total, key) + value
            setattr(self.total, key, together)
        if problem:
            raise SafetyStop(
                f"{shard.path}, sample {shard.facts[0]['id']} and following: {problem}. These are not the target's "
                "states at these ids: check the model, the layer list, the final norm and the ids; nothing was kept"
            )

    @torch.inference_mode()
    def _add(self, shard: Shard, i: int, figures: OnPolicy) -> None:
        start, stop = shard.offsets[i], shard.offsets[i + 1]
        ids, mask = shard.read("input_ids", start, stop).long(), shard.read("loss_mask", start, stop).bool()
        # Position i predicts token i+1; the last but one is the last whose neighbours on both sides exist.
        at = torch.nonzero(mask[1:]).flatten()[:POSITIONS]
        at = at[at + 1 != (shard.facts[i].get("forced") or 0)]  # the thinking budget's closing token is not its own
        if not len(at):
            return
        last = shard.read("last_hidden", start, stop)[at]
        every = torch.arange(len(at))
        inner = every[at + 2 < len(ids)]
        right, early, late = ids[at + 1], ids[at], ids[(at + 2).clamp(max=len(ids) - 1)]
        top1, nll, nll_early, nll_late = self._compare(last, torch.stack([right, early, late]))
        figures.positions += len(at)
        figures.shifted_positions += len(inner)
        figures.nll += nll.sum().item()
        figures.top1 += top1.sum().item()
        figures.early_nll += nll_early.sum().item()
        figures.late_nll += nll_late[inner].sum().item()
        figures.greedy &= shard.facts[i].get("temperature") == 0

    def _compare(self, last: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Is tokens[0] the first choice, and the negative log-likelihoods of tokens [3, N], after states [N, H].

        In chunks: a float copy of all logits (V is 163,840 for Kimi) would be read from memory again by each step.
        """
        parts = []
        for states, wanted in zip(last.split(CHUNK), tokens.split(CHUNK, dim=1), strict=True):
            normed = rms_norm(states.to(self.device).float(), self.norm.shape, None, self.eps)
            logits = (normed.to(torch.bfloat16).mul_(self.norm) @ self.head.T).float()
            chosen = logits.gather(1, wanted.T.to(self.device))
            nll = logits.logsumexp(1, keepdim=True) - chosen
            first = chosen[:, :1] == logits.amax(1, keepdim=True)  # bf16 logits tie; either is a first choice
            parts.append(torch.cat([first, nll], 1).cpu())
        return torch.cat(parts).unbind(1)
