"""The target's sizes from its config, and the three tensors that training needs, read straight from its safetensors.

The model itself is never loaded here: of Kimi-K2.5's 595 GB, the final norm, the head and the embedding are read.
Torch is imported only where tensors are.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from common.config import Target
from common.errors import UserError
from common.protocol import require_model
from common.storage import digest, read_json

# The last part of the name decides, whatever the nesting (`language_model.model.norm.weight`, ...).
NAMES = {
    "lm_head": re.compile(r"(^|\.)lm_head\.weight$"),
    "embedding": re.compile(r"(^|\.)(embed_tokens|wte|tok_embeddings)\.weight$"),
    "norm": re.compile(r"(^|\.)(norm|final_layernorm|ln_f)\.weight$"),
}
NOT_TEXT = re.compile(r"(^|\.)(vision\w*|visual|mm_projector|audio\w*|mtp|layers|blocks|draft\w*)(\.|$)")


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


def read_sizes(target: Target) -> TargetSizes:
    """Sizes from config.json, nested (`text_config`) or not; raises UserError that names a missing key."""
    config = _read_config(target)
    text = {**config, **config["text_config"]} if isinstance(config.get("text_config"), dict) else config
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


def target_digest(target: Target) -> str:
    """A hash that changes with the target: its config and the names and sizes of its weight files."""
    files = sorted(Path(target.model).glob("*.safetensors*")) if Path(target.model).is_dir() else []
    return digest([_read_config(target), target.revision, [(f.name, f.stat().st_size) for f in files]])[:16]


def read_tensors(target: Target, *wanted: str) -> dict:
    """Tensors by role (`lm_head` [V, H], `embedding` [V, H], `norm` [H]), as stored; a tied head is the embedding."""
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
        tensors[role] = tensor[: shape[0]]  # rows beyond the vocabulary are padding
    return tensors


def _weight_map(target: Target) -> dict[str, str]:
    """Tensor name -> file, from the index, or from a checkpoint's single file."""
    index = _file(target, "model.safetensors.index.json", required=False)
    if index is not None:
        value = read_json(index)
        if not isinstance(value, dict) or not isinstance(value.get("weight_map"), dict):
            raise UserError(f"{index}: not an index of safetensors, it has no weight_map")
        return value["weight_map"]
    with _open(_file(target, "model.safetensors")) as shard:
        return dict.fromkeys(shard.keys(), "model.safetensors")


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
    found = [name for name in files if NAMES[role].search(name) and not NOT_TEXT.search(name)]
    if len(found) != 1:
        what = f"several: {', '.join(found)}" if found else f"none of {len(files)} names fits {NAMES[role].pattern!r}"
        raise UserError(f"cannot tell the {role} of {target.model!r}: {what}")
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
