"""The target's final norm, head and embedding, read from its checkpoint without loading the model.

Of Kimi-K2.5's 595 GB only these three tensors are read. Torch is imported only inside the functions.
"""

import difflib
import re
from pathlib import Path

from common.pipeline.errors import UserError
from common.pipeline.files import read_json
from common.pipeline.settings import Target
from common.target.sizes import read_sizes, target_file

INDEX = "model.safetensors.index.json"
# The end of a name decides, however deep it is nested (`language_model.model.norm.weight`, ...).
NAMES = {
    "lm_head": ("lm_head.weight", "output.weight", "embed_out.weight"),
    "embedding": ("embed_tokens.weight", "wte.weight", "tok_embeddings.weight", "embed_in.weight"),
    "norm": ("norm.weight", "final_layernorm.weight", "final_layer_norm.weight", "ln_f.weight"),
}
NOT_TEXT = re.compile(
    r"(^|\.)(vision\w*|visual|mm_projector|multi_modal_projector|audio\w*|mtp|layers|blocks|draft\w*)(\.|$)"
)
# Model types whose norms multiply by 1 + weight (Gemma 1 to 3, Qwen3-Next, Qwen3.5, MiniMax-M3, Step-3.5); gemma3n and
# gemma4 multiply by the weight. Read without the 1, the norm of these targets fails 02's on-policy check.
PLUS_ONE = ("gemma", "gemma2", "gemma3", "gemma3_text", "qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe")
PLUS_ONE += ("qwen3_5_moe_text", "minimax_m3_vl", "minimax_m3_vl_text", "step3p5", "step3p7")


def read_tensors(target: Target, *roles: str) -> dict:
    """Tensors by role (`lm_head` [V, H], `embedding` [V, H], `norm` [H]); a tied head is the embedding.

    The dtype is the stored one, or float32 for a norm of PLUS_ONE. The 1 of such a norm and a family's factor on the
    logits are put in, so that for every target lm_head @ (normed state * norm) are its logits. Raises UserError where a
    tensor is missing, ambiguous, quantised, of another shape, or has a bias.
    """
    import torch

    sizes = read_sizes(target)
    files = _weight_map(target)
    tensors = {}
    for role in roles:
        name = _find_name(files, "embedding" if role == "lm_head" and sizes.tied else role, target)
        with _open(target_file(target, files[name])) as file:
            tensor = file.get_tensor(name)
        if tensor.dtype not in (torch.bfloat16, torch.float16, torch.float32):  # fp8 counts as floating point
            raise UserError(
                f"{name} of {target.model!r} is quantised ({tensor.dtype}); use a checkpoint that keeps it bf16"
            )
        shape = (sizes.hidden_size,) if role == "norm" else (sizes.vocab_size, sizes.hidden_size)
        if tensor.ndim != len(shape) or tensor.shape[-1] != shape[-1] or tensor.shape[0] < shape[0]:
            raise UserError(f"{name} of {target.model!r} has shape {list(tensor.shape)}, expected {list(shape)}")
        if (bias := f"{name.removesuffix('weight')}bias") in files and role != "embedding":
            raise UserError(
                f"{target.model!r} has {bias}, but a draft's norm and head have none; choose another target"
            )
        tensor = tensor[: shape[0]]  # rows beyond the vocabulary are padding
        if role == "norm" and sizes.text.get("model_type") in PLUS_ONE:
            tensor = tensor.float() + 1
        if role == "lm_head" and (factor := _logit_factor(sizes.text)) != 1:
            tensor = (tensor.float() * factor).to(tensor.dtype)
        tensors[role] = tensor
    return tensors


def _logit_factor(text: dict) -> float:
    """What a family multiplies its logits by. Cohere, Falcon-H1, MiniCPM, Granite and HyperCLOVA X each have a key.

    A positive factor leaves the first choice as it is, so no later check would notice that it is missing.
    """
    factor = (text.get("logit_scale") or 1.0) * (text.get("lm_head_multiplier") or 1.0)
    if text.get("dim_model_base"):
        factor *= text["dim_model_base"] / text["hidden_size"]
    scaling = text.get("logits_scaling") or 1.0
    return factor * scaling if text.get("model_type") == "hyperclovax" else factor / scaling


def _weight_map(target: Target) -> dict[str, str]:
    """Tensor name -> file: from the index, from several of them (text and vision apart), or from the files' headers."""
    index, folder, files = target_file(target, INDEX, required=False), Path(target.model), {}
    # A hub repository's name is no folder, so that glob yields nothing. The usual name is last, so that it wins.
    for path in [*sorted(folder.glob("*.safetensors.index.json")), *([index] if index else [])]:
        files |= read_weight_map(path)
    if files:
        return files
    for name in [path.name for path in sorted(folder.glob("*.safetensors"))] or ["model.safetensors"]:
        with _open(target_file(target, name)) as file:
            files |= dict.fromkeys(file.keys(), name)
    return files


def read_weight_map(index: Path) -> dict[str, str]:
    """Tensor name -> file name of an index of safetensors; raises UserError where it is damaged."""
    value = read_json(index)
    files = value.get("weight_map") if isinstance(value, dict) else None
    if not isinstance(files, dict) or not all(isinstance(name, str) for name in files.values()):
        raise UserError(f"{index}: not an index of safetensors, it has no weight_map of file names")
    return files


def _open(path: Path):
    """A safetensors file, mapped; raises UserError when it is damaged."""
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, "pt")
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} cannot be read ({error}); download it again") from None


def _find_name(files: dict[str, str], role: str, target: Target) -> str:
    """The one tensor name of a role; raises UserError, with the names that come near, for none or several."""
    text = [name for name in files if not NOT_TEXT.search(name)]
    matches = [name for name in text if any(f".{name}".endswith(f".{ending}") for ending in NAMES[role])]
    if len(matches) == 1:
        return matches[0]
    what = f"several tensors match: {', '.join(matches)}"
    if not matches:
        endings = ", ".join(f"*.{ending}" for ending in NAMES[role])
        near = difflib.get_close_matches(NAMES[role][0], text, 3, 0.4)
        what = f"none of {len(files)} names ends like {endings}" + (f"; similar: {', '.join(near)}" if near else "")
    raise UserError(f"the {role} of {target.model!r} is not clear: {what}")
