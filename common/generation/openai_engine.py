"""A vLLM, SGLang or other OpenAI-compatible server, or several side by side, through the openai client.

Token ids are asked of every server (`return_token_ids`); those that send none ignore it. A server that refuses
connections is left out until it answers again; the others go on with its share.
"""

import asyncio
import email.utils
import math
import time
from dataclasses import dataclass

from common.generation.completion import read_reply
from common.generation.engine import Answer, EngineError, Request, Sampling
from common.pipeline.errors import UserError
from common.pipeline.settings import Generate
from common.servers.endpoints import api_key, api_roots, arguments_of, read_models, server_version
from common.target.messages import on_the_wire
from common.target.protocol import Protocol

CONNECT_TIMEOUT_S = 10.0
POLL_S = 1.0
RETRIED = (408, 409, 425, 429)  # and every 5xx; other 4xx say that the request itself is wrong
NEVER_ARRIVED = ("ConnectError", "ConnectTimeout")  # by name: which HTTP library the client wraps is its own affair


@dataclass
class Server:
    """One base URL, its load, and whether it can be reached."""

    url: str
    client: object
    version: str = "unknown"
    in_flight: int = 0
    down: bool = False


class OpenAIServers:
    """Answers requests by asking the reachable server with the fewest requests in flight."""

    def __init__(self, settings: Generate, protocol: Protocol):
        self.settings, self.protocol, self.concurrency = settings, protocol, settings.concurrency
        self.model, self.version = settings.served_model, ""
        self.servers: list[Server] = []
        self.polls: set[asyncio.Task] = set()
        self.reachable = asyncio.Event()

    async def __aenter__(self) -> "OpenAIServers":
        from openai import AsyncOpenAI, Timeout

        # Retries and deadlines are counted, paced and reported by the generation loop, not by the client.
        timeout = Timeout(None, connect=CONNECT_TIMEOUT_S)
        for url in api_roots(self.settings.base_urls, "generate.base_urls"):
            client = AsyncOpenAI(base_url=url, api_key=api_key(), max_retries=0, timeout=timeout)
            self.servers.append(Server(url, client))
        try:
            for server in self.servers:
                await self._greet(server)
        except BaseException:
            await self.__aexit__()
            raise
        self.version = ", ".join(sorted({server.version for server in self.servers}))
        self.reachable.set()
        return self

    async def __aexit__(self, *error) -> None:
        for poll in self.polls:
            poll.cancel()
        for server in self.servers:
            await server.client.close()

    async def _greet(self, server: Server) -> None:
        """Find the served model and the server's version; every server must serve the same model."""
        import openai

        try:
            async with asyncio.timeout(3 * CONNECT_TIMEOUT_S):
                names = [model["id"] for model in read_models(await listed(server.client))]
        except (openai.OpenAIError, TimeoutError, ValueError) as error:
            reason = str(error) or type(error).__name__
            raise UserError(f"no server answers at {server.url} ({reason}); start it or set --base-urls") from None
        self.model = self.model or names[0]
        if self.model not in names:
            raise UserError(f"{server.url} serves {', '.join(names)}, not {self.model!r}; set --served-model")
        server.version = await asyncio.to_thread(server_version, server.url)

    def body(self, request: Request, sampling: Sampling) -> dict:
        """The JSON body of a chat completion."""
        body = {
            "model": self.model,
            "messages": [on_the_wire(message) for message in request.messages],
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "max_tokens": request.max_tokens,
            "seed": request.seed,
            "return_token_ids": True,
        }
        template_arguments = self.protocol.template_arguments(sampling.thinking)
        if template_arguments:
            body["chat_template_kwargs"] = template_arguments
        if sampling.thinking and sampling.thinking_budget:
            body["thinking_token_budget"] = sampling.thinking_budget
        return body

    async def answer(self, request: Request, sampling: Sampling) -> Answer:
        """One chat completion; raises EngineError, which says whether another try is worth it."""
        import openai

        server = min(self.servers, key=lambda server: (server.down, server.in_flight))
        server.in_flight += 1
        try:
            arguments = arguments_of(self.body(request, sampling))
            raw = await server.client.chat.completions.with_raw_response.create(**arguments)
            opened = self.protocol.think_open_in_prompt(request.prompt_ids)
            return read_reply(raw.text, self.protocol, opened, server.version)
        except openai.APIStatusError as error:
            retry = error.status_code in RETRIED or error.status_code >= 500
            raise EngineError(_said(error), retry, retry_after(error.response.headers)) from None
        except openai.OpenAIError as error:
            lost = type(error.__cause__).__name__ in NEVER_ARRIVED
            if lost:
                self._leave_out(server)
            raise EngineError(f"{server.url}: {error.__cause__ or error}", retry=True, lost=lost) from None
        finally:
            server.in_flight -= 1

    def _leave_out(self, server: Server) -> None:
        """Send nothing to a server that refuses connections, until it lists its models again."""
        if server.down:
            return
        server.down = True
        if all(server.down for server in self.servers):
            self.reachable.clear()
        poll = asyncio.create_task(self._poll(server))
        self.polls.add(poll)
        poll.add_done_callback(self.polls.discard)

    async def _poll(self, server: Server) -> None:
        import openai

        while server.down:
            await asyncio.sleep(POLL_S)
            try:
                async with asyncio.timeout(CONNECT_TIMEOUT_S):
                    read_models(await listed(server.client))
            except (openai.OpenAIError, TimeoutError, ValueError):
                continue
            server.down = False
            self.reachable.set()

    async def wait_until_back(self, patience_s: float) -> bool:
        try:
            async with asyncio.timeout(patience_s):
                await self.reachable.wait()
        except TimeoutError:
            return False
        return True


async def listed(client) -> str:
    """The raw body of /v1/models: a page of a proxy's, which the client's types would choke on, comes as it is."""
    return (await client.models.with_raw_response.list()).text


def _said(error) -> str:
    """A status error as one line: the code and what the server said."""
    text = getattr(error.response, "text", "") or str(error)
    return f"HTTP {error.status_code}: {' '.join(text.split())[:300]}"


def retry_after(headers) -> float | None:
    """Seconds that a Retry-After header asks for, given as seconds or as a date; None for none, or for nonsense."""
    value = headers.get("retry-after")
    if not value:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(value).timestamp() - time.time()
        except ValueError:
            return None
    return max(0.0, seconds) if math.isfinite(seconds) else None
