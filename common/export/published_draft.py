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
    """ "llama" or "mla", of a config as read_config returns it."""
    return FORMS[config["architectures"][0]][0]


def draft_sizes(config: dict, **changes) -> DraftConfig:
    """The sizes in a config as read_config returns it, changed by `changes`. Raises KeyError, ValueError, TypeError."""
    return read_draft_config(config | {"architectures": [ARCHITECTURES[draft_form(config)]]} | changes)


def weight_files(folder: Path) -> list[Path]:
    """A draft's safetensors; where there are none, its pickles, as the first EAGLE-3 drafts were published."""
    files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin"))
    if not files:
        raise UserError(f"{folder} has no *.safetensors and no *.bin; name a draft's folder")
    return files


def read_tensors(folder: Path, findings: Findings) -> dict[str, Tensor]:
    """All tensors of a draft's folder under the names that are stored; raises UserError in one line."""
    tensors = {}
    for file in weight_files(folder):
        if file.suffix == ".bin":
            findings.note(BOTH, f"{file.name} is a pickle, which can carry code: safetensors is safer")
        tensors |= _read_file(file)
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
