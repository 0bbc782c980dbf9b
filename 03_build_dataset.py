"""Stage 03: shards become a training set: index, split, draft vocabulary, the target's head.

    python 03_build_dataset.py --config configs/kimi-k2.5.toml
    python 03_build_dataset.py --config configs/demo.toml --draft-vocab-size 4096

Reads RUN/02_hidden; writes RUN/03_dataset. No state is copied: the index says where each sequence lies. With
02 --window, the schedule is read instead of the shards, so that 03 can run as soon as 02 has written it.
"""

from pathlib import Path

from common.dataset.disk_budget import check_split, tokens_folder
from common.forecast.tables import go_offline, show_forecast, show_input_missing, stage_started
from common.pipeline.command_line import Settings, load_settings
from common.pipeline.console import Progress, say, table
from common.pipeline.errors import UserError, guarded
from common.pipeline.files import atomic_path, digest, write_json
from common.pipeline.manifest import DATASET, HIDDEN, MANIFEST, Manifest, open_stage, stage_lock
from common.pipeline.node_share import load_stage
from common.target.protocol import Protocol, load_protocol
from common.target.sizes import TargetSizes, check_same_target, read_sizes
from common.target.tensors import read_tensors

INDEX, VOCABULARY, HEAD, TARGET = "index.safetensors", "vocab.safetensors", "target_head.safetensors", "target.json"
FILES = (INDEX, VOCABULARY, HEAD, TARGET)


def main() -> int:
    switches = {"inspect=ID": "print a sample with its loss mask, and build nothing"}
    settings = load_settings(None, __doc__, ("target", "dataset", "forecast"), switches)
    folder, source = settings.run_dir / DATASET, tokens_folder(settings.run_dir / HIDDEN)
    if settings.dry_run:
        go_offline()
        if not stage_started(source):
            return show_input_missing(settings, "03", source)
    shards = load_stage(source, HIDDEN)
    check_split(shards, settings.dataset)
    damaged = shards.verify(source, hashes=False)
    if damaged or not shards.files:
        raise UserError(f"{source}: {f'{damaged[0]} is damaged or missing' if damaged else 'no shards'}; rerun 02")
    check_same_target(source, shards.fingerprint["target.model"], settings.target)
    protocol = load_protocol(settings.target)
    if settings.switches.inspect:
        return inspect(settings.switches.inspect, shards, source, protocol)
    sizes = read_sizes(settings.target, settings.shipped_config)
    say(f"03 build: {source} -> {folder}" + " (dry run)" * settings.dry_run)
    if settings.dry_run:
        tokens = sum(facts["tokens"] for facts in shards.files.values())
        table([("input", f"{len(shards.files)} shards, {tokens:,} tokens"), ("writes", ", ".join(FILES))])
        return show_forecast(settings)

    import torch
    from safetensors.torch import save_file

    from common.dataset.draft_vocabulary import choose_tokens, coverage, coverage_table, mappings
    from common.dataset.index import HELD_OUT, TRAIN, IndexBuilder
    from common.dataset.shards import Shard

    builder = IndexBuilder(settings.dataset, sizes.vocab_size)
    with Progress("index", len(shards.files), "shards") as progress:
        for name in sorted(shards.files):
            builder.add(name, Shard(source / name))
            progress.update()
    index = builder.build()
    train, held_out = index.rows(TRAIN), index.rows(HELD_OUT)
    if not train:
        raise UserError(
            f"no sample of {source} is left to train on; dropped: {dict(builder.dropped)}, held out: {len(held_out)}"
        )
    always = required_tokens(protocol, settings.dataset.draft_vocab_size)
    vocabulary = choose_tokens(builder.counts, settings.dataset.draft_vocab_size, always)
    d2t, t2d = mappings(vocabulary, sizes.vocab_size)

    with stage_lock(folder.parent / f".{DATASET}"):
        fingerprint = shards.fingerprint | settings.fingerprint()
        fingerprint["shards"] = digest({name: facts["sha256"] for name, facts in shards.files.items()})
        manifest = rebuild(folder, fingerprint, settings)
        index.save(folder / INDEX)
        with atomic_path(folder / VOCABULARY) as temporary:
            save_file({"d2t": d2t, "t2d": t2d, "counts": builder.counts}, temporary)
        with atomic_path(folder / HEAD) as temporary:
            tensors = read_tensors(settings.target, "norm", "lm_head", "embedding")
            save_file({name: tensor.to(torch.bfloat16).clone() for name, tensor in tensors.items()}, temporary)
        write_json(folder / TARGET, target_facts(sizes, shards.fingerprint["aux_layers"], protocol))
        for name in FILES:
            manifest.add_file(folder, name)
        manifest.counts = {
            "train": len(train),
            "held_out": len(held_out),
            "train_tokens": int(index.length[train].sum()),
            "held_out_tokens": int(index.length[held_out].sum()),
            "supervised": int(index.supervised[train].sum()),
            "dropped": dict(builder.dropped),
            "draft_vocab_size": len(vocabulary),
            "coverage": coverage(builder.counts, vocabulary),
        }
        manifest.complete = True
        manifest.save(folder)

    counts = manifest.counts
    say(f"03 done: {folder}")
    coverages = [f"{size:,}: {share:.2%}" for size, share in coverage_table(builder.counts, always)]
    table(
        [
            ("samples", f"{len(train)} train, {len(held_out)} held out; dropped: {counts['dropped'] or 'none'}"),
            ("tokens", f"{counts['train_tokens']:,} train, {counts['supervised']:,} written by the target"),
            ("longest", f"{int(index.length.max()):,} tokens; train.pack_tokens of 04 must be at least that"),
            ("vocabulary", f"{len(vocabulary):,} of {sizes.vocab_size:,} tokens, {counts['coverage']:.2%} of replies"),
            ("coverage", "  ".join(coverages)),
        ]
    )
    if not held_out:
        say("  note: no sample is held out, so acceptance cannot be measured; raise dataset.holdout_share")
    return 0


