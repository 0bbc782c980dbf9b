"""The target's token protocol: prompt ids, the split of a reply, its reconstruction from text, the loss mask.

    prompt ids                                        | output ids (what the target wrote: loss mask 1)
    ... <|im_assistant|>assistant<|im_middle|><think> | reasoning </think> content <|im_end|>

Everything works on ids; text is decoded from them. Only where a server sends no ids does `reconstruct` rebuild them
from text, which the record notes. Text never becomes a control token, even if it quotes one.
"""

import re
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, takewhile
from pathlib import Path

from common.pipeline.errors import UserError
from common.pipeline.settings import Target
from common.target.control_tokens import TOOL_NAME, TextEncoder, control_tokens
from common.target.kimi_tokenizer import FAST, find_file, load_vendor_tokenizer
from common.target.messages import canonical, map_text, texts

GENERATION_TAIL = 8  # last tokens of a prompt in which a template may print the opening token
SAMPLE_CHATS = ([{"role": "user", "content": "One, two?"}], [{"role": "user", "content": "Say yes!"}])


class Unrenderable(Exception):
    """The target's chat template refuses these messages; carries the template's error message."""


@dataclass(frozen=True)
class Reply:
    """Output ids split at the closing token. `closed`: it is in the output; `ended`: so is the end token."""

    reasoning_ids: list[int]
    content_ids: list[int]
    closed: bool
    ended: bool


