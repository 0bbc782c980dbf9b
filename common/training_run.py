"""The state of one training run: built from the settings and a data set, measured, logged, checkpointed, resumed.

The loop itself stands in 04_train.py.
"""

import json
import time
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from common.checkpoint import checkpoints, load_checkpoint, prune, save_checkpoint
from common.command_line import Settings
from common.dataset import Index, Pack, Packs
from common.draft import Draft
from common.errors import SafetyStop, UserError
from common.evaluation import HeldOut, bigram_floor, evaluate
from common.progress import Progress, say
from common.storage import Manifest, read_json, read_jsonl, repair_jsonl, write_text
from common.training import DTYPES, PackOrder, Ranks, draft_config, make_optimizer
from common.ttt import StepResult, UnrolledStep
from common.vocab import kept_tokens

MAIN_K = 3  # draft tokens of the headline figure, by which the checkpoint to serve is chosen


class TrainingRun:
    """What the loop reads and changes. `source`: the data set's folder, `states`: the shards'."""

    def __init__(self, settings: Settings, dataset: Manifest, source: Path, states: Path, ranks: Ranks):
        self.settings, self.dataset, self.ranks = settings, dataset, ranks
        if settings.train.packs_per_step % ranks.world:
            raise UserError(
                f"train.packs_per_step {settings.train.packs_per_step} must be a multiple of the ranks, {ranks.world}"
            )
        s, facts = settings.train, read_json(source / "target.json")
        self.text, self.aux_layers, protocol = facts["text"], tuple(facts["aux_layers"]), facts["protocol"]
        vocab, target = load_file(source / "vocab.safetensors"), load_file(source / "target_head.safetensors")
        self.d2t, self.t2d = vocab["d2t"], vocab["t2d"]
        kept = kept_tokens(self.d2t, self.t2d)
        index, pack_tokens = Index.load(source / "index.safetensors"), dataset.settings["dataset"]["pack_tokens"]
        self.packs = Packs(states, index, pack_tokens)
        self.held_out = HeldOut.read(self.packs, protocol["think_open"], protocol["think_close"])
        self.order = PackOrder(self.packs, s.seed)

        config = draft_config(settings.draft, self.text, facts["eps"], len(self.aux_layers), len(kept))
        self.draft = Draft(config, target["embedding"]).to(ranks.device)
        self.draft.initialise(target["lm_head"][kept].float(), s.seed, s.fc_init)
        self.unrolled = UnrolledStep(
            self.draft,
            target["norm"].to(ranks.device),
            facts["eps"],
            target["lm_head"].to(ranks.device),
            None if len(kept) == len(self.t2d) else kept.to(ranks.device),
            s.unrolled_steps,
            s.step_weight,
            mask_outside_vocab=s.mask_outside_vocab,
            dtype=DTYPES[s.precision],
        )
        self.module = self.unrolled if ranks.world == 1 else nn.parallel.DistributedDataParallel(self.unrolled)
        self.trained = [p for p in self.draft.parameters() if p.requires_grad]
        self.optimizer = make_optimizer(self.draft, s)

        self.total_steps = max(1, self.order.count(s.epochs) // s.packs_per_step)
        self.steps_an_epoch = max(1, self.order.count(1) // s.packs_per_step)
        self.eval_every = s.eval_every or self.steps_an_epoch
        self.checkpoint_every = s.checkpoint_every or self.eval_every
        self.main_k = str(min(MAIN_K, s.eval_steps))
        self.step = self.tokens = self.best_step = 0
        self.seconds = self.best_length = 0.0
        self.baselines: dict = {}

    def plan(self) -> list[tuple[str, str]]:
        """Derived numbers, to be printed before the first step."""
        s, c = self.settings.train, self.draft.config
        heads = f"{c.num_attention_heads}/{c.num_key_value_heads} heads"
        trained, frozen = sum(p.numel() for p in self.trained), self.draft.embed_tokens.weight.numel()
        return [
            ("draft", f"{c.form}, hidden {c.hidden_size}, MLP {c.intermediate_size}, {heads}"),
            ("weights", f"{trained / 1e6:.1f} M trained, {frozen / 1e6:.1f} M frozen embedding"),
            ("vocabulary", f"{c.draft_vocab_size:,} of {c.vocab_size:,}"),
            ("steps", f"{self.total_steps} of {s.packs_per_step} packs, {self.steps_an_epoch} an epoch"),
            (
                "unrolled",
                f"{s.unrolled_steps} draft steps in training, weight {s.step_weight:g}^s; {s.eval_steps} in evaluation",
            ),
            ("ranks", f"{self.ranks.world} on {self.ranks.device}, {s.precision}"),
            ("held out", f"{self.dataset.counts['held_out']} samples"),
        ]

    def measure_baselines(self) -> None:
        """Held-out acceptance of the untrained draft and of a bigram table from the same training tokens."""
        if self.held_out.packs:
            self.baselines["untrained"] = self.measure()[0]
            vocab, steps = self.draft.config.vocab_size, self.settings.train.eval_steps
            self.baselines["bigram"] = bigram_floor(self.packs, self.held_out, vocab, steps)

    def measure(self) -> tuple[dict, list]:
        """Held-out acceptance of the draft as it is: (an `eval` metrics line, the steps of each pack's replies)."""
        return evaluate(self.unrolled, self.held_out, self.ranks.device, self.settings.train.eval_steps)

    def check_finite(self, batch: list[Pack], results: list[StepResult], norm: Tensor) -> None:
        """Raise SafetyStop before the update when the loss or the gradient is not finite, naming the samples."""
        if all(torch.isfinite(r.loss) for r in results) and torch.isfinite(norm):
            return
        losses = ", ".join(f"{float(r.loss):.3g}" for r in results)
        ids = ", ".join(id for pack in batch for id in pack.ids)
        raise SafetyStop(
            f"step {self.step}: loss {losses}, gradient norm {float(norm):.3g}; not applied. Samples: {ids}"
        )

    def log_step(
        self, results: list[StepResult], counts: Tensor, norm: Tensor, seconds: float, progress: Progress
    ) -> None:
        """One metrics line and the progress bar; counts [K] are the optimizer step's own, over all ranks."""
        self.seconds += seconds
        sums = self.ranks.sum(sum(r.loss_sums.double() for r in results))
        right = self.ranks.sum(sum(r.right_token.sum(1) for r in results))
        loss = self.ranks.sum(sum(r.loss.detach().double() for r in results))
        accuracy = (right / counts.clamp_min(1)).tolist()
        self.log(
            kind="train",
            step=self.step,
            epoch=round(self.step / self.steps_an_epoch, 4),
            tokens=self.tokens,
            loss=float(loss),
            step_loss=(sums / counts.clamp_min(1)).tolist(),
            step_accuracy=accuracy,
            learning_rate=self.optimizer.param_groups[0]["lr"],
            grad_norm=float(norm),
            tokens_s=round(self.tokens / self.seconds, 1),
            seconds=round(self.seconds, 2),
        )
        walk = f"{self.best_length:.3f}" if self.best_length else "-"
        rate = f"{self.tokens / self.seconds:.0f}"
        progress.update(1, loss=f"{float(loss):.3f}", accuracy=f"{accuracy[0]:.2f}", best_walk=walk, tokens_s=rate)

    def evaluate(self) -> bool:
        """Measure held-out acceptance; True when this step is the best so far."""
        if not self.held_out.packs:
            return False
        started = time.monotonic()
        figures, _ = self.measure()
        seconds = round(time.monotonic() - started, 2)
        self.log(
            kind="eval", step=self.step, epoch=round(self.step / self.steps_an_epoch, 4), **figures, seconds=seconds
        )
        length = figures["walk"][self.main_k]["length"] or 0.0
        if self.ranks.first:
            found = f"acceptance length {length:.3f} (k={self.main_k}), loss {figures['loss']:.3f}"
            say(f"  step {self.step}: held-out {found}")
        if length <= self.best_length:
            return False
        self.best_length, self.best_step = length, self.step
        return True

    # ---- files ----

    def open(self, folder: Path) -> None:
        """Resume from the newest complete checkpoint; metrics after it are dropped, since those steps come again."""
        self.folder = folder
        found = checkpoints(folder / "checkpoints")
        if found:
            state = load_checkpoint(found[-1], self.draft, self.optimizer)
            for name in self._state():
                setattr(self, name, state[name])
            say(f"  resumed from {found[-1].name}")
        if self.ranks.first:
            path = folder / "metrics.jsonl"
            if path.exists():
                repair_jsonl(path)
            kept = [line for line in self.metrics() if line["step"] <= self.step and found]
            write_text(path, "".join(json.dumps(line) + "\n" for line in kept))

    def metrics(self) -> list[dict]:
        """The lines of metrics.jsonl."""
        path = self.folder / "metrics.jsonl"
        return list(read_jsonl(path)) if path.exists() else []

    def log(self, **line) -> None:
        if self.ranks.first:
            with open(self.folder / "metrics.jsonl", "a") as file:
                file.write(json.dumps(line) + "\n")

    def checkpoint(self) -> None:
        """Save the state; keep the last few checkpoints and the best."""
        if self.ranks.first:
            folder = self.folder / "checkpoints"
            save_checkpoint(folder, self.draft, self.optimizer, self._state())
            prune(folder, self.settings.train.keep_checkpoints, folder / f"step-{self.best_step:08d}")

    def _state(self) -> dict:
        names = ("step", "tokens", "seconds", "best_step", "best_length", "baselines")
        return {name: getattr(self, name) for name in names}

    def load_best(self) -> int:
        """Put the weights with the best held-out acceptance in place; returns their step."""
        best = self.folder / "checkpoints" / f"step-{self.best_step:08d}"
        if self.best_step and best.is_dir() and self.best_step != self.step:
            load_checkpoint(best, self.draft, None)
        return self.best_step or self.step

    def report_facts(self, chosen: int) -> dict:
        """What report.html says beside the curves."""
        target = self.settings.target.model
        train_rows = self.packs.index.rows(0)
        return {
            "title": f"EAGLE-3 draft for {target}",
            "target": target,
            "draft": {k: v for k, v in vars(self.draft.config).items() if v not in (None, 0)},
            "data": self.dataset.counts,
            "train": vars(self.settings.train),
            "environment": {"torch": torch.__version__, "device": self.ranks.device, "ranks": self.ranks.world},
            "lengths": self.packs.index.length[train_rows].tolist(),
            "baselines": self.baselines,
            "chosen_step": chosen,
        }
