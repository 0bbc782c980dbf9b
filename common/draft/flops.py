"""Floating point operations of a training step, from the draft's sizes alone. No torch."""

from typing import NamedTuple

from common.draft.config import DraftConfig


class AttentionWidths(NamedTuple):
    """Widths inside the draft's attention; in MLA, queries, keys and values are raised from low-rank latents."""

    query_in: int  # columns of the input projection that become queries
    key_value_in: int
    queries: int  # heads x width
    keys: int
    values: int
    out: int  # heads x value width
    raising: int = 0  # MLA: weights that raise the latents
    raised_keys: int = 0  # MLA: columns stored for backward: the latent, its norm, and what is raised from it
    raised_queries: int = 0  # MLA: rank of the queries


def attention_widths(draft: DraftConfig) -> AttentionWidths:
    heads, key_heads = draft.num_attention_heads, draft.num_key_value_heads
    if draft.form == "llama":
        q, kv = heads * draft.head_dim, key_heads * draft.head_dim
        return AttentionWidths(q, 2 * kv, q, kv, kv, q)
    rank, latent = draft.q_lora_rank, draft.kv_lora_rank
    width = heads * (draft.qk_nope_head_dim + draft.qk_rope_head_dim)
    out = heads * draft.v_head_dim
    key_raised = heads * (draft.qk_nope_head_dim + draft.v_head_dim)
    raising = rank * width + latent * key_raised
    return AttentionWidths(
        rank or width, latent + draft.qk_rope_head_dim, width, width, out, out, raising, key_raised + 2 * latent, rank
    )


def step_flops(draft: DraftConfig, tokens: float, rows: float, pairs: float, steps: int) -> float:
    """Operations that a forward and backward cannot do without; nothing is recomputed.

    T `tokens`, P `rows` (loss positions), K `steps`; `pairs`: step-0 keys seen by the P queries of one step, summed.
    A multiplication and addition are two operations. Forward counts once, backward twice; fc has no gradient towards
    the states (2 in all), the target's head (V + D columns) has none at all (1):

        2 (3 (K P (layer + D H + raising) + once + K pairs (queries + out)) + 2 T A H H + P H (V + D))

    where `once` is the embedding's half of the input projections, and the step-0 keys of tokens that are no rows.
    """
    w, h = attention_widths(draft), draft.hidden_size
    layer = h * (w.query_in + w.key_value_in) + w.out * h + 3 * h * draft.intermediate_size
    key_raising = w.raising - w.raised_queries * w.queries
    once = tokens * h * w.key_value_in + rows * h * w.query_in + (tokens - rows) * (h * w.key_value_in + key_raising)
    trained = steps * rows * (layer + w.raising + draft.draft_vocab_size * h) + once
    trained += steps * pairs * (w.queries + w.out)
    fc = 2 * tokens * draft.num_aux * h * h
    target = rows * h * (draft.vocab_size + draft.draft_vocab_size)
    return 2.0 * (3 * trained + fc + target)
