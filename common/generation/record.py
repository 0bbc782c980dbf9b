"""The records of stage 01b: made out of checked answers, counted, found again, and the list of what is missing.

`Counts` sees every record of the folder, those of earlier runs too, so that a manifest tells of the whole stage.
"""

from dataclasses import asdict, replace

from common.generation.completion import REASONING_FIELDS
from common.generation.engine import Answer, EngineError, Request, Sampling
from common.target.protocol import Protocol, Reply


def make_record(
    request: Request,
    answer: Answer,
    source: dict,
    sampling: Sampling,
    protocol: Protocol,
    model: str,
    seconds: float,
    compare: bool,
) -> dict:
    """The record of an answer; raises EngineError for one that contradicts itself.

    `compare`: ids that were received are also rebuilt from text, to measure how good rebuilding is.
    """
    known = answer.prompt_ids is not None and answer.output_ids is not None
    prompt_ids = answer.prompt_ids if known else request.prompt_ids
    reply = protocol.split(prompt_ids, answer.output_ids) if known else None
    thought = reply and reply.reasoning_ids
    if not sampling.thinking and not answer.content and protocol.think_close_in_prompt(prompt_ids) and not thought:
        # The parser waited for a closing token, which stands in the prompt, and took the whole reply for reasoning.
        answer = replace(answer, reasoning=None, content=answer.reasoning, reasoning_field="")
    rebuilt = None
    if compare or not known:
        rebuilt = protocol.reconstruct(prompt_ids, answer.reasoning, answer.content, answer.finish_reason)
    output_ids = answer.output_ids if known else rebuilt
    if not output_ids:
        raise EngineError("an empty reply", retry=False)
    if known:
        reasoning, content, field = _read_by_ids(reply, answer, sampling, protocol)
    else:
        reasoning, content, field = answer.reasoning, answer.content, answer.reasoning_field
    equal = None
    if known and compare:
        equal = rebuilt == output_ids
    elif not known and (counted := counted_tokens(answer.usage)) is not None:
        equal = counted == len(rebuilt)
    said = (answer.usage or {}).get("prompt_tokens")
    as_ours = prompt_ids == request.prompt_ids if known else said in (None, len(prompt_ids))
    return {
        "id": request.id,
        "source": source,
        "messages": request.messages,
        "reasoning": reasoning or "",
        "content": content,
        "finish_reason": answer.finish_reason,
        "prompt_ids": prompt_ids,
        "output_ids": output_ids,
        "ids_from": "server" if known else "reconstructed",
        "received": {
            "reasoning_field": field,
            "prompt_as_ours": as_ours,
            "rebuilt_equal": equal,
        },
        "usage": answer.usage,
        "sampling": asdict(sampling) | {"seed": request.seed},
        "model": model,
        "server": answer.server,
        "seconds": round(seconds, 3),
    }


def counted_tokens(usage: dict | None) -> int | None:
    """The tokens of a reply as the server counts them, where it does."""
    counted = (usage or {}).get("completion_tokens")
    return counted if type(counted) is int else None


def check_rebuilt(record: dict) -> None:
    """Raise EngineError where ids were rebuilt from text that is not all that the server wrote.

    Not part of `make_record`: of replies without reasoning the whole run has more to say.
    """
    counted, rebuilt = counted_tokens(record["usage"]), len(record["output_ids"])
    if record["ids_from"] == "server" or counted is None:
        return
    if abs(counted - rebuilt) > 16 + 0.2 * counted:  # another spelling of the same text differs by less
        raise EngineError(
            f"the server counts {counted} completion_tokens, the text it sent makes {rebuilt}: something was lost on "
            "the way; --probe looks at one reply closely",
            retry=False,
        )


def _read_by_ids(
    reply: Reply, answer: Answer, sampling: Sampling, protocol: Protocol
) -> tuple[str | None, str | None, str]:
    """(reasoning, content, where reasoning stood) of an answer whose ids are known; raises EngineError where ids,
    counts, protocol and text contradict each other."""
    usage = answer.usage or {}
    for name, ids in (("completion_tokens", answer.output_ids), ("prompt_tokens", answer.prompt_ids)):
        if usage.get(name) not in (None, len(ids)):
            raise EngineError(f"the server counts {usage[name]} {name} and sent {len(ids)} ids", retry=False)
    tail = protocol.prompt_tail(sampling.thinking)
    if answer.prompt_ids[-len(tail) :] != tail:
        raise EngineError(
            f"the server's prompt ends in {answer.prompt_ids[-len(tail) :]}, the target's in {tail}: "
            "another chat template, or chat_template_kwargs did not arrive",
            retry=False,
        )
    if protocol.think_open_in_prompt(answer.prompt_ids) and answer.output_ids[0] == protocol.think_open:
        raise EngineError("the reply repeats the opening token that ends its prompt", retry=False)
    parsed = answer.reasoning_field in REASONING_FIELDS
    problem = protocol.text_differs(reply, answer.reasoning, answer.content, parsed)
    if problem:
        raise EngineError(f"the reply contradicts itself: {problem}", retry=False)
    if answer.reasoning and not reply.reasoning_ids:  # the parser took for reasoning what the target wrote as content
        return None, protocol.decode(reply.content_ids), ""
    if parsed or answer.reasoning_field == "ids" or not reply.reasoning_ids:
        return answer.reasoning, answer.content, answer.reasoning_field
    # No parser split it, or not where the target did: a reply cut inside its reasoning shows no marker in its text.
    shown = not reply.closed or protocol.think_close_text in (answer.content or "")
    in_content = bool(answer.reasoning or (answer.content and shown))
    reasoning, content = protocol.decode(reply.reasoning_ids), protocol.decode(reply.content_ids) or None
    return reasoning, content, "content" if in_content else "ids"
