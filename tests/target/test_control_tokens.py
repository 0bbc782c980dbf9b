"""Added tokens that are ordinary text, as Gemma, GPT-NeoX and DeepSeek-V2 have them, beside those that steer."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.pipeline.settings import Target
from common.target.protocol import Protocol
from tests.support.targets import TEMPLATE

ORDINARY = ["\n\n", "\n\n\n", "  ", "    ", "<b>", "<table>", "ü", "user", "日本"]
STEERING = {
    "<|im_user|>": True,
    "<|im_assistant|>": True,
    "<|im_system|>": True,
    "<|im_middle|>": True,
    "<|im_end|>": True,
    "<unk>": True,
    "<think>": False,
    "</think>": False,
    "<note>": False,  # the template prints it
    "<tool_call>": False,
    "<|fim_prefix|>": False,
    "<｜User｜>": False,
}
PLAIN = st.lists(st.sampled_from([*ORDINARY, "\n", " ", "b", "<", "user's", "ü "]) | st.text(max_size=4)).map("".join)


@pytest.fixture(scope="module", params=[False, True], ids=["raw", "normalized"])
def protocol(request) -> Protocol:
    """Ordinary and steering tokens in turn, so that leaving some out would renumber the rest."""
    from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "he", "<b>"]  # one added token is in the vocabulary, too
    fast = Tokenizer(BPE({word: id for id, word in enumerate(words)}, [("h", "e")]))
    fast.normalizer = normalizers.NFC()
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    added = [AddedToken(name, special=special, normalized=False) for name, special in STEERING.items()]
    ordinary = [AddedToken(name, special=False, normalized=request.param) for name in ORDINARY]
    for at in range(max(len(added), len(ordinary))):
        fast.add_tokens(added[at : at + 1] + ordinary[at : at + 1])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=fast, eos_token="<|im_end|>")
    source = "{# the\n\n    user's ü #}" + TEMPLATE.read_text()
    tokenizer.chat_template = source + "{{ '<note>' }}"
    return Protocol(tokenizer, Target("made up"))


def test_which_tokens_steer(protocol):
    """The template's source holds blank lines, runs of spaces and the word user: they are text all the same."""
    assert all(name in protocol.tokenizer.chat_template for name in ("\n\n", "    ", "user", "ü"))
    assert set(protocol.control) == set(STEERING)
    assert protocol.tool_ids == {protocol.added["<tool_call>"]}


@given(text=PLAIN)
@settings(max_examples=300, deadline=None)
def test_text_without_their_names_is_the_tokenizers_own(protocol, text):
    assert protocol.text_ids(text) == protocol.backend.encode(text, add_special_tokens=False).ids
    assert not protocol.quotes_control([{"role": "user", "content": text}])


@given(before=PLAIN, name=st.sampled_from(sorted(STEERING)), after=PLAIN)
@settings(max_examples=200, deadline=None)
def test_a_quoted_name_stays_text_between_ordinary_tokens(protocol, before, name, after):
    text = before + name + after
    assert protocol.quotes_control([{"role": "user", "content": text}])
    assert set(protocol.text_ids(text)).isdisjoint(protocol.control.values())
    around = protocol.prompt_ids([{"role": "user", "content": ""}])
    at = around.index(protocol.end)
    assert (
        protocol.prompt_ids([{"role": "user", "content": text}]) == around[:at] + protocol.text_ids(text) + around[at:]
    )
