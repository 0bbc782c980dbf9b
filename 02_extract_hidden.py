"""Stage 02: each sample's exact token stream, with the target's hidden states at every token.

    python 02_extract_hidden.py --config configs/kimi-k2.5.toml
    python 02_extract_hidden.py --config configs/demo.toml --extractor local

Reads RUN/01_synthetic; writes RUN/02_hidden/shard-*.safetensors of about 1 GiB: ids, loss mask, the residual stream at
the input of the aux layers, and the last state before the final norm. Every stored shard is checked: its states must
predict the tokens that the target wrote, or the run stops. The same command resumes. To split the work over two nodes,
run `--part 1/2` on one and `--part 2/2` on the other; 03 reads both as one.

    python 02_extract_hidden.py --window 500GB      beside 04_train.py --follow, where the disk cannot hold all states

Writes the schedule of all shards first (02_hidden/plan), then extracts round by round, and waits while the disk budget
is used up: 04 deletes the shards that it has trained on (common/dataset/disk_budget.py).
"""

from pathlib import Path
from urllib.parse import urlsplit

from common.dataset.disk_budget import find_disk_budget, parse_size, tokens_folder
from common.dataset.shard_layout import ShardKind
from common.extraction.streams import RecordLocation, StreamReader
from common.forecast.tables import go_offline, show_forecast, show_input_missing, stage_started
from common.pipeline.command_line import Settings, load_settings
from common.pipeline.console import say, table
from common.pipeline.errors import TooManyFailures, UserError, guarded
from common.pipeline.files import check_free_space
from common.pipeline.jsonl import JsonlParts
from common.pipeline.manifest import HIDDEN, MANIFEST, SYNTHETIC, Manifest, open_stage, stage_lock
from common.pipeline.node_share import PART_HELP, load_stage, parse_node_share, stage_files, stage_folder
from common.servers.commands import extraction_command
from common.servers.endpoints import api_roots
from common.target.protocol import load_protocol
from common.target.sizes import TargetSizes, check_same_target, read_sizes, target_digest
from common.target.tensors import read_tensors

MAX_FAILED_SHARE = 0.05  # exit 1 where more of the samples failed
SWITCHES = {
    "verify": "re-read and check all shards; damaged ones are extracted again",
    "print-server-command": "print the command that starts an extraction server for this config",
    "part=I/N": PART_HELP,
}


