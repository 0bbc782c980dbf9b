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

from common.draft.config import DraftConfig
from common.export.findings import BOTH, ENGINES, SGLANG, VLLM, Findings
from common.export.served_config import ARCHITECTURES, read_draft_config
from common.pipeline.errors import UserError
from common.pipeline.files import read_json
from common.target.tensors import INDEX, read_weight_map

HEAD_NORMS = "Eagle3Qwen3ForCausalLM"  # the llama form with norms on queries and keys, which only vLLM has
FORMS = {  # architecture -> (our form, the engines that know the name)
    "LlamaForCausalLMEagle3": ("llama", ENGINES),
    "Eagle3LlamaForCausalLM": ("llama", (VLLM,)),
    "Eagle3MiniMaxM2ForCausalLM": ("llama", (VLLM,)),
    "Eagle3Qwen2_5vlForCausalLM": ("llama", (VLLM,)),
    "Eagle3Qwen3vlForCausalLM": ("llama", (VLLM,)),
    "LlamaForCausalLM": ("llama", (VLLM,)),  # vLLM puts "Eagle3" before it
    HEAD_NORMS: ("llama", (VLLM,)),
    "Eagle3DeepseekV2ForCausalLM": ("mla", ENGINES),
    "Eagle3DeepseekV3ForCausalLM": ("mla", (VLLM,)),
}
SPECULATORS_KEYS = ("draft_vocab_size", "target_hidden_size", "eagle_aux_hidden_state_layer_ids")
SPECULATORS_KEYS += ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
# What trainers leave beside a draft's weights.
TRAINING_FILE = re.compile(r"(training_args|optimizer|scheduler|scaler|rng_state)")
DEFAULTS = {"rms_norm_eps": 1e-6, "max_position_embeddings": 2048}  # LlamaConfig's


def read_config(folder: Path, findings: Findings) -> dict | None:
    """config.json as one flat table with defaults filled in; raises UserError where it is missing or no JSON object.

    None, with an error finding, where it describes no EAGLE-3 draft.
    """
    config = read_json(folder / "config.json")
    if not isinstance(config, dict):
        raise UserError(f"{folder / 'config.json'} must be a JSON object")
    if "speculators_model_type" in config:
        config = _from_speculators(config, findings)
        if config is None:
            return None
    for name, default in DEFAULTS.items():
        if name not in config:
            findings.note(BOTH, f"no {name}: engines take transformers' default, {default:g}")
    if "norm_before_fc" in (eagle := config.get("eagle_config") or {}):  # both engines look there first
        config = config | {"norm_before_fc": eagle["norm_before_fc"]}
    names = config.get("architectures") or []
    if len(names) != 1 or names[0] not in FORMS:
        findings.error(BOTH, f"architectures is {names}, expected one EAGLE-3 architecture of {', '.join(FORMS)}")
        return None
    return DEFAULTS | config


def _from_speculators(config: dict, findings: Findings) -> dict | None:
    """The flat config that vLLM makes of a nested one of the speculators library."""
    kind, layer = config["speculators_model_type"], config.get("transformer_layer_config")
    if kind != "eagle3" or not isinstance(layer, dict):
        text = f"speculators format with speculators_model_type {kind!r}"
        findings.error(BOTH, f"{text}, expected 'eagle3' with a transformer_layer_config")
        return None
    text = "speculators format: its architecture is unknown to SGLang"
    findings.unsupported(SGLANG, f'{text}; use the folder with "midlayer.*" names')
    if layer.get("model_type", "llama") != "llama":
        findings.note(VLLM, f"the layer's model_type is {layer['model_type']}; it is checked as if it were llama")
    flat = {**layer, "architectures": ["Eagle3LlamaForCausalLM"], "speculators": True, "norm_before_residual": True}
    return flat | {name: config[name] for name in SPECULATORS_KEYS if config.get(name) is not None}


def draft_form(config: dict) -> str:
    """The form, "llama" or "mla", of a config as read_config returns it."""
    return FORMS[config["architectures"][0]][0]


def draft_sizes(config: dict, **changes) -> DraftConfig:
    """The sizes in a config as read_config returns it, changed by `changes`. Raises KeyError, ValueError, TypeError."""
    return read_draft_config(config | {"architectures": [ARCHITECTURES[draft_form(config)]]} | changes)


def foreign_options(config: dict) -> list[str]:
    """Options of a config that change the computation and no shape, and that the network here does not have."""
    plain = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "partial_rotary_factor": 1}
    plain |= {"rotary_dim": config.get("head_dim", config.get("rotary_dim")), "use_sliding_window": False}
    options = [f"{key} {config[key]!r}" for key, value in plain.items() if config.get(key) not in (None, value)]
    if "sliding_attention" in (config.get("layer_types") or ()):
        options.append("layer_types 'sliding_attention'")
    if any(isinstance(value, dict) for value in (config.get("rope_parameters") or {}).values()):
        options.append("rope_parameters by layer type")
    return options


def weight_files(folder: Path) -> list[Path]:
    """The files that engines read a draft's weights from; raises UserError where there are none, or one is missing.

    Those that the index names, else all safetensors, else the pickles, as the first EAGLE-3 drafts were published.
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
    """All tensors of a draft's folder under the names that are stored; raises UserError in one line."""
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


def our_name(name: str) -> str:
    """A tensor's name as both engines read it: midlayer.* without a prefix."""
    return re.sub(r"^layers\.0\.", "midlayer.", name.removeprefix("model."))
