"""The served folder: config.json and model.safetensors as vLLM and SGLang read them, checked out and in.

Engines load a draft that lacks `fc`, `d2t` or `lm_head` without a word and then accept nothing; so every name, shape,
dtype and value range is checked here before a folder is published, and again for any folder that is read.
"""

import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from common.dataset.draft_vocabulary import kept_tokens
from common.draft.config import DraftConfig
from common.draft.network import Draft, rope_frequencies, yarn_mscale
from common.pipeline.errors import UserError
from common.pipeline.files import atomic_folder, read_json, write_json

ARCHITECTURES = {"llama": "LlamaForCausalLMEagle3", "mla": "Eagle3DeepseekV2ForCausalLM"}
MODEL_TYPES = {"llama": "llama", "mla": "kimi_k2"}  # vLLM takes "deepseek_v3" for the target's own MTP layer
MLA_KEYS = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


def rope_settings(config: DraftConfig) -> dict:
    """The rotary settings in the form of transformers 4 and in that of 5.

    Version 4 takes theta 10000 without a word where only `rope_parameters` stands; 5 reads both, and they agree here.
    """
    scaling = _served_scaling(config)
    return {
        "rope_theta": config.rope_theta,
        "rope_scaling": scaling or None,
        "rope_parameters": {**scaling, "rope_type": config.rope_type, "rope_theta": config.rope_theta},
    }


def _served_scaling(config: DraftConfig) -> dict:
    """The rotary scaling in words that both engines take for the same angles.

    YaRN's factor on cos and sin: vLLM reads `attention_factor`; SGLang multiplies by `attn_factor` what it makes of
    mscale, which its versions before 2026 do not read. So mscale is left out and the factor stands there twice. The
    MLA form keeps mscale: DeepSeek's rule takes the softmax scale from it, in both engines.
    """
    scaling = dict(config.rope_scaling or {})
    if config.form == "llama" and config.rope_type == "yarn":
        factor = rope_frequencies(config, config.head_dim)[1]
        scaling = {key: value for key, value in scaling.items() if key not in ("mscale", "mscale_all_dim")}
        scaling |= {"attention_factor": factor, "attn_factor": factor / yarn_mscale(scaling["factor"])}
    return scaling


def served_config(config: DraftConfig, aux_layers: tuple[int, ...], text: dict) -> dict:
    """config.json of a served draft. aux ids stand twice: inputs of layers, as vLLM counts, and outputs for SGLang."""
    served = {
        "architectures": [ARCHITECTURES[config.form]],
        "model_type": MODEL_TYPES[config.form],
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "attention_bias": False,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "rms_norm_eps": config.rms_norm_eps,
        **rope_settings(config),
        "max_position_embeddings": config.max_position_embeddings,
        "bos_token_id": text.get("bos_token_id"),
        "eos_token_id": text.get("eos_token_id"),
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        "eagle_aux_hidden_state_layer_ids": list(aux_layers),
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in aux_layers],
            "use_aux_hidden_state": True,
        },
    }
    if config.num_aux != 3:
        served["num_aux_hidden_states"] = config.num_aux
    if config.form == "mla":
        # null, not 0: vLLM takes any number for a rank and builds another network
        served |= {key: getattr(config, key) for key in MLA_KEYS} | {"q_lora_rank": config.q_lora_rank or None}
    return served


def export(
    folder: Path,
    draft: Draft,
    d2t: Tensor,
    t2d: Tensor,
    aux_layers: tuple[int, ...],
    text: dict,
    embedding: bool = True,
) -> None:
    """Write the served folder (bf16 weights; d2t and t2d left out for a full vocabulary), read it back, publish it.

    A draft that would not serve never replaces one that does.
    """
    tensors = {name: p.detach().cpu().to(torch.bfloat16).contiguous() for name, p in draft.named_parameters()}
    if not embedding:
        del tensors["embed_tokens.weight"]
    if draft.config.draft_vocab_size < draft.config.vocab_size:
        tensors |= {"d2t": d2t.contiguous(), "t2d": t2d.contiguous()}
    with atomic_folder(folder) as temporary:
        save_file(tensors, temporary / "model.safetensors", {"format": "pt"})
        write_json(temporary / "config.json", served_config(draft.config, aux_layers, text))
        problems = check_export(temporary)
        if not problems:
            stored = load_file(temporary / "model.safetensors")
            problems = [f"{n} read back differently" for n, t in tensors.items() if not torch.equal(stored[n], t)]
        if problems:
            raise UserError(f"{folder} would not serve: {'; '.join(problems)}")


