"""The local engine: transformers in this process, on CPU or GPU, decoding requests in batches.

Sampling is greedy decoding over logits plus Gumbel noise from the request's own seed (the Gumbel-max trick: the same
distribution as sampling from the softmax), so that a reply depends on its request and not on the rest of its batch.
"""

import asyncio

import torch
from transformers import LogitsProcessor, TopPLogitsWarper

from common.generation.engine import Answer, Request, Sampling
from common.pipeline.settings import Target
from common.target.local_model import load_model
from common.target.protocol import Protocol

BATCH_WAIT_S = 0.05  # how long a batch with free rows waits for more requests


class LocalEngine:
    """Answers requests with the target in this process, up to `concurrency` in one batch."""

    def __init__(self, target: Target, protocol: Protocol, batch_size: int, device: str):
        self.target, self.protocol, self.concurrency, self.device = target, protocol, batch_size, device
        self.model, self.version, self.stopping = target.model, "", False

    async def __aenter__(self) -> "LocalEngine":
        import transformers

        self.network = await asyncio.to_thread(load_model, self.target, self.device)
        self.version = f"transformers {transformers.__version__}"
        self.waiting: asyncio.Queue = asyncio.Queue()
        self.worker = asyncio.create_task(self._work())
        return self

    async def __aexit__(self, *error) -> None:
        self.worker.cancel()
        self.stopping = True  # after Ctrl-C, the batch ends at its next token

    async def wait_until_back(self, patience_s: float) -> bool:
        return True  # a request cannot get lost inside one process

    async def answer(self, request: Request, sampling: Sampling) -> Answer:
        future = asyncio.get_running_loop().create_future()
        await self.waiting.put((request, sampling, future))
        return await future

    async def _work(self) -> None:
        """Collect waiting requests into a batch, decode it in a thread, deliver the answers."""
        while True:
            batch = [await self.waiting.get()]
            while len(batch) < self.concurrency:
                try:
                    batch.append(await asyncio.wait_for(self.waiting.get(), BATCH_WAIT_S))
                except TimeoutError:
                    break
            requests, samplings, futures = zip(*batch, strict=True)
            # An error of the batch is returned here and raised in the caller of each request.
            (result,) = await asyncio.gather(
                asyncio.to_thread(self.decode, list(requests), samplings[0]), return_exceptions=True
            )
            for row, future in enumerate(futures):
                if future.cancelled():
                    continue
                if isinstance(result, BaseException):
                    future.set_exception(result)
                else:
                    future.set_result(result[row])

    @torch.inference_mode()
    def decode(self, requests: list[Request], sampling: Sampling) -> list[Answer]:
        """Answers to a batch: prompts padded on the left, decoded until each row has its end token or its limit."""
        width = max(len(request.prompt_ids) for request in requests)
        end, think_close = self.protocol.end, self.protocol.think_close
        pads = [width - len(request.prompt_ids) for request in requests]
        ids = torch.tensor([[end] * pad + r.prompt_ids for pad, r in zip(pads, requests, strict=True)])
        mask = torch.tensor([[0] * pad + [1] * (width - pad) for pad in pads])
        processors: list[LogitsProcessor] = []
        if sampling.temperature > 0:
            processors.append(GumbelSampling([r.seed for r in requests], sampling.temperature, sampling.top_p))
        budget = None
        if sampling.thinking and sampling.thinking_budget and think_close is not None:
            budget = ThinkingBudget(width, sampling.thinking_budget, think_close, end)
            processors.append(budget)
        output = self.network.generate(
            ids.to(self.network.device),
            attention_mask=mask.to(self.network.device),
            max_new_tokens=max(request.max_tokens for request in requests),
            do_sample=False,
            eos_token_id=end,
            pad_token_id=end,
            logits_processor=processors,
            stopping_criteria=[self._stop],
        )
        closed = budget.closed.tolist() if budget and budget.closed is not None else [False] * len(requests)
        return list(map(self._answer, requests, output[:, width:].tolist(), closed))

    def _stop(self, input_ids, scores, **_) -> torch.Tensor:
        """The stopping criterion of a batch, called after each token; after Ctrl-C all rows end."""
        return torch.full((len(input_ids),), self.stopping, device=input_ids.device)

    def _answer(self, request: Request, ids: list[int], budget_closed: bool) -> Answer:
        ids = ids[: request.max_tokens]
        end = self.protocol.end
        output_ids = ids[: ids.index(end) + 1] if end in ids else ids
        reply = self.protocol.split(request.prompt_ids, output_ids)
        return Answer(
            finish_reason="stop" if reply.ended else "length",
            prompt_ids=request.prompt_ids,
            output_ids=output_ids,
            reasoning=self.protocol.decode(reply.reasoning_ids) or None,
            content=self.protocol.decode(reply.content_ids) or None,
            reasoning_field="ids" if reply.reasoning_ids else "",
            usage={"prompt_tokens": len(request.prompt_ids), "completion_tokens": len(output_ids)},
            server=self.version,
            budget_closed=budget_closed and reply.closed,  # the request's own limit may cut the closing token off
        )


class GumbelSampling(LogitsProcessor):
    """Turns greedy decoding into sampling: adds each row's own noise to its logits after temperature and top-p."""

    def __init__(self, seeds: list[int], temperature: float, top_p: float):
        self.generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        self.temperature, self.nucleus = temperature, TopPLogitsWarper(top_p) if top_p < 1 else None

    def __call__(self, input_ids, scores):
        scores = scores.float() / self.temperature
        if self.nucleus is not None:
            scores = self.nucleus(input_ids, scores)
        noise = torch.stack([torch.empty(scores.shape[1]).exponential_(generator=g) for g in self.generators])
        return scores - noise.log().to(scores.device)


class ThinkingBudget(LogitsProcessor):
    """Writes the closing token where the reasoning is still open after `budget` tokens, as vLLM's own budget does.

    `closed`: bool [rows], the rows in which it wrote the closing token; None until `budget` tokens are decoded.
    """

    def __init__(self, prompt_width: int, budget: int, close_id: int, end_id: int):
        self.prompt_width, self.budget, self.close_id, self.end_id = prompt_width, budget, close_id, end_id
        self.closed: torch.Tensor | None = None

    def __call__(self, input_ids, scores):
        output = input_ids[:, self.prompt_width :]
        if output.shape[1] == self.budget:
            self.closed = ~((output == self.close_id) | (output == self.end_id)).any(dim=1)
            scores[self.closed] = -torch.inf
            scores[self.closed, self.close_id] = 0
        return scores
