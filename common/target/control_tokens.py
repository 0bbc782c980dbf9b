"""Which added tokens of a tokenizer are control tokens, and an encoder of plain text that never produces them.

Tokenizers also add ordinary text as tokens: a blank line, runs of spaces, `<b>`, a letter. Such tokens are no control
tokens: a question may contain them, and they keep the tokenizer's ids.
"""

import re
from collections.abc import Iterable

from common.target.messages import clean_text

TOOL_NAME = "tool_call"  # part of the name of every tool-call token of Kimi and of Qwen
RESERVED = re.compile(r"<[|｜].+[|｜]>", re.DOTALL)  # control tokens even if not flagged special, as <|fim_prefix|>
BRACKETED = re.compile(r"<.+>|\[.+\]", re.DOTALL)  # a control token if the chat template prints it


def control_tokens(tokenizer, markers: Iterable[str]) -> dict[str, int]:
    """name -> id of the added tokens that steer the target. `markers`: the control tokens that the settings name."""
    template, markers = str(tokenizer.chat_template), set(markers)

    def steers(token) -> bool:
        name = token.content
        printed = BRACKETED.fullmatch(name) and name in template
        return token.special or name in markers or TOOL_NAME in name or RESERVED.fullmatch(name) or printed

    return {token.content: id for id, token in tokenizer.added_tokens_decoder.items() if steers(token)}


class TextEncoder:
    """Ids of plain text: the tokenizer without its control tokens, so that no text can become one."""

    def __init__(self, tokenizer, control: dict[str, int]):
        from tokenizers import Tokenizer

        backend = tokenizer.backend_tokenizer
        self._plain = Tokenizer(backend.model)  # the copy shares the byte-pair model, which takes the memory
        if backend.normalizer is not None:
            self._plain.normalizer = backend.normalizer
        self._plain.pre_tokenizer = backend.pre_tokenizer
        ordinary = {id: token for id, token in tokenizer.added_tokens_decoder.items() if token.content not in control}
        self._plain.add_tokens([ordinary[id] for id in sorted(ordinary)])
        # Added tokens missing from the base vocabulary get new ids here, so map them back to the tokenizer's ids.
        self._ids = {self._plain.token_to_id(token.content): id for id, token in ordinary.items()}

    def ids(self, text: str) -> list[int]:
        """The tokenizer's ids of the text."""
        return [self._ids.get(id, id) for id in self._plain.encode(clean_text(text), add_special_tokens=False).ids]
