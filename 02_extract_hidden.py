"""Stage 02: each sample's exact token stream, with the target's hidden states at every token.

    python 02_extract_hidden.py --config configs/kimi-k2.5.toml
    python 02_extract_hidden.py --config configs/demo.toml --extractor local

Reads RUN/01_synthetic; writes RUN/02_hidden/shard-*.safetensors of about 1 GiB: ids, loss mask, the residual stream at
the input of the aux layers, and the last state before the final norm. Every shard is checked against the target's own
choices as stored; a run whose states do not predict the target's own tokens stops. The same command resumes. Several
nodes: `--part 1/2` on one, `--part 2/2` on the other; 03 reads both as one.

    python 02_extract_hidden.py --window 500GB      beside 04_train.py --follow, where the disk cannot hold all states

Plans all shards first (02_hidden/plan), then makes them in rounds, and waits while the window is full: 04 deletes what
it has trained on (common/dataset/disk_budget.py).
"""

from pathlib import Path

from common.dataset.disk_budget import parse_size, released_shards, tokens_folder
from common.extraction.streams import StreamReader
from common.forecast.tables import go_offline, show_forecast, show_input_missing, stage_started
from common.pipeline.command_line import Settings, load_settings
from common.pipeline.console import say, table
from common.pipeline.errors import TooManyFailures, UserError, guarded
from common.pipeline.files import check_free_space
from common.pipeline.jsonl import JsonlParts
from common.pipeline.manifest import HIDDEN, MANIFEST, SYNTHETIC, Manifest, open_stage, stage_lock
from common.pipeline.node_share import HELP, load_stage, parse_part, stage_files, stage_folder
from common.target.protocol import load_protocol
from common.target.sizes import TargetSizes, check_same_target, read_sizes, target_digest
from common.target.tensors import read_tensors

STAGE, INPUT = HIDDEN, SYNTHETIC
MAX_FAILED_SHARE = 0.05  # exit 1 where more of the samples failed


def main() -> int:
    switches = {
        "verify": "re-read and check all shards; damaged ones are extracted again",
        "print-server-command": "print the command that starts an extraction server for this config",
        "part=I/N": HELP,
    }
    settings = load_settings(None, __doc__, ("target", "extract", "forecast"), switches)
    part, source = parse_part(settings.switches.part), settings.run_dir / INPUT
    folder = stage_folder(settings.run_dir / STAGE, part)
    if parse_size(settings.extract.window) and part.count > 1:
        raise UserError("--window and --part exclude each other: a window belongs to one extraction and one training")
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
    records = load_stage(source, INPUT)
    check_input(records, source)
    check_same_target(source, records.fingerprint["target.model"], settings.target)
    reader = StreamReader(
        source, load_protocol(settings.target), sizes.vocab_size, settings.extract.max_tokens_per_sample
    )
    places = [place for place in reader.places(settings.n) if part.holds(place.id)]
    if not places and (part.count == 1 or reader.rejected):
        raise UserError(f"{source} holds no usable record ({dict(reader.rejected) or 'it is empty'}); run 01b first")

    from common.dataset.shard_layout import ShardKind
    from common.dataset.shards import Shard
    from common.extraction.disk_budget import open_window, planned_lines, rounds_to_come
    from common.extraction.loop import Extraction, plan_shards
    from common.extraction.on_policy import OnPolicyCheck

    digest = target_digest(settings.target)
    kind = ShardKind(settings.target.model, digest, sizes.hidden_size, aux_layers, settings.extract.store_dtype)
    window_rows = planned_lines(folder, places, kind, settings) if settings.extract.window else []
    if settings.dry_run:
        there = {} if settings.fresh else known_samples(folder, Shard)
        check_replies(places, there, folder)
        show_plan(settings, sizes, kind, places, reader, there, window_rows)
        return show_forecast(settings)
    with stage_lock(folder.parent / f".{folder.name}"):
        fingerprint = records.fingerprint | settings.fingerprint()
        fingerprint |= {"aux_layers": list(aux_layers), "target_digest": kind.target_digest}
        manifest = open_stage(folder, STAGE, fingerprint, settings.as_dict(), settings.fresh)
        window = open_window(folder, reader, places, kind, settings, fingerprint) if settings.extract.window else None
        discard_damaged(manifest, folder, hashes=settings.switches.verify)
        there = known_samples(folder, Shard, manifest)
        check_replies(places, there, folder)
        show_plan(settings, sizes, kind, places, reader, there, window_rows)
        todo = [place for place in places if place.id not in there]
        needed = sum(place.tokens for place in todo) * kind.bytes_per_token()
        check_free_space(folder, window.still_needs(needed) if window else needed)

        tensors = read_tensors(settings.target, "norm", "lm_head")
        check = OnPolicyCheck(tensors["norm"], tensors["lm_head"], sizes.eps)
        failures = JsonlParts(folder, prefix="failures")
        noted = {failure["id"] for failure in failures.read()}
        for reject in reader.rejects:
            if reject["id"] not in noted:
                failures.append(reject)
        run = Extraction(folder, reader, None, kind, settings.extract, check, manifest, failures)
        if window:
            rounds = rounds_to_come(window, places, manifest)
        else:
            rounds = [plan_shards(todo, kind, settings.extract.shard_gib, next_index(manifest))] if todo else []
        for plans in rounds:
            with make_extractor(settings, aux_layers, sizes) as run.extractor:
                run.extractor.probe(next(reader.load(iter(plans[0].places))))
                say(f"  extractor: {run.extractor.description}")
                run.run(plans)
        return finish(settings, folder, manifest, run, reader, len(todo))


