"""Servers seen from outside: pages that are not what they should be end in one line, never in a traceback."""

import socket
import threading

import pytest

from common.pipeline.errors import UserError
from common.pipeline.settings import Generate, Target
from common.servers.endpoints import Endpoint, ServerError, api_roots, chat_body, client_arguments, fetch, least_loaded
from tests.support.http_server import Pages

PAGES = {
    "html": b"<html>\nlogin</html>",
    "empty": b"",
    "binary": b"\xff\xfe\x00",
    "string": b'"0.32.0"',
    "number": b"5",
    "list": [],
    "no key": {},
    "null": {"data": None, "version": None, "vllm_config": None},
    "empty list": {"data": []},
    "no ids": {"data": [{}]},
    "number as id": {"data": [{"id": 7}]},
}


@pytest.mark.parametrize("page", PAGES.values(), ids=PAGES)
def test_a_page_that_is_no_list_of_models(page):
    with Pages({"/v1/models": page}) as server, pytest.raises(UserError) as refused:
        Endpoint(server.url).find_model("", "start it")
    message = str(refused.value)
    assert message.startswith(f"no server answers at {server.url} (no list of models but ")
    assert message.endswith("; start it") and "\n" not in message


@pytest.mark.parametrize("page", PAGES.values(), ids=PAGES)
def test_a_page_that_is_no_version(page):
    with Pages({"/version": page}) as server:
        endpoint = Endpoint(server.url)
        endpoint.find_version()
    assert endpoint.version == "unknown"


@pytest.mark.parametrize(("page", "version"), [("/version", "vLLM 0.32.0"), ("/get_server_info", "SGLang 0.32.0")])
def test_version(page, version):
    with Pages({page: {"version": "0.32.0"}}) as server:
        endpoint = Endpoint(server.url)
        endpoint.find_version()
    assert endpoint.version == version


@pytest.mark.parametrize("page", [*PAGES.values(), {"vllm_config": {"kv_transfer_config": []}}])
def test_a_page_without_a_connector(page):
    with Pages({"/server_info?config_format=json": page}) as server:
        assert Endpoint(server.url).connector_config() == {}


def test_model_by_name():
    with Pages({"/v1/models": {"data": [{"id": "a"}, {"id": "b", "root": "/r"}]}}) as server:
        endpoint = Endpoint(server.url)
        assert endpoint.find_model("b", "") == {"id": "b", "root": "/r"} and endpoint.model == "b"
        assert endpoint.find_model("", "") == {"id": "a"} and endpoint.model == "a"
        with pytest.raises(UserError, match="serves a, b, not 'c'; set --served-model"):
            endpoint.find_model("c", "")


def test_errors_of_http_are_one_line():
    with Pages({}) as server, pytest.raises(ServerError, match=r'^HTTP 404: \{"error": "no such page"\}$'):
        fetch(f"{server.root}/nowhere")
    with pytest.raises(ServerError, match="refused"):
        fetch(f"{server.root}/nowhere")
    with pytest.raises(ServerError, match="InvalidURL"):
        fetch("http://localhost:port/v1/models")
    with pytest.raises(ServerError, match="ValueError"):
        fetch("http://[::1/v1/models")


@pytest.mark.parametrize("sent", [b"", b"SSH-2.0-OpenSSH\r\n", b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf"])
def test_what_is_no_http_is_one_line(sent):
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(sent)

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(ServerError) as error:
            fetch(f"http://127.0.0.1:{listener.getsockname()[1]}/v1/models")
        thread.join()
    assert "\n" not in str(error.value)


def test_base_urls():
    roots = api_roots(("http://a:1", "https://b/", "http://c:2/v1/", "http://d/proxy/v1"), "x")
    assert roots == ["http://a:1/v1", "https://b/v1", "http://c:2/v1", "http://d/proxy/v1"]
    with pytest.raises(UserError, match=r"generate\.base_urls: 'a:1' must start with http:// or https://"):
        api_roots(("a:1",), "generate.base_urls")
    with pytest.raises(UserError, match=r"generate\.base_urls is empty"):
        api_roots((), "generate.base_urls")


def test_least_loaded_avoids_servers_that_failed(monkeypatch):
    monkeypatch.setattr("time.monotonic", lambda: 100.0)
    free, busy = Endpoint("free"), Endpoint("busy", in_flight=2)
    assert least_loaded([busy, free]) is free
    free.avoid_until = 101.0
    assert least_loaded([busy, free]) is busy
    busy.avoid_until = 102.0
    assert least_loaded([busy, free]) is free  # none is left to prefer
    free.avoid_until = busy.avoid_until = 99.0
    assert least_loaded([busy, free]) is free


@pytest.mark.parametrize(
    ("target", "thinking", "extra"),
    [
        (Target(), True, {"chat_template_kwargs": {"thinking": True}, "thinking_token_budget": 9}),
        (Target(), False, {"chat_template_kwargs": {"thinking": False}}),
        (Target(thinking_argument="enable_thinking"), False, {"chat_template_kwargs": {"enable_thinking": False}}),
        (Target(think_open=""), True, {}),
    ],
)
def test_body_of_a_chat_request(target, thinking, extra):
    numbers = {"temperature": 0.5, "top_p": 0.9, "max_tokens": 3, "seed": 4}
    sampling = Generate(thinking=thinking, thinking_budget=9, temperature=0.5, top_p=0.9)
    messages = [{"role": "user", "content": "x"}]
    body = chat_body(target, "m", messages, sampling, max_tokens=3, seed=4)
    assert body == {"model": "m", "messages": messages, "return_token_ids": True, **numbers, **extra}
    client = client_arguments(body)
    assert client.pop("extra_body") == {"return_token_ids": True, **extra}
    assert client == {"model": "m", "messages": messages, **numbers}
