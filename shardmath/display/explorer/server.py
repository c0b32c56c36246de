"""Server: the page on the loopback, and the answers that it asks for."""

from __future__ import annotations

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib import parse

from shardmath.display.explorer.page import live_page
from shardmath.display.explorer.question import FIELDS
from shardmath.display.explorer.workers import Workers

__all__ = ["Explorer"]

SOON_S = 0.3
"""The seconds after which the page gets what is there of an answer."""

LATER_S = 20.0
"""The seconds for which a request waits for the rest."""

IDLE_S = 60.0
"""The seconds after which a connection without a request is closed."""

LONGEST_NAME = 64
"""Characters of the name of a tab that count."""


class Explorer:
    """The explorer's web server on 127.0.0.1, as a context manager: `url` is its address, and `serve` answers requests
    until the process is interrupted.

    Port 0 is any free one. Raises OSError if the port is taken.
    """

    def __init__(self, port: int = 0) -> None:
        self._server = _Server(("127.0.0.1", port), _Handler)
        self._server.workers = Workers()
        self._server.page = live_page().encode()

    @property
    def url(self) -> str:
        """The address of the page."""
        return f"http://127.0.0.1:{self._server.server_port}/"

    def serve(self) -> None:
        """Answer requests until another thread calls `shutdown`, or this one is interrupted."""
        self._server.serve_forever()

    def shutdown(self) -> None:
        """Make `serve` return."""
        self._server.shutdown()

    def __enter__(self) -> Explorer:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.server_close()
        self._server.workers.close()


class _Server(ThreadingHTTPServer):
    """A server with what its requests need."""

    daemon_threads = True
    workers: Workers
    page: bytes

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing if the browser has dropped a request, as it does with each key."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    """One request."""

    server: _Server
    protocol_version = "HTTP/1.1"
    timeout = IDLE_S

    def do_GET(self) -> None:
        """Send the page, or the answer to what was typed."""
        try:
            asked = parse.urlsplit(self.path)
        except ValueError:
            self._send(400, "text/plain; charset=utf-8", b"not an address\n")
            return
        if asked.path == "/":
            self._send(200, "text/html; charset=utf-8", self.server.page)
        elif asked.path == "/answer":
            try:
                given = parse.parse_qs(asked.query, keep_blank_values=True, max_num_fields=64)
            except ValueError:
                self._send(400, "text/plain; charset=utf-8", b"more than 64 fields\n")
                return
            texts = {name: given[name][-1] for name in FIELDS if name in given}
            asker = given.get("tab", [""])[-1][:LONGEST_NAME]
            have = _read_have(given.get("wait", [""])[-1])
            seconds = LATER_S if have else SOON_S
            answer = self.server.workers.ask(texts, seconds, asker=asker, have=have)
            self._send(200, "application/json", json.dumps(answer).encode())
        else:
            self._send(404, "text/plain; charset=utf-8", b"there are / and /answer\n")

    def _send(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing about requests, which come with every key."""


def _read_have(text: str) -> int:
    """The number of entries that the asker has, after which more are waited for; 0 if it does not wait."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 4 else 0
