"""A chat server of the tests' own that speaks a target's protocol and misbehaves on request. No model, no GPU.

    with FaultServer(protocol) as server:
        server.behave = lambda number, body: Reply(503) if number < 20 else None   # None: answer as usual
        ... server.url ... server.bodies ...

It tokenizes like vLLM: the rendered messages as a whole, so that a control token's name in the text becomes one.
"""

import asyncio
import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from common.target.protocol import Protocol

MODEL = "fake"
FORMS = ("reasoning", "reasoning_content", "both", "content", "content_opened", "neither")


@dataclass
class Reply:
    """What to send instead of an answer. `cut`: bytes of the body after which the connection is reset."""

    status: int = 200
    body: dict | bytes = b""
    headers: dict = field(default_factory=dict)
    delay_s: float = 0.0
    cut: int | None = None
    silent: bool = False  # never answer


class FaultServer:
    """An HTTP server in a thread. `form`: where it puts the reasoning; `ids`: whether it sends token ids."""

    def __init__(self, protocol: Protocol, form: str = "reasoning", ids: bool = True, delay_s: float = 0.0):
        self.protocol, self.form, self.ids, self.delay_s = protocol, form, ids, delay_s
        self.behave: Callable[[int, dict], Reply | dict | None] = lambda number, body: None
        self.models: dict | bytes = {"object": "list", "data": [{"id": MODEL, "object": "model"}]}
        self.bodies: list[dict] = []
        self.at: list[float] = []  # when each request came
        self.keys: set[str] = set()  # authorization headers
        self.port, self.in_flight, self.most_in_flight = 0, 0, 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def __enter__(self) -> "FaultServer":
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.start()
        return self

    def __exit__(self, *_) -> None:
        self.stop()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()

    def start(self) -> None:
        """Listen; again on the same port after `stop`."""
        asyncio.run_coroutine_threadsafe(self._start(), self.loop).result()

    def stop(self) -> None:
        """Stop listening and break every connection, as a killed server does."""
        asyncio.run_coroutine_threadsafe(self._stop(), self.loop).result()

    async def _start(self) -> None:
        self.tasks: set[asyncio.Task] = set()
        self.server = await asyncio.start_server(self._connection, "127.0.0.1", self.port, backlog=1024)
        self.port = self.server.sockets[0].getsockname()[1]

    async def _stop(self) -> None:
        self.server.close()
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        self.tasks.add(task)
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                method, path, _ = head.split(b" ", 2)
                lines = (line.decode("latin-1").partition(": ") for line in head.split(b"\r\n")[1:])
                headers = {name.lower(): value for name, _, value in lines}
                self.keys |= {headers["authorization"]} if "authorization" in headers else set()
                sent = await reader.readexactly(int(headers.get("content-length", 0)))
                if not await self._respond(writer, method.decode(), path.decode(), sent):
                    break
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self.tasks.discard(task)
            writer.transport.abort()

    async def _respond(self, writer, method: str, path: str, sent: bytes) -> bool:
        """Send one response; False: the connection is to be broken."""
        if path == "/v1/models":
            return await self._send(writer, Reply(body=self.models))
        if path == "/version":
            return await self._send(writer, Reply(body={"version": "0.0-fake"}))
        if path != "/v1/chat/completions" or method != "POST":
            return await self._send(writer, Reply(404, {"error": "no such page"}))
        body = json.loads(sent)
        number = len(self.bodies)
        self.bodies.append(body)
        self.at.append(time.monotonic())
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            reply = self.behave(number, body)
            if not isinstance(reply, Reply):
                reply = Reply(body=self.completion(body, **(reply or {})), delay_s=self.delay_s)
            await asyncio.sleep(3600 if reply.silent else reply.delay_s)
        finally:
            self.in_flight -= 1
        return await self._send(writer, reply)

    async def _send(self, writer, reply: Reply) -> bool:
        body = reply.body if isinstance(reply.body, bytes) else json.dumps(reply.body).encode()
        headers = {"content-type": "application/json", "content-length": str(len(body))} | reply.headers
        lines = [f"HTTP/1.1 {reply.status} X", *(f"{name}: {value}" for name, value in headers.items())]
        writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + body[: reply.cut])
        await writer.drain()
        return reply.cut is None

    # ---- what a sound server says ----

    def completion(self, body: dict, reasoning: str | None = None, content: str | None = None, **changes) -> dict:
        """A chat completion in this server's form. `changes`: form, ids, finish, output_ids (what the target wrote).

        Without texts the reply is made up of the question, so that equal requests get equal replies.
        """
        protocol, form = self.protocol, changes.get("form", self.form)
        thinking = body.get("chat_template_kwargs", {}).get(protocol.target.thinking_argument, True)
        prompt_ids = protocol.tokenizer.apply_chat_template(
            body["messages"],
            add_generation_prompt=True,
            return_dict=False,
            **{protocol.target.thinking_argument: thinking},
        )
        finish = changes.get("finish", "stop")
        if reasoning is None and content is None:
            question = body["messages"][-1]["content"]
            reasoning, content = (f"I think of {question}." if thinking else None), f"Yes: {question}"
        output_ids = changes.get("output_ids")
        if output_ids is None:
            output_ids = protocol.reconstruct(prompt_ids, reasoning, content, finish)
        choice = {"index": 0, "finish_reason": finish, "message": message(protocol, form, reasoning, content)}
        usage = {"prompt_tokens": len(prompt_ids), "completion_tokens": len(output_ids)}
        answer = {
            "id": "x",
            "object": "chat.completion",
            "created": 0,
            "model": MODEL,
            "choices": [choice],
            "usage": usage,
        }
        if changes.get("ids", self.ids) and body.get("return_token_ids"):
            answer["prompt_token_ids"], choice["token_ids"] = list(prompt_ids), output_ids
        return answer


def message(protocol: Protocol, form: str, reasoning: str | None, content: str | None) -> dict:
    """The message of a reply in one of the forms that servers use."""
    written = {"role": "assistant", "content": content, "tool_calls": []}
    if form in ("content", "content_opened") and reasoning is not None:
        opener = protocol.think_open_text if form == "content_opened" else ""
        closed = protocol.think_close_text + content if content is not None else ""
        return written | {"content": opener + reasoning + closed}
    if form in ("reasoning", "both"):
        written["reasoning"] = reasoning
    if form in ("reasoning_content", "both"):
        written["reasoning_content"] = reasoning
    return written
