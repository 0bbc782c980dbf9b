"""What a run takes, as arithmetic: bytes, memory by part, FLOPs, hours. Pure functions, no torch, no files.

`draft` is a DraftConfig (common/draft/config.py). Shapes as in common/draft/unrolled_step.py: T tokens of a pack,
P loss positions among them, K unrolled steps, H hidden, I intermediate, A aux states, V vocabulary, D draft vocabulary.
tests/forecast/test_arithmetic.py holds the memory against a measured step, and the FLOPs against the bench's count.
"""

from typing import NamedTuple

GB, GIB = 1e9, 2**30
LOW, MASTER = 2, 4  # bytes of bf16, and of float32 masters
TARGET_LOGITS = (
    32 * 1024 * 1024
)  # common/draft/unrolled_step.py and head_loss.py: full-vocabulary logits at a time, rows of a chunk
CHUNK_ROWS = 2000
CUDA_CONTEXT = 1.0 * GIB  # CUDA's own, kernels and NCCL's buffers: seen, not derived
FRAGMENTATION = 0.05  # of all tensors: what the allocator cannot hand out


class Gpu(NamedTuple):
    """Published figures of one GPU: memory, dense bf16 rate with float32 sums, memory bandwidth."""

    memory_gb: float
    tflops: float
    bandwidth_gb_s: float


GPUS = {
    "H100 SXM": Gpu(80, 989, 3350),
    "H200 SXM": Gpu(141, 989, 4800),
    "B200": Gpu(180, 2250, 7700),
    "RTX PRO 6000 Blackwell": Gpu(96, 500, 1600),  # the Server Edition; the Workstation's memory does 1,792
}


class Columns(NamedTuple):
    """Widths inside the draft's attention."""

    query_in: int  # of the input projection that become queries
    key_value_in: int
    queries: int  # heads x width, after a low rank is raised
    keys: int
    values: int
    out: int  # heads x value width
    raising: int = 0  # weights that raise low ranks (MLA from here)
    raised_keys: int = 0  # what is kept beside keys and values: the raised latent, the latent, its norm
    raised_queries: int = 0  # the normed low rank of the queries


def columns(draft) -> Columns:
    heads, key_heads = draft.num_attention_heads, draft.num_key_value_heads
    if draft.form == "llama":
        q, kv = heads * draft.head_dim, key_heads * draft.head_dim
        return Columns(q, 2 * kv, q, kv, kv, q)
    rank, latent = draft.q_lora_rank, draft.kv_lora_rank
    wide = heads * (draft.qk_nope_head_dim + draft.qk_rope_head_dim)
    out = heads * draft.v_head_dim
    raising = rank * wide + latent * heads * (draft.qk_nope_head_dim + draft.v_head_dim)
    raised_keys = heads * (draft.qk_nope_head_dim + draft.v_head_dim) + 2 * latent
    return Columns(rank or wide, latent + draft.qk_rope_head_dim, wide, wide, out, out, raising, raised_keys, rank)


def trained_weights(draft) -> int:
    """fc A H H + input projections 2H (q + kv) + raising + output H out + MLP 3 H I + head D H + norms."""
    c, h = columns(draft), draft.hidden_size
    norms = 4 * h + draft.norm_before_fc * draft.num_aux * h + draft.fc_norm * draft.num_aux * h
    if draft.form == "mla":
        norms += draft.q_lora_rank + draft.kv_lora_rank
    layer = 2 * h * (c.query_in + c.key_value_in) + c.raising + c.out * h + 3 * h * draft.intermediate_size
    return draft.num_aux * h * h + layer + draft.draft_vocab_size * h + norms


# ---- FLOPs ----


def step_flops(draft, tokens: float, rows: float, steps: int, pairs: float) -> float:
    """Arithmetic of one training step that cannot be done without: two FLOPs a product and sum, forward once, backward
    twice; fc has no gradient towards the states, the target's head (V + D columns) none at all.

    2 (3 (K P (layer + D H + raising) + once + K pairs (queries + out)) + 2 T A H H + P H (V + D)), where `once` is the
    embedding half of the projections and step-0 keys of prompts; pairs: keys seen by the P queries of one step.
    """
    c, h = columns(draft), draft.hidden_size
    layer = h * (c.query_in + c.key_value_in) + c.out * h + 3 * h * draft.intermediate_size
    key_raising = c.raising - c.raised_queries * c.queries
    once = tokens * h * c.key_value_in + rows * h * c.query_in + (tokens - rows) * (h * c.key_value_in + key_raising)
    trained = steps * rows * (layer + c.raising + draft.draft_vocab_size * h) + once
    trained += steps * pairs * (c.queries + c.out)
    fc = 2 * tokens * draft.num_aux * h * h
    target = rows * h * (draft.vocab_size + draft.draft_vocab_size)
    return 2.0 * (3 * trained + fc + target)


def sample_flops(draft, prompt: float, output: float, steps: int) -> float:
    """One sample of prompt and reply through one training step: P = output, each seeing the prompt and what is before
    it: output x prompt + output^2 / 2 pairs."""
    return step_flops(draft, prompt + output, output, steps, output * prompt + output * (output + 1) / 2)


# ---- memory of training ----


