"""Reads the rows of Hugging Face data sets and local files, numbered, in a seeded order.

JSON lines are parsed here one by one, since one file may mix schemas and data set libraries need one for all rows.
"""

import glob
import json
import random
import shutil
import tempfile
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from common.pipeline.errors import UserError
from common.pipeline.settings import Questions
from common.questions.conversations import is_row

SHUFFLE_BUFFER_ROWS = 10_000
LINES = (".jsonl", ".ndjson")
TABLES = {".parquet": "parquet", ".arrow": "arrow", ".csv": "csv", ".tsv": "csv", ".txt": "text"}
FILES = (*LINES, ".json", *TABLES)
COMPRESSIONS = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd"}
Rows = Iterator[tuple[int, object]]


def open_rows(settings: Questions) -> tuple[int | None, Rows]:
    """(number of rows, the numbered rows in the order of the seed); raises UserError if there are none.

    The number is None for a stream. A row is None where its line is not JSON.
    """
    path = Path(settings.dataset)
    kind = _kind(path)
    if not path.is_file():
        if kind in FILES and not path.exists():
            raise UserError(f"questions.dataset: no such file: {path}")
        return _hub_rows(settings)
    if kind in LINES:
        return _json_lines(path, settings.shuffle_seed)
    if kind == ".json":
        return _json_rows(path, settings.shuffle_seed)
    if kind in TABLES:
        return _table_rows(settings, kind)
    raise UserError(
        f"questions.dataset: {path} has an unsupported file type; use {', '.join(FILES)}, also compressed as "
        f"{', '.join(COMPRESSIONS)}"
    )


def _kind(path: Path) -> str:
    """The file's extension, without that of its compression."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    return next((suffix for suffix in reversed(suffixes) if suffix not in COMPRESSIONS), "")


def _order(count: int, seed: int) -> Iterable[int]:
    if count == 0:
        raise UserError("questions.dataset has no rows")
    if seed < 0:
        return range(count)
    order = array("q", range(count))
    random.Random(seed).shuffle(order)
    return order


# ---- JSON ----


def _open(path: Path) -> BinaryIO:
    """The file's bytes. A compressed file is unpacked to a temporary one, so that lines can be read in any order."""
    compression = COMPRESSIONS.get(path.suffix.lower())
    if compression is None:
        return open(path, "rb")
    import pyarrow

    file = tempfile.TemporaryFile()  # noqa: SIM115
    try:
        with pyarrow.input_stream(str(path), compression=compression) as packed:
            shutil.copyfileobj(packed, file)
    except OSError as error:
        raise UserError(f"{path}: cannot be unpacked ({error}); is the file complete?") from None
    file.seek(0)
    return file


def _json_lines(path: Path, seed: int) -> tuple[int, Rows]:
    """Rows by their line offsets, so that shuffling takes eight bytes a line. Row 0 is line 1."""
    file, offsets, offset = _open(path), array("q"), 0
    for line in file:
        offsets.append(offset)
        offset += len(line)

    def rows():
        with file:
            for row in _order(len(offsets), seed):
                file.seek(offsets[row])
                line = file.readline()
                if line.strip():
                    yield row, _parsed(line)

    return len(offsets), rows()


def _parsed(line: bytes):
    try:
        return json.loads(line)
    except (ValueError, RecursionError):  # not JSON, or too deep nesting or too long numbers for Python's reader
        return None


def _json_rows(path: Path, seed: int) -> tuple[int, Rows]:
    with _open(path) as file:
        text = file.read()
    try:
        rows = json.loads(text)  # of bytes: a byte order mark is recognised
    except (ValueError, RecursionError) as error:
        if getattr(error, "msg", "") == "Extra data":  # one object a line, as in some copies of ShareGPT
            return _json_lines(path, seed)
        raise UserError(f"{path}: not JSON ({error})") from None
    if isinstance(rows, dict):
        rows = [rows] if is_row(rows) else next(filter(_holds_rows, rows.values()), None)
    if not isinstance(rows, list):
        raise UserError(f"{path}: must be a list of conversations, one conversation, or an object with a list of them")
    return len(rows), ((row, rows[row]) for row in _order(len(rows), seed))


def _holds_rows(value) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(row, dict | list) for row in value)


# ---- data sets ----


def _table_rows(settings: Questions, kind: str) -> tuple[int | None, Rows]:
    """Rows of one local file through the reader of `datasets` for its type."""
    separator = {"sep": "\t"} if kind == ".tsv" else {}
    try:
        rows = _load(settings, TABLES[kind], split="train", data_files=glob.escape(settings.dataset), **separator)
    except _load_errors() as error:
        raise UserError(f"questions.dataset {settings.dataset!r}: {_first_line(error)}") from None
    return _numbered(rows, settings)


def _hub_rows(settings: Questions) -> tuple[int | None, Rows]:
    """Rows of a hub data set or a local folder: NAME or NAME:CONFIGURATION."""
    dataset, split = settings.dataset, settings.split
    name, _, config = (dataset, "", "") if Path(dataset).exists() else dataset.partition(":")
    try:
        rows = _load(settings, name, config or None, split=split)
    except _load_errors() as error:
        names = _configurations(name) if isinstance(error, ValueError) else []
        if len(names) > 1 and config not in names:
            raise UserError(
                f"questions.dataset {dataset!r}: choose one of its configurations, as --dataset {name}:{names[0]}; "
                f"there are {', '.join(names)}"
            ) from None
        raise UserError(f"questions.dataset {dataset!r} (split {split!r}): {_first_line(error)}") from None
    return _numbered(rows, settings)


def _load(settings: Questions, *which, **how):
    import datasets

    rows = datasets.load_dataset(*which, streaming=settings.streaming, **how)
    if settings.streaming and settings.shuffle_seed >= 0:
        rows = rows.shuffle(seed=settings.shuffle_seed, buffer_size=SHUFFLE_BUFFER_ROWS)
    return rows


def _configurations(name: str) -> list[str]:
    import datasets

    try:
        return datasets.get_dataset_config_names(name)
    except _load_errors():  # the data set cannot be listed either; the caller reports its first error
        return []


def _numbered(rows, settings: Questions) -> tuple[int | None, Rows]:
    if settings.streaming:
        return None, _stream_rows(rows, settings)
    return len(rows), ((row, rows[row]) for row in _order(len(rows), settings.shuffle_seed))


def _stream_rows(rows, settings: Questions) -> Rows:
    """A stream's rows; errors that a loaded data set raises at once, a stream raises while it is read."""
    try:
        yield from enumerate(rows)
    except _load_errors() as error:
        raise UserError(f"questions.dataset {settings.dataset!r}: {_first_line(error)}") from None


def _load_errors() -> tuple[type[Exception], ...]:
    """What `datasets` raises for data that it cannot load: its own errors, the hub client's, its parsers'."""
    from datasets.exceptions import DatasetsError

    return DatasetsError, OSError, EOFError, LookupError, RuntimeError, ValueError


def _first_line(error: Exception) -> str:
    from datasets.exceptions import DatasetGenerationError

    if isinstance(error, DatasetGenerationError) and error.__cause__:  # its own message has no details
        error = error.__cause__
    return (str(error).strip() or type(error).__name__).splitlines()[0]
