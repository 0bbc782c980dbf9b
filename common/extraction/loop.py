"""The loop of stage 02: streams to an extractor, states checked, shards filled in any order, each finished by itself.

Streams are assigned to shards by their order in the records, so that a rerun assigns them alike. Several shards are
open at once when the extractor answers out of order. As soon as a shard's last sequence is written it is synced,
hashed, checked against the target's own tokens and entered in the manifest.
"""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path

import torch

from common.dataset.shard_layout import ShardKind
from common.dataset.shards import Shard, ShardWriter, States
from common.dataset.stream import Stream
from common.extraction.extractor import ExtractError, Extractor
from common.extraction.on_policy import OnPolicyCheck
from common.extraction.streams import RecordLocation, StreamReader
from common.pipeline.console import Progress
from common.pipeline.jsonl import JsonlParts
from common.pipeline.manifest import Manifest


@dataclass(frozen=True)
class PendingShard:
    """A shard that is still to be written: its file name and the records of its streams."""

    name: str
    locations: list[RecordLocation]


def assign_shards(
    locations: list[RecordLocation], kind: ShardKind, shard_gib: float, first_index: int
) -> list[PendingShard]:
    """Consecutive streams go into shards of about `shard_gib`, numbered from `first_index`."""
    limit = max(1, int(shard_gib * 2**30 / kind.bytes_per_token()))
    shards: list[PendingShard] = []
    tokens = limit
    for location in locations:
        if tokens + location.tokens > limit:
            shards.append(PendingShard(f"shard-{first_index + len(shards):05d}.safetensors", []))
            tokens = 0
        shards[-1].locations.append(location)
        tokens += location.tokens
    return shards


class Extraction:
    """Fills shards of stage 02 and enters them in its manifest. `failed` counts sequences without usable states.

    keep_empty: write a shard even if all of its sequences failed, because 04 waits for every shard of a schedule.
    """

    def __init__(
        self,
        folder: Path,
        reader: StreamReader,
        kind: ShardKind,
        check: OnPolicyCheck,
        manifest: Manifest,
        failures: JsonlParts,
        keep_empty: bool = False,
    ):
        self.folder, self.reader, self.kind, self.check = folder, reader, kind, check
        self.manifest, self.failures, self.keep_empty = manifest, failures, keep_empty
        self.open: dict[str, ShardWriter] = {}  # sample id -> its shard's writer
        self.finishing: list[Future] = []
        self.failed = 0

    def run(self, extractor: Extractor, shards: list[PendingShard]) -> None:
        """Fill these shards; raises SafetyStop when a finished shard is not on policy."""
        tokens = sum(location.tokens for shard in shards for location in shard.locations)
        # One thread syncs, hashes and checks while the next shard is computed; more would only queue at the disk.
        with ThreadPoolExecutor(1) as pool, Progress("extract", tokens, "tokens") as progress:
            try:
                for stream, states in extractor.states(self._streams(shards)):
                    problem = str(states) if isinstance(states, ExtractError) else find_fault(stream, states, self.kind)
                    self._store(pool, stream, states, problem)
                    progress.update(len(stream), shards=len(self.manifest.files), failed=self.failed)
                self._raise_errors(wait=True)
            finally:
                for writer in set(self.open.values()):
                    writer.abandon()
                self.failures.close()

    def _streams(self, shards: list[PendingShard]) -> Iterator[Stream]:
        """Streams in the order of the shards; a shard's writer opens when its first stream is drawn."""
        loaded = self.reader.load(chain.from_iterable(shard.locations for shard in shards))
        for shard in shards:
            streams = list(islice(loaded, len(shard.locations)))
            writer = ShardWriter(self.folder / shard.name, streams, self.kind)
            self.open.update({stream.id: writer for stream in streams})
            yield from streams

    def _store(
        self, pool: ThreadPoolExecutor, stream: Stream, states: States | ExtractError, problem: str | None
    ) -> None:
        writer = self.open.pop(stream.id)
        if problem:
            self.failed += 1
            self.failures.append({"id": stream.id, "reason": problem})
            writer.drop(stream.id)
        else:
            writer.write(stream.id, states)
        if writer.complete():
            self.finishing.append(pool.submit(self._finish, writer))
            self._raise_errors(wait=False)

    def _finish(self, writer: ShardWriter) -> None:
        """Close a full shard, check it as stored, enter it in the manifest. A shard off policy is deleted."""
        if not writer.finish(self.keep_empty):
            return
        shard = Shard(writer.path)
        try:
            self.check.check_shard(shard)
        except BaseException:
            writer.path.unlink()
            raise
        self.manifest.add_file(self.folder, writer.path.name, sequences=len(shard), tokens=shard.offsets[-1])
        self.manifest.save(self.folder)

    def _raise_errors(self, wait: bool) -> None:
        """Re-raise what the thread that finishes shards raised."""
        for future in [f for f in self.finishing if wait or f.done()]:
            self.finishing.remove(future)
            future.result()


def find_fault(stream: Stream, states: States, kind: ShardKind) -> str | None:
    """What is wrong with one sequence's states, or None: rows, width, dtype, not finite, constant."""
    want = {"aux": (states.aux, len(kind.aux_layers) * kind.hidden_size), "last": (states.last, kind.hidden_size)}
    for name, (tensor, width) in want.items():
        if tensor.shape != (len(stream), width) or tensor.dtype != torch.bfloat16:
            return f"{name} states are {tensor.dtype} {list(tensor.shape)}, expected bfloat16 {[len(stream), width]}"
        total = tensor.sum(dtype=torch.float32)  # inf and nan survive a sum; one pass instead of a mask
        if not torch.isfinite(total) and not torch.isfinite(tensor).all():
            return f"{name} states are not finite"
        if len(stream) > 1 and torch.equal(tensor[0], tensor[-1]) and (tensor == tensor[:1]).all():
            return f"{name} states are the same at every token"
    return None
