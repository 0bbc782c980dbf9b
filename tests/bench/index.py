"""How long stage 03 takes to index many sequences, and how much memory: made-up shards with tiny states.

    python tests/bench/index.py                     1,000,000 sequences; aims: at most 120 s and 1 GB
    python tests/bench/index.py --sequences 100000

The last line is for scripts: sequences= index_s= plan_s= peak_gb=
"""

import argparse
import hashlib
import resource
import tempfile
import time
from array import array
from pathlib import Path

import repository  # noqa: F401
import torch

from common.dataset.draft_vocabulary import choose_tokens, coverage_table
from common.dataset.index import HELD_OUT, TRAIN, Index, IndexBuilder
from common.dataset.packs import Packs
from common.dataset.shard_layout import ShardKind
from common.dataset.shards import Shard, ShardWriter, States
from common.dataset.stream import Stream
from common.pipeline.settings import Dataset

VOCAB = 163_840  # Kimi's
KIND = ShardKind("made up", "none", 1, (1,))


def write_shard(path: Path, first: int, count: int) -> None:
    """Sequences of 16 to 79 tokens; the same for every run."""
    streams = []
    for number in range(first, first + count):
        tokens = 16 + number * 7919 % 64
        ids = array("i", [(number * 31 + at * at) % VOCAB for at in range(tokens)])
        question = hashlib.sha256(str(number).encode()).hexdigest()[:16]
        facts = {"question": question, "source": f"set {number % 7}", "finish": "stop", "reasoning": tokens // 2}
        facts |= {"temperature": 1.0, "ids_from": "server", "forced": False}
        streams.append(Stream(f"{question}{number:08x}", ids, array("B", [at > 5 for at in range(tokens)]), facts))
    writer = ShardWriter(path, streams, KIND)
    states = torch.zeros(80, 1, dtype=torch.bfloat16)
    for stream in streams:
        writer.write(stream.id, States(states[: len(stream)], states[: len(stream)]))
    writer.finish()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=1_000_000, help="in all (default %(default)s)")
    parser.add_argument("--shard-sequences", type=int, default=10_000, help="in a shard (default %(default)s)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root, started = Path(folder), time.perf_counter()
        names = []
        for first in range(0, arguments.sequences, arguments.shard_sequences):
            names.append(f"shard-{len(names):05d}.safetensors")
            write_shard(root / names[-1], first, min(arguments.shard_sequences, arguments.sequences - first))
        print(f"made up {len(names)} shards in {time.perf_counter() - started:.0f} s")

        started = time.perf_counter()
        settings = Dataset()
        builder = IndexBuilder(settings, VOCAB)
        for name in names:
            builder.add(name, Shard(root / name))
        index = builder.build()
        index.save(root / "index.safetensors")
        kept = choose_tokens(builder.counts, settings.draft_vocab_size, list(range(256)))
        table = coverage_table(builder.counts, list(range(256)))
        index_s, started = time.perf_counter() - started, time.perf_counter()
        index = Index.load(root / "index.safetensors")
        packs = Packs(root, index, settings.sample_tokens)
        plans = [packs.pack_split(TRAIN, 0), packs.pack_split(HELD_OUT, None)]
        plan_s = time.perf_counter() - started
    assert sum(len(pack) for plan in plans for pack in plan) == arguments.sequences
    assert len(kept) == settings.draft_vocab_size and len(table) == 5
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    print(f"sequences={arguments.sequences} index_s={index_s:.1f} plan_s={plan_s:.1f} peak_gb={peak:.2f}")


if __name__ == "__main__":
    main()
