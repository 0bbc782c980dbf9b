"""What --dry-run prints about the whole run: samples, tokens, disk, memory of training, hours by kind of GPU.

Settings and lengths are those of the stages that have run, as their manifests say, else those of the config; sizes are
the checkpoint's, else those of configs/NAME.config.json. No server, GPU, hub or weights are needed.
common/forecast/arithmetic.py has the formulas.
"""

import math
import os
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from common.dataset.shard_layout import bytes_per_token
from common.draft.config import DraftConfig, draft_config
from common.forecast import arithmetic
from common.forecast.arithmetic import GB, GIB, GPUS, Gpu
from common.pipeline.command_line import Settings
from common.pipeline.console import say, table
from common.pipeline.errors import UserError
from common.pipeline.files import read_json
from common.pipeline.jsonl import JSONL_TOKEN_BYTES
from common.pipeline.manifest import DATASET, DRAFT, HIDDEN, MANIFEST, SYNTHETIC
from common.target.sizes import TargetSizes, read_sizes

ASSUMED_SAMPLES, ASSUMED_PROMPT_TOKENS = 10_000, 200  # where neither --n nor stage 01b says
KEPT_CHECKPOINTS = 3  # the last two and the best
SECTIONS_OF = {
    SYNTHETIC: ("questions", "generate"),
    HIDDEN: ("extract",),
    DATASET: ("dataset",),
    DRAFT: ("draft", "train"),
}


def go_offline() -> None:
    """Keep a dry run from the network: only folders and caches are read. Call it before any hub library loads."""
    os.environ["HF_HUB_OFFLINE"] = "1"


def show_input_missing(settings: Settings, stage: str, folder: Path) -> int:
    """Print the forecast for a stage whose input does not exist yet."""
    say(f"{stage} dry run: {folder} does not exist yet (nothing is written)")
    return show_forecast(settings)


def stage_started(folder: Path) -> bool:
    """Whether a stage has begun to fill its folder, on one node or as node shares."""
    return bool(manifests(folder))


def manifests(folder: Path) -> list[dict]:
    """The manifests of a stage, one for each node share; empty where the stage has not run."""
    paths = (folder / MANIFEST, *sorted(folder.glob(f"part-*-of-*/{MANIFEST}")))
    return [read_json(path) for path in paths if path.is_file()]


def settings_used(settings: Settings) -> Settings:
    """`settings`, in which the stages that have run replace their sections by those in their manifests.

    A setting that a manifest of an older version lacks keeps the value of the config.
    """
    sections = dict(settings.sections)
    for stage, names in SECTIONS_OF.items():
        for manifest in manifests(settings.run_dir / stage)[:1]:
            for name in (name for name in names if name not in settings.stage_sections):
                stored = {k: v for k, v in manifest["settings"].get(name, {}).items() if hasattr(sections[name], k)}
                stored = {k: tuple(v) if isinstance(v, list) else v for k, v in stored.items()}
                sections[name] = replace(sections[name], **stored)
    return replace(settings, sections=sections)


class Workload(NamedTuple):
    """The number of samples, and the mean tokens of their prompts and replies."""

    samples: int
    prompt: float
    output: float


def expected_workload(settings: Settings) -> tuple[Workload, str]:
    """(samples and mean lengths, where they come from): measured by stage 01b or assumed; `--n` sets the number."""
    folder = settings.run_dir / SYNTHETIC
    counts = [manifest.get("counts", {}) for manifest in manifests(folder)]
    done, prompt, output = (sum(c.get(key, 0) for c in counts) for key in ("done", "prompt_tokens", "output_tokens"))
    if done:
        measured = Workload(settings.n or done, prompt / done, output / done)
        return measured, f"lengths of the {done:,} samples in {folder}"
    assumed = Workload(settings.n or ASSUMED_SAMPLES, ASSUMED_PROMPT_TOKENS, settings.forecast.assume_output_tokens)
    return assumed, "assumed: [forecast] of the config"


def show_forecast(settings: Settings, note: str = "") -> int:
    """Print the forecast of the whole run."""
    if note:
        say(f"  {note}")
    settings = settings_used(settings)
    try:
        sizes = read_sizes(settings.target, settings.shipped_config)
    except UserError as error:
        say(f"  no forecast of the whole run: {error}")
        return 0
    aux, vocab = len(sizes.aux_layers(settings.extract.aux_layers)), settings.dataset.draft_vocab_size
    draft = draft_config(settings.draft, sizes.text, sizes.eps, aux, vocab or sizes.vocab_size)
    work, origin = expected_workload(settings)
    forecast, p = Forecast(settings, sizes, draft, work), settings.forecast
    say(f"the whole run, {settings.target.model}: {work.samples:,} samples ({origin})")
    table(forecast.disk_rows())
    say("memory of training on one rank [GiB]; common/forecast/arithmetic.py has the formula of each row")
    table(forecast.memory_rows())
    say(
        f"hours with {p.assume_gpus} GPUs at {p.assume_utilisation:.0%} of the published bf16 rate, "
        f"{p.assume_bandwidth:.0%} of the bandwidth; disk {p.assume_disk_gb_s:g} GB/s"
    )
    table(forecast.hour_rows())
    say("cost of changes")
    table(forecast.what_if_rows())
    return 0


