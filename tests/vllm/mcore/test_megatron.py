"""Megatron-Core's GPTModel at TP 2 x PP 2 in front of an engine, which goes on as one started on what was sent."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.distributed.pool import Pool, free_port
from tests.megatron.cases import Case
from tests.vllm import checkpoints
from tests.vllm.cases import fields
from tests.vllm.mcore.cases import Sending
from tests.vllm.mcore.tasks import generate, send, serve

TIMEOUT_S = 200.0

WIDE = {"hidden_size": 256, "intermediate_size": 128, "head_dim": 32}
"""A head is 32 wide at least, which vLLM's attention on a CPU asks for."""


class Tried(NamedTuple):
    """A model, the dtype of the trainer's parameters, and the engine's workers."""

    case: Case
    dtype: str
    tp: int
    more: dict[str, Any]


TRIED = [
    Tried(Case("llama", tp=2, pp=2), "bfloat16", 2, {}),
    # Two virtual stages, of which each has experts, in TransformerEngine's layers; cast on their way.
    Tried(
        Case("qwen3_moe", tp=2, pp=2, vpp=2, ep=2, layers=4, spec="te"),
        "float32",
        1,
        {"moe_intermediate_size": 64, "mlp_only_layers": [], "num_hidden_layers": 4},
    ),
]


@pytest.mark.parametrize("tried", TRIED, ids=lambda tried: str(tried.case))
def test_tokens_and_logprobs_are_those_of_an_engine_started_on_what_was_sent(
    tried: Tried, tmp_path: Path
) -> None:
    given = fields(tried.case.model, **WIDE, **tried.more)
    first, then = (checkpoints.save(given, tmp_path / str(seed), seed) for seed in range(2))
    sending = Sending(tried.case, (then, first), tried.dtype, tried.tp, free_port(), free_port())
    started, sent = run_both(sending, first)
    fresh = run_alone(generate, then, tried.tp)
    assert {token for token, _ in fresh} != {token for token, _ in started}
    assert sent[0]["generated"] == [fresh, started]
    for one in sent:
        assert "are not of the engine's types" in one["refused"]
    # The layers, the embedding, the norm, and the head.
    assert sent[0]["portions"] == tried.case.layers + 3
    print(f"{tried.case}: {started[:3]}... on the first checkpoint, {fresh[:3]}... on the other")


def run_both(sending: Sending, first: Path) -> tuple[Any, list[dict[str, Any]]]:
    """What an engine generated before, and what the trainer's ranks saw."""
    engine, trainers = Pool(1), Pool(sending.case.ranks)
    try:
        engine.attempt(serve, first, sending.tp, sending.engine, ranks=[])
        sent = trainers.run(send, sending, timeout=TIMEOUT_S)
        (started,) = engine.gather([0], TIMEOUT_S)
        return started, sent
    finally:
        trainers.close()
        end(engine)


def run_alone(task: Any, *args: Any) -> Any:
    """What the task gives in a process of its own, since an engine does not go before its process does."""
    pool = Pool(1)
    try:
        return pool.run(task, *args, timeout=TIMEOUT_S)[0]
    finally:
        end(pool)


def end(engine: Pool) -> None:
    """End an engine and its workers, which vLLM leaves behind where the engine is killed as they start."""
    for process in engine.processes:
        # There is no such group where the engine had not begun to start.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    engine.close()
