"""Kimi's tokenizer without Kimi's code, built from tiktoken.model, tokenizer_config.json and the chat template.

The vendor ships byte-pair ranks and a Python class that reads them, but no `tokenizer.json`, and code of a checkpoint
is not run here. transformers alone is not enough (version 5.24, tried on 2026-12-07 with `trust_remote_code` off): its
AutoTokenizer numbers the control tokens right but splits text by its default pattern, so that "It's" gets other ids;
and it loads a truncated tiktoken.model without an error. So its converter is given Kimi's pattern and checked ranks.
"""

import base64
import binascii
import json
from dataclasses import dataclass
from pathlib import Path

from common.pipeline.errors import UserError

RANKS, CONFIG, TEMPLATE, FAST = "tiktoken.model", "tokenizer_config.json", "chat_template.jinja", "tokenizer.json"
RESERVED_SLOTS = 256  # ids after the ranks: control tokens, and reserved names

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


@dataclass(frozen=True)
class VendorFiles:
    """The vendor's files, from a folder or the hub."""

    ranks: Path
    config: dict
    template: str


def find_vendor_files(name: str, revision: str = "") -> VendorFiles | None:
    """The vendor's files of a tokenizer with tiktoken.model and without tokenizer.json, else None.

    `name`: local folder or hub name. Raises UserError that names the missing file.
    """
    ranks = find_file(name, RANKS, revision) if find_file(name, FAST, revision) is None else None
    if ranks is None:
        return None
    config_path = find_file(name, CONFIG, revision)
    if config_path is None:
        raise UserError(f"{name} has {RANKS} but no {CONFIG}; fetch that file too")
    try:
        config = json.loads(config_path.read_text("utf-8"))
    except ValueError as error:
        raise UserError(f"{config_path}: not JSON ({error})") from None
    template_path = find_file(name, TEMPLATE, revision)
    template = template_path.read_text("utf-8") if template_path else config.get("chat_template")
    if not isinstance(template, str):
        raise UserError(f"{name} has neither {TEMPLATE} nor a chat_template in {CONFIG}; fetch {TEMPLATE} too")
    return VendorFiles(ranks, config, template)


def build_tokenizer(files: VendorFiles):
    """A transformers fast tokenizer with the vendor's ids."""
    from tokenizers import AddedToken
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import TikTokenConverter

    ranks = read_ranks(files.ranks)
    slots = _slots(files, len(ranks))

    class Converter(TikTokenConverter):
        load_tiktoken_bpe = staticmethod(lambda _: ranks)

    fast = Converter(vocab_file=str(files.ranks), pattern=SPLIT_PATTERN).converted()
    fast.add_tokens([AddedToken(text, normalized=False, special=special) for text, special in slots.values()])
    names = ("bos_token", "eos_token", "unk_token", "pad_token")
    tokens = {name: _content(files.config[name]) for name in names if files.config.get(name)}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=fast, clean_up_tokenization_spaces=False, **tokens)
    tokenizer.chat_template = files.template
    for id, (content, _) in slots.items():
        assert tokenizer.convert_tokens_to_ids(content) == id, f"{content!r} has another id than {id}"
    return tokenizer


def read_ranks(path: Path) -> dict[bytes, int]:
    """Byte-pair ranks from lines of `base64(bytes) rank`.

    tiktoken's own reader caches on disk by path, so it would read a replaced file as the old one.
    """
    try:
        pairs = (line.split() for line in path.read_bytes().splitlines() if line.strip())
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs}
    except (ValueError, binascii.Error):
        raise UserError(f"{path}: not a tiktoken file (a line is not `base64 rank`)") from None
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise UserError(f"{path}: its ranks are not 0 to {len(ranks) - 1}; is the file truncated? fetch it again")
    return ranks


def _slots(files: VendorFiles, first: int) -> dict[int, tuple[str, bool]]:
    """Every reserved slot in id order: id -> (name, flagged special).

    Added tokens are numbered in order, so gaps are filled as the vendor's code does; a gap would shift all that follow.
    """
    named = {int(id): token for id, token in files.config.get("added_tokens_decoder", {}).items()}
    outside = [id for id in named if not first <= id < first + RESERVED_SLOTS]
    if outside:
        raise UserError(
            f"{files.ranks} holds {first} ranks, but token {outside[0]} of {CONFIG} is not among the {RESERVED_SLOTS} "
            "ids after them; is the file truncated? fetch it again"
        )
    slots = {id: (f"<|reserved_token_{id}|>", True) for id in range(first, first + RESERVED_SLOTS)}
    return slots | {id: (token["content"], bool(token.get("special"))) for id, token in named.items()}


def _content(token) -> str:
    return token["content"] if isinstance(token, dict) else token


def find_file(name: str, filename: str, revision: str) -> Path | None:
    """A file of a local folder or hub repository, or None where it has none."""
    if Path(name).is_dir():
        path = Path(name) / filename
        return path if path.is_file() else None
    from huggingface_hub import try_to_load_from_cache
    from transformers.utils import cached_file

    try:
        path = cached_file(name, filename, revision=revision or None, _raise_exceptions_for_missing_entries=False)
    except (
        OSError
    ) as error:  # no repository, no access or no network; a cached copy of the repository may lack the file
        if isinstance(try_to_load_from_cache(name, CONFIG, revision=revision or None), str):
            return None
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"no tokenizer at {name!r} ({reason}); set target.tokenizer to a folder or hub name") from None
    return Path(path) if path else None
