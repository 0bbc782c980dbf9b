"""EAGLE-3's training-time test: one packed batch through all unrolled steps, exactly and without wasted work.

Position i of a document with tokens x, target states l and mask m (1 where the target wrote the token):

    step s reads    x_{i+1+s} and, at s = 0, g_i = fc(aux_i), then its own state of step s-1 at i; rotary position i + s
    step s learns   softmax(target_head(target_norm(l_{i+1+s}))), the distribution of x_{i+2+s}
    P_s             {i : m_{i+1} .. m_{i+1+s} all 1 and i+2+s < T}

What is computed where: keys and values of step 0 for every token, all else for the positions of P_0 only. P_0 is kept
in order as rows 0..P-1, in runs of neighbours. Since i in P_s means that i .. i+s are neighbours in P_0, "s further on"
is a shift by s rows: of the embedding half of the projections, of the target's distributions and of the tokens alike.

Shapes: T tokens, P loss positions, K steps, H hidden, A aux states, V vocabulary, D draft vocabulary, N projections.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.dataset.loss_positions import LossRun
from common.dataset.packs import Pack
from common.draft.attention import attention_kernel, merged_attention
from common.draft.head_loss import argmax, head_loss
from common.draft.kernels import Weight, compile_bodies, keep_freed_memory, rms_norm, take_rows, wide
from common.draft.network import Draft, rope_frequencies

TARGET_LOGITS = 32 * 1024 * 1024  # full-vocabulary logits at a time: 64 MiB in bf16


class StepResult(NamedTuple):
    """What one forward found. A tuple and not a dataclass: FSDP2 looks for the loss in tuples and lists only."""

    loss: Tensor  # scalar with gradient: sum over s of weight^s loss_sums[s] / counts[s]
    loss_sums: Tensor  # [K] cross entropy summed over P_s
    counts: Tensor  # [K] |P_s| of this pack, int64
    positions: Tensor  # int64 [P] flat indices of P_0
    right_token: Tensor  # bool [K, P] the draft's choice is the stream's own token x_{i+2+s}
    right_argmax: Tensor  # bool [K, P] the draft's choice is the target's, over the full vocabulary
    live: Tensor  # bool [K, P] position belongs to P_s


class Targets(NamedTuple):
    probabilities: Tensor  # [P+K-1, D] softmax over the draft's columns, for x_{i+2}; K-1 rows of zeros for shifts
    choice: Tensor  # int64 [P] argmax over the full vocabulary
    inside: Tensor  # bool [P] the choice is in the draft vocabulary


class UnrolledStep(nn.Module):
    """The module that DDP or FSDP2 wraps: a pack in, a loss and what was right out."""

    def __init__(
        self,
        draft: Draft,
        target_norm: Tensor,  # [H]
        target_norm_eps: float,
        target_head: Tensor,  # [V, H]
        draft_to_target: Tensor | None,  # int64 [D] absolute target ids; None for the full vocabulary
        steps: int = 7,
        step_weight: float = 0.8,
        *,
        dtype: torch.dtype = torch.bfloat16,
        compiled: bool = False,
    ):
        super().__init__()
        rows = draft.config.vocab_size if draft_to_target is None else draft_to_target.numel()
        if rows != draft.config.draft_vocab_size:
            raise ValueError(f"draft_to_target names {rows} tokens, the draft has {draft.config.draft_vocab_size}")
        self.draft, self.steps, self.step_weight = draft, steps, step_weight
        self.dtype, self.target_norm_eps = dtype, target_norm_eps
        known = torch.ones(target_head.shape[0], dtype=torch.bool)
        if draft_to_target is not None:
            known.fill_(False)[draft_to_target.cpu()] = True
        rotary_width = draft.midlayer.self_attn.rotary_width
        frequencies, self.rotary_factor = rope_frequencies(draft.config, rotary_width)
        buffers = {
            "target_norm": target_norm.detach(),
            "target_head": target_head.detach().to(dtype),
            "draft_to_target": draft_to_target,
            "target_rows": None if draft_to_target is None else target_head.detach()[draft_to_target].to(dtype),
            "known": known.to(target_head.device),
            "frequencies": frequencies.to(target_head.device),
        }
        for name, value in buffers.items():  # not persistent: they are the target's, or follow from the settings
            self.register_buffer(name, value, persistent=False)
        compile_bodies(compiled)
        keep_freed_memory()

    @torch.no_grad()
    def targets(self, last_hidden: Tensor) -> Targets:
        """last_hidden [P, H] at i+1 -> the distributions of x_{i+2}: once a pack, shifted for every step."""
        states, _ = rms_norm(last_hidden.to(self.dtype), self.target_norm, self.target_norm_eps)
        columns = self.draft.config.draft_vocab_size
        probabilities = states.new_empty((len(states) + self.steps - 1, columns))
        probabilities[len(states) :] = 0
        choice = torch.empty(len(states), dtype=torch.int64, device=states.device)
        size = max(1, TARGET_LOGITS // len(self.target_head))
        for start in range(0, len(states), size):
            chunk = slice(start, min(start + size, len(states)))
            full = states[chunk] @ self.target_head.t()
            choice[chunk] = argmax(full)
            logits = full if self.target_rows is None else states[chunk] @ self.target_rows.t()
            torch.softmax(logits, -1, out=probabilities[chunk])
        return Targets(probabilities, choice, self.known[choice])

    def loss_weights(self, steps: int) -> Tensor:
        """The loss weight of each step, float64 [K] on the CPU."""
        return self.step_weight ** torch.arange(steps, dtype=torch.float64)

    def _angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions [n] -> cos, sin [n, d/2]"""
        angles = positions.unsqueeze(1) * self.frequencies
        return tuple((x * self.rotary_factor).to(wide(self.dtype)) for x in (angles.cos(), angles.sin()))

    def _unroll(self, pack: Pack, positions: Tensor, runs: list[LossRun]) -> tuple[Tensor, Weight]:
        """-> what the head reads [K, P, H], and the head"""
        draft, layer, attention = self.draft, self.draft.midlayer, self.draft.midlayer.self_attn
        weights, columns, count = draft.cast(self.dtype), attention.query_columns, positions.numel()
        places = torch.arange(pack.input_ids.numel()) - pack.offsets[:-1].repeat_interleave(pack.offsets.diff())
        places = places.to(positions.device)

        # what follows from tokens alone: row i has x_{i+1}; the last row of a document has none, and nothing reads it
        embedded = F.embedding(pack.input_ids.roll(-1), draft.embed_tokens.weight).to(self.dtype)
        embedded = layer.input_layernorm(embedded)
        embedded_kv = weights["embedding_kv"](embedded)
        embedded_q = weights["embedding_q"](take_rows(embedded, positions))
        shifted = torch.cat([embedded_q, take_rows(embedded_kv, positions)], 1)
        shifted = F.pad(shifted, (0, 0, 0, self.steps - 1))  # [P+K-1, N]; rows shifted in from the padding are not live

        normed, state = layer.hidden_norm.beside(draft.fuse(pack.aux_hidden.to(self.dtype), weights))
        cos, sin = self._angles(places)
        keys, values = attention.keys_values(weights["hidden_kv"](normed, embedded_kv), cos, sin, weights)
        normed, state, places = take_rows(normed, positions), take_rows(state, positions), places[positions]

        kernel, own, outputs = attention_kernel(runs, positions.device), [], []
        for step in range(self.steps):
            cos, sin = self._angles(places + step)
            if step == 0:
                projected = weights["hidden_q"](normed, embedded_q)
            else:
                normed, state = layer.hidden_norm.beside(state)
                projected = weights["hidden_qkv"](normed, shifted[step : step + count])
                own += attention.keys_values(projected[:, columns:], cos, sin, weights)
            queries = attention.queries(projected[:, :columns], cos, sin, weights)
            heads = merged_attention(queries, keys, values, own, kernel, attention.scale)
            residual = normed if draft.config.norm_before_residual else state
            state, output = draft.after_attention(heads, residual, weights)
            outputs.append(output)
        return torch.stack(outputs), weights["lm_head"]

    def forward(self, pack: Pack, counts: Tensor | None = None) -> StepResult:
        """`counts` [K] of all ranks and accumulated packs together, where the loss is to be a mean over all of them."""
        device, steps = pack.input_ids.device, self.steps
        pack_counts, runs = pack.loss_positions.counts(steps), pack.loss_positions.runs
        positions, live = pack.loss_positions.positions.to(device), pack.loss_positions.in_step(steps).to(device)
        targets = self.targets(pack.last_hidden[positions + 1])

        def shifted(x: Tensor) -> Tensor:
            """[P] -> [K, P]: row n of step s is x[n + s]"""
            padded = F.pad(x, (0, steps - 1))
            return torch.stack([padded[s : s + len(x)] for s in range(steps)])

        divisor = (pack_counts if counts is None else counts).to(device).clamp(min=1)
        scale = self.loss_weights(steps).to(device, wide(self.dtype)) / divisor
        with_loss = live & shifted(targets.inside)
        hidden, head = self._unroll(pack, positions, runs)
        loss, losses, choice = head_loss(hidden, head, targets.probabilities, with_loss * scale.unsqueeze(1))

        if self.draft_to_target is not None:
            choice = self.draft_to_target[choice]
        return StepResult(
            loss=loss,
            loss_sums=losses.sum(1),
            counts=pack_counts.to(device),
            positions=positions,
            right_token=live & (choice == shifted(pack.input_ids[positions + 2])),
            right_argmax=live & (choice == shifted(targets.choice)),
            live=live,
        )
