"""Rows out of Hugging Face data sets and local files, numbered, in the order of a seed.

Lines of JSON are read here, one by one: schemas meet in one file, and data set libraries want one for all rows.
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
PACKED = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd"}
Rows = Iterator[tuple[int, object]]


def open_rows(settings: Questions) -> tuple[int | None, Rows]:
    """(how many rows, the rows with their numbers in the order of the seed); raises UserError where there are none.

    None in place of a number: a stream, which nobody has counted. None in place of a row: a line that is not JSON.
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
        f"questions.dataset: {path} is of no kind that is read: {' '.join(FILES)}, or one packed as {' '.join(PACKED)}"
    )


def _kind(path: Path) -> str:
    """What the file's name ends with, packing left out."""
    endings = [suffix.lower() for suffix in path.suffixes]
    return next((ending for ending in reversed(endings) if ending not in PACKED), "")


def _order(count: int, seed: int) -> Iterable[int]:
    if count == 0:
        raise UserError("questions.dataset is empty: no rows to ask")
    if seed < 0:
        return range(count)
    order = array("q", range(count))
    random.Random(seed).shuffle(order)
    return order


# ---- JSON ----


def _opened(path: Path) -> BinaryIO:
    """The file's bytes; those of a packed one out of a temporary file, so that its lines can be read in any order."""
    packing = PACKED.get(path.suffix.lower())
    if packing is None:
        return open(path, "rb")
    import pyarrow

    file = tempfile.TemporaryFile()  # noqa: SIM115
    try:
        with pyarrow.input_stream(str(path), compression=packing) as packed:
            shutil.copyfileobj(packed, file)
    except OSError as error:
        raise UserError(f"{path}: cannot be unpacked ({error}); is the file whole?") from None
    file.seek(0)
    return file


def _json_lines(path: Path, seed: int) -> tuple[int, Rows]:
    """Rows by their line offsets: a shuffled file of any size costs eight bytes a line. Row 0 is line 1."""
    file, offsets, at = _opened(path), array("q"), 0
    for line in file:
        offsets.append(at)
        at += len(line)

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
    except (ValueError, RecursionError):  # no JSON, or nested deeper, or a number longer, than Python reads
        return None


def _json_rows(path: Path, seed: int) -> tuple[int, Rows]:
    with _opened(path) as file:
        text = file.read()
    try:
        rows = json.loads(text)  # bytes: it knows the mark that some editors put first
    except (ValueError, RecursionError) as error:
        if getattr(error, "msg", "") == "Extra data":  # one object a line, as ShareGPT's copies have it
            return _json_lines(path, seed)
        raise UserError(f"{path}: not JSON ({error})") from None
    if isinstance(rows, dict):
        rows = [rows] if is_row(rows) else next(filter(_holds_rows, rows.values()), None)
    if not isinstance(rows, list):
        raise UserError(f"{path}: must be a list of conversations, or an object that holds one or is one")
    return len(rows), ((row, rows[row]) for row in _order(len(rows), seed))


def _holds_rows(value) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(row, dict | list) for row in value)


# ---- data sets ----


def _table_rows(settings: Questions, kind: str) -> tuple[int | None, Rows]:
    """Rows of one local file through the reader that `datasets` has for its kind."""
    separator = {"sep": "\t"} if kind == ".tsv" else {}
    try:
        rows = _load(settings, TABLES[kind], split="train", data_files=glob.escape(settings.dataset), **separator)
    except Exception as error:  # each kind's parser raises its own
        raise UserError(f"questions.dataset {settings.dataset!r}: {_first_line(error)}") from None
    return _numbered(rows, settings)


def _hub_rows(settings: Questions) -> tuple[int | None, Rows]:
    """Rows of a hub data set or a local folder, NAME or NAME:CONFIG."""
    dataset, split = settings.dataset, settings.split
    name, _, config = (dataset, "", "") if Path(dataset).exists() else dataset.partition(":")
    try:
        rows = _load(settings, name, config or None, split=split)
    except Exception as error:  # the hub client raises a dozen kinds; each means that there are no questions
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
    except Exception:  # what could not be loaded may not be listed either: then the first error is what is told
        return []


def _numbered(rows, settings: Questions) -> tuple[int | None, Rows]:
    if settings.streaming:
        return None, _arriving(rows, settings)
    return len(rows), ((row, rows[row]) for row in _order(len(rows), settings.shuffle_seed))


def _arriving(rows, settings: Questions) -> Rows:
    """A stream's rows: what `_load` tells of a whole data set, a stream tells only when it is read."""
    try:
        yield from enumerate(rows)
    except Exception as error:
        raise UserError(f"questions.dataset {settings.dataset!r}: {_first_line(error)}") from None


def _first_line(error: Exception) -> str:
    from datasets.exceptions import DatasetGenerationError

    if isinstance(error, DatasetGenerationError) and error.__cause__:  # says no more than that there was one
        error = error.__cause__
    return (str(error).strip() or type(error).__name__).splitlines()[0]
