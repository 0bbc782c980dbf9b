"""The served folder in the layout of the speculators library 0.9: `layers.0.*` names and a nested config.json.

vLLM reads it too: `vllm serve FOLDER` alone starts the target with the draft. SGLang does not.
"""

from pathlib import Path

from safetensors.torch import load_file, save_file

from common.draft.config import DraftConfig
from common.export.served_config import read_draft_config, rope_settings
from common.pipeline.errors import UserError
from common.pipeline.files import atomic_folder, read_json, write_json

VERSION = "0.9.0"
LAYER_PREFIX = "midlayer."


def speculators_config(draft: DraftConfig, served: dict, target: str, draft_tokens: int) -> dict:
    """config.json in the speculators layout. `served`: the served config, `target`: the target's name or folder."""
    layer = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": draft.hidden_size,
        "intermediate_size": draft.intermediate_size,
        "num_attention_heads": draft.num_attention_heads,
        "num_key_value_heads": draft.num_key_value_heads,
        "head_dim": draft.head_dim,
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "vocab_size": draft.vocab_size,
        "rms_norm_eps": draft.rms_norm_eps,
        **rope_settings(draft),
        "max_position_embeddings": draft.max_position_embeddings,
        "tie_word_embeddings": False,
        **{name: served.get(name) for name in ("bos_token_id", "eos_token_id", "torch_dtype")},
    }
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
        "transformer_layer_config": layer,
        "draft_vocab_size": draft.draft_vocab_size,
        "eagle_aux_hidden_state_layer_ids": served["eagle_aux_hidden_state_layer_ids"],
        **{n: getattr(draft, n) for n in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")},
        "target_hidden_size": None,
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "torch_dtype": served["torch_dtype"],
    }


def write_speculators(folder: Path, served: Path, target: str, draft_tokens: int) -> None:
    """Write `served`, a folder that `export` has checked, again in the speculators layout; raises UserError for a form
    that the layout cannot describe."""
    config = read_json(served / "config.json")
    draft = read_draft_config(config)
    if draft.form != "llama":
        raise UserError("the speculators format has no MLA draft; use --form llama or --export-format eagle3")
    if draft.norm_before_fc and draft.fc_norm:
        raise UserError("the speculators format takes norm_before_fc or fc_norm, not both")
    tensors = load_file(served / "model.safetensors")
    renamed = {
        f"layers.0.{name.removeprefix(LAYER_PREFIX)}" if name.startswith(LAYER_PREFIX) else name: tensor
        for name, tensor in tensors.items()
    }
    with atomic_folder(folder) as temporary:
        save_file(renamed, temporary / "model.safetensors", {"format": "pt"})
        write_json(temporary / "config.json", speculators_config(draft, config, target, draft_tokens))
