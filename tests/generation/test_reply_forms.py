"""Where reasoning stands, who writes its opener, ids rebuilt from text: cases 1, 5, 7 and 11 of tests/CASES.md."""

import shutil

import pytest

from tests.support.fault_server import FORMS, Reply, message
from tests.support.generation import check_sound
from tests.support.stages import only_error
from tests.support.targets import tiny_protocol


def field_of(form: str) -> str:
    """Where the reasoning of a form stands."""
    return "content" if form.startswith("content") else "reasoning" if form == "both" else form


@pytest.fixture
def model_opens(place, tiny_target, tmp_path):
    """The same place with Qwen3's form: the prompt ends in the header, and the target writes both markers itself."""
    place.target = shutil.copytree(tiny_target, tmp_path / "opens")
    template, opener = place.target / "chat_template.jinja", "'<think>' + ('</think>' if"
    assert opener in template.read_text()
    template.write_text(template.read_text().replace(opener, "('<think></think>' if"))
    place.server.protocol = tiny_protocol(place.target)
    return place


@pytest.mark.parametrize("ids", [True, False])
def test_every_form_gives_the_same_ids(place, tiny, ids):
    """Cases 1 and 11: one server, each form in turn, equal streams."""
    place.server.ids = ids
    streams = []
    for form in FORMS[:5]:
        place.server.form = form
        place.folder = place.folder / form
        place.folder.mkdir()
        code, out, err = place.ask(3).run()
        assert code == 0, err
        check_sound(place.records, tiny)
        streams.append(sorted(r["output_ids"] for r in place.records))
        field = field_of(form)
        assert place.counts["reasoning_fields"] == {field: 3} and f"field: {field} 3" in out
        assert place.counts["ids_from"] == {"server" if ids else "reconstructed": 3}
    assert all(stream == streams[0] for stream in streams)


def test_every_form_where_the_target_writes_the_opener(model_opens):
    """Without ids and without its opener a reply is content with a quoted marker: text never becomes a token."""
    place, protocol, streams = model_opens, model_opens.server.protocol, []
    for form, ids in [(form, True) for form in FORMS[:5]] + [(form, False) for form in FORMS[:5] if form != "content"]:
        place.server.form, place.server.ids = form, ids
        place.folder = place.folder / f"{form}-{ids}"
        place.folder.mkdir()
        code, _, err = place.ask(3).run()
        assert code == 0, f"{form} {ids}: {err}"
        check_sound(place.records, protocol)
        assert all(r["reasoning"].startswith("I think") and r["content"].startswith("Yes") for r in place.records)
        streams.append(sorted(r["output_ids"] for r in place.records))
        assert place.counts["with_reasoning"] == 3 and place.counts["mismatched"] == (3 if form == "content" else 0)
        assert place.counts["reasoning_fields"] == {field_of(form): 3}
    assert streams[0][0][0] == protocol.think_open and all(stream == streams[0] for stream in streams)


@pytest.mark.parametrize("ids", [True, False])
@pytest.mark.parametrize("place_", ["place", "model_opens"])
def test_a_block_that_is_sent_twice_is_written_once(request, place_, ids):
    place = request.getfixturevalue(place_)
    place.server.ids = ids

    def doubled(number, body):
        sent = place.server.completion(body)
        said = sent["choices"][0]["message"]
        said["content"] = f"<think>\n{said['reasoning']}\n</think>{said['content']}"
        return Reply(body=sent)

    place.server.behave = doubled
    assert place.ask(2).run()[0] == 0
    check_sound(place.records, place.server.protocol)
    assert all(r["content"].startswith("Yes") for r in place.records) and place.counts["mismatched"] == 0


@pytest.mark.parametrize("ids", [True, False])
@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
@pytest.mark.parametrize("place_", ["place", "model_opens"])
def test_instant_reply_that_a_parser_takes_for_reasoning(request, place_, field, ids):
    """It waits for a closing token, which stands in the prompt."""
    place = request.getfixturevalue(place_)
    protocol, place.server.ids = place.server.protocol, ids

    def behave(number, body):
        sent = place.server.completion(body, None, "All of it.")
        sent["choices"][0]["message"] = message(protocol, field, "All of it.", None)
        return Reply(body=sent)

    place.server.behave = behave
    assert place.ask(1).run("--no-thinking")[0] == 0
    (record,) = place.records
    assert (record["reasoning"], record["content"]) == ("", "All of it.")
    assert record["output_ids"] == [*protocol.text_ids("All of it."), protocol.end]
    assert place.counts["with_reasoning"] == 0 and place.counts["mismatched"] == 0


@pytest.mark.parametrize(
    ("said", "counted", "kept"),
    [
        ({"reasoning": "hello", "content": "hello"}, 4, "equal"),  # closer and end token
        ({"reasoning": "hello", "content": "hello"}, 6, "differs"),  # sampled in smaller pieces
        ({"reasoning": "r" * 100, "content": "a"}, 140, "differs"),
        ({"reasoning": "r" * 100, "content": "a"}, 150, "refused"),
        ({"reasoning": "r" * 100, "content": "a"}, 60, "refused"),
        ({"reasoning": "r", "content": "a"}, None, "not compared"),
        ({"reasoning": "r", "content": "a"}, "many", "not compared"),
    ],
)
def test_rebuilt_ids_are_held_against_the_servers_count(place, said, counted, kept):
    """Case 7, where the server sends no ids."""

    def behave(number, body):
        sent = place.server.completion(body, **said, ids=False)
        sent["usage"]["completion_tokens"] = counted
        return Reply(body=sent)

    place.server.behave = behave
    code, _, err = place.ask(2).run()
    if kept == "refused":
        assert code == 1 and f"counts {counted} completion_tokens, the text it sent makes 103" in str(place.failures)
        assert place.records == [] and len(place.server.bodies) == 2  # not asked again
        return
    assert code == 0, err
    both = (place.counts["compared"], place.counts["mismatched"])
    assert both == {"equal": (2, 0), "differs": (2, 2), "not compared": (0, 0)}[kept]


def test_a_reply_that_lost_its_reasoning_is_not_stored(place):
    """800 tokens were written and an answer arrived: among sound replies it fails, alone it is silence."""

    def lost(number, body):
        if number % 2:
            return None
        sent = place.server.completion(body, None, "answer", ids=False)
        sent["usage"]["completion_tokens"] = 800
        return Reply(body=sent)

    place.server.ids, place.server.behave = False, lost
    assert place.ask(6).run("--concurrency=1")[0] == 1
    assert len(place.records) == 3 and all(record["reasoning"] for record in place.records)
    assert [f["reason"][:38] for f in place.failures] == ["the server counts 800 completion_tokens"[:38]] * 3
    place.server.behave = lambda number, body: lost(0, body)
    code, _, err = place.ask(6).run("--concurrency=1", "--fresh")
    assert code == 3 and "drops the reasoning" in only_error(err) and place.records == []
    code, out, _ = place.run("--probe")
    assert code == 3 and "no field carries reasoning" in out and "counts 800" in out.splitlines()[-1]
