"""The vLLM extractor: a client of servers that run vLLM's `extract_hidden_states` method with its connector.

A request with a sample's exact ids is answered with the path of a file to come: `hidden_states` bf16 [T, A+1, H] and
`token_ids` [T]. It is waited for, checked and deleted (common/extraction/spool.py). Our environment does not import
vLLM; the servers and this client share a folder (`extract.spool`).
"""

import json
import shutil
import threading
import time
import urllib.request
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass
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
from common.pipeline.errors import SafetyStop, UserError
from common.pipeline.settings import Extract, Target
from common.servers.endpoints import api_roots, read_models
from common.target.sizes import TargetSizes, weights_name

PROBE_TOKENS = 16
RESTED_S = 10.0  # a server that failed is asked again only after so long, while others answer
LONGEST_PAUSE_S = 30.0
RETRIES = 3  # of a failed sample, with exponential backoff
MAX_CONSECUTIVE_FAILURES = 32  # the run stops at so many failed samples in a row
SAMPLE_TIMEOUT_S = 600.0  # deadline of one sample, its file included
START_HINT = "start it with what --print-server-command prints"


class Refused(ExtractError):
    """The server says that the request itself is wrong; another try would be refused too."""


@dataclass
class Server:
    """One extraction server, its requests in flight, and when it may be asked again."""

    url: str
    client: openai.OpenAI
    model: str = ""
    in_flight: int = 0
    rests_until: float = 0.0


