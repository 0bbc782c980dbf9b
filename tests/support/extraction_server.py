"""An extraction server of the tests' own: it answers like vLLM's hidden-states connector, and misbehaves on request.

    with ExtractionServer(spool, states_of) as server:
        server.behave = lambda number, ids: "half file" if number < 2 else None     # None: answer as usual
        ... server.url ... server.asked ...

As with the real one, the answer comes before the file, and an exclusive flock on PATH.lock is held until it is written.
"""

import fcntl
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.support.http_server import HttpServer

MODEL = "fake-target"


class ExtractionServer(HttpServer):
    """`states_of(ids)`: bf16 [T, layer ids, H]; `delay_s`: how long after the answer a file is written."""

    def __init__(self, spool: Path, states_of: Callable[[list[int]], Tensor], delay_s: float = 0.01):
        self.spool, self.states_of, self.delay_s = spool, states_of, delay_s
        self.behave: Callable[[int, list[int]], str | None] = lambda number, ids: None
        self.tells: dict | None = None  # what /server_info tells of the connector; None: the page is not there
        self.model: dict = {"id": MODEL}  # as /v1/models lists it
        self.models: dict | bytes | None = None  # what is there instead of a list of it
        self.max_model_len, self.names_files, self.held_s = 4096, True, 0.5
        self.asked: list[list[int]] = []
        self.most_files, self.writers, self.guard, self.over = 0, [], threading.Lock(), threading.Event()

    def __exit__(self, *_) -> None:
        super().__exit__()
        self.over.set()
        for writer in self.writers:
            writer.join()

    def start(self) -> None:
        self.spool.mkdir(parents=True, exist_ok=True)
        super().start()

    def handle(self, path: str, body: dict | None, headers: dict) -> tuple[int, dict | list | bytes]:
        if path == "/v1/models":
            model = self.model | {"max_model_len": self.max_model_len}
            return 200, {"object": "list", "data": [model]} if self.models is None else self.models
        if path.startswith("/server_info") and self.tells is not None:
            return 200, {"vllm_config": {"kv_transfer_config": {"kv_connector_extra_config": self.tells}}}
        if path != "/v1/completions" or body is None:
            return 404, {"error": "no such page"}
        assert body["max_tokens"] == 1 and body["model"] == self.model["id"], body
        return self.complete(body["prompt"], headers["X-Request-Id"])

    # ---- one request ----

    def complete(self, ids: list[int], name: str) -> tuple[int, dict | bytes]:
        """(status, body) of a completion request; what is to be written is written by a thread."""
        with self.guard:
            number = len(self.asked)
            self.asked.append(ids)
            files = [path for path in self.spool.iterdir() if path.suffix == ".safetensors"]
            self.most_files = max(self.most_files, len(files))
        fault = self.behave(number, ids)
        if fault == "error 500":
            return 500, {"error": "the engine is dead"}
        if fault == "error 400":
            return 400, {"error": "the prompt is too long"}
        if fault == "html":
            return 200, b"<html>gateway</html>"
        if fault == "no path":
            return 200, {"choices": [{"text": ""}], "kv_transfer_params": None}
        name = f"cmpl-{name if self.names_files else uuid4().hex}-0-{uuid4().hex[:8]}.safetensors"
        path = self.spool / name
        if fault == "other folder":
            path = self.spool.parent / "elsewhere" / name
            path.parent.mkdir(exist_ok=True)
            path.touch()
        elif fault != "no lock":
            lock = os.open(f"{path}.lock", os.O_CREAT | os.O_WRONLY, 0o644)
            fcntl.flock(lock, fcntl.LOCK_EX)
            writer = threading.Thread(target=self._write, args=(path, ids, fault, lock), daemon=True)
            writer.start()
            self.writers.append(writer)
        if fault == "answer lost":
            return 0, b""
        return 200, {"choices": [{"text": ""}], "kv_transfer_params": {"hidden_states_path": str(path)}}

    def _write(self, path: Path, ids: list[int], fault: str | None, lock: int) -> None:
        self.over.wait(self.held_s if fault == "held" else self.delay_s)
        with suppress(FileNotFoundError):  # the test's folder may be gone by then
            if fault not in ("lock without file", "killed while writing"):
                self._save(path, ids, fault)
        os.close(lock)

    def _save(self, path: Path, ids: list[int], fault: str | None) -> None:
        states, token_ids = self.states_of(ids).clone(), torch.tensor(ids)
        if fault == "nan":
            states[len(ids) // 2, 0, 3] = float("nan")
        if fault == "constant":
            states[:] = states[:1]
        if fault == "float32":
            states = states.float()
        if fault == "other ids":
            token_ids = token_ids + 1
        if fault == "rows lost":
            states = states[:-1]
        if fault == "other layers":
            states = states[:, 1:]
        if fault == "zero tail":
            states[len(ids) // 2 :] = 0
        temporary = path.with_name(f".tmp{uuid4().hex[:6]}")
        save_file({"hidden_states": states.contiguous(), "token_ids": token_ids}, temporary)
        if fault == "half file":
            os.truncate(temporary, temporary.stat().st_size // 2)
        os.rename(temporary, path)
