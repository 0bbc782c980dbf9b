"""One sample printed as coloured text: prompt, reasoning and content, with the loss mask and token ids."""

import sys

from torch import Tensor

from common.pipeline.console import say
from common.target.protocol import Protocol

COLOURS = {"prompt": "\x1b[2m", "reasoning": "\x1b[36m", "content": "\x1b[32m", "control": "\x1b[1;33m"}
RESET = "\x1b[0m"


def token_sections(ids: list[int], mask: list[int], protocol: Protocol) -> list[str]:
    """The section of each token: prompt, reasoning, content or control."""
    think_open = protocol.think_open
    sections, section = [], "prompt"
    for at, (id, written) in enumerate(zip(ids, mask, strict=True)):
        if written and section == "prompt":
            opened = think_open is not None and think_open in ids[max(at - 1, 0) : at + 1]
            section = "reasoning" if opened else "content"
        sections.append("control" if id in protocol.control.values() else section)
        if written and id == protocol.think_close:
            section = "content"
    return sections


def show_sample(id: str, ids: Tensor, mask: Tensor, protocol: Protocol) -> None:
    """Print one sample with a heading above each run of tokens of one section and mask.

    ids, mask: [tokens].
    """
    tokens, written = ids.tolist(), mask.tolist()
    names = token_sections(tokens, written, protocol)
    colours = COLOURS if sys.stdout.isatty() else dict.fromkeys(COLOURS, "")
    reset = RESET if sys.stdout.isatty() else ""
    say(f"sample {id}: {len(tokens)} tokens, {sum(written)} written by the target (mask 1)")
    start = 0
    for at in range(1, len(tokens) + 1):
        if at < len(tokens) and (names[at], written[at]) == (names[start], written[start]):
            continue
        text = protocol.decode(tokens[start:at])
        border = (
            " ".join(map(str, tokens[start:at]))
            if names[start] == "control"
            else f"{tokens[start]} .. {tokens[at - 1]}"
        )
        say(f"[{start}:{at}] {names[start]} mask {written[start]} ids {border}")
        say(f"{colours[names[start]]}{text}{reset}")
        start = at
