"""The vLLM extractor: a client of servers that run vLLM's `extract_hidden_states` method with its connector.

The reply to a sample's exact ids names a file that the server is about to write: `hidden_states` bf16 [T, A+1, H] and
`token_ids` [T]. The extractor waits for the file, checks it and deletes it (common/extraction/spool.py). vLLM is not
imported here; the servers and this client share a folder (`extract.spool`).
"""

import json
import shutil
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from itertools import islice
from pathlib import Path

import openai
import torch
from safetensors import SafetensorError, safe_open

from common.dataset.shards import States
from common.dataset.stream import Stream
from common.extraction.extractor import ExtractError
from common.extraction.spool import Spool
from common.pipeline.console import gb, say
from common.pipeline.errors import UserError
from common.pipeline.settings import Extract, Target
from common.servers.endpoints import Endpoint, api_key, api_roots, least_loaded, status_line
from common.servers.retries import RetryPolicy, is_retried, retry_after_s
from common.target.sizes import TargetSizes, weights_name

PROBE_TOKENS = 16
SAMPLE_TIMEOUT_S = 600.0  # deadline of one sample, its file included
RETRIES = 3  # of a failed sample
MAX_CONSECUTIVE_FAILURES = 32  # samples; the run stops then
RETRY_SERVER_AFTER_S = 10.0  # while others answer, a server that failed gets no request for this long
START_ADVICE = "start it with what --print-server-command prints"


