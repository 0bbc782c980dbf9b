"""The served folder: config.json and model.safetensors as vLLM and SGLang read them, published only when checked."""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from common.draft.network import Draft
from common.export.engine_check import inspect
from common.export.findings import Findings
from common.export.served_config import served_config
from common.pipeline.errors import UserError
from common.pipeline.files import atomic_folder, read_json, write_json


def export(folder: Path, draft: Draft, d2t: Tensor, t2d: Tensor, aux_layers: tuple[int, ...], text: dict) -> Findings:
    """Write the served folder, check it for both engines, read it back, publish it; returns the check's findings.

    Weights are bf16; d2t int64 [D] and t2d bool [V] are left out for a full vocabulary. `text`: the target's text
    config. Raises UserError where the check finds a fault or the weights read back differently; `folder` then stays as
    it was.
    """
    tensors = {name: p.detach().cpu().to(torch.bfloat16).contiguous() for name, p in draft.named_parameters()}
    if draft.config.draft_vocab_size < draft.config.vocab_size:
        tensors |= {"d2t": d2t.long().contiguous(), "t2d": t2d.bool().contiguous()}
    with atomic_folder(folder) as temporary:
        save_file(tensors, temporary / "model.safetensors", {"format": "pt"})
        write_json(temporary / "config.json", served_config(draft.config, aux_layers, text))
        findings = inspect(temporary, text.get("model_type", ""))
        stored = load_file(temporary / "model.safetensors")
        changed = [name for name, tensor in tensors.items() if not torch.equal(stored[name], tensor)]
        faults = findings.faults() or [f"{name} read back differently" for name in changed]
        if faults:
            raise UserError(f"{folder} was not written, as it would not serve: {'; '.join(faults)}")
    return findings


def describe(folder: Path) -> str:
    """One line on a served folder: architecture, hidden size, draft vocabulary, size of the weights."""
    config = read_json(folder / "config.json")
    size = (folder / "model.safetensors").stat().st_size
    return (
        f"{config['architectures'][0]}, hidden {config['hidden_size']}, draft vocabulary "
        f"{config['draft_vocab_size']:,} of {config['vocab_size']:,}, {size / 2**20:.1f} MiB"
    )