class Protocol:
    """A target's tokenizer whose control tokens are checked. Build it with `load_protocol`."""

    def __init__(self, tokenizer, target: Target):
        self.tokenizer, self.backend = tokenizer, tokenizer.backend_tokenizer
        self.target = target
        self.added = {token.content: id for id, token in tokenizer.added_tokens_decoder.items()}
        self.think_open = self._control("think_open", target.think_open, target.think_open_id)
        close = target.think_close if target.think_open else ""
        self.think_close = self._control("think_close", close, target.think_close_id)
        end = target.end_token or tokenizer.eos_token
        self.end = self._control("end_token", end, target.end_token_id)
        self.think_open_text, self.think_close_text = target.think_open, target.think_close
        self.control = control_tokens(tokenizer, (target.think_open, target.think_close, end))
        self.tool_ids = frozenset(id for name, id in self.control.items() if TOOL_NAME in name)
        names = "|".join(map(re.escape, sorted(self.control, key=len, reverse=True)))
        self._markers = re.compile(names)
        self._marker_starts = re.compile(f"(?s)(?=(?:{names}))(.)")
        self._blank = re.compile(rf"{names}|\s|\ufffd")
        self._text = TextEncoder(tokenizer, self.control)
        self._tails = {thinking: self._check_prompt(thinking) for thinking in (True, False)}

    def _control(self, key: str, token: str | None, wanted: int) -> int | None:
        """The id of a control token, or None if the target has none. Name and id must map to each other."""
        if not token:
            return None
        id = self.tokenizer.convert_tokens_to_ids(token)
        if id is None or self.tokenizer.encode(token, add_special_tokens=False) != [id]:
            none = ", or --think-open '' for a target that does not think" if key == "think_open" else ""
            raise UserError(f"target.{key}: the tokenizer has no single token {token!r}; set the right name{none}")
        if wanted >= 0 and id != wanted:
            raise UserError(
                f"target.{key}: {token!r} is id {id} in this tokenizer, the config says {wanted}; use the target's own "
                "tokenizer, or another transformers version if the installed one numbers tokens wrongly"
            )
        if (text := self.decode([id])) != token:
            raise UserError(
                f"target.{key}: id {id} of {token!r} decodes to {text!r} in this tokenizer; use another transformers "
                "version or the target's own tokenizer"
            )
        return id

    def _check_prompt(self, thinking: bool) -> list[int]:
        """Check the prompt ids of plain text against the tokenizer's; returns the ids at the end of every prompt."""
        first, second = (self.prompt_ids(chat, thinking) for chat in SAMPLE_CHATS)
        expected = self.tokenizer.apply_chat_template(
            SAMPLE_CHATS[0], add_generation_prompt=True, return_dict=False, **template_arguments(self.target, thinking)
        )
        if first != list(expected):
            raise UserError(f"prompt ids differ from those of the tokenizer's chat template (thinking={thinking})")
        return first[len(first) - _shared_length(first[::-1], second[::-1]) :]

    # ---- prompts ----

    @cached_property
    def renders_tools(self) -> bool:
        """Whether the template prints tool calls and their results."""
        call = {"id": "f:0", "type": "function", "function": {"name": "fname", "arguments": {"key": "argvalue"}}}
        messages = [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "toolresult", "tool_call_id": "f:0"},
        ]
        try:
            rendered = self._render([canonical(message) for message in messages], thinking=True)
        except Unrenderable:
            return False
        return all(text in rendered for text in ("argvalue", "toolresult"))

    def prompt_ids(self, messages: list[dict], thinking: bool = True) -> list[int]:
        """Token ids of the generation prompt; raises Unrenderable.

        messages: chat messages with `role` and `content`, and tool calls if the template renders them. Names of control
        tokens inside the messages stay text. No BOS is added to what the template prints.
        """
        messages = [canonical(message) for message in messages]
        if not self.quotes_control(messages):
            return self.backend.encode(self._render(messages, thinking), add_special_tokens=False).ids
        text = "".join(texts(messages))
        # A private-use character, which occurs in no token's name and in no template, breaks the quoted names up.
        separator = next(c for c in map(chr, range(0xE000, 0xF900)) if c not in text)
        rendered = self._render(map_text(messages, lambda t: self._marker_starts.sub(rf"\1{separator}", t)), thinking)
        ids, at = [], 0
        for marker in self._markers.finditer(rendered):
            ids += self.text_ids(rendered[at : marker.start()].replace(separator, ""))
            ids.append(self.control[marker.group()])
            at = marker.end()
        return ids + self.text_ids(rendered[at:].replace(separator, ""))

    def quotes_control(self, messages: list[dict]) -> bool:
        """Whether the messages quote a control token, which a server would tokenize as a real one."""
        return any(self._markers.search(text) for text in texts(messages))

    def _render(self, messages: list[dict], thinking: bool) -> str:
        from jinja2 import TemplateError

        try:
            return self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True, **template_arguments(self.target, thinking)
            )
        # A template is a program: it raises its own refusals, and Python's errors for missing or unexpected values.
        except (TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise Unrenderable(" ".join(f"{type(error).__name__}: {error}".split())[:200]) from None

    def prompt_tail(self, thinking: bool) -> list[int]:
        """The ids that every prompt ends with: the assistant's header and the open or empty think block."""
        return self._tails[thinking]

    def think_open_in_prompt(self, prompt_ids: list[int]) -> bool:
        """Whether the prompt ends with an open think block, so that the reply starts inside the reasoning."""
        return self.think_open is not None and self._last_marker(prompt_ids) == self.think_open

    def think_close_in_prompt(self, prompt_ids: list[int]) -> bool:
        """Whether the prompt ends with an empty think block, so that the reply is content from its first token."""
        return self.think_close is not None and self._last_marker(prompt_ids) == self.think_close

    def _last_marker(self, prompt_ids: list[int]) -> int | None:
        markers = (self.think_open, self.think_close)
        return next((id for id in reversed(prompt_ids[-GENERATION_TAIL:]) if id in markers), None)

    # ---- replies ----

    def text_ids(self, text: str) -> list[int]:
        """Ids of plain text: no BOS, and no control token even if the text quotes one."""
        return self._text.ids(text)

    def decode(self, ids: list[int]) -> str:
        """Text of ids, control tokens printed as their names."""
        return self.backend.decode(ids, skip_special_tokens=False)

    def split(self, prompt_ids: list[int], output_ids: list[int]) -> Reply:
        """Split the target's output into reasoning and content at the closing token's id."""
        ended = bool(output_ids) and output_ids[-1] == self.end
        body = output_ids[:-1] if ended else list(output_ids)
        thinking = self.think_open_in_prompt(prompt_ids)
        if body and self.think_open is not None and body[0] == self.think_open:
            body, thinking = body[1:], True
        if not thinking or self.think_close not in body:
            return Reply(body, [], False, ended) if thinking else Reply([], body, False, ended)
        at = body.index(self.think_close)
        return Reply(body[:at], body[at + 1 :], True, ended)

    def reconstruct(
        self, prompt_ids: list[int], reasoning: str | None, content: str | None, finish_reason: str
    ) -> list[int]:
        """Output ids rebuilt from text, for a server that sends none. A cut reply gets no closing and no end token.

        Without a reasoning parser, everything is in the content, which is split at its first closing marker.
        """
        opened = self.think_open_in_prompt(prompt_ids)
        if not reasoning and content and self.think_open is not None:
            reasoning, content = self.split_text(content, opened)
        ids = []
        if reasoning or opened:
            ids += [] if opened or self.think_open is None else [self.think_open]
            ids += self.text_ids(reasoning or "")
            # Without content the reply may have ended inside its reasoning: parsers send null or "" in both cases, so
            # no closing token is added that the target may not have written.
            ids += [self.think_close] if content else []
        ids += self.text_ids(content or "")
        return ids + ([self.end] if finish_reason == "stop" else [])

    def split_text(self, content: str, opened: bool) -> tuple[str | None, str | None]:
        """(reasoning, content) of a text with think markers. `opened`: the prompt ends with the opening marker."""
        if content.lstrip().startswith(self.think_open_text):
            content, opened = content.lstrip()[len(self.think_open_text) :], True
        if opened and self.think_close_text in content:
            reasoning, _, rest = content.partition(self.think_close_text)
            return reasoning, rest or None
        return (content, None) if opened else (None, content)

    def text_differs(self, reply: Reply, reasoning: str | None, content: str | None, parsed: bool) -> str | None:
        """The first difference between a server's text and its ids, in words, or None.

        `parsed`: the server separated reasoning and content. White space, marker names and U+FFFD are ignored: parsers
        strip the text, servers drop special tokens, and streaming decoders show an incomplete character differently.
        Some parsers end the reasoning at a tool call.
        """
        expected = [self.decode(ids) for ids in (reply.reasoning_ids, reply.content_ids)]
        received = [reasoning or "", content or ""]
        unsplit = self.think_close_text in received[1] and self.think_close_text not in expected[1]
        if not reasoning and not unsplit and (reply.closed or not content):
            expected[0] = ""  # the server does not send the reasoning, so there is nothing to compare
        if [text.strip() for text in expected] == [text.strip() for text in received]:
            return None  # the usual case, thirty times faster than the comparison below
        expected, received = ([self._blank.sub("", text) for text in pair] for pair in (expected, received))
        if not (parsed and reply.closed) or not self.tool_ids.isdisjoint(reply.reasoning_ids):
            expected, received = ["".join(expected)], ["".join(received)]
        for decoded, text in zip(expected, received, strict=True):
            if decoded != text:
                at = _shared_length(decoded, text)
                return f"its text has {text[at : at + 40]!r} where its ids decode to {decoded[at : at + 40]!r}"
        return None

    # ---- training streams ----

    def stream(self, prompt_ids: list[int], output_ids: list[int], limit: int = 0) -> tuple[list[int], list[int]]:
        """(ids, loss mask) of a sample, cut to `limit` tokens (0: not cut); mask 1 where the target wrote the token."""
        mask = [0] * len(prompt_ids) + [1] * len(output_ids)
        return (prompt_ids + output_ids)[: limit or None], mask[: limit or None]

    def check_stream(self, prompt_ids: list[int], output_ids: list[int], vocab_size: int) -> str | None:
        """Why a sample's ids cannot be used, or None if they can."""
        if not prompt_ids or not output_ids:
            return f"{len(prompt_ids)} prompt and {len(output_ids)} output tokens"
        lowest, highest = min(*prompt_ids, *output_ids), max(*prompt_ids, *output_ids)
        if lowest < 0 or highest >= vocab_size:
            return f"token id {lowest if lowest < 0 else highest} is outside the target's vocabulary of {vocab_size}"
        border = [*prompt_ids[-2:], output_ids[0]]
        if self.think_open is not None and (self.think_open, self.think_open) in pairwise(border):
            return f"the opening token {self.think_open} occurs twice at the border of prompt and reply"
        return None


def _shared_length(one, other) -> int:
    """The number of equal items at the start of two sequences."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def template_arguments(target: Target, thinking: bool) -> dict:
    """Arguments of the chat template, `chat_template_kwargs` in a request; empty for a target that does not think."""
    return {target.thinking_argument: thinking} if target.think_open else {}


def load_protocol(target: Target) -> Protocol:
    """The protocol of a target from its tokenizer, a hub name or a folder."""
    name = target.tokenizer or target.model
    require_model(name)
    if tokenizer := load_vendor_tokenizer(name, target.revision):
        return Protocol(tokenizer, target)
    import transformers

    has_json = find_file(name, FAST, target.revision) is not None
    # AutoTokenizer imports torch, so it reads only a tokenizer without tokenizer.json.
    kind = transformers.PreTrainedTokenizerFast if has_json else transformers.AutoTokenizer
    code = {} if has_json else {"trust_remote_code": target.trust_remote_code}
    try:
        tokenizer = kind.from_pretrained(name, revision=target.revision or None, **code)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"no tokenizer at {name!r} ({reason}); set target.tokenizer to a folder or hub name") from None
    for missing, present in (("tokenizer.json", tokenizer.is_fast), ("chat template", tokenizer.chat_template)):
        if not present:
            raise UserError(f"the tokenizer at {name!r} has no {missing}; set target.tokenizer to one that has it")
    return Protocol(tokenizer, target)


def require_model(name: str) -> None:
    """Raise UserError for the path of a missing folder, which a hub client would take for a repository's name."""
    if not name:
        raise UserError("target.model is empty: set it in the config or with --model")
    if not Path(name).is_dir() and (name.startswith(("/", ".", "~")) or Path(Path(name).parts[0]).is_dir()):
        hint = "make demo-target builds it" if Path(name).name == "smollm2-thinking" else "check target.model"
        raise UserError(f"no such folder: {name}; {hint}")
