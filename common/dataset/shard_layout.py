"""How a shard's file is laid out, torch-free: what its metadata says, bytes per token, the safetensors header."""

import json
from dataclasses import dataclass

from common.dataset.stream import Stream
from common.pipeline.manifest import FORMAT_VERSION

STORE_DTYPES = {"bf16": ("BF16", 2), "fp8": ("F8_E4M3", 1)}


@dataclass(frozen=True)
class ShardKind:
    """What all shards of a run have in common; every shard's metadata repeats it."""

    target: str
    target_digest: str
    hidden_size: int
    aux_layers: tuple[int, ...]  # as vLLM counts: the input of layer k
    store_dtype: str = "bf16"

    def metadata(self) -> dict[str, str]:
        values = vars(self) | {"aux_layers": list(self.aux_layers), "format": FORMAT_VERSION}
        return {key: json.dumps(value) for key, value in values.items()}

    def shard_metadata(self, streams: list[Stream]) -> dict[str, str]:
        """The metadata of a shard of these streams, with the facts of each."""
        facts = [{"id": stream.id, **stream.facts} for stream in streams]
        return self.metadata() | {"sequences": json.dumps(facts)}

    def row_bytes(self) -> dict[str, int]:
        return row_bytes(self.hidden_size, len(self.aux_layers), self.store_dtype)

    def bytes_per_token(self) -> int:
        return bytes_per_token(self.hidden_size, len(self.aux_layers), self.store_dtype)


def row_bytes(hidden_size: int, aux: int, store_dtype: str) -> dict[str, int]:
    """Bytes of one token in each tensor that has a row per token, for `aux` aux layers."""
    rows = {"aux_hidden": aux * hidden_size * STORE_DTYPES[store_dtype][1], "last_hidden": 2 * hidden_size}
    scale = {"aux_scale": 4 * aux} if store_dtype == "fp8" else {}
    return rows | scale | {"input_ids": 4, "loss_mask": 1}


def bytes_per_token(hidden_size: int, aux: int, store_dtype: str = "bf16") -> int:
    """Bytes that one token takes in a shard."""
    return sum(row_bytes(hidden_size, aux, store_dtype).values())


def shard_bytes(kind: ShardKind, streams: list[Stream]) -> int:
    """The size of the file that holds these streams with their states."""
    return shard_header(kind, streams)[2]


def shard_header(kind: ShardKind, streams: list[Stream]) -> tuple[bytes, dict[str, int], int]:
    """(header bytes, byte offset of each tensor in the file, file size); safetensors: u64 length, JSON, data."""
    tokens, aux = sum(map(len, streams)), len(kind.aux_layers)
    columns = {
        "aux_hidden": (STORE_DTYPES[kind.store_dtype][0], [aux * kind.hidden_size]),
        "last_hidden": ("BF16", [kind.hidden_size]),
        "aux_scale": ("F32", [aux]),
        "input_ids": ("I32", []),
        "loss_mask": ("U8", []),
    }
    end = 8 * (len(streams) + 1)
    header: dict = {
        "__metadata__": kind.shard_metadata(streams),
        "offsets": {"dtype": "I64", "shape": [len(streams) + 1], "data_offsets": [0, end]},
    }
    starts = {"offsets": 0}
    for name, size in kind.row_bytes().items():
        dtype, width = columns[name]
        starts[name], end = end, end + tokens * size
        header[name] = {"dtype": dtype, "shape": [tokens, *width], "data_offsets": [starts[name], end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    data = 8 + len(text)
    return len(text).to_bytes(8, "little") + text, {name: data + start for name, start in starts.items()}, data + end