class VllmExtractor:
    """States from one or more extraction servers, `extract_concurrency` samples in flight."""

    def __init__(self, target: Target, settings: Extract, aux_layers: tuple[int, ...], sizes: TargetSizes):
        self.target, self.settings, self.sizes = target, settings, sizes
        self.layers = [*aux_layers, sizes.layers]
        self.policy = RetryPolicy(RETRIES, MAX_CONSECUTIVE_FAILURES, "samples")
        self.lock, self.description = threading.Lock(), ""

    def __enter__(self) -> "VllmExtractor":
        self.servers = [Endpoint(url) for url in api_roots(self.settings.extract_urls, "extract.extract_urls")]
        unnamed = [server.url for server in self.servers if not self._check_server(server)]
        self.description = f"vLLM at {', '.join(server.url for server in self.servers)}, "
        self.description += f"{self.settings.extract_concurrency} requests in flight"
        if unnamed:
            self.description += (
                f"; {', '.join(unnamed)} does not say which layers it extracts (with VLLM_SERVER_DEV_MODE=1 it does)"
            )
        with ExitStack() as stack:
            self.spool = Spool(Path(self.settings.spool))
            stack.callback(self.spool.close)
            self._check_spool()
            # See common/servers/retries.py for why the client must not retry.
            options = {"api_key": api_key(), "max_retries": 0, "timeout": SAMPLE_TIMEOUT_S}
            for server in self.servers:
                server.client = stack.enter_context(openai.OpenAI(base_url=server.url, **options))
            self.pool = ThreadPoolExecutor(self.settings.extract_concurrency)
            stack.callback(self.pool.shutdown, wait=False, cancel_futures=True)
            stack.callback(self.spool.stopped.set)  # called first: no thread may wait for a server that hangs
            self._exit = stack.pop_all()
        return self

    def __exit__(self, *error) -> None:
        self._exit.close()

    # ---- start-up ----

    def _check_server(self, server: Endpoint) -> bool:
        """Find the served model; raises UserError for a server that was started for another config.

        Returns whether the server shows which layers it extracts: otherwise only count and width of the states can be
        checked.
        """
        model = server.find_model("", START_ADVICE)
        served = [str(model[key]) for key in ("id", "root") if model.get(key)]
        if weights_name(self.target.model) not in map(weights_name, served):  # a folder of weights may have any name
            say(
                f"  WARNING   {server.url} serves {', '.join(dict.fromkeys(served))}; target.model is "
                f"{self.target.model}: states of another model make a useless draft"
            )
        longest, limit = model.get("max_model_len"), self.settings.max_tokens_per_sample
        if type(longest) is int and longest <= limit:
            raise UserError(
                f"{server.url} takes {longest} tokens; extract.max_tokens_per_sample {limit} needs one more: restart "
                "the server with a larger --max-model-len, or lower the setting"
            )
        config = server.connector_config()
        layers, spool = config.get("layer_ids", self.layers), config.get("shared_storage_path", self.settings.spool)
        if layers != self.layers:
            raise UserError(f"{server.url} extracts layers {layers}, this config needs {self.layers}; re{START_ADVICE}")
        if Path(str(spool)).resolve() != Path(self.settings.spool).resolve():
            raise UserError(
                f"{server.url} writes to {spool}, extract.spool is {self.settings.spool}; set --spool {spool}"
            )
        return "layer_ids" in config

    def _check_spool(self) -> None:
        """Warn where the spool cannot hold the files of all requests in flight: a server would fail, or die."""
        tokens, samples = self.settings.max_tokens_per_sample, self.settings.extract_concurrency
        needed = samples * tokens * len(self.layers) * self.sizes.hidden_size * torch.bfloat16.itemsize
        size = shutil.disk_usage(self.spool.folder).total
        if size < needed:
            say(
                f"  WARNING   the spool {self.spool.folder} is on {gb(size)}; {samples} samples of {tokens:,} tokens "
                f"in flight take {gb(needed, up=True)}: another --spool, a lower --extract-concurrency, or in Docker "
                f"--shm-size {-(-needed // 10**9)}g"
            )

    def probe(self, stream: Stream) -> None:
        """One short request to each server; raises UserError where its states are not this config's."""
        short = Stream(stream.id, stream.ids[:PROBE_TOKENS], stream.mask[:PROBE_TOKENS])
        for server in self.servers:
            try:
                self._try(short, server)
            except ExtractError as error:
                raise UserError(f"{server.url}: {error}") from None

    # ---- states ----

    def states(self, streams: Iterable[Stream]) -> Iterator[tuple[Stream, States | ExtractError]]:
        """States of each stream, in the order of arrival; the spool holds at most `extract_concurrency` files."""
        streams, running = iter(streams), {}
        while True:
            for stream in islice(streams, self.settings.extract_concurrency - len(running)):
                running[self.pool.submit(self._fetch, stream)] = stream
            if not running:
                return
            done: set[Future] = wait(running, return_when=FIRST_COMPLETED).done
            for future in done:
                stream, result = running.pop(future), future.result()
                if isinstance(result, ExtractError):
                    self.policy.failed(str(result))
                else:
                    self.policy.succeeded()
                yield stream, result

    def _fetch(self, stream: Stream) -> States | ExtractError:
        tries = 0
        while True:
            with self.lock:
                server = least_loaded(self.servers)
                server.in_flight += 1
            try:
                return self._try(stream, server)
            except ExtractError as error:
                problem = error
            finally:
                with self.lock:
                    server.in_flight -= 1
            tries += 1
            pause_s = self.policy.pause_s(tries, problem.wait_s, SAMPLE_TIMEOUT_S) if problem.retry else None
            if problem.retry:
                server.avoid_until = time.monotonic() + RETRY_SERVER_AFTER_S
            if pause_s is None or self.spool.stopped.wait(pause_s):
                return problem

    def _try(self, stream: Stream, server: Endpoint) -> States:
        """One request and its file; raises ExtractError. In every case the spool is cleaned of both."""
        deadline = time.monotonic() + SAMPLE_TIMEOUT_S
        request, path, sound = self.spool.new_request(), None, False
        try:
            path = self._ask(stream, server, request)
            with self.spool.wait(path, deadline):
                states = self._read(path, stream)
            sound = True
            return states
        finally:
            self.spool.clean(request, path, abandoned=not sound)

    def _ask(self, stream: Stream, server: Endpoint, request: str) -> Path:
        try:
            raw = server.client.completions.with_raw_response.create(
                model=server.model,
                prompt=stream.ids.tolist(),
                max_tokens=1,
                temperature=0.0,
                extra_headers={"X-Request-Id": request},
            )
            path = Path(json.loads(raw.text)["kv_transfer_params"]["hidden_states_path"]).resolve()
        except openai.APIStatusError as error:
            message, wait_s = status_line(error.status_code, error.response.text), retry_after_s(error.response.headers)
            raise ExtractError(message, is_retried(error.status_code), wait_s) from None
        except (KeyError, TypeError):
            raise ExtractError(f"the server sent no hidden_states_path; {START_ADVICE}") from None
        except (openai.OpenAIError, ValueError) as error:
            raise ExtractError(f"{type(error).__name__}: {error}") from None
        except RuntimeError as error:  # __exit__ has closed the client meanwhile
            raise ExtractError(f"the run was stopped: {error}") from None
        if path.parent != self.spool.folder:
            raise ExtractError(
                f"the server writes to {path.parent}, extract.spool is {self.spool.folder}: both must be one folder",
                retry=False,
            )
        return path

    def _read(self, path: Path, stream: Stream) -> States:
        try:
            with safe_open(path, "pt") as file:
                states, ids = file.get_tensor("hidden_states"), file.get_tensor("token_ids")
        except (SafetensorError, OSError, KeyError) as error:
            raise ExtractError(f"{path.name} is not whole: {error}") from None
        if ids.tolist() != stream.ids.tolist():
            raise ExtractError(f"{path.name} holds {len(ids)} other token ids: the file of another request")
        shape = (len(stream), len(self.layers), self.sizes.hidden_size)
        if states.shape != shape or states.dtype != torch.bfloat16:
            raise ExtractError(
                f"states are {states.dtype} {list(states.shape)}, expected bfloat16 {list(shape)}: "
                f"the server must extract layers {self.layers}"
            )
        if not states[-1].any():  # written last; a file allocated at full size stays zero where the writer stopped
            raise ExtractError(f"{path.name} is not whole: its last state is zero")
        return States(states[:, :-1].reshape(len(stream), -1), states[:, -1].contiguous())
