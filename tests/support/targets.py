"""Small targets for tests: Kimi's chat form on a byte vocabulary of a few hundred tokens, and the real Kimi's."""

import shutil
from pathlib import Path

from common.pipeline.settings import Target
from common.target.protocol import Protocol, load_protocol
from tests.support.kimi_vocabulary import END_THINK, IM_END, SPECIAL_TOKENS, TEXT_TOKENS, THINK, build_vocabulary
from tests.support.stages import ROOT

TEMPLATE = ROOT / "tests/support/chat_template.jinja"
MERGES = [("h", "e"), ("l", "l"), ("ll", "o"), ("he", "llo")]  # "hello" is one token, or two when sampled so (case 7)
KIMI = {"think_open_id": THINK, "think_close_id": END_THINK, "end_token": "<|im_end|>", "end_token_id": IM_END}


def build_tiny_target(folder: Path) -> Path:
    """A folder with a fast tokenizer that loads in milliseconds: 256 bytes, four merges, Kimi's control tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(a + b for a, b in MERGES)]
    fast = Tokenizer(BPE({word: id for id, word in enumerate(words)}, MERGES))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL_TOKENS.values()])
    fast.add_tokens([AddedToken(name, special=False, normalized=False) for name in TEXT_TOKENS.values()])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=fast, eos_token="[EOS]", bos_token="[BOS]")
    tokenizer.save_pretrained(folder)
    shutil.copyfile(TEMPLATE, folder / "chat_template.jinja")
    return folder


def tiny_protocol(folder: Path) -> Protocol:
    return load_protocol(Target(model=str(folder), end_token="<|im_end|>"))


def build_kimi(folder: Path) -> Path:
    """The vendor's three files with the real vocabulary, its sha256 checked."""
    build_vocabulary(folder)
    return folder


def kimi_protocol(folder: Path) -> Protocol:
    return load_protocol(Target(model=str(folder), **KIMI))
