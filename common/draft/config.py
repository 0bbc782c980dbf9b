"""The draft's sizes and options, read from the settings and the target's config."""

from dataclasses import dataclass

from common.pipeline.settings import DraftModel

# Rotary scalings that training, vLLM and SGLang compute alike. A draft need not scale as its target does: for any other
# scaling of the target (mrope, longrope, dynamic) it uses unscaled angles.
SCALINGS = ("linear", "llama3", "yarn")
MAIN_K = 3  # draft tokens per forward of the target in headline figures, by which the served checkpoint is chosen
# Rows of draft logits in one chunk: fewer would halve the speed of CPU products over a wide vocabulary, more only take
# memory.
CHUNK_ROWS = 2000


@dataclass(frozen=True)
class DraftConfig:
    """Sizes and options of a draft, named as in the served config.json."""

    form: str  # "llama" | "mla"
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    num_aux: int = 3
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: dict | None = None
    max_position_embeddings: int = 4096
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    q_lora_rank: int = 0  # this and the sizes below: MLA only; 0: queries are not low-rank
    kv_lora_rank: int = 0
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    v_head_dim: int = 0

    @property
    def rope_type(self) -> str:
        scaling = self.rope_scaling or {}
        return scaling.get("rope_type", scaling.get("type", "default"))

    def __post_init__(self):
        if self.form == "mla" and self.norm_before_fc:
            raise ValueError(
                "norm_before_fc is set, but vLLM's MLA draft has no such norm; use fc_norm or the llama form"
            )
        if self.form == "mla" and min(self.kv_lora_rank, self.qk_rope_head_dim, self.v_head_dim) < 1:
            raise ValueError("an MLA draft needs kv_lora_rank, qk_rope_head_dim and v_head_dim")
        if self.rope_type == "yarn" and not {"factor", "original_max_position_embeddings"} <= self.rope_scaling.keys():
            raise ValueError("rope_scaling of type yarn needs factor and original_max_position_embeddings")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"{self.num_attention_heads} query heads cannot share {self.num_key_value_heads} key heads evenly"
            )


def draft_config(shape: DraftModel, text: dict, eps: float, aux: int, draft_vocab_size: int) -> DraftConfig:
    """The draft's sizes: a size that is 0 in the settings `shape` is the target's, whose config.json is `text`."""
    heads = shape.attention_heads or text["num_attention_heads"]
    rope = text.get("rope_parameters") or {}
    scaling = text.get("rope_scaling") or {k: v for k, v in rope.items() if k != "rope_theta"}
    if scaling.get("rope_type", scaling.get("type")) not in SCALINGS:
        scaling = None
    mla = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    head_dim = shape.head_dim or text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]
    if shape.form == "mla" or "kv_lora_rank" in text:  # the head sizes of an MLA target do not suit a Llama draft
        head_dim = shape.head_dim or 128
    return DraftConfig(
        form=shape.form,
        hidden_size=text["hidden_size"],
        intermediate_size=shape.intermediate_size or text["intermediate_size"],
        num_attention_heads=heads,
        num_key_value_heads=shape.key_value_heads or min(heads, text.get("num_key_value_heads") or heads),
        head_dim=head_dim,
        vocab_size=text["vocab_size"],
        draft_vocab_size=draft_vocab_size,
        num_aux=aux,
        rms_norm_eps=eps,
        rope_theta=float(text.get("rope_theta") or rope.get("rope_theta") or 10000.0),
        rope_scaling=scaling,
        max_position_embeddings=text.get("max_position_embeddings", 4096),
        fc_norm=shape.eagle == "3.1",
        norm_output=shape.eagle == "3.1",
        **{name: text.get(name) or 0 for name in mla if shape.form == "mla"},
    )
