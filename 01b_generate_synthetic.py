"""Stage 01b: the target answers the questions; its reasoning, content and exact token ids are stored.

    python 01b_generate_synthetic.py --config configs/kimi-k2.5.toml --probe
    python 01b_generate_synthetic.py --config configs/kimi-k2.5.toml --n 10000
    python 01b_generate_synthetic.py --config configs/demo.toml --n 32

Reads questions (a hub data set or a local file). Writes RUN/01_synthetic/part-*.jsonl, one record a line with the
exact prompt_ids and output_ids, and failures.jsonl with every question that has no record and the reason. Stop it at
any time: the same command resumes. Run `--probe` first: it asks one question and says whether the server is ready. To
split the work over two nodes, run `--part 1/2` on one and `--part 2/2` on the other; 02 reads both as one.
"""

import asyncio
from pathlib import Path

from common.forecast.tables import go_offline, show_forecast
from common.generation.loop import MAX_SILENT_SHARE, Generation
from common.generation.record_folder import FAILURES, Counts, RecordFolder, StoredRecords
from common.generation.work import PendingConversations, input_fingerprint
from common.pipeline.command_line import Settings, load_settings
from common.pipeline.console import listed, percentiles, say, share, table
from common.pipeline.errors import TooManyFailures, UserError, guarded
from common.pipeline.jsonl import JSONL_TOKEN_BYTES
from common.pipeline.manifest import MANIFEST, SYNTHETIC, Manifest, check_fingerprint, open_stage, stage_lock
from common.pipeline.node_share import PART_HELP, NodeShare, parse_node_share, stage_folder
from common.questions.questions import QuestionStream
from common.target.protocol import Protocol, load_protocol

STAGE = SYNTHETIC
MAX_FAILED_SHARE = 0.05  # exit code 1 if a larger share of the samples failed


def main() -> int:
    switches = {
        "probe": "ask one question, show what the server sends and say whether it is ready for a run",
        "print-server-command": "print the command that starts a generation server for this config",
        "part=I/N": PART_HELP,
    }
    settings = load_settings(None, __doc__, ("target", "questions", "generate", "forecast"), switches)
    if settings.switches.print_server_command:
        return print_server_command(settings)
    node_share = parse_node_share(settings.switches.part)
    folder = stage_folder(settings.run_dir / STAGE, node_share)
    if settings.dry_run:
        return dry_run(settings, folder, node_share)
    protocol = load_protocol(settings.target)
    if settings.switches.probe:
        from common.generation.probe import probe

        return asyncio.run(probe(settings, protocol, make_engine(settings, protocol)))
    questions = QuestionStream(settings.questions)

    with stage_lock(folder.parent / f".{folder.name}"):
        fingerprint = settings.fingerprint() | input_fingerprint(settings.questions, protocol)
        manifest = open_stage(folder, STAGE, fingerprint, settings.as_dict(), settings.fresh)
        with RecordFolder(folder, manifest, protocol) as records:
            show_settings(settings, protocol, questions, records)
            pending = PendingConversations(questions, settings.generate, protocol, records, settings.n, node_share)

            async def generate() -> None:
                async with make_engine(settings, protocol) as engine:
                    say(f"  engine    {engine.model} · {engine.version} · {engine.concurrency} requests in flight")
                    manifest.complete = False
                    manifest.save(folder)
                    run = Generation(engine, protocol, settings.generate, pending, records)
                    await run.run(most_samples(settings, questions, node_share))

            counts = records.counts
            try:
                if pending.has_work():
                    asyncio.run(generate())
                manifest.complete = pending.finished and pending.numbered > 0 and not too_many_failed(settings, counts)
            finally:
                summary(folder, settings, counts)
    if not pending.numbered:
        raise UserError(f"no question of {settings.questions.dataset} can be asked: {listed(counts.skipped)}")
    if too_many_failed(settings, counts):
        raise TooManyFailures(
            f"{counts.failed} of {counts.planned} samples failed, see {folder / FAILURES}; rerun to ask for them again"
        )
    return 0


def print_server_command(settings: Settings) -> int:
    from urllib.parse import urlsplit

    from common.servers.commands import generation_command
    from common.servers.endpoints import api_roots

    port = urlsplit(api_roots(settings.generate.base_urls, "generate.base_urls")[0]).port or 8000
    say(generation_command(settings.target, port, settings.generate.context_tokens))
    return 0


def make_engine(settings: Settings, protocol: Protocol):
    if settings.generate.engine == "local":
        from common.generation.local_engine import LocalEngine

        return LocalEngine(settings.target, protocol, settings.generate.batch_size, settings.device)
    from common.generation.openai_engine import OpenAIServers

    return OpenAIServers(settings.generate, protocol)


