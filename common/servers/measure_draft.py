"""Acceptance and speed of a draft on a running vLLM server, over questions; beside the same target without it.

Works with any vLLM server that was started with a draft: nothing of the run that trained it is needed.
"""

import json
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from common.pipeline.console import Progress, say
from common.pipeline.errors import UserError
from common.pipeline.settings import Generate, Questions, Serving, Target
from common.questions.questions import Question, QuestionStream
from common.servers.draft_counters import DraftCounts, draft_counts
from common.servers.endpoints import api_key
from common.target.messages import on_the_wire

QUESTIONS = 80  # without --n
REQUEST_TIMEOUT_S = 3600.0
FOREIGN_SHARE = 0.05  # more tokens out of drafts than were asked for: somebody else uses the server
WARM_UP_TOKENS = 8
SETTLE_S, SETTLE_READS = 0.2, 10
PAGE_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Reply:
    """One answer: its tokens (ids where the server sends them, else the text) and their number; an error otherwise."""

    tokens: int = 0
    written: object = None
    error: str = ""


class Server:
    """One OpenAI-compatible server, spoken to from threads."""

    def __init__(self, url: str, api_key: str, timeout_s: float, model: str = ""):
        if not url.startswith(("http://", "https://")):
            raise UserError(f"--serve-eval, --without-draft: {url!r} must start with http:// or https://")
        self.root = url.rstrip("/").removesuffix("/v1")
        self.api_key, self.timeout_s = api_key, timeout_s
        listed = [entry["id"] for entry in json.loads(self._page("/v1/models"))["data"]]
        self.model = model or listed[0]
        if self.model not in listed:
            raise UserError(f"{self.root} serves {', '.join(listed)}, not {self.model!r}")
        try:
            self.version = json.loads(self._page("/version"))["version"]
        except (UserError, ValueError, KeyError):
            self.version = "unknown"

    def _request(self, page: str, body: dict | None, timeout_s: float) -> bytes:
        headers = {"Authorization": f"Bearer {self.api_key}", "Content-Type": "application/json"}
        data = None if body is None else json.dumps(body).encode()
        with urllib.request.urlopen(urllib.request.Request(self.root + page, data, headers), timeout=timeout_s) as got:
            return got.read()

    def _page(self, page: str) -> str:
        try:
            return self._request(page, None, PAGE_TIMEOUT_S).decode("utf-8", "replace")
        except OSError as error:
            raise UserError(f"{self.root}{page} does not answer ({error}); is the server running?") from None

    def counts(self) -> DraftCounts | None:
        """What it has counted about its drafts; None when it does not draft."""
        return draft_counts(self._page("/metrics"), self.model)

    def settled_counts(self) -> DraftCounts | None:
        """The counters once they stand still: an answer can arrive before its last step was counted."""
        found = self.counts()
        for _ in range(SETTLE_READS):
            time.sleep(SETTLE_S)
            before, found = found, self.counts()
            if found == before:
                break
        return found

    def ask(self, body: dict) -> Reply:
        """One chat completion."""
        try:
            answer = json.loads(self._request("/v1/chat/completions", body | {"model": self.model}, self.timeout_s))
            choice = answer["choices"][0]
            message = choice["message"]
            text = [message.get("reasoning") or message.get("reasoning_content"), message.get("content")]
            return Reply(answer["usage"]["completion_tokens"], choice.get("token_ids") or text)
        except urllib.error.HTTPError as error:
            return Reply(error=f"HTTP {error.code}: {error.read()[:200].decode('utf-8', 'replace')}")
        except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
            return Reply(error=f"{type(error).__name__}: {error}")


def read_questions(settings: Serving, of_config: Questions, count: int) -> list[Question]:
    """The first questions of the file, or of the config's data set in an order of another seed than 01's.

    01 answers the first of its own order: under another seed few of a large set's first were trained on.
    """
    if settings.questions:
        source = replace(of_config, dataset=settings.questions, shuffle_seed=-1, streaming=False)
    else:
        source = replace(of_config, shuffle_seed=max(of_config.shuffle_seed, 0) + 1)
    questions = []
    for question in QuestionStream(source):
        if isinstance(question, Question):
            questions.append(question)
        if len(questions) == count:
            break
    if not questions:
        raise UserError(f"{source.dataset} has no question that can be asked")
    return questions


def request_body(question: Question, settings: Serving, target: Target, generate: Generate) -> dict:
    """The JSON of a chat completion, asked as 01 asks but for the temperature."""
    body = {
        "messages": [on_the_wire(message) for message in question.messages],
        "temperature": settings.eval_temperature,
        "max_tokens": settings.eval_max_tokens,
        "seed": generate.seed,
        "return_token_ids": True,
    }
    if target.think_open:
        body["chat_template_kwargs"] = {target.thinking_argument: generate.thinking}
    if target.think_open and generate.thinking and generate.thinking_budget:
        body["thinking_token_budget"] = generate.thinking_budget
    return body if settings.eval_temperature == 0 else body | {"top_p": generate.top_p}


def ask_all(server: Server, bodies: list[dict], concurrency: int, name: str) -> tuple[list[Reply], float]:
    """(the replies in the order of the questions, seconds from the first request to the last answer)."""
    pool = ThreadPoolExecutor(concurrency)
    started = time.monotonic()
    try:
        with Progress(name, len(bodies), "questions") as progress:
            replies = []
            for reply in pool.map(server.ask, bodies):
                replies.append(reply)
                progress.update(1, tokens=f"{sum(r.tokens for r in replies):,}")
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    return replies, time.monotonic() - started


