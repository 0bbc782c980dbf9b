"""The on-policy check: do the stored states predict the tokens that the target wrote?

lm_head(final_norm(last_hidden at i)) is the target's distribution for token i+1. Over the tokens of its replies, the
mean negative log-likelihood must be low and its first choice mostly the written token. Compared with the token before
or after, the same states must do worse. Wrong ids, layers, norm or alignment fail here, instead of training a draft
whose proposals are never accepted.
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
POSITIONS = 256  # per sequence, from its first reply token on: bounds the cost of a large head
CHUNK = 64  # positions whose logits are in memory at once
TIES = 2  # mismatches allowed for bf16 ties, which matter in shards with few positions
GREEDY_TOP1 = 0.9  # a greedy reply is the target's first choice, except at bf16 ties


@dataclass
class OnPolicy:
    """Sums over checked positions; `nll` in nat, `top1` counts, by shift of the token that is compared."""

    positions: int = 0
    greedy: bool = True
    nll: float = 0.0
    top1: float = 0.0
    early_nll: float = 0.0  # against the position's own token
    late_nll: float = 0.0  # against the token after the next
    shifted_positions: int = 0

    def line(self) -> str:
        n, shifted = max(self.positions, 1), max(self.shifted_positions, 1)
        return (
            f"{self.positions} tokens of replies: {self.nll / n:.3f} nat/token, first choice {self.top1 / n:.1%} "
            f"(one token early {self.early_nll / shifted:.1f} nat, late {self.late_nll / shifted:.1f} nat)"
        )

    def problem(self) -> str | None:
        """Which figure is beyond its limit, or None."""
        if not self.positions:
            return None
        nll, top1 = self.nll / self.positions, self.top1 / self.positions
        least = max(MIN_TOP1, GREEDY_TOP1 if self.greedy else 0.0)
        if nll > MAX_NLL:
            return f"{nll:.2f} nat/token is above the limit of {MAX_NLL:g}"
        if self.top1 + TIES < least * self.positions:
            return f"first choice {top1:.1%} is below {least:.0%}"
        early, late = self.early_nll / self.positions, self.late_nll / max(self.shifted_positions, 1)
        if early <= nll or (self.shifted_positions and late <= nll):  # a reply of one token has no later token
            return "the states fit the neighbouring token as well: they are shifted against the ids"
        return None


class OnPolicyCheck:
    """Checks sequences as stored. The target's final norm [H] with its `eps`, and its head [V, H]."""

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
            total = getattr(self.total, key)
            setattr(self.total, key, total and value if key == "greedy" else total + value)
        if problem:
            raise SafetyStop(
                f"{shard.path}, sample {shard.facts[0]['id']} and following: {problem}. These are not the target's "
                "states at these ids: check the model, the layer list, the final norm and the ids; the shard is deleted"
            )

    @torch.inference_mode()
    def _add(self, shard: Shard, i: int, figures: OnPolicy) -> None:
        start, stop = shard.offsets[i], shard.offsets[i + 1]
        ids, mask = shard.read("input_ids", start, stop).long(), shard.read("loss_mask", start, stop).bool()
        # position i predicts token i+1
        rows = torch.nonzero(mask[1:]).flatten()[:POSITIONS]
        rows = rows[rows + 1 != (shard.facts[i].get("forced") or 0)]  # the thinking budget wrote this token
        if not len(rows):
            return
        last = shard.read("last_hidden", start, stop)[rows]
        has_later = rows + 2 < len(ids)
        right, early, late = ids[rows + 1], ids[rows], ids[(rows + 2).clamp(max=len(ids) - 1)]
        top1, nll, nll_early, nll_late = self._compare(last, torch.stack([right, early, late]))
        figures.positions += len(rows)
        figures.shifted_positions += int(has_later.sum())
        figures.nll += nll.sum().item()
        figures.top1 += top1.sum().item()
        figures.early_nll += nll_early.sum().item()
        figures.late_nll += nll_late[has_later].sum().item()
        figures.greedy &= shard.facts[i].get("temperature") == 0

    def _compare(self, last: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """After states [N, H]: whether tokens[0] is the first choice, and the negative log-likelihood of tokens [3, N].

        In chunks that stay in the cache: logits of all positions at once would be read from memory by each operation.
        """
        results = []
        for states, wanted in zip(last.split(CHUNK), tokens.split(CHUNK, dim=1), strict=True):
            normed = rms_norm(states.to(self.device).float(), self.norm.shape, None, self.eps)
            logits = (normed.to(torch.bfloat16).mul_(self.norm) @ self.head.T).float()
            chosen = logits.gather(1, wanted.T.to(self.device))
            nll = logits.logsumexp(1, keepdim=True) - chosen
            first = chosen[:, :1] == logits.amax(1, keepdim=True)  # bf16 logits tie: each of them is a first choice
            results.append(torch.cat([first, nll], 1).cpu())
        return torch.cat(results).unbind(1)
