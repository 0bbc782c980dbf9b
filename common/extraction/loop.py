"""The loop of stage 02: streams to an extractor, states checked, shards filled in any order, finished alone.

Streams are assigned to shards by their order in the records, so that a rerun plans the same shards. Several shards
are open at once when the extractor answers out of order; each is synced, hashed, checked against the target's own
choices and entered in the manifest as soon as its last sequence is in.
"""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from common.dataset.shard_layout import ShardKind
from common.dataset.shards import Shard, ShardWriter, States
from common.dataset.stream import Stream
from common.extraction.extractor import ExtractError, Extractor
from common.extraction.on_policy import OnPolicyCheck
from common.extraction.streams import Place, StreamReader
from common.pipeline.console import Progress
from common.pipeline.jsonl import JsonlParts
from common.pipeline.manifest import Manifest
from common.pipeline.settings import Extract


@dataclass(frozen=True)
class ShardPlan:
    """One shard to come: its file name and the places of its streams."""

    name: str
    places: list[Place]


def plan_shards(places: list[Place], kind: ShardKind, shard_gib: float, first_index: int) -> list[ShardPlan]:
    """Consecutive streams to shards of about `shard_gib`."""
    limit = max(1, int(shard_gib * 2**30 / kind.bytes_per_token()))
    plans: list[list[Place]] = []
    tokens = limit
    for place in places:
        if tokens + place.tokens > limit:
            plans.append([])
            tokens = 0
        plans[-1].append(place)
        tokens += place.tokens
    return [ShardPlan(f"shard-{first_index + i:05d}.safetensors", p) for i, p in enumerate(plans)]


class Extraction:
    """One run of the loop. `counts` ends up in the manifest: sequences, tokens, failed."""

    def __init__(
        self,
        folder: Path,
        reader: StreamReader,
        extractor: Extractor,
        kind: ShardKind,
        settings: Extract,
        check: OnPolicyCheck,
        manifest: Manifest,
        failures: JsonlParts,
    ):
        self.folder, self.reader, self.extractor, self.kind = folder, reader, extractor, kind
        self.settings, self.check, self.manifest, self.failures = settings, check, manifest, failures
        self.open: dict[str, ShardWriter] = {}  # sample id -> its shard's writer
        self.finishing: list[Future] = []
        self.failed = 0

    def run(self, plans: list[ShardPlan]) -> None:
        """Fill all planned shards; raises SafetyStop when a finished shard is not on policy."""
        tokens = sum(place.tokens for plan in plans for place in plan.places)
        # One thread syncs, hashes and checks while the next shard is computed; more would only queue at the disk.
        with ThreadPoolExecutor(1) as pool, Progress("extract", tokens, "tokens") as progress:
            try:
                for stream, states in self.extractor.states(self._streams(plans)):
                    problem = str(states) if isinstance(states, ExtractError) else find_fault(stream, states, self.kind)
                    self._settle(pool, stream, states, problem)
                    progress.update(len(stream), shards=len(self.manifest.files), failed=self.failed)
                self._collect(wait=True)
            finally:
                for writer in set(self.open.values()):
                    writer.abandon()
                self.failures.close()

    def _streams(self, plans: list[ShardPlan]) -> Iterator[Stream]:
        """Streams in plan order; a shard's writer opens when its first stream is drawn."""
        for plan in plans:
            streams = list(self.reader.load(iter(plan.places)))
            writer = ShardWriter(self.folder / plan.name, streams, self.kind)
            self.open.update({stream.id: writer for stream in streams})
            yield from streams

    def _settle(self, pool: ThreadPoolExecutor, stream: Stream, states: States, problem: str | None) -> None:
        writer = self.open.pop(stream.id)
        if problem:
            self.failed += 1
            self.failures.append({"id": stream.id, "reason": problem})
            writer.drop(stream.id)
        else:
            writer.write(stream.id, states)
        if writer.complete():
            self.finishing.append(pool.submit(self._finish, writer))
            self._collect(wait=False)

    def _finish(self, writer: ShardWriter) -> None:
        """Close a full shard, check it as stored, enter it in the manifest. A shard off policy is removed again."""
        if not writer.finish(keep_empty=bool(self.settings.window)):  # 04 waits for every shard of a window's plan
            return
        shard = Shard(writer.path)
        try:
            self.check.check_shard(shard)
        except BaseException:
            writer.path.unlink()
            raise
        self.manifest.add_file(self.folder, writer.path.name, sequences=len(shard), tokens=shard.offsets[-1])
        self.manifest.save(self.folder)

    def _collect(self, wait: bool) -> None:
        """Re-raise what a finished shard's thread raised."""
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