def speed(replies: list[Reply], seconds: float) -> dict:
    failed = [reply.error for reply in replies if reply.error]
    if len(failed) == len(replies):
        raise UserError(f"no question was answered; the first error: {failed[0]}")
    if failed:
        say(f"  {len(failed)} of {len(replies)} questions failed; the first error: {failed[0]}")
    tokens = sum(reply.tokens for reply in replies)
    facts = {"questions": len(replies), "failed": len(failed), "tokens": tokens, "seconds": round(seconds, 3)}
    return facts | {"tokens_s": round(tokens / max(seconds, 1e-9), 2)}


def measure(settings: Serving, target: Target, generate: Generate, questions: list[Question]) -> dict:
    """Ask every question of the drafting server, and of the one without a draft; returns figures for the report."""
    server = Server(settings.serve_eval, api_key(), REQUEST_TIMEOUT_S, generate.served_model)
    plain = None
    if settings.without_draft:
        plain = Server(settings.without_draft, api_key(), REQUEST_TIMEOUT_S, generate.served_model)
    if server.counts() is None:
        raise UserError(
            f"{server.root}/metrics counts no drafts: start the server with --speculative-config, and without "
            "--disable-log-stats"
        )
    if plain and plain.counts() is not None:
        raise UserError(f"--without-draft: {plain.root} drafts, too; start it without --speculative-config")
    bodies = [request_body(question, settings, target, generate) for question in questions]
    for each in filter(None, (server, plain)):  # compiling and first allocations are not what is measured
        each.ask(bodies[0] | {"max_tokens": WARM_UP_TOKENS})
    before = server.settled_counts()
    replies, seconds = ask_all(server, bodies, settings.eval_concurrency, "with the draft")
    counted = server.settled_counts().since(before)
    facts = {
        "format": 1,
        "server": f"vLLM {server.version}",
        "model": server.model,
        "source": settings.questions or "the config's data set",
        "temperature": settings.eval_temperature,
        "max_tokens": settings.eval_max_tokens,
        "concurrency": settings.eval_concurrency,
        "with_draft": speed(replies, seconds) | counts_as_dict(counted),
        "without_draft": None,
        "identical": None,
    }
    if not counted.drafts:
        raise UserError(f"{server.root} made no draft for these {len(questions)} questions")
    asked = facts["with_draft"]["tokens"] * (1 + FOREIGN_SHARE) + counted.k * len(questions)
    if counted.drafts + counted.accepted > asked:
        say("  more tokens were drafted than these questions took: somebody else uses the server, figures mix both")
    if plain:
        others, seconds = ask_all(plain, bodies, settings.eval_concurrency, "without")
        facts["without_draft"] = speed(others, seconds)
        facts["speed_up"] = round(facts["with_draft"]["tokens_s"] / facts["without_draft"]["tokens_s"], 4)
        if settings.eval_temperature == 0:
            pairs = [(a, b) for a, b in zip(replies, others, strict=True) if not (a.error or b.error)]
            facts["identical"] = {"of": len(pairs), "equal": sum(a.written == b.written for a, b in pairs)}
    return facts


def counts_as_dict(counted: DraftCounts) -> dict:
    lengths = [round(length, 5) for length in counted.lengths()]
    return {
        "k": counted.k,
        "drafts": counted.drafts,
        "proposed": counted.proposed,
        "accepted": counted.accepted,
        "accepted_per_position": list(counted.per_position),
        "length": round(1 + counted.accepted / counted.drafts, 5) if counted.drafts else None,
        "length_cut_at": {str(k): length for k, length in enumerate(lengths, 1)},
    }


def summary(facts: dict) -> list[tuple[str, str]]:
    """Lines for the table on the terminal."""
    own, plain, same = facts["with_draft"], facts["without_draft"], facts["identical"]
    share = own["accepted"] / max(own["proposed"], 1)
    by_position = "  ".join(f"{n / own['drafts']:.1%}" for n in own["accepted_per_position"])
    rows = [
        (f"acceptance length, k={own['k']}", f"{own['length']:.3f} over {own['drafts']:,} drafts"),
        ("accepted draft tokens", f"{share:.1%}; by position {by_position}"),
        ("cut at k = 1..", "  ".join(f"{k}: {length:.3f}" for k, length in own["length_cut_at"].items())),
        ("with the draft", f"{own['tokens_s']:,.1f} tokens/s, {own['tokens']:,} tokens in {own['seconds']:.1f} s"),
    ]
    if plain:
        rows.append(("without", f"{plain['tokens_s']:,.1f} tokens/s, {plain['tokens']:,} tokens"))
        rows.append(("speed-up", f"{facts['speed_up']:.2f}"))
    if same:
        rows.append(("greedy replies", f"{same['equal']} of {same['of']} the same with and without the draft"))
    if same and same["equal"] < same["of"]:
        more = "; --eval-concurrency 1 tells rounding from a fault" if facts["concurrency"] > 1 else ""
        rows.append(("", f"rounding depends on what else is in the batch, and near ties fall either way{more}"))
    return rows
