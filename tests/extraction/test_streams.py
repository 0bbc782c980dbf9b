"""Records to token streams: what the target wrote and nothing else is supervised; bad records are dropped and named."""

import json

import pytest

from common.extraction.streams import StreamReader
from common.pipeline.errors import UserError
from common.pipeline.jsonl import JsonlParts

OPEN, CLOSE, END, VOCAB = 15, 16, 2, 49152
PROMPT = [1, 4093, 198, 19161, 2, 198, 1, 520, 9531, 198, OPEN]
INSTANT = [*PROMPT, CLOSE]


def record(id: str, prompt=PROMPT, output=(300, 301, CLOSE, 302, END), finish="stop", **more) -> dict:
    source = {"dataset": "some/questions", "row": 0, "question": f"question of {id}"}
    ids = {"prompt_ids": list(prompt), "output_ids": list(output)}
    return {"id": id, "source": source, "finish_reason": finish, "sampling": {"temperature": 0.0}, **ids, **more}


@pytest.fixture
def reader(tmp_path, protocol):
    """A reader of these records."""

    def make(*records: dict, limit: int = 0) -> StreamReader:
        parts = JsonlParts(tmp_path, part_records=2)
        for one in records:
            parts.append(one)
        parts.close()
        return StreamReader(tmp_path, protocol, VOCAB, limit)

    return make


def streams(reader: StreamReader, n: int | None = None) -> dict:
    return {stream.id: stream for stream in reader.load(reader.locate(n))}


def test_a_thinking_sample_token_by_token(reader):
    stream = streams(reader(record("a")))["a"]
    assert list(stream.ids) == [*PROMPT, 300, 301, CLOSE, 302, END]
    assert list(stream.mask) == [0] * len(PROMPT) + [1] * 5  # the opener is prompt; closer and end are the target's
    assert stream.ids.itemsize == 4 and stream.mask.itemsize == 1
    facts = {"question": "question of a", "source": "some/questions", "finish": "stop", "ids_from": "server"}
    assert stream.facts == facts | {"reasoning": 2, "temperature": 0.0, "forced": None}


@pytest.mark.parametrize(("budget", "forced"), [(0, None), (3, None), (2, len(PROMPT) + 2), (1, len(PROMPT) + 2)])
def test_a_closing_token_that_the_budget_wrote_is_noted(reader, budget, forced):
    """The on-policy check must not ask the target for it; a reply cut before it has none."""
    sampling = {"temperature": 0.0, "thinking_budget": budget}
    cut = record("b", output=[300, 301, 302], finish="length", sampling=sampling)
    found = streams(reader(record("a", sampling=sampling), cut))
    assert found["a"].facts["forced"] == forced and found["b"].facts["forced"] is None


def test_the_record_says_who_closed_the_reasoning(reader):
    """Not its length: a target that writes the opening token itself reaches the budget one reasoning token earlier."""
    sampling = {"temperature": 0.0, "thinking_budget": 3}
    by_budget = record("a", sampling=sampling, budget_closed=True)
    by_target = record("b", sampling=sampling | {"thinking_budget": 2}, budget_closed=False)
    read = streams(reader(by_budget, by_target))
    assert read["a"].facts["forced"] == len(PROMPT) + 2
    assert read["b"].facts["forced"] is None


def test_case_3_a_reply_cut_while_thinking_is_kept_as_it_is(reader):
    cut = record("a", output=[300, 301, 302], finish="length", content=None)
    stream = streams(reader(cut))["a"]
    assert list(stream.ids) == [*PROMPT, 300, 301, 302] and sum(stream.mask) == 3
    assert stream.facts["reasoning"] == 3 and stream.facts["finish"] == "length"


def test_case_5_instant_mode_supervises_no_part_of_the_empty_block(reader):
    stream = streams(reader(record("a", prompt=INSTANT, output=[302, END])))["a"]
    assert [id for id, mask in zip(stream.ids, stream.mask, strict=True) if mask] == [302, END]
    assert stream.facts["reasoning"] == 0


def test_case_9_rows_without_a_supervised_token_are_dropped_and_counted(reader):
    found = reader(record("a", output=[]), record("b"), record("c", prompt=[]), record("d", PROMPT[2:], output=[]))
    assert list(streams(found)) == ["b"]
    assert sum(found.drop_counts().values()) == 3
    assert [reject["id"] for reject in found.dropped] == ["a", "c", "d"]
    assert all("output tokens" in reject["reason"] for reject in found.dropped)
    assert len(found.drop_counts()) == 1  # one line of the summary, not one a length


