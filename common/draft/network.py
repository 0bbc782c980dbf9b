"""The draft network: one EAGLE-3 layer, with Llama's attention or with multi-head latent attention (MLA).

Parameters have the names of a served checkpoint. The modules hold parameters and define what a layer computes;
unrolled_step.py decides for which positions. Options act as in vLLM's llama_eagle3.py and deepseek_eagle3.py.

Shapes: n rows, H hidden, A aux states, V vocabulary, D draft vocabulary, h query heads, hk key heads,
d query and key width of a head, dv value width, N = Nq + Nkv columns of the input projections.
"""

import functools
import math

import torch
from torch import Tensor, nn

from common.draft.config import DraftConfig
from common.draft.kernels import Weight, rms_norm, rotate, swiglu, two_linears

_linear = functools.partial(nn.Linear, bias=False)
# The projections of the layer's input [embedding, hidden], in this order.
INPUT_PROJECTIONS = ("q_proj", "q_a_proj", "kv_a_proj_with_mqa", "k_proj", "v_proj")


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """YaRN's factor on cos and sin (arXiv:2309.00071), before a model's own correction."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def rope_frequencies(config: DraftConfig, width: int) -> tuple[Tensor, float]:
    """Frequencies [width/2] of the rotary angles, and the factor on cos and sin."""
    scaling, kind = dict(config.rope_scaling or {}), config.rope_type
    if kind == "default":
        return config.rope_theta ** -(torch.arange(0, width, 2, dtype=torch.float64) / width), 1.0
    # Imported only here, since most drafts have unscaled angles.
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    if kind not in ROPE_INIT_FUNCTIONS:
        raise ValueError(f'rope_scaling has type "{kind}", expected default, {", ".join(sorted(ROPE_INIT_FUNCTIONS))}')
    settings = LlamaConfig(
        hidden_size=width,
        num_attention_heads=1,
        head_dim=width,
        max_position_embeddings=config.max_position_embeddings,
        rope_parameters={"rope_theta": config.rope_theta, **scaling, "rope_type": kind},
    )
    frequencies, factor = ROPE_INIT_FUNCTIONS[kind](settings, torch.device("cpu"))
    if config.form == "mla":  # where mscale_all_dim is missing, DeepSeek's code takes another default than transformers
        factor = yarn_mscale(scaling["factor"], scaling.get("mscale", 1.0))
        factor /= yarn_mscale(scaling["factor"], scaling.get("mscale_all_dim", 0.0))
    return frequencies.double(), factor


class RMSNorm(nn.Module):
    """A root mean square norm. Weights stay float32; casting them would save nothing."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """-> normed x, and x for the residual branch"""
        return rms_norm(x, self.weight, self.eps)


class LlamaAttention(nn.Module):
    """Grouped-query attention whose input is [embedding, hidden]."""

    pairs = False  # rotary embedding rotates dimensions (i, i + d/2) together

    def __init__(self, config: DraftConfig):
        super().__init__()
        width, heads, key_heads = config.head_dim, config.num_attention_heads, config.num_key_value_heads
        self.q_proj = _linear(2 * config.hidden_size, heads * width)
        self.k_proj = _linear(2 * config.hidden_size, key_heads * width)
        self.v_proj = _linear(2 * config.hidden_size, key_heads * width)
        self.o_proj = _linear(heads * width, config.hidden_size)
        self.heads, self.key_heads = heads, key_heads
        self.rotary_width, self.query_columns, self.scale = width, heads * width, width**-0.5

    def queries(self, x: Tensor, cos: Tensor, sin: Tensor, weights: dict[str, Weight]) -> Tensor:
        """x [n, Nq] -> [n, h, d]"""
        return rotate(x.unflatten(1, (self.heads, -1)), cos, sin, self.pairs)

    def keys_values(self, x: Tensor, cos: Tensor, sin: Tensor, weights: dict[str, Weight]) -> tuple[Tensor, Tensor]:
        """x [n, Nkv] -> [n, hk, d], [n, hk, dv]"""
        keys, values = x.unflatten(1, (2 * self.key_heads, -1)).chunk(2, 1)
        return rotate(keys, cos, sin, self.pairs), values


class MlaAttention(nn.Module):
    """DeepSeek's latent attention: low-rank queries and keys, one rotary key for all heads."""

    pairs = True  # rotary embedding rotates neighbouring dimensions together

    def __init__(self, config: DraftConfig):
        super().__init__()
        heads, inputs = config.num_attention_heads, 2 * config.hidden_size
        self.nope, self.rotary_width = config.qk_nope_head_dim, config.qk_rope_head_dim
        self.value_width = config.v_head_dim
        width = self.nope + self.rotary_width
        self.latent = config.kv_lora_rank
        self.query_columns = config.q_lora_rank or heads * width
        if config.q_lora_rank:
            self.q_a_proj = _linear(inputs, config.q_lora_rank)
            self.q_a_layernorm = RMSNorm(config.q_lora_rank, config.rms_norm_eps)
            self.q_b_proj = _linear(config.q_lora_rank, heads * width)
        else:
            self.q_proj = _linear(inputs, heads * width)
        self.kv_a_proj_with_mqa = _linear(inputs, self.latent + self.rotary_width)
        self.kv_a_layernorm = RMSNorm(self.latent, config.rms_norm_eps)
        self.kv_b_proj = _linear(self.latent, heads * (self.nope + self.value_width))
        self.o_proj = _linear(heads * self.value_width, config.hidden_size)
        self.heads = heads
        scaling = config.rope_scaling or {}
        mscale = yarn_mscale(scaling.get("factor", 1.0), scaling.get("mscale_all_dim", 0.0))
        self.scale = width**-0.5 * mscale**2

    def queries(self, x: Tensor, cos: Tensor, sin: Tensor, weights: dict[str, Weight]) -> Tensor:
        """x [n, Nq] -> [n, h, d]"""
        if "q_b_proj" in weights:
            x = weights["q_b_proj"](self.q_a_layernorm(x)[0])
        plain, rotary = x.unflatten(1, (self.heads, -1)).split([self.nope, self.rotary_width], -1)
        return torch.cat([plain, rotate(rotary, cos, sin, self.pairs)], -1)

    def keys_values(self, x: Tensor, cos: Tensor, sin: Tensor, weights: dict[str, Weight]) -> tuple[Tensor, Tensor]:
        """x [n, Nkv] -> [n, h, d], [n, h, dv]"""
        latent, rotary = x.split([self.latent, self.rotary_width], 1)
        raised = weights["kv_b_proj"](self.kv_a_layernorm(latent.contiguous())[0]).unflatten(1, (self.heads, -1))
        plain, values = raised.split([self.nope, self.value_width], -1)
        rotary = rotate(rotary.unsqueeze(1), cos, sin, self.pairs).expand(-1, self.heads, -1)
        return torch.cat([plain, rotary], -1), values


