"""The concurrent loop of stage 01b: one worker for each request that the engine takes at once.

All workers draw from the same pending conversations. A record is appended as soon as its reply is checked, so that
finished samples survive whatever stops the run.
"""

import asyncio
import os
import time
from collections import Counter
from dataclasses import dataclass

from common.generation.engine import Answer, Engine, EngineError, Request
from common.generation.record import Record, check_rebuilt, counted_tokens, make_record
from common.generation.record_folder import RecordFolder
from common.generation.work import Conversation, PendingConversations, sampling_of
from common.pipeline.console import Progress, say
from common.pipeline.errors import SafetyStop
from common.pipeline.settings import Generate
from common.questions.conversations import Unusable
from common.servers.retries import RetryPolicy
from common.target.protocol import Protocol

RETRIES = 4  # of a failed request
MAX_CONSECUTIVE_FAILURES = 64  # the run stops after this many failed requests in a row
SILENCE_AFTER = 16  # a run with thinking on stops if none of its first 16 replies has reasoning
MAX_SILENT_SHARE = 0.1  # warn above this share of samples without reasoning
SYNC_EVERY_S = 10.0  # a power cut loses at most the records of the last 10 s; a killed process loses none
# The ids of the first 64 replies and of every 16th are also rebuilt from text, to measure how often that is exact.
COMPARE_FIRST, COMPARE_EVERY = 64, 16


