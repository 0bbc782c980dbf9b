"""Kimi's tokenizer out of the vendor's three files, with tiktoken itself as the oracle."""

import json
import os
import shutil
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.pipeline.errors import UserError
from common.target.kimi_tokenizer import SPLIT_PATTERN, load_vendor_tokenizer, read_ranks
from tests.support.kimi_vocabulary import reserved_tokens, tokenizer_config, write_json
from tests.support.stages import ROOT
from tests.support.targets import KIMI, kimi_protocol

LINES = [
    "Hello, world! It's 2024; don't STOP'RE\r\n\r\n  next",
    "日本語とEnglishの混在、中文字符。한국어 ไทย עברית العربية",
    "def f(x):\n\treturn x**2  # 平方\n\n\n",
    "🙂👩‍👩‍👧 e\u0301 ǅ ʰ ⅷ ١٢٣٤٥ 1234567",
    "   leading and trailing   ",
]


@pytest.fixture(scope="module")
def oracle(kimi_folder):
    import tiktoken

    ranks = read_ranks(kimi_folder / "tiktoken.model")
    return tiktoken.Encoding("kimi", pat_str=SPLIT_PATTERN, mergeable_ranks=ranks, special_tokens={})


@given(text=st.one_of(st.text(max_size=60), st.lists(st.sampled_from(LINES), max_size=3).map("".join)))
@settings(max_examples=400, deadline=None)
def test_ids_are_those_of_tiktoken(kimi, oracle, text):
    assert kimi.text_ids(text) == oracle.encode(text, disallowed_special=())


def test_every_reserved_slot_has_its_id(kimi):
    for id, (name, special) in reserved_tokens().items():
        token = kimi.tokenizer.added_tokens_decoder[id]
        assert (token.content, token.special) == (name, special)
    assert kimi.tokenizer.encode("<|im_assistant|>assistant<|im_middle|><think>") == [163588, 69702, 163601, 163606]
    assert len(kimi.tokenizer) == 163840


@pytest.fixture
def vendor(kimi_folder, tmp_path):
    shutil.copytree(kimi_folder, tmp_path / "kimi")
    return tmp_path / "kimi"


def test_gaps_in_the_config_move_nothing_and_code_is_not_run(vendor, kimi):
    """Named slots only, and remote code beside them: the same tokenizer."""
    write_json(vendor / "tokenizer_config.json", tokenizer_config(every_slot=False))
    (vendor / "tokenization_kimi.py").write_text("raise SystemExit('executed')")
    protocol = kimi_protocol(vendor)
    assert protocol.prompt_ids([{"role": "user", "content": "hi"}])[-1] == protocol.think_open == 163606
    assert protocol.added == kimi.added


def test_template_inside_the_config_does(vendor):
    template = (vendor / "chat_template.jinja").read_text()
    (vendor / "chat_template.jinja").unlink()
    with pytest.raises(UserError, match=r"chat_template\.jinja"):
        load_vendor_tokenizer(str(vendor))
    config = json.loads((vendor / "tokenizer_config.json").read_text())
    write_json(vendor / "tokenizer_config.json", config | {"chat_template": template})
    assert load_vendor_tokenizer(str(vendor)).chat_template == template


def test_missing_and_broken_files_are_named(vendor):
    ranks = vendor / "tiktoken.model"
    sound = ranks.read_bytes()
    lines = sound.splitlines(keepends=True)
    ranks.write_bytes(b"".join(lines[:1000]))
    with pytest.raises(UserError, match="holds 1000 ranks"):
        kimi_protocol(vendor)
    ranks.write_bytes(b"<html>not found</html>\n")
    with pytest.raises(UserError, match="not a tiktoken file"):
        kimi_protocol(vendor)
    ranks.write_bytes(sound)
    (vendor / "tokenizer_config.json").unlink()
    with pytest.raises(UserError, match=r"no tokenizer_config\.json"):
        kimi_protocol(vendor)


def test_hub_name_from_the_cache_without_network(kimi_folder, tmp_path):
    """As on a node without network: the repository is in the hub's cache, and has no tokenizer.json."""
    repository = tmp_path / "hub/models--moonshotai--Kimi-K2.5"
    shutil.copytree(kimi_folder, repository / "snapshots/0123abc")
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text("0123abc")
    code = (
        "from common.pipeline.settings import Target\n"
        "from common.target.protocol import load_protocol\n"
        f"p = load_protocol(Target(model='moonshotai/Kimi-K2.5', **{KIMI}))\n"
        "print(p.prompt_tail(True))\n"
        "load_protocol(Target(model='nobody/nothing'))"
    )
    environment = os.environ | {"HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.stdout == "[163586, 163588, 69702, 163601, 163606]\n", done.stderr
    assert "UserError: no tokenizer at 'nobody/nothing'" in done.stderr