class MidLayer(nn.Module):
    def __init__(self, config: DraftConfig):
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.self_attn = (LlamaAttention if config.form == "llama" else MlaAttention)(config)
        mlp = {"gate_proj": (hidden, inner), "up_proj": (hidden, inner), "down_proj": (inner, hidden)}
        self.mlp = nn.ModuleDict({name: _linear(*sizes) for name, sizes in mlp.items()})
        self.input_layernorm = RMSNorm(hidden, config.rms_norm_eps)
        self.hidden_norm = RMSNorm(hidden, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(hidden, config.rms_norm_eps)


class Draft(nn.Module):
    """An EAGLE-3 draft. `embedding` [V, H] is the target's: frozen, in its own dtype."""

    def __init__(self, config: DraftConfig, embedding: Tensor):
        super().__init__()
        self.config = config
        hidden, eps, aux = config.hidden_size, config.rms_norm_eps, config.num_aux
        if config.norm_before_fc:
            self.input_norm = RMSNorm(aux * hidden, eps)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(RMSNorm(hidden, eps) for _ in range(aux))
        self.fc = _linear(aux * hidden, hidden)
        self.midlayer = MidLayer(config)
        self.norm = RMSNorm(hidden, eps)
        self.lm_head = _linear(hidden, config.draft_vocab_size)
        self.embed_tokens = nn.Embedding.from_pretrained(embedding, freeze=True)

    @torch.no_grad()
    def initialise(self, head_rows: Tensor | None, seed: int, std: float = 0.02) -> None:
        """Initial weights: `head_rows` [D, H] of the target's head where given, norms 1, the rest random from `seed`.

        fc starts as the identity on the highest aux state, the nearest to what the head expects, plus a little noise.
        """
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
            elif name != "embed_tokens.weight":  # drawn on the CPU: a seed's weights are alike on all devices
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
        hidden = self.config.hidden_size
        self.fc.weight.mul_(0.1)[:, -hidden:].add_(torch.eye(hidden, device=self.fc.weight.device))
        if head_rows is not None:
            self.lm_head.weight.copy_(head_rows)

    def cast(self, dtype: torch.dtype) -> dict[str, Weight]:
        """Every matrix cast to `dtype`, once a forward; the input projections [N, 2H] are joined, queries first."""
        matrices = {path.split(".")[-1]: x.weight for path, x in self.named_modules() if isinstance(x, nn.Linear)}
        inputs = torch.cat([matrices.pop(name) for name in INPUT_PROJECTIONS if name in matrices])
        columns, hidden = self.midlayer.self_attn.query_columns, self.config.hidden_size
        matrices |= {
            "embedding_q": inputs[:columns, :hidden],
            "embedding_kv": inputs[columns:, :hidden],
            "hidden_q": inputs[:columns, hidden:],
            "hidden_kv": inputs[columns:, hidden:],
            "hidden_qkv": inputs[:, hidden:],
        }
        return {name: Weight(matrix, dtype) for name, matrix in matrices.items()}

    def fuse(self, aux_hidden: Tensor, weights: dict[str, Weight]) -> Tensor:
        """aux states [n, A*H] -> g [n, H]"""
        if self.config.norm_before_fc:
            aux_hidden, _ = self.input_norm(aux_hidden)
        if self.config.fc_norm:
            chunks = aux_hidden.unflatten(1, (self.config.num_aux, -1)).unbind(1)
            aux_hidden = torch.cat([norm(chunk)[0] for norm, chunk in zip(self.fc_norm, chunks, strict=True)], 1)
        return weights["fc"](aux_hidden)

    def after_attention(self, heads: Tensor, residual: Tensor, weights: dict[str, Weight]) -> tuple[Tensor, Tensor]:
        """heads [n, h, dv], residual [n, H] -> (input of the next step, input of the head), both [n, H]"""
        state = weights["o_proj"](heads.flatten(1), residual)
        normed, state = self.midlayer.post_attention_layernorm(state)
        inner = swiglu(*two_linears(normed, weights["gate_proj"], weights["up_proj"]))
        normed, state = self.norm(weights["down_proj"](inner, state))
        return normed if self.config.norm_output else state, normed
