"""Training state: everything that an exact resume needs, as plain tensors and JSON, published by one rename.

checkpoints/step-00000200/  model.safetensors  optimizer.safetensors  state.json (step, data position, best, ...)
"""

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from common.pipeline.errors import UserError
from common.pipeline.files import atomic_folder, read_json, sha256, write_json
from common.training.optimizer import Optimizers
from common.training.ranks import like, whole

PREFIX = "step-"
KEEP_CHECKPOINTS = 2  # the last ones; the best is kept beside them


def save_checkpoint(folder: Path, module: nn.Module, optimizer: Optimizers, state: dict, first: bool = True) -> Path:
    """Write a checkpoint under a temporary name, sync it, rename the complete folder.

    Every rank calls it, since shared-out tensors are put together for the file; the `first` one writes.
    """
    names = {id(p): name for name, p in module.named_parameters() if p.requires_grad}
    moments = {
        f"{names[id(p)]}/{key}": torch.as_tensor(value)
        for part in optimizer.parts
        for p, values in part.state.items()
        for key, value in values.items()
    }
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    tensors, moments = _on_cpu(trained, first), _on_cpu(moments, first)
    final = folder / f"{PREFIX}{state['step']:08d}"
    if first:
        with atomic_folder(final) as temporary:
            save_file(tensors, temporary / "model.safetensors")
            save_file(moments, temporary / "optimizer.safetensors")
            hashes = {f: sha256(temporary / f) for f in ("model.safetensors", "optimizer.safetensors")}
            write_json(temporary / "state.json", state | {"sha256": hashes, "parameters": list(trained)})
    return final


def _on_cpu(tensors: dict[str, torch.Tensor], keep: bool) -> dict[str, torch.Tensor]:
    """Whole tensors on the CPU; put together one at a time, and dropped by ranks that do not write them."""
    found = {}
    for name in sorted(tensors):  # in the same order on every rank
        tensor = whole(tensors[name].detach())
        if keep:
            found[name] = tensor.cpu().contiguous()
    return found


def load_checkpoint(path: Path, module: nn.Module, optimizer: Optimizers | None) -> dict:
    """Put a checkpoint's tensors into `module` and `optimizer`; returns its state. Raises UserError when damaged."""
    state = read_json(path / "state.json")
    for name, wanted in state["sha256"].items():
        if not (path / name).is_file() or sha256(path / name) != wanted:
            raise UserError(f"{path / name} is damaged or missing; delete {path} to go on from the one before")
    tensors = load_file(path / "model.safetensors")
    parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
    stored, wanted = ({name: tuple(t.shape) for name, t in side.items()} for side in (tensors, parameters))
    if stored != wanted:
        odd = sorted(name for name in stored.keys() | wanted.keys() if stored.get(name) != wanted.get(name))
        raise UserError(f"{path} is of another draft: {', '.join(odd[:4])} differ")
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(like(tensors[name], parameter))
    if optimizer is not None:
        moments: dict[str, dict] = {}
        for key, value in load_file(path / "optimizer.safetensors").items():
            name, _, kind = key.rpartition("/")
            moments.setdefault(name, {})[kind] = value
        names = {id(p): name for name, p in parameters.items()}
        for part in optimizer.parts:
            for p in (p for group in part.param_groups for p in group["params"]):
                found = moments.get(names[id(p)], {})
                # the fused AdamW wants the step's number as a plain tensor beside the parameter
                steps = {"step": found.pop("step").to(p.device)} if "step" in found else {}
                part.state[p] = steps | {kind: like(value, p) for kind, value in found.items()}
    return state


def checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return sorted(p for p in folder.glob(f"{PREFIX}*") if (p / "state.json").is_file())


def prune(folder: Path, keep: Path | None) -> None:
    """Delete all but the last KEEP_CHECKPOINTS checkpoints and `keep`."""
    for path in checkpoints(folder)[:-KEEP_CHECKPOINTS]:
        if path != keep:
            shutil.rmtree(path)
