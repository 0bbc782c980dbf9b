"""`01b --probe`: one question, asked by raw HTTP and by the client, and what each of them shows.

This is how the fault was found that this project began with: a server that sent `reasoning`, a client that showed none.
"""

import asyncio
import json
import urllib.error
import urllib.request

from common.generation.completion import REASONING_FIELDS, field_kinds, read_reply
from common.generation.engine import Answer, EngineError, Request
from common.generation.openai_engine import OpenAIServers, Server
from common.generation.record import Record, check_rebuilt, make_record
from common.generation.work import sampling_of
from common.pipeline.command_line import Settings
from common.pipeline.console import say, table
from common.servers.endpoints import api_key, arguments_of
from common.target.protocol import Protocol

QUESTION = "What is 17 times 23? Think it through, then answer in one sentence."
LONGEST_TOKENS, TIMEOUT_S = 1024, 600.0


async def probe(settings: Settings, protocol: Protocol, engine) -> int:
    """Look at one reply of each server, or of the local engine; prints a verdict, returns the exit code."""
    system = settings.questions.system_prompt
    messages = [{"role": "system", "content": system}] * bool(system) + [{"role": "user", "content": QUESTION}]
    sampling = sampling_of(settings.generate)
    prompt_ids = protocol.prompt_ids(messages, sampling.thinking)
    request = Request("0" * 16, messages, prompt_ids, 0, min(sampling.max_tokens, LONGEST_TOKENS))
    problems: list[str] = []
    async with engine:
        if not isinstance(engine, OpenAIServers):
            problems += _judge(request, await engine.answer(request, sampling), sampling, protocol, engine.model)
        else:
            for server in engine.servers:
                found = await _probe_server(engine, server, request, sampling, protocol)
                problems += [f"{server.url}: {problem}" if len(engine.servers) > 1 else problem for problem in found]
    say(f"verdict: not ready: {'; '.join(problems)}" if problems else "verdict: ready")
    return 3 if problems else 0


async def _probe_server(engine: OpenAIServers, server: Server, request: Request, sampling, protocol: Protocol) -> list:
    say(f"probe of {server.url}")
    body = engine.body(request, sampling)
    try:
        text = await asyncio.to_thread(_post, server.url, body, api_key())
        opened = protocol.think_open_in_prompt(request.prompt_ids)
        answer = read_reply(text, protocol, opened, server.version)
        shown = await server.client.chat.completions.create(**arguments_of(body))
    except EngineError as error:
        return [str(error)]
    except Exception as error:  # whatever the client raises is what the user must see
        return [f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"]
    raw = json.loads(text)
    outer = {key: value for key, value in raw.items() if key != "choices"}
    choice = {key: value for key, value in raw["choices"][0].items() if key != "message"}
    table(
        [
            ("server", server.version),
            ("model", engine.model),
            ("raw HTTP", _listed(field_kinds(outer))),
            ("  choice", _listed(field_kinds(choice))),
            ("  message", _listed(answer.fields)),
            ("client", _listed(field_kinds(_attributes(shown.choices[0].message)))),
        ]
    )
    return _judge(request, answer, sampling, protocol, engine.model)


def _judge(request: Request, answer: Answer, sampling, protocol: Protocol, model: str) -> list[str]:
    """Print what one reply tells, and return what is wrong with it."""
    known = answer.has_ids
    prompt_ids = answer.prompt_ids if known else request.prompt_ids
    received = answer.output_ids or []
    tail = protocol.prompt_tail(sampling.thinking)
    names = {protocol.think_open_text: protocol.think_open, protocol.think_close_text: protocol.think_close}
    found = [f"{name} {prompt_ids[-len(tail):].count(id)} in the prompt's tail, {received.count(id)} in the output"
             for name, id in names.items() if id is not None]  # fmt: skip
    rows = [
        ("think tokens", f"by the tokenizer: open {protocol.think_open}, close {protocol.think_close}"),
        ("  received", "; ".join(found) if known else "the server sends no token ids"),
        ("prompt's tail", f"{prompt_ids[-len(tail) :]} wanted {tail}"),
        ("reasoning", f"from {answer.reasoning_field or 'no field'}, {len(answer.reasoning or '')} characters"),
        ("content", f"{len(answer.content or '')} characters"),
        ("finish reason", answer.finish_reason),
    ]
    problems = []
    try:
        record = make_record(request, answer, {}, sampling, protocol, model, 0.0, compare=True)
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
        say("  note: without ids from the server they are rebuilt from text; vLLM sends them for return_token_ids")
    return problems


def _problems(answer: Answer, record: Record, protocol: Protocol, thinking: bool) -> list[str]:
    """What is wrong with a reply that is sound in itself."""
    problems = []
    if thinking and protocol.think_open is not None and answer.server and answer.fields:
        if record.received["reasoning_field"] == "content":
            problems.append(
                "the reasoning stands inside the content: no reasoning parser (vLLM: start it with "
                "--reasoning-parser kimi_k2); a run would read it from there"
            )
        elif answer.reasoning_field not in REASONING_FIELDS:
            problems.append(
                "thinking is on and no field carries reasoning (vLLM: start it with --reasoning-parser kimi_k2)"
            )
    if not record.received["prompt_as_ours"]:
        said = (answer.usage or {}).get("prompt_tokens")
        problems.append(
            f"the server's prompt has other tokens than the template's ({said} of its own): other template?"
        )
    return problems


def _post(url: str, body: dict, key: str) -> str:
    """The raw body of a chat completion, by nothing but HTTP."""
    headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
    request = urllib.request.Request(f"{url}/chat/completions", json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
            return response.read().decode("utf-8", "replace")
    except urllib.error.HTTPError as error:
        said = " ".join(error.read().decode("utf-8", "replace").split())[:300]
        raise EngineError(f"HTTP {error.code}: {said}", retry=False) from None
    except OSError as error:
        raise EngineError(f"no reply: {error}", retry=False) from None


def _attributes(message) -> dict:
    """What a typed object of the client shows: its declared fields, and those that it keeps apart as unknown."""
    declared = {name: getattr(message, name) for name in type(message).model_fields}
    return declared | {f"({name})": value for name, value in (message.model_extra or {}).items()}


def _listed(kinds: dict[str, str]) -> str:
    return ", ".join(f"{name}: {kind}" for name, kind in kinds.items())
