"""Servers: the real `vllm serve` on the loopback."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.distributed.pool import free_port
from tests.vllm.cases import VOCAB
from tests.vllm.served.sessions import Running, begin

__all__ = ["TP", "ask", "command", "complete", "serve"]

ROOT = Path(__file__).parents[3]
TP = 2
START_S = 280.0
ANSWER_S = 60.0
BLOCK = 32
PROMPT = [(3 + 37 * i) % VOCAB for i in range(BLOCK + 8)]
"""Longer than a block, so that vLLM caches what it makes of it."""

OPTIONS = [
    "--host=127.0.0.1",
    "--skip-tokenizer-init",
    "--enforce-eager",
    "--dtype=bfloat16",
    "--max-model-len=64",
    "--max-num-seqs=2",
    f"--block-size={BLOCK}",
]
ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
}


def command(checkpoint: str) -> list[str]:
    """What starts a server."""
    parallel = ["--tensor-parallel-size", str(TP)]
    transfer = ["--weight-transfer-config", '{"backend": "shardmath"}']
    return ["vllm", "serve", checkpoint, *parallel, *transfer]


@contextlib.contextmanager
def serve(folders: Sequence[Path], log: Path, *options: str) -> Iterator[list[str]]:
    """The URLs of a server of each checkpoint, which start at once, with more `options`."""
    with contextlib.ExitStack() as running:
        started = []
        for number, folder in enumerate(folders):
            file = log / f"server{number}.log"
            started.append((file, *running.enter_context(_run(folder, file, options))))
        for file, url, process in started:
            _wait_until_up(url, process, file)
        yield [url for _, url, _ in started]


@contextlib.contextmanager
def _run(folder: Path, log: Path, options: Sequence[str]) -> Iterator[tuple[str, Running]]:
    """A server's URL, and its process."""
    port = free_port()
    program, *words = command(str(folder))
    words = [
        str(Path(sys.executable).with_name(program)),
        *words,
        f"--port={port}",
        *OPTIONS,
        *options,
    ]
    path = [str(ROOT), str(ROOT / "backends")]
    env = {**ENVIRONMENT, "PYTHONPATH": os.pathsep.join(path)}
    with begin(words, env, log) as process:
        yield f"http://127.0.0.1:{port}", process


def _wait_until_up(url: str, process: Running, log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()[-4000:]
        with contextlib.suppress(OSError):
            ask(f"{url}/health")
            return
        time.sleep(0.2)
    raise AssertionError(f"no answer in {START_S:g} s: {log.read_text()[-4000:]}")


def ask(url: str, said: Any = None, replica: int | None = None) -> Any:
    """What the server answers; this one of its replicas, where it has several."""
    data = None if said is None else json.dumps(said).encode()
    headers = {"Content-Type": "application/json"}
    if replica is not None:
        headers["X-data-parallel-rank"] = str(replica)
    request = urllib.request.Request(url, data, headers)
    with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
        text = answer.read()
    return json.loads(text) if text else None


def complete(url: str, replica: int | None = None) -> tuple[list[int], list[float]]:
    """Greedy tokens after a prompt, and their log probabilities."""
    model = ask(f"{url}/v1/models")["data"][0]["id"]
    said = {
        "model": model,
        "prompt": PROMPT,
        "max_tokens": 12,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "detokenize": False,
        "logprobs": 1,
    }
    (answer,) = ask(f"{url}/v1/completions", said, replica)["choices"]
    return answer["token_ids"], answer["logprobs"]["token_logprobs"]
