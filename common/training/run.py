"""The state of one training run: built from the settings and a data set, measured, logged, checkpointed, resumed.

The loop itself stands in 04_train.py.
"""

import json
import time
from functools import cached_property
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from common.dataset.draft_vocabulary import coverage, kept_tokens
from common.dataset.index import Index
from common.dataset.packs import Pack, Packs
from common.draft.config import draft_config
from common.draft.network import Draft
from common.draft.unrolled_step import StepResult, UnrolledStep
from common.export.warm_start import read_published
from common.pipeline.command_line import Settings
from common.pipeline.console import Progress, say
from common.pipeline.errors import SafetyStop
from common.pipeline.files import read_json, write_text
from common.pipeline.jsonl import read_jsonl, repair_jsonl
from common.pipeline.manifest import DRAFT, Manifest
from common.report.report import write_report
from common.target.protocol import Protocol, load_protocol
from common.training.batches import PackOrder
from common.training.checkpoint import checkpoints, load_checkpoint, prune, save_checkpoint
from common.training.disk_budget import Follower, follow
from common.training.held_out import DRAFT_COST, HeldOut, bigram_floor, evaluate, sample_views
from common.training.loggers import Loggers, other_runs
from common.training.optimizer import DTYPES, check_pack_tokens, check_settings, make_optimizer
from common.training.ranks import Ranks, in_parallel, is_sharded
from common.training.utilisation import StepFlops, matmul_rate

MAIN_K = 3  # draft tokens of the headline figure, by which the checkpoint to serve is chosen
SHOWN_SAMPLES = 3  # held-out replies in the report


