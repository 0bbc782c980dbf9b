"""A draft's folder as anybody may have published it: its config in one form, its tensors under our names.

Differences that matter to an engine are reported as findings; a warm start ignores them.
"""

import pickle
import re
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from common.export.findings import BOTH, SGLANG, VLLM, Findings
from common.export.served_config import ARCHITECTURES, LAYER_IDS, NORM_KEYS
from common.pipeline.errors import UserError
from common.target.tensors import INDEX, read_weight_map

HEAD_NORMS = "Eagle3Qwen3ForCausalLM"  # the llama form with norms on queries and keys, which only vLLM has
# Architecture -> our form. vLLM has all of them, and puts "Eagle3" before "LlamaForCausalLM"; SGLang has ARCHITECTURES.
FORMS = {
    **dict.fromkeys(("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "LlamaForCausalLM", HEAD_NORMS), "llama"),
    **dict.fromkeys(("Eagle3Qwen2_5vlForCausalLM", "Eagle3Qwen3vlForCausalLM", "Eagle3MiniMaxM2ForCausalLM"), "llama"),
    **dict.fromkeys(("Eagle3DeepseekV2ForCausalLM", "Eagle3DeepseekV3ForCausalLM"), "mla"),
}
TRAINING_FILE = re.compile(r"(training_args|optimizer|scheduler|scaler|rng_state)")  # trainers save them with a draft
DEFAULTS = {"rms_norm_eps": 1e-6, "max_position_embeddings": 2048}  # LlamaConfig's


def read_config(stored, findings: Findings) -> dict:
    """The stored config.json as one flat table, with defaults, that read_draft_config reads.

    `architectures` becomes this project's name of the form, `architecture` keeps the stored name. Raises UserError
    where the config describes no EAGLE-3 draft.
    """
    if not isinstance(stored, dict):
        raise UserError("config.json must be a JSON object")
    config = _from_speculators(stored, findings) if "speculators_model_type" in stored else stored
    for name, default in DEFAULTS.items():
        if name not in config:
            findings.note(BOTH, f"no {name}: engines take transformers' default, {default:g}")
    names, eagle = config.get("architectures") or [], config.get("eagle_config") or {}
    if len(names) != 1 or names[0] not in FORMS:
        raise UserError(f"architectures is {names}, expected one EAGLE-3 architecture of {', '.join(FORMS)}")
    config = DEFAULTS | config | {"architecture": names[0], "eagle_config": eagle}
    if "norm_before_fc" in eagle:  # both engines look there first
        config["norm_before_fc"] = eagle["norm_before_fc"]
    return config | {"architectures": [ARCHITECTURES[FORMS[names[0]]]]}


def _from_speculators(config: dict, findings: Findings) -> dict:
    """The flat config that vLLM makes of a nested one of the speculators library."""
    kind, layer = config["speculators_model_type"], config.get("transformer_layer_config")
    if kind != "eagle3" or not isinstance(layer, dict):
        text = f"speculators format with speculators_model_type {kind!r}"
        raise UserError(f"{text}, expected 'eagle3' with a transformer_layer_config")
    text = "speculators format: its architecture is unknown to SGLang"
    findings.unsupported(SGLANG, f'{text}; use the folder with "midlayer.*" names')
    if layer.get("model_type", "llama") != "llama":
        findings.note(VLLM, f"the layer's model_type is {layer['model_type']}; it is checked as if it were llama")
    flat = {**layer, "architectures": ["Eagle3LlamaForCausalLM"], "speculators": True, "norm_before_residual": True}
    keys = ("draft_vocab_size", "target_hidden_size", LAYER_IDS, *NORM_KEYS)
    return flat | {name: config[name] for name in keys if config.get(name) is not None}


def foreign_options(config: dict) -> list[str]:
    """Options in a config that change what a draft computes, but no tensor's shape, and that our network lacks."""
    plain = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "partial_rotary_factor": 1}
    plain |= {"rotary_dim": config.get("head_dim", config.get("rotary_dim")), "use_sliding_window": False}
    options = [f"{key} {config[key]!r}" for key, value in plain.items() if config.get(key) not in (None, value)]
    if "sliding_attention" in (config.get("layer_types") or ()):
        options.append("layer_types 'sliding_attention'")
    if any(isinstance(value, dict) for value in (config.get("rope_parameters") or {}).values()):
        options.append("rope_parameters by layer type")
    return options


def weight_files(folder: Path) -> list[Path]:
    """The files from which engines read a draft's weights; raises UserError for a missing file or an empty folder.

    These are the files that the index names, else all safetensors, else the pickles of the first EAGLE-3 drafts.
    """
    stored = {path.name: path for path in sorted(folder.glob("*.safetensors")) if not TRAINING_FILE.match(path.name)}
    if (index := folder / INDEX).is_file():
        names = sorted(set(read_weight_map(index).values()))
        if missing := [name for name in names if name not in stored]:
            raise UserError(f"{index} names {missing[0]}, which is missing: download it, or delete the index")
        return [stored[name] for name in names]
    pickles = [path for path in sorted(folder.glob("*.bin")) if not TRAINING_FILE.match(path.name)]
    if not stored and not pickles:
        raise UserError(f"{folder} has no *.safetensors and no *.bin; name a draft's folder")
    return list(stored.values()) or pickles


def read_tensors(folder: Path, findings: Findings) -> dict[str, Tensor]:
    """All tensors of a draft's folder under their stored names; raises UserError for a missing or damaged file."""
    files, index, tensors = weight_files(folder), folder / INDEX, {}
    file_of = read_weight_map(index) if index.is_file() else {}
    for file in files:
        if file.suffix == ".bin":
            findings.note(BOTH, f"{file.name} is a pickle, which can carry code: safetensors is safer")
        stored = _read_file(file)
        if lost := [name for name, wanted in file_of.items() if wanted == file.name and name not in stored]:
            raise UserError(f"{index} names {lost[0]} in {file.name}, which does not hold it: download both again")
        tensors |= {name: tensor for name, tensor in stored.items() if file_of.get(name, file.name) == file.name}
    for path in sorted({*folder.glob("*.safetensors"), *folder.glob("*.bin")} - set(files)):
        why = "training left it there" if TRAINING_FILE.match(path.name) else f"weights are read from {files[0].name}"
        findings.note(BOTH, f"{path.name} is not read, as {why}: delete it")
    return tensors


def _read_file(file: Path) -> dict[str, Tensor]:
    """The tensors of one file. Of a pickle only tensors are loaded, so no code runs."""
    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        tensors = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, SafetensorError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        why = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(f"{file.name} cannot be read: {why}") from None
    if not isinstance(tensors, dict) or not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
        raise UserError(f"{file.name} cannot be read: it must hold named tensors and nothing else")
    return tensors


def engine_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors under the names that both engines read: `midlayer.*` for the decoder layer, and no prefix."""
    return {re.sub(r"^layers\.0\.", "midlayer.", name.removeprefix("model.")): t for name, t in tensors.items()}


def tensor_fault(tensor: Tensor | None, shape: torch.Size) -> str | None:
    """What is wrong with a stored tensor for a parameter of this shape; None for nothing."""
    if tensor is None:
        return "is missing: engines keep random values for it and accept nothing"
    if tensor.shape != shape:
        return f"has shape {list(tensor.shape)}, config.json says {list(shape)}"
    if not tensor.is_floating_point():
        return f"is {tensor.dtype}, expected a float type"
    if not torch.isfinite(tensor.float()).all():
        return "is not finite: no draft token would be accepted"
    return None
