"""Stage 03: shards become a training set: index, split, draft vocabulary, the target's head.

    python 03_build_dataset.py --config configs/kimi-k2.5.toml
    python 03_build_dataset.py --config configs/demo.toml --draft-vocab-size 4096

Reads RUN/02_hidden; writes RUN/03_dataset. No state is copied: the index says where each sequence lies. Of a run with
02 --window the plan is read, so that 03 can run as soon as 02 has begun.
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
from common.target.sizes import check_same_target, read_sizes
from common.target.tensors import read_tensors

STAGE, INPUT = DATASET, HIDDEN


def main() -> int:
    switches = {"inspect=ID": "print a sample with its loss mask, and build nothing"}
    settings = load_settings(None, __doc__, ("target", "dataset", "forecast"), switches)
    folder, source = settings.run_dir / STAGE, tokens_folder(settings.run_dir / INPUT)
    if settings.dry_run:
        go_offline()
        if not stage_started(source):
            return show_input_missing(settings, "03", source)
    shards = load_stage(source, INPUT)
    check_split(shards, settings.dataset)
    bad = shards.verify(source, hashes=False)
    if bad or not shards.files:
        raise UserError(f"{source}: {f'{bad[0]} is damaged or missing' if bad else 'no shards'}; rerun 02")
    check_same_target(source, shards.fingerprint["target.model"], settings.target)
    protocol = load_protocol(settings.target)
    if settings.switches.inspect:
        return inspect(settings.switches.inspect, shards, source, protocol)
    sizes = read_sizes(settings.target, settings.shipped_config)

    import torch
    from safetensors.torch import save_file

    from common.dataset.draft_vocabulary import byte_tokens, choose_tokens, coverage, coverage_table, mappings
    from common.dataset.index import HELD_OUT, TRAIN, IndexBuilder
    from common.dataset.shards import Shard

    say(f"03 build: {source} -> {folder}" + " (dry run)" * settings.dry_run)
    if settings.dry_run:
        tokens = sum(facts["tokens"] for facts in shards.files.values())
        table(
            [
                ("input", f"{len(shards.files)} shards, {tokens:,} tokens"),
                ("writes", "index, vocabulary, head; no states"),
            ]
        )
        return show_forecast(settings)

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

    always = protocol_tokens(protocol)
    with_bytes = sorted({*always, *byte_tokens(protocol.tokenizer)})
    if settings.dataset.draft_vocab_size == 0 or settings.dataset.draft_vocab_size >= len(with_bytes):
        always = with_bytes
    else:
        say(f"  note: a draft vocabulary below {len(with_bytes)} cannot hold every single byte; the frequent ones stay")
    kept = choose_tokens(builder.counts, settings.dataset.draft_vocab_size, always)
    d2t, t2d = mappings(kept, sizes.vocab_size)
    with stage_lock(folder.parent / f".{STAGE}"):
        fingerprint = shards.fingerprint | settings.fingerprint()
        fingerprint["shards"] = digest({name: facts["sha256"] for name, facts in shards.files.items()})
        manifest = rebuild(folder, fingerprint, settings)
        index.save(folder / "index.safetensors")
        with atomic_path(folder / "vocab.safetensors") as temporary:
            save_file({"d2t": d2t, "t2d": t2d, "counts": builder.counts}, temporary)
        with atomic_path(folder / "target_head.safetensors") as temporary:
            tensors = read_tensors(settings.target, "norm", "lm_head", "embedding")
            save_file({name: tensor.to(torch.bfloat16).clone() for name, tensor in tensors.items()}, temporary)
        aux_layers = shards.fingerprint["aux_layers"]
        ids = {"think_open": protocol.think_open, "think_close": protocol.think_close, "end": protocol.end}
        facts = {"text": sizes.text, "eps": sizes.eps, "aux_layers": aux_layers, "protocol": ids}
        write_json(folder / "target.json", facts)
        for name in ("index.safetensors", "vocab.safetensors", "target_head.safetensors", "target.json"):
            manifest.add_file(folder, name)
        manifest.counts = {
            "train": len(train),
            "held_out": len(held_out),
            "train_tokens": int(index.length[train].sum()),
            "held_out_tokens": int(index.length[held_out].sum()),
            "supervised": int(index.supervised[train].sum()),
            "dropped": dict(builder.dropped),
            "draft_vocab_size": len(kept),
            "coverage": coverage(builder.counts, kept),
        }
        manifest.complete = True
        manifest.save(folder)

    say(f"03 done: {folder}")
    sizes_line = "  ".join(f"{size:,}: {share:.2%}" for size, share in coverage_table(builder.counts, always))
    table(
        [
            ("samples", f"{len(train)} train, {len(held_out)} held out; dropped: {dict(builder.dropped) or 'none'}"),
            (
                "tokens",
                f"{manifest.counts['train_tokens']:,} train, {manifest.counts['supervised']:,} written by the target",
            ),
            ("longest", f"{int(index.length.max()):,} tokens; train.pack_tokens of 04 must be at least that"),
            (
                "vocabulary",
                f"{len(kept):,} of {sizes.vocab_size:,} tokens, {manifest.counts['coverage']:.2%} of what it wrote",
            ),
            ("coverage", sizes_line),
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
                ids, mask = shard.read("input_ids", *span), shard.read("loss_mask", *span)
                show_sample(facts["id"], ids, mask, protocol)
                return 0
    raise UserError(f"no sample {id!r} in {source}; ids stand in RUN/01_synthetic/part-*.jsonl")


def rebuild(folder, fingerprint: dict, settings: Settings) -> Manifest:
    """03 takes seconds: other settings simply make it again, with the old manifest gone before the first new file."""
    if (folder / MANIFEST).exists() and Manifest.load(folder, STAGE).fingerprint != fingerprint:
        (folder / MANIFEST).unlink()
    return open_stage(folder, STAGE, fingerprint, settings.as_dict(), settings.fresh)


def protocol_tokens(protocol: Protocol) -> list[int]:
    """Tokens that every draft vocabulary holds: the protocol's own and the tool markers among the added tokens."""
    tools = [id for name, id in protocol.added.items() if "tool_call" in name]
    return sorted(
        {id for id in (protocol.think_open, protocol.think_close, protocol.end) if id is not None} | set(tools)
    )


if __name__ == "__main__":
    guarded(main)