@dataclass(frozen=True)
class Forecast:
    """The tables of the forecast, computed from the settings, the target's and the draft's sizes and the workload."""

    settings: Settings
    sizes: TargetSizes
    draft: DraftConfig
    work: Workload

    @property
    def stream_tokens(self) -> float:
        """Tokens of all streams with hidden states."""
        longest = self.settings.extract.max_tokens_per_sample or math.inf
        return self.work.samples * min(self.work.prompt + self.work.output, longest)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a token in a shard."""
        return bytes_per_token(self.sizes.hidden_size, self.draft.num_aux, self.settings.extract.store_dtype)

    def trained_tokens(self) -> tuple[float, float]:
        """Mean (prompt, reply) tokens of a sample in training."""
        total = min(self.stream_tokens / self.work.samples, self.settings.dataset.sample_tokens)
        return min(self.work.prompt, total), max(total - self.work.prompt, 0)

    def train_flops(self, steps: int) -> float:
        one = arithmetic.sample_flops(self.draft, *self.trained_tokens(), steps)
        return one * self.work.samples * (1 - self.settings.dataset.holdout_share) * self.settings.train.epochs

    def memory(self, parallel: str, steps: int) -> dict[str, float]:
        """Bytes of training on one rank, by use."""
        tokens, (prompt, output) = self.settings.train.pack_tokens, self.trained_tokens()
        shape = (tokens, round(tokens * output / (prompt + output)), steps)
        return arithmetic.training_memory(self.draft, *shape, self.settings.forecast.assume_gpus, parallel)

    def compute_hours(self, flops: float, gpu: Gpu) -> float:
        p = self.settings.forecast
        return gpu.seconds(flops, p.assume_gpus, p.assume_utilisation) / 3600

    def disk_rows(self) -> list[tuple[str, str]]:
        work, weights_gb, draft = self.work, self.settings.forecast.weights_gb, self.draft
        generated, streams = work.samples * (work.prompt + work.output), self.stream_tokens
        head = 2 * (2 * self.sizes.vocab_size + 1) * self.sizes.hidden_size
        trained = arithmetic.trained_weights(draft)
        checkpoint = 12 * trained  # float32 masters and AdamW's two moments
        export = 2 * (trained + draft.vocab_size * draft.hidden_size)  # bf16, with the embedding
        return [
            ("tokens", f"{generated:,.0f} = {work.samples:,} x ({work.prompt:,.0f} prompt + {work.output:,.0f} reply)"),
            (SYNTHETIC, f"{generated * JSONL_TOKEN_BYTES / GB:,.2f} GB = tokens x {JSONL_TOKEN_BYTES} bytes of JSONL"),
            (HIDDEN, f"{streams * self.bytes_per_token / GB:,.1f} GB = {streams:,.0f} tokens x "
                     f"{self.bytes_per_token:,} bytes"),
            (DATASET, f"{head / GB:.2f} GB: the target's norm, head and embedding in bf16; no states"),
            (DRAFT, f"{(KEPT_CHECKPOINTS * checkpoint + export) / GB:.1f} GB = {KEPT_CHECKPOINTS} checkpoints x "
                    f"{checkpoint / GB:.2f} and the export of {export / GB:.2f}"),
            ("target", f"{weights_gb:,.0f} GB of weights" if weights_gb else "unknown: forecast.weights_gb is not set"),
        ]  # fmt: skip

    def memory_rows(self) -> list[tuple[str, str]]:
        ranks = self.settings.forecast.assume_gpus
        cases = {"DDP": "ddp", "FSDP2": "fsdp"} if ranks > 1 else {"one GPU": "ddp"}
        columns = [self.memory(kind, self.settings.train.unrolled_steps) for kind in cases.values()]
        totals = [arithmetic.on_a_gpu(column) for column in columns]
        uses = {use: [column.get(use, 0) for column in columns] for use in chain(*columns)} | {"on the GPU": totals}
        fits = [[gpu for gpu, facts in GPUS.items() if total < 0.95 * facts.memory_gb * GB] for total in totals]
        return [
            ("use", "".join(f"{name:>10}" for name in cases) + f"   {ranks} rank{'s' * (ranks > 1)}"),
            *((use, "".join(f"{size / GIB:10.2f}" for size in sizes)) for use, sizes in uses.items()),
            *((f"fits, {name}", ", ".join(gpus) or "none") for name, gpus in zip(cases, fits, strict=True)),
        ]

    def hour_rows(self) -> list[tuple[str, str]]:
        p, epochs, work = self.settings.forecast, self.settings.train.epochs, self.work
        train, extract = self.train_flops(self.settings.train.unrolled_steps), 2e9 * p.active_b * self.stream_tokens
        rows = [
            ("FLOPs", f"extraction {extract:.2e} = tokens x 2 x {p.active_b:g}e9 active weights; training {train:.2e} "
                      f"= {train / self.stream_tokens / epochs / 1e9:.0f} GFLOP a token, {epochs:g} epochs"),
            ("GPU", f"{'tokens/s':>10}{'01b':>8}{'02':>8}{'04':>8}   hours"),
        ]  # fmt: skip
        size_gb = self.stream_tokens * self.bytes_per_token / GB
        writing = size_gb / p.assume_disk_gb_s / 3600
        for name, gpu in GPUS.items():
            rate, why = self.generation_rate(gpu)
            cells = f"{'-':>10}{'-':>8}{'-':>8}"
            if rate:
                hours = work.samples * work.output / rate / 3600
                cells = f"{rate:10,.0f}{hours:8.2f}{slower_of(self.compute_hours(extract, gpu), writing)}"
            rows.append((name, f"{cells}{slower_of(self.compute_hours(train, gpu), writing * epochs)}   {why}"))
        disk = f"02 writes {size_gb:,.0f} GB in {writing:.2f} h at best, 04 reads them once an epoch"
        return [*rows, ("disk", f"{disk}; d: the disk takes longer than the GPUs")]

    def generation_rate(self, gpu: Gpu) -> tuple[float, str]:
        """(tokens/s of the node, its servers); 0 and the reason where the weights do not fit or have no known size."""
        p = self.settings.forecast
        if not p.weights_gb:
            return 0.0, "forecast.weights_gb is not set"
        gpus = min(self.settings.target.tensor_parallel, p.assume_gpus)  # of one server
        while gpus < p.assume_gpus and p.weights_gb > 0.85 * gpu.memory_gb * gpus:
            gpus *= 2
        context = self.work.prompt + self.work.output / 2
        cache = arithmetic.cache_bytes(self.sizes.text, self.sizes.layers, gpus)
        fitting = arithmetic.replies_that_fit(gpu, gpus, context, p.weights_gb * GB, cache)
        if fitting < 1:
            return 0.0, f"{p.weights_gb:,.0f} GB do not fit {gpus} x {gpu.memory_gb:g} GB"
        servers = p.assume_gpus // gpus
        replies = min(self.settings.generate.concurrency / servers, fitting)
        sizes = (p.weights_gb * GB, p.active_b * GB, cache)
        rate = servers * arithmetic.generation_rate(gpu, gpus, replies, context, *sizes, p.assume_bandwidth)
        return rate, f"{servers} server{'s' * (servers > 1)} of {gpus} GPUs, {replies:.0f} replies in flight each"

    def what_if_rows(self) -> list[tuple[str, str]]:
        train, steps, tokens = self.settings.train, self.settings.train.unrolled_steps, self.settings.train.pack_tokens
        now, memory = self.train_flops(steps), arithmetic.on_a_gpu(self.memory(train.parallel, steps))
        rows = []
        for n in (steps + 1, steps + 2):
            grown = (arithmetic.on_a_gpu(self.memory(train.parallel, n)) - memory) / GIB
            rows.append((f"{n} unrolled steps", f"training x {self.train_flops(n) / now:.2f}, {grown:+.2f} GiB a rank"))
        longer = replace(self, work=self.work._replace(output=2 * self.work.output))
        disk, flops = longer.stream_tokens / self.stream_tokens, longer.train_flops(steps) / now
        twice = (
            f"01b x 2.0 and more, disk of 02 x {disk:.2f}, training x {flops:.2f} (both cut samples at their limits)"
        )
        packs = [arithmetic.activation_bytes(self.draft, n, n, steps) / GIB for n in (tokens, 2 * tokens)]
        grown = f"{packs[1] - packs[0]:+.2f} GiB of activations a rank, if every token has a loss"
        return [*rows, ("replies twice as long", twice), ("packs twice as long", grown)]


def slower_of(compute: float, disk: float) -> str:
    """The longer of two durations [h], marked with d where the disk takes longer."""
    return f"{max(compute, disk):7.2f}{'d' if disk > compute else ' '}"
