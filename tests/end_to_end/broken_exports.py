"""Served folders that engines load without a word and that then accept nothing: our check must name what is wrong."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from common.export.engine_check import inspect

Change = Callable[[dict[str, Tensor], dict], object]


def _absolute_d2t(tensors: dict[str, Tensor], config: dict) -> None:
    tensors["d2t"] = torch.arange(len(tensors["d2t"])) + tensors["d2t"]


BROKEN: dict[str, tuple[Change, str]] = {  # what is done to the folder, and a part of what the check must say
    "no lm_head": (lambda tensors, config: tensors.pop("lm_head.weight"), "lm_head.weight is missing"),
    "no fc": (lambda tensors, config: tensors.pop("fc.weight"), "fc.weight is missing"),
    "no fc_norm": (lambda tensors, config: tensors.pop("fc_norm.1.weight"), "fc_norm.1.weight is missing"),
    "no d2t": (lambda tensors, config: tensors.pop("d2t"), "d2t is missing"),
    "absolute d2t": (_absolute_d2t, "d2t"),
    "two layers": (lambda tensors, config: config.update(num_hidden_layers=2), "num_hidden_layers is 2"),
    "four aux layers": (
        lambda tensors, config: config.update(eagle_aux_hidden_state_layer_ids=[1, 2, 3, 4]),
        "names 4 aux layers",
    ),
    "aux ids alike for both engines": (
        lambda tensors, config: config["eagle_config"].update(
            eagle_aux_hidden_state_layer_ids=config["eagle_aux_hidden_state_layer_ids"]
        ),
        "one of the two reads other layers",
    ),
    "NaN in a weight": (
        lambda tensors, config: tensors["norm.weight"].fill_(float("nan")),
        "norm.weight is not finite",
    ),
}


def check_broken_exports(check, export: Path, work: Path) -> None:
    """Each fault, done to a copy of a good folder, is refused by name; the good folder passes."""
    problems = inspect(export).faults()
    check(f"{export.parent.parent.name}: the export is sound", not problems, "; ".join(problems))
    for name, (change, said) in BROKEN.items():
        folder = work / "broken"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        tensors = {key: value.clone() for key, value in load_file(export / "model.safetensors").items()}
        config = json.loads((export / "config.json").read_text())
        change(tensors, config)
        save_file(tensors, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(config))
        problems = "; ".join(inspect(folder).faults())
        check(f"{export.parent.parent.name}: refused: {name}", said in problems, problems)
    shutil.rmtree(work / "broken", ignore_errors=True)
