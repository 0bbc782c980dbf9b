"""Stage 01b: the target answers the questions; its reasoning, its content and its exact token ids are kept.

    python 01b_generate_synthetic.py --config configs/kimi-k2.5.toml --n 10000
    python 01b_generate_synthetic.py --config configs/demo.toml --engine local

Reads questions (a hub data set or a local file); writes RUN/01_synthetic/part-*.jsonl, one record a line, with
prompt_ids + output_ids as the truth. Stop it at will: the same command goes on where it stopped.
"""

import asyncio
import os
from pathlib import Path

from common.config import Settings, load_settings
from common.errors import TooManyFailures, UserError, guarded
from common.generate import Counts, Generation, plan_units
from common.progress import say, table
from common.prompts import read_questions
from common.protocol import Protocol, load_protocol
from common.storage import JsonlParts, Manifest, open_stage, stage_lock

STAGE = "01_synthetic"


def main() -> int:
    settings = load_settings(None, __doc__, ("target", "questions", "generate"))
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    folder = settings.run_dir / STAGE
    protocol = load_protocol(settings.target)
    if settings.dry_run:
        return dry_run(settings, folder)

    with stage_lock(folder.parent / f".{STAGE}"):
        manifest = open_stage(folder, STAGE, settings.fingerprint(), settings.as_dict(), settings.fresh)
        records, failures = JsonlParts(folder), JsonlParts(folder, prefix="failures")
        done_ids = {record["id"] for record in records.read()}
        show_plan(settings, protocol, folder, len(done_ids), records.torn_bytes)

        counts = Counts()
        try:
            asyncio.run(generate(settings, protocol, records, failures, counts, done_ids))
        finally:
            save_manifest(manifest, folder, records, failures, counts)
    return summary(settings, folder, manifest, counts)


async def generate(settings, protocol, records, failures, counts, done_ids) -> None:
    units = plan_units(read_questions(settings.questions), settings.generate, settings.n, counts, failures)
    async with make_engine(settings, protocol) as engine:
        say(f"  engine: {engine.model} · {engine.version} · {engine.concurrency} requests in flight")
        await Generation(engine, protocol, settings.generate, records, failures, counts, done_ids).run(
            units, settings.n
        )


def make_engine(settings: Settings, protocol: Protocol):
    if settings.generate.engine == "local":
        from common.engines.local import LocalEngine

        return LocalEngine(settings.target, protocol, settings.generate.batch_size, settings.generate.device)
    from common.engines.openai_server import OpenAIServers

    return OpenAIServers(settings.generate, protocol)


def show_plan(settings: Settings, protocol: Protocol, folder: Path, done: int, torn_bytes: int) -> None:
    g = settings.generate
    say(f"01b generate: {settings.questions.dataset} -> {folder}")
    rows = [
        ("target", settings.target.model),
        ("protocol", f"open {protocol.think_open}, close {protocol.think_close}, end {protocol.end}"),
        ("samples", f"{settings.n or 'all'} wanted, {done} there already"),
        ("sampling", f"temperature {g.temperature:g}, top_p {g.top_p:g}, at most {g.max_tokens} tokens"),
        (
            "thinking",
            f"{'on' if g.thinking else 'off'}" + f", budget {g.thinking_budget} tokens" * bool(g.thinking_budget),
        ),
    ]
    if torn_bytes:
        rows.append(("repaired", f"a torn last line of {torn_bytes} bytes was cut off"))
    table(rows)


def dry_run(settings: Settings, folder: Path) -> int:
    """Count what would be asked, and what is there already; touches nothing."""
    counts = Counts()
    units = list(plan_units(read_questions(settings.questions), settings.generate, settings.n, counts, None))
    ids = {id for unit in units for id in unit.ids}
    there = set()
    for path in sorted(folder.glob("part-*.jsonl")):
        from common.storage import read_jsonl

        there |= {record["id"] for record in read_jsonl(path)}
    say(f"01b dry run: {settings.questions.dataset} -> {folder} (nothing is written)")
    most = settings.generate.max_tokens
    table(
        [
            ("samples", f"{len(ids)} wanted, {len(ids & there)} there already, {len(ids - there)} to generate"),
            ("skipped rows", ", ".join(f"{reason} {count}" for reason, count in counts.skipped.items()) or "none"),
            ("tokens", f"at most {len(ids - there) * most:,} ({most:,} a reply)"),
            ("disk", f"at most {len(ids - there) * most * 12 / 2**30:.2f} GiB of JSONL (about 12 bytes a token)"),
        ]
    )
    return 0


def save_manifest(manifest: Manifest, folder: Path, records: JsonlParts, failures: JsonlParts, counts: Counts) -> None:
    manifest.files = {}
    for path in records.paths():
        manifest.add_file(folder, path.name)
    manifest.counts = counts.as_dict()
    manifest.complete = counts.done > 0 or bool(manifest.files)
    manifest.save(folder)


def summary(settings: Settings, folder: Path, manifest: Manifest, counts: Counts) -> int:
    if not counts.done and not counts.failed and not manifest.files:
        raise UserError(f"no question of {settings.questions.dataset} can be asked: {dict(counts.skipped)}")
    lengths, seconds = sorted(counts.lengths), sorted(counts.seconds)
    say(f"01b done: {counts.done} new samples in {folder}")
    rows = [
        ("failed", str(counts.failed)),
        ("skipped", ", ".join(f"{k} {v}" for k, v in counts.skipped.items()) or "none"),
    ]
    if lengths:
        rows += [
            (
                "output tokens",
                f"{counts.output_tokens:,}; p10 {at(lengths, 10)}, p50 {at(lengths, 50)}, p90 {at(lengths, 90)}",
            ),
            ("seconds", f"p50 {at(seconds, 50):.1f}, p90 {at(seconds, 90):.1f}"),
            (
                "reasoning",
                f"{counts.with_reasoning / counts.done:.1%} of samples, from {dict(counts.reasoning_fields)}",
            ),
            ("finish", str(dict(counts.finish_reasons))),
            ("ids", f"{dict(counts.ids_from)}; rebuilt from text differ in {counts.mismatched} of {counts.compared}"),
        ]
    table(rows)
    asked = counts.done + counts.failed
    if counts.failed > settings.generate.max_failed_share * asked:
        raise TooManyFailures(
            f"{counts.failed} of {asked} samples failed, see {folder}/failures-00000.jsonl; rerun to retry"
        )
    return 0


def at(values: list, percent: int):
    return values[min(len(values) - 1, len(values) * percent // 100)]


if __name__ == "__main__":
    guarded(main)
