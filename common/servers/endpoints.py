"""One vLLM or SGLang server seen from outside: its address, model, version and settings, and how it is asked.

Pages and raw replies are read by plain HTTP, so that nothing is hidden that a client library does not know; stages 01b
and 02 send their many requests through the openai client, which keeps connections open. A page that is not what it
should be ends in one line that names the server.
"""

import http.client
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass

from common.pipeline.errors import UserError
from common.pipeline.settings import Target
from common.target.messages import on_the_wire
from common.target.protocol import template_arguments

PAGE_TIMEOUT_S = 10.0
VERSION_PAGES = {"vLLM": "/version", "SGLang": "/get_server_info"}
CLIENT_ARGUMENTS = ("model", "messages", "temperature", "top_p", "max_tokens", "seed")  # of the openai client


class ServerError(Exception):
    """A server sent no answer, or an answer that is not what was asked for; the message is one line."""


@dataclass
class Endpoint:
    """One server. `client`: of the openai library, where requests go through it. `avoid_until`: a time on the monotonic
    clock before which other servers are asked first."""

    url: str  # the base URL of its API, with /v1
    client: object = None
    model: str = ""
    version: str = "unknown"
    in_flight: int = 0
    avoid_until: float = 0.0

    @property
    def root(self) -> str:
        """The address of the pages outside the API: /version, /metrics, /server_info."""
        return self.url.removesuffix("/v1")

    def find_model(self, wanted: str, advice: str) -> dict:
        """Set `model` to `wanted`, or to the first that the server lists, and return its entry of /v1/models.

        Raises UserError, with the advice, for a server that does not answer or does not serve it.
        """
        try:
            models = read_models(fetch(f"{self.url}/models"))
        except ServerError as error:
            raise UserError(f"no server answers at {self.url} ({error}); {advice}") from None
        served = {model["id"]: model for model in models}
        self.model = wanted or models[0]["id"]
        if self.model not in served:
            raise UserError(f"{self.url} serves {', '.join(served)}, not {self.model!r}; set --served-model")
        return served[self.model]

    def find_version(self) -> None:
        """Set `version` to the server's name and version, for the records; "unknown" where it has no version page."""
        for name, page in VERSION_PAGES.items():
            if version := _read_key(self.root + page, str, "version"):
                self.version = f"{name} {version}"
                return

    def connector_config(self) -> dict:
        """The settings of its KV connector, which a vLLM server in development mode shows; empty for any other.

        vLLM 0.32 shows nowhere which layers it extracts, so the command of stage 02 repeats the list in these settings:
        see common/servers/commands.py.
        """
        page = f"{self.root}/server_info?config_format=json"
        return _read_key(page, dict, "vllm_config", "kv_transfer_config", "kv_connector_extra_config") or {}


def least_loaded(endpoints: Sequence[Endpoint]) -> Endpoint:
    """The server with the fewest requests in flight, of those that need not be avoided if there are any."""
    now = time.monotonic()
    return min(endpoints, key=lambda endpoint: (endpoint.avoid_until > now, endpoint.in_flight))


def api_key() -> str:
    """The key sent to servers: OPENAI_API_KEY, as the openai client reads it. It is never stored."""
    return os.environ.get("OPENAI_API_KEY") or "EMPTY"


def api_roots(urls: tuple[str, ...], setting: str) -> list[str]:
    """Base URLs with /v1, which may be left out after host and port. `setting`: the name that errors give them."""
    if not urls:
        raise UserError(f"{setting} is empty: name at least one server, as http://localhost:8000/v1")
    roots = [url.rstrip("/") for url in urls]
    for root in roots:
        if not root.startswith(("http://", "https://")):
            raise UserError(f"{setting}: {root!r} must start with http:// or https://")
    return [root if root.count("/") > 2 else f"{root}/v1" for root in roots]


def fetch(url: str, body: dict | None = None, timeout_s: float = PAGE_TIMEOUT_S) -> str:
    """The text of a page; with a `body`, the answer to a POST of it as JSON. Raises ServerError."""
    headers = {"Authorization": f"Bearer {api_key()}", "Content-Type": "application/json"}
    data = None if body is None else json.dumps(body).encode()
    try:
        with _open(urllib.request.Request(url, data, headers), timeout_s) as response:
            status, text = response.getcode(), response.read().decode("utf-8", "replace")
    except urllib.error.URLError as error:
        raise ServerError(str(error.reason)) from None
    except (OSError, http.client.HTTPException, ValueError) as error:  # a cut connection, a URL that is none
        raise ServerError(one_line(f"{type(error).__name__}: {error}")) from None
    if status >= 400:
        raise ServerError(status_line(status, text))
    return text


def _open(request: urllib.request.Request, timeout_s: float):
    try:
        return urllib.request.urlopen(request, timeout=timeout_s)
    except urllib.error.HTTPError as response:  # which is a response as well, with a body that says what is wrong
        return response


def read_models(text: str) -> list[dict]:
    """The entries of a /v1/models page, at least one, each with its `id`; raises ServerError for any other page."""
    try:
        models = json.loads(text)["data"]
        if models and all(isinstance(model["id"], str) for model in models):
            return models
    except (ValueError, KeyError, TypeError):
        pass
    raise ServerError(f"no list of models but {excerpt(text)}")


def _read_key(url: str, kind: type, *keys: str):
    """The value under nested keys of a JSON page; None where the page has no value of that type there."""
    try:
        value = json.loads(fetch(url))
        for key in keys:
            value = value[key]
    except (ServerError, ValueError, KeyError, TypeError):
        return None
    return value if isinstance(value, kind) else None


def chat_body(target: Target, model: str, messages: list[dict], sampling, max_tokens: int, seed: int) -> dict:
    """The JSON body of a chat request. Token ids are asked of every server; one that sends none ignores it.

    `sampling`: thinking, thinking_budget, temperature and top_p, under the names that `Generate` has.
    """
    body = {
        "model": model,
        "messages": [on_the_wire(message) for message in messages],
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "max_tokens": max_tokens,
        "seed": seed,
        "return_token_ids": True,
    }
    if arguments := template_arguments(target, sampling.thinking):
        body["chat_template_kwargs"] = arguments
        if sampling.thinking and sampling.thinking_budget:
            body["thinking_token_budget"] = sampling.thinking_budget
    return body


def client_arguments(body: dict) -> dict:
    """A JSON body as arguments of the openai client. `extra_body` takes what the client has no argument for, and puts
    it at the top level of the JSON, where servers read template arguments."""
    known = {key: body[key] for key in CLIENT_ARGUMENTS if key in body}
    return known | {"extra_body": {key: value for key, value in body.items() if key not in known}}


def status_line(status: int, text: str) -> str:
    """An HTTP error as one line: its status and the beginning of its body."""
    return f"HTTP {status}: {one_line(text)}"


def excerpt(text: str) -> str:
    """The beginning of a received body in one line, quoted."""
    return repr(one_line(text)) if text.strip() else "an empty body"


def one_line(text: str) -> str:
    """The beginning of a text, line breaks as spaces."""
    return " ".join(text.split())[:300]
