"""The cost of a run as arithmetic: bytes, memory of training, FLOPs, tokens/s. Pure functions, no torch, no files.

`draft` is a DraftConfig. Shapes as in common/draft/unrolled_step.py: T tokens of a pack, P loss positions among them,
K unrolled steps, H hidden, I intermediate, A aux states, V vocabulary, D draft vocabulary.
tests/forecast/test_arithmetic.py compares the memory with a measured step.
"""

from typing import NamedTuple

from common.draft.config import CHUNK_ROWS, DraftConfig
from common.draft.flops import attention_widths, step_flops

GB, GIB = 1e9, 2**30
LOW, MASTER = 2, 4  # bytes of bf16, and of float32 masters
CUDA_CONTEXT = 1.0 * GIB  # of CUDA, its kernels and NCCL's buffers: observed, not derived
FRAGMENTATION = 0.05  # share of the tensors' memory that the allocator cannot use


class Gpu(NamedTuple):
    """Published figures of one GPU: memory, dense bf16 rate with float32 sums, memory bandwidth."""

    memory_gb: float
    tflops: float
    bandwidth_gb_s: float

    def seconds(self, flops: float, gpus: int, utilisation: float) -> float:
        """Time of `flops` operations on `gpus` such GPUs at this share of the published rate."""
        return flops / (gpus * self.tflops * 1e12 * utilisation)


GPUS = {
    "H100 SXM": Gpu(80, 989, 3350),
    "H200 SXM": Gpu(141, 989, 4800),
    "B200": Gpu(180, 2250, 7700),
    "RTX PRO 6000 Blackwell": Gpu(96, 500, 1600),  # Server Edition; the Workstation Edition has 1,792 GB/s
}


def trained_weights(draft: DraftConfig) -> int:
    """W = fc A H H + input projections 2H (q + kv) + raising + output H out + MLP 3 H I + head D H + norms."""
    w, h = attention_widths(draft), draft.hidden_size
    norms = 4 * h + draft.norm_before_fc * draft.num_aux * h + draft.fc_norm * draft.num_aux * h
    if draft.form == "mla":
        norms += draft.q_lora_rank + draft.kv_lora_rank
    layer = 2 * h * (w.query_in + w.key_value_in) + w.raising + w.out * h + 3 * h * draft.intermediate_size
    return draft.num_aux * h * h + layer + draft.draft_vocab_size * h + norms


def sample_flops(draft: DraftConfig, prompt: float, output: float, steps: int) -> float:
    """FLOPs of one sample in training: P = output, and each of these positions sees the prompt and the reply up to it:
    output x prompt + output^2 / 2 pairs."""
    return step_flops(draft, prompt + output, output, output * prompt + output * (output + 1) / 2, steps)


# ---- memory of training ----


def training_memory(
    draft: DraftConfig, tokens: int, rows: int, steps: int, ranks: int, parallel: str = "ddp"
) -> dict[str, float]:
    """Bytes on one rank at the peak of an AdamW step, by use; bf16 products, float32 masters, W weights.

    master 4 W, optimizer 8 W (two moments), gradients 4 W; FSDP2 shards these over the ranks and gathers the masters
    (4 W) and the gradients (4 W) during a step; DDP's buckets take 4 W in addition to the gradients.
    copies      bf16 matrices of a step: 2 (W + H (q + kv)), the hidden half of the projections twice
    embedding   2 V H, frozen
    target head 2 (V + D) H: all rows for its choice, the draft's rows for the loss
    packs       two packs (one is prefetched): T (2 (A + 1) H + 9)
    activations see `activation_bytes`
    """
    weights = trained_weights(draft)
    stored = MASTER * weights / (ranks if parallel == "fsdp" else 1)
    w, h = attention_widths(draft), draft.hidden_size
    uses = {
        "master": stored,
        "optimizer": 2 * stored,
        "gradients": stored,
        "gathered": 2 * MASTER * weights if parallel == "fsdp" and ranks > 1 else 0.0,
        "buckets": MASTER * weights if parallel == "ddp" and ranks > 1 else 0.0,
        "copies": LOW * (weights + h * (w.query_in + w.key_value_in)),
        "embedding": LOW * draft.vocab_size * h,
        "target head": LOW * (draft.vocab_size + draft.draft_vocab_size) * h,
        "packs": 2 * tokens * (LOW * (draft.num_aux + 1) * h + 9),
        "activations": activation_bytes(draft, tokens, rows, steps),
    }
    return {name: size for name, size in uses.items() if size}