def main() -> int:
    settings = load_settings(None, __doc__, ("target", "extract", "forecast"), SWITCHES)
    share, source = parse_node_share(settings.switches.part), settings.run_dir / SYNTHETIC
    folder = stage_folder(settings.run_dir / HIDDEN, share)
    if parse_size(settings.extract.window) and share.count > 1:
        raise UserError("--window and --part exclude each other: a disk budget is shared by one extraction and one 04")
    if settings.dry_run:
        go_offline()
        if not stage_started(source):
            return show_input_missing(settings, "02", source)
    if settings.switches.print_server_command and settings.shipped_config:
        go_offline()  # a command to copy needs no checkpoint
    sizes = read_sizes(settings.target, settings.shipped_config)
    aux_layers = sizes.aux_layers(settings.extract.aux_layers)
    if settings.switches.print_server_command:
        return print_server_command(settings, aux_layers, sizes.layers)

    records = load_stage(source, SYNTHETIC)
    check_records(records, source)
    check_same_target(source, records.fingerprint["target.model"], settings.target)
    protocol = load_protocol(settings.target)
    reader = StreamReader(source, protocol, sizes.vocab_size, settings.extract.max_tokens_per_sample)
    samples = [location for location in reader.locate(settings.n) if share.holds(location.id)]
    if not samples and (share.count == 1 or reader.dropped):
        raise UserError(f"{source} holds no usable record ({reader.drop_counts() or 'it is empty'}); run 01b first")
    digest = target_digest(settings.target)
    kind = ShardKind(settings.target.model, digest, sizes.hidden_size, aux_layers, settings.extract.store_dtype)

    from common.extraction.disk_budget import open_disk_budget, pending_rounds, schedule_rows
    from common.extraction.loop import Extraction, assign_shards
    from common.extraction.on_policy import OnPolicyCheck

    rows = schedule_rows(folder, samples, kind, settings) if settings.extract.window else []
    if settings.dry_run:
        pending = samples if settings.fresh else without_states(folder, samples)
        show_samples(settings, sizes, kind, reader, samples, pending, rows)
        return show_forecast(settings)
    with stage_lock(folder.parent / f".{folder.name}"):
        fingerprint = records.fingerprint | settings.fingerprint()
        fingerprint |= {"aux_layers": list(aux_layers), "target_digest": digest}
        manifest = open_stage(folder, HIDDEN, fingerprint, settings.as_dict(), settings.fresh)
        budget = None
        if settings.extract.window:
            budget = open_disk_budget(folder, reader, samples, kind, settings, fingerprint)
        forget_damaged(manifest, folder, hashes=settings.switches.verify)
        pending = without_states(folder, samples)
        show_samples(settings, sizes, kind, reader, samples, pending, rows)
        needed = sum(sample.tokens for sample in pending) * kind.bytes_per_token()
        check_free_space(folder, budget.free_bytes_needed(needed) if budget else needed)
        if budget:
            rounds = pending_rounds(budget, samples, manifest)
        else:
            rounds = [assign_shards(pending, kind, settings.extract.shard_gib, next_index(manifest))] if pending else []

        failures = note_dropped(folder, reader)
        tensors = read_tensors(settings.target, "norm", "lm_head")
        check = OnPolicyCheck(tensors["norm"], tensors["lm_head"], sizes.eps)
        extraction = Extraction(folder, reader, kind, check, manifest, failures, keep_empty=budget is not None)
        for shards in rounds:
            with make_extractor(settings, aux_layers, sizes) as extractor:
                extractor.probe(next(reader.load(shards[0].locations)))
                say(f"  extractor: {extractor.description}")
                extraction.run(extractor, shards)
        return finish(settings, folder, manifest, extraction, reader, len(pending))


def make_extractor(settings: Settings, aux_layers: tuple[int, ...], sizes: TargetSizes):
    if settings.extract.extractor == "local":
        from common.extraction.local_extractor import LocalExtractor

        return LocalExtractor(settings.target, settings.extract, aux_layers, settings.device)
    from common.extraction.vllm_extractor import VllmExtractor

    return VllmExtractor(settings.target, settings.extract, aux_layers, sizes)


def print_server_command(settings: Settings, aux_layers: tuple[int, ...], layers: int) -> int:
    """The command for each extraction server, and what must be equal on both sides."""
    for url in api_roots(settings.extract.extract_urls, "extract.extract_urls"):
        say(extraction_command(settings.target, settings.extract, urlsplit(url).port or 80, aux_layers, layers))
    say("\n# Equal on both sides, and checked at start-up: the layer ids (the inputs of the aux layers, and")
    say(f"# {layers} for the state behind the last); the spool folder {settings.extract.spool}, which both must see.")
    say("# The model: 02 warns when the server's has another name, and checks all states against this target's head.")
    return 0


def check_records(records: Manifest, source: Path) -> None:
    """Raise UserError where the records are not exactly the files that 01b entered in its manifest."""
    damaged = records.verify(source)
    stored = {path.relative_to(source).as_posix() for path in stage_files(source, "part-*.jsonl")}
    if unnamed := stored - records.files.keys():  # 01b was killed before it could enter them, or is still running
        raise UserError(f"{source}/{min(unnamed)} is in no manifest: 01b did not finish; rerun it")
    if damaged:
        raise UserError(f"{source}/{damaged[0]} differs from what 01b wrote (size or SHA-256); rerun 01b to repair it")


def forget_damaged(manifest: Manifest, folder: Path, hashes: bool) -> None:
    """Forget shards that are missing or damaged, so that their samples are extracted again; the files are kept."""
    damaged, budget = set(manifest.verify(folder, hashes)), find_disk_budget(folder)
    released = budget.released_shards() if budget else set()  # read last: 04 notes what it releases, then deletes it
    for name in sorted(damaged - released):
        say(f"  {name} is damaged or missing: its samples are extracted again")
        if (folder / name).exists():
            (folder / name).rename(folder / f"{name}.damaged")
        del manifest.files[name]
    manifest.save(folder)


