"""`01b --probe`: one question, asked by plain HTTP and by the openai client, and the fields that each of them shows.

The project began with a fault of this kind: the server sent `reasoning`, and the client showed none.
"""

import asyncio
import json

from common.generation.completion import REASONING_FIELDS, field_kinds, read_reply
from common.generation.engine import Answer, EngineError, Request
from common.generation.openai_engine import OpenAIServers
from common.generation.record import Record, check_rebuilt, make_record
from common.generation.work import sampling_of
from common.pipeline.command_line import Settings
from common.pipeline.console import say, table
from common.servers.endpoints import Endpoint, ServerError, client_arguments, fetch, one_line
from common.target.protocol import Protocol

QUESTION = "What is 17 times 23? Think it through, then answer in one sentence."
MAX_TOKENS, TIMEOUT_S = 1024, 600.0


async def probe(settings: Settings, protocol: Protocol, engine) -> int:
    """Print what one reply of each server, or of the local engine, holds, and a verdict. Returns the exit code."""
    system = settings.questions.system_prompt
    messages = [{"role": "system", "content": system}] * bool(system) + [{"role": "user", "content": QUESTION}]
    sampling = sampling_of(settings.generate)
    prompt_ids = protocol.prompt_ids(messages, sampling.thinking)
    request = Request("0" * 16, {}, messages, prompt_ids, 0, min(sampling.max_tokens, MAX_TOKENS))
    problems: list[str] = []
    async with engine:
        if not isinstance(engine, OpenAIServers):
            problems += _judge(request, await engine.answer(request, sampling), sampling, protocol, engine.model)
        else:
            for server in engine.servers:
                name = f"{server.url}: " if len(engine.servers) > 1 else ""
                problems += [name + text for text in await _probe_server(engine, server, request, sampling, protocol)]
    say(f"verdict: not ready: {'; '.join(problems)}" if problems else "verdict: ready")
    return 3 if problems else 0


async def _probe_server(
    engine: OpenAIServers, server: Endpoint, request: Request, sampling, protocol: Protocol
) -> list:
    import openai

    say(f"probe of {server.url}")
    body = engine.body(request, sampling)
    try:
        text = await asyncio.to_thread(fetch, f"{server.url}/chat/completions", body, TIMEOUT_S)
        answer = read_reply(text, protocol, request.prompt_ids, server.version)
        shown = (await server.client.chat.completions.create(**client_arguments(body))).choices[0].message
    except (EngineError, ServerError) as error:
        return [str(error)]
    except (openai.OpenAIError, ValueError, TypeError, AttributeError) as error:  # the second reply is none
        return [f"by the openai client: {type(error).__name__}: {one_line(str(error))}"]
    raw = json.loads(text)
    outer = {key: value for key, value in raw.items() if key != "choices"}
    choice = {key: value for key, value in raw["choices"][0].items() if key != "message"}
    table(
        [
            ("server", server.version),
            ("model", engine.model),
            ("plain HTTP", _listed(field_kinds(outer))),
            ("  choice", _listed(field_kinds(choice))),
            ("  message", _listed(answer.fields)),
            ("client", _listed(field_kinds(_attributes(shown)))),
        ]
    )
    return _judge(request, answer, sampling, protocol, engine.model)


def _judge(request: Request, answer: Answer, sampling, protocol: Protocol, model: str) -> list[str]:
    """Print what one reply shows, and return what is wrong with it."""
    known = answer.has_ids
    prompt_ids = answer.prompt_ids if known else request.prompt_ids
    received = answer.output_ids or []
    tail = protocol.prompt_tail(sampling.thinking)
    names = {protocol.think_open_text: protocol.think_open, protocol.think_close_text: protocol.think_close}
    counts = [f"{name} {prompt_ids[-len(tail):].count(id)} in the end of the prompt, {received.count(id)} in the output"
             for name, id in names.items() if id is not None]  # fmt: skip
    rows = [
        ("think tokens", f"in the tokenizer: open {protocol.think_open}, close {protocol.think_close}"),
        ("  received", "; ".join(counts) if known else "the server sends no token ids"),
        ("end of prompt", f"{prompt_ids[-len(tail) :]}, expected {tail}"),
        ("reasoning", f"from {answer.reasoning_field or 'no field'}, {len(answer.reasoning or '')} characters"),
        ("content", f"{len(answer.content or '')} characters"),
        ("finish reason", answer.finish_reason),
    ]
    problems = []
    try:
        record = make_record(request, answer, sampling, protocol, model, 0.0, compare=True)
    except EngineError as error:
        record = None
        problems.append(str(error))
    if record and known:
        equal = record.received["rebuilt_equal"]
        rows.append(("rebuilt ids", "equal to the server's" if equal else "differ from the server's, which are stored"))
    table(rows)
    if record:
        say(f"{protocol.decode(prompt_ids)} | {protocol.decode(record.output_ids)}")
        problems += _problems(answer, record, protocol, sampling.thinking)
        try:
            check_rebuilt(record)
        except EngineError as error:
            problems.append(str(error))
    if record and not known:
        say("  note: the server sends no token ids, so they are rebuilt from the text; vLLM sends them on request")
    return problems


def _problems(answer: Answer, record: Record, protocol: Protocol, thinking: bool) -> list[str]:
    """What is wrong with a reply whose record is sound: no reasoning, or a prompt other than ours."""
    problems = []
    if thinking and protocol.think_open is not None and answer.server and answer.fields:
        if record.received["reasoning_field"] == "content":
            problems.append(
                "the reasoning is inside the content, since the server has no reasoning parser (vLLM: start it with "
                "--reasoning-parser kimi_k2); a run would split it off there"
            )
        elif answer.reasoning_field not in REASONING_FIELDS:
            problems.append(
                "thinking is on and no field carries reasoning (vLLM: start it with --reasoning-parser kimi_k2)"
            )
    if not record.received["prompt_as_ours"]:
        counted = (answer.usage or {}).get("prompt_tokens")
        problems.append(
            f"the server's prompt has {counted} tokens, not those of this tokenizer's template: start it with the "
            "model's own chat template"
        )
    return problems


def _attributes(message) -> dict:
    """The fields of a typed object of the client: the declared ones, and in brackets those unknown to its type."""
    declared = {name: getattr(message, name) for name in type(message).model_fields}
    return declared | {f"({name})": value for name, value in (message.model_extra or {}).items()}


def _listed(kinds: dict[str, str]) -> str:
    return ", ".join(f"{name}: {kind}" for name, kind in kinds.items())
