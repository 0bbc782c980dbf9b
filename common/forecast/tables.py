"""What --dry-run prints about the whole run: samples, tokens, disk, memory of training, hours by kind of GPU.

Settings and lengths are those of the stages that have run, as their manifests say, else those of the config; sizes are
the checkpoint's, else those of configs/NAME.config.json. No server, GPU, hub or weights are needed.
common/forecast/arithmetic.py has the formulas.
"""

import os
from dataclasses import dataclass, replace
from pathlib import Path

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
    """The forecast of a stage whose input does not exist yet."""
    say(f"{stage} dry run: {folder} does not exist yet (nothing is written)")
    return show_forecast(settings)


def stage_started(folder: Path) -> bool:
    """Whether a stage has begun to fill its folder, on one node or as node shares."""
    return bool(manifests(folder))


def manifests(folder: Path) -> list[dict]:
    """The manifests of a stage, one for each node share; empty where the stage has not run."""
    paths = (path / MANIFEST for path in (folder, *sorted(folder.glob("part-*-of-*"))))
    return [read_json(path) for path in paths if path.is_file()]


def settings_used(settings: Settings) -> Settings:
    """`settings` with the sections of other stages as those stages really used them, where they have run.

    A setting that a manifest does not have, written by an older version, stays as the config has it.
    """
    sections = dict(settings.sections)
    for stage, names in SECTIONS_OF.items():
        for manifest in manifests(settings.run_dir / stage)[:1]:
            for name in (name for name in names if name not in settings.stage_sections):
                stored = {k: v for k, v in manifest["settings"].get(name, {}).items() if hasattr(sections[name], k)}
                stored = {k: tuple(v) if isinstance(v, list) else v for k, v in stored.items()}
                sections[name] = replace(sections[name], **stored)
    return replace(settings, sections=sections)


@dataclass(frozen=True)
class Workload:
    """What goes through the pipeline."""

    samples: int
    prompt: float  # mean tokens
    output: float
    origin: str