def without_states(folder: Path, samples: list[RecordLocation]) -> list[RecordLocation]:
    """The samples that no finished shard holds; raises UserError where shards hold states of other replies."""
    from common.dataset.shards import Shard

    names = Manifest.load(folder, HIDDEN).files if (folder / MANIFEST).exists() else ()
    checksums: dict[str, int] = {}
    for name in names:  # under a disk budget the schedule has the tokens: the shards may be deleted
        checksums |= Shard(tokens_folder(folder) / name).checksums()
    changed = [sample.id for sample in samples if checksums.get(sample.id, sample.crc) != sample.crc]
    if changed:
        raise UserError(
            f"{folder}: {len(changed)} samples changed since their states were extracted, the first is {changed[0]}: "
            "their records have other replies now. After 01b --fresh, run 02 --fresh too"
        )
    return [sample for sample in samples if sample.id not in checksums]


def next_index(manifest: Manifest) -> int:
    return 1 + max((int(name.split("-")[1].split(".")[0]) for name in manifest.files), default=-1)


def note_dropped(folder: Path, reader: StreamReader) -> JsonlParts:
    """The list of failures in the stage's folder, with every dropped record noted once over all runs."""
    failures = JsonlParts(folder, prefix="failures")
    noted = {failure["id"] for failure in failures.read()}
    for drop in reader.dropped:
        if drop["id"] not in noted:
            failures.append(drop)
    return failures


def show_samples(
    settings: Settings,
    sizes: TargetSizes,
    kind: ShardKind,
    reader: StreamReader,
    samples: list[RecordLocation],
    pending: list[RecordLocation],
    more: list[tuple[str, str]],
) -> None:
    tokens, pending_tokens = (sum(sample.tokens for sample in group) for group in (samples, pending))
    inputs, size = ", ".join(map(str, kind.aux_layers)), kind.bytes_per_token()
    say(f"02 extract: {settings.target.model} -> {settings.run_dir / HIDDEN}" + " (dry run)" * settings.dry_run)
    table(
        [
            ("layers", f"input of {inputs} of {sizes.layers}, and the last before the norm"),
            ("samples", f"{len(samples)} with {tokens:,} tokens; {len(pending)} to do"),
            ("cut", f"{reader.cut} at {reader.max_tokens} tokens"),
            ("dropped", str(reader.drop_counts() or "none")),
            ("disk", f"{size:,} bytes a token, {pending_tokens * size / 2**30:.2f} GiB to write"),
            *more,
        ]
    )


def finish(settings: Settings, folder: Path, manifest: Manifest, extraction, reader: StreamReader, asked: int) -> int:
    total = {key: sum(f[key] for f in manifest.files.values()) for key in ("sequences", "tokens", "bytes")}
    on_policy, failed, budget = extraction.check.total, extraction.failed, bool(settings.extract.window)
    manifest.counts |= {"sequences": total["sequences"], "tokens": total["tokens"], "failed": failed}
    manifest.counts["dropped"] = reader.drop_counts()
    if on_policy.positions:
        manifest.counts["nll"] = on_policy.nll / on_policy.positions
        manifest.counts["top1"] = on_policy.top1 / on_policy.positions
    manifest.complete = failed == 0 or budget  # under a disk budget each shard is written once, without retries
    manifest.save(folder)
    written = f"{len(manifest.files)} shards, {total['bytes'] / 2**30:.2f} GiB"
    say(f"02 done: {total['sequences']} sequences, {total['tokens']:,} tokens, {written}")
    table([("on policy", on_policy.line()), ("failed", str(failed))])
    if failed > MAX_FAILED_SHARE * max(asked, 1):
        retry = "" if budget else "; rerun to retry"
        raise TooManyFailures(f"{failed} of {asked} sequences failed, see {folder}/failures-00000.jsonl{retry}")
    if asked and not manifest.files:
        raise UserError(f"no sequence of {settings.run_dir / SYNTHETIC} could be extracted")
    return 0


if __name__ == "__main__":
    guarded(main)
