"""Acceptance and speed of a draft on a running vLLM server over questions, and of the same target without the draft.

Works with any vLLM server that was started with a draft; the run that trained it is not needed.
"""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import islice

from common.pipeline.console import Progress, say
from common.pipeline.errors import UserError
from common.pipeline.settings import Generate, Questions, Serving, Target
from common.questions.questions import Question, QuestionStream
from common.servers.draft_counters import DraftCounts, draft_counts
from common.servers.endpoints import Endpoint, ServerError, api_roots, chat_body, error_line, excerpt, fetch

QUESTIONS = 80  # without --n
REQUEST_TIMEOUT_S = 3600.0
FOREIGN_SHARE = 0.05  # with this share more drafted tokens than the questions took, another client uses the server
WARM_UP_TOKENS = 8
SETTLE_S, SETTLE_READS = 0.2, 10  # seconds between two readings of the counters, and the most readings


@dataclass(frozen=True)
class Reply:
    """One answer: its number of tokens, and its token ids, or its texts where the server sends no ids; or an error."""

    tokens: int = 0
    output: object = None
    error: str = ""


def connect(url: str, flag: str, served_model: str) -> Endpoint:
    """The server at a URL that the user gave with `flag`."""
    server = Endpoint(*api_roots((url,), flag))
    server.find_model(served_model, "start it, or give the right URL")
    server.find_version()
    return server


def read_counts(server: Endpoint) -> DraftCounts | None:
    """The server's draft counters now; None when it does not draft."""
    url = f"{server.root}/metrics"
    try:
        return draft_counts(page := fetch(url), server.model)
    except ServerError as error:
        raise UserError(f"{url} does not answer ({error}); is the server running?") from None
    except (ValueError, OverflowError):
        raise UserError(f"{url} is no page of counters but {excerpt(page)}") from None


def settled_counts(server: Endpoint) -> DraftCounts:
    """The counters once they no longer change: an answer can arrive before its last step was counted."""
    counts = read_counts(server)
    for _ in range(SETTLE_READS):
        time.sleep(SETTLE_S)
        before, counts = counts, read_counts(server)
        if counts == before:
            break
    if counts is None:
        raise UserError(
            f"{server.root}/metrics counts no drafts: start the server with --speculative-config, and without "
            "--disable-log-stats"
        )
    return counts


def ask(server: Endpoint, body: dict) -> Reply:
    """The answer to one chat request, whose model is replaced by the server's name for it."""
    try:
        reply = json.loads(fetch(f"{server.url}/chat/completions", body | {"model": server.model}, REQUEST_TIMEOUT_S))
        choice = reply["choices"][0]
        message = choice["message"]
        texts = [message.get("reasoning") or message.get("reasoning_content"), message.get("content")]
        return Reply(int(reply["usage"]["completion_tokens"]), choice.get("token_ids") or texts)
    except ServerError as error:
        return Reply(error=str(error))
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        return Reply(error=f"not a chat completion: {error_line(error)}")


def read_questions(settings: Serving, of_config: Questions, count: int) -> list[Question]:
    """The first questions of the file, or of the config's data set shuffled with another seed than 01b's.

    01b answers the first questions in its own order, so under another seed few of the first were trained on.
    """
    if settings.questions:
        source = replace(of_config, dataset=settings.questions, shuffle_seed=-1, streaming=False)
    else:
        source = replace(of_config, shuffle_seed=max(of_config.shuffle_seed, 0) + 1)
    questions = list(islice((row for row in QuestionStream(source) if isinstance(row, Question)), count))
    if not questions:
        raise UserError(f"{source.dataset} has no question that can be asked")
    return questions


def ask_all(server: Endpoint, bodies: list[dict], concurrency: int, name: str) -> tuple[list[Reply], dict]:
    """(the replies in the order of the bodies, their counts and tokens/s); raises UserError when all failed."""
    pool, replies, tokens = ThreadPoolExecutor(concurrency), [], 0
    started = time.monotonic()
    try:
        with Progress(name, len(bodies), "questions") as progress:
            for reply in pool.map(lambda body: ask(server, body), bodies):
                replies.append(reply)
                tokens += reply.tokens
                progress.update(1, tokens=f"{tokens:,}")
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    seconds = time.monotonic() - started
    failed = [reply.error for reply in replies if reply.error]
    if len(failed) == len(replies):
        raise UserError(f"no question was answered; the first error: {failed[0]}")
    if failed:
        say(f"  {len(failed)} of {len(replies)} questions failed; the first error: {failed[0]}")
    facts = {"questions": len(replies), "failed": len(failed), "tokens": tokens, "seconds": round(seconds, 3)}
    return replies, facts | {"tokens_s": round(tokens / max(seconds, 1e-9), 2)}


