"""The engine of stage 01b that asks vLLM, SGLang or other OpenAI-compatible servers, one or several side by side.

A server that refuses connections gets no requests until it answers again; the others take its share.
"""

import asyncio
import math
from contextlib import suppress

from common.generation.completion import read_reply
from common.generation.engine import Answer, EngineError, Request, Sampling
from common.pipeline.settings import Generate
from common.servers.endpoints import Endpoint, ServerError, api_roots, chat_body, client_arguments, least_loaded
from common.servers.retries import refusal
from common.target.protocol import Protocol

CONNECT_TIMEOUT_S = 10.0
POLL_S = 1.0  # between two attempts to reach a server that is down
# Causes of errors, compared by class name so that we do not depend on the HTTP library inside the openai client.
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
            self.model = server.model  # which all the other servers must serve, too
            await asyncio.to_thread(server.find_version)
        for server in self.servers:  # without a deadline: the generation loop has one for each request
            server.open_client(AsyncOpenAI, Timeout(None, connect=CONNECT_TIMEOUT_S))
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
        target, max_tokens = self.protocol.target, request.max_tokens
        return chat_body(target, self.model, request.messages, sampling, max_tokens, request.seed)

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
            raise EngineError(*refusal(error.response)) from None
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
            with suppress(ServerError):
                await asyncio.to_thread(server.models)
                server.avoid_until = 0.0
        self.reachable.set()

    async def wait_until_back(self, patience_s: float) -> bool:
        with suppress(TimeoutError):
            await asyncio.wait_for(self.reachable.wait(), patience_s)
        return self.reachable.is_set()
