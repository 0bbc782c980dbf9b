"""The draft vocabulary: which target tokens the draft can propose, as d2t and t2d.

    d2t int64 [D]: an *offset*, target id = draft id + d2t[draft id]      t2d bool [V]: whether the draft has it
Draft ids are sorted by target id (the format that vLLM and SGLang read). Full vocabulary: D = V, d2t is all zero.
"""

import re

import torch
from torch import Tensor

from common.pipeline.errors import UserError

TABLE_SIZES = (8192, 16384, 32000, 65536)


def choose_tokens(counts: Tensor, size: int, always: list[int]) -> Tensor:
    """Target ids int64 [D] in rising order: `always`, the most frequent, and if those are too few, the lowest ids.

    counts: int64 [V], how often the target wrote each token. `size` 0 or V: all of them.
    """
    vocab = len(counts)
    if size in (0, vocab):
        return torch.arange(vocab)
    if not len(set(always)) <= size < vocab:
        raise UserError(f"dataset.draft_vocab_size {size} must lie between {len(set(always))} and {vocab} (0: all)")
    priority = counts.clone()
    priority[always] = counts.max() + 1
    # A stable sort breaks ties by id, so that equal counts give equal vocabularies on every machine.
    return priority.sort(descending=True, stable=True).indices[:size].sort().values


def byte_tokens(tokenizer) -> list[int]:
    """Ids of the tokens of one byte each: with them a draft can propose any text, however rare.

    Two ways to spell a byte: a character of the byte-level alphabet (GPT-2's, tiktoken's), or <0xNN> (SentencePiece).
    """
    from tokenizers.pre_tokenizers import ByteLevel

    decoder = tokenizer.backend_tokenizer.decoder
    byte_level = decoder is not None and b"ByteLevel" in decoder.__getstate__()
    alphabet = set(ByteLevel.alphabet()) if byte_level else set(map(chr, range(128)))
    spelled = re.compile(r"<0x[0-9A-Fa-f]{2}>")
    return sorted(id for token, id in tokenizer.get_vocab().items() if token in alphabet or spelled.fullmatch(token))


def mappings(chosen: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """(d2t int64 [D], t2d bool [V]) of the chosen target ids, in rising order."""
    t2d = torch.zeros(vocab_size, dtype=torch.bool)
    t2d[chosen] = True
    return chosen - torch.arange(len(chosen)), t2d


def kept_tokens(d2t: Tensor, t2d: Tensor) -> Tensor:
    """Target ids int64 [D] of a stored mapping; raises UserError where the two contradict each other.

    They do where d2t holds target ids instead of offsets: engines load such a draft and accept none of its tokens.
    """
    tokens = torch.arange(len(d2t)) + d2t
    if len(tokens) != int(t2d.sum()) or not torch.equal(tokens, torch.nonzero(t2d).flatten()):
        raise UserError("d2t and t2d contradict each other: target id = draft id + d2t[draft id] must list t2d's ids")
    return tokens


def coverage(counts: Tensor, tokens: Tensor) -> float:
    """Share of the target's own tokens that the draft vocabulary can propose."""
    return (counts[tokens].sum() / counts.sum().clamp_min(1)).item()


def coverage_table(counts: Tensor, always: list[int]) -> list[tuple[int, float]]:
    """(size, coverage) for the usual sizes below the vocabulary's, and for the whole vocabulary."""
    sizes = [size for size in TABLE_SIZES if size < len(counts)]
    return [(size, coverage(counts, choose_tokens(counts, size, always))) for size in sizes] + [(len(counts), 1.0)]
