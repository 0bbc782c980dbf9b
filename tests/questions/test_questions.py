"""Questions out of every schema in use; what cannot be asked is told, and nothing vanishes (case 16)."""

import json

import pytest

from common.pipeline.jsonl import json_line
from common.pipeline.settings import Questions
from common.questions.conversations import Unusable, chat_messages
from common.questions.questions import Question, QuestionStream, Skipped
from common.target.messages import canonical, on_the_wire

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
        [ASK, {"role": "assistant", "content": "a"}],
        {"text": "q", "role": "prompter", "parent_id": None},
        {"question": "q", "role": "Sherlock Holmes"},
        {"instruction": "q", "context": "", "input": "", "history": []},
        {"system_prompt": "", "question": "q"},
        {"system": " ", "system_prompt": None, "question": "q"},
        {"conversations": [{"from": "system", "value": ""}, {"from": "human", "value": "q"}]},
        *({"prompt": "q", "tools": empty, "functions": empty} for empty in (None, [], "", "[]", "null", {})),
    ],
)
def test_every_schema_asks_the_same(tmp_path, row):
    found = one(tmp_path, row)
    assert isinstance(found, Question) and found.messages == [ASK] and not found.followups


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (5, "not an object"),
        ([], "no user turn"),
        ({"messages": []}, "no user turn"),
        ({"messages": [{"role": "system", "content": "s"}]}, "no user turn"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "no user turn"),
        ({"messages": [{"role": "user", "content": " \n"}]}, "empty question"),
        ({"messages": [{"role": "user", "content": None}]}, "empty question"),
        ({"messages": [{"role": "alien", "content": "q"}]}, "unknown role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "images"),
        ({"messages": [{"role": "user", "content": 5}]}, "content that is not text"),
        ({"prompt": "q", "images": ["x.png"]}, "images"),
        ({"messages": [5]}, "a turn that is not an object"),
        ({"other": "q"}, "no known chat column"),
        ({"text": "a", "role": "assistant", "parent_id": "p"}, "a single message that is not a user's"),
        ({"text": "q", "role": "prompter", "parent_id": "p"}, "a single message without the conversation before it"),
        ({"question": "", "context": "c"}, "empty question"),
        ({"question": "q", "context": {"sentences": ["c"]}}, "a context that is not text"),
        ({"instruction": "q", "history": "told above"}, "a history that is not a list of text pairs"),
        ({"instruction": "q", "history": [["q"]]}, "a history that is not a list of text pairs"),
        ({"prompt": "q", "tools": [{"name": "f"}]}, "tool definitions, which are not supported"),
        ({"messages": [ASK], "tools": '[{"name": "f"}]'}, "tool definitions, which are not supported"),
        ({"messages": [ASK], "functions": "f(x)"}, "tool definitions, which are not supported"),
        ({"messages": [ASK, {"role": "tool", "content": "r"}]}, "a tool result without its call"),
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
    dolly = {"instruction": "q", "context": "c", "input": "i"}
    assert one(tmp_path, dolly).messages == [{"role": "user", "content": "q\n\nc\n\ni"}]
    squad = {"question": "q", "context": "c", "answers": {"text": ["a"]}}
    assert one(tmp_path, squad).messages == [{"role": "user", "content": "q\n\nc"}]


def test_history_comes_before_the_rows_own_question(tmp_path):
    row = {"instruction": "q3", "input": "i", "system": "s", "history": [["q", "a"], ["q2", "a2"]]}
    asked = [{"role": "user", "content": text} for text in ("q", "q2", "q3\n\ni")]
    system = {"role": "system", "content": "s"}
    for turns, followups in (("first", []), ("all", [asked[1:2], asked[2:]])):
        found = one(tmp_path, row, turns=turns)
        assert (found.messages, found.followups) == ([system, asked[0]], followups)


def test_system_prompt_comes_first_and_once(tmp_path):
    """Case 15: a row's own system message stays."""
    own = {"messages": [{"role": "system", "content": "own"}, ASK]}
    assert one(tmp_path, {"prompt": "q"}, system_prompt="s").messages == [{"role": "system", "content": "s"}, ASK]
    assert one(tmp_path, own, system_prompt="s").messages == own["messages"]
    for blank in ({"system_prompt": " ", "prompt": "q"}, {"messages": [{"role": "system", "content": ""}, ASK]}):
        assert one(tmp_path, blank, system_prompt="s").messages == [{"role": "system", "content": "s"}, ASK]
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


def test_conversations_that_part_later_share_their_opening(tmp_path):
    """The split goes by the opening: the same first prompt, asked for each of them, is never on both sides."""
    rows = [{"turns": turns} for turns in (["q", "a"], ["q", "b"], ["q"], ["other", "a"])]
    every = stream(tmp_path, rows, turns="all")
    assert len({question.key for question in every}) == 4
    assert [question.opening for question in every[:3]] == [every[2].key] * 3 != every[3].opening
    for question in stream(tmp_path, rows[2:], turns="first"):  # runs of "first" go on with the splits that they have
        assert question.opening == question.key


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
    legacy = {"role": "assistant", "content": None, "function_call": CALL | {"arguments": '{"a": 1}'}}
    answer = {"role": "function", "name": "f", "content": "r"}
    last = {"role": "assistant", "content": "a"}
    assert one(tmp_path, {"messages": [ASK, legacy, answer, last]}, turns="all").key == found.key
    assert one(tmp_path, {"messages": [ASK, legacy, answer, last]}).key == found.key
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


def nested(depth: int) -> str:
    return '{"a":' * depth + "1" + "}" * depth


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ('{"type": "a\\ud800b"}', None),
        ('{"a\\udfff": ["\\ud800"]}', None),
        (nested(99), None),
        ('{"a": NaN}', "tool calls that are not JSON"),
        ('{"a": [1e999]}', "tool calls that are not JSON"),
        (nested(900), "tool calls that are not JSON"),
        (nested(100_000), "not JSON"),
        ('{"a": %s}' % ("1" * 5000), "not JSON"),
    ],
)
@pytest.mark.parametrize("as_text", [False, True])
def test_arguments_that_some_reader_chokes_on(tmp_path, as_text, arguments, reason):
    """Usable after cleaning, or told: never the end of the run. Text that is no object stays the text that it is."""
    call = json.dumps(arguments) if as_text else arguments
    row = '{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "tool_calls": [{"name": "f", '
    row += f'"arguments": {call}}}]}}, {{"role": "tool", "content": "r"}}]}}'
    found = one(tmp_path, row)
    if reason and not (as_text and reason == "not JSON"):
        assert isinstance(found, Skipped) and found.reason == reason
        return
    line = json.dumps([on_the_wire(message) for message in found.messages], allow_nan=False, ensure_ascii=False)
    assert "\\ud" not in line and line.encode() and json_line({"messages": found.messages})
    parsed = canonical(found.messages[1])["tool_calls"][0]["function"]["arguments"]
    assert isinstance(parsed, str if reason else dict)


@pytest.mark.parametrize("line", ['{"prompt": %s}' % ("9" * 5000), "[" * 100_000, '{"prompt": NaN}'])
def test_lines_that_are_no_questions_are_told(tmp_path, line):
    kinds = [type(found) for found in stream(tmp_path, [line, {"prompt": "q"}])]
    assert kinds == [Skipped, Question]


def test_lone_surrogates_are_cleaned(tmp_path):
    assert one(tmp_path, '{"prompt": "a\\ud800b"}').messages[0]["content"] == "a\ufffdb"
