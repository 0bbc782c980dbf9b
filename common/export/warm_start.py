"""Warm start: begin training from a published EAGLE-3 draft, with its weights, sizes and vocabulary mapping.

The mapping must come with the weights: with another one, every row of the head would mean another token.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from common.dataset.draft_vocabulary import kept_tokens, mappings
from common.draft.config import SCALINGS, DraftConfig
from common.draft.network import Draft
from common.export.findings import Findings
from common.export.published_draft import (
    draft_sizes,
    foreign_options,
    our_name,
    read_config,
    read_tensors,
    weight_files,
)
from common.pipeline.errors import UserError
from common.pipeline.files import sha256

DERIVED = "rotary_emb.inv_freq"  # a buffer that some checkpoints store; it follows from the config


@dataclass(frozen=True)
class Published:
    """A published draft: its sizes, tensors under our names, and its mapping (d2t int64 [D], t2d bool [V])."""

    folder: Path
    config: DraftConfig
    tensors: dict[str, Tensor]
    d2t: Tensor
    t2d: Tensor

    @torch.no_grad()
    def fill(self, draft: Draft) -> None:
        """Copy the weights into `draft`, built with `self.config`; raises UserError that names what does not fit."""
        parameters = dict(draft.named_parameters())
        problems = [
            f"{name} is missing" for name in parameters if name not in self.tensors and name != "embed_tokens.weight"
        ]
        for name, tensor in self.tensors.items():
            if name not in parameters:
                problems.append(f"{name} is unknown")
            elif parameters[name].shape != tensor.shape:
                problems.append(f"{name} has shape {list(tensor.shape)}, expected {list(parameters[name].shape)}")
            elif not tensor.is_floating_point():
                problems.append(f"{name} is {tensor.dtype}")
            elif not torch.isfinite(tensor.float()).all():
                problems.append(f"{name} is not finite")
        if problems:
            raise UserError(f"train.warm_start {self.folder}: {'; '.join(problems[:4])}")
        for name, tensor in self.tensors.items():
            parameters[name].copy_(tensor)


def read_published(folder: str, target: DraftConfig, aux_layers: tuple[int, ...]) -> Published:
    """A draft to initialise from; raises UserError that names what does not fit. `target`: a fresh draft's sizes."""
    findings = Findings()
    try:
        return _read_published(Path(folder), target, aux_layers, findings)
    except KeyError as key:
        raise UserError(f"train.warm_start {folder}: no {key} in config.json") from None
    except (ValueError, TypeError, UserError) as error:
        raise UserError(f"train.warm_start {folder}: {error}") from None


def _read_published(path: Path, target: DraftConfig, aux_layers: tuple[int, ...], findings: Findings) -> Published:
    config = read_config(path, findings)
    if config is None:
        raise UserError(findings.faults()[-1])
    if options := foreign_options(config):
        raise UserError(
            f"its config has {', '.join(options)}, which the draft here cannot compute; choose another draft"
        )
    sizes = draft_sizes(config)
    tensors = {our_name(n): tensor for n, tensor in read_tensors(path, findings).items() if DERIVED not in n}
    t2d, d2t = tensors.pop("t2d", None), tensors.pop("d2t", None)
    if d2t is None:
        sizes = replace(sizes, draft_vocab_size=sizes.vocab_size)
        d2t, t2d = mappings(torch.arange(sizes.vocab_size), sizes.vocab_size)
    elif t2d is None:
        _, t2d = mappings(torch.arange(len(d2t)) + d2t, sizes.vocab_size)
    for name in ("hidden_size", "vocab_size"):
        if getattr(sizes, name) != getattr(target, name):
            raise UserError(f"{name} is {getattr(sizes, name)}, the target's is {getattr(target, name)}")
    if "fc.weight" in tensors and tensors["fc.weight"].ndim == 2:
        sizes = replace(sizes, num_aux=tensors["fc.weight"].shape[1] // sizes.hidden_size)
    if sizes.num_aux != target.num_aux:
        raise UserError(f"fc.weight reads {sizes.num_aux} aux states, the shards hold {target.num_aux}")
    layers = config.get("eagle_aux_hidden_state_layer_ids")
    if layers and tuple(layers) != aux_layers:
        raise UserError(f"trained on aux layers {layers}, the shards hold {list(aux_layers)}")
    nested = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    if nested and tuple(nested) not in (aux_layers, tuple(layer - 1 for layer in aux_layers)):
        text = f"eagle_config names aux layers {nested}, in neither engine's count those of the shards"
        raise UserError(f"{text}, {list(aux_layers)}")
    ids = kept_tokens(d2t.long(), t2d.bool())
    # The rotary angles change no tensor's shape, so a config may lack them: they are then the target's.
    same_rope = {} if config.get("rope_theta") or config.get("rope_parameters") else {"rope_theta": target.rope_theta}
    sizes = replace(sizes, draft_vocab_size=len(ids), **same_rope)
    if sizes.rope_type in ("default", *SCALINGS):  # the angles do not depend on the longest position
        sizes = replace(sizes, max_position_embeddings=target.max_position_embeddings)
    return Published(path, sizes, tensors, d2t.long(), t2d.bool())


def weight_hashes(folder: str) -> list[str]:
    """SHA-256 of each weight file: identifies a warm start's weights wherever the folder lies."""
    try:
        return [sha256(file) for file in weight_files(Path(folder))]
    except UserError as error:
        raise UserError(f"train.warm_start: {error}") from None
