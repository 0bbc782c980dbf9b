"""Questions out of every schema in use; what cannot be asked is told, and nothing vanishes (case 16)."""

import json

import pytest

from common.config import Questions
from common.errors import UserError
from common.prompts import Question, QuestionStream, Skipped
from common.schemas import Unusable, chat_messages

ASK = {"role": "user", "content": "q"}
CALL = {"name": "f", "arguments": {"a": 1}}


def stream(tmp_path, rows, name="rows.jsonl", **settings) -> list:
    path = tmp_path / name
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return list(QuestionStream(Questions(**{"dataset": str(path), "shuffle_seed": -1} | settings)))


def one(tmp_path, row, **settings) -> Question | Skipped:
    (found,) = stream(tmp_path, [row], **settings)
    return found


@pytest.mark.parametrize(
    "row",
    [
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
        {"conversations": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]},
        {"messages": [ASK, {"role": "assistant", "content": "a"}]},
        {"messages": None, "conversations": [], "prompt": [ASK]},
        {"prompt": "q"},
        {"prompt": ["q", "a second turn"]},
        {"instruction": "q", "input": "", "output": "a"},
        {"question": "q"},
        {"text": "q"},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "q"}]}]},
        {"messages": [{"role": "assistant", "content": "Welcome!"}, ASK, {"role": "assistant", "content": "a"}]},
        {
            "messages": [
                ASK,
                {"role": "assistant", "content": "a"},
                {"role": "user", "content": [{"type": "image_url"}]},
            ]
        },
        {"messages": [ASK, {"role": "assistant", "content": None, "tool_calls": [CALL]}]},
    ],
)
def test_every_schema_asks_the_same(tmp_path, row):
    found = one(tmp_path, row)
    assert isinstance(found, Question) and found.messages == [ASK] and not found.followups


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ([], "not an object"),
        ({"messages": []}, "no user turn"),
        ({"messages": [{"role": "system", "content": "s"}]}, "no user turn"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "no user turn"),
        ({"messages": [{"role": "user", "content": " \n"}]}, "empty question"),
        ({"messages": [{"role": "user", "content": None}]}, "empty question"),
        ({"messages": [{"role": "alien", "content": "q"}]}, "unknown role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "images"),
        ({"messages": [{"role": "user", "content": 5}]}, "content that is not text"),
        ({"prompt": "q", "images": ["x.png"]}, "images"),
        ({"messages": [5]}, "a turn is not an object"),
        ({"other": "q"}, "no known chat column"),
        ("{torn", "not JSON"),
    ],
)
def test_unusable_rows_say_why(tmp_path, row, reason):
    found = one(tmp_path, row)
    assert isinstance(found, Skipped) and (found.row, found.reason) == (0, reason)


def test_roles_and_input_are_kept(tmp_path):
    system = {"role": "system", "content": "s"}
    assert one(tmp_path, {"system": "s", "conversations": [{"from": "human", "value": "q"}]}).messages == [system, ASK]
    assert one(tmp_path, {"instruction": "q", "input": "i"}).messages == [{"role": "user", "content": "q\n\ni"}]
    assert one(tmp_path, {"messages": [ASK, ASK]}).messages == [ASK, ASK]


def test_system_prompt_comes_first_and_once(tmp_path):
    """Case 15: a row's own system message stays."""
    own = {"messages": [{"role": "system", "content": "own"}, ASK]}
    assert one(tmp_path, {"prompt": "q"}, system_prompt="s").messages == [{"role": "system", "content": "s"}, ASK]
    assert one(tmp_path, own, system_prompt="s").messages == own["messages"]
    greeted = {"messages": [{"role": "system", "content": "own"}, {"role": "assistant", "content": "Hi!"}, ASK]}
    assert one(tmp_path, greeted).messages == own["messages"]


def test_all_turns(tmp_path):
    turns = [
        ASK,
        {"role": "assistant", "content": "a"},
        {"role": "user", "content": "q2"},
        {"role": "user", "content": "q3"},
    ]
    found = one(tmp_path, {"messages": [*turns, {"role": "assistant", "content": "b"}]}, turns="all")
    assert (found.messages, found.followups) == ([ASK], [turns[2:]])
    assert one(tmp_path, {"messages": turns}, turns="all").followups == [turns[2:]]  # a last question wants a reply too
    assert one(tmp_path, {"turns": ["q", "q2"]}, turns="all").followups == [[turns[2]]]


