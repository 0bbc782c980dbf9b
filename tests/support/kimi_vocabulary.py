"""Kimi's real vocabulary, rebuilt offline.

The vendor ships three tokenizer files (and remote code, which we never run). Their content can be had without the
vendor's repository: the byte-pair ranks are inside the splintr-rs wheel, the reserved tokens are a short list, and the
chat form is a few rules, which `chat_template.jinja` states in our own words. So tests can build the tokenizer from the
files that the vendor ships, and get the vendor's ids.

    python -m tests.support.kimi_vocabulary FOLDER
"""

import base64
import hashlib
import json
import shutil
import sys
from pathlib import Path

BASE_TOKENS = 163_584  # byte-pair ranks, ids 0 .. 163583
RESERVED_TOKENS = 256  # ids 163584 .. 163839
TIKTOKEN_SHA256 = "b6c497a7469b33ced9c38afb1ad6e47f03f5e5dc05f15930799210ec050c5103"

SPECIAL_TOKENS = {
    163584: "[BOS]",
    163585: "[EOS]",
    163586: "<|im_end|>",
    163587: "<|im_user|>",
    163588: "<|im_assistant|>",
    163590: "<|start_header_id|>",
    163591: "<|end_header_id|>",
    163593: "[EOT]",
    163594: "<|im_system|>",
    163601: "<|im_middle|>",
    163602: "<|media_begin|>",
    163603: "<|media_content|>",
    163604: "<|media_end|>",
    163605: "<|media_pad|>",
    163838: "[UNK]",
    163839: "[PAD]",
}
# The model writes these as part of its answer, so the vendor does not flag them special: `skip_special_tokens=True`
# leaves them in the text.
TEXT_TOKENS = {
    163595: "<|tool_calls_section_begin|>",
    163596: "<|tool_calls_section_end|>",
    163597: "<|tool_call_begin|>",
    163598: "<|tool_call_argument_begin|>",
    163599: "<|tool_call_end|>",
    163606: "<think>",
    163607: "</think>",
}

THINK, END_THINK, IM_END = 163606, 163607, 163586

HAN = r"[\p{Han}]+"
UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
SPLIT_PATTERN = "|".join(
    [
        HAN,
        rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{CONTRACTION}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)


def reserved_tokens() -> dict[int, tuple[str, bool]]:
    """Every reserved slot, in id order: id -> (text, flagged special)."""
    named = {i: (text, True) for i, text in SPECIAL_TOKENS.items()} | {i: (t, False) for i, t in TEXT_TOKENS.items()}
    slots = range(BASE_TOKENS, BASE_TOKENS + RESERVED_TOKENS)
    return {i: named.get(i, (f"<|reserved_token_{i}|>", True)) for i in slots}


def build_vocabulary(folder: Path, every_slot: bool = True) -> None:
    """Write the vendor's three files: tiktoken.model, tokenizer_config.json, chat_template.jinja.

    With `every_slot=False`, `added_tokens_decoder` lists only the tokens that have a name. A reader that numbers the
    listed tokens consecutively, over the gaps, gives `<think>` a wrong id.
    """
    folder.mkdir(parents=True, exist_ok=True)
    ranks = tiktoken_ranks()
    digest = hashlib.sha256(ranks).hexdigest()
    if digest != TIKTOKEN_SHA256:
        raise SystemExit(f"splintr-rs gives ranks with sha256 {digest}, not Kimi's {TIKTOKEN_SHA256}; want 0.22.0")
    (folder / "tiktoken.model").write_bytes(ranks)
    write_json(folder / "tokenizer_config.json", tokenizer_config(every_slot))
    shutil.copyfile(Path(__file__).with_name("chat_template.jinja"), folder / "chat_template.jinja")


def tiktoken_ranks() -> bytes:
    """The vendor's `tiktoken.model`: one line `base64(token bytes) rank` for each rank."""
    from splintr import Tokenizer  # only its token bytes: its encoder adds 54 tokens of its own above Kimi's

    kimi = Tokenizer.from_pretrained("kimi_k2")
    lines = (base64.b64encode(kimi.decode_token_bytes(i)) + b" %d\n" % i for i in range(BASE_TOKENS))
    return b"".join(lines)


def tokenizer_config(every_slot: bool) -> dict:
    """tokenizer_config.json in the vendor's form; its class is remote code that a reader must not need."""
    slots = {i: slot for i, slot in reserved_tokens().items() if every_slot or not slot[0].startswith("<|reserved_")}
    return {
        "added_tokens_decoder": {
            str(i): {
                "content": text,
                "lstrip": False,
                "normalized": False,
                "rstrip": False,
                "single_word": False,
                "special": special,
            }
            for i, (text, special) in slots.items()
        },
        "additional_special_tokens": [
            text for i, text in SPECIAL_TOKENS.items() if text.startswith("<|") or text == "[EOT]"
        ],
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "pad_token": "[PAD]",
        "unk_token": "[UNK]",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1_000_000_000_000_000_019_884_624_838_656,
        "tokenizer_class": "TikTokenTokenizer",
    }


def add_fast_tokenizer(folder: Path) -> None:
    """Add tokenizer.json to the vendor's files, and name a class that needs no remote code.

    Then an engine without the vendor's code loads the folder; the ids are the same.
    """
    from tokenizers import AddedToken
    from transformers.convert_slow_tokenizer import TikTokenConverter

    fast = TikTokenConverter(vocab_file=str(folder / "tiktoken.model"), pattern=SPLIT_PATTERN).converted()
    for i, (text, special) in reserved_tokens().items():
        fast.add_tokens([AddedToken(text, normalized=False, special=special)])
        assert fast.token_to_id(text) == i, (text, i, fast.token_to_id(text))
    fast.save(str(folder / "tokenizer.json"))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config["auto_map"]
    write_json(folder / "tokenizer_config.json", config | {"tokenizer_class": "PreTrainedTokenizerFast"})


def write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    build_vocabulary(Path(sys.argv[1]))