def make_extractor(settings: Settings, aux_layers: tuple[int, ...], sizes: TargetSizes):
    if settings.extract.extractor == "local":
        from common.extraction.local_extractor import LocalExtractor

        return LocalExtractor(settings.target, settings.extract, aux_layers, settings.device)
    from common.extraction.vllm_extractor import VllmExtractor

    return VllmExtractor(settings.target, settings.extract, aux_layers, sizes)


def print_server_command(settings: Settings, aux_layers: tuple[int, ...], layers: int) -> int:
    """The command for each extraction server, and what must be equal on both sides."""
    from urllib.parse import urlsplit

    from common.servers.commands import extraction_command
    from common.servers.endpoints import api_roots

    for url in api_roots(settings.extract.extract_urls, "extract.extract_urls"):
        say(extraction_command(settings.target, settings.extract, urlsplit(url).port or 80, aux_layers, layers))
    say("\n# Equal on both sides, and asserted at start-up: the layer ids (the inputs of the aux layers, and")
    say(f"# {layers} for the state behind the last); the spool folder {settings.extract.spool}, which both must see.")
    say("# The model: 02 warns when the server's has another name, and checks all states against this target's head.")
    return 0


def check_input(records: Manifest, source: Path) -> None:
    bad = records.verify(source)
    there = {path.relative_to(source).as_posix() for path in stage_files(source, "part-*.jsonl")}
    strays = there - records.files.keys()
    if strays:  # killed before it could name them, or still running
        raise UserError(f"{source}/{min(strays)} is in no manifest: 01b did not finish; rerun it")
    if bad:
        raise UserError(f"{source}/{bad[0]} is not what 01b wrote (size or SHA-256 differs); rerun 01b to repair it")


def discard_damaged(manifest: Manifest, folder: Path, hashes: bool) -> None:
    """Forget shards that are missing or damaged, so that their samples are extracted again; bytes are kept aside."""
    bad = manifest.verify(folder, hashes)
    for name in sorted(set(bad) - released_shards(folder)):  # read last: 04 notes what it releases, then deletes
        say(f"  {name} is damaged or missing: its samples are extracted again")
        if (folder / name).exists():
            (folder / name).rename(folder / f"{name}.damaged")
        del manifest.files[name]
    manifest.save(folder)


def known_samples(folder: Path, shard_class, manifest: Manifest | None = None) -> dict[str, int]:
    """By id, the checksum of each sample in finished shards; by a window's plan where there is one, as the shards may
    be gone."""
    if manifest is None and not (folder / MANIFEST).exists():
        return {}
    manifest, there = manifest or Manifest.load(folder, STAGE), {}
    for name in manifest.files:
        there |= shard_class(tokens_folder(folder) / name).checksums()
    return there


def check_replies(places: list, there: dict[str, int], folder: Path) -> None:
    """Raise UserError where shards hold states of other replies than the records do now."""
    other = [place.id for place in places if there.get(place.id, place.crc) != place.crc]
    if other:
        raise UserError(
            f"{folder}: the states of {len(other)} samples are of other replies than the records hold now, the first "
            f"is {other[0]}; after 01b --fresh, run 02 --fresh too"
        )


def next_index(manifest: Manifest) -> int:
    return 1 + max((int(name.split("-")[1].split(".")[0]) for name in manifest.files), default=-1)


def show_plan(
    settings: Settings, sizes: TargetSizes, kind, places, reader: StreamReader, there: dict[str, int], more: list
) -> None:
    tokens = sum(place.tokens for place in places)
    todo = sum(place.tokens for place in places if place.id not in there)
    say(f"02 extract: {settings.target.model} -> {settings.run_dir / STAGE}" + " (dry run)" * settings.dry_run)
    table(
        [
            (
                "layers",
                f"input of {', '.join(map(str, kind.aux_layers))} of {sizes.layers}, and the last before the norm",
            ),
            (
                "samples",
                f"{len(places)} with {tokens:,} tokens; {len(places) - sum(p.id in there for p in places)} to do",
            ),
            (
                "cut or dropped",
                f"{reader.cut} cut at {reader.max_tokens} tokens; dropped: {dict(reader.rejected) or 'none'}",
            ),
            (
                "disk",
                f"{kind.bytes_per_token():,} bytes a token, {todo * kind.bytes_per_token() / 2**30:.2f} GiB to write",
            ),
            *more,
        ]
    )


def finish(settings: Settings, folder: Path, manifest: Manifest, run, reader: StreamReader, asked: int) -> int:
    sequences = sum(facts["sequences"] for facts in manifest.files.values())
    tokens = sum(facts["tokens"] for facts in manifest.files.values())
    on_policy = run.check.total
    manifest.counts |= {
        "sequences": sequences,
        "tokens": tokens,
        "failed": run.failed,
        "dropped": dict(reader.rejected),
    }
    if on_policy.positions:
        manifest.counts["nll"] = on_policy.nll / on_policy.positions
        manifest.counts["top1"] = on_policy.top1 / on_policy.positions
    manifest.complete = run.failed == 0 or bool(settings.extract.window)  # a plan's shard is made once
    manifest.save(folder)
    size = sum(facts["bytes"] for facts in manifest.files.values())
    say(f"02 done: {sequences} sequences, {tokens:,} tokens, {len(manifest.files)} shards, {size / 2**30:.2f} GiB")
    table([("on policy", on_policy.line()), ("failed", str(run.failed))])
    if run.failed > MAX_FAILED_SHARE * max(asked, 1):
        retry = "" if settings.extract.window else "; rerun to retry"
        raise TooManyFailures(f"{run.failed} of {asked} sequences failed, see {folder}/failures-00000.jsonl{retry}")
    if asked and not manifest.files:
        raise UserError(f"no sequence of {settings.run_dir / INPUT} could be extracted")
    return 0


if __name__ == "__main__":
    guarded(main)
