"""The concurrent loop of stage 01b: retries, deadlines, circuit breaker, counters, progress.

`concurrency` workers draw units of work (a question and a repeat number) from one iterator, so memory does not grow
with their number. A record is appended the moment its reply is checked; whatever stops the run, finished samples stay.
"""

import asyncio
import random
import time
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field

from common.config import Generate
from common.engines.interface import Answer, Engine, EngineError, Request, Sampling
from common.errors import SafetyStop
from common.progress import Progress
from common.prompts import Question, Skipped
from common.protocol import Protocol
from common.storage import JsonlParts, digest

LONGEST_PAUSE_S = 60.0
COMPARE_FIRST, COMPARE_EVERY = 64, 16  # replies whose ids are also rebuilt from text: the honest mismatch rate


@dataclass(frozen=True)
class Unit:
    """One conversation to generate: a question and the number of its repeat. `ids`: one record id a turn."""

    question: Question
    repeat: int
    ids: list[str]


@dataclass
class Counts:
    """What happened, for the progress bar, the summary and the manifest."""

    done: int = 0
    failed: int = 0
    skipped: Counter = field(default_factory=Counter)
    prompt_tokens: int = 0
    output_tokens: int = 0
    with_reasoning: int = 0
    finish_reasons: Counter = field(default_factory=Counter)
    reasoning_fields: Counter = field(default_factory=Counter)
    ids_from: Counter = field(default_factory=Counter)
    compared: int = 0
    mismatched: int = 0
    lengths: array = field(default_factory=lambda: array("l"))
    seconds: array = field(default_factory=lambda: array("d"))

    def as_dict(self) -> dict:
        """Plain counts for the manifest."""
        return {k: dict(v) if isinstance(v, Counter) else v for k, v in vars(self).items() if not isinstance(v, array)}


def sampling_of(settings: Generate) -> Sampling:
    """The part of the settings that decides what a reply is."""
    names = ("thinking", "thinking_budget", "temperature", "top_p", "max_tokens")
    return Sampling(**{name: getattr(settings, name) for name in names})


def plan_units(
    questions: Iterable[Question | Skipped],
    settings: Generate,
    n: int | None,
    counts: Counts,
    failures: JsonlParts | None,
) -> Iterator[Unit]:
    """Units in the order of the questions, `n` samples at most; unusable rows are counted and listed."""
    sampling = asdict(sampling_of(settings)) | {"seed": settings.seed}
    planned = 0
    for question in questions:
        if isinstance(question, Skipped):
            counts.skipped[question.reason] += 1
            if failures is not None:
                failures.append({"row": question.row, "reason": question.reason})
            continue
        for repeat in range(settings.repeats):
            turns = 1 + len(question.followups)
            ids = [digest([question.key, sampling, repeat, turn])[:16] for turn in range(turns)]
            if n is not None:
                ids = ids[: n - planned]
            if not ids:
                return
            planned += len(ids)
            yield Unit(question, repeat, ids)


