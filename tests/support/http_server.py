"""An HTTP server in a thread, the base of the tests' extraction server and draft server.

    with Pages({"/v1/models": {"data": []}, "/version": b"<html>"}) as server: ... server.root ...

Subclasses answer in `handle`. FaultServer, which cuts replies in the middle, works on raw sockets instead.
"""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self


class HttpServer:
    """Listens between enter and exit; `stop` and `start` play a server that is killed and started again."""

    port = 0
    httpd: ThreadingHTTPServer | None = None

    @property
    def root(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        return f"{self.root}/v1"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_) -> None:
        self.stop()

    def start(self) -> None:
        """Listen; again on the same port after `stop`."""
        handler = type("Handler", (_Handler,), {"fake": self})
        self.httpd = ThreadingHTTPServer(("127.0.0.1", self.port), handler)
        self.httpd.daemon_threads = True
        self.httpd.handle_error = lambda *_: None  # clients are killed in the middle
        self.port = self.httpd.server_address[1]
        threading.Thread(target=self.httpd.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def stop(self) -> None:
        """Refuse every further connection, as a server that was killed."""
        if self.httpd:
            self.httpd.shutdown()
            self.httpd.server_close()
            self.httpd = None

    def handle(self, path: str, body: dict | None, headers: dict) -> tuple[int, dict | list | bytes]:
        """(status, page) of a GET, or of a POST of `body`; status 0 breaks the connection."""
        raise NotImplementedError


class Pages(HttpServer):
    """Fixed pages by path, JSON or raw; every other path is 404."""

    def __init__(self, pages: dict[str, dict | list | bytes]):
        self.pages = pages

    def handle(self, path: str, body: dict | None, headers: dict) -> tuple[int, dict | list | bytes]:
        return (200, self.pages[path]) if path in self.pages else (404, {"error": "no such page"})


class _Handler(BaseHTTPRequestHandler):
    fake: HttpServer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(None)

    def do_POST(self) -> None:
        self._answer(json.loads(self.rfile.read(int(self.headers["content-length"]))))

    def _answer(self, body: dict | None) -> None:
        status, page = self.fake.handle(self.path, body, self.headers)
        if not status or self.fake.httpd is not self.server:  # broken, or a kept connection that outlives `stop`
            self.close_connection = True
            return
        data = page if isinstance(page, bytes) else json.dumps(page).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_) -> None:
        pass
