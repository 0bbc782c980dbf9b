"""Kimi's tokenizer without Kimi's code: built from tiktoken.model, tokenizer_config.json and the chat template.

The vendor ships byte-pair ranks and a Python class to read them; no `tokenizer.json`. Running that class would execute
foreign code, and transformers versions that map it to a class of their own number its tokens differently. So the ranks
go through transformers' own tiktoken converter with Kimi's split pattern, and every reserved slot gets its id from the
config. The result is an ordinary fast tokenizer, cached beside the run under the hash of all that it was made of.
"""

import base64
import binascii
import json
from dataclasses import dataclass
from pathlib import Path

from common.pipeline.errors import UserError
from common.pipeline.files import atomic_path, digest, sha256

RANKS, CONFIG, TEMPLATE, FAST = "tiktoken.model", "tokenizer_config.json", "chat_template.jinja", "tokenizer.json"
RESERVED_SLOTS = 256  # ids after the ranks: control tokens, and names kept for later ones
BUILD_VERSION = 1  # part of the cache's key: raise it when this file makes another tokenizer of the same input

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
    """What the vendor ships, found in a folder or fetched from the hub."""

    ranks: Path
    config: dict
    template: str


def find_vendor_files(name: str, revision: str = "") -> VendorFiles | None:
    """The vendor's files of a tokenizer that has tiktoken.model and no tokenizer.json, else None.

    `name`: local folder or hub name. Raises UserError that names what is missing.
    """
    if find_file(name, FAST, revision) is not None:
        return None
    ranks = find_file(name, RANKS, revision)
    if ranks is None:
        return None
    config_path = find_file(name, CONFIG, revision)
    if config_path is None:
        raise UserError(f"{name} has {RANKS} and no {CONFIG}; fetch that file too")
    try:
        config = json.loads(config_path.read_text("utf-8"))
    except ValueError as error:
        raise UserError(f"{config_path}: not JSON ({error})") from None
    template_path = find_file(name, TEMPLATE, revision)
    template = template_path.read_text("utf-8") if template_path else config.get("chat_template")
    if not isinstance(template, str):
        raise UserError(f"{name} has {RANKS}, no {TEMPLATE} and no chat_template in {CONFIG}; fetch {TEMPLATE} too")
    return VendorFiles(ranks, config, template)


def build_tokenizer(files: VendorFiles, cache: Path | None):
    """A transformers fast tokenizer with the vendor's ids. `cache`: folder that keeps its JSON; None: none is kept."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    slots = _slots(files)
    key = digest([BUILD_VERSION, sha256(files.ranks), SPLIT_PATTERN, sorted(slots.items())])[:16]
    stored = cache / f"kimi-tokenizer-{key}.json" if cache else None
    if stored is not None and stored.is_file():
        fast = Tokenizer.from_file(str(stored))
    else:
        fast = _convert(files.ranks, slots)
        if stored is not None:
            stored.parent.mkdir(parents=True, exist_ok=True)
            with atomic_path(stored) as temporary:
                fast.save(str(temporary))
    named = ("bos_token", "eos_token", "unk_token", "pad_token")
    tokens = {name: _content(files.config[name]) for name in named if files.config.get(name)}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=fast, clean_up_tokenization_spaces=False, **tokens)
    tokenizer.chat_template = files.template
    for id, (content, _) in slots.items():
        if tokenizer.convert_tokens_to_ids(content) != id:
            raise UserError(f"{content!r} is id {tokenizer.convert_tokens_to_ids(content)} in the tokenizer, not {id}")
    return tokenizer


def read_ranks(path: Path) -> dict[bytes, int]:
    """Byte-pair ranks, one `base64(bytes) rank` a line. tiktoken's own reader is avoided: it caches by path, so that a
    replaced file would be read as the old one."""
    try:
        pairs = (line.split() for line in path.read_bytes().splitlines() if line.strip())
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs}
    except (ValueError, binascii.Error):
        raise UserError(f"{path}: not a tiktoken file (a line is no `base64 rank`)") from None
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise UserError(f"{path}: its ranks are not 0 to {len(ranks) - 1}; is the file cut? fetch it again")
    return ranks


def _convert(path: Path, slots: dict[int, tuple[str, bool]]):
    from tokenizers import AddedToken
    from transformers.convert_slow_tokenizer import TikTokenConverter

    class Converter(TikTokenConverter):
        load_tiktoken_bpe = staticmethod(lambda _: read_ranks(path))

    fast = Converter(vocab_file=str(path), pattern=SPLIT_PATTERN).converted()
    fast.add_tokens([AddedToken(text, normalized=False, special=special) for _, (text, special) in slots.items()])
    return fast


def _slots(files: VendorFiles) -> dict[int, tuple[str, bool]]:
    """Every reserved slot in id order: id -> (name, flagged special). The gaps are filled as the vendor's code does:
    tokens are numbered by adding them in order, so a gap would move all that follow."""
    with open(files.ranks, "rb") as file:
        first = sum(1 for line in file if line.strip())
    named = {int(id): token for id, token in files.config.get("added_tokens_decoder", {}).items()}
    outside = [id for id in named if not first <= id < first + RESERVED_SLOTS]
    if outside:
        raise UserError(
            f"{files.ranks} holds {first} ranks, but token {outside[0]} of {CONFIG} is not among the {RESERVED_SLOTS} "
            "ids after them; is the file cut? fetch it again"
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
        found = cached_file(name, filename, revision=revision or None, _raise_exceptions_for_missing_entries=False)
    except OSError as error:  # no such repository, a gated one, or no network: then a cached copy may lack this file
        if isinstance(try_to_load_from_cache(name, CONFIG, revision=revision or None), str):
            return None
        said = str(error).strip().splitlines()[0]
        raise UserError(f"no tokenizer at {name!r} ({said}); set target.tokenizer to a folder or hub name") from None
    return Path(found) if found else None
