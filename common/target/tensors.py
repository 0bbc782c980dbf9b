"""The target's final norm, head and embedding, read from its checkpoint without loading the model."""

import difflib
import re
from pathlib import Path

from common.pipeline.errors import UserError
from common.pipeline.files import read_json
from common.pipeline.settings import Target
from common.target.sizes import read_sizes, target_file

# The last parts of the name decide, whatever the nesting (`language_model.model.norm.weight`, ...).
NAMES = {
    "lm_head": ("lm_head.weight", "output.weight", "embed_out.weight"),
    "embedding": ("embed_tokens.weight", "wte.weight", "tok_embeddings.weight", "embed_in.weight"),
    "norm": ("norm.weight", "final_layernorm.weight", "final_layer_norm.weight", "ln_f.weight"),
}


INDEX = "model.safetensors.index.json"


# Families whose norms multiply by 1 + weight, by model_type; gemma3n and gemma4 multiply by the weight.
PLUS_ONE = ("gemma", "gemma2", "gemma3", "gemma3_text", "qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe")
PLUS_ONE += ("qwen3_5_moe_text", "minimax_m3_vl", "minimax_m3_vl_text", "step3p5", "step3p7")
NOT_TEXT = re.compile(
    r"(^|\.)(vision\w*|visual|mm_projector|multi_modal_projector|audio\w*|mtp|layers|blocks|draft\w*)(\.|$)"
)


def read_tensors(target: Target, *wanted: str) -> dict:
    """Tensors by role (`lm_head` [V, H], `embedding` [V, H], `norm` [H]); a tied head is the embedding.

    As stored, but for families that add to the norm or scale the logits: what is returned has that in it, so that
    lm_head @ (state normed * norm) is the target's logits for every target.
    """
    import torch

    sizes = read_sizes(target)
    files = _weight_map(target)
    tensors = {}
    for role in wanted:
        name = _find(files, "embedding" if role == "lm_head" and sizes.tied else role, target)
        with _open(target_file(target, files[name])) as shard:
            tensor = shard.get_tensor(name)
        if tensor.dtype not in (torch.bfloat16, torch.float16, torch.float32):  # fp8 counts as floating point
            raise UserError(f"{name} of {target.model!r} is quantised ({tensor.dtype}); a plain one is needed")
        shape = (sizes.hidden_size,) if role == "norm" else (sizes.vocab_size, sizes.hidden_size)
        if tensor.ndim != len(shape) or tensor.shape[-1] != shape[-1] or tensor.shape[0] < shape[0]:
            raise UserError(f"{name} of {target.model!r} has shape {list(tensor.shape)}, expected {list(shape)}")
        if (bias := f"{name.removesuffix('weight')}bias") in files and role != "embedding":
            raise UserError(f"{target.model!r} has {bias}: engines' drafts have norms and heads without; take another")
        tensor = tensor[: shape[0]]  # rows beyond the vocabulary are padding
        if role == "norm" and sizes.text.get("model_type") in PLUS_ONE:
            tensor = tensor.float() + 1
        if role == "lm_head" and (factor := _logit_factor(sizes.text)) != 1:
            tensor = (tensor.float() * factor).to(tensor.dtype)
        tensors[role] = tensor
    return tensors


def _logit_factor(text: dict) -> float:
    """What a family multiplies its logits by: Granite, Cohere, Falcon-H1, MiniCPM, HyperCLOVA X each have a key."""
    factor = (text.get("logit_scale") or 1.0) * (text.get("lm_head_multiplier") or 1.0)
    if text.get("dim_model_base"):
        factor *= text["dim_model_base"] / text["hidden_size"]
    scaling = text.get("logits_scaling") or 1.0
    return factor * scaling if text.get("model_type") == "hyperclovax" else factor / scaling


def _weight_map(target: Target) -> dict[str, str]:
    """Tensor name -> file: from the index, from several (text and vision apart), or from the files' own headers."""
    index = target_file(target, INDEX, required=False)
    folder = Path(target.model)
    others = sorted(folder.glob("*.safetensors.index.json")) if folder.is_dir() else []
    if index is not None or others:
        found = {}
        for path in [*others, *([index] if index else [])]:  # the usual name last: it wins
            value = read_json(path)
            if not isinstance(value, dict) or not isinstance(value.get("weight_map"), dict):
                raise UserError(f"{path}: not an index of safetensors, it has no weight_map")
            found |= value["weight_map"]
        return found
    files = [path.name for path in sorted(folder.glob("*.safetensors"))] if folder.is_dir() else []
    found = {}
    for name in files or ["model.safetensors"]:
        with _open(target_file(target, name)) as shard:
            found |= dict.fromkeys(shard.keys(), name)
    return found


def _open(path: Path):
    """A safetensors file, mapped; raises UserError when it is damaged."""
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, "pt")
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} cannot be read ({error}); fetch it again") from None


def _find(files: dict[str, str], role: str, target: Target) -> str:
    """The one tensor of a role; raises UserError with what was tried where there is none, or more than one."""
    text = [name for name in files if not NOT_TEXT.search(name)]
    found = [name for name in text if any(f".{name}".endswith(f".{ending}") for ending in NAMES[role])]
    if len(found) != 1:
        tried = ", ".join(f"*.{ending}" for ending in NAMES[role])
        near = difflib.get_close_matches(NAMES[role][0], text, 3, 0.4)
        what = f"several: {', '.join(found)}" if found else f"tried {tried} among {len(files)} names"
        near = f"; near: {', '.join(near)}" if near and not found else ""
        raise UserError(f"cannot tell the {role} of {target.model!r}: {what}{near}")
    return found[0]
