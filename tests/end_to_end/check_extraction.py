"""Extraction from a real vLLM: its states against transformers', layer by layer; a killed server; wrong servers.

The prompts go through stage 02's own client: alone, all at once, in reverse order. Two of them share 512 tokens; one of
500 tokens is prefilled in chunks of 128.
"""

import json
import time
from array import array
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from common.dataset.shards import States
from common.dataset.stream import Stream
from common.extraction.extractor import ExtractError
from common.extraction.vllm_extractor import VllmExtractor
from common.pipeline.settings import Extract, Target
from common.target.sizes import read_sizes
from tests.end_to_end.pipeline_run import Run
from tests.end_to_end.server import VllmServer, printed_server
from tests.end_to_end.state_distance import distance, run_distance

CHUNK = 128  # tokens of a prefill chunk
LENGTHS = (1, 15, 16, 17, 64, 300, 500)  # around the cache's block of 16, several blocks, four chunks
SHARED, OWN = 512, 20  # tokens that two prompts share, tokens of each after them
SAME, OTHER = 0.04, 0.1  # relative distances: at most this up to bf16 rounding, at least this to another layer's states
CHUNKED = ("--enable-chunked-prefill", "--max-num-batched-tokens", str(CHUNK))


def prompts(text: list[int]) -> list[list[int]]:
    """Prompts of LENGTHS tokens, cut one after the other out of `text`, and two whose first SHARED tokens are equal."""
    cut, at = [], 0
    for length in LENGTHS:
        cut.append(text[at : at + length])
        at += length
    shared = text[at : at + SHARED]
    return [*cut, shared + text[:OWN], shared + text[OWN : 2 * OWN]]


def ask(extract: Extract, target: Target, prompts: list[list[int]]) -> list[States]:
    """The states of each prompt, in the prompts' order, through stage 02's client."""
    sizes = read_sizes(target)
    streams = [Stream(str(i), array("i", ids), array("B", bytes(len(ids)))) for i, ids in enumerate(prompts)]
    with VllmExtractor(target, extract, sizes.aux_layers(extract.aux_layers), sizes) as extractor:
        extracted = {int(stream.id): states for stream, states in extractor.states(streams)}
    failed = [str(states) for states in extracted.values() if isinstance(states, ExtractError)]
    if failed:
        raise ExtractError("; ".join(failed))
    return [extracted[i] for i in range(len(prompts))]


def check_layers(
    check, name: str, extracted: list[States], reference: list[Tensor], layers: list[int], share: float | None
) -> None:
    """The states under each layer id are the input of that layer, and clearly not of the layers beside it.

    `reference`: transformers' states, [layers + 1, T, H] a prompt.
    """
    stacked = [
        torch.cat([s.aux.unflatten(1, (len(layers) - 1, -1)), s.last.unsqueeze(1)], 1) for s in extracted
    ]  # [T, ids, H] a prompt
    own = torch.cat([r[:, :1] for r in reference[:1]] + [r[:, 1:] for r in reference], 1)  # one first state: it is huge
    states = torch.cat([s[:1] for s in stacked[:1]] + [s[1:] for s in stacked])
    for column, k in enumerate(layers):
        near = {j: distance(states[:, column], own[j], share) for j in (k - 1, k, k + 1) if j < len(own)}
        mine = near.pop(k)
        others = ", ".join(f"id {j} {d:.3f}" for j, d in near.items())
        check(
            f"{name}: id {k} is the input of layer {k}",
            mine < SAME and min(near.values()) > OTHER,
            f"off by {mine:.4f}; {others}",
        )


