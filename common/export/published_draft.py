"""A draft's folder as anybody may have published it: its config in one form, its tensors under our names.

What the engines make of the differences is said as findings; a warm start only wants the draft.
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
from common.export.served_folder import ARCHITECTURES, read_draft_config
from common.pipeline.errors import UserError
from common.pipeline.files import read_json

HEAD_NORMS = "Eagle3Qwen3ForCausalLM"  # llama's form with norms on queries and keys, which only vLLM has
FORMS = {  # architecture -> (our form, the engines that know the name)
    "LlamaForCausalLMEagle3": ("llama", ENGINES),
    "Eagle3LlamaForCausalLM": ("llama", (VLLM,)),
    "Eagle3MiniMaxM2ForCausalLM": ("llama", (VLLM,)),
    "Eagle3Qwen2_5vlForCausalLM": ("llama", (VLLM,)),
    "Eagle3Qwen3vlForCausalLM": ("llama", (VLLM,)),
    "LlamaForCausalLM": ("llama", (VLLM,)),  # vLLM puts "Eagle3" before it
    HEAD_NORMS: ("llama", (VLLM,)),
    "Eagle3DeepseekV2ForCausalLM": ("mla", ENGINES),
    "Eagle3DeepseekV3ForCausalLM": ("mla", ENGINES),
}
SPECULATORS_KEYS = ("draft_vocab_size", "target_hidden_size", "eagle_aux_hidden_state_layer_ids")
SPECULATORS_KEYS += ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
DEFAULTS = {"rms_norm_eps": 1e-6, "max_position_embeddings": 2048}  # LlamaConfig's


def read_config(folder: Path, found: Findings) -> dict | None:
    """config.json as one flat table; None where it describes no EAGLE-3 draft. Raises UserError where it is no JSON."""
    config = read_json(folder / "config.json")
    if not isinstance(config, dict):
        raise UserError(f"{folder / 'config.json'} must be a JSON object")
    if "speculators_model_type" in config:
        config = _from_speculators(config, found)
        if config is None:
            return None
    for name, default in DEFAULTS.items():
        if name not in config:
            found.note(BOTH, f"no {name}: transformers' default is taken, {default:g}")
    if "norm_before_fc" in (eagle := config.get("eagle_config") or {}):  # where vLLM looks first
        config = config | {"norm_before_fc": eagle["norm_before_fc"]}
    names = config.get("architectures") or []
    if len(names) != 1 or names[0] not in FORMS:
        found.error(BOTH, f"architectures is {names}: no EAGLE-3 draft that is known here ({', '.join(FORMS)})")
        return None
    return DEFAULTS | config


def _from_speculators(config: dict, found: Findings) -> dict | None:
    """The flat config that vLLM makes of a speculators one."""
    layer = config.get("transformer_layer_config")
    if config["speculators_model_type"] != "eagle3" or not isinstance(layer, dict):
        found.error(BOTH, f"speculators format of {config['speculators_model_type']!r}, not of eagle3 with its layer")
        return None
    found.error(SGLANG, 'speculators format: SGLang knows no such architecture; use the folder with "midlayer.*" names')
    if layer.get("model_type", "llama") != "llama":
        found.note(VLLM, f"the layer is {layer['model_type']}, which is checked as if it were llama")
    flat = {**layer, "architectures": ["Eagle3LlamaForCausalLM"], "speculators": True, "norm_before_residual": True}
    return flat | {name: config[name] for name in SPECULATORS_KEYS if config.get(name) is not None}


def draft_sizes(config: dict, **known) -> DraftConfig:
    """The sizes in a config of read_config's; `known` beats it. Raises KeyError, ValueError, TypeError."""
    form, _ = FORMS[config["architectures"][0]]
    return read_draft_config(config | {"architectures": [ARCHITECTURES[form]]} | known)


def weight_files(folder: Path) -> list[Path]:
    """A draft's safetensors; where there are none, its pickles, as the first EAGLE-3 drafts were published."""
    return sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin"))


def read_weights(file: Path) -> dict[str, Tensor]:
    """The tensors of one file; raises UserError in one line. Of a pickle, tensors alone are loaded: no code runs."""
    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        tensors = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, SafetensorError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        why = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(f"{file.name} cannot be read: {why}") from None
    if not isinstance(tensors, dict) or not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
        raise UserError(f"{file.name} cannot be read: it holds other things than named tensors")
    return tensors


def our_name(name: str) -> str:
    """A tensor's name as both engines read it."""
    return re.sub(r"^layers\.0\.", "midlayer.", name.removeprefix("model."))
