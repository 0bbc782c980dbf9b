"""What a dry run prints of the whole run: samples, tokens, disk, memory of training, hours by kind of GPU.

Lengths are those that finished stages measured, else the config's [forecast]; sizes are the checkpoint's, else those of
configs/NAME.config.json. No server, GPU, hub or weights are needed. common/forecast/arithmetic.py has the arithmetic.
"""

import os
from typing import NamedTuple

from common.dataset.shard_layout import bytes_per_token
from common.forecast import arithmetic as plan
from common.forecast.arithmetic import GB, GIB, GPUS
from common.pipeline.command_line import Settings
from common.pipeline.console import say, table
from common.pipeline.errors import UserError
from common.pipeline.files import read_json
from common.pipeline.jsonl import JSONL_TOKEN_BYTES
from common.pipeline.manifest import DATASET, DRAFT, HIDDEN, MANIFEST, SYNTHETIC
from common.target.sizes import read_sizes

ASSUMED_SAMPLES, ASSUMED_PROMPT_TOKENS = 10_000, 200  # where neither --n nor stage 01b says
KEPT_CHECKPOINTS = 3  # the last two and the best


class Load(NamedTuple):
    """What goes through the pipeline."""

    samples: int
    prompt: float  # mean tokens
    output: float
    origin: str


def ask_nobody() -> None:
    """Keep a dry run from the network: what is in no folder and no cache is assumed. Before any hub library loads."""
    os.environ["HF_HUB_OFFLINE"] = "1"


def expected_load(settings: Settings) -> Load:
    """Samples and mean lengths: measured by stage 01b, or assumed; `--n` says how many."""
    assumed, folder = settings.forecast, settings.run_dir / SYNTHETIC
    counts, parts = {}, [folder, *sorted(folder.glob("part-*-of-*"))]
    for part in parts:
        if (part / MANIFEST).is_file():
            found = read_json(part / MANIFEST).get("counts", {})
            counts = {key: counts.get(key, 0) + found.get(key, 0) for key in ("done", "prompt_tokens", "output_tokens")}
    done = counts.get("done", 0)
    if done:
        means = counts["prompt_tokens"] / done, counts["output_tokens"] / done
        return Load(settings.n or done, *means, f"lengths of the {done:,} samples in {folder}")
    samples = settings.n or ASSUMED_SAMPLES
    return Load(samples, ASSUMED_PROMPT_TOKENS, assumed.assume_output_tokens, "assumed: [forecast] of the config")


def show_forecast(settings: Settings, note: str = "") -> int:
    """Print the plan of the whole run."""
    from common.draft.config import draft_config

    load, p = expected_load(settings), settings.forecast
    if note:
        say(f"  {note}")
    try:
        sizes = read_sizes(settings.target, settings.shipped_config)
    except UserError as error:  # what could be counted stands above and is right
        say(f"  the whole run cannot be planned: {error}")
        return 0
    layers = sizes.aux_layers(settings.extract.aux_layers)
    draft = draft_config(
        settings.draft, sizes.text, sizes.eps, len(layers), settings.dataset.draft_vocab_size or sizes.vocab_size
    )
    say(f"the whole run, {settings.target.model}: {load.samples:,} samples ({load.origin})")
    table(_disk(settings, sizes, load, draft))
    say("memory of training, one rank [GiB]; common/forecast/arithmetic.py has the formula of each part")
    table(_memory(settings, load, draft))
    say(
        f"hours with {p.assume_gpus} GPUs at {p.assume_utilisation:.0%} of the published bf16 rate, "
        f"{p.assume_bandwidth:.0%} of the bandwidth; disk {p.assume_disk_gb_s:g} GB/s"
    )
    table(_hours(settings, sizes, load, draft))
    say("what more would cost")
    table(_more(settings, load, draft))
    return 0


def _extracted(settings: Settings, load: Load) -> float:
    """Mean tokens of a stream with states."""
    limit = settings.extract.max_tokens_per_sample
    return min(load.prompt + load.output, limit or float("inf"))


def _trained(settings: Settings, load: Load) -> tuple[float, float]:
    """Mean (prompt, reply) tokens of a sample in training."""
    total = min(_extracted(settings, load), settings.dataset.sample_tokens)
    return min(load.prompt, total), max(total - load.prompt, 0)