def training_memory(
    draft,
    tokens: int,
    rows: int,
    steps: int,
    ranks: int,
    parallel: str = "ddp",
) -> dict[str, float]:
    """Bytes on one rank at the highest point of an AdamW step, by part; bf16 products, float32 masters, W weights.

    master 4 W, optimizer 8 W (two moments), gradients 4 W; FSDP2 shares these out over the ranks and gathers the
    masters (4 W) and the gradients (4 W) for the time of a step; DDP's buckets are 4 W beside the gradients.
    copies      bf16 matrices of a step: 2 (W + H (q + kv)), the hidden half of the projections twice
    embedding   2 V H, frozen
    target head 2 (V + D) H: all rows for its choice, the draft's rows for the loss
    packs       two packs (one read ahead): T (2 (A + 1) H + 9)
    activations what backward needs (`activation_bytes`)
    """
    weights = trained_weights(draft)
    shared = ranks if parallel == "fsdp" else 1
    c, h = columns(draft), draft.hidden_size
    parts = {
        "master": MASTER * weights / shared,
        "optimizer": 2 * MASTER * weights / shared,
        "gradients": MASTER * weights / shared,
        "gathered": 2 * MASTER * weights if parallel == "fsdp" and ranks > 1 else 0.0,
        "buckets": MASTER * weights if parallel == "ddp" and ranks > 1 else 0.0,
        "copies": LOW * (trained_weights(draft) + h * (c.query_in + c.key_value_in)),
        "embedding": LOW * draft.vocab_size * h,
        "target head": LOW * (draft.vocab_size + draft.draft_vocab_size) * h,
        "packs": 2 * tokens * (LOW * (draft.num_aux + 1) * h + 9),
        "activations": activation_bytes(draft, tokens, rows, steps),
    }
    return {name: size for name, size in parts.items() if size}


def activation_bytes(draft, tokens: int, rows: int, steps: int) -> float:
    """What is alive where forward turns into backward, in bf16.

    once        T (embedded, its norm, g, its norm: 4H; projected and turned keys, values) + P (shifted: q + kv)
    each step   P (state and its norm, after attention and its norm: 4H; projected, queries, own keys, heads;
                gate, up and their product: 3I; what the head reads: H)
    head        P (D + H) target distributions, K P 2H states and their gradients, a chunk of logits and differences
    """
    c, h = columns(draft), draft.hidden_size
    projected = c.query_in + c.key_value_in
    once = tokens * (4 * h + c.key_value_in + c.keys + c.raised_keys) + rows * projected
    raised = c.raised_keys + c.raised_queries
    step = rows * (5 * h + projected + c.queries + c.keys + raised + c.out + 3 * draft.intermediate_size)
    chunk = min(CHUNK_ROWS, steps * rows)
    head = rows * (draft.draft_vocab_size + h) + 2 * steps * rows * h + 2 * chunk * draft.draft_vocab_size
    return LOW * (once + steps * step + head)


def on_a_gpu(parts: dict[str, float]) -> float:
    """Bytes that the parts take of a GPU: 5 % of fragmentation and 1 GiB of CUDA's own on top."""
    return sum(parts.values()) * (1 + FRAGMENTATION) + CUDA_CONTEXT


# ---- disk ----


def checkpoint_bytes(draft) -> float:
    """Float32 masters and AdamW's two moments: 12 W."""
    return 12.0 * trained_weights(draft)


def export_bytes(draft) -> float:
    """The served folder in bf16, with the embedding: 2 (W + V H)."""
    return 2.0 * (trained_weights(draft) + draft.vocab_size * draft.hidden_size)


# ---- hours of the target ----


def cache_bytes(text: dict, layers: int, tensor_parallel: int) -> float:
    """Bytes of one token's keys and values on each GPU, bf16: MLA 2 L (rank + rotary), whole on every GPU; else
    4 L hk d / GPUs of the server."""
    if text.get("kv_lora_rank"):
        return 2.0 * layers * (text["kv_lora_rank"] + text["qk_rope_head_dim"])
    heads = text.get("num_key_value_heads") or text["num_attention_heads"]
    width = text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]
    return 4.0 * layers * heads * width / min(tensor_parallel, heads)


def generation_rate(
    gpu: Gpu, gpus: int, lanes: float, context: float, weights: float, active: float, cache: float, reached: float
) -> float:
    """Tokens/s of one server of `gpus` with `lanes` replies in flight at a mean length of `context` tokens.

    A decode step reads every weight once (a batch of 100 wakes nearly all experts) and the lanes' caches:
    seconds = max((weights / gpus + lanes context cache) / (bandwidth reached), 2 active lanes / (gpus rate reached)).
    What the GPUs say to each other is not in it: without NVLink expect less, and measure with --n 64.
    """
    memory_s = (weights / gpus + lanes * context * cache) / (gpu.bandwidth_gb_s * GB * reached)
    arithmetic_s = 2 * active * lanes / (gpus * gpu.tflops * 1e12 * reached)
    return lanes / max(memory_s, arithmetic_s)


def lanes_that_fit(gpu: Gpu, gpus: int, context: float, weights: float, cache: float) -> float:
    """Replies whose caches fit beside the weights in 90 % of the GPUs' memory (vLLM's default); 0 or less: no room."""
    return (0.9 * gpu.memory_gb * GB - weights / gpus) / (context * cache)


def compute_hours(flops: float, gpu: Gpu, gpus: int, reached: float) -> float:
    """Hours of so many FLOPs at the share `reached` of the published dense bf16 rate."""
    return flops / (gpus * gpu.tflops * 1e12 * reached) / 3600


def disk_hours(size: float, gb_s: float) -> float:
    return size / (gb_s * GB) / 3600