class Generation:
    """One run of the loop over `units`; `await run()` returns when all are done, or raises SafetyStop."""

    def __init__(
        self,
        engine: Engine,
        protocol: Protocol,
        settings: Generate,
        records: JsonlParts,
        failures: JsonlParts,
        counts: Counts,
        done_ids: set[str],
    ):
        self.engine, self.protocol, self.settings = engine, protocol, settings
        self.records, self.failures, self.counts, self.done_ids = records, failures, counts, done_ids
        self.sampling = sampling_of(settings)
        self.failed_in_a_row = 0
        self.silent: list[tuple[str, ...]] = []  # the fields of the first replies, while none carried reasoning
        self.watching_silence = self.sampling.thinking and protocol.think_open is not None
        self.in_flight = 0

    async def run(self, units: Iterator[Unit], total: int | None) -> None:
        with Progress("generate", total, "samples", done=min(len(self.done_ids), total or 0)) as self.progress:
            self.started = time.monotonic()
            workers = [asyncio.create_task(self._work(units)) for _ in range(self.engine.concurrency)]
            try:
                await asyncio.gather(*workers)
            finally:
                for worker in workers:
                    worker.cancel()
                await asyncio.gather(*workers, return_exceptions=True)
                self.records.close()
                self.failures.close()

    async def _work(self, units: Iterator[Unit]) -> None:
        for unit in units:  # a plain iterator shared by the workers: each item goes to one of them
            await self._converse(unit)

    async def _converse(self, unit: Unit) -> None:
        """Generate the turns of one conversation in order, each from the regenerated history."""
        if all(id in self.done_ids for id in unit.ids):
            return
        messages = list(unit.question.messages)
        for turn, id in enumerate(unit.ids):
            source = unit.question.source | {"turn": turn, "repeat": unit.repeat, "question": unit.question.key}
            record = await self._sample(id, messages, source)
            if record is None or (turn + 1 < len(unit.ids) and record["finish_reason"] != "stop"):
                return
            if turn + 1 < len(unit.ids):
                reply = {"role": "assistant", "content": record["content"] or ""}
                messages = [*messages, reply, *unit.question.followups[turn]]

    async def _sample(self, id: str, messages: list[dict], source: dict) -> dict | None:
        prompt_ids = self.protocol.prompt_ids(messages, self.sampling.thinking)
        if len(prompt_ids) + 1 > self.settings.context_tokens:
            self.counts.skipped["longer than the context"] += 1
            self.failures.append({"id": id, "source": source, "reason": "longer than the context"})
            return None
        seed = (int(id, 16) ^ self.settings.seed) % 2**31
        request = Request(id, messages, prompt_ids, seed)
        started = time.monotonic()
        self.in_flight += 1
        try:
            answer = await self._ask(request)
            record = self._record(request, answer, source, time.monotonic() - started)
        except EngineError as error:
            self._count_failure(id, source, str(error))
            return None
        finally:
            self.in_flight -= 1
        if id not in self.done_ids:  # an earlier turn of an unfinished conversation is asked again, not stored twice
            self.records.append(record)
        self._count(record, answer)
        return record

    async def _ask(self, request: Request) -> Answer:
        """Ask until answered: growing pauses with jitter, or as long as the server asks for."""
        for attempt in range(self.settings.retries + 1):
            try:
                async with asyncio.timeout(self.settings.request_timeout_s):
                    return await self.engine.answer(request, self.sampling)
            except (EngineError, TimeoutError) as error:
                if isinstance(error, TimeoutError):
                    error = EngineError(f"no answer within {self.settings.request_timeout_s:g} s", retry=True)
                if not error.retry or attempt == self.settings.retries:
                    raise error from None
                pause = error.wait_s if error.wait_s is not None else 2**attempt * random.uniform(0.5, 1.0)
                await asyncio.sleep(min(pause, LONGEST_PAUSE_S))
        raise AssertionError("unreachable")

    def _record(self, request: Request, answer: Answer, source: dict, seconds: float) -> dict:
        """The stored record of a checked answer; raises EngineError for one that contradicts itself."""
        rebuilt = None
        ids_known = answer.prompt_ids is not None and answer.output_ids is not None
        compare = self.counts.done < COMPARE_FIRST or self.counts.done % COMPARE_EVERY == 0
        if not ids_known or compare:
            prompt = answer.prompt_ids if ids_known else request.prompt_ids
            rebuilt = self.protocol.reconstruct(prompt, answer.reasoning, answer.content, answer.finish_reason)
        if ids_known:
            problem = check_answer(request, answer)
            if problem:
                raise EngineError(problem, retry=False)
            if rebuilt is not None:
                self.counts.compared += 1
                self.counts.mismatched += rebuilt != answer.output_ids
        return {
            "id": request.id,
            "source": source,
            "messages": request.messages,
            "reasoning": answer.reasoning or "",
            "content": answer.content,
            "finish_reason": answer.finish_reason,
            "prompt_ids": answer.prompt_ids if ids_known else request.prompt_ids,
            "output_ids": answer.output_ids if ids_known else rebuilt,
            "ids_from": "server" if ids_known else "reconstructed",
            "usage": answer.usage,
            "sampling": asdict(self.sampling) | {"seed": request.seed},
            "model": self.engine.model,
            "server": self.engine.version,
            "seconds": round(seconds, 3),
        }

    def _count(self, record: dict, answer: Answer) -> None:
        counts = self.counts
        self.failed_in_a_row = 0
        counts.done += 1
        counts.prompt_tokens += len(record["prompt_ids"])
        counts.output_tokens += len(record["output_ids"])
        counts.with_reasoning += bool(record["reasoning"])
        counts.finish_reasons[record["finish_reason"]] += 1
        counts.reasoning_fields[answer.reasoning_field or "none"] += 1
        counts.ids_from[record["ids_from"]] += 1
        counts.lengths.append(len(record["output_ids"]))
        counts.seconds.append(record["seconds"])
        self._show(1)
        if self.watching_silence:
            self._watch_silence(record, answer)

    def _watch_silence(self, record: dict, answer: Answer) -> None:
        """Stop a thinking run whose first replies all lack reasoning: the fault that this project began with."""
        if record["reasoning"]:
            self.watching_silence = False
            return
        self.silent.append(answer.received_fields)
        if len(self.silent) >= self.settings.silence_after:
            fields = Counter(name for names in self.silent for name in names)
            sent = ", ".join(f"{name} in {count}" for name, count in fields.most_common()) or "nothing"
            raise SafetyStop(
                f"thinking is on, but none of the first {len(self.silent)} replies carries reasoning; the server "
                f"sent: {sent}. Start it with its reasoning parser (vLLM: --reasoning-parser kimi_k2), or use --no-thinking"
            )

    def _count_failure(self, id: str, source: dict, reason: str) -> None:
        self.counts.failed += 1
        self.failed_in_a_row += 1
        self.failures.append({"id": id, "source": source, "reason": reason})
        self._show(0)
        if self.failed_in_a_row >= self.settings.breaker:
            raise SafetyStop(
                f"{self.failed_in_a_row} requests failed in a row, the last with: {reason}; rerun to go on"
            )

    def _show(self, done: int) -> None:
        counts, elapsed = self.counts, time.monotonic() - self.started
        self.progress.update(
            done,
            failed=counts.failed,
            in_flight=self.in_flight,
            tokens_s=f"{counts.output_tokens / elapsed:.0f}",
            mean_tokens=f"{counts.output_tokens / max(counts.done, 1):.0f}",
            reasoning=f"{counts.with_reasoning / max(counts.done, 1):.0%}",
        )


def check_answer(request: Request, answer: Answer) -> str | None:
    """What is wrong with ids that came from a server, or None."""
    if answer.prompt_ids[-3:] != request.prompt_ids[-3:]:
        return f"the server's prompt ends in {answer.prompt_ids[-3:]}, the target's in {request.prompt_ids[-3:]}"
    said = (answer.usage or {}).get("completion_tokens")
    if said is not None and said != len(answer.output_ids):
        return f"the server counts {said} output tokens and sent {len(answer.output_ids)} ids"
    return None
