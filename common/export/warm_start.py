"""Warm start: a published EAGLE-3 folder's weights, sizes and vocabulary mapping taken over, or refused by name.

The mapping comes along: rebuilt from other frequencies, every row of the head would mean another token.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from common.dataset.draft_vocabulary import kept_tokens, mappings
from common.draft.config import DraftConfig
from common.draft.network import Draft
from common.export.findings import Findings
from common.export.published_draft import draft_sizes, our_name, read_config, read_weights, weight_files
from common.pipeline.errors import UserError
from common.pipeline.files import sha256

DERIVED = "rotary_emb.inv_freq"  # follows from the config


@dataclass(frozen=True)
class Published:
    """A published draft: its config, tensors under our names, and its mapping."""

    folder: Path
    config: DraftConfig
    tensors: dict[str, Tensor]
    d2t: Tensor
    t2d: Tensor

    @torch.no_grad()
    def fill(self, draft: Draft) -> None:
        """Copy the weights into `draft`, which was built with this config; raises UserError for what does not fit."""
        wanted = {name: p for name, p in draft.named_parameters() if name != "embed_tokens.weight"}
        odd = [f"{name} is missing" for name in wanted if name not in self.tensors]
        for name, tensor in self.tensors.items():
            parameter = draft.embed_tokens.weight if name == "embed_tokens.weight" else wanted.get(name)
            if parameter is None:
                odd.append(f"{name} is unknown")
            elif parameter.shape != tensor.shape:
                odd.append(f"{name} has shape {list(tensor.shape)}, expected {list(parameter.shape)}")
            elif not tensor.is_floating_point() or not torch.isfinite(tensor.float()).all():
                odd.append(f"{name} is {'not finite' if tensor.is_floating_point() else tensor.dtype}")
        if odd:
            raise UserError(f"train.warm_start {self.folder}: {'; '.join(odd[:4])}")
        for name, tensor in self.tensors.items():
            (draft.embed_tokens.weight if name == "embed_tokens.weight" else wanted[name]).copy_(tensor)


def read_published(folder: str, target: DraftConfig, aux_layers: tuple[int, ...]) -> Published:
    """A draft to go on from; raises UserError naming what does not fit. `target`: the sizes of a fresh draft."""
    path, said, found = Path(folder), f"train.warm_start {folder}", Findings()
    files = weights_of(folder)
    config = read_config(path, found)
    if config is None:
        raise UserError(f"{said}: {next(finding.text for finding in reversed(found) if finding.level == 'error')}")
    try:
        sizes = draft_sizes(config)
        stored = {name: tensor for file in files for name, tensor in read_weights(file).items()}
    except (KeyError, ValueError, TypeError, UserError) as error:
        raise UserError(
            f"{said}: {str(error) if not isinstance(error, KeyError) else f'no {error} in config.json'}"
        ) from None
    tensors = {our_name(name): tensor for name, tensor in stored.items() if DERIVED not in name}
    t2d, d2t = tensors.pop("t2d", None), tensors.pop("d2t", None)
    if d2t is None:
        sizes = replace(sizes, draft_vocab_size=sizes.vocab_size)
        d2t, t2d = mappings(torch.arange(sizes.vocab_size), sizes.vocab_size)
    elif t2d is None:
        _, t2d = mappings(torch.arange(len(d2t)) + d2t, sizes.vocab_size)
    for name in ("hidden_size", "vocab_size"):
        if getattr(sizes, name) != getattr(target, name):
            raise UserError(f"{said}: {name} is {getattr(sizes, name)}, the target's is {getattr(target, name)}")
    if "fc.weight" in tensors and tensors["fc.weight"].ndim == 2:
        sizes = replace(sizes, num_aux=tensors["fc.weight"].shape[1] // sizes.hidden_size)
    if sizes.num_aux != target.num_aux:
        raise UserError(f"{said}: fc.weight reads {sizes.num_aux} aux states, the shards hold {target.num_aux}")
    layers = config.get("eagle_aux_hidden_state_layer_ids")
    if layers and tuple(layers) != aux_layers:
        raise UserError(f"{said}: made for aux layers {layers}, the shards hold {list(aux_layers)}")
    nested = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    if nested and tuple(nested) not in (aux_layers, tuple(layer - 1 for layer in aux_layers)):
        text = f"made for eagle_config's aux layers {nested}, as either engine counts; the shards hold"
        raise UserError(f"{said}: {text} {list(aux_layers)}")
    try:
        kept = kept_tokens(d2t.long(), t2d.bool())
    except UserError as error:
        raise UserError(f"{said}: {error}") from None
    # the published config may lack what changes no tensor's shape: the rotary angles are then the target's
    same_rope = {} if config.get("rope_theta") or config.get("rope_parameters") else {"rope_theta": target.rope_theta}
    sizes = replace(sizes, draft_vocab_size=len(kept), **same_rope)
    return Published(path, sizes, tensors, d2t.long(), t2d.bool())


def weights_of(folder: str) -> list[Path]:
    """The weight files of a published draft; raises UserError where there are none."""
    files = weight_files(Path(folder))
    if not files or not (Path(folder) / "config.json").is_file():
        raise UserError(f"train.warm_start {folder}: no config.json and *.safetensors there; name a draft's folder")
    return files


def weight_hashes(folder: str) -> list[str]:
    """What a warm start's weights are, wherever the folder lies."""
    return [sha256(file) for file in weights_of(folder)]
