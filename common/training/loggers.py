"""Metrics sent to TensorBoard and Weights & Biases, and the metrics of other runs, which the report compares."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

from common.pipeline.errors import UserError
from common.pipeline.jsonl import read_jsonl


class Loggers:
    """Sends metrics lines to the trackers in `track`."""

    def __init__(self, folder: Path, track: tuple[str, ...], step: int, facts: dict):
        self.writer = self.wandb = None
        if "tensorboard" in track:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError as error:
                raise _not_installed("tensorboard", error) from None
            self.writer = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)
        if "wandb" in track:
            try:
                import wandb
            except ImportError as error:
                raise _not_installed("wandb", error) from None
            # One id per folder, so that a resumed run continues its curves.
            id, run = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:12], folder.resolve().parent.name
            about = {"project": "kimi-eagle3", "name": run, "id": id, "resume": "allow"}
            self.wandb = wandb.init(**about, dir=str(folder), config=facts)

    def log(self, line: dict) -> None:
        """Send the numbers of one metrics line, nested names joined by "/"."""
        values = dict(_numbers({name: value for name, value in line.items() if name != "step"}, line["kind"]))
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


def _numbers(value, name: str) -> Iterator[tuple[str, float]]:
    """(name, number) of every number inside `value`; list entries are named by their index."""
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _numbers(inner, f"{name}/{key}")
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield name, value


def _not_installed(package: str, error: ImportError) -> UserError:
    return UserError(f"train.track: {package} is not installed ({error}); pip install {package}")


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
