"""Kimi's tokenizer without Kimi's code, built from tiktoken.model, tokenizer_config.json and the chat template.

The vendor ships byte-pair ranks and a Python class that reads them, but no `tokenizer.json`, and code of a checkpoint
is not run here. transformers alone is not enough (version 5.24, tried on 2026-12-07 with `trust_remote_code` off): its
AutoTokenizer numbers the control tokens right but splits text by its default pattern, so that "It's" gets other ids;
and it loads a truncated tiktoken.model without an error. So its converter is given Kimi's pattern and checked ranks.
"""

import base64
from pathlib import Path

from common.pipeline.errors import UserError
from common.pipeline.files import read_json

RANKS, CONFIG, TEMPLATE, FAST = "tiktoken.model", "tokenizer_config.json", "chat_template.jinja", "tokenizer.json"
RESERVED_SLOTS = 256  # ids after the ranks, for control tokens and reserved names

_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
SPLIT_PATTERN = "|".join(
    [
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_SUFFIX}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_SUFFIX}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)


def load_vendor_tokenizer(name: str, revision: str = ""):
    """A transformers fast tokenizer with the vendor's ids, or None for a tokenizer that is not in the vendor's files.

    `name`: local folder or hub name. Raises UserError that names a missing or broken file.
    """
    from tokenizers import AddedToken
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import TikTokenConverter

    ranks_path = None if find_file(name, FAST, revision) else find_file(name, RANKS, revision)
    if ranks_path is None:
        return None
    config = _read_config(name, revision)
    ranks = read_ranks(ranks_path)
    slots = _slots(config, ranks_path, len(ranks))

    class Converter(TikTokenConverter):
        load_tiktoken_bpe = staticmethod(lambda _: ranks)

    fast = Converter(vocab_file=str(ranks_path), pattern=SPLIT_PATTERN).converted()
    fast.add_tokens([AddedToken(text, normalized=False, special=special) for text, special in slots.values()])
    named = {key: config[key] for key in ("bos_token", "eos_token", "unk_token", "pad_token") if config.get(key)}
    tokens = {key: token["content"] if isinstance(token, dict) else token for key, token in named.items()}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=fast, clean_up_tokenization_spaces=False, **tokens)
    tokenizer.chat_template = config["chat_template"]
    for id, (content, _) in slots.items():
        assert tokenizer.convert_tokens_to_ids(content) == id, f"{content!r} has another id than {id}"
    return tokenizer


def _read_config(name: str, revision: str) -> dict:
    """The vendor's tokenizer_config.json, with the chat template in it."""
    path = find_file(name, CONFIG, revision)
    if path is None:
        raise UserError(f"{name} has {RANKS} but no {CONFIG}; fetch that file too")
    config = read_json(path)
    if template_path := find_file(name, TEMPLATE, revision):
        config["chat_template"] = template_path.read_text("utf-8")
    if not isinstance(config.get("chat_template"), str):
        raise UserError(f"{name} has neither {TEMPLATE} nor a chat_template in {CONFIG}; fetch {TEMPLATE} too")
    return config


def read_ranks(path: Path) -> dict[bytes, int]:
    """Byte-pair ranks from lines of `base64(bytes) rank`.

    tiktoken's own reader caches on disk by path, so it would read a replaced file as the old one.
    """
    try:
        pairs = (line.split() for line in path.read_bytes().splitlines() if line.strip())
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs}
    except ValueError:
        raise UserError(f"{path}: not a tiktoken file (a line is not `base64 rank`)") from None
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise UserError(f"{path}: its ranks are not 0 to {len(ranks) - 1}; is the file truncated? fetch it again")
    return ranks


def _slots(config: dict, ranks_path: Path, first: int) -> dict[int, tuple[str, bool]]:
    """id -> (name, whether it is flagged special) of all reserved slots in id order. `first`: the id after the ranks.

    Added tokens get consecutive ids, so an unnamed slot gets the name that the vendor's code gives it; without one, all
    later tokens would get other ids.
    """
    named = {int(id): token for id, token in config.get("added_tokens_decoder", {}).items()}
    outside = [id for id in named if not first <= id < first + RESERVED_SLOTS]
    if outside:
        raise UserError(
            f"{ranks_path} holds {first} ranks, but token {outside[0]} of {CONFIG} is not among the {RESERVED_SLOTS} "
            "ids after them; is the file truncated? fetch it again"
        )
    slots = {id: (f"<|reserved_token_{id}|>", True) for id in range(first, first + RESERVED_SLOTS)}
    return slots | {id: (token["content"], bool(token.get("special"))) for id, token in named.items()}


def find_file(name: str, filename: str, revision: str) -> Path | None:
    """The path of a file in a local folder or hub repository, or None if the file is missing there."""
    if Path(name).is_dir():
        path = Path(name) / filename
        return path if path.is_file() else None
    from huggingface_hub import try_to_load_from_cache
    from transformers.utils import cached_file

    try:
        path = cached_file(name, filename, revision=revision or None, _raise_exceptions_for_missing_entries=False)
    except OSError as error:  # no repository, no access or no network
        # Without network, a file that a cached repository lacks raises the same error.
        if isinstance(try_to_load_from_cache(name, CONFIG, revision=revision or None), str):
            return None
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"no tokenizer at {name!r} ({reason}); set target.tokenizer to a folder or hub name") from None
    return Path(path) if path else None
