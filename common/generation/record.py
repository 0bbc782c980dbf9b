"""A record is a stored answer, one line of RUN/01_synthetic/part-*.jsonl, made from an engine's answer after checks."""

from dataclasses import asdict, dataclass, replace

from common.generation.completion import REASONING_FIELDS
from common.generation.engine import Answer, EngineError, Request, Sampling
from common.target.protocol import Protocol, Reply


@dataclass
class Record:
    """A line of JSON: `vars(record)` is written, `Record(**value)` reads it.

    `prompt_ids` + `output_ids` are what the target read and wrote; reasoning and content are for people.
    """

    id: str  # hash of the question, the sampling settings, the repeat and the turn
    source: dict  # dataset, split, row, turn, repeat, question (hash of the conversation's first prompt)
    messages: list[dict]  # the prompt only
    reasoning: str
    content: str | None
    finish_reason: str
    prompt_ids: list[int]
    output_ids: list[int]
    ids_from: str  # "server" or "reconstructed": rebuilt from the reply's text
    received: dict  # reasoning_field, prompt_as_ours, rebuilt_equal (None: not compared)
    usage: dict | None
    sampling: dict
    model: str
    server: str  # version of the engine
    seconds: float
    budget_closed: bool | None = None  # the thinking budget wrote the closing token; None in older records


def make_record(
    request: Request, answer: Answer, sampling: Sampling, protocol: Protocol, model: str, seconds: float, compare: bool
) -> Record:
    """The record of an answer; raises EngineError where the answer contradicts itself.

    `compare`: the server's ids are also rebuilt from text, to measure how often rebuilding is exact.
    """
    prompt_ids = answer.prompt_ids if answer.has_ids else request.prompt_ids
    reply = protocol.split(prompt_ids, answer.output_ids) if answer.has_ids else None
    instant = not sampling.thinking and protocol.think_close_in_prompt(prompt_ids)
    if instant and not answer.content and not (reply and reply.reasoning_ids):
        # The server's parser waited for the closing token, which is in the prompt, and took the content for reasoning.
        answer = replace(answer, reasoning=None, content=answer.reasoning, reasoning_field="")
    rebuilt = None
    if compare or not answer.has_ids:
        rebuilt = protocol.reconstruct(prompt_ids, answer.reasoning, answer.content, answer.finish_reason)
    output_ids = answer.output_ids if answer.has_ids else rebuilt
    if not output_ids:
        raise EngineError("an empty reply", retry=False)
    if answer.has_ids:
        reasoning, content, field = _read_by_ids(reply, answer, sampling, protocol)
        rebuilt_equal = rebuilt == output_ids if compare else None
        prompt_as_ours = prompt_ids == request.prompt_ids
    else:
        reply = protocol.split(prompt_ids, output_ids)
        reasoning, content, field = answer.reasoning, answer.content, answer.reasoning_field
        counted = counted_tokens(answer.usage)
        rebuilt_equal = None if counted is None else counted == len(output_ids)
        prompt_as_ours = (answer.usage or {}).get("prompt_tokens") in (None, len(prompt_ids))
    budget_closed = answer.budget_closed
    if budget_closed is None:  # servers do not report it; reasoning that they cut is as long as the budget
        budget_closed = reply.closed and 0 < sampling.thinking_budget <= len(reply.reasoning_ids)
    return Record(
        id=request.id,
        source=request.source,
        messages=request.messages,
        reasoning=reasoning or "",
        content=content,
        finish_reason=answer.finish_reason,
        prompt_ids=prompt_ids,
        output_ids=output_ids,
        ids_from="server" if answer.has_ids else "reconstructed",
        received={"reasoning_field": field, "prompt_as_ours": prompt_as_ours, "rebuilt_equal": rebuilt_equal},
        usage=answer.usage,
        sampling=asdict(sampling) | {"seed": request.seed},
        model=model,
        server=answer.server,
        seconds=round(seconds, 3),
        budget_closed=budget_closed,
    )


def counted_tokens(usage: dict | None) -> int | None:
    """The number of reply tokens that the server reports, or None."""
    counted = (usage or {}).get("completion_tokens")
    return counted if type(counted) is int else None


def check_rebuilt(record: Record) -> None:
    """Raise EngineError where the server counts far more or fewer tokens than its text has: some text was lost.

    `make_record` does not call it, since a run checks replies without reasoning only after deciding to go on with them.
    """
    counted, rebuilt = counted_tokens(record.usage), len(record.output_ids)
    if record.ids_from == "server" or counted is None:
        return
    if abs(counted - rebuilt) > 16 + 0.2 * counted:  # another tokenization of the same text differs by less
        raise EngineError(
            f"the server counts {counted} completion_tokens, the text it sent makes {rebuilt}: part of the reply was "
            "lost before it arrived; --probe looks at one reply closely",
            retry=False,
        )


def _read_by_ids(reply: Reply, answer: Answer, sampling: Sampling, protocol: Protocol) -> tuple:
    """(reasoning, content, field that held the reasoning) of an answer with ids.

    Raises EngineError where ids, counts, protocol and text contradict each other.
    """
    usage = answer.usage or {}
    for name, ids in (("completion_tokens", answer.output_ids), ("prompt_tokens", answer.prompt_ids)):
        if usage.get(name) not in (None, len(ids)):
            raise EngineError(f"the server counts {usage[name]} {name} but sent {len(ids)} ids", retry=False)
    tail = protocol.prompt_tail(sampling.thinking)
    if answer.prompt_ids[-len(tail) :] != tail:
        raise EngineError(
            f"the server's prompt ends in {answer.prompt_ids[-len(tail) :]}, the target's template in {tail}: the "
            "server uses another chat template, or chat_template_kwargs did not arrive",
            retry=False,
        )
    if protocol.think_open_in_prompt(answer.prompt_ids) and answer.output_ids[0] == protocol.think_open:
        raise EngineError("the reply repeats the opening token that ends its prompt", retry=False)
    parsed = answer.reasoning_field in REASONING_FIELDS
    if problem := protocol.text_differs(reply, answer.reasoning, answer.content, parsed):
        raise EngineError(f"the reply contradicts itself: {problem}", retry=False)
    if answer.reasoning and not reply.reasoning_ids:  # the server's parser took content for reasoning
        return None, protocol.decode(reply.content_ids), ""
    if parsed or answer.reasoning_field == "ids" or not reply.reasoning_ids:
        return answer.reasoning, answer.content, answer.reasoning_field
    # The server did not split the reply, or not where the target closed its reasoning. A reply that was cut inside its
    # reasoning has no closing marker in its text.
    marked = answer.content and (not reply.closed or protocol.think_close_text in answer.content)
    field = "content" if answer.reasoning or marked else "ids"
    return protocol.decode(reply.reasoning_ids), protocol.decode(reply.content_ids) or None, field
