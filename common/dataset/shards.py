"""Shards of hidden states: written in one pass at their final offsets, read by slices, verified.

    input_ids int32 [T]        loss_mask uint8 [T]      offsets int64 [n+1]    sequences lie end to end, no padding
    aux_hidden bf16 [T, A*H]   last_hidden bf16 [T, H] (before the target's final norm)
    or, stored as fp8:  aux_hidden float8_e4m3fn [T, A*H] with aux_scale float32 [T, A], a scale per token and layer

The file is plain safetensors (its header is written by hand, since all sizes are known before the first state is:
memory does not grow with the shard). Facts for each sequence are JSON in the metadata.
"""

import json
import os
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from common.dataset.shard_layout import ShardKind, shard_header
from common.dataset.stream import Stream
from common.pipeline.errors import UserError
from common.pipeline.files import sync
from common.pipeline.manifest import FORMAT_VERSION

FP8_MAX = 448.0


@dataclass(frozen=True)
class States:
    """One sequence's states on the CPU: aux bf16 [T, A*H], last bf16 [T, H]."""

    aux: Tensor
    last: Tensor


class ShardWriter:
    """Writes one shard under a temporary name; `finish` syncs and renames it. Sequences may come in any order."""

    def __init__(self, path: Path, streams: list[Stream], kind: ShardKind):
        self.path, self.kind, self.streams = path, kind, streams
        self.temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
        self.offsets = torch.tensor([0] + [len(s) for s in streams]).cumsum(0)
        self.missing = {stream.id: i for i, stream in enumerate(streams)}
        self.dropped: set[int] = set()
        header, self.starts, size = shard_header(kind, streams)
        self.file = os.open(self.temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        os.truncate(self.file, size)
        self._put(0, header)
        self._put(self.starts["offsets"], _bytes(self.offsets))

    def write(self, id: str, states: States) -> None:
        """Write one sequence's ids, mask and states at their offsets."""
        number = self.missing.pop(id)
        stream, row = self.streams[number], int(self.offsets[number])
        self._put(self.starts["input_ids"] + 4 * row, stream.ids.tobytes())
        self._put(self.starts["loss_mask"] + row, stream.mask.tobytes())
        for name, tensor in self._stored(states).items():
            self._put(self.starts[name] + row * tensor.shape[1] * tensor.element_size(), _bytes(tensor))

    def _stored(self, states: States) -> dict[str, Tensor]:
        if self.kind.store_dtype == "bf16":
            return {"aux_hidden": states.aux, "last_hidden": states.last}
        aux, scale = to_fp8(states.aux, len(self.kind.aux_layers))
        return {"aux_hidden": aux, "aux_scale": scale, "last_hidden": states.last}

    def drop(self, id: str) -> None:
        """Leave out a sequence that has no usable states."""
        self.dropped.add(self.missing.pop(id))

    def complete(self) -> bool:
        return not self.missing

    def finish(self, keep_empty: bool = False) -> bool:
        """Sync and rename. If all sequences were dropped: no file and False, or an empty shard with `keep_empty`."""
        if self.dropped:
            return self._compact(keep_empty)
        os.fsync(self.file)
        os.close(self.file)
        os.rename(self.temporary, self.path)
        sync(self.path.parent)
        return True

    def _compact(self, keep_empty: bool) -> bool:
        """Copy the written sequences into a shard without the dropped ones."""
        written = {i: stream for i, stream in enumerate(self.streams) if i not in self.dropped}
        self.temporary.unlink()  # the open descriptor still reads the content
        with os.fdopen(self.file, "rb") as source:
            if not written and not keep_empty:
                return False
            compact = ShardWriter(self.path, list(written.values()), self.kind)
            for number, stream in written.items():
                row, target = int(self.offsets[number]), int(compact.offsets[compact.missing.pop(stream.id)])
                for name, width in self.kind.row_bytes().items():
                    source.seek(self.starts[name] + row * width)
                    compact._put(compact.starts[name] + target * width, source.read(len(stream) * width))
            return compact.finish()

    def abandon(self) -> None:
        """Close and remove the unfinished file."""
        os.close(self.file)
        self.temporary.unlink(missing_ok=True)

    def _put(self, offset: int, data) -> None:
        view = memoryview(data).cast("B")
        while view:
            written = os.pwrite(self.file, view, offset)
            view, offset = view[written:], offset + written


class Shard:
    """A finished shard, mapped; sequences are read as slices."""

    def __init__(self, path: Path):
        self.path = path
        try:
            self.file = safe_open(path, "pt")
            self.metadata = {key: json.loads(value) for key, value in self.file.metadata().items()}
            self.facts: list[dict] = self.metadata.pop("sequences")
            self.offsets: list[int] = self.file.get_tensor("offsets").tolist()
            if self.metadata["format"] != FORMAT_VERSION or len(self.offsets) != len(self.facts) + 1:
                raise ValueError(f"format {self.metadata['format']}, {len(self.facts)} sequences")
        except (SafetensorError, OSError, KeyError, ValueError, AttributeError) as error:
            raise UserError(f"{path}: not a shard of this project ({error}); `02 --verify` re-extracts it") from None

    def __len__(self) -> int:
        return len(self.facts)

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Rows of one tensor; `aux_hidden` always as bf16."""
        rows = self.file.get_slice(name)[start:stop]
        if name == "aux_hidden" and rows.dtype == torch.float8_e4m3fn:
            return from_fp8(rows, self.file.get_slice("aux_scale")[start:stop])
        return rows

    def checksums(self) -> dict[str, int]:
        """By id, the CRC-32 of each sequence's token ids; RecordLocation.crc is the same figure of the record."""
        ids = self.file.get_tensor("input_ids").numpy()
        spans = zip(self.offsets, self.offsets[1:], strict=False)
        return {facts["id"]: zlib.crc32(ids[a:b]) for facts, (a, b) in zip(self.facts, spans, strict=True)}

    def sequence(self, i: int) -> tuple[Tensor, Tensor, States]:
        """(ids int32 [T], mask uint8 [T], states) of sequence i."""
        span = self.offsets[i], self.offsets[i + 1]
        states = States(self.read("aux_hidden", *span), self.read("last_hidden", *span))
        return self.read("input_ids", *span), self.read("loss_mask", *span), states


def to_fp8(aux: Tensor, layers: int) -> tuple[Tensor, Tensor]:
    """(float8_e4m3fn [T, A*H], float32 scale [T, A]) of bf16 [T, A*H]: each token and layer fills fp8's range."""
    blocks = aux.float().view(len(aux), layers, -1)
    scale = blocks.abs().amax(-1).clamp_min(1e-12) / FP8_MAX
    return (blocks / scale[..., None]).to(torch.float8_e4m3fn).view(aux.shape), scale


def from_fp8(aux: Tensor, scale: Tensor) -> Tensor:
    """bf16 [T, A*H] of what `to_fp8` stored."""
    blocks = aux.float().view(*scale.shape, -1) * scale[..., None]
    return blocks.view(aux.shape).to(torch.bfloat16)


def _bytes(tensor: Tensor):
    return tensor.contiguous().view(torch.uint8).numpy()
