"""A vLLM server of the tests' own, in a thread: a chat page that writes made-up ids, and a metrics page that counts.

Each reply of T tokens takes drafts of k = 3, of which 3, 0, 1, 3, 0, 1 .. tokens are accepted, until T are written. Two
engines share the work, as with data parallelism, and another model's lines stand beside them.
"""

import threading
import zlib

from tests.support.http_server import HttpServer

MODEL, K = "target", 3
PATTERN = (3, 0, 1)
NAME = "vllm:spec_decode_num_"


class DraftServer(HttpServer):
    """`drafts=False`: no draft counters. `fail`: question texts that get HTTP 500. `delay_s`: of each reply."""

    def __init__(self, drafts: bool = True, fail: tuple[str, ...] = (), different: bool = False):
        self.drafts, self.fail, self.different = drafts, fail, different
        self.engines = [[0, [0] * K] for _ in range(2)]  # drafts, accepted per position
        self.bodies: list[dict] = []
        self.lock = threading.Lock()

    def handle(self, path: str, body: dict | None, headers: dict) -> tuple[int, dict | list | bytes]:
        if body is not None:
            return self.answer(body)
        pages = {
            "/v1/models": {"data": [{"id": MODEL}]},
            "/version": {"version": "0.32.0"},
            "/metrics": self.metrics().encode(),
        }
        return (200, pages[path]) if path in pages else (404, {})

    def answer(self, body: dict) -> tuple[int, dict | bytes]:
        question = body["messages"][-1]["content"]
        with self.lock:
            self.bodies.append(body)
            if question in self.fail:
                return 500, b"out of luck"
            number = min(10 + zlib.crc32(question.encode()) % 20, body["max_tokens"])
            ids = [zlib.crc32(f"{question} {i} {self.different}".encode()) % 1000 for i in range(number)]
            self.count(number, len(self.bodies) % 2)
        choice = {"message": {"content": "text"}, "token_ids": ids, "finish_reason": "stop"}
        return 200, {"choices": [choice], "usage": {"completion_tokens": number}}

    def count(self, tokens: int, engine: int) -> None:
        counters, written, at = self.engines[engine], 1, 0  # the first token is the prefill's
        while written < tokens:
            accepted = PATTERN[at % len(PATTERN)]
            counters[0] += 1
            for position in range(accepted):
                counters[1][position] += 1
            written, at = written + 1 + accepted, at + 1

    def metrics(self) -> str:
        lines = ["# HELP vllm:num_requests_running Number of requests", 'vllm:num_requests_running{engine="0"} 0.0']
        for engine, (drafts, accepted) in enumerate(self.engines if self.drafts else []):
            for model, factor in ((MODEL, 1), ("another", 7)):
                labels = f'engine="{engine}",model_name="{model}"'
                lines.append(f"{NAME}drafts_total{{{labels}}} {drafts * factor:.1f}")
                lines.append(f"{NAME}draft_tokens_total{{{labels}}} {drafts * K * factor:.1f}")
                lines.append(f"{NAME}accepted_tokens_total{{{labels}}} {sum(accepted) * factor:.1f}")
                lines.append(f"{NAME}drafts_created{{{labels}}} 1.7e9")
                lines += [
                    f'{NAME}accepted_tokens_per_pos_total{{{labels},position="{at}"}} {n * factor:.1f}'
                    for at, n in enumerate(accepted)
                ]
        return "\n".join(lines) + "\n"
