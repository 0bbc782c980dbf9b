"""Reads the rows of Hugging Face data sets and local files, numbered, in a seeded order.

JSON lines are parsed here one by one, since one file may mix schemas, while data set libraries expect one schema.
"""

import glob
import json
import random
import shutil
import tempfile
from array import array
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import accumulate
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
    """(number of rows, the numbered rows in the order of the seed); raises UserError for an empty data set.

    The number is None for a stream. A row is None where its line is not JSON.
    """
    path = Path(settings.dataset)
    kind = _kind(path)
    if not path.is_file():
        if kind in FILES and not path.exists():
            raise UserError(f"questions.dataset: no such file: {path}")
        # A hub data set or a local folder: NAME or NAME:CONFIGURATION.
        name, _, config = (settings.dataset, "", "") if path.exists() else settings.dataset.partition(":")
        return _load(settings, name, config, split=settings.split)
    if kind in LINES:
        return _json_lines(path, settings.shuffle_seed)
    if kind == ".json":
        return _json_rows(path, settings.shuffle_seed)
    if kind in TABLES:
        separator = {"sep": "\t"} if kind == ".tsv" else {}
        return _load(settings, TABLES[kind], split="train", data_files=glob.escape(settings.dataset), **separator)
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
    file = _open(path)
    offsets = array("q", accumulate(map(len, file), initial=0))  # of each line, and the end of the file
    count = len(offsets) - 1

    def rows():
        with file:
            for row in _order(count, seed):
                file.seek(offsets[row])
                line = file.readline()
                if line.strip():
                    yield row, _parsed(line)

    return count, rows()


def _parsed(line: bytes):
    try:
        return json.loads(line)
    except (ValueError, RecursionError):  # not JSON, or nested too deep or a number too long for Python's reader
        return None


def _json_rows(path: Path, seed: int) -> tuple[int, Rows]:
    with _open(path) as file:
        text = file.read()
    try:
        rows = json.loads(text)  # bytes, in which a byte order mark is recognised
    except (ValueError, RecursionError) as error:
        if getattr(error, "msg", "") == "Extra data":  # one object a line, as in some copies of ShareGPT
            return _json_lines(path, seed)
        raise UserError(f"{path}: not JSON ({error})") from None
    if isinstance(rows, dict):
        lists = (value for value in rows.values() if isinstance(value, list) and value)
        wrapped = next((value for value in lists if all(isinstance(row, dict | list) for row in value)), None)
        rows = [rows] if is_row(rows) else wrapped
    if not isinstance(rows, list):
        raise UserError(f"{path}: must be a list of conversations, one conversation, or an object with a list of them")
    return len(rows), ((row, rows[row]) for row in _order(len(rows), seed))


# ---- data sets ----


def _load(settings: Questions, name: str, config: str = "", **options) -> tuple[int | None, Rows]:
    """Rows through `datasets`: of a hub data set, a local folder, or one file (`data_files`) with the reader `name`."""
    import datasets

    try:
        rows = datasets.load_dataset(name, config or None, streaming=settings.streaming, **options)
    except _load_errors() as error:
        names: list[str] = []
        if isinstance(error, ValueError) and "data_files" not in options:
            with suppress(*_load_errors()):  # of a data set that cannot be listed, the first error is reported
                names = datasets.get_dataset_config_names(name)
        if len(names) > 1 and config not in names:
            raise UserError(
                f"questions.dataset {settings.dataset!r}: choose one of its configurations, as --dataset "
                f"{name}:{names[0]}; there are {', '.join(names)}"
            ) from None
        raise UserError(
            f"questions.dataset {settings.dataset!r} (split {options['split']!r}): {_first_line(error)}"
        ) from None
    if not settings.streaming:
        return len(rows), ((row, rows[row]) for row in _order(len(rows), settings.shuffle_seed))
    if settings.shuffle_seed >= 0:
        rows = rows.shuffle(seed=settings.shuffle_seed, buffer_size=SHUFFLE_BUFFER_ROWS)
    return None, _stream_rows(rows, settings)


def _stream_rows(rows, settings: Questions) -> Rows:
    """The rows of a stream, numbered. A stream raises errors in its files only when it reads them."""
    try:
        yield from enumerate(rows)
    except _load_errors() as error:
        raise UserError(f"questions.dataset {settings.dataset!r}: {_first_line(error)}") from None


def _load_errors() -> tuple[type[Exception], ...]:
    """The errors that `datasets` raises for data it cannot load, those of the hub client and its parsers included."""
    from datasets.exceptions import DatasetsError

    return DatasetsError, OSError, EOFError, LookupError, RuntimeError, ValueError


def _first_line(error: Exception) -> str:
    from datasets.exceptions import DatasetGenerationError

    if isinstance(error, DatasetGenerationError) and error.__cause__:  # the details are in the cause
        error = error.__cause__
    return (str(error).strip() or type(error).__name__).splitlines()[0]
