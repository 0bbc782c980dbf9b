"""Training state: everything that an exact resume needs, as plain tensors and JSON, published by one rename.

checkpoints/step-00000200/  model.safetensors  optimizer.safetensors  state.json (step, data position, best, ...)
"""

import os
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from common.errors import UserError
from common.storage import read_json, sha256, sync_folder, write_json

PREFIX = "step-"


def trained_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """The trained parameters by name, on the CPU."""
    return {name: p.detach().cpu().contiguous() for name, p in module.named_parameters() if p.requires_grad}


def save_checkpoint(folder: Path, module: nn.Module, optimizer: torch.optim.Optimizer, state: dict) -> Path:
    """Write a checkpoint under a temporary name, sync it, rename the complete folder."""
    name = f"{PREFIX}{state['step']:08d}"
    final, temporary = folder / name, folder / f".{name}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    save_file(trained_tensors(module), temporary / "model.safetensors")
    names = [n for n, p in module.named_parameters() if p.requires_grad]
    parameters = {id(p): n for n, p in module.named_parameters()}
    moments = {
        f"{parameters[id(p)]}/{key}": torch.as_tensor(value).detach().cpu().contiguous()
        for p, values in optimizer.state.items()
        for key, value in values.items()
    }
    save_file(moments, temporary / "optimizer.safetensors")
    hashes = {f: sha256(temporary / f) for f in ("model.safetensors", "optimizer.safetensors")}
    write_json(temporary / "state.json", state | {"sha256": hashes, "parameters": names})
    for file in temporary.iterdir():
        with open(file, "rb") as handle:
            os.fsync(handle.fileno())
    if final.exists():  # written before a kill that came between two steps; the new one is equal
        shutil.rmtree(final)
    os.rename(temporary, final)
    sync_folder(folder)
    return final


def load_checkpoint(path: Path, module: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict:
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
            parameter.copy_(tensors[name])
    if optimizer is not None:
        moments = load_file(path / "optimizer.safetensors")
        for name, parameter in parameters.items():
            found = {key.rsplit("/", 1)[1]: value for key, value in moments.items() if key.rsplit("/", 1)[0] == name}
            if found:
                step = found.pop("step").to(parameter.device)  # where the fused AdamW wants it
                moved = {key: value.to(parameter.device, parameter.dtype) for key, value in found.items()}
                optimizer.state[parameter] = {"step": step, **moved}
    return state


def checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return sorted(p for p in folder.glob(f"{PREFIX}*") if (p / "state.json").is_file())


def prune(folder: Path, keep_last: int, keep: Path | None) -> None:
    """Delete all but the last `keep_last` checkpoints (one at least, to go on from) and `keep`."""
    for path in checkpoints(folder)[: -max(1, keep_last)]:
        if path != keep:
            shutil.rmtree(path)
