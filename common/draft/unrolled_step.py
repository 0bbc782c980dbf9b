"""EAGLE-3's training-time test (arXiv:2503.01840): one packed batch through all unrolled steps, exactly.

Position i of a document has token x_i, aux states a_i and last state l_i of the target, and mask m_i (* where the
target wrote the token). p_j is the target's distribution of token x_j: softmax(target_head(target_norm(l_{j-1}))).
Three prompt tokens, four written ones, three steps:

    i                  0    1    2    3    4    5    6
    token              x0   x1   x2   x3*  x4*  x5*  x6*

    step 0  state      a0   a1   a2   a3   a4   a5            a_i is fused by fc
            token      x1   x2   x3   x4   x5   x6            rotary position i
            learns               p4   p5   p6                 P_0 = {2, 3, 4}

    step 1  state                s2   s3   s4                 s_i: the draft's state of the step before, same column
            token                x4   x5   x6                 rotary position i + 1
            learns               p5   p6                      P_1 = {2, 3}: the document has no x7

    step 2  state                s2   s3                      the states of step 1
            token                x5   x6                      rotary position i + 2
            learns               p6                           P_2 = {2}

In symbols: step s at i reads x_{i+1+s} and learns p_{i+2+s} where m_{i+1} .. m_{i+1+s} are all 1 and the document has
an x_{i+2+s}: that set of positions is P_s (common/dataset/loss_positions.py).

Step 0 computes keys and values for every token; everything else is computed for the P positions of P_0 only, kept in
order as rows 0..P-1. Since i in P_s means that i .. i+s are neighbours in P_0, moving to x_{i+1+s} and p_{i+2+s} is a
shift by s rows: of the embedding's half of the projections, of the target's distributions and of the tokens.

Shapes: T tokens, P loss positions, K steps, H hidden, A aux states, V vocabulary, D draft vocabulary, N projections.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.dataset.packs import Pack
from common.draft.attention import CpuKernel, CudaKernel, merged_attention
from common.draft.head_loss import block_maxima, first_argmax, head_loss
from common.draft.kernels import Weight, accumulation_dtype, rms_norm, take_rows
from common.draft.network import Draft, rope_frequencies

TARGET_LOGITS = 32 * 1024 * 1024  # full-vocabulary logits in memory at a time: 64 MiB in bf16


class StepResult(NamedTuple):
    """The result of one forward. A tuple and not a dataclass: FSDP2 looks for the loss in tuples and lists only."""

    loss: Tensor  # scalar with gradient: sum over s of weight^s loss_sums[s] / counts[s]
    loss_sums: Tensor  # [K] cross entropy summed over P_s
    counts: Tensor  # [K] |P_s| of this pack, int64
    positions: Tensor  # int64 [P] flat indices of P_0
    right_token: Tensor  # bool [K, P] the draft's choice is the stream's token x_{i+2+s}
    right_argmax: Tensor  # bool [K, P] the draft's choice is the target's, over the full vocabulary
    in_step: Tensor  # bool [K, P] position belongs to P_s


class UnrolledStep(nn.Module):
    """The module that DDP or FSDP2 wraps: from a pack to the loss and to which tokens the draft proposed correctly."""

    def __init__(
        self,
        draft: Draft,
        target_norm: Tensor,  # [H]
        target_norm_eps: float,
        target_head: Tensor,  # [V, H]
        draft_to_target: Tensor | None,  # int64 [D] absolute target ids; None for the full vocabulary
        steps: int = 7,
        step_weight: float = 0.8,  # the loss of step s has this weight to the power s
        dtype: torch.dtype = torch.bfloat16,
    ):
        super().__init__()
        self.draft, self.steps, self.step_weight = draft, steps, step_weight
        self.dtype, self.target_norm_eps = dtype, target_norm_eps
        in_draft_vocab = torch.zeros(len(target_head), dtype=torch.bool, device=target_head.device)
        in_draft_vocab[... if draft_to_target is None else draft_to_target] = True
        frequencies, self.rotary_factor = rope_frequencies(draft.config, draft.midlayer.self_attn.rotary_width)
        buffers = {
            "target_norm": target_norm.detach(),
            "target_head": target_head.detach().to(dtype),
            "draft_to_target": draft_to_target,
            "target_rows": None if draft_to_target is None else target_head.detach()[draft_to_target].to(dtype),
            "in_draft_vocab": in_draft_vocab,
            "frequencies": frequencies.to(target_head.device),
        }
        for name, value in buffers.items():  # not in checkpoints: the target's tensors, or derived from the settings
            self.register_buffer(name, value, persistent=False)

    @torch.no_grad()
    def _targets(self, last_hidden: Tensor, steps: int) -> tuple[Tensor, Tensor]:
        """last_hidden [P, H] at i+1 -> the target's probabilities of x_{i+2}, a softmax over the draft's columns
        [P+K-1, D] whose last K-1 rows are zeros for shifts, and its argmax over the full vocabulary, int64 [P]"""
        states, _ = rms_norm(last_hidden.to(self.dtype), self.target_norm, self.target_norm_eps)
        probabilities = states.new_empty((len(states) + steps - 1, self.draft.config.draft_vocab_size))
        probabilities[len(states) :] = 0
        choice = torch.empty(len(states), dtype=torch.int64, device=states.device)
        size = max(1, TARGET_LOGITS // len(self.target_head))
        for start in range(0, len(states), size):
            chunk = slice(start, min(start + size, len(states)))
            full = states[chunk] @ self.target_head.t()
            choice[chunk] = first_argmax(full, block_maxima(full))
            logits = full if self.target_rows is None else states[chunk] @ self.target_rows.t()
            torch.softmax(logits, -1, out=probabilities[chunk])
        return probabilities, choice

    def loss_weights(self, steps: int) -> Tensor:
        """The loss weight of each step, float64 [K] on the CPU."""
        return self.step_weight ** torch.arange(steps, dtype=torch.float64)

    def _angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions [n] -> cos, sin [n, d/2]"""
        angles = positions.unsqueeze(1) * self.frequencies
        return tuple((x * self.rotary_factor).to(accumulation_dtype(self.dtype)) for x in (angles.cos(), angles.sin()))

    def _unroll(self, pack: Pack, positions: Tensor, steps: int) -> tuple[Tensor, Weight]:
        """-> input of the head [K, P, H], and the head"""
        draft, layer, attention = self.draft, self.draft.midlayer, self.draft.midlayer.self_attn
        weights, columns, count = draft.cast(self.dtype), attention.query_columns, positions.numel()
        in_document = torch.arange(pack.input_ids.numel()) - pack.offsets[:-1].repeat_interleave(pack.offsets.diff())
        in_document = in_document.to(positions.device)  # [T] each token's position in its document

        # From tokens alone. Row i holds x_{i+1}; the last row of a document has no such token, and no query reads it.
        embedded = F.embedding(pack.input_ids.roll(-1), draft.embed_tokens.weight).to(self.dtype)
        embedded, _ = layer.input_layernorm(embedded)
        embedded_kv = weights["embedding_kv"](embedded)
        embedded_q = weights["embedding_q"](take_rows(embedded, positions))
        shifted = torch.cat([embedded_q, take_rows(embedded_kv, positions)], 1)
        shifted = F.pad(shifted, (0, 0, 0, steps - 1))  # [P+K-1, N]; rows that shift in the padding are in no P_s

        normed, state = layer.hidden_norm(draft.fuse(pack.aux_hidden.to(self.dtype), weights))
        cos, sin = self._angles(in_document)
        keys, values = attention.keys_values(weights["hidden_kv"](normed, embedded_kv), cos, sin, weights)
        normed, state, in_document = take_rows(normed, positions), take_rows(state, positions), in_document[positions]

        runs, device, later, outputs = pack.loss_positions.runs, positions.device, [], []
        kernel = CudaKernel(runs, device) if runs and device.type == "cuda" else CpuKernel(runs)
        for step in range(steps):
            cos, sin = self._angles(in_document + step)
            if step == 0:
                projected = weights["hidden_q"](normed, embedded_q)
            else:
                normed, state = layer.hidden_norm(state)
                projected = weights["hidden_qkv"](normed, shifted[step : step + count])
                later += attention.keys_values(projected[:, columns:], cos, sin, weights)
            queries = attention.queries(projected[:, :columns], cos, sin, weights)
            heads = merged_attention(queries, keys, values, kernel, attention.scale, *later)
            residual = normed if draft.config.norm_before_residual else state
            state, output = draft.after_attention(heads, residual, weights)
            outputs.append(output)
        return torch.stack(outputs), weights["lm_head"]

    def forward(self, pack: Pack, counts: Tensor | None = None, steps: int | None = None) -> StepResult:
        """`counts`: int64 [K] over all ranks and accumulated packs, for a loss that is the mean over all of them;
        `steps`: the number of steps to unroll (default: as many as in training).

        Positions where the target's choice is outside the draft vocabulary have no loss, but count.
        """
        device, steps = pack.input_ids.device, steps or self.steps
        pack_counts = pack.loss_positions.counts(steps)
        positions, in_step = pack.loss_positions.positions.to(device), pack.loss_positions.in_step(steps).to(device)
        probabilities, target_choice = self._targets(pack.last_hidden[positions + 1], steps)

        def shifted(x: Tensor) -> Tensor:  # [P] -> [K, P]: row n of step s is x[n + s]
            return F.pad(x, (0, steps - 1)).unfold(0, len(x), 1)

        divisor = (pack_counts if counts is None else counts).to(device).clamp(min=1)
        scale = self.loss_weights(steps).to(device, accumulation_dtype(self.dtype)) / divisor
        with_loss = in_step & shifted(self.in_draft_vocab[target_choice])
        hidden, head = self._unroll(pack, positions, steps)
        loss, losses, choice = head_loss(hidden, head, probabilities, with_loss * scale.unsqueeze(1))

        if self.draft_to_target is not None:
            choice = self.draft_to_target[choice]
        return StepResult(
            loss=loss,
            loss_sums=losses.sum(1),
            counts=pack_counts.to(device),
            positions=positions,
            right_token=in_step & (choice == shifted(pack.input_ids[positions + 2])),
            right_argmax=in_step & (choice == shifted(target_choice)),
            in_step=in_step,
        )
