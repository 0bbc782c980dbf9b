"""Checkpoints: all that an exact resume needs, as tensors and JSON, written to a temporary folder and then renamed.

checkpoints/step-00000200/  model.safetensors  optimizer.safetensors  state.json (step, tokens, best step, ...)
"""

import shutil
from collections import defaultdict
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from common.pipeline.errors import UserError
from common.pipeline.files import atomic_folder, read_json, sha256, write_json
from common.training.optimizer import Optimizers
from common.training.ranks import full_tensor, shard_like

PREFIX = "step-"
KEEP_CHECKPOINTS = 2  # the newest ones; the best checkpoint is kept in addition


def save_checkpoint(folder: Path, module: nn.Module, optimizer: Optimizers, state: dict, first: bool = True) -> Path:
    """Write a checkpoint atomically; returns its path. All ranks must call this, to gather sharded tensors; only the
    `first` rank writes."""
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    names = {id(p): name for name, p in trained.items()}
    moments = {
        f"{names[id(p)]}/{key}": torch.as_tensor(value)
        for inner in optimizer.optimizers
        for p, values in inner.state.items()
        for key, value in values.items()
    }
    tensors, moments = _on_cpu(trained, first), _on_cpu(moments, first)
    path = folder / f"{PREFIX}{state['step']:08d}"
    if first:
        with atomic_folder(path) as temporary:
            save_file(tensors, temporary / "model.safetensors")
            save_file(moments, temporary / "optimizer.safetensors")
            hashes = {path.name: sha256(path) for path in sorted(temporary.iterdir())}
            write_json(temporary / "state.json", state | {"sha256": hashes, "parameters": list(trained)})
    return path


def _on_cpu(tensors: dict[str, torch.Tensor], keep: bool) -> dict[str, torch.Tensor]:
    """Full tensors on the CPU, gathered one at a time in the same order on every rank; empty unless `keep`."""
    gathered = ((name, full_tensor(tensors[name].detach())) for name in sorted(tensors))
    return {name: tensor.cpu().contiguous() for name, tensor in gathered if keep}


def load_checkpoint(path: Path, module: nn.Module, optimizer: Optimizers | None) -> dict:
    """Load a checkpoint's tensors into `module` and `optimizer`; returns its state. Raises UserError for damaged files
    and for tensors of other shapes than the module's."""
    state = read_json(path / "state.json")
    for name, wanted in state["sha256"].items():
        if not (path / name).is_file() or sha256(path / name) != wanted:
            raise UserError(f"{path / name} is damaged or missing; delete {path} to resume from an older checkpoint")
    tensors = load_file(path / "model.safetensors")
    parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
    stored, wanted = ({name: tuple(t.shape) for name, t in side.items()} for side in (tensors, parameters))
    if stored != wanted:
        differing = sorted(name for name in stored.keys() | wanted.keys() if stored.get(name) != wanted.get(name))
        raise UserError(f"{path} does not match this draft: the shapes of {', '.join(differing[:4])} differ")
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(shard_like(tensors[name], parameter))
    if optimizer is not None:
        moments = defaultdict(dict)
        for key, value in load_file(path / "optimizer.safetensors").items():
            name, _, kind = key.rpartition("/")
            moments[name][kind] = value
        names = {id(p): name for name, p in parameters.items()}
        for inner in optimizer.optimizers:
            for p in (p for group in inner.param_groups for p in group["params"]):
                values = moments[names[id(p)]]
                # Fused AdamW needs the number of steps as a plain tensor on the parameter's device.
                steps = {"step": values.pop("step").to(p.device)} if "step" in values else {}
                inner.state[p] = steps | {kind: shard_like(value, p) for kind, value in values.items()}
    return state


def checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return sorted(p for p in folder.glob(f"{PREFIX}*") if (p / "state.json").is_file())


def prune(folder: Path, best: Path) -> None:
    """Delete all checkpoints but the last KEEP_CHECKPOINTS and the best."""
    for path in checkpoints(folder)[:-KEEP_CHECKPOINTS]:
        if path != best:
            shutil.rmtree(path)