def check_export(folder: Path) -> list[str]:
    """What an engine would stumble over, silently or not, in a folder of ours; empty when it is right.

    Strict: one spelling, both layer lists. What others publish is looked at by common/export/engine_check.py.
    """
    config = read_json(folder / "config.json")
    try:
        with safe_open(folder / "model.safetensors", "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    except (OSError, SafetensorError) as error:
        return [f"model.safetensors cannot be read: {error}"]
    try:
        draft_config = read_draft_config(config)
    except (KeyError, ValueError, TypeError) as error:
        return [f"config.json: {error!r}"]
    return [*_tensor_problems(draft_config, tensors), *_config_problems(config, draft_config)]


def read_draft_config(config: dict) -> DraftConfig:
    """The draft's sizes from a served config.json."""
    form = next((form for form, name in ARCHITECTURES.items() if config["architectures"] == [name]), None)
    if form is None:
        raise ValueError(f"architectures is {config['architectures']}, known are {', '.join(ARCHITECTURES.values())}")
    for name in ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size"):
        if type(config[name]) is not int:
            raise ValueError(f"{name} is {config[name]!r}, expected a whole number")
    heads, rope = config["num_attention_heads"], config.get("rope_parameters") or {}
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}  # transformers 5 saves only this one
    return DraftConfig(
        form=form,
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_attention_heads=heads,
        num_key_value_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        vocab_size=config["vocab_size"],
        draft_vocab_size=config.get("draft_vocab_size") or config["vocab_size"],
        num_aux=config.get("num_aux_hidden_states", 3),
        rms_norm_eps=config["rms_norm_eps"],
        rope_theta=float(config.get("rope_theta") or rope.get("rope_theta", 10000.0)),
        rope_scaling=config.get("rope_scaling") or (scaling if rope.get("rope_type", "default") != "default" else None),
        max_position_embeddings=config["max_position_embeddings"],
        **{key: bool(config.get(key)) for key in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")},
        **({key: config.get(key) or 0 for key in MLA_KEYS} if form == "mla" else {}),
    )


def _tensor_problems(config: DraftConfig, tensors: dict[str, Tensor]) -> list[str]:
    with torch.device("meta"):
        wanted = {
            name: p.shape
            for name, p in Draft(config, torch.empty(config.vocab_size, config.hidden_size)).named_parameters()
        }
    reduced = config.draft_vocab_size < config.vocab_size
    mapping = {"d2t": (config.draft_vocab_size,), "t2d": (config.vocab_size,)} if reduced else {}
    problems = []
    for name, shape in {**wanted, **mapping}.items():
        if name not in tensors:
            if name != "embed_tokens.weight":  # engines take the target's own
                problems.append(f"{name} is missing")
        elif tuple(tensors[name].shape) != tuple(shape):
            problems.append(f"{name} has shape {list(tensors[name].shape)}, expected {list(shape)}")
    for name, tensor in tensors.items():
        if name not in wanted and name not in mapping:
            problems.append(
                f"{name} is unknown to the engines" if name not in ("d2t", "t2d") else f"{name} with a full vocabulary"
            )
        elif name in wanted and not tensor.is_floating_point():
            problems.append(f"{name} is {tensor.dtype}, expected a float type")
        elif name in wanted and not torch.isfinite(tensor.float()).all():
            problems.append(f"{name} is not finite")
    if reduced and {"d2t", "t2d"} <= tensors.keys() and not problems:
        if tensors["d2t"].dtype != torch.int64 or tensors["t2d"].dtype != torch.bool:
            return [*problems, f"d2t is {tensors['d2t'].dtype} and t2d {tensors['t2d'].dtype}, expected int64 and bool"]
        try:
            kept_tokens(tensors["d2t"], tensors["t2d"])
        except UserError as error:
            problems.append(str(error))
    return problems


def _config_problems(config: dict, draft: DraftConfig) -> list[str]:
    problems = []
    vllm = config.get("eagle_aux_hidden_state_layer_ids")
    sglang = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    if not vllm or not sglang:
        problems.append("aux layer ids must stand at the top level (vLLM) and in eagle_config (SGLang)")
    elif [layer - 1 for layer in vllm] != list(sglang):
        problems.append(f"SGLang's aux layer ids {sglang} must be vLLM's {vllm} minus 1")
    if (config.get("eagle_config") or {}).get("use_aux_hidden_state") is False:
        problems.append("eagle_config.use_aux_hidden_state is false: SGLang would feed the last state only")
    if vllm and len(vllm) != draft.num_aux:
        problems.append(f"{len(vllm)} aux layer ids for an fc of {draft.num_aux} states")
    if config.get("num_hidden_layers") != 1:
        problems.append(f"num_hidden_layers is {config.get('num_hidden_layers')}, expected 1")
    if config.get("model_type") != MODEL_TYPES[draft.form]:
        problems.append(f"model_type is {config.get('model_type')!r}, expected {MODEL_TYPES[draft.form]!r}")
    if config.get("draft_vocab_size") is None:
        problems.append("draft_vocab_size is missing: SGLang reads it without a default")
    if config.get("tie_word_embeddings"):
        problems.append("tie_word_embeddings is true: SGLang would take the embedding for the head")
    written = {key: config[key] for key in ("rope_theta", "rope_scaling", "rope_parameters") if key in config}
    if any(value != rope_settings(draft)[key] for key, value in written.items()):
        problems.append(f"rope settings contradict each other for transformers 4 and 5: {written}")
    return problems


def describe(folder: Path) -> str:
    """One line on a served folder: form, sizes, vocabulary."""
    config = json.loads((folder / "config.json").read_text("utf-8"))
    size = (folder / "model.safetensors").stat().st_size
    return (
        f"{config['architectures'][0]}, hidden {config['hidden_size']}, draft vocabulary "
        f"{config['draft_vocab_size']:,} of {config['vocab_size']:,}, {size / 2**20:.1f} MiB"
    )