def activation_bytes(draft: DraftConfig, tokens: int, rows: int, steps: int) -> float:
    """Bytes of the tensors that forward keeps for backward, in bf16.

    once        T (embedding, its norm, fused states, their norm: 4H; keys before and after rotation, values)
                + P (shifted projections: q + kv)
    each step   P (state and its norm, after attention and its norm: 4H; projections, queries, own keys, heads;
                gate, up and their product: 3I; input of the head: H)
    head        P (D + H) target distributions, K P 2H inputs and their gradients, a chunk of logits and differences
    """
    w, h = attention_widths(draft), draft.hidden_size
    projected, raised = w.query_in + w.key_value_in, w.raised_keys + w.raised_queries
    once = tokens * (4 * h + w.key_value_in + w.keys + w.raised_keys) + rows * projected
    step = rows * (5 * h + projected + w.queries + w.keys + raised + w.out + 3 * draft.intermediate_size)
    chunk = min(CHUNK_ROWS, steps * rows)
    head = rows * (draft.draft_vocab_size + h) + 2 * steps * rows * h + 2 * chunk * draft.draft_vocab_size
    return LOW * (once + steps * step + head)


def on_a_gpu(uses: dict[str, float]) -> float:
    """Bytes of GPU memory that training takes: its uses, 5 % fragmentation and 1 GiB for CUDA."""
    return sum(uses.values()) * (1 + FRAGMENTATION) + CUDA_CONTEXT


# ---- speed of the target ----


def cache_bytes(text: dict, layers: int, tensor_parallel: int) -> float:
    """Bytes of one token's keys and values on each GPU of a server, bf16.

    MLA: 2 L (rank + rotary), the same on every GPU; else 4 L hk d / GPUs.
    """
    if text.get("kv_lora_rank"):
        return 2.0 * layers * (text["kv_lora_rank"] + text["qk_rope_head_dim"])
    heads = text.get("num_key_value_heads") or text["num_attention_heads"]
    width = text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]
    return 4.0 * layers * heads * width / min(tensor_parallel, heads)


def generation_rate(
    gpu: Gpu, gpus: int, replies: float, context: float, weights: float, active: float, cache: float, utilisation: float
) -> float:
    """Tokens/s of one server of `gpus` GPUs with `replies` in flight at a mean length of `context` tokens.

    `weights` [bytes] of all parameters, the number of `active` parameters, and `cache` [bytes] of a token on each GPU.
    A decode step reads every weight once (a batch of 100 uses nearly all experts) and the caches of all replies:
    seconds = max((weights / gpus + replies context cache) / (bandwidth utilisation),
                  2 active replies / (gpus rate utilisation)).
    Communication between GPUs is not modelled: without NVLink expect less, and measure with --n 64.
    """
    memory_s = (weights / gpus + replies * context * cache) / (gpu.bandwidth_gb_s * GB * utilisation)
    return replies / max(memory_s, gpu.seconds(2 * active * replies, gpus, utilisation))


def replies_that_fit(gpu: Gpu, gpus: int, context: float, weights: float, cache: float) -> float:
    """Replies whose caches fit in 90 % of the GPUs' memory (vLLM's default) after the weights; below 1: none."""
    return (0.9 * gpu.memory_gb * GB - weights / gpus) / (context * cache)
