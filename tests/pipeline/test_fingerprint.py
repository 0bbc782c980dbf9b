"""What makes a run of 01b another run: how the target tokenizes a chat, and not the day on which it is asked."""

import json
import shutil
from datetime import datetime

import pytest

from tests.support.stages import only_error
from tests.support.targets import tiny_protocol


@pytest.fixture
def on_the_day(place, tiny_target, monkeypatch):
    """Runs 01b on a day of the month, with a template that prints the date, as Llama-3.2's does."""
    place.target = shutil.copytree(tiny_target, place.folder / "dated")
    template = place.target / "chat_template.jinja"
    template.write_text("{{- '<|im_system|>Today is ' + strftime_now('%d') + '<|im_end|>' -}}" + template.read_text())

    def run(day: int, *flags):
        class Day(datetime):
            @classmethod
            def now(cls, tz=None):
                return cls(2026, 5, day)

        monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", Day)
        place.server.protocol = tiny_protocol(place.target)
        return place.run(*flags)

    return run


def test_a_run_goes_on_after_midnight(place, on_the_day):
    place.ask(4)
    assert on_the_day(1, "--n=2")[0] == 0
    code, _, err = on_the_day(2)
    assert code == 0, err
    days = {place.server.protocol.decode(record["prompt_ids"])[:25] for record in place.records}
    assert len(place.records) == 4 and len(days) == 2


@pytest.mark.parametrize("change", ["template", "normalizer", "added token"])
def test_another_way_to_speak_is_another_run(place, on_the_day, change):
    place.ask(2)
    assert on_the_day(1)[0] == 0
    template, fast = place.target / "chat_template.jinja", place.target / "tokenizer.json"
    if change == "template":
        template.write_text(template.read_text() + "{#- a remark -#}")
    else:
        value = json.loads(fast.read_text())
        if change == "normalizer":
            value["normalizer"] = {"type": "NFD"}
        else:
            last = value["added_tokens"][-1]
            value["added_tokens"].append(last | {"id": last["id"] + 1, "content": "<|one_more|>"})
        fast.write_text(json.dumps(value))
    code, _, err = on_the_day(1)
    assert code == 2 and "protocol.sha256" in only_error(err)
