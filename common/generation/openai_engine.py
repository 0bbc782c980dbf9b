"""The engine of stage 01b that asks vLLM, SGLang or other OpenAI-compatible servers, one or several side by side.

A server that refuses connections gets no requests until it answers again; the others take its share.
"""

import asyncio
import math

from common.generation.completion import read_reply
from common.generation.engine import Answer, EngineError, Request, Sampling
from common.pipeline.settings import Generate
from common.servers.endpoints import (
    Endpoint,
    ServerError,
    api_key,
    api_roots,
    chat_body,
    client_arguments,
    fetch,
    least_loaded,
    read_models,
    status_line,
)
from common.servers.retries import is_retried, retry_after_s
from common.target.protocol import Protocol

CONNECT_TIMEOUT_S = 10.0
POLL_S = 1.0  # between two looks at a server that is down
# Compared by class name, so that we do not depend on the HTTP library inside the openai client.
NEVER_ARRIVED = ("ConnectError", "ConnectTimeout")


class OpenAIServers:
    """Answers requests by asking the reachable server with the fewest requests in flight."""

    def __init__(self, settings: Generate, protocol: Protocol):
        self.settings, self.protocol, self.concurrency = settings, protocol, settings.concurrency
        self.model, self.version = settings.served_model, ""
        self.servers: list[Endpoint] = []
        self.polls: set[asyncio.Task] = set()
        self.reachable = asyncio.Event()

    async def __aenter__(self) -> "OpenAIServers":
        from openai import AsyncOpenAI, Timeout

        self.servers = [Endpoint(url) for url in api_roots(self.settings.base_urls, "generate.base_urls")]
        for server in self.servers:  # before any client is opened, so that a failure leaves none open
            await asyncio.to_thread(server.find_model, self.model, "start it or set --base-urls")
            self.model = server.model  # which all the others must serve, too
            await asyncio.to_thread(server.find_version)
        # The generation loop counts deadlines and retries: see common/servers/retries.py.
        timeout = Timeout(None, connect=CONNECT_TIMEOUT_S)
        for server in self.servers:
            server.client = AsyncOpenAI(base_url=server.url, api_key=api_key(), max_retries=0, timeout=timeout)
        self.version = ", ".join(sorted({server.version for server in self.servers}))
        self.reachable.set()
        return self

    async def __aexit__(self, *error) -> None:
        for poll in self.polls:
            poll.cancel()
        for server in self.servers:
            await server.client.close()

    def body(self, request: Request, sampling: Sampling) -> dict:
        """The JSON body of a chat request."""
        messages, max_tokens = request.messages, request.max_tokens
        return chat_body(self.protocol.target, self.model, messages, sampling, max_tokens, request.seed)

    async def answer(self, request: Request, sampling: Sampling) -> Answer:
        """One chat completion; raises EngineError, which tells whether another try is worth it."""
        import openai

        server = least_loaded(self.servers)
        server.in_flight += 1
        try:
            arguments = client_arguments(self.body(request, sampling))
            raw = await server.client.chat.completions.with_raw_response.create(**arguments)
            return read_reply(raw.text, self.protocol, request.prompt_ids, server.version)
        except openai.APIStatusError as error:
            response = error.response
            message = status_line(error.status_code, response.text or str(error))
            raise EngineError(message, is_retried(error.status_code), retry_after_s(response.headers)) from None
        except openai.OpenAIError as error:
            lost = type(error.__cause__).__name__ in NEVER_ARRIVED
            if lost:
                self._mark_down(server)
            raise EngineError(f"{server.url}: {error.__cause__ or error}", retry=True, lost=lost) from None
        finally:
            server.in_flight -= 1

    def _mark_down(self, server: Endpoint) -> None:
        """Send nothing to a server that refuses connections until it lists its models again."""
        if server.avoid_until == math.inf:
            return
        server.avoid_until = math.inf
        if all(server.avoid_until == math.inf for server in self.servers):
            self.reachable.clear()
        poll = asyncio.create_task(self._poll(server))
        self.polls.add(poll)
        poll.add_done_callback(self.polls.discard)

    async def _poll(self, server: Endpoint) -> None:
        while server.avoid_until:
            await asyncio.sleep(POLL_S)
            try:
                read_models(await asyncio.to_thread(fetch, f"{server.url}/models"))
            except ServerError:
                continue
            server.avoid_until = 0.0
        self.reachable.set()

    async def wait_until_back(self, patience_s: float) -> bool:
        try:
            async with asyncio.timeout(patience_s):
                await self.reachable.wait()
        except TimeoutError:
            return False
        return True