def _disk(settings: Settings, sizes, load: Load, draft) -> list[tuple[str, str]]:
    tokens = load.samples * _extracted(settings, load)
    a_token = bytes_per_token(sizes.hidden_size, draft.num_aux, settings.extract.store_dtype)
    written = load.samples * (load.prompt + load.output)
    head = 2 * (2 * sizes.vocab_size + 1) * sizes.hidden_size
    kept = KEPT_CHECKPOINTS
    checkpoint = plan.checkpoint_bytes(draft)
    return [
        ("tokens", f"{written:,.0f} = {load.samples:,} x ({load.prompt:,.0f} prompt + {load.output:,.0f} reply)"),
        (SYNTHETIC, f"{written * JSONL_TOKEN_BYTES / GB:,.2f} GB = tokens x {JSONL_TOKEN_BYTES} bytes of JSONL"),
        (HIDDEN, f"{tokens * a_token / GB:,.1f} GB = {tokens:,.0f} tokens x {a_token:,} bytes"),
        (DATASET, f"{head / GB:.2f} GB: the target's norm, head and embedding in bf16; no states"),
        (DRAFT, f"{(kept * checkpoint + plan.export_bytes(draft)) / GB:.1f} GB = {kept} checkpoints x "
                     f"{checkpoint / GB:.2f} and the export of {plan.export_bytes(draft) / GB:.2f}"),
        ("target", f"{settings.forecast.weights_gb:,.0f} GB of weights" if settings.forecast.weights_gb
                   else "unknown: forecast.weights_gb is not set"),
    ]  # fmt: skip


def _pack_memory(settings: Settings, load: Load, draft, ranks: int, parallel: str, steps: int = 0) -> dict[str, float]:
    train, tokens = settings.train, settings.train.pack_tokens
    prompt, output = _trained(settings, load)
    rows = round(tokens * output / (prompt + output))
    return plan.training_memory(draft, tokens, rows, steps or train.unrolled_steps, ranks, parallel)


def _memory(settings: Settings, load: Load, draft) -> list[tuple[str, str]]:
    ranks = settings.forecast.assume_gpus
    cases = [("DDP", "ddp"), ("FSDP2", "fsdp")] if ranks > 1 else [("one GPU", "ddp")]
    columns = [_pack_memory(settings, load, draft, ranks, kind) for _, kind in cases]
    rows = [("part", "".join(f"{name:>10}" for name, _ in cases) + f"   {ranks} ranks")]
    for part in dict.fromkeys(part for column in columns for part in column):
        rows.append((part, "".join(f"{column.get(part, 0) / GIB:10.2f}" for column in columns)))
    rows.append(("on the GPU", "".join(f"{plan.on_a_gpu(column) / GIB:10.2f}" for column in columns)))
    fits = [
        ", ".join(name for name, gpu in GPUS.items() if plan.on_a_gpu(column) < 0.95 * gpu.memory_gb * GB) or "none"
        for column in columns
    ]
    return rows + [(f"fits, {name}", fit) for (name, _), fit in zip(cases, fits, strict=True)]


def _train_flops(settings: Settings, load: Load, draft, steps: int = 0) -> float:
    one = plan.sample_flops(draft, *_trained(settings, load), steps or settings.train.unrolled_steps)
    return one * load.samples * (1 - settings.dataset.holdout_share) * settings.train.epochs


