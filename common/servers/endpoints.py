"""One vLLM or SGLang server seen from outside: its address, model, version and settings, and how it is asked.

Pages and raw replies are read by plain HTTP, so that no field is hidden that a client library does not know; stages 01b
and 02 send their many requests through the openai client, which keeps connections open. An unexpected page ends in a
one-line error that names the server.
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
    """A server sent no answer, or an unexpected one; the message is one line."""


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

    def open_client(self, kind: type, timeout):
        """Set and return `client`, of a class of the openai library; for its retries see common/servers/retries.py."""
        self.client = kind(base_url=self.url, api_key=api_key(), max_retries=0, timeout=timeout)
        return self.client

    def models(self) -> list[dict]:
        """The entries of its /v1/models page, at least one, each with its `id`; raises ServerError."""
        text = fetch(f"{self.url}/models")
        try:
            models = json.loads(text)["data"]
            if models and all(isinstance(model["id"], str) for model in models):
                return models
        except (ValueError, KeyError, TypeError):
            pass
        raise ServerError(f"no list of models but {excerpt(text)}")

    def find_model(self, wanted: str, advice: str) -> dict:
        """Set `model` to `wanted`, or to the first that the server lists, and return its entry of /v1/models.

        Raises UserError for a server that does not serve the model, and with the advice for one that does not answer.
        """
        try:
            served = {model["id"]: model for model in self.models()}
        except ServerError as error:
            raise UserError(f"no server answers at {self.url} ({error}); {advice}") from None
        self.model = wanted or next(iter(served))
        if self.model not in served:
            raise UserError(f"{self.url} serves {', '.join(served)}, not {self.model!r}; set --served-model")
        return served[self.model]

    def find_version(self) -> None:
        """Set `version` to the server's name and version, for the records; "unknown" where it has no version page."""
        found = ((name, _read_key(self.root + page, str, "version")) for name, page in VERSION_PAGES.items())
        self.version = next((f"{name} {version}" for name, version in found if version), "unknown")

    def connector_config(self) -> dict:
        """The settings of its KV connector, which a vLLM server in development mode shows; empty for any other.

        They name the layers and the spool of an extraction server: see common/servers/commands.py.
        """
        page = f"{self.root}/server_info?config_format=json"
        return _read_key(page, dict, "vllm_config", "kv_transfer_config", "kv_connector_extra_config") or {}


def least_loaded(endpoints: Sequence[Endpoint]) -> Endpoint:
    """The server with the fewest requests in flight, among those that need not be avoided if there are any."""
    now = time.monotonic()
    return min(endpoints, key=lambda endpoint: (endpoint.avoid_until > now, endpoint.in_flight))


def api_key() -> str:
    """The key sent to servers: OPENAI_API_KEY, as the openai client reads it. It is never stored."""
    return os.environ.get("OPENAI_API_KEY") or "EMPTY"


def api_roots(urls: tuple[str, ...], setting: str) -> list[str]:
    """Base URLs with /v1, which may be left out after host and port; errors name the setting."""
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
        try:
            response = urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=timeout_s)
        except urllib.error.HTTPError as error:
            response = error  # which is also a response, and its body says what is wrong
        with response:
            status, text = response.status, response.read().decode("utf-8", "replace")
    except (OSError, http.client.HTTPException, ValueError) as error:  # a cut connection, a malformed URL
        raise ServerError(error_line(error)) from None
    if status >= 400:
        raise ServerError(status_line(status, text))
    return text


def _read_key(url: str, kind: type, *keys: str):
    """The value under nested keys of a JSON page; None where the page has no value of that type under them."""
    try:
        value = json.loads(fetch(url))
        for key in keys:
            value = value[key]
    except (ServerError, ValueError, KeyError, TypeError):
        return None
    return value if isinstance(value, kind) else None


def chat_body(target: Target, model: str, messages: list[dict], sampling, max_tokens: int, seed: int) -> dict:
    """The JSON body of a chat request. It asks for token ids, which servers that cannot send them ignore.

    `sampling`: thinking, thinking_budget, temperature and top_p, under the names that `Generate` has.
    """
    body = {"model": model, "messages": [on_the_wire(message) for message in messages], "return_token_ids": True}
    body |= {"temperature": sampling.temperature, "top_p": sampling.top_p, "max_tokens": max_tokens, "seed": seed}
    if arguments := template_arguments(target, sampling.thinking):
        body["chat_template_kwargs"] = arguments
        if sampling.thinking and sampling.thinking_budget:
            body["thinking_token_budget"] = sampling.thinking_budget
    return body


def client_arguments(body: dict) -> dict:
    """A JSON body as arguments of the openai client, which puts those of `extra_body` at the top level of the JSON."""
    known = {key: body[key] for key in CLIENT_ARGUMENTS}
    return known | {"extra_body": {key: value for key, value in body.items() if key not in known}}


def status_line(status: int, text: str) -> str:
    """An HTTP error as one line: its status and the beginning of its body."""
    return f"HTTP {status}: {_one_line(text) or 'an empty body'}"


def error_line(error: Exception) -> str:
    """The kind and message of an error as one line."""
    return _one_line(f"{type(error).__name__}: {getattr(error, 'reason', error)}")


def excerpt(text: str) -> str:
    """The beginning of a received body in one line, quoted."""
    return repr(_one_line(text)) if text.strip() else "an empty body"


def _one_line(text: str) -> str:
    return " ".join(text.split())[:300]
