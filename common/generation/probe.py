"""`01b --probe`: one question, asked by plain HTTP and by the openai client, and the fields that each of them shows.

It finds faults such as the one that this project began with: the server sent `reasoning`, and the client hid it.
"""

import asyncio
import json

import openai

from common.generation.completion import REASONING_FIELDS, field_kinds, read_reply
from common.generation.engine import Answer, EngineError, Request, Sampling
from common.generation.openai_engine import OpenAIServers
from common.generation.record import Record, check_rebuilt, make_record
from common.generation.work import sampling_of
from common.pipeline.command_line import Settings
from common.pipeline.console import say, table
from common.servers.endpoints import Endpoint, ServerError, client_arguments, error_line, fetch
from common.target.protocol import Protocol

QUESTION = "What is 17 times 23? Think it through, then answer in one sentence."
MAX_TOKENS, TIMEOUT_S = 1024, 600.0


async def probe(settings: Settings, protocol: Protocol, engine) -> int:
    """Print one reply of each server, or of the local engine, in detail, and a verdict. Returns the exit code."""
    system = settings.questions.system_prompt
    messages = [{"role": "system", "content": system}] * bool(system) + [{"role": "user", "content": QUESTION}]
    sampling = sampling_of(settings.generate)
    prompt_ids = protocol.prompt_ids(messages, sampling.thinking)
    request = Request("0" * 16, {}, messages, prompt_ids, 0, min(sampling.max_tokens, MAX_TOKENS))
    problems: list[str] = []
    async with engine:
        if isinstance(engine, OpenAIServers):
            for server in engine.servers:
                name = f"{server.url}: " if len(engine.servers) > 1 else ""
                problems += [name + text for text in await _probe_server(engine, server, request, sampling)]
        else:
            problems = _judge(request, await engine.answer(request, sampling), sampling, protocol, engine.model)
    say(f"verdict: not ready: {'; '.join(problems)}" if problems else "verdict: ready")
    return 3 if problems else 0


async def _probe_server(engine: OpenAIServers, server: Endpoint, request: Request, sampling: Sampling) -> list[str]:
    say(f"probe of {server.url}")
    body = engine.body(request, sampling)
    try:
        text = await asyncio.to_thread(fetch, f"{server.url}/chat/completions", body, TIMEOUT_S)
        answer = read_reply(text, engine.protocol, request.prompt_ids, server.version)
        shown = (await server.client.chat.completions.create(**client_arguments(body))).choices[0].message
    except (EngineError, ServerError) as error:
        return [str(error)]
    except (openai.OpenAIError, ValueError, TypeError, AttributeError) as error:  # no completion in the second reply
        return [f"by the openai client: {error_line(error)}"]
    raw = json.loads(text)
    declared = {name: getattr(shown, name) for name in type(shown).model_fields}
    fields = {
        "plain HTTP": field_kinds({key: value for key, value in raw.items() if key != "choices"}),
        "  choice": field_kinds({key: value for key, value in raw["choices"][0].items() if key != "message"}),
        "  message": answer.fields,
        # In brackets: fields that the client's type does not declare.
        "client": field_kinds(declared | {f"({name})": value for name, value in (shown.model_extra or {}).items()}),
    }
    listed = [(row, ", ".join(f"{name}: {kind}" for name, kind in kinds.items())) for row, kinds in fields.items()]
    table([("server", server.version), ("model", engine.model), *listed])
    return _judge(request, answer, sampling, engine.protocol, engine.model)


def _judge(request: Request, answer: Answer, sampling: Sampling, protocol: Protocol, model: str) -> list[str]:
    """Print what one reply shows, and return what is wrong with it."""
    prompt_ids = answer.prompt_ids if answer.has_ids else request.prompt_ids
    tail = protocol.prompt_tail(sampling.thinking)
    end = prompt_ids[-len(tail) :]
    names = {protocol.think_open_text: protocol.think_open, protocol.think_close_text: protocol.think_close}
    counts = [f"{name} {end.count(id)} in the end of the prompt, {(answer.output_ids or []).count(id)} in the output"
              for name, id in names.items() if id is not None]  # fmt: skip
    rows = [
        ("think tokens", f"in the tokenizer: open {protocol.think_open}, close {protocol.think_close}"),
        ("  received", "; ".join(counts) if answer.has_ids else "the server sends no token ids"),
        ("end of prompt", f"{end}, expected {tail}"),
        ("reasoning", f"from {answer.reasoning_field or 'no field'}, {len(answer.reasoning or '')} characters"),
        ("content", f"{len(answer.content or '')} characters"),
        ("finish reason", answer.finish_reason),
    ]
    record, problems = None, []
    try:
        record = make_record(request, answer, sampling, protocol, model, 0.0, compare=True)
        problems += _problems(answer, record, protocol, sampling.thinking)
        check_rebuilt(record)
    except EngineError as error:
        problems.append(str(error))
    if record and answer.has_ids:
        equal = record.received["rebuilt_equal"]
        rows.append(("rebuilt ids", "equal to the server's" if equal else "differ from the server's, which are stored"))
    table(rows)
    if record:
        say(f"{protocol.decode(prompt_ids)} | {protocol.decode(record.output_ids)}")
        if not answer.has_ids:
            say("  note: the server sends no token ids, so they are rebuilt from the text; vLLM sends them on request")
    return problems


def _problems(answer: Answer, record: Record, protocol: Protocol, thinking: bool) -> list[str]:
    """What is wrong with a reply that can be stored: it has no reasoning, or its prompt differs from ours."""
    problems, fix = [], "(vLLM: start it with --reasoning-parser kimi_k2)"
    if thinking and protocol.think_open is not None and answer.server and answer.fields:
        if record.received["reasoning_field"] == "content":
            problems.append(f"the reasoning is inside the content, since the server has no reasoning parser {fix}")
        elif answer.reasoning_field not in REASONING_FIELDS:
            problems.append(f"thinking is on and no field carries reasoning {fix}")
    if not record.received["prompt_as_ours"]:
        problems.append(
            f"the server's prompt has {(answer.usage or {}).get('prompt_tokens')} tokens, which differ from those of "
            "this tokenizer's template: start the server with the model's own chat template"
        )
    return problems
