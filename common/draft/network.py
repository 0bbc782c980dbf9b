"""The draft network: one EAGLE-3 layer, with Llama's attention or with multi-head latent attention (MLA).

Parameters have the names of a served checkpoint. The modules hold parameters and define what a layer computes;
unrolled_step.py decides for which positions. Options mean what vLLM's llama_eagle3.py and deepseek_eagle3.py do.

Shapes: n rows, H hidden, A aux states, V vocabulary, D draft vocabulary, h query heads, hk key heads,
d query and key width of a head, dv value width, N = Nq + Nkv columns of the input projections.
"""

import math

import torch
from torch import Tensor, nn

from common.draft.config import DraftConfig
from common.draft.kernels import Weight, rms_norm, rotate, swiglu, two_linears


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """YaRN's factor on cos and sin (arXiv:2309.00071), before a model's own correction."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def rope_frequencies(config: DraftConfig, width: int) -> tuple[Tensor, float]:
    """Frequencies [width/2] of the rotary angles, and the factor on cos and sin."""
    scaling, kind = dict(config.rope_scaling or {}), config.rope_type
    if kind == "default":
        return config.rope_theta ** -(torch.arange(0, width, 2, dtype=torch.float64) / width), 1.0
    # transformers' own formulas; imported here, since most drafts do not scale
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
    if config.form == "mla":  # DeepSeek's code has another default for a missing mscale_all_dim than transformers
        factor = yarn_mscale(scaling["factor"], scaling.get("mscale", 1.0))
        factor /= yarn_mscale(scaling["factor"], scaling.get("mscale_all_dim", 0.0))
    return frequencies.double(), factor


class RMSNorm(nn.Module):
    """A root mean square norm. Weights stay float32; casting them would save nothing."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)[0]

    def normed_and_input(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(normed x, x for the residual branch)"""
        return rms_norm(x, self.weight, self.eps)


def _linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


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
        self.rotary_width = width
        self.query_columns = heads * width
        self.scale = width**-0.5

    def input_weight(self) -> Tensor:
        """[N, 2H]: the projections of the layer's input, queries first"""
        return torch.cat([self.q_proj.weight, self.k_proj.weight, self.v_proj.weight])

    def cast(self, dtype: torch.dtype) -> dict[str, Weight]:
        return {}

    def queries(self, x: Tensor, cos: Tensor, sin: Tensor, weights: dict[str, Weight]) -> Tensor:
        """x [n, Nq] -> [n, h, d]"""
        return rotate(x.unflatten(1, (self.heads, -1)), cos, sin, self.pairs)

    def keys_values(self, x: Tensor, cos: Tensor, sin: Tensor, weights: dict[str, Weight]) -> tuple[Tensor, Tensor]:
        """x [n, Nkv] -> [n, hk, d], [n, hk, dv]"""
        keys, values = x.unflatten(1, (2 * self.key_heads, -1)).chunk(2, 1)
        return rotate(keys, cos, sin, self.pairs), values


class MlaAttention(nn.Module):
    """DeepSeek's latent attention: low-rank queries and keys, one rotary key part for all heads."""

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
        self.heads = self.key_heads = heads
        scaling = config.rope_scaling or {}
        mscale = yarn_mscale(scaling.get("factor", 1.0), scaling.get("mscale_all_dim", 0.0))
        self.scale = width**-0.5 * mscale**2

    def input_weight(self) -> Tensor:
        """[N, 2H]: the projections of the layer's input, queries first"""
        query = self.q_a_proj if hasattr(self, "q_a_proj") else self.q_proj
        return torch.cat([query.weight, self.kv_a_proj_with_mqa.weight])

    def cast(self, dtype: torch.dtype) -> dict[str, Weight]:
        names = ("q_b_proj", "kv_b_proj") if hasattr(self, "q_b_proj") else ("kv_b_proj",)
        return {name: Weight(getattr(self, name).weight, dtype) for name in names}

    def queries(self, x: Tensor, cos: Tensor, sin: Tensor, weights: dict[str, Weight]) -> Tensor:
        """x [n, Nq] -> [n, h, d]"""
        if "q_b_proj" in weights:
            x = weights["q_b_proj"](self.q_a_layernorm(x))
        plain, rotary = x.unflatten(1, (self.heads, -1)).split([self.nope, self.rotary_width], -1)
        return torch.cat([plain, rotate(rotary, cos, sin, self.pairs)], -1)

    def keys_values(self, x: Tensor, cos: Tensor, sin: Tensor, weights: dict[str, Weight]) -> tuple[Tensor, Tensor]:
        """x [n, Nkv] -> [n, h, d], [n, h, dv]"""
        latent, rotary = x.split([self.latent, self.rotary_width], 1)
        raised = weights["kv_b_proj"](self.kv_a_layernorm(latent.contiguous())).unflatten(1, (self.heads, -1))
        plain, values = raised.split([self.nope, self.value_width], -1)
        rotary = rotate(rotary.unsqueeze(1), cos, sin, self.pairs).expand(-1, self.heads, -1)
        return torch.cat([plain, rotary], -1), values


class MLP(nn.Module):
    def __init__(self, config: DraftConfig):
        super().__init__()
        self.gate_proj = _linear(config.hidden_size, config.intermediate_size)
        self.up_proj = _linear(config.hidden_size, config.intermediate_size)
        self.down_proj = _linear(config.intermediate_size, config.hidden_size)


class MidLayer(nn.Module):
    def __init__(self, config: DraftConfig):
        super().__init__()
        self.self_attn = (LlamaAttention if config.form == "llama" else MlaAttention)(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class Draft(nn.Module):
    """An EAGLE-3 draft. `embedding` [V, H] is the target's: frozen, in its own dtype."""

    def __init__(self, config: DraftConfig, embedding: Tensor):
        super().__init__()
        expected = (config.vocab_size, config.hidden_size)
        if tuple(embedding.shape) != expected:
            raise ValueError(f"the target's embedding has shape {list(embedding.shape)}, expected {list(expected)}")
        self.config = config
        fc_inputs = config.num_aux * config.hidden_size
        if config.norm_before_fc:
            self.input_norm = RMSNorm(fc_inputs, config.rms_norm_eps)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(
                RMSNorm(config.hidden_size, config.rms_norm_eps) for _ in range(config.num_aux)
            )
        self.fc = _linear(fc_inputs, config.hidden_size)
        self.midlayer = MidLayer(config)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = _linear(config.hidden_size, config.draft_vocab_size)
        self.embed_tokens = nn.Embedding.from_pretrained(embedding, freeze=True)

    @torch.no_grad()
    def initialise(self, head_rows: Tensor | None, seed: int, std: float = 0.02) -> None:
        """Initial weights: `head_rows` [D, H] of the target's head where given, norms 1, the rest random from `seed`.

        fc passes the highest aux state on, the nearest to what the head expects, plus a little noise.
        """
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if name == "embed_tokens.weight":
                continue
            if parameter.dim() == 1:
                parameter.fill_(1.0)
            else:  # drawn on the CPU, so that a seed gives the same weights on every device
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
        hidden = self.config.hidden_size
        self.fc.weight.mul_(0.1)[:, -hidden:].add_(torch.eye(hidden, device=self.fc.weight.device))
        if head_rows is not None:
            self.lm_head.weight.copy_(head_rows)

    def cast(self, dtype: torch.dtype) -> dict[str, Weight]:
        """Every matrix cast to `dtype`, once a forward; matrices with the same input are joined."""
        layer, hidden = self.midlayer, self.config.hidden_size
        inputs, columns = layer.self_attn.input_weight(), layer.self_attn.query_columns
        matrices = {
            "fc": self.fc.weight,
            "embedding_q": inputs[:columns, :hidden],
            "embedding_kv": inputs[columns:, :hidden],
            "hidden_q": inputs[:columns, hidden:],
            "hidden_kv": inputs[columns:, hidden:],
            "hidden_qkv": inputs[:, hidden:],
            "o_proj": layer.self_attn.o_proj.weight,
            "gate_proj": layer.mlp.gate_proj.weight,
            "up_proj": layer.mlp.up_proj.weight,
            "down_proj": layer.mlp.down_proj.weight,
            "lm_head": self.lm_head.weight,
        }
        return {name: Weight(matrix, dtype) for name, matrix in matrices.items()} | layer.self_attn.cast(dtype)

    def fuse(self, aux_hidden: Tensor, weights: dict[str, Weight]) -> Tensor:
        """aux states [n, A*H] -> g [n, H]"""
        if self.config.norm_before_fc:
            aux_hidden = self.input_norm(aux_hidden)
        if self.config.fc_norm:
            chunks = aux_hidden.unflatten(1, (self.config.num_aux, -1)).unbind(1)
            aux_hidden = torch.cat([norm(chunk) for norm, chunk in zip(self.fc_norm, chunks, strict=True)], 1)
        return weights["fc"](aux_hidden)

    def after_attention(self, heads: Tensor, residual: Tensor, weights: dict[str, Weight]) -> tuple[Tensor, Tensor]:
        """heads [n, h, dv], residual [n, H] -> (input of the next step, input of the head), both [n, H]"""
        state = weights["o_proj"](heads.flatten(1), residual)
        normed, state = self.midlayer.post_attention_layernorm.normed_and_input(state)
        inner = swiglu(*two_linears(normed, weights["gate_proj"], weights["up_proj"]))
        normed, state = self.norm.normed_and_input(weights["down_proj"](inner, state))
        return normed if self.config.norm_output else state, normed