def test_tool_calls_are_context(tmp_path):
    called = {"role": "assistant", "content": None, "tool_calls": [{"function": CALL | {"arguments": '{"a": 1}'}}]}
    found = one(
        tmp_path, {"messages": [ASK, called, {"role": "tool", "content": "r"}, {"role": "assistant", "content": "a"}]}
    )
    roles = [message["role"] for message in found.messages]
    assert roles == ["user", "assistant", "tool"] and found.messages[2]["tool_call_id"] == "functions.f:0"
    assert found.messages[1]["content"] == ""
    sharegpt = [
        {"from": "human", "value": "q"},
        {"from": "function_call", "value": json.dumps(CALL)},
        {"from": "observation", "value": "r"},
        {"from": "gpt", "value": "a"},
    ]
    assert one(tmp_path, {"conversations": sharegpt}).key == found.key  # arguments as text and as an object
    with pytest.raises(Unusable, match="not JSON"):
        chat_messages({"conversations": [{"from": "function_call", "value": "f(1)"}]})


def test_duplicates_by_content_are_asked_once(tmp_path):
    rows = [{"prompt": "q"}, {"messages": [ASK, {"role": "assistant", "content": "other"}]}, {"prompt": "Q"}]
    kinds = [type(found).__name__ for found in stream(tmp_path, rows)]
    assert kinds == ["Question", "Skipped", "Question"]


def test_mixed_file_blank_lines_and_row_numbers(tmp_path):
    found = stream(tmp_path, [{"prompt": "a"}, "", {"instruction": "b"}, "{"])
    assert [f.source["row"] if isinstance(f, Question) else f.row for f in found] == [0, 2, 3]


def test_seed_decides_the_order(tmp_path):
    rows = [{"prompt": str(i)} for i in range(20)]
    order = [[q.messages[0]["content"] for q in stream(tmp_path, rows, shuffle_seed=seed)] for seed in (1, 1, 2, -1)]
    assert order[0] == order[1] != order[2] and sorted(order[0]) == sorted(order[3])
    assert order[3] == [str(i) for i in range(20)]


def test_json_in_its_three_shapes(tmp_path):
    rows = [{"prompt": "a"}, {"prompt": "b"}]
    for text in (json.dumps(rows), json.dumps({"data": rows}), "\n".join(map(json.dumps, rows))):
        (tmp_path / "rows.json").write_text(text)
        source = QuestionStream(Questions(dataset=str(tmp_path / "rows.json"), shuffle_seed=-1))
        assert (source.rows, [q.messages[0]["content"] for q in source]) == (2, ["a", "b"])


@pytest.mark.parametrize("streaming", [False, True])
def test_parquet(tmp_path, monkeypatch, streaming):
    import datasets
    import pyarrow as pa
    import pyarrow.parquet as pq

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "rows.parquet"
    turns = [[{"from": "human", "value": str(i)}, {"from": "gpt", "value": "a"}] for i in range(5)]
    pq.write_table(pa.table({"conversations": turns, "prompt": [None] * 5}), path)
    source = QuestionStream(Questions(dataset=str(path), shuffle_seed=3, streaming=streaming))
    asked = [question.messages[0]["content"] for question in source]
    assert sorted(asked) == [str(i) for i in range(5)] and source.rows == (None if streaming else 5)


def test_missing_and_empty_sources_are_errors(tmp_path):
    with pytest.raises(UserError, match="no such file"):
        stream(tmp_path, [], dataset=str(tmp_path / "none.jsonl"))
    with pytest.raises(UserError, match="no rows"):
        stream(tmp_path, [])
    (tmp_path / "x.json").write_text('"text"')
    with pytest.raises(UserError, match="list of conversations"):
        QuestionStream(Questions(dataset=str(tmp_path / "x.json")))


def test_lone_surrogates_are_cleaned(tmp_path):
    assert one(tmp_path, '{"prompt": "a\\ud800b"}').messages[0]["content"] == "a\ufffdb"
