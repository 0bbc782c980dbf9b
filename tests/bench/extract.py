"""What stage 02 costs on top of the forward pass that it needs, and how much memory it takes.

    python tests/bench/extract.py                      the local extractor beside a plain forward of the same batches
    python tests/bench/extract.py --vllm               also the vLLM extractor beside a bare loop of the same requests
    python tests/bench/extract.py --tokens 8192 --repeats 1

`--vllm` starts a real server (.venv-vllm, made by `make rehearse`). Both ratios are the tokens/s of 02's whole loop
(states checked, stored, hashed, compared with the target's choices) over the tokens/s of the forward pass or requests
alone. The two take turns, so that a busy machine slows both. The memory is that of a process that fills a 1 GiB shard.
The last line is for scripts: local_ratio= vllm_ratio= peak_gib=
"""

import argparse
import fcntl
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import repository
import torch

from common.dataset.shard_layout import ShardKind
from common.extraction import on_policy
from common.extraction.local_extractor import LocalExtractor
from common.extraction.loop import Extraction, assign_shards
from common.extraction.on_policy import OnPolicyCheck
from common.extraction.streams import StreamReader
from common.extraction.vllm_extractor import VllmExtractor
from common.pipeline.jsonl import JsonlParts
from common.pipeline.manifest import Manifest
from common.pipeline.settings import Extract, Target
from common.target.protocol import load_protocol
from common.target.sizes import read_sizes
from common.target.tensors import read_tensors

MODEL = "runs/smollm2-thinking"
LENGTHS = (96, 160, 224, 320, 512)  # tokens of a sample, prompt included
IN_FLIGHT = 16


def write_records(folder: Path, tokens: int) -> None:
    """Samples of English (Python's own documentation), so that the on-policy check passes."""
    from tests.end_to_end.tiny_kimi_training import docstrings

    protocol = load_protocol(Target(model=MODEL, think_open_id=15, think_close_id=16, end_token_id=2))
    prompt = protocol.prompt_ids([{"role": "user", "content": "Go on."}])
    words = protocol.tokenizer.encode(" ".join(text for _, _, text in docstrings()), add_special_tokens=False)
    folder.mkdir(parents=True)
    with open(folder / "part-00000.jsonl", "w") as file:
        at = number = 0
        while at + number * len(prompt) < tokens:
            length = LENGTHS[number % len(LENGTHS)] - len(prompt)
            ids = [words[(at + i) % len(words)] for i in range(length)]
            record = {"id": f"r{number:06}", "prompt_ids": prompt, "output_ids": ids, "source": {}}
            file.write(json.dumps(record | {"finish_reason": "length"}) + "\n")
            at, number = at + length, number + 1


on_policy.MAX_NLL, on_policy.MIN_TOP1 = 20.0, 0.0  # the target did not write these replies


class Bench:
    """The records, and 02's loop over them with any extractor."""

    def __init__(self, work: Path, tokens: int, **settings: object):
        self.work, self.target = work, Target(model=MODEL, think_open_id=15, think_close_id=16, end_token_id=2)
        if not (work / "01").exists():
            write_records(work / "01", tokens)
        self.settings = Extract(max_tokens_per_sample=1024, **settings)
        self.sizes = read_sizes(self.target)
        self.aux = self.sizes.aux_layers(())
        self.reader = StreamReader(work / "01", load_protocol(self.target), self.sizes.vocab_size, 0)
        self.locations = self.reader.locate(None)
        self.tokens = sum(location.tokens for location in self.locations)
        self.streams = list(self.reader.load(self.locations))
        self.tensors = read_tensors(self.target, "norm", "lm_head")
        self.kind = ShardKind(MODEL, "", self.sizes.hidden_size, self.aux)
        self.runs = 0

    def loop(self, extractor) -> float:
        """Seconds of stage 02's loop."""
        self.runs += 1
        folder = self.work / f"02-{self.runs}"
        folder.mkdir()
        check = OnPolicyCheck(self.tensors["norm"], self.tensors["lm_head"], self.sizes.eps)
        manifest, failures = Manifest("02_hidden", {}), JsonlParts(folder, prefix="failures")
        shards = assign_shards(self.locations, self.kind, self.settings.shard_gib, 0)
        extraction = Extraction(folder, self.reader, self.kind, check, manifest, failures)
        started = time.perf_counter()
        extraction.run(extractor, shards)
        seconds = time.perf_counter() - started
        assert extraction.failed == 0 and len(manifest.files) == len(shards)
        return seconds


# ---- (a) the local extractor ----