def _hours(settings: Settings, sizes, load: Load, draft) -> list[tuple[str, str]]:
    p = settings.forecast
    extracted = load.samples * _extracted(settings, load)
    states = extracted * bytes_per_token(sizes.hidden_size, draft.num_aux, settings.extract.store_dtype)
    train, extract = _train_flops(settings, load, draft), 2e9 * p.active_b * extracted
    rows = [
        ("FLOPs", f"extraction {extract:.2e} = tokens x 2 x {p.active_b:g}e9 active weights; training {train:.2e} "
                  f"= {train / extracted / settings.train.epochs / 1e9:.0f} GFLOP a token, "
                  f"{settings.train.epochs:g} epochs"),
        ("GPU", f"{'tokens/s':>10}{'01b':>8}{'02':>8}{'04':>8}   hours"),
    ]  # fmt: skip
    writing = plan.disk_hours(states, p.assume_disk_gb_s)
    for name, gpu in GPUS.items():
        rate, why = _generation(settings, sizes, load, gpu)
        generate = load.samples * load.output / rate / 3600 if rate else 0.0
        compute = plan.compute_hours(extract, gpu, p.assume_gpus, p.assume_utilisation)
        training = plan.compute_hours(train, gpu, p.assume_gpus, p.assume_utilisation)
        cells = f"{rate:10,.0f}{generate:8.2f}{_slower(compute, writing)}" if rate else f"{'-':>10}{'-':>8}{'-':>8}"
        rows.append((name, f"{cells}{_slower(training, writing * settings.train.epochs)}   {why}"))
    disk = f"02 writes {states / GB:,.0f} GB in {writing:.2f} h at best, 04 reads them once an epoch"
    return [*rows, ("disk", f"{disk}; d: the disk is what takes the time")]


def _slower(compute: float, disk: float) -> str:
    """Hours of what takes longer, marked where it is the disk."""
    return f"{max(compute, disk):7.2f}{'d' if disk > compute else ' '}"


def _generation(settings: Settings, sizes, load: Load, gpu: plan.Gpu) -> tuple[float, str]:
    """(tokens/s of the node, what limits it); 0 where the weights do not fit or are not known."""
    p = settings.forecast
    if not p.weights_gb:
        return 0.0, "forecast.weights_gb is not set"
    each = min(settings.target.tensor_parallel, p.assume_gpus)
    while each < p.assume_gpus and p.weights_gb > 0.85 * gpu.memory_gb * each:
        each *= 2
    context = load.prompt + load.output / 2
    cache = plan.cache_bytes(sizes.text, sizes.layers, each)
    room = plan.lanes_that_fit(gpu, each, context, p.weights_gb * GB, cache)
    if room < 1:
        return 0.0, f"{p.weights_gb:,.0f} GB do not fit {each} x {gpu.memory_gb:g} GB"
    servers = p.assume_gpus // each
    lanes = min(settings.generate.concurrency / servers, room)
    rate = plan.generation_rate(
        gpu, each, lanes, context, p.weights_gb * GB, p.active_b * GB, cache, p.assume_bandwidth
    )
    return servers * rate, f"{servers} server{'s' * (servers > 1)} of {each} GPUs, {lanes:.0f} replies in flight each"


def _more(settings: Settings, load: Load, draft) -> list[tuple[str, str]]:
    steps, ranks, kind = settings.train.unrolled_steps, settings.forecast.assume_gpus, settings.train.parallel
    now, memory = _train_flops(settings, load, draft), plan.on_a_gpu(_pack_memory(settings, load, draft, ranks, kind))
    rows = []
    for more in (steps + 1, steps + 2):
        grown = plan.on_a_gpu(_pack_memory(settings, load, draft, ranks, kind, more)) - memory
        factor = _train_flops(settings, load, draft, more) / now
        rows.append((f"{more} unrolled steps", f"training x {factor:.2f}, {grown / GIB:+.2f} GiB a rank"))
    longer = load._replace(output=2 * load.output)
    cut = _extracted(settings, longer) / _extracted(settings, load)
    factor = _train_flops(settings, longer, draft) / now
    rows.append(("replies twice as long", f"01b x 2.0 and more, disk of 02 x {cut:.2f}, training x {factor:.2f} "
                                          "(both are cut at their limits)"))  # fmt: skip
    doubled = plan.activation_bytes(draft, *(2 * n for n in (settings.train.pack_tokens,) * 2), steps)
    single = plan.activation_bytes(draft, *(settings.train.pack_tokens,) * 2, steps)
    rows.append(("packs twice as long", f"{(doubled - single) / GIB:+.2f} GiB of activations a rank, all supervised"))
    return rows


def show_missing(settings: Settings, stage: str, folder) -> int:
    """The plan of a stage whose input is not there yet."""
    say(f"{stage} dry run: {folder} is not there yet (nothing is written)")
    return show_forecast(settings)


def is_there(folder) -> bool:
    """Whether a stage has begun to fill its folder, as one or in parts."""
    return (folder / MANIFEST).is_file() or any(folder.glob(f"part-*-of-*/{MANIFEST}"))
