"""Calls: an engine in a process of its own, which does what a trainer's rank asks for over a connection."""

from __future__ import annotations

import multiprocessing as mp
import os
import time
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any, TypeAlias

from tests.vllm.cases import VOCAB

__all__ = ["Caller", "Generated", "generate", "serve"]

Generated: TypeAlias = list[tuple[int, float]]
"""Greedy tokens after two prompts, and their log-probabilities."""

KEY = b"tests of shardmath"
START_S = 120.0
"""What an engine takes to start, at most."""


def serve(rank: int, folder: Path, tp: int, port: int) -> Generated:
    """Start an engine and do what is asked for, until the connection ends; what it generated before."""
    import shardmath_vllm as sv

    llm = _start(folder, tp)
    before = _generate(llm)
    client = sv.LLMClient(llm)
    with Listener(("127.0.0.1", port), authkey=KEY) as listener, listener.accept() as connection:
        while (asked := _receive(connection)) is not None:
            name, args = asked
            try:
                answer = _generate(llm) if name == "generate" else getattr(client, name)(*args)
            except Exception as error:
                answer = error
            connection.send(answer)
    return before


def generate(rank: int, folder: Path, tp: int) -> Generated:
    """What an engine that was started on a checkpoint generates."""
    return _generate(_start(folder, tp))


def _generate(llm: Any) -> Generated:
    from vllm import SamplingParams

    greedy = SamplingParams(
        temperature=0, max_tokens=16, logprobs=0, detokenize=False, ignore_eos=True
    )
    prompts = []
    for start in (3, 50):
        tokens = [(start + 37 * i) % VOCAB for i in range(8)]
        prompts.append({"prompt_token_ids": tokens})
    generated = []
    for answer in llm.generate(prompts, greedy, use_tqdm=False):
        for token, chosen in zip(
            answer.outputs[0].token_ids, answer.outputs[0].logprobs, strict=True
        ):
            generated.append((token, chosen[token].logprob))
    return generated


def _start(folder: Path, tp: int) -> Any:
    from tests.vllm import serving

    # A group of its own, by which whoever ends the engine ends its workers too.
    os.setpgid(0, 0)
    # A pool's processes are daemons, which may have no children.
    mp.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    backend = {"backend": "shardmath"}
    return serving.start(folder, tensor_parallel_size=tp, weight_transfer_config=backend)


def _receive(connection: Connection) -> Any:
    """What is asked for; None at the end."""
    try:
        return connection.recv()
    except EOFError:
        return None


class Caller:
    """A trainer's client of such an engine."""

    def __init__(self, port: int) -> None:
        self._connection = _connect(port)

    def _call(self, name: str, *args: Any) -> Any:
        self._connection.send((name, args))
        answer = self._connection.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._call("init_weight_transfer_engine", init_info)

    def start_weight_update(self) -> None:
        self._call("start_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._call("update_weights", update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._call("finish_weight_update", weight_version)

    def generate(self) -> Generated:
        """What the engine generates."""
        generated: Generated = self._call("generate")
        return generated

    def close(self) -> None:
        """Have the engine end."""
        self._connection.close()


def _connect(port: int) -> Connection:
    """A connection to the engine, once it has started."""
    deadline = time.monotonic() + START_S
    while True:
        try:
            return Client(("127.0.0.1", port), authkey=KEY)
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)
