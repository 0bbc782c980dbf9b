"""How much arithmetic a training step needs, and how fast this machine multiplies matrices: utilisation is their ratio.

Products are counted once forward and twice backward, without recomputation; what the step skips is not counted.
"""

import time

import torch
from torch import Tensor

from common.draft.network import Draft


class StepFlops:
    """Counts the arithmetic of one draft's packs. T tokens, P loss positions, K steps."""

    def __init__(self, draft: Draft):
        c, attention = draft.config, draft.midlayer.self_attn
        sizes = {name.removesuffix(".weight"): p.numel() for name, p in draft.named_parameters() if p.ndim == 2}
        raised = sizes.get("midlayer.self_attn.kv_b_proj", 0)
        self.hidden, self.columns = c.hidden_size, c.vocab_size + c.draft_vocab_size
        self.query = attention.query_columns
        self.key_value = 2 * c.num_key_value_heads * c.head_dim
        widths = 2 * c.head_dim
        if c.form == "mla":
            self.key_value, widths = c.kv_lora_rank + c.qk_rope_head_dim, c.qk_nope_head_dim + c.qk_rope_head_dim
            widths += c.v_head_dim
        names = ("midlayer.self_attn.o_proj", "midlayer.self_attn.q_b_proj", "lm_head")
        self.row = sum(sizes.get(name, 0) for name in names) + raised + c.hidden_size * (self.query + self.key_value)
        self.row += sum(size for name, size in sizes.items() if name.startswith("midlayer.mlp."))
        self.frozen_head = 0 if draft.lm_head.weight.requires_grad else sizes["lm_head"]
        self.fc, self.raised, self.pair = sizes["fc"], raised, c.num_attention_heads * widths

    def of(self, offsets: Tensor, positions: Tensor, steps: int) -> float:
        """Floating point operations of a pack's forward and backward; positions [P], both on the CPU."""
        tokens, rows = int(offsets[-1]), len(positions)
        seen = int((positions - offsets[torch.searchsorted(offsets[1:], positions, right=True)] + 1).sum())
        once = tokens * self.hidden * self.key_value + rows * self.hidden * self.query  # the embedding's half
        once += (tokens - rows) * (self.hidden * self.key_value + self.raised)  # step-0 keys of prompts
        trained = steps * rows * (self.row - self.frozen_head / 3) + once + steps * seen * self.pair
        fc = 2 * tokens * self.fc  # the states take no gradient
        return 2.0 * (3 * trained + fc + rows * self.hidden * self.columns)


def matmul_rate(device: str, dtype: torch.dtype) -> float:
    """Floating point operations a second of large matrix products on this device; the best of a few."""
    cuda = device.startswith("cuda")
    size, best = 8192 if cuda else 1024, float("inf")
    a = torch.randn(size, size, device=device).to(dtype)
    for _ in range(6):  # the first ones warm up
        started = time.perf_counter()
        a @ a
        if cuda:
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - started)
    return 2 * size**3 / best
