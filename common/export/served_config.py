"""config.json of a served draft: written for vLLM and SGLang alike, and read back as a DraftConfig."""

from common.draft.config import DraftConfig
from common.draft.network import rope_frequencies, yarn_mscale

ARCHITECTURES = {"llama": "LlamaForCausalLMEagle3", "mla": "Eagle3DeepseekV2ForCausalLM"}
MODEL_TYPES = {"llama": "llama", "mla": "kimi_k2"}  # "deepseek_v3" would be the target's own MTP layer in vLLM
MLA_KEYS = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
NORM_KEYS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"


def served_config(config: DraftConfig, aux_layers: tuple[int, ...], text: dict) -> dict:
    """config.json of a served draft; `text`: the target's text config, `aux_layers`: inputs of layers, as vLLM counts.

    The aux layers are written twice: as inputs for vLLM and, in eagle_config, as outputs (one less) for SGLang.
    """
    served = {
        "architectures": [ARCHITECTURES[config.form]],
        "model_type": MODEL_TYPES[config.form],
        **{key: value for key, value in vars(config).items() if key not in ("form", "num_aux", *MLA_KEYS)},
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "attention_bias": False,
        **_rope_settings(config),
        "bos_token_id": text.get("bos_token_id"),
        "eos_token_id": text.get("eos_token_id"),
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        LAYER_IDS: list(aux_layers),
        "eagle_config": {LAYER_IDS: [layer - 1 for layer in aux_layers], "use_aux_hidden_state": True},
    }
    if config.num_aux != 3:
        served["num_aux_hidden_states"] = config.num_aux
    if config.form == "mla":
        # null, not 0: vLLM takes any number for a rank and would build another network
        served |= {key: getattr(config, key) for key in MLA_KEYS} | {"q_lora_rank": config.q_lora_rank or None}
    return served


def _rope_settings(config: DraftConfig) -> dict:
    """The rotary settings in the keys of transformers 4 (theta, scaling) and in those of 5 (parameters), equal in both.

    Version 4 does not read `rope_parameters` and silently takes theta 10000 where that key stands alone.

    YaRN multiplies cos and sin by a factor. vLLM reads `attention_factor`; SGLang multiplies `attn_factor` by what it
    computes from mscale, which some of its versions do not read. So mscale is left out and the factor is written under
    both keys. The MLA form keeps mscale: in both engines DeepSeek's rule takes the softmax scale from it.
    """
    scaling = dict(config.rope_scaling or {})
    if config.form == "llama" and config.rope_type == "yarn":
        factor = rope_frequencies(config, config.head_dim)[1]
        scaling = {key: value for key, value in scaling.items() if key not in ("mscale", "mscale_all_dim")}
        scaling |= {"attention_factor": factor, "attn_factor": factor / yarn_mscale(scaling["factor"])}
    return {
        "rope_scaling": scaling or None,
        "rope_parameters": {**scaling, "rope_type": config.rope_type, "rope_theta": config.rope_theta},
    }


def read_draft_config(config: dict) -> DraftConfig:
    """The draft's sizes from a served config.json; raises ValueError or TypeError for a value that no draft has."""
    form = next((form for form, name in ARCHITECTURES.items() if config["architectures"] == [name]), None)
    if form is None:
        raise ValueError(f"architectures is {config['architectures']}, expected {' or '.join(ARCHITECTURES.values())}")
    sizes = {key: config.get(key) for key in ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")}
    for name, value in sizes.items():
        if type(value) is not int:
            raise ValueError(f"{name} is {value!r} in config.json, expected a whole number")
    heads, rope = sizes["num_attention_heads"], config.get("rope_parameters") or {}
    scaling = config.get("rope_scaling")
    if not scaling and rope.get("rope_type", "default") != "default":  # transformers 5 saves rope_parameters alone
        scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    return DraftConfig(
        form=form,
        **sizes,
        num_key_value_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or sizes["hidden_size"] // heads,
        draft_vocab_size=config.get("draft_vocab_size") or sizes["vocab_size"],
        num_aux=config.get("num_aux_hidden_states", 3),
        rms_norm_eps=config["rms_norm_eps"],
        rope_theta=float(config.get("rope_theta") or rope.get("rope_theta", 10000.0)),
        rope_scaling=scaling or None,
        max_position_embeddings=config["max_position_embeddings"],
        **{key: bool(config.get(key)) for key in NORM_KEYS},
        **({key: config.get(key) or 0 for key in MLA_KEYS} if form == "mla" else {}),
    )