def test_case_10_limits(reader):
    found = reader(
        record("whole"), record("cut", output=[300] * 90), record("long", prompt=[7] * 64), record("just", [7] * 63),
        limit=64,
    )  # fmt: skip
    kept = streams(found)
    assert list(kept) == ["whole", "cut", "just"]
    assert len(kept["cut"]) == 64 and sum(kept["cut"].mask) == 64 - len(PROMPT)
    assert list(kept["just"].mask) == [0] * 63 + [1]
    assert found.cut == 2 and [reject["id"] for reject in found.dropped] == ["long"]
    assert "64" in found.dropped[0]["reason"]
    assert [place.tokens for place in found.locate(None)] == [len(stream) for stream in kept.values()]


@pytest.mark.parametrize(
    ("prompt", "output"),
    [(PROMPT, [OPEN, 300, CLOSE, END]), ([*PROMPT, OPEN], [300, CLOSE, END])],
    ids=["across the border", "in the prompt"],
)
def test_a_doubled_opener_is_dropped_and_counted(reader, prompt, output):
    found = reader(record("a", prompt, output), record("b"))
    assert list(streams(found)) == ["b"]
    assert "occurs twice" in found.dropped[0]["reason"] and sum(found.drop_counts().values()) == 1


@pytest.mark.parametrize("id", [VOCAB, 2**31, -1])
@pytest.mark.parametrize("side", ["prompt", "output"])
def test_ids_outside_the_vocabulary_are_dropped_and_counted(reader, id, side):
    bad = record("a", **{side: [*PROMPT[:-1], id, OPEN] if side == "prompt" else [300, id, END]})
    found = reader(bad, record("b", output=[VOCAB - 1]))
    assert list(streams(found)) == ["b"]
    assert "outside the target's vocabulary" in found.dropped[0]["reason"]


def test_an_id_that_comes_twice_is_dropped_and_counted(reader):
    """Two files pasted together: a shard knows its sequences by their ids."""
    found = reader(record("a"), record("b"), record("a", output=[5, END]))
    assert list(streams(found)) == ["a", "b"] and sum(found.drop_counts().values()) == 1


def test_n_takes_the_first_usable_ones_over_all_parts(reader):
    found = reader(record("a"), record("b", output=[]), record("c"), record("d"), record("e"))
    assert list(streams(found, 3)) == ["a", "c", "d"]
    assert list(streams(found, 99)) == ["a", "c", "d", "e"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"id": "x", "prom', "not a whole JSON record"),
        ("", "not a whole JSON record"),
        ("[1, 2]", "needs 'id'"),
        (json.dumps(record("x") | {"id": 7}), "needs 'id' as str"),
        (json.dumps(record("x") | {"output_ids": "1 2"}), "needs 'output_ids' as list"),
        (json.dumps(record("x") | {"output_ids": [1, 2.0]}), "record x: token ids must be integers"),
        (json.dumps(record("x") | {"output_ids": [1, True]}), "record x: token ids must be integers"),
        (json.dumps({k: v for k, v in record("x").items() if k != "source"}), "needs 'source' as dict"),
        (json.dumps(record("x") | {"finish_reason": None}), "needs 'finish_reason' as str"),
    ],
)
def test_a_malformed_record_is_named_by_file_and_line(reader, tmp_path, line, said):
    found = reader(record("a"), record("b"), record("c"))
    with open(tmp_path / "part-00001.jsonl", "a") as file:
        file.write(line + "\n")
    with pytest.raises(UserError, match=rf"part-00001\.jsonl:2: .*{said}") as caught:
        found.locate(None)
    assert "\n" not in str(caught.value)


def test_each_pass_opens_a_part_file_once(reader, monkeypatch):
    """Records in any order, as under a disk budget: not one open a record."""
    found = reader(*[record(f"{i}") for i in range(40)])  # two a part: 20 parts
    opened = []

    def counting(path, *more):
        opened.append(path.name)
        return open(path, *more)

    monkeypatch.setattr("common.extraction.streams.open", counting, raising=False)
    locations = found.locate(None)
    assert sorted(opened) == [f"part-{i:05d}.jsonl" for i in range(20)]
    opened.clear()
    shuffled = locations[::2] + locations[1::2][::-1]
    assert [stream.id for stream in found.load(shuffled)] == [location.id for location in shuffled]
    assert sorted(opened) == [f"part-{i:05d}.jsonl" for i in range(20)]


def test_each_pass_parses_a_record_once(reader, monkeypatch):
    found, parsed, loads = reader(record("a"), record("b", output=[]), record("c")), [], json.loads
    monkeypatch.setattr("common.extraction.streams.json.loads", lambda line: parsed.append(line) or loads(line))
    locations = found.locate(None)
    assert len(parsed) == 3
    assert len(list(found.load(locations))) == 2 and len(parsed) == 5


def test_a_file_that_changes_between_the_passes_is_refused(reader, tmp_path):
    found = reader(record("a"), record("b"))
    locations = found.locate(None)
    path = tmp_path / "part-00000.jsonl"
    lines = path.read_text().splitlines(True)
    path.write_text(lines[1] + lines[0])
    with pytest.raises(UserError, match=r"part-00000\.jsonl changed while it was read"):
        list(found.load(locations))