def measure(settings: Serving, target: Target, generate: Generate, questions: list[Question]) -> dict:
    """Ask all questions on the server that drafts and on the one without; returns figures for the report."""
    server = connect(settings.serve_eval, "--serve-eval", generate.served_model)
    settled_counts(server)
    plain = None
    if settings.without_draft:
        plain = connect(settings.without_draft, "--without-draft", generate.served_model)
        if read_counts(plain) is not None:
            raise UserError(f"--without-draft: {plain.root} drafts, too; start it without --speculative-config")
    sampling = replace(generate, temperature=settings.eval_temperature)  # everything else as 01b asks
    bodies = [
        chat_body(target, server.model, question.messages, sampling, settings.eval_max_tokens, generate.seed)
        for question in questions
    ]
    for each in filter(None, (server, plain)):  # warm-up: compilation and first allocations must not be measured
        ask(each, bodies[0] | {"max_tokens": WARM_UP_TOKENS})
    before = settled_counts(server)
    replies, asked = ask_all(server, bodies, settings.eval_concurrency, "with the draft")
    counted = settled_counts(server).since(before)
    if not counted.drafts:
        raise UserError(f"{server.root} made no draft for these {len(questions)} questions")
    if counted.drafts + counted.accepted > asked["tokens"] * (1 + FOREIGN_SHARE) + counted.k * len(questions):
        say("  WARNING   more tokens were drafted than these questions took: the figures include another client's")
    cut = {str(k): round(length, 5) for k, length in enumerate(counted.lengths(), 1)}
    lengths = {"k": counted.k, "length": round(1 + counted.accepted / counted.drafts, 5), "length_cut_at": cut}
    facts = {
        "format": 1,
        "server": server.version,
        "model": server.model,
        "source": settings.questions or "the config's data set",
        "temperature": settings.eval_temperature,
        "max_tokens": settings.eval_max_tokens,
        "concurrency": settings.eval_concurrency,
        "with_draft": asked | asdict(counted) | lengths,
        "without_draft": None,
        "identical": None,
    }
    if plain:
        plain_replies, facts["without_draft"] = ask_all(plain, bodies, settings.eval_concurrency, "without")
        facts["speed_up"] = round(asked["tokens_s"] / facts["without_draft"]["tokens_s"], 4)
        if settings.eval_temperature == 0:
            pairs = [(a, b) for a, b in zip(replies, plain_replies, strict=True) if not (a.error or b.error)]
            facts["identical"] = {"of": len(pairs), "equal": sum(a.output == b.output for a, b in pairs)}
    return facts


def summary(facts: dict) -> list[tuple[str, str]]:
    """Lines for the table on the terminal."""
    drafted, plain, same = facts["with_draft"], facts["without_draft"], facts["identical"]
    share = drafted["accepted"] / max(drafted["proposed"], 1)
    by_position = "  ".join(f"{n / drafted['drafts']:.1%}" for n in drafted["accepted_per_position"])
    speed = "{tokens_s:,.1f} tokens/s, {tokens:,} tokens in {seconds:.1f} s"
    rows = [
        (f"acceptance length, k={drafted['k']}", f"{drafted['length']:.3f} over {drafted['drafts']:,} drafts"),
        ("accepted draft tokens", f"{share:.1%}; by position {by_position}"),
        ("cut at k = 1..", "  ".join(f"{k}: {length:.3f}" for k, length in drafted["length_cut_at"].items())),
        ("with the draft", speed.format(**drafted)),
    ]
    if plain:
        rows += [("without the draft", speed.format(**plain)), ("speed-up", f"{facts['speed_up']:.2f}")]
    if same:
        rows.append(("greedy replies", f"{same['equal']} of {same['of']} the same with and without the draft"))
        if same["equal"] < same["of"]:
            more = "; --eval-concurrency 1 tells rounding from an error" if facts["concurrency"] > 1 else ""
            rows.append(("", f"rounding depends on the batch and decides between nearly equal tokens{more}"))
    return rows
