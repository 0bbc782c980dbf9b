"""The target's sizes from its config, and the three tensors that training needs, read straight from its safetensors.

The model itself is never loaded here: of Kimi-K2.5's 595 GB, the final norm, the head and the embedding are read.
Torch is imported only where tensors are.
"""

import math
from dataclasses import dataclass
from pathlib import Path

from common.pipeline.errors import UserError
from common.pipeline.files import digest, read_json
from common.pipeline.settings import Target
from common.target.protocol import require_model

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


def read_sizes(target: Target, shipped: Path | None = None) -> TargetSizes:
    """Sizes from the target's config.json; from `shipped`, a copy of it in configs/, where the checkpoint is neither on
    this machine nor on the hub. Raises UserError where both exist and their numbers differ, and for a missing key."""
    copy = read_json(shipped) if shipped else None
    try:
        config = _read_config(target)
    except UserError:
        if copy is None or Path(target.model).is_dir():
            raise
        config = copy
    text = _text_config(config)
    for key, value in _text_config(copy or {}).items():
        known = text.get(key, value)  # a key that config.json leaves out has its class's default, which we don't know
        if not isinstance(value, int | float):
            continue
        if not isinstance(known, int | float) or not math.isclose(known, value, rel_tol=1e-6):
            raise UserError(f"{key} is {value} in {shipped}, {known} in config.json of {target.model!r}")
    for key in CAPS:
        if text.get(key):
            raise UserError(
                f"{target.model!r}: {key} is {text[key]} in its config.json, but a draft is taught logits that are the "
                "head times the normed state, without a cap; take another target"
            )
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


def _text_config(config: dict) -> dict:
    """The settings of the text model: nested in `text_config`, or the whole."""
    nested = config.get("text_config")
    return {**config, **nested} if isinstance(nested, dict) else config


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


def _read_config(target: Target) -> dict:
    config = read_json(path := target_file(target, "config.json"))
    if not isinstance(config, dict):
        raise UserError(f"{path}: config.json must be a JSON object")
    return config


def target_file(target: Target, name: str, required: bool = True) -> Path | None:
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
