"""Clients: how a trainer speaks to an engine, in its own process or over HTTP.

Each has the four methods of vLLM's own clients, which can be used as well.
"""

from __future__ import annotations

import json
import threading
from http import HTTPStatus
from http.client import HTTPException
from typing import Any, ClassVar, Protocol, runtime_checkable
from urllib.error import HTTPError
from urllib.request import HTTPRedirectHandler, Request, build_opener
from weakref import WeakKeyDictionary

from shardmath.base.errors import ExchangeError
from shardmath.base.text import message_of, shown, word_error
from shardmath_torch.groups.agreement import threads
from shardmath_torch.groups.agreement.party import is_time, word_bad_time

__all__ = ["Client", "HTTPClient", "LLMClient"]

TIMEOUT_S = 600.0
"""The seconds for an answer: longer than ranks wait for each other by default, so that these say what was wrong."""


@runtime_checkable
class Client(Protocol):
    """The protocol of a connection through which a trainer asks an engine to update its weights, such as vLLM's
    HTTPVLLMWeightSyncClient."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None: ...

    def start_weight_update(self) -> None: ...

    def update_weights(self, update_info: dict[str, Any]) -> None: ...

    def finish_weight_update(self, weight_version: str | None = None) -> None: ...


_turns: WeakKeyDictionary[Any, threading.Lock] = WeakKeyDictionary()
"""The lock of each `vllm.LLM`, shared by all of its clients."""


class LLMClient:
    """A Client that connects a trainer to a `vllm.LLM` made in this process; its workers may be separate processes.

    It makes one call at a time, as a server does: two threads in an LLM take each other's answers. A call that was
    interrupted by Ctrl-C continues, and the next one waits for it. No other thread may use the LLM, as by `generate`,
    during `trainer_init` and `send_weights`.
    """

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._turn_lock = _turns.setdefault(llm, threading.Lock())

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Have the engine's workers connect to the trainer that `init_info` describes."""
        with self._turn_lock:
            self._llm.init_weight_transfer_engine({"init_info": init_info})

    def start_weight_update(self) -> None:
        """Tell the engine that an update of its weights begins."""
        with self._turn_lock:
            self._llm.start_weight_update()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Have the engine's workers receive the weights of the update that `update_info` describes."""
        with self._turn_lock:
            self._llm.update_weights({"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Tell the engine that the update is over; `weight_version` is the name of the new weights."""
        with self._turn_lock:
            self._llm.finish_weight_update(weight_version)


class HTTPClient:
    """A Client that connects a trainer to the vLLM server at `url` (`vllm serve` with VLLM_SERVER_DEV_MODE=1). The
    trainer's process does not need vLLM for it.

    `timeout`, in seconds, is for each answer, to its last byte, and has to be longer than `TrainerInfo.timeout`. Calls
    raise ExchangeError, with the server's text, if the server refuses or does not answer in time. Raises ValueError for
    a value that is not a URL of http or https, or not a time.
    """

    _SERVER: ClassVar[str] = "a vLLM server"
    """What to start where nothing answers."""
    _NO_ROUTE: ClassVar[str] = "start the server with VLLM_SERVER_DEV_MODE=1 in its environment"
    """What to do if the server lacks a route."""

    def __init__(self, url: str, timeout: float = TIMEOUT_S) -> None:
        if not isinstance(url, str) or not url.startswith(("http://", "https://")):
            raise ValueError(
                f"url={shown(url)} is not the URL of a server; pass one, such as 'http://host:8000'"
            )
        if not is_time(timeout):
            raise ValueError(word_bad_time(timeout))
        self._url = url.rstrip("/")
        self._timeout = float(timeout)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Have the engine's workers connect to the trainer that `init_info` describes."""
        self._post("init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        """Tell the engine that an update of its weights begins."""
        self._post("start_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Have the engine's workers receive the weights of the update that `update_info` describes."""
        self._post("update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Tell the engine that the update is over; `weight_version` is the name of the new weights."""
        self._post("finish_weight_update", {"weight_version": weight_version})

    def _post(self, path: str, body: dict[str, Any] | None = None) -> None:
        """POST `body` to the server's route `path`, and wait for the answer. Raises ExchangeError if it fails."""
        url = f"{self._url}/{path}"
        data = json.dumps(body or {}).encode()
        request = Request(url, data, {"Content-Type": "application/json"})
        faults: list[str] = []
        # On a separate thread: urlopen's timeout is for each read, and an answer may take any number of reads.
        thread = threads.start(lambda: faults.append(self._ask(request)))
        thread.join(self._timeout)
        fault = faults[0] if faults else self._word_silence(f"timed out after {self._timeout:g} s")
        if fault:
            raise ExchangeError(f"{url} {fault}")

    def _ask(self, request: Request) -> str:
        """Send the request; return the error of its answer as text, "" if it succeeds."""
        try:
            with OPENER.open(request, timeout=self._timeout) as answer:
                answer.read()
        except HTTPError as error:
            return f"answered {error.code}: {self._explain(error)}"
        except Exception as error:
            return self._word_silence(word_error(error))
        return ""

    def _word_silence(self, why: str) -> str:
        """The error for a request without an answer, to follow the URL."""
        fix = f"start {self._SERVER} there, or pass {type(self).__name__} a longer timeout"
        return f"gave no answer ({why}); {fix}"

    def _explain(self, error: HTTPError) -> str:
        """The error message in a server's answer, or what to do about its status."""
        if error.code == HTTPStatus.NOT_FOUND:
            return f"no such route; {self._NO_ROUTE}"
        try:
            text = error.read().decode(errors="replace")
        except (OSError, HTTPException) as read_error:
            return f"an answer that broke off ({word_error(read_error)})"
        try:
            return message_of(str(self._find_message(json.loads(text))))
        except (ValueError, KeyError, TypeError, RecursionError):
            return message_of(text)

    @staticmethod
    def _find_message(answer: Any) -> Any:
        """The message in the JSON of an answer that is an error."""
        return answer["error"]["message"]


class _NoRedirects(HTTPRedirectHandler):
    """A handler that makes a redirect an error: urllib would follow it by GET, which an engine ignores."""

    def redirect_request(self, *_: object) -> None:
        """Return None, so that urllib raises an error for a redirect instead of following it."""


OPENER = build_opener(_NoRedirects)