def expected_workload(settings: Settings) -> Workload:
    """Samples and mean lengths: measured by stage 01b, or assumed; `--n` sets the number of samples."""
    folder = settings.run_dir / SYNTHETIC
    counts = [manifest.get("counts", {}) for manifest in manifests(folder)]
    done, prompt, output = (sum(c.get(key, 0) for c in counts) for key in ("done", "prompt_tokens", "output_tokens"))
    if done:
        origin = f"lengths of the {done:,} samples in {folder}"
        return Workload(settings.n or done, prompt / done, output / done, origin)
    output = settings.forecast.assume_output_tokens
    return Workload(settings.n or ASSUMED_SAMPLES, ASSUMED_PROMPT_TOKENS, output, "assumed: [forecast] of the config")


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
    forecast, p = Forecast(settings, sizes, draft, expected_workload(settings)), settings.forecast
    say(f"the whole run, {settings.target.model}: {forecast.work.samples:,} samples ({forecast.work.origin})")
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
    """The tables, and what they are computed from."""

    settings: Settings
    sizes: TargetSizes
    draft: DraftConfig
    work: Workload

    # ---- quantities ----

    def stream_tokens(self) -> float:
        """Mean tokens of a stream with hidden states."""
        return min(self.work.prompt + self.work.output, self.settings.extract.max_tokens_per_sample or float("inf"))

    def trained_tokens(self) -> tuple[float, float]:
        """Mean (prompt, reply) tokens of a sample in training."""
        total = min(self.stream_tokens(), self.settings.dataset.sample_tokens)
        return min(self.work.prompt, total), max(total - self.work.prompt, 0)

    def bytes_per_token(self) -> int:
        """Bytes of a token in a shard."""
        return bytes_per_token(self.sizes.hidden_size, self.draft.num_aux, self.settings.extract.store_dtype)

    def train_flops(self, steps: int = 0) -> float:
        one = arithmetic.sample_flops(self.draft, *self.trained_tokens(), steps or self.settings.train.unrolled_steps)
        return one * self.work.samples * (1 - self.settings.dataset.holdout_share) * self.settings.train.epochs

    def memory(self, parallel: str, steps: int = 0) -> dict[str, float]:
        """Bytes of training on one rank, by use."""
        train, (prompt, output) = self.settings.train, self.trained_tokens()
        rows = round(train.pack_tokens * output / (prompt + output))
        shape = (train.pack_tokens, rows, steps or train.unrolled_steps)
        return arithmetic.training_memory(self.draft, *shape, self.settings.forecast.assume_gpus, parallel)

    # ---- tables ----

    def disk_rows(self) -> list[tuple[str, str]]:
        work, weights_gb = self.work, self.settings.forecast.weights_gb
        generated = work.samples * (work.prompt + work.output)
        streams = work.samples * self.stream_tokens()
        head = 2 * (2 * self.sizes.vocab_size + 1) * self.sizes.hidden_size
        checkpoint, export = arithmetic.checkpoint_bytes(self.draft), arithmetic.export_bytes(self.draft)
        return [
            ("tokens", f"{generated:,.0f} = {work.samples:,} x ({work.prompt:,.0f} prompt + {work.output:,.0f} reply)"),
            (SYNTHETIC, f"{generated * JSONL_TOKEN_BYTES / GB:,.2f} GB = tokens x {JSONL_TOKEN_BYTES} bytes "
                        "of JSONL"),
            (HIDDEN, f"{streams * self.bytes_per_token() / GB:,.1f} GB = {streams:,.0f} tokens x "
                     f"{self.bytes_per_token():,} bytes"),
            (DATASET, f"{head / GB:.2f} GB: the target's norm, head and embedding in bf16; no states"),
            (DRAFT, f"{(KEPT_CHECKPOINTS * checkpoint + export) / GB:.1f} GB = {KEPT_CHECKPOINTS} checkpoints x "
                    f"{checkpoint / GB:.2f} and the export of {export / GB:.2f}"),
            ("target", f"{weights_gb:,.0f} GB of weights" if weights_gb else "unknown: forecast.weights_gb is not set"),
        ]  # fmt: skip

    def memory_rows(self) -> list[tuple[str, str]]:
        ranks = self.settings.forecast.assume_gpus
        cases = {"DDP": "ddp", "FSDP2": "fsdp"} if ranks > 1 else {"one GPU": "ddp"}
        columns = [self.memory(kind) for kind in cases.values()]
        rows = [("use", "".join(f"{name:>10}" for name in cases) + f"   {ranks} ranks")]
        for use in dict.fromkeys(use for column in columns for use in column):
            rows.append((use, "".join(f"{column.get(use, 0) / GIB:10.2f}" for column in columns)))
        totals = [arithmetic.on_a_gpu(column) for column in columns]
        rows.append(("on the GPU", "".join(f"{total / GIB:10.2f}" for total in totals)))
        for name, total in zip(cases, totals, strict=True):
            fits = [gpu for gpu, facts in GPUS.items() if total < 0.95 * facts.memory_gb * GB]
            rows.append((f"fits, {name}", ", ".join(fits) or "none"))
        return rows

    def hour_rows(self) -> list[tuple[str, str]]:
        p, epochs, work = self.settings.forecast, self.settings.train.epochs, self.work
        streams = work.samples * self.stream_tokens()
        train, extract = self.train_flops(), 2e9 * p.active_b * streams
        rows = [
            ("FLOPs", f"extraction {extract:.2e} = tokens x 2 x {p.active_b:g}e9 active weights; training {train:.2e} "
                      f"= {train / streams / epochs / 1e9:.0f} GFLOP a token, {epochs:g} epochs"),
            ("GPU", f"{'tokens/s':>10}{'01b':>8}{'02':>8}{'04':>8}   hours"),
        ]  # fmt: skip
        writing = arithmetic.disk_hours(streams * self.bytes_per_token(), p.assume_disk_gb_s)
        for name, gpu in GPUS.items():
            rate, why = self.generation_rate(gpu)
            cells = f"{'-':>10}{'-':>8}{'-':>8}"
            if rate:
                compute = arithmetic.compute_hours(extract, gpu, p.assume_gpus, p.assume_utilisation)
                cells = f"{rate:10,.0f}{work.samples * work.output / rate / 3600:8.2f}{slower_of(compute, writing)}"
            training = arithmetic.compute_hours(train, gpu, p.assume_gpus, p.assume_utilisation)
            rows.append((name, f"{cells}{slower_of(training, writing * epochs)}   {why}"))
        size = streams * self.bytes_per_token() / GB
        disk = f"02 writes {size:,.0f} GB in {writing:.2f} h at best, 04 reads them once an epoch"
        return [*rows, ("disk", f"{disk}; d: the disk takes longer than the GPUs")]

    def generation_rate(self, gpu: Gpu) -> tuple[float, str]:
        """(tokens/s of the node, how it is used); 0 where the weights do not fit or their size is unknown."""
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
        weights, active = p.weights_gb * GB, p.active_b * GB
        rate = arithmetic.generation_rate(gpu, gpus, replies, context, weights, active, cache, p.assume_bandwidth)
        plural = "s" * (servers > 1)
        return servers * rate, f"{servers} server{plural} of {gpus} GPUs, {replies:.0f} replies in flight each"

    def what_if_rows(self) -> list[tuple[str, str]]:
        train, now = self.settings.train, self.train_flops()
        memory, rows = arithmetic.on_a_gpu(self.memory(train.parallel)), []
        for steps in (train.unrolled_steps + 1, train.unrolled_steps + 2):
            grown = arithmetic.on_a_gpu(self.memory(train.parallel, steps)) - memory
            factor = self.train_flops(steps) / now
            rows.append((f"{steps} unrolled steps", f"training x {factor:.2f}, {grown / GIB:+.2f} GiB a rank"))
        longer = replace(self, work=replace(self.work, output=2 * self.work.output))
        disk, factor = longer.stream_tokens() / self.stream_tokens(), longer.train_flops() / now
        rows.append(("replies twice as long", f"01b x 2.0 and more, disk of 02 x {disk:.2f}, training x {factor:.2f} "
                                              "(both cut samples at their limits)"))  # fmt: skip
        single, doubled = (
            arithmetic.activation_bytes(self.draft, tokens, tokens, train.unrolled_steps)
            for tokens in (train.pack_tokens, 2 * train.pack_tokens)
        )
        grown = f"{(doubled - single) / GIB:+.2f} GiB of activations a rank, if every token has a loss"
        return [*rows, ("packs twice as long", grown)]


def slower_of(compute: float, disk: float) -> str:
    """The longer of two durations in hours, marked with d where it is the disk's."""
    return f"{max(compute, disk):7.2f}{'d' if disk > compute else ' '}"