def inspect(id: str, shards: Manifest, source: Path, protocol: Protocol) -> int:
    """Show the sample whose id begins with `id`."""
    from common.dataset.shards import Shard
    from common.target.sample_view import show_sample

    for name in sorted(shards.files):
        shard = Shard(source / name)
        for number, facts in enumerate(shard.facts):
            if facts["id"].startswith(id):
                span = shard.offsets[number], shard.offsets[number + 1]
                show_sample(facts["id"], shard.read("input_ids", *span), shard.read("loss_mask", *span), protocol)
                return 0
    raise UserError(f"no sample {id!r} in {source}; the records of RUN/01_synthetic/part-*.jsonl name all ids")


def required_tokens(protocol: Protocol, size: int) -> list[int]:
    """Tokens that a draft vocabulary of this size always holds: control tokens and, if they fit, all single bytes."""
    from common.dataset.draft_vocabulary import byte_tokens

    tools = {id for name, id in protocol.added.items() if "tool_call" in name}
    control = tools | {id for id in (protocol.think_open, protocol.think_close, protocol.end) if id is not None}
    with_bytes = control | set(byte_tokens(protocol.tokenizer))
    if 0 < size < len(with_bytes):
        say(f"  note: a draft vocabulary below {len(with_bytes)} cannot hold every single byte; the frequent ones stay")
        return sorted(control)
    return sorted(with_bytes)


def target_facts(sizes: TargetSizes, aux_layers: list[int], protocol: Protocol) -> dict:
    """What 04 must know about the target: its text config, the norm's epsilon, the aux layers, three token ids."""
    ids = {"think_open": protocol.think_open, "think_close": protocol.think_close, "end": protocol.end}
    return {"text": sizes.text, "eps": sizes.eps, "aux_layers": aux_layers, "protocol": ids}


def rebuild(folder: Path, fingerprint: dict, settings: Settings) -> Manifest:
    """Start the stage. 03 takes seconds: under other settings it is rebuilt, the old manifest deleted first."""
    if (folder / MANIFEST).exists() and Manifest.load(folder, DATASET).fingerprint != fingerprint:
        (folder / MANIFEST).unlink()
    return open_stage(folder, DATASET, fingerprint, settings.as_dict(), settings.fresh)


if __name__ == "__main__":
    guarded(main)
