"""Every kind of file and data set that questions are read from, and what is said of one that is not."""

import bz2
import gzip
import json
from functools import partial

import pytest

from common.pipeline.errors import UserError
from common.pipeline.settings import Questions
from common.questions.questions import QuestionStream

gzipped = partial(gzip.compress, mtime=0)  # the time would be in the bytes, and these in the tests' names
ROWS = [{"prompt": "a"}, {"prompt": "b"}]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
TALK = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "x"}]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))


def asked(dataset, **settings) -> tuple[int | None, list[str]]:
    """(the number of rows that is told, the text of each question) of a data set in its own order."""
    source = QuestionStream(Questions(**{"dataset": str(dataset), "shuffle_seed": -1} | settings))
    return source.rows, [question.messages[0]["content"] for question in source]


def zstd(data: bytes) -> bytes:
    import pyarrow

    return pyarrow.compress(data, codec="zstd", asbytes=True)


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("q.jsonl", LINES),
        ("Q.JSONL", LINES),
        ("q.ndjson", LINES),
        ("q.v2.jsonl.gz", gzipped(LINES)),
        ("q.jsonl.bz2", bz2.compress(LINES)),
        ("q.jsonl.zst", zstd(LINES)),
        ("marked.jsonl", b"\xef\xbb\xbf" + LINES),
        ("lines.json", LINES),
        ("lines.json.gz", gzipped(LINES)),
        ("q.txt", b"a\nb\n"),
        ("q.csv", b"prompt,system\na,\nb,\n"),
        ("q[1].CSV", b"prompt\na\nb\n"),
        ("q.csv.gz", gzipped(b"prompt\na\nb\n")),
        ("q.tsv", b"prompt\tn\na\t1\nb\t2\n"),
    ],
)
def test_single_files(tmp_path, name, data):
    (tmp_path / name).write_bytes(data)
    assert asked(tmp_path / name) == (2, ["a", "b"])
    assert sorted(asked(tmp_path / name, shuffle_seed=0)[1]) == ["a", "b"]


@pytest.mark.parametrize(
    ("value", "texts"),
    [
        (ROWS, ["a", "b"]),
        ({"data": ROWS}, ["a", "b"]),
        ({"tags": ["t"], "n": 2, "data": ROWS}, ["a", "b"]),
        ({"conversations": [{"conversations": TALK}, {"prompt": "b"}]}, ["a", "b"]),
        ({"data": [TALK, [{"role": "user", "content": "b"}]]}, ["a", "b"]),
        ({"messages": TALK, "tags": ["t"]}, ["a"]),
        ({"prompt": "a", "meta": [{"prompt": "x"}]}, ["a"]),
    ],
)
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_json_in_its_shapes(tmp_path, value, texts, mark):
    (tmp_path / "rows.json").write_bytes(mark + json.dumps(value).encode())
    assert asked(tmp_path / "rows.json") == (len(texts), texts)


@pytest.mark.parametrize("streaming", [False, True])
def test_parquet(tmp_path, streaming):
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = tmp_path / "rows.parquet"
    turns = [[{"from": "human", "value": str(i)}, {"from": "gpt", "value": "a"}] for i in range(5)]
    pq.write_table(pa.table({"conversations": turns, "prompt": [None] * 5}), path)
    rows, texts = asked(path, shuffle_seed=3, streaming=streaming)
    assert sorted(texts) == [str(i) for i in range(5)] and rows == (None if streaming else 5)


def test_one_of_several_configurations(tmp_path):
    folder = tmp_path / "grades"
    folder.mkdir()
    listed = "".join(f"- config_name: {name}\n  data_files: {name}.jsonl\n" for name in ("main", "socratic"))
    (folder / "README.md").write_text(f"---\nconfigs:\n{listed}---\n")
    for name in ("main", "socratic"):
        (folder / f"{name}.jsonl").write_text(json.dumps({"question": name}) + "\n")
    for name in ("main", "socratic"):
        assert asked(f"{folder}:{name}") == (1, [name])
        assert asked(f"{folder}:{name}", streaming=True) == (None, [name])
    for wrong in (folder, f"{folder}:other"):
        with pytest.raises(UserError, match=rf"as --dataset {folder}:main; there are main, socratic$"):
            asked(wrong)
    with pytest.raises(UserError, match="Unknown split"):
        asked(f"{folder}:main", split="nope")
    folder.rename(tmp_path / "a:b")
    with pytest.raises(UserError, match=r"there are main, socratic$"):  # a path with a colon is a path
        asked(tmp_path / "a:b")


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("none.jsonl", None, "no such file"),
        ("none.csv.gz", None, "no such file"),
        ("q.jsonl", b"", "no rows"),
        ("q.xlsx", LINES, r"unsupported file type; use \.jsonl.* compressed as \.gz"),
        ("q.jsonl.gz", LINES, "cannot be unpacked"),
        ("cut.jsonl.gz", gzipped(LINES)[:-12], "cannot be unpacked"),
        ("q.csv", b"", "No columns to parse"),
        ("x.json", b'"text"', "a list of conversations"),
        ("x.json", b'{"tags": ["a"], "n": [1]}', "a list of conversations"),
        ("x.json", b'{"prompt": %s}' % (b"1" * 5000), "not JSON"),
        ("x.json", b"[" * 100_000, "not JSON"),
        ("x.json", b"\xff{}", "not JSON"),
    ],
)
@pytest.mark.parametrize("streaming", [False, True])
def test_what_cannot_be_read_is_named(tmp_path, name, data, said, streaming):
    if data is not None:
        (tmp_path / name).write_bytes(data)
    with pytest.raises(UserError, match=said) as raised:
        asked(tmp_path / name, streaming=streaming)
    assert name in str(raised.value) or said == "no rows"
