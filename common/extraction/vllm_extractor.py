"""The vLLM extractor: a client of servers that run vLLM's `extract_hidden_states` method with its connector.

The reply to a sample's exact ids names a file that the server is about to write into the folder that both share
(`extract.spool`): `hidden_states` bf16 [T, A+1, H] and `token_ids` [T]. The extractor waits for the file, checks it and
deletes it (common/extraction/spool.py). vLLM itself is not imported.
"""

import json
import shutil
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import ExitStack
from itertools import count, islice
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
from common.servers.endpoints import Endpoint, api_roots, error_line, least_loaded
from common.servers.retries import RetryPolicy, refusal
from common.target.sizes import TargetSizes, weights_name

PROBE_TOKENS = 16
SAMPLE_TIMEOUT_S = 600.0  # deadline of one sample, its file included
RETRIES = 3  # of a failed sample
MAX_CONSECUTIVE_FAILURES = 32  # the run stops after this many failed samples in a row
RETRY_SERVER_AFTER_S = 10.0  # a server that failed gets no request for this long while others answer
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
        urls = ", ".join(server.url for server in self.servers)
        self.description = f"vLLM at {urls}, {self.settings.extract_concurrency} requests in flight"
        if unnamed:
            hint = "does not say which layers it extracts (with VLLM_SERVER_DEV_MODE=1 it does)"
            self.description += f"; {', '.join(unnamed)} {hint}"
        with ExitStack() as stack:
            self.spool = Spool(Path(self.settings.spool))
            stack.callback(self.spool.close)
            self._check_spool()
            for server in self.servers:
                stack.enter_context(server.open_client(openai.OpenAI, SAMPLE_TIMEOUT_S))
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

        Returns whether the server shows which layers it extracts: if not, only the states' shape can be checked.
        """
        model = server.find_model("", START_ADVICE)
        served = [str(model[key]) for key in ("id", "root") if model.get(key)]
        if weights_name(self.target.model) not in map(weights_name, served):  # a folder of weights may have any name
            say(
                f"  WARNING   {server.url} serves {', '.join(dict.fromkeys(served))}; target.model is "
                f"{self.target.model}: states of another model make a useless draft"
            )
        longest, limit = model.get("max_model_len"), self.settings.max_tokens_per_sample
        config, wanted = server.connector_config(), self.settings.spool
        layers, spool = config.get("layer_ids", self.layers), str(config.get("shared_storage_path", wanted))
        if type(longest) is int and longest <= limit:
            fix = "restart the server with a larger --max-model-len, or lower the setting"
            setting = f"extract.max_tokens_per_sample {limit}"
            raise UserError(f"{server.url} takes {longest} tokens; {setting} needs one more: {fix}")
        if layers != self.layers:
            raise UserError(f"{server.url} extracts layers {layers}, this config needs {self.layers}; re{START_ADVICE}")
        if Path(spool).resolve() != Path(wanted).resolve():
            raise UserError(f"{server.url} writes to {spool}, extract.spool is {wanted}; set --spool {spool}")
        return "layer_ids" in config

    def _check_spool(self) -> None:
        """Warn where the spool cannot hold the files of all requests in flight: a server would fail or crash."""
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
        """One short request to each server; raises UserError where its states do not fit this config."""
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
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                stream, result = running.pop(future), future.result()
                if isinstance(result, ExtractError):
                    self.policy.failed(str(result))
                else:
                    self.policy.succeeded()
                yield stream, result

    def _fetch(self, stream: Stream) -> States | ExtractError:
        for tries in count(1):
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
            if not problem.retry:
                return problem
            server.avoid_until = time.monotonic() + RETRY_SERVER_AFTER_S
            pause_s = self.policy.pause_s(tries, problem.wait_s, SAMPLE_TIMEOUT_S)
            if pause_s is None or self.spool.stopped.wait(pause_s):
                return problem

    def _try(self, stream: Stream, server: Endpoint) -> States:
        """The states that one request returns; raises ExtractError. Its file is deleted in every case."""
        deadline = time.monotonic() + SAMPLE_TIMEOUT_S
        request, path, states = self.spool.new_request(), None, None
        try:
            path = self._ask(stream, server, request)
            with self.spool.wait(path, deadline):
                states = self._read(path, stream)
            return states
        finally:
            self.spool.clean(request, path, abandoned=states is None)

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
            raise ExtractError(*refusal(error.response)) from None
        except (KeyError, TypeError):
            raise ExtractError(f"the server sent no hidden_states_path; {START_ADVICE}") from None
        except (openai.OpenAIError, ValueError, RuntimeError) as error:  # RuntimeError: __exit__ has closed the client
            raise ExtractError(error_line(error)) from None
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
