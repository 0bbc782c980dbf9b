"""The state of a training run: the draft, the step that unrolls it, the optimizer, counters; and its checkpoints."""

from pathlib import Path

import torch
from torch import Tensor

from common.dataset.packs import Pack
from common.draft.config import MAIN_K
from common.draft.unrolled_step import StepResult, UnrolledStep
from common.pipeline.command_line import Settings
from common.pipeline.errors import SafetyStop
from common.pipeline.manifest import DRAFT
from common.training.acceptance import figures_from_json
from common.training.checkpoint import checkpoints, load_checkpoint, prune, save_checkpoint
from common.training.held_out import bigram_floor, evaluate
from common.training.inputs import Inputs
from common.training.optimizer import DTYPES, make_optimizer
from common.training.ranks import Ranks, is_sharded, wrap_for_ranks

STATE = ("step", "tokens", "seconds", "best_step", "best_length", "baselines")  # fields stored in a checkpoint


class Trainer:
    """`module` is `unrolled` wrapped for the ranks; `draft` is the network inside.

    `best_length`: the highest held-out acceptance length at k = `main_k`; `seconds`: time spent in training steps.
    """

    def __init__(self, inputs: Inputs, settings: Settings, ranks: Ranks):
        self.inputs, self.settings, self.ranks = inputs, settings.train, ranks
        self.folder = settings.run_dir / DRAFT / "checkpoints"
        self._build()
        self.module = wrap_for_ranks(self.unrolled, self.settings.parallel, ranks)
        self.trained = [p for p in self.draft.parameters() if p.requires_grad]
        self.optimizer = make_optimizer(self.draft, self.settings)
        self.eval_every = self.settings.eval_every or inputs.steps_an_epoch
        self.main_k = min(MAIN_K, self.settings.eval_steps)
        self.step = self.tokens = self.best_step = 0
        self.seconds = self.best_length = 0.0
        self.baselines: dict = {}

    def _build(self) -> None:
        """Build the untrained draft and the step that unrolls it, unsharded on this rank."""
        inputs, s, device = self.inputs, self.settings, self.ranks.device
        self.draft = inputs.new_draft(s.seed).to(device)
        norm, head = (inputs.target[name].to(device) for name in ("norm", "lm_head"))
        kept = None if len(inputs.kept) == len(inputs.t2d) else inputs.kept.to(device)
        steps = (s.unrolled_steps, s.step_weight)
        self.unrolled = UnrolledStep(self.draft, norm, inputs.eps, head, kept, *steps, DTYPES[s.precision])

    def facts(self) -> list[tuple[str, str]]:
        """Derived numbers, to be printed before the first step."""
        s, c, inputs = self.settings, self.inputs.config, self.inputs
        heads = f"{c.num_attention_heads}/{c.num_key_value_heads} heads"
        trained = sum(p.numel() for p in self.trained)
        frozen = sum(p.numel() for p in self.draft.parameters()) - trained
        weights = " ".join(f"{w:.3g}" for w in self.unrolled.loss_weights(s.unrolled_steps).tolist())
        kind = f", {s.parallel}" if self.ranks.world > 1 else ""
        return [
            ("draft", f"{c.form}, hidden {c.hidden_size}, MLP {c.intermediate_size}, {heads}, {c.rope_type} rope"),
            ("weights", f"{trained / 1e6:.1f} M trained, {frozen / 1e6:.1f} M frozen"),
            ("vocabulary", f"{c.draft_vocab_size:,} of {c.vocab_size:,}, {inputs.coverage:.2%} of the target's tokens"),
            ("start", f"the draft in {s.warm_start}" if inputs.published else "fresh weights"),
            ("steps", f"{inputs.total_steps} of {s.packs_per_step} packs, {inputs.steps_an_epoch} an epoch"),
            ("unrolled", f"{s.unrolled_steps} steps in training, weights {weights}; {s.eval_steps} in evaluation"),
            ("optimizer", f"{s.optimizer}, learning rate {s.learning_rate:g}"),
            ("ranks", f"{self.ranks.world} on {self.ranks.device}{kind}, {s.precision}"),
            ("held out", f"{inputs.counts['held_out']} samples"),
        ] + (inputs.follower.budget.lines() if inputs.follower else [])

    def measure(self, alone: bool = False) -> tuple[dict, list]:
        """Held-out acceptance of the current weights: (facts of an `eval` metrics line, the replies of each pack).

        `alone`: this rank evaluates all packs, since the others have ended.
        """
        ranks = Ranks(0, 1, self.ranks.device) if alone else self.ranks
        return evaluate(self.unrolled, self.inputs.held_out, ranks, self.settings.eval_steps)

    def measure_baselines(self) -> None:
        """Once per run: acceptance of the untrained draft and of a bigram table of the same training tokens."""
        inputs = self.inputs
        if inputs.held_out.schedule and not self.baselines:
            floor = bigram_floor(inputs.packs, inputs.held_out, inputs.config.vocab_size, self.settings.eval_steps)
            self.baselines = {"untrained": self.measure()[0], "bigram": floor}

    def is_best(self, figures: dict) -> bool:
        """Whether this step's held-out acceptance length is the highest so far; the same answer on every rank."""
        length = figures["walk"][self.main_k]["length"] or 0.0
        # Use rank 0's value on every rank, so that all agree on whether to checkpoint.
        length = float(self.ranks.sum(torch.tensor([length if self.ranks.first else 0.0], dtype=torch.float64)))
        if length <= self.best_length:
            return False
        self.best_length, self.best_step = length, self.step
        return True

    def check_finite(self, batch: list[Pack], results: list[StepResult], norm: Tensor) -> None:
        """Raise SafetyStop before the update when the loss or the gradient is not finite, naming the samples."""
        if all(torch.isfinite(r.loss) for r in results) and torch.isfinite(norm):
            return
        losses = ", ".join(f"{r.loss.item():.3g}" for r in results)
        ids = ", ".join(id for pack in batch for id in pack.ids)
        raise SafetyStop(
            f"step {self.step}: the loss is {losses}, the gradient norm {float(norm):.3g}; the update was not applied. "
            f"Look at the states of these samples, or lower --learning-rate: {ids}"
        )

    # ---- checkpoints ----

    def resume(self) -> Path | None:
        """Load the newest complete checkpoint and return its path; None where the run has no checkpoint yet."""
        newest = (checkpoints(self.folder) or [None])[-1]
        if newest:
            state = load_checkpoint(newest, self.draft, self.optimizer)
            for name in STATE:
                setattr(self, name, state[name])
            self.baselines = figures_from_json(self.baselines)
        return newest

    def checkpoint_due(self) -> bool:
        """Whether this step needs a checkpoint: after an evaluation, and at the end of a round of a disk budget."""
        follower = self.inputs.follower
        return self.step % self.eval_every == 0 or bool(follower and self.step in follower.order.ends)

    def checkpoint(self) -> None:
        """Save the state; keep the last few checkpoints and the best."""
        state = {name: getattr(self, name) for name in STATE}
        save_checkpoint(self.folder, self.draft, self.optimizer, state, self.ranks.first)
        if self.ranks.first:
            prune(self.folder, self._path(self.best_step))
        if self.inputs.follower:
            self.inputs.follower.release(self.step)

    def load_best(self) -> int:
        """Load the weights with the best held-out acceptance, unsharded on this rank; returns their step."""
        best = self._path(self.best_step)
        if is_sharded(self.unrolled):
            # Free the sharded model before building the full one.
            self.optimizer = self.module = self.unrolled = self.draft = self.trained = None
            self._build()
        return self.load(best if self.best_step and best.is_dir() else self._path(self.step))

    def load(self, path: Path) -> int:
        """Load only the weights of a checkpoint; returns its step."""
        return load_checkpoint(path, self.draft, None)["step"]

    def _path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"
