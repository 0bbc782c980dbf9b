"""The target's sizes from its config, and the three tensors that training needs, read straight from its safetensors.

The model itself is never loaded here: of Kimi-K2.5's 595 GB, the final norm, the head and the embedding are read.
Torch is imported only where tensors are.
"""

import difflib
import math
import re
from dataclasses import asdict, dataclass
from pathlib import Path

from common.pipeline.settings import Sizes, Target
from common.pipeline.errors import UserError
from common.target.protocol import require_model
from common.pipeline.manifest import digest, read_json

# The last parts of the name decide, whatever the nesting (`language_model.model.norm.weight`, ...).
NAMES = {
    "lm_head": ("lm_head.weight", "output.weight", "embed_out.weight"),
    "embedding": ("embed_tokens.weight", "wte.weight", "tok_embeddings.weight", "embed_in.weight"),
    "norm": ("norm.weight", "final_layernorm.weight", "final_layer_norm.weight", "ln_f.weight"),
}
INDEX = "model.safetensors.index.json"
NOT_TEXT = re.compile(
    r"(^|\.)(vision\w*|visual|mm_projector|multi_modal_projector|audio\w*|mtp|layers|blocks|draft\w*)(\.|$)"
)
# Families whose norms multiply by 1 + weight, by model_type; gemma3n and gemma4 multiply by the weight.
PLUS_ONE = ("gemma", "gemma2", "gemma3", "gemma3_text", "qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe")
PLUS_ONE += ("qwen3_5_moe_text", "minimax_m3_vl", "minimax_m3_vl_text", "step3p5", "step3p7")
CAPS = ("final_logit_softcapping", "logits_soft_cap")  # tanh over the logits


@dataclass(frozen=True)
class TargetSizes:
    """The sizes of the target's text model; `text` is its whole (inner) config."""

    hidden_size: int
    layers: int
    vocab_size: int
    eps: float
    tied: bool
    text: dict

    def aux_layers(self, chosen: tuple[int, ...]) -> tuple[int, ...]:
        """Layers whose input is kept, as vLLM counts (EAGLE-3's default: 2, N//2, N-3)."""
        layers = chosen or (2, self.layers // 2, self.layers - 3)
        if sorted(set(layers)) != list(layers) or layers[0] < 0 or layers[-1] >= self.layers:
            raise UserError(f"extract.aux_layers {list(layers)}: must rise and lie in 0..{self.layers - 1}")
        return layers


def read_sizes(target: Target, known: Sizes | None = None) -> TargetSizes:
    """Sizes from config.json, nested (`text_config`) or not; raises UserError that names a missing key, or one that
    differs from `known`, what the TOML says of the target."""
    config = _read_config(target)
    text = {**config, **config["text_config"]} if isinstance(config.get("text_config"), dict) else config
    for key in CAPS:
        if text.get(key):
            raise UserError(
                f"{target.model!r}: {key} is {text[key]} in its config.json, but a draft is taught logits that are the "
                "head times the normed state, without a cap; take another target"
            )
    for key, value in said(known).items():
        found = text.get(key, value)  # a key that is left out there has its class's default, which we don't know
        if found != value and not (isinstance(value, float) and math.isclose(found, value, rel_tol=1e-6)):
            raise UserError(f"sizes.{key} is {value} in the config, {found} in config.json of {target.model!r}")
    try:
        return TargetSizes(
            hidden_size=text["hidden_size"],
            layers=text["num_hidden_layers"],
            vocab_size=text["vocab_size"],
            eps=text.get("rms_norm_eps") or text["layer_norm_epsilon"],
            tied=bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))),
            text=text,
        )
    except KeyError as key:
        raise UserError(f"config.json of {target.model!r} has no {key}; is it a causal language model?") from None


def said(known: Sizes | None) -> dict:
    """What a TOML says of config.json: its keys without those that no config.json has."""
    values = asdict(known) if known else {}
    return {key: value for key, value in values.items() if value and key not in ("active_b", "weights_gb")}


def planned_sizes(target: Target, known: Sizes) -> TargetSizes:
    """Sizes for a dry run: of the checkpoint where it is at hand, else of the TOML; raises UserError without either."""
    try:
        return read_sizes(target, known)
    except UserError as error:
        text = said(known)
        missing = [key for key in ("hidden_size", "num_hidden_layers", "vocab_size", "rms_norm_eps") if key not in text]
        if len(missing) == 4 or "in the config," in str(error):
            raise
        if missing:
            raise UserError(f"{error}; and [sizes] of the config lacks {', '.join(missing)}") from None
        hidden, layers, vocab, eps = (
            text[key] for key in ("hidden_size", "num_hidden_layers", "vocab_size", "rms_norm_eps")
        )
        return TargetSizes(hidden, layers, vocab, eps, tied=False, text=text)


def weights_name(model: str) -> str:
    """The name by which weights are known wherever they lie: the repository's, or the folder's, in small letters."""
    cached = [part for part in Path(model).parts if part.startswith("models--")]  # the hub's cache names by hashes
    return (cached[-1].split("--")[-1] if cached else Path(model).name).lower()


def check_same_target(folder: Path, stored: str, target: Target) -> None:
    """Raise UserError where a stage's folder was made with another target than the one that is set."""
    if weights_name(stored) != weights_name(target.model):
        raise UserError(
            f"{folder} was made with another target (target.model: {stored!r} there, {target.model!r} now). A draft "
            "learns replies and states of one and the same model: set --model to it, or use another --run-dir"
        )


def target_digest(target: Target) -> str:
    """A hash that changes with the target: its config and the names and sizes of its weight files."""
    files = sorted(Path(target.model).glob("*.safetensors*")) if Path(target.model).is_dir() else []
    return digest([_read_config(target), target.revision, [(f.name, f.stat().st_size) for f in files]])[:16]


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
        with _open(_file(target, files[name])) as shard:
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
    index = _file(target, INDEX, required=False)
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
        with _open(_file(target, name)) as shard:
            found |= dict.fromkeys(shard.keys(), name)
    return found


def _read_config(target: Target) -> dict:
    config = read_json(path := _file(target, "config.json"))
    if not isinstance(config, dict):
        raise UserError(f"{path}: config.json must be a JSON object")
    return config


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


def _file(target: Target, name: str, required: bool = True) -> Path | None:
    """A file of the target: in its local folder, or out of the hub's cache, fetched alone when missing."""
    require_model(target.model)
    folder = Path(target.model)
    if folder.is_dir():
        if (folder / name).is_file():
            return folder / name
        if required:
            raise UserError(f"{folder} has no {name}")
        return None
    from transformers.utils import cached_file

    try:
        found = cached_file(
            target.model, name, revision=target.revision or None, _raise_exceptions_for_missing_entries=required
        )
    except OSError as error:
        raise UserError(f"{target.model!r}: no {name} ({str(error).strip().splitlines()[0]})") from None
    return Path(found) if found else None
