"""Warm start: begin training from a published EAGLE-3 draft, with its weights, sizes and vocabulary mapping.

The mapping must come with the weights: with another one, every row of the head would mean another token.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from common.dataset.draft_vocabulary import kept_tokens
from common.draft.config import SCALINGS, DraftConfig
from common.draft.network import Draft
from common.export import published_draft
from common.export.findings import Findings
from common.export.served_config import LAYER_IDS, read_draft_config
from common.pipeline.errors import UserError
from common.pipeline.files import read_json, sha256

DERIVED = "rotary_emb.inv_freq"  # a buffer that some checkpoints store; it follows from the config


@dataclass(frozen=True)
class Published:
    """A published draft: its sizes, tensors under our names, and its mapping (d2t int64 [D], t2d bool [V])."""

    folder: Path
    config: DraftConfig
    tensors: dict[str, Tensor]
    d2t: Tensor
    t2d: Tensor

    def fill(self, draft: Draft) -> None:
        """Copy the weights into `draft`, built with `self.config`; raises UserError that names what does not fit."""
        shapes = {name: parameter.shape for name, parameter in draft.named_parameters()}
        faults = [f"{name} is unknown" for name in self.tensors if name not in shapes]
        for name, shape in shapes.items():
            if name in self.tensors or name != "embed_tokens.weight":
                fault = published_draft.tensor_fault(self.tensors.get(name), shape)
                faults += [f"{name} {fault}"] if fault else []
        if faults:
            raise UserError(f"train.warm_start {self.folder}: {'; '.join(faults[:4])}")
        draft.load_state_dict(self.tensors, strict=False)  # the embedding may be missing: it is the target's


def read_published(folder: str, target: DraftConfig, aux_layers: tuple[int, ...]) -> Published:
    """A draft to initialise from; raises UserError that names what does not fit. `target`: a fresh draft's sizes."""
    try:
        return _read_published(Path(folder), target, aux_layers)
    except (ValueError, TypeError, UserError) as error:
        raise UserError(f"train.warm_start {folder}: {error}") from None


def _read_published(folder: Path, target: DraftConfig, aux_layers: tuple[int, ...]) -> Published:
    ignored = Findings()  # of the engines
    config = published_draft.read_config(read_json(folder / "config.json"), ignored)
    if options := published_draft.foreign_options(config):
        text = f"its config has {', '.join(options)}, which the draft here cannot compute"
        raise UserError(f"{text}; choose another draft")
    sizes = read_draft_config(config)
    tensors = published_draft.engine_names(published_draft.read_tensors(folder, ignored))
    tensors = {name: tensor for name, tensor in tensors.items() if DERIVED not in name}
    for name in ("hidden_size", "vocab_size"):
        if getattr(sizes, name) != getattr(target, name):
            raise UserError(f"{name} is {getattr(sizes, name)}, the target's is {getattr(target, name)}")
    if "fc.weight" in tensors and tensors["fc.weight"].ndim == 2:
        sizes = replace(sizes, num_aux=tensors["fc.weight"].shape[1] // sizes.hidden_size)
    if sizes.num_aux != target.num_aux:
        raise UserError(f"fc.weight reads {sizes.num_aux} aux states, the shards hold {target.num_aux}")
    layers, nested = config.get(LAYER_IDS), config["eagle_config"].get(LAYER_IDS)
    if layers and tuple(layers) != aux_layers:
        raise UserError(f"trained on aux layers {layers}, the shards hold {list(aux_layers)}")
    if nested and tuple(nested) not in (aux_layers, tuple(layer - 1 for layer in aux_layers)):
        text = f"eagle_config names aux layers {nested}, in neither engine's count those of the shards"
        raise UserError(f"{text}, {list(aux_layers)}")
    d2t = tensors.pop("d2t", torch.zeros(sizes.vocab_size)).long()  # full vocabularies are published without
    ids = torch.arange(len(d2t)) + d2t
    t2d = tensors.pop("t2d", torch.isin(torch.arange(sizes.vocab_size), ids)).bool()
    sizes = replace(sizes, draft_vocab_size=len(kept_tokens(d2t, t2d)))
    if not config.get("rope_theta") and not config.get("rope_parameters"):
        sizes = replace(sizes, rope_theta=target.rope_theta)  # no tensor depends on it, so a config may lack it
    if sizes.rope_type in ("default", *SCALINGS):  # the angles do not depend on the longest position
        sizes = replace(sizes, max_position_embeddings=target.max_position_embeddings)
    return Published(folder, sizes, tensors, d2t, t2d)


def weight_hashes(folder: str) -> list[str]:
    """SHA-256 of each weight file: identifies a warm start's weights wherever the folder lies."""
    try:
        return [sha256(file) for file in published_draft.weight_files(Path(folder))]
    except UserError as error:
        raise UserError(f"train.warm_start: {error}") from None
