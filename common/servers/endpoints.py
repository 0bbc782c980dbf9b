"""vLLM and SGLang servers seen from outside: addresses, models, versions."""

import json
import os
import urllib.request

from common.pipeline.errors import UserError

KNOWN = ("model", "messages", "temperature", "top_p", "max_tokens", "seed")  # arguments that the client has itself
VERSION_PAGES = {"vLLM": "/version", "SGLang": "/get_server_info"}


def api_key() -> str:
    """The key sent to servers: OPENAI_API_KEY, as the openai client reads it. It is never stored."""
    return os.environ.get("OPENAI_API_KEY") or "EMPTY"


def arguments_of(body: dict) -> dict:
    """A JSON body as arguments of the openai client. What it has no argument for goes through `extra_body`, which lands
    at the top level of the JSON: where a server looks for template arguments."""
    known = {key: body[key] for key in KNOWN if key in body}
    return known | {"extra_body": {key: value for key, value in body.items() if key not in KNOWN}}


def api_roots(urls: tuple[str, ...], setting: str) -> list[str]:
    """Base URLs as the client wants them, with /v1 where only host and port were given; `setting` names them."""
    if not urls:
        raise UserError(f"{setting} is empty: name one server at least, as http://localhost:8000/v1")
    roots = [url.rstrip("/") for url in urls]
    for root in roots:
        if not root.startswith(("http://", "https://")):
            raise UserError(f"{setting}: {root!r} must start with http:// or https://")
    return [root if root.count("/") > 2 else f"{root}/v1" for root in roots]


def server_version(url: str) -> str:
    """The server's name and version where it tells them; a note for the records, not a need."""
    for name, page in VERSION_PAGES.items():
        try:
            with urllib.request.urlopen(url.removesuffix("/v1") + page, timeout=5) as response:
                return f"{name} {json.load(response)['version']}"
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return "unknown"


def read_models(text: str) -> list[dict]:
    """The models that a server lists, from the raw body of /v1/models; raises ValueError for a body that is none."""
    try:
        models = json.loads(text)["data"]
        if models and all(isinstance(model["id"], str) for model in models):
            return models
    except (ValueError, KeyError, TypeError):
        pass
    raise ValueError(f"no list of models but {shortly(text)}")


def shortly(text: str) -> str:
    """The beginning of a received body in one line."""
    said = " ".join(text.split())[:200]
    return repr(said) if said else "an empty body"