def most_samples(settings: Settings, questions: QuestionStream, node_share: NodeShare) -> int | None:
    """The largest possible number of samples of this node share; None if only reading all rows can tell."""
    wanted = [] if settings.n is None else [settings.n]
    if questions.rows is not None and settings.questions.turns == "first":
        wanted.append(questions.rows * settings.generate.repeats)
    return -(-min(wanted) // node_share.count) if wanted else None


def show_settings(settings: Settings, protocol: Protocol, questions: QuestionStream, records: RecordFolder) -> None:
    g = settings.generate
    say(f"01b generate: {settings.questions.dataset} -> {records.folder}")
    rows = [
        ("target", settings.target.model),
        ("protocol", f"open {protocol.think_open}, close {protocol.think_close}, end {protocol.end}"),
        ("rows", f"{questions.rows:,}" if questions.rows is not None else "a stream"),
        ("samples", f"{settings.n or 'all'} wanted, {len(records)} stored already"),
        ("sampling", f"temperature {g.temperature:g}, top_p {g.top_p:g}, at most {g.max_tokens} tokens, seed {g.seed}"),
        ("thinking", "off" if not g.thinking else f"on, budget {g.thinking_budget or 'none'}"),
    ]
    if records.lines.torn_bytes:
        rows.append(("repaired", f"cut off a torn last line of {records.lines.torn_bytes} bytes"))
    table(rows)


def dry_run(settings: Settings, folder: Path, node_share: NodeShare) -> int:
    """Print how many samples are stored and how many are missing, and the forecast; sends no request."""
    go_offline()
    say(f"01b dry run: {settings.questions.dataset} -> {folder} (nothing is written)")
    local = Path(settings.questions.dataset).suffix and Path(settings.target.model).is_dir()
    try:
        protocol, questions = load_protocol(settings.target), QuestionStream(settings.questions)
    except UserError as error:
        if local or "no such file" in str(error):
            raise
        return show_forecast(settings, f"not counted, because it is not on this machine yet: {error}")
    g, paths = settings.generate, []
    if (folder / MANIFEST).exists() and not settings.fresh:
        fingerprint = settings.fingerprint() | input_fingerprint(settings.questions, protocol)
        check_fingerprint(folder, Manifest.load(folder, STAGE).fingerprint, fingerprint)
        paths = sorted(folder.glob("part-*.jsonl"))
    stored = StoredRecords(paths, protocol)
    pending = PendingConversations(questions, g, protocol, stored, settings.n, node_share)
    missing = sum(id not in stored for conversation in pending for id in conversation.ids)
    counts = stored.counts
    most = missing * g.max_tokens
    gib = most * JSONL_TOKEN_BYTES / 2**30
    likely, time = "", "no estimate before the first samples"
    if counts.done:
        at_once = g.batch_size if g.engine == "local" else g.concurrency
        likely = f"; about {missing * counts.output_tokens / counts.done:,.0f} at the mean length so far"
        time = f"about {missing * sum(counts.seconds) / counts.done / at_once / 60:.1f} min"
    table(
        [
            ("samples", f"{counts.planned} wanted, {counts.planned - missing} stored already, {missing} to generate"),
            ("skipped rows", listed(counts.skipped)),
            ("tokens", f"at most {most:,} ({g.max_tokens:,} a reply){likely}"),
            ("disk", f"at most {gib:.2f} GiB ({JSONL_TOKEN_BYTES} bytes a token of JSONL)"),
            ("time", time),
        ]
    )
    return show_forecast(settings)


def too_many_failed(settings: Settings, counts: Counts) -> bool:
    return counts.failed > MAX_FAILED_SHARE * counts.planned


def summary(folder: Path, settings: Settings, counts: Counts) -> None:
    say(f"01b: {counts.new} new samples, {counts.done} in all, in {folder}")
    rows = [("failed", str(counts.failed)), ("skipped", listed(counts.skipped))]
    if counts.done:
        rows += [
            ("output tokens", f"{counts.output_tokens:,}, mean {counts.output_tokens / counts.done:.0f}"),
            ("tokens per reply", percentiles(counts.lengths, "")),
            ("seconds per reply", percentiles(counts.seconds, ".1f")),
            ("finish reason", listed(counts.finish_reasons)),
            ("reasoning", f"{share(counts.with_reasoning, counts.done)}; field: {listed(counts.reasoning_fields)}"),
            ("never closed", f"the reasoning of {counts.open_reasoning} replies that ended by themselves"),
            ("tool calls", f"in {counts.tool_calls} samples, in {counts.tool_calls_in_reasoning} inside the reasoning"),
            ("token ids from", listed(counts.ids_from)),
            ("rebuilt ids", f"{share(counts.mismatched, counts.compared)} differ from the server's ids or count"),
        ]
    if counts.other_prompt:
        rows.append(("WARNING", f"{counts.other_prompt} prompts have other tokens on the server than by our template"))
    if settings.generate.thinking and settings.target.think_open and counts.silent_share > MAX_SILENT_SHARE:
        rows.append(("WARNING", f"{counts.silent_share:.0%} of the samples have no reasoning"))
    table(rows)


if __name__ == "__main__":
    guarded(main)
