"""What a training run logs: metrics.jsonl, TensorBoard or Weights & Biases, the progress bar, the report."""

import json
from functools import cached_property
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from common.dataset.index import TRAIN
from common.dataset.packs import Pack
from common.draft.unrolled_step import StepResult
from common.pipeline.command_line import Settings
from common.pipeline.console import Progress
from common.pipeline.files import write_text
from common.pipeline.jsonl import read_jsonl, repair_jsonl
from common.report.report import write_report
from common.target.protocol import Protocol, load_protocol
from common.training.held_out import DRAFT_COST, sample_views
from common.training.inputs import Inputs
from common.training.loggers import Loggers
from common.training.optimizer import DTYPES
from common.training.trainer import Trainer
from common.training.utilisation import matmul_rate, pack_flops

SHOWN_SAMPLES = 3  # held-out replies in the report


class Journal:
    """The log of a run, written by the first rank. Metrics after the trainer's step are dropped: a resume repeats them.

    `others`: the metrics of other runs, which the report compares.
    """

    def __init__(self, folder: Path, settings: Settings, inputs: Inputs, trainer: Trainer, others: dict[str, list]):
        self.folder, self.settings, self.inputs, self.trainer, self.others = folder, settings, inputs, trainer, others
        self.path, self.loggers = folder / "metrics.jsonl", None
        if trainer.ranks.first:
            if self.path.exists():
                repair_jsonl(self.path)
            lines = [line for line in self.metrics() if line["step"] <= trainer.step]
            write_text(self.path, "".join(json.dumps(line) + "\n" for line in lines))
            self.loggers = Loggers(folder, settings.train.track, trainer.step, settings.as_dict())

    @cached_property
    def matmul_rate(self) -> float:
        """Operations a second of matrix products on this device in the training dtype: 100 % utilisation."""
        return matmul_rate(self.trainer.ranks.device, DTYPES[self.settings.train.precision])

    @cached_property
    def protocol(self) -> Protocol:
        return load_protocol(self.settings.target)

    def metrics(self) -> list[dict]:
        """The lines of metrics.jsonl."""
        return list(read_jsonl(self.path)) if self.path.exists() else []

    def log(self, kind: str, **facts) -> None:
        """Append one line to metrics.jsonl and send it to the trackers."""
        step = self.trainer.step
        line = {"kind": kind, "step": step, "epoch": round(step / self.inputs.steps_an_epoch, 4), **facts}
        if self.loggers:
            with open(self.path, "a") as file:
                file.write(json.dumps(line) + "\n")
            self.loggers.log(line)

    def log_step(
        self,
        batch: list[Pack],
        results: list[StepResult],
        counts: Tensor,
        norm: Tensor,
        seconds: float,
        progress: Progress,
    ) -> None:
        """One metrics line and the progress bar. `counts`: loss positions int64 [K] of the step, over all ranks;
        `norm`: the gradient's; `seconds`: duration of the step."""
        trainer, ranks = self.trainer, self.trainer.ranks
        flops = sum(pack_flops(self.inputs.config, pack, self.settings.train.unrolled_steps) for pack in batch)
        utilisation = flops / seconds / self.matmul_rate
        sums = ranks.sum(sum(r.loss_sums.double() for r in results))
        right = ranks.sum(sum(r.right_token.sum(1) for r in results))
        loss = float(ranks.sum(sum(r.loss.detach().double() for r in results)))
        accuracy = (right / counts.clamp_min(1)).tolist()
        rate = trainer.tokens / trainer.seconds
        line = {"tokens": trainer.tokens, "loss": loss, "step_loss": (sums / counts.clamp_min(1)).tolist()}
        line |= {"step_accuracy": accuracy, "learning_rate": trainer.optimizer.param_groups[0]["lr"]}
        line |= {"grad_norm": float(norm), "tokens_s": round(rate, 1), "utilisation": round(utilisation, 4)}
        self.log("train", **line, seconds=round(trainer.seconds, 2))
        best = f"{trainer.best_length:.3f}" if trainer.best_length else "-"
        facts = {"loss": f"{loss:.3f}", "accuracy": f"{accuracy[0]:.2f}", "best_length": best}
        progress.update(1, **facts, tokens_s=f"{rate:.0f}", utilisation=f"{utilisation:.0%}")

    def write_report(self, chosen: int, replies: list) -> None:
        """Write the report: curves, tables, and the first held-out replies with their accepted tokens."""
        k = self.trainer.main_k
        samples = list(islice(sample_views(self.inputs.held_out, replies, self.protocol, k), SHOWN_SAMPLES))
        write_report(self.folder, self.report_facts(chosen), self.metrics(), samples, self.others)

    def report_facts(self, chosen: int) -> dict:
        """The facts that the report and the model card show besides the curves."""
        target, ranks = self.settings.target.model, self.trainer.ranks
        return {
            "title": f"EAGLE-3 draft for {target}",
            "target": target,
            "draft": {k: v for k, v in vars(self.inputs.config).items() if v not in (None, 0)},
            "data": self.inputs.counts,
            "train": vars(self.settings.train),
            "environment": {"torch": torch.__version__, "device": ranks.device, "ranks": ranks.world},
            "lengths": [self.inputs.packs.lengths[row] for row in self.inputs.packs.index.rows(TRAIN)],
            "baselines": self.trainer.baselines,
            "chosen_step": chosen,
            "draft_cost": DRAFT_COST,
        }
