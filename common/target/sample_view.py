"""A sample as coloured text: prompt, reasoning, content, with the loss mask and the ids at every border."""

import sys

from torch import Tensor

from common.pipeline.console import say
from common.target.protocol import Protocol

COLOURS = {"prompt": "\x1b[2m", "reasoning": "\x1b[36m", "content": "\x1b[32m", "control": "\x1b[1;33m"}
RESET = "\x1b[0m"


def parts(ids: list[int], mask: list[int], protocol: Protocol) -> list[str]:
    """The part of each token: prompt, reasoning, content, or control."""
    opener = protocol.think_open
    found, part = [], "prompt"
    for at, (id, written) in enumerate(zip(ids, mask, strict=True)):
        if written and part == "prompt":
            part = "reasoning" if opener is not None and opener in ids[max(at - 1, 0) : at + 1] else "content"
        found.append("control" if id in protocol.control.values() else part)
        if written and id == protocol.think_close:
            part = "content"
    return found


def show_sample(id: str, ids: Tensor, mask: Tensor, protocol: Protocol) -> None:
    """Print one sample; runs of one part and mask are labelled, control tokens carry their id."""
    tokens, written = ids.tolist(), mask.tolist()
    names = parts(tokens, written, protocol)
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
