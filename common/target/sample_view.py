"""One sample printed as coloured text: prompt, reasoning and content, with the loss mask and token ids."""

import sys
from itertools import groupby

from torch import Tensor

from common.pipeline.console import say
from common.target.protocol import Protocol

COLOURS = {"prompt": "\x1b[2m", "reasoning": "\x1b[36m", "content": "\x1b[32m", "control": "\x1b[1;33m"}
RESET = "\x1b[0m"


def token_sections(ids: list[int], mask: list[int], protocol: Protocol) -> list[str]:
    """The section of each token: prompt, reasoning, content or control."""
    sections, section = [], "prompt"
    for at, (id, written) in enumerate(zip(ids, mask, strict=True)):
        if written and section == "prompt":
            section = "reasoning" if protocol.think_open in ids[max(at - 1, 0) : at + 1] else "content"
        sections.append("control" if id in protocol.control.values() else section)
        if written and id == protocol.think_close:
            section = "content"
    return sections


def show_sample(id: str, ids: Tensor, mask: Tensor, protocol: Protocol) -> None:
    """Print one sample with a heading above each run of tokens of one section and mask. ids, mask: [tokens]."""
    tokens, written = ids.tolist(), mask.tolist()
    say(f"sample {id}: {len(tokens)} tokens, {sum(written)} written by the target (mask 1)")
    sections, start = token_sections(tokens, written, protocol), 0
    for (section, bit), run in groupby(zip(sections, written, strict=True)):
        run_ids = tokens[start : start + len(list(run))]
        numbers = " ".join(map(str, run_ids)) if section == "control" else f"{run_ids[0]} .. {run_ids[-1]}"
        say(f"[{start}:{start + len(run_ids)}] {section} mask {bit} ids {numbers}")
        colour, reset = (COLOURS[section], RESET) if sys.stdout.isatty() else ("", "")
        say(f"{colour}{protocol.decode(run_ids)}{reset}")
        start += len(run_ids)
