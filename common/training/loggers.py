"""Trackers that receive the metrics too (TensorBoard, Weights & Biases), and the metrics of other runs to compare."""

import hashlib
from pathlib import Path

from common.pipeline.errors import UserError
from common.pipeline.jsonl import read_jsonl


class Loggers:
    """Sends metrics lines to the trackers in `track`; only this class imports them."""

    def __init__(self, folder: Path, track: tuple[str, ...], step: int, facts: dict):
        self.writer = _tensorboard(folder / "tensorboard", step) if "tensorboard" in track else None
        self.wandb = _wandb(folder, facts) if "wandb" in track else None

    def log(self, line: dict) -> None:
        """Send the numbers of one metrics line, nested names joined by "/"."""
        values = {f"{line['kind']}/{name}": value for name, value in _numbers(line) if name != "step"}
        if self.writer:
            for name, value in values.items():
                self.writer.add_scalar(name, value, line["step"])
        if self.wandb:
            self.wandb.log(values, step=line["step"])

    def close(self) -> None:
        if self.writer:
            self.writer.close()
        if self.wandb:
            self.wandb.finish()


def _numbers(value, name: str = ""):
    """(name, number) of every number inside a metrics line; list entries are named by their index."""
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return
    if isinstance(value, int | float):
        yield name, value
        return
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        yield from _numbers(inner, f"{name}/{key}" if name else str(key))


def _tensorboard(folder: Path, step: int):
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise UserError(f"train.track: tensorboard is not installed ({error}); pip install tensorboard") from None
    return SummaryWriter(str(folder), purge_step=step + 1)


def _wandb(folder: Path, facts: dict):
    try:
        import wandb
    except ImportError as error:
        raise UserError(f"train.track: wandb is not installed ({error}); pip install wandb") from None
    # One id per folder, so that a resumed run continues its curves.
    id = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:12]
    name = folder.resolve().parent.name
    return wandb.init(project="kimi-eagle3", name=name, id=id, resume="allow", dir=str(folder), config=facts)


def other_runs(folders: tuple[str, ...], stage: str) -> dict[str, list[dict]]:
    """The metrics of other runs by the name of their folder; raises UserError for a folder without metrics."""
    runs = {}
    for folder in map(Path, folders):
        path = folder / stage / "metrics.jsonl"
        if not path.is_file():
            raise UserError(f"train.compare: {folder} has no {stage}/metrics.jsonl; give folders of runs")
        name = folder.resolve().name
        runs[name if name not in runs else str(folder)] = list(read_jsonl(path))
    return runs