class VllmExtractor:
    """States from one or more extraction servers, `extract_concurrency` samples in flight."""

    def __init__(self, target: Target, settings: Extract, aux_layers: tuple[int, ...], sizes: TargetSizes):
        self.target, self.settings, self.sizes = target, settings, sizes
        self.layers = [*aux_layers, sizes.layers]
        self.lock, self.failed_in_a_row = threading.Lock(), 0
        self.description = ""

    def __enter__(self) -> "VllmExtractor":
        with ExitStack() as stack:
            options = {"api_key": "EMPTY", "max_retries": 0, "timeout": SAMPLE_TIMEOUT_S}
            urls = api_roots(self.settings.extract_urls, "extract.extract_urls")
            self.servers = [Server(url, stack.enter_context(openai.OpenAI(base_url=url, **options))) for url in urls]
            unnamed = [server.url for server in self.servers if not self._check_server(server)]
            self.spool = Spool(Path(self.settings.spool))
            stack.callback(self.spool.close)
            self._check_spool()
            self.pool = ThreadPoolExecutor(self.settings.extract_concurrency)
            stack.callback(self.pool.shutdown, wait=False, cancel_futures=True)
            stack.callback(self.spool.stopped.set)  # first of all: a thread must not wait for a server that hangs
            self._exit = stack.pop_all()
        self.description = f"vLLM at {', '.join(urls)}, {self.settings.extract_concurrency} in flight"
        if unnamed:
            self.description += (
                f"; {', '.join(unnamed)} does not say which layers it extracts (VLLM_SERVER_DEV_MODE=1 makes it)"
            )
        return self

    def __exit__(self, *error) -> None:
        self._exit.close()

    # ---- start-up ----

    def _check_server(self, server: Server) -> bool:
        """Find the served model; raises UserError where the server is not one for this config.

        Returns whether the server told its layer list: without it only count and width of the states can be checked.
        """
        try:
            model = read_models(server.client.models.with_raw_response.list().text)[0]
        except (openai.OpenAIError, ValueError) as error:
            raise UserError(f"no server answers at {server.url} ({error}); {START_HINT}") from None
        server.model, longest = model["id"], model.get("max_model_len")
        served = [str(model[key]) for key in ("id", "root") if model.get(key)]
        if weights_name(self.target.model) not in map(weights_name, served):  # a folder of weights may have any name
            say(
                f"  WARNING   {server.url} serves {', '.join(dict.fromkeys(served))}; target.model is "
                f"{self.target.model}: states of another model make a useless draft"
            )
        if type(longest) is int and longest <= self.settings.max_tokens_per_sample:
            raise UserError(
                f"{server.url} takes {longest} tokens; a stream of extract.max_tokens_per_sample "
                f"{self.settings.max_tokens_per_sample} needs one more: restart it so, or lower the setting"
            )
        told = _told_config(server.url)
        layers, spool = told.get("layer_ids", self.layers), Path(told.get("shared_storage_path", self.settings.spool))
        if layers != self.layers:
            raise UserError(f"{server.url} extracts layers {layers}, this config needs {self.layers}; re{START_HINT}")
        if spool.resolve() != Path(self.settings.spool).resolve():
            raise UserError(
                f"{server.url} writes to {spool}, extract.spool is {self.settings.spool}; set --spool {spool}"
            )
        return "layer_ids" in told

    def _check_spool(self) -> None:
        """Warn where the spool can't hold what all requests in flight may leave: a server fails then, or dies."""
        tokens, flying = self.settings.max_tokens_per_sample, self.settings.extract_concurrency
        wanted = flying * tokens * len(self.layers) * self.sizes.hidden_size * torch.bfloat16.itemsize
        size = shutil.disk_usage(self.spool.folder).total
        if size < wanted:
            say(
                f"  WARNING   the spool {self.spool.folder} is on {gb(size)}; {flying} samples of {tokens:,} tokens in "
                f"flight take {gb(wanted, up=True)}: another --spool, a lower --extract-concurrency, or, in Docker, "
                f"--shm-size {-(-wanted // 10**9)}g"
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
        """States of each stream as it comes; at most `extract_concurrency` files lie in the spool."""
        streams, running = iter(streams), {}
        while True:
            for stream in islice(streams, self.settings.extract_concurrency - len(running)):
                running[self.pool.submit(self._fetch, stream)] = stream
            if not running:
                return
            done: set[Future] = wait(running, return_when=FIRST_COMPLETED).done
            for future in done:
                stream, result = running.pop(future), future.result()
                self._watch(result)
                yield stream, result

    def _watch(self, result: States | ExtractError) -> None:
        """The circuit breaker: a dead server must not turn a night's samples into failures."""
        self.failed_in_a_row = self.failed_in_a_row + 1 if isinstance(result, ExtractError) else 0
        if self.failed_in_a_row >= MAX_CONSECUTIVE_FAILURES:
            raise SafetyStop(f"{self.failed_in_a_row} samples failed in a row, the last with: {result}; rerun to go on")

    def _fetch(self, stream: Stream) -> States | ExtractError:
        for attempt in range(RETRIES + 1):
            with self.lock:
                now = time.monotonic()
                server = min(self.servers, key=lambda s: (s.rests_until > now, s.in_flight))
                server.in_flight += 1
            try:
                return self._try(stream, server)
            except Refused as error:
                return error
            except ExtractError as error:
                problem, server.rests_until = error, time.monotonic() + RESTED_S
            finally:
                with self.lock:
                    server.in_flight -= 1
            last = attempt == RETRIES
            if last or self.spool.stopped.wait(min(LONGEST_PAUSE_S, 2.0**attempt)):
                return problem
        raise AssertionError("no try was made")

    def _try(self, stream: Stream, server: Server) -> States:
        """One request and its file; raises ExtractError. Whatever happens, nothing of it stays in the spool."""
        deadline = time.monotonic() + SAMPLE_TIMEOUT_S
        request, path, sound = self.spool.new_request(), None, False
        try:
            path = self._ask(stream, server, request)
            with self.spool.wait(path, deadline):
                states = self._read(path, stream)
            sound = True
            return states
        finally:
            self.spool.clean(request, path, given_up=not sound)

    def _ask(self, stream: Stream, server: Server, request: str) -> Path:
        try:
            raw = server.client.completions.with_raw_response.create(
                model=server.model,
                prompt=stream.ids.tolist(),
                max_tokens=1,
                temperature=0.0,
                extra_headers={"X-Request-Id": request},
            )
            reply = json.loads(raw.text)
        except openai.APIStatusError as error:
            kind = Refused if error.status_code in (400, 404, 413, 422) else ExtractError
            raise kind(f"HTTP {error.status_code}: {' '.join(error.response.text.split())[:300]}") from None
        except (openai.OpenAIError, ValueError) as error:
            raise ExtractError(f"{type(error).__name__}: {error}") from None
        except RuntimeError as error:  # the client was closed under us
            raise ExtractError(f"the run was stopped: {error}") from None
        found = (reply.get("kv_transfer_params") or {}).get("hidden_states_path") if isinstance(reply, dict) else None
        if not isinstance(found, str):
            raise ExtractError(f"the server sent no hidden_states_path; {START_HINT}")
        path = Path(found).resolve()
        if path.parent != self.spool.folder:
            raise Refused(
                f"the server writes to {path.parent}, extract.spool is {self.spool.folder}: both must be one folder"
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
        wanted = (len(stream), len(self.layers), self.sizes.hidden_size)
        if states.shape != wanted or states.dtype != torch.bfloat16:
            raise ExtractError(
                f"states are {states.dtype} {list(states.shape)}, expected bfloat16 {list(wanted)}: "
                f"the server must extract layers {self.layers}"
            )
        if not states[-1].any():  # what is written last; a file made at full size would be zero where it was cut
            raise ExtractError(f"{path.name} is not whole: its last state is zero")
        return States(states[:, :-1].reshape(len(stream), -1), states[:, -1].contiguous())


def _told_config(url: str) -> dict:
    """The connector's settings, which a server in development mode tells; empty where it tells nothing.

    vLLM 0.32 tells its layer list nowhere, so the printed command writes it there a second time: see
    common/servers/commands.py.
    """
    page = url.removesuffix("/v1") + "/server_info?config_format=json"
    try:
        with urllib.request.urlopen(page, timeout=30) as response:
            return dict(json.load(response)["vllm_config"]["kv_transfer_config"]["kv_connector_extra_config"])
    except (OSError, ValueError, KeyError, TypeError):
        return {}