def check_company(
    check, name: str, extract: Extract, target: Target, prompts: list[list[int]], share: float | None
) -> list[States]:
    """Prompts alone, all at once and in reverse order give the same states, one row a token.

    Returns the states of all at once.
    """
    together = ask(extract, target, prompts)
    alone = ask(Extract(**vars(extract) | {"extract_concurrency": 1}), target, prompts)
    reverse = ask(extract, target, prompts[::-1])[::-1]
    rows = [(len(s.aux), len(s.last)) for s in together]
    lengths = [len(ids) for ids in prompts]
    check(f"{name}: rows are the prompt's tokens", rows == [(n, n) for n in lengths], lengths)
    for other, states in (("alone", alone), ("in reverse", reverse)):
        pairs = [(a, b) for a, b in zip(together, states, strict=True) if len(a.last) > 1]
        off = max(distance(getattr(a, part), getattr(b, part), share) for a, b in pairs for part in ("aux", "last"))
        check(f"{name}: together and {other} give the same states", off < SAME, f"off by {off:.4f}")
    one, two = together[-2:]
    off = max(
        distance(one.aux[:SHARED], two.aux[:SHARED], share), distance(one.last[:SHARED], two.last[:SHARED], share)
    )
    apart = distance(one.last[SHARED - 1 :], two.last[SHARED - 1 :], share)
    seen = f"off by {off:.4f}, the rest {apart:.2f}"
    check(f"{name}: a shared prefix has the same states, the rest has others", off < SAME and apart > OTHER, seen)
    return together


def chunks_mla() -> bool:
    """Whether vLLM's CPU build prefills MLA in chunks, which only its AMX kernels do.

    Without AMX it switches chunking off but keeps a step's token limit, so that a longer prompt would wait for ever.
    """
    return " amx_tile " in Path("/proc/cpuinfo").read_text("utf-8").replace("\n", " ")


def extraction_server(run: Run, spool: Path, log: Path, *flags: str, **settings: object) -> VllmServer:
    """The server that 02 prints for this run, on the CPU connector, with these further flags of vLLM."""
    printed = run("02", "--print-server-command", extractor="vllm", spool=spool, **settings)
    return printed_server(printed, log, *flags)


def check_states(
    check, name: str, server: VllmServer, run: Run, spool: Path, text: list[int], aux: tuple[int, ...],
    reference: Callable[[list[list[int]]], list[Tensor]], share: float | None = None,
) -> None:  # fmt: skip
    """All comparisons on one server. `reference(prompts)` gives transformers' states, [layers + 1, T, H] a prompt;
    `share` is that of `distance`."""
    target = Target(model=str(run.target["model"]))
    extract = Extract(
        extract_urls=(server.base_url + "/v1",),
        aux_layers=aux,
        spool=str(spool),
        extract_concurrency=16,
        max_tokens_per_sample=1024,
    )
    asked = prompts(text)
    extracted = check_company(check, name, extract, target, asked, share)
    layers = [*aux, read_sizes(target).layers]
    check_layers(check, name, extracted, reference(asked), layers, share)
    check(f"{name}: the spool is empty", left(spool) == [], left(spool))


def left(spool: Path) -> list[str]:
    """Names of the files that are still in the spool."""
    return sorted(path.name for path in spool.iterdir()) if spool.exists() else []


def check_killed_server(check, run: Run, whole: Run, server: VllmServer, spool: Path, **settings: object) -> None:
    """SIGKILL of the server and its workers in the middle of 02; a rerun gives what an unbroken run gives."""
    flags = {"extractor": "vllm", "spool": spool, "extract_urls": server.base_url + "/v1", **settings}
    process = run.start("02", shard_gib=0.02, **flags)
    manifest = run.folder / "02_hidden" / "manifest.json"
    while process.poll() is None and not (manifest.exists() and json.loads(manifest.read_text())["files"]):
        time.sleep(0.05)
    server.kill()
    code = process.wait(timeout=300)
    before = run.manifest("02_hidden")
    stored = sum(facts["sequences"] for facts in before.files.values())
    total = whole.manifest("02_hidden").counts["sequences"]
    check("killed server: 02 stops by itself, resumable", code in (1, 3), f"exit code {code}")
    check("killed server: it was in the middle", 0 < stored < total, f"{stored} of {total} stored")
    server.start()
    run("02", shard_gib=0.02, **flags)
    off, compared = run_distance(run, whole)
    check(
        "killed server: the rerun equals an unbroken run",
        off < SAME and compared == total,
        f"{compared}, off by {off:.4f}",
    )
    check("killed server: the spool is empty", left(spool) == [], left(spool))


def check_refused(check, name: str, run: Run, message: str, **settings: object) -> None:
    """02 exits with 2 before it stores anything, and its error contains `message`."""
    output = run("02", "--extractor", "vllm", expect=2, **settings)
    error = output.strip().splitlines()[-1]
    nothing = not list((run.folder / "02_hidden").glob("shard-*"))
    check(f"refused at start: {name}", message in error and nothing, error)
