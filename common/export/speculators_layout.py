"""The served folder in the layout of the speculators library 0.9: `layers.0.*` names and a nested config.json.

vLLM reads it too: `vllm serve FOLDER` alone starts the target with the draft. SGLang does not.
"""

import re
from pathlib import Path

from safetensors.torch import load_file, save_file

from common.export.served_config import ARCHITECTURES, LAYER_IDS, NORM_KEYS
from common.pipeline.errors import UserError
from common.pipeline.files import atomic_folder, read_json, write_json

VERSION = "0.9.0"
DRAFT_KEYS = ("draft_vocab_size", LAYER_IDS, *NORM_KEYS)  # beside the nested config of the decoder layer
ENGINE_KEYS = ("eagle_config", "num_aux_hidden_states")  # of the served config alone


def speculators_config(served: dict, target: str, draft_tokens: int) -> dict:
    """config.json in the speculators layout. `served`: the served config, `target`: the target's name or folder."""
    layer = {key: value for key, value in served.items() if key not in (*DRAFT_KEYS, *ENGINE_KEYS)}
    proposal = {"proposal_type": "greedy", "speculative_tokens": draft_tokens, "verifier_accept_k": 1}
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": VERSION,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal | {"accept_tolerance": 0.0}],
            "verifier": {"name_or_path": target, "architectures": []},
        },
        "transformer_layer_config": layer | {"architectures": ["LlamaForCausalLM"], "mlp_bias": False},
        **{key: served[key] for key in DRAFT_KEYS},
        "target_hidden_size": None,
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "torch_dtype": served["torch_dtype"],
    }


def write_speculators(folder: Path, served: Path, target: str, draft_tokens: int) -> None:
    """Write `served`, a folder that `export` has checked, again in the speculators layout.

    Raises UserError for a draft that the layout cannot describe.
    """
    config = read_json(served / "config.json")
    if config["architectures"] != [ARCHITECTURES["llama"]]:
        raise UserError("the speculators format has no MLA draft; use --form llama or --export-format eagle3")
    if config["norm_before_fc"] and config["fc_norm"]:
        raise UserError("the speculators format takes norm_before_fc or fc_norm, not both")
    tensors = load_file(served / "model.safetensors")
    with atomic_folder(folder) as temporary:
        renamed = {re.sub(r"^midlayer\.", "layers.0.", name): tensor for name, tensor in tensors.items()}
        save_file(renamed, temporary / "model.safetensors", {"format": "pt"})
        write_json(temporary / "config.json", speculators_config(config, target, draft_tokens))