def local_ratio(bench: Bench, repeats: int) -> float:
    extractor = LocalExtractor(bench.target, bench.settings, bench.aux, "cpu")
    batches = []  # the batches that the extractor makes, for the plain forward
    whole = extractor._forward
    extractor._forward = lambda batch: batches.append(batch) or whole(batch)
    bench.loop(extractor)
    extractor._forward = whole
    ids = []
    for batch in batches:
        width = max(map(len, batch))
        rows = [list(stream.ids) + [0] * (width - len(stream)) for stream in batch]
        ids.append(torch.tensor(rows))

    def plain() -> float:
        started = time.perf_counter()
        with torch.inference_mode():
            for batch in ids:
                extractor.decoder(input_ids=batch, use_cache=False)
        return time.perf_counter() - started

    return compare("local", bench.tokens, repeats, plain, lambda: bench.loop(extractor))


# ---- (b) vLLM ----


def vllm_ratio(bench: Bench, repeats: int, url: str) -> float:
    def bare() -> float:
        started = time.perf_counter()
        with ThreadPoolExecutor(IN_FLIGHT) as pool:
            list(pool.map(lambda stream: bare_request(url, stream.ids.tolist()), bench.streams))
        return time.perf_counter() - started

    def ours() -> float:
        with VllmExtractor(bench.target, bench.settings, bench.aux, bench.sizes) as extractor:
            return bench.loop(extractor)

    bare()  # the server's first requests are slower
    return compare("vLLM", bench.tokens, repeats, bare, ours)


def bare_request(url: str, ids: list[int]) -> None:
    """Ask, wait for the file, delete it unread."""
    body = json.dumps({"model": str((repository.ROOT / MODEL).resolve()), "prompt": ids, "max_tokens": 1}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as response:
        path = Path(json.load(response)["kv_transfer_params"]["hidden_states_path"])
    with open(f"{path}.lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        assert path.exists()
    path.unlink()
    Path(f"{path}.lock").unlink()


def compare(name: str, tokens: int, repeats: int, plain, ours) -> float:
    """Of alternating turns the best of each: tokens/s of ours over tokens/s of plain."""
    times = {"plain": [], "02": []}
    for _ in range(repeats):
        times["plain"].append(plain())
        times["02"].append(ours())
    best = {key: min(values) for key, values in times.items()}
    rates = ", ".join(f"{key} {tokens / seconds:.0f} tokens/s" for key, seconds in best.items())
    print(f"{name}: {rates}, ratio {best['plain'] / best['02']:.3f}", flush=True)
    return best["plain"] / best["02"]


# ---- memory ----


class Repeated:
    """An extractor that repeats the states of a few streams for all others: it fills a shard at the disk's speed."""

    description = "repeated"

    def __init__(self, inner: LocalExtractor, streams):
        self.known = {len(stream): states for stream, states in inner.states(streams)}

    def states(self, streams):
        for stream in streams:
            yield stream, self.known[len(stream)]


def measure_peak(work: Path, gib: float) -> None:
    """Fill a shard of `gib` and print this process's largest resident memory, in GiB."""
    per_token = ShardKind("", "", read_sizes(Target(model=MODEL)).hidden_size, (1, 2, 3)).bytes_per_token()
    bench = Bench(work, int(gib * 2**30 / per_token) - 600)
    extractor = LocalExtractor(bench.target, bench.settings, bench.aux, "cpu")
    bench.loop(Repeated(extractor, bench.streams[: 2 * len(LENGTHS)]))
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32768, help="tokens of a turn (default %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="turns of each (default %(default)s)")
    parser.add_argument("--vllm", action="store_true", help="also against a real vLLM server")
    parser.add_argument("--peak", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    os.chdir(repository.ROOT)
    with tempfile.TemporaryDirectory(dir="runs") as folder:
        work = Path(folder)
        if args.peak:
            measure_peak(work, args.peak)
            return
        bench = Bench(work / "local", args.tokens)
        local = local_ratio(bench, args.repeats)
        vllm = float("nan")
        if args.vllm:
            vllm = with_server(work, args)
        peak = subprocess.run([sys.executable, __file__, "--peak", "1.0"], capture_output=True, text=True, check=True)
        print(f"local_ratio={local:.3f} vllm_ratio={vllm:.3f} peak_gib={float(peak.stdout.split()[-1]):.2f}")


def with_server(work: Path, args) -> float:
    from tests.end_to_end.pipeline_run import Run
    from tests.end_to_end.server import printed_server

    spool = (work / "spool").resolve()
    printed = Run(work / "run", "configs/demo.toml")("02", "--print-server-command", extractor="vllm", spool=spool)
    with printed_server(printed, work / "server.log", "--max-num-batched-tokens", "2048", delay_s=0.0) as server:
        urls = (server.base_url + "/v1",)
        bench = Bench(work / "vllm", args.tokens, extract_urls=urls, spool=str(spool), extract_concurrency=IN_FLIGHT)
        return vllm_ratio(bench, args.repeats, server.base_url)


if __name__ == "__main__":
    main()
