"""The target's sizes from its config.json, single files of its checkpoint, and whether two folders hold one target."""

import math
from dataclasses import dataclass
from pathlib import Path

from common.pipeline.errors import UserError
from common.pipeline.files import digest, read_json
from common.pipeline.settings import Target
from common.target.protocol import require_model

CAPS = ("final_logit_softcapping", "logits_soft_cap")  # a tanh over the logits


@dataclass(frozen=True)
class TargetSizes:
    """The sizes of the target's text model; `eps` is its norms', `tied` whether the embedding is the head.

    `text` is the text model's whole config.
    """

    hidden_size: int
    layers: int
    vocab_size: int
    eps: float
    tied: bool
    text: dict

    def aux_layers(self, chosen: tuple[int, ...]) -> tuple[int, ...]:
        """Layers whose input is stored, as vLLM counts; EAGLE-3's default, 2, N//2, N-3, where none are chosen."""
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
        if not isinstance(value, int | float) or key not in text:  # a key left out has its config class's default
            continue
        if not isinstance(text[key], int | float) or not math.isclose(text[key], value, rel_tol=1e-6):
            raise UserError(f"{key} is {value} in {shipped}, {text[key]} in config.json of {target.model!r}")
    for key in CAPS:
        if text.get(key):
            raise UserError(
                f"{target.model!r}: {key} is {text[key]} in its config.json, but a draft learns logits without a cap "
                "(the head times the normed state); choose another target"
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
    """The text model's config: `text_config` over the keys around it, or the whole where there is none."""
    nested = config.get("text_config")
    return {**config, **nested} if isinstance(nested, dict) else config


def weights_name(model: str) -> str:
    """The last part of a hub name or of a folder's path in small letters: the same for a repository and its copy."""
    cached = [part for part in Path(model).parts if part.startswith("models--")]  # the hub's cache: models--ORG--NAME
    return (cached[-1].split("--")[-1] if cached else Path(model).name).lower()


def check_same_target(folder: Path, stored: str, target: Target) -> None:
    """Raise UserError where a stage's folder was made with another target than the one that is set."""
    if weights_name(stored) != weights_name(target.model):
        raise UserError(
            f"{folder} was made with another target (target.model: {stored!r} there, {target.model!r} now), but "
            "replies and states must come from one model: set --model to it, or use another --run-dir"
        )


def target_digest(target: Target) -> str:
    """A hash that changes with the target: its config and the names and sizes of its weight files."""
    files = sorted(Path(target.model).glob("*.safetensors*"))  # none for the name of a hub repository
    return digest([_read_config(target), target.revision, [(f.name, f.stat().st_size) for f in files]])[:16]


def _read_config(target: Target) -> dict:
    config = read_json(path := target_file(target, "config.json"))
    if not isinstance(config, dict):
        raise UserError(f"{path}: config.json must be a JSON object")
    return config


def target_file(target: Target, name: str, required: bool = True) -> Path | None:
    """Path of one file of the target, which is downloaded alone where it is not in the hub's cache.

    None for a missing file that is not `required`; raises UserError for one that is.
    """
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
        path = cached_file(
            target.model, name, revision=target.revision or None, _raise_exceptions_for_missing_entries=required
        )
    except OSError as error:
        raise UserError(f"{target.model!r}: no {name} ({str(error).strip().splitlines()[0]})") from None
    return Path(path) if path else None
