"""What a client says to a server, and what it raises where that does not answer as it should."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from shardmath.base.errors import ExchangeError
from shardmath_vllm import HTTPClient
from tests.distributed.pool import free_port

SAID = b'{"error": {"message": "place 1 could not plan"}}'


@contextmanager
def answering(
    code: int, body: bytes = b"{}", delay: float = 0.0
) -> Iterator[tuple[str, list[Any]]]:
    """A server's URL, and what was said to it."""
    heard: list[Any] = []
    over = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            length = int(self.headers["Content-Length"])
            heard.append((self.path, json.loads(self.rfile.read(length))))
            over.wait(delay)
            # Who did not wait is no longer there.
            with suppress(BrokenPipeError):
                self._answer()

        def do_GET(self) -> None:
            """A page for people, such as a proxy's."""
            self.send_response(200)
            self.end_headers()

        def _answer(self) -> None:
            if code:
                self.send_response(code)
                self.send_header("Location", "/elsewhere")
                self.end_headers()
                self.wfile.write(body)

        def log_message(self, *args: Any) -> None:
            """Nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", heard
        finally:
            over.set()
            server.shutdown()
            thread.join()


def test_an_update_is_said_as_vllm_s_routes_have_it() -> None:
    with answering(200) as (url, heard):
        client = HTTPClient(f"{url}/")
        client.init_weight_transfer_engine({"size": 3})
        client.start_weight_update()
        client.update_weights({"number": 1})
        client.finish_weight_update("v1")
    assert heard == [
        ("/init_weight_transfer_engine", {"init_info": {"size": 3}}),
        ("/start_weight_update", {}),
        ("/update_weights", {"update_info": {"number": 1}}),
        ("/finish_weight_update", {"weight_version": "v1"}),
    ]


@pytest.mark.parametrize(
    ("code", "body", "word"),
    [
        (500, SAID, "answered 500: place 1 could not plan"),
        (400, b'{"error": "bad"}', 'answered 400: {"error": "bad"}'),
        (502, b"<html>\xff", "answered 502: <html>"),
        (404, b"", "answered 404: no such route; start the server with VLLM_SERVER_DEV_MODE=1"),
        (302, b"", "answered 302"),
        (500, b"[" * 200_000, r"answered 500: \[\["),
        (0, b"", "gave no answer .*; start a vLLM server there"),
    ],
)
def test_what_a_server_refuses_is_an_error_with_what_it_said(
    code: int, body: bytes, word: str
) -> None:
    with answering(code, body) as (url, _), pytest.raises(ExchangeError, match=word):
        HTTPClient(url).start_weight_update()


def test_a_server_that_is_not_there_or_late_is_an_error() -> None:
    with pytest.raises(ExchangeError, match=r"gave no answer .*refused"):
        HTTPClient(f"http://127.0.0.1:{free_port()}").start_weight_update()
    with (
        answering(200, delay=5.0) as (url, _),
        pytest.raises(ExchangeError, match=r"gave no answer .*timed out"),
    ):
        HTTPClient(url, timeout=0.1).start_weight_update()


@pytest.mark.parametrize("begun", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n"])
def test_the_time_limit_is_that_of_the_whole_answer(begun: bytes) -> None:
    """A server may send a byte now and then, of its head or of its body, and each read is done in time."""

    class Slow(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            with suppress(OSError):
                self.wfile.write(begun)
                for _ in range(50):
                    self.wfile.write(b"H")
                    time.sleep(0.1)

        def log_message(self, *args: Any) -> None:
            """Nothing."""

    start = time.monotonic()
    with ThreadingHTTPServer(("127.0.0.1", 0), Slow) as server:
        server.daemon_threads = True
        server.block_on_close = False
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        with pytest.raises(ExchangeError, match=r"gave no answer \(timed out after 0.5 s\)"):
            HTTPClient(f"http://127.0.0.1:{server.server_port}", timeout=0.5).start_weight_update()
        server.shutdown()
    assert time.monotonic() - start < 3.0


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "localhost:8000", "ftp://a", None])
def test_what_is_not_a_url(url: Any) -> None:
    with pytest.raises(ValueError, match="is not the URL of a server; pass one"):
        HTTPClient(url)
    with pytest.raises(ValueError, match="is not a time to wait"):
        HTTPClient("http://127.0.0.1:8000", timeout=0)
