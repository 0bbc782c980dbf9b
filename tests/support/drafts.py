"""Tiny drafts in a served folder, and copies of such a folder with something changed."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from common.dataset.draft_vocabulary import mappings
from common.draft.config import DraftConfig
from common.draft.network import Draft
from common.export.findings import Findings
from common.export.served_folder import export

VOCAB, HIDDEN = 12, 8
KEPT = torch.tensor([0, 3, 4, 7, 9, 11])  # the target ids that the draft can propose
TEXT = {"bos_token_id": 1, "eos_token_id": 2}  # of the target's config
SIZES = {"hidden_size": HIDDEN, "intermediate_size": 12, "num_attention_heads": 2, "num_key_value_heads": 1}
SIZES |= {"head_dim": 4}
MLA = {"kv_lora_rank": 6, "q_lora_rank": 5, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 3}


def make_draft(form="llama", kept=KEPT, **options) -> tuple[Draft, torch.Tensor, torch.Tensor]:
    """An initialised draft with its d2t and t2d; `options` change its DraftConfig."""
    sizes = SIZES | ({"num_key_value_heads": 2, **MLA} if form == "mla" else {}) | options
    config = DraftConfig(form=form, **sizes, vocab_size=VOCAB, draft_vocab_size=len(kept))
    draft = Draft(config, torch.randn(VOCAB, HIDDEN).bfloat16())
    draft.initialise(None, 0)
    return draft, *mappings(kept, VOCAB)


def write_draft(folder: Path, layers=(2, 5, 9), text=TEXT, **options) -> Path:
    """Export a draft into `folder`."""
    export(folder, *make_draft(**options), layers, text)
    return folder


def changed_copy(source: Path, folder: Path, change_tensors=None, change_config=None) -> Path:
    """A copy of a draft's folder; each function changes its table in place."""
    shutil.copytree(source, folder)
    if change_tensors:
        tensors = load_file(folder / "model.safetensors")
        change_tensors(tensors)
        save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / "model.safetensors")
    if change_config:
        config = json.loads((folder / "config.json").read_text())
        change_config(config)
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def pickle_weights(folder: Path) -> None:
    """Store the folder's weights as a pickle instead, as the first EAGLE-3 drafts were published."""
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def renamed(change):
    """A change of tensors for `changed_copy`: each name becomes change(name)."""

    def apply(tensors):
        for name in list(tensors):
            tensors[change(name)] = tensors.pop(name)

    return apply


def levels(findings: Findings, level: str) -> str:
    """The findings of one level as they are printed."""
    return "\n".join(str(finding) for finding in findings if finding.level == level)


def split_with_index(folder: Path) -> dict[str, str]:
    """Store the weights in two files with an index; returns name -> file."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(names)}
    for file in set(weight_map.values()):
        save_file({name: tensors[name] for name in names if weight_map[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return weight_map