class TrainingRun:
    """What the loop reads and changes. `source`: the data set's folder, `states`: the shards'."""

    def __init__(self, settings: Settings, dataset: Manifest, source: Path, states: Path, ranks: Ranks):
        self.settings, self.dataset, self.ranks, self.evaluators = settings, dataset, ranks, ranks
        s, facts = settings.train, read_json(source / "target.json")
        check_settings(s, ranks)
        self.text, self.aux_layers, protocol = facts["text"], tuple(facts["aux_layers"]), facts["protocol"]
        vocab, self.target = load_file(source / "vocab.safetensors"), load_file(source / "target_head.safetensors")
        self.d2t, self.t2d, self.eps = vocab["d2t"], vocab["t2d"], facts["eps"]
        self.config = draft_config(settings.draft, self.text, self.eps, len(self.aux_layers), len(self.d2t))
        self.published = None
        if s.warm_start:
            self.published = read_published(s.warm_start, self.config, self.aux_layers)
            self.config, self.d2t, self.t2d = self.published.config, self.published.d2t, self.published.t2d
        self.kept = kept_tokens(self.d2t, self.t2d)
        self.coverage = coverage(vocab["counts"], self.kept)
        self.others = other_runs(s.compare, DRAFT)
        check_pack_tokens(index := Index.load(source / "index.safetensors"), s.pack_tokens)
        window = follow(states, dataset, settings.switches.follow, settings.fresh)
        self.follower = Follower(window, index, s.pack_tokens, s, ranks) if window else None
        self.packs = self.follower.packs if window else Packs(states, index, s.pack_tokens)
        self.order = self.follower.order if window else PackOrder(self.packs, s.seed)
        self.held_out = HeldOut.of(self.packs, protocol["think_open"], protocol["think_close"])

        self._build()
        self.module = in_parallel(self.unrolled, s.parallel, ranks)
        self.trained = [p for p in self.draft.parameters() if p.requires_grad]
        self.optimizer = make_optimizer(self.draft, s)
        self.flops = StepFlops(self.draft)

        self.total_steps = max(1, self.order.count(s.epochs) // s.packs_per_step)
        self.steps_an_epoch = max(1, self.order.count(1) // s.packs_per_step)
        self.eval_every = s.eval_every or self.steps_an_epoch
        self.main_k = str(min(MAIN_K, s.eval_steps))
        self.step = self.tokens = self.best_step = 0
        self.seconds = self.best_length = 0.0
        self.baselines: dict = {}

    def _build(self) -> None:
        """The draft before any training and the step that unrolls it, whole on this rank."""
        s, device, embedding = self.settings.train, self.ranks.device, self.target["embedding"]
        # The seed's weights are drawn on the CPU; the target's tensors move once and are shared by whatever is built.
        self.draft = Draft(self.config, embedding).to(device)
        self.draft.embed_tokens.weight.requires_grad_(False)
        self.draft.initialise(self.target["lm_head"][self.kept].float(), s.seed)
        self.unrolled = UnrolledStep(
            self.draft,
            self.target["norm"].to(device),
            self.eps,
            self.target["lm_head"].to(device),
            None if len(self.kept) == len(self.t2d) else self.kept.to(device),
            s.unrolled_steps,
            s.step_weight,
            dtype=DTYPES[s.precision],
            compiled=s.compile,
        )
        if self.published:
            self.published.fill(self.draft)

    @cached_property
    def matmul_rate(self) -> float:
        """What utilisation is a share of: this device's own rate, in the type that computes."""
        return matmul_rate(self.ranks.device, DTYPES[self.settings.train.precision])

    @cached_property
    def protocol(self) -> Protocol:
        return load_protocol(self.settings.target)

    def plan(self) -> list[tuple[str, str]]:
        """Derived numbers, to be printed before the first step."""
        s, c = self.settings.train, self.draft.config
        heads = f"{c.num_attention_heads}/{c.num_key_value_heads} heads"
        trained = sum(p.numel() for p in self.trained)
        frozen = sum(p.numel() for p in self.draft.parameters()) - trained
        weights = " ".join(f"{w:.3g}" for w in self.unrolled.loss_weights(s.unrolled_steps).tolist())
        kind = f", {s.parallel}" if self.ranks.world > 1 else ""
        return [
            ("draft", f"{c.form}, hidden {c.hidden_size}, MLP {c.intermediate_size}, {heads}, {c.rope_type} rope"),
            ("weights", f"{trained / 1e6:.1f} M trained, {frozen / 1e6:.1f} M frozen"),
            ("vocabulary", f"{c.draft_vocab_size:,} of {c.vocab_size:,}, {self.coverage:.2%} of what the target wrote"),
            ("start", f"the draft in {self.settings.train.warm_start}" if self.published else "fresh weights"),
            ("steps", f"{self.total_steps} of {s.packs_per_step} packs, {self.steps_an_epoch} an epoch"),
            (
                "unrolled",
                f"{s.unrolled_steps} draft steps in training, weights {weights}; {s.eval_steps} in evaluation",
            ),
            ("optimizer", f"{s.optimizer}, learning rate {s.learning_rate:g}"),
            ("ranks", f"{self.ranks.world} on {self.ranks.device}{kind}, {s.precision}"),
            ("held out", f"{self.dataset.counts['held_out']} samples"),
        ] + (self.follower.window.lines() if self.follower else [])

    def checkpoint_due(self) -> bool:
        """At each evaluation, and at the end of a window's round, whose shards can be deleted then."""
        return self.step % self.eval_every == 0 or bool(self.follower and self.step in self.follower.order.ends)

    def measure_baselines(self) -> None:
        """Held-out acceptance of the untrained draft and of a bigram table from the same training tokens."""
        if self.held_out.plan:
            self.baselines["untrained"] = self.measure()[0]
            vocab, steps = self.draft.config.vocab_size, self.settings.train.eval_steps
            self.baselines["bigram"] = bigram_floor(self.packs, self.held_out, vocab, steps)

    def measure(self) -> tuple[dict, list]:
        """Held-out acceptance of the draft as it is: (an `eval` metrics line, the steps of each pack's replies)."""
        s = self.settings.train
        return evaluate(self.unrolled, self.held_out, self.evaluators, s.eval_steps)

    def check_finite(self, batch: list[Pack], results: list[StepResult], norm: Tensor) -> None:
        """Raise SafetyStop before the update when the loss or the gradient is not finite, naming the samples."""
        if all(torch.isfinite(r.loss) for r in results) and torch.isfinite(norm):
            return
        losses = ", ".join(f"{r.loss.item():.3g}" for r in results)
        ids = ", ".join(id for pack in batch for id in pack.ids)
        raise SafetyStop(
            f"step {self.step}: loss {losses}, gradient norm {float(norm):.3g}; not applied. Samples: {ids}"
        )

    def log_step(
        self,
        batch: list[Pack],
        results: list[StepResult],
        counts: Tensor,
        norm: Tensor,
        seconds: float,
        progress: Progress,
    ) -> None:
        """One metrics line and the progress bar; counts [K] are the optimizer step's own, over all ranks."""
        steps = self.settings.train.unrolled_steps
        flops = sum(self.flops.of(p.offsets, r.positions.cpu(), steps) for p, r in zip(batch, results, strict=True))
        utilisation = flops / seconds / self.matmul_rate
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
            utilisation=round(utilisation, 4),
            seconds=round(self.seconds, 2),
        )
        walk = f"{self.best_length:.3f}" if self.best_length else "-"
        rate = f"{self.tokens / self.seconds:.0f}"
        facts = {"loss": f"{float(loss):.3f}", "accuracy": f"{accuracy[0]:.2f}", "best_walk": walk, "tokens_s": rate}
        progress.update(1, **facts, mfu=f"{utilisation:.0%}")

    def evaluate(self) -> bool:
        """Measure held-out acceptance; True when this step is the best so far."""
        if not self.held_out.plan:
            return False
        started = time.monotonic()
        figures, replies = self.measure()
        seconds = round(time.monotonic() - started, 2)
        self.log(
            kind="eval", step=self.step, epoch=round(self.step / self.steps_an_epoch, 4), **figures, seconds=seconds
        )
        # the first rank's figure counts for all: whether to write a checkpoint is theirs together
        length = figures["walk"][self.main_k]["length"] or 0.0
        length = float(self.ranks.sum(torch.tensor([length if self.ranks.first else 0.0], dtype=torch.float64)))
        better = length > self.best_length
        if better:
            self.best_length, self.best_step = length, self.step
        if self.ranks.first:
            found = f"acceptance length {length:.3f} (k={self.main_k}), loss {figures['loss']:.3f}"
            say(f"  step {self.step}: held-out {found}")
            self.write_report(self.best_step or self.step, replies)
        return better

    # ---- files ----

    def open(self, folder: Path) -> None:
        """Resume from the newest complete checkpoint; metrics after it are dropped, since those steps come again."""
        self.folder = folder
        found = checkpoints(folder / "checkpoints")
        if found:
            state = load_checkpoint(found[-1], self.draft, self.optimizer)
            for name in self._state():
                setattr(self, name, state[name])
            if self.ranks.first:
                say(f"  resumed from {found[-1].name}")
        if self.ranks.first:
            path = folder / "metrics.jsonl"
            if path.exists():
                repair_jsonl(path)
            kept = [line for line in self.metrics() if line["step"] <= self.step and found]
            write_text(path, "".join(json.dumps(line) + "\n" for line in kept))
            s = self.settings.train
            self.loggers = Loggers(folder, s.track, self.step, self.settings.as_dict())
        if self.follower:
            self.follower.open(self.step, self.held_out)

    def metrics(self) -> list[dict]:
        """The lines of metrics.jsonl."""
        path = self.folder / "metrics.jsonl"
        return list(read_jsonl(path)) if path.exists() else []

    def log(self, **line) -> None:
        if self.ranks.first:
            with open(self.folder / "metrics.jsonl", "a") as file:
                file.write(json.dumps(line) + "\n")
            self.loggers.log(line)

    def checkpoint(self) -> None:
        """Save the state; keep the last few checkpoints and the best."""
        folder = self.folder / "checkpoints"
        save_checkpoint(folder, self.draft, self.optimizer, self._state(), self.ranks.first)
        if self.ranks.first:
            prune(folder, folder / f"step-{self.best_step:08d}")
        if self.follower:
            self.follower.release(self.step)

    def _state(self) -> dict:
        names = ("step", "tokens", "seconds", "best_step", "best_length", "baselines")
        return {name: getattr(self, name) for name in names}

    def load_best(self) -> int:
        """Put the weights with the best held-out acceptance in place, whole on this rank; returns their step."""
        best = self.folder / "checkpoints" / f"step-{self.best_step:08d}"
        chosen = self.best_step if self.best_step and best.is_dir() else self.step
        self.evaluators = Ranks(0, 1, self.ranks.device)  # the other ranks are gone
        if is_sharded(self.unrolled):  # then one draft of this rank's own, out of the files
            self.optimizer = self.module = self.unrolled = self.draft = self.trained = None  # not twice in memory
            self._build()
        elif chosen == self.step:
            return chosen
        load_checkpoint(self.folder / "checkpoints" / f"step-{chosen:08d}", self.draft, None)
        return chosen

    def write_report(self, chosen: int, replies: list) -> None:
        """report.json and report.html as of now, with the first held-out replies and what was accepted of them."""
        samples = sample_views(self.held_out, replies, self.protocol, int(self.main_k), SHOWN_SAMPLES)
        write_report(self.folder, self.report_facts(chosen), self.metrics(), samples, self.others)

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
            "draft_cost": DRAFT_COST,
        }