@dataclass
class Generation:
    """One run over the pending conversations; `await run()` returns when all are done, or raises SafetyStop."""

    engine: Engine
    protocol: Protocol
    settings: Generate
    pending: PendingConversations
    records: RecordFolder

    def __post_init__(self):
        self.counts, self.sampling = self.records.counts, sampling_of(self.settings)
        self.policy, self.in_flight = RetryPolicy(RETRIES, MAX_CONSECUTIVE_FAILURES, "requests"), 0
        # The first replies are held back until one has reasoning: if the server drops all reasoning, none of them may
        # be stored, or a resumed run would skip them.
        self.watching = self.sampling.thinking and self.protocol.think_open is not None
        self.held: list[tuple[Record, Answer]] = []

    async def run(self, total: int | None) -> None:
        """`total`: number of wanted samples for the progress bar, None if unknown."""
        with Progress("generate", total, "samples", done=min(len(self.records), total or 0)) as self.progress:
            self.started = time.monotonic()
            workers = [asyncio.create_task(self._work()) for _ in range(self.engine.concurrency)]
            syncing = asyncio.create_task(self._sync())
            try:
                await asyncio.gather(*workers)
                if self.held and not self.counts.with_reasoning:  # neither this run nor an earlier one got reasoning
                    self._stop_for_silence()
                self._store_held()
                self.progress.resize(self.counts.planned)
            finally:
                for task in (*workers, syncing):
                    task.cancel()
                await asyncio.gather(*workers, syncing, return_exceptions=True)

    async def _work(self) -> None:
        for conversation in self.pending:  # all workers share one iterator, so each conversation has one worker
            await self._converse(conversation)

    async def _sync(self) -> None:
        while True:
            await asyncio.sleep(SYNC_EVERY_S)
            handle = self.records.lines.handle_to_sync()
            if handle is not None:
                try:
                    await asyncio.to_thread(os.fsync, handle)
                finally:
                    os.close(handle)

    # ---- conversations ----

    async def _converse(self, conversation: Conversation) -> None:
        """Generate the missing turns of a conversation in order; each prompt holds the target's earlier replies."""
        messages, prompt_ids = conversation.question.messages, conversation.prompt_ids
        for turn, id in enumerate(conversation.ids):
            if id in self.records:
                record = self.records.record(id)
            else:
                try:
                    prompt_ids = prompt_ids if turn == 0 else self.pending.prompt_ids(messages)
                except Unusable as error:
                    return self._drop(conversation, turn, error.reason, error.detail)
                record = await self._sample(id, messages, prompt_ids, conversation.source(turn))
            if record is None or record.finish_reason != "stop":
                return self._drop(conversation, turn + 1, "an earlier turn is missing or was cut")
            if turn + 1 < len(conversation.ids):
                reply = {"role": "assistant", "content": record.content or ""}
                messages = [*messages, reply, *conversation.question.followups[turn]]

    def _drop(self, conversation: Conversation, turn: int, reason: str, detail: str = "") -> None:
        """Skip the turns from `turn` on: their prompts need the replies before them."""
        for id in conversation.ids[turn:]:
            self.counts.dropped += 1
            self.records.skip(reason, detail, id=id, source=conversation.question.source)

    async def _sample(self, id: str, messages: list[dict], prompt_ids: list[int], source: dict) -> Record | None:
        seed = (int(id, 16) ^ self.settings.seed) % 2**31
        max_tokens = min(self.sampling.max_tokens, self.settings.context_tokens - len(prompt_ids))
        request = Request(id, source, messages, prompt_ids, seed, max_tokens)
        self.in_flight += 1
        try:
            answer, seconds = await self._ask(request)
            compare = self.counts.new < COMPARE_FIRST or self.counts.new % COMPARE_EVERY == 0
            record = make_record(request, answer, self.sampling, self.protocol, self.engine.model, seconds, compare)
            silent = self.watching and not record.reasoning
            if not silent:
                check_rebuilt(record)
        except EngineError as error:
            self._count_failure(id, source, str(error))
            return None
        finally:
            self.in_flight -= 1
        self.policy.succeeded()
        self.held.append((record, answer))
        if not silent:
            self.watching = False
            self._store_held()
        elif len(self.held) == SILENCE_AFTER:  # not >=: more replies may arrive before the workers stop
            self._stop_for_silence()
        return record

    async def _ask(self, request: Request) -> tuple[Answer, float]:
        """(answer, seconds it took), retried with backoff; raises EngineError when no retry is left.

        A request that no server received is no failed try: it is sent again once a server accepts connections.
        """
        tries = 0
        while True:
            started = time.monotonic()
            try:
                async with asyncio.timeout(self.settings.request_timeout_s):
                    answer = await self.engine.answer(request, self.sampling)
                return answer, time.monotonic() - started
            except TimeoutError:
                error = EngineError(f"no answer within {self.settings.request_timeout_s:g} s", retry=True)
            except EngineError as received:
                error = received
            if error.lost:
                if not await self.engine.wait_until_back(self.settings.outage_s):
                    raise SafetyStop(f"no server for {self.settings.outage_s:g} s ({error}); start one and rerun")
                continue
            tries += 1
            pause_s = self.policy.pause_s(tries, error.wait_s, self.settings.request_timeout_s) if error.retry else None
            if pause_s is None:
                raise error
            await asyncio.sleep(pause_s)

    # ---- records, replies without reasoning, failures ----

    def _store_held(self) -> None:
        held, self.held = self.held, []
        for record, _ in held:
            try:
                check_rebuilt(record)
            except EngineError as error:
                self._count_failure(record.id, record.source, str(error))
            else:
                self.records.append(record)
                self._show(1)

    def _stop_for_silence(self) -> None:
        """Print the replies' fields and raise SafetyStop, since thinking is on and no reply has reasoning."""
        seen = Counter(f"{name} ({kind})" for _, answer in self.held for name, kind in answer.fields.items())
        say("  fields of the server's replies:")
        for name, count in sorted(seen.items()):
            say(f"    message.{name} in {count} of {len(self.held)} replies")
        counted = sum(counted_tokens(answer.usage) or 0 for _, answer in self.held)
        written = sum(len(record.output_ids) for record, _ in self.held)
        say(f"    usage.completion_tokens: {counted} in all; the texts received make {written} tokens")
        fix = (
            "the server counts more tokens than it sent: its parser, or a proxy, drops the reasoning"
            if counted > 1.2 * written + 16
            else "start it with its reasoning parser (vLLM: --reasoning-parser kimi_k2) and the target's chat template"
        )
        raise SafetyStop(
            f"thinking is on, but none of the first {len(self.held)} replies has reasoning in any field; {fix}, or "
            "use --no-thinking. No reply was stored; --probe shows one reply in detail"
        )

    def _count_failure(self, id: str, source: dict, reason: str) -> None:
        self.records.fail(id, source, reason)
        self._show(0)
        self.policy.failed(reason)

    def _show(self, done: int) -> None:
        counts, elapsed = self.counts, max(time.monotonic() - self.started, 1e-9)
        expected = self.sampling.thinking and self.protocol.think_open is not None
        silent = counts.silent_share if expected else 0.0
        warning = {"WARNING": f"{silent:.0%} without reasoning"} if silent > MAX_SILENT_SHARE else {}
        self.progress.update(
            done,
            failed=counts.failed,
            in_flight=self.in_flight,
            tokens_s=f"{counts.new_output_tokens / elapsed:.0f}",
            mean_tokens=f"{counts.output_tokens / max(counts.done, 1):.0f}",
            reasoning=f"{counts.with_reasoning / max(counts.done, 1):.0%}",
            **warning,
        )
