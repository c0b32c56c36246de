"""Hosts: engines, each with a process of its own in which vLLM was started, that do what they are asked to.

1. A host answers one call after the other, from any process that has its address: the test asks what it generates, and
   a trainer's rank 0 speaks to it as to an engine of its own.
2. It ends with the process that started it.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing as mp
import os
import tempfile
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

from tests.distributed.pool import PRELOADED

__all__ = ["EngineError", "Host", "HostClient"]

KEY = b"shardmath"
START_S = 200.0
END_S = 20.0


class EngineError(Exception):
    """What an engine raised, which may be of a class that is vLLM's alone."""


class HostClient:
    """Speaks to the engine of a host from any process, as `shardmath_vllm.Client` has it."""

    def __init__(self, address: str) -> None:
        self.address = address

    def ask(self, act: Callable[..., Any], *args: Any) -> Any:
        """What the host's `act(llm, *args)` gives. Raises EngineError with what it raised."""
        with Client(self.address, authkey=KEY) as channel:
            channel.send((act, args))
            try:
                is_right, answer = channel.recv()
            except EOFError:
                raise EngineError("the host is gone") from None
        if not is_right:
            raise EngineError(answer)
        return answer

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.ask(_tell, "init_weight_transfer_engine", init_info)

    def start_weight_update(self) -> None:
        self.ask(_tell, "start_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.ask(_tell, "update_weights", update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.ask(_tell, "finish_weight_update", weight_version)


class Host(HostClient):
    """A process with an engine, that was started on a checkpoint, with `more` of vLLM's arguments."""

    def __init__(self, folder: Path, tp: int = 1, pp: int = 1, **more: Any) -> None:
        self._home = tempfile.TemporaryDirectory()
        super().__init__(f"{self._home.name}/socket")
        self._workers = tp * pp
        sizes = {"tensor_parallel_size": tp, "pipeline_parallel_size": pp}
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self._channel, theirs = context.Pipe()
        # No daemon: engines start processes.
        asked = self.address, folder, {**sizes, **more}, theirs
        self._process = context.Process(target=_work, args=asked)
        self._process.start()
        theirs.close()

    def wait(self) -> Host:
        """Return once the engine is up."""
        if not self._channel.poll(START_S):
            raise EngineError("did not start in time")
        fault = self._channel.recv()
        if fault:
            raise EngineError(fault)
        return self

    @property
    def workers(self) -> int:
        """How many it has."""
        return self._workers

    def let_go(self) -> None:
        """Have it end, with all its workers."""
        self._channel.close()

    def close(self) -> None:
        """Return once it has ended."""
        self.let_go()
        self._process.join(END_S)
        self._process.kill()
        self._process.join()
        self._home.cleanup()


def _tell(llm: Any, method: str, *args: Any) -> None:
    """What a client does of vLLM's own interface."""
    from shardmath_vllm import LLMClient

    getattr(LLMClient(llm), method)(*args)


def _work(address: str, folder: Path, more: dict[str, Any], channel: Connection) -> None:
    """A host's life: start the engine, then answer until the one who started it is gone."""
    try:
        llm = _start(folder, more)
        listener = Listener(address, authkey=KEY)
    except Exception:
        channel.send(traceback.format_exc())
        return
    threading.Thread(target=_end_with, args=(channel, llm), daemon=True).start()
    channel.send("")
    while True:
        with listener.accept() as asking:
            act, args = asking.recv()
            answer = _answer(functools.partial(act, llm, *args))
            # Who has asked may have died since.
            with contextlib.suppress(OSError):
                asking.send(answer)


def _answer(act: Callable[[], Any]) -> tuple[bool, Any]:
    try:
        return True, act()
    except Exception as error:
        return False, f"{type(error).__name__}: {error}"


def _start(folder: Path, more: dict[str, Any]) -> Any:
    from vllm.v1.executor import multiproc_executor

    from tests.vllm import serving
    from tests.vllm.transfer import lacking

    # Workers come from the process that this one is from, which has imported all that takes them ten seconds each.
    multiproc_executor.get_mp_context = lambda: mp.get_context("forkserver")
    llm = serving.start(folder, weight_transfer_config={"backend": "shardmath"}, **more)
    llm.collective_rpc(lacking.complete)
    return llm


def _end_with(channel: Connection, llm: Any) -> None:
    """End once the other end of the channel is closed."""
    try:
        channel.recv()
    except EOFError:
        ending = threading.Thread(target=llm.llm_engine.engine_core.shutdown, daemon=True)
        ending.start()
        ending.join(END_S / 2)
        os._exit(0)
