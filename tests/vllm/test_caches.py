"""Caches go within the call that brings weights, before these come, and with no other call."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from inspect import signature
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.engine.core import DPEngineCoreProc, EngineCore
from vllm.v1.kv_offload.base import OffloadingManager
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
from vllm.v1.pool.late_interaction_runner import LateInteractionRunner
from vllm.v1.pool.metadata import PoolingStates

from shardmath import ExchangeError
from shardmath_vllm.workers.caches import drop_caches, drop_parts


def make_core(
    asked: list[Any],
    backend: str = "shardmath",
    images: bool = False,
    runner: str = "generate",
    kind: type[EngineCore] = EngineCore,
    workers: int = 1,
) -> Any:
    """An engine's core that notes what it drops, and what its workers are asked."""
    drop_caches()
    core: Any = kind.__new__(kind)
    core.scheduler = SimpleNamespace(kv_holding_waiting=[], connector=None, ec_connector=None)
    core.model_executor = SimpleNamespace(
        collective_rpc=lambda what, *args: asked.append(what), sleeping_tags=set()
    )
    core.vllm_config = SimpleNamespace(
        weight_transfer_config=SimpleNamespace(backend=backend),
        model_config=SimpleNamespace(is_multimodal_model=images, runner_type=runner),
        parallel_config=SimpleNamespace(world_size=workers),
    )
    core.reset_prefix_cache = lambda **how: asked.append(how)
    core.reset_encoder_cache = lambda: asked.append("encoder")
    return core


def test_vllm_still_sees_what_the_call_takes() -> None:
    """A server's own process asks an engine's core by that."""
    drop_caches()
    taken = list(signature(EngineCore.collective_rpc).parameters)
    assert taken == ["self", "method", "timeout", "args", "kwargs"]


@pytest.mark.parametrize("backend", ["shardmath", "nccl"])
@pytest.mark.parametrize("images", [False, True])
def test_caches_go_before_weights_come(backend: str, images: bool) -> None:
    """So whatever then becomes of workers, nothing is left that is of other weights than they have.

    Workers end the steps that they were given before that: these would put keys into external caches afterwards.
    """
    asked: list[Any] = []
    core = make_core(asked, backend, images)
    core.collective_rpc("start_weight_update")
    core.collective_rpc("update_weights")
    dropped: list[Any] = [
        "synchronize_device",
        {"reset_running_requests": True, "reset_connector": True},
    ]
    dropped += ["encoder"] * images
    ours = dropped if backend == "shardmath" else []
    assert asked == ["start_weight_update", *ours, "update_weights"]


@pytest.mark.parametrize("backend", ["shardmath", "nccl"])
def test_an_engine_sleeps_while_weights_come(backend: str) -> None:
    """Rather than look for its workers' answers all the time, as between two steps."""
    core = make_core([], backend)
    waiting = SimpleNamespace(last_read=1.0)
    core.model_executor.response_mqs = [SimpleNamespace(_spin_condition=waiting)]
    core.collective_rpc("start_weight_update")
    assert waiting.last_read == 1.0
    core.collective_rpc("update_weights")
    assert (waiting.last_read < 0) == (backend == "shardmath")


def fail() -> None:
    raise RuntimeError("Failed to reset KV cache")


@pytest.mark.parametrize(
    ("drop", "said"),
    [
        (
            fail,
            "cannot drop cached keys and values of old weights now: Failed to reset KV cache; call",
        ),
        (lambda: False, "an external cache did not drop"),
    ],
)
def test_what_is_not_dropped_keeps_weights_out(drop: Any, said: str) -> None:
    """As where a connector still sends keys of requests that have ended, or its server is not reached."""
    asked: list[Any] = []
    core = make_core(asked)
    core.reset_prefix_cache = lambda **how: drop()
    with pytest.raises(ExchangeError, match=said):
        core.collective_rpc("update_weights")
    assert asked == ["synchronize_device"]


def test_requests_that_wait_with_keys_keep_weights_out() -> None:
    """Those of a session that waits for its next input would go on under new weights, and so would all prompts'."""
    asked: list[Any] = []
    core = make_core(asked)
    core.scheduler.kv_holding_waiting = [SimpleNamespace(request_id="talk")]
    with pytest.raises(
        ExchangeError, match=r"requests 'talk' wait with keys and values .* end them"
    ):
        core.collective_rpc("update_weights")
    assert not asked


@pytest.mark.parametrize("tags", [{"weights", "kv_cache"}, {"weights"}, {"kv_cache"}, set()])
def test_weights_that_sleep_are_not_written(tags: set[str]) -> None:
    """They have no memory, or the old ones come back as the engine wakes up. The cache may sleep meanwhile."""
    asked: list[Any] = []
    core = make_core(asked)
    core.model_executor.sleeping_tags = tags
    if "weights" in tags:
        with pytest.raises(ExchangeError, match=r"sleeps, .*POST /wake_up\?tags=weights first"):
            core.collective_rpc("update_weights")
        assert not asked
    else:
        core.collective_rpc("update_weights")
        assert asked[-1] == "update_weights"


def test_replicas_of_experts_take_weights_while_none_steps() -> None:
    """One within a step waits for the steps of the others, which would wait for it to take weights."""
    asked: list[Any] = []
    core = make_core(asked, kind=DPEngineCoreProc)
    core.engines_running = True
    with pytest.raises(ExchangeError, match=r"not paused.*POST /pause\?mode=keep"):
        core.collective_rpc("update_weights")
    assert not asked
    core.engines_running = False
    core.collective_rpc("update_weights")
    assert asked[-1] == "update_weights"


def test_what_was_pooled_of_first_parts_of_prompts_goes() -> None:
    """vLLM computes these again, and would give what old weights made of them beside that."""
    states = PoolingStates()
    states.hidden_states_cache.append(torch.ones(2, 3))
    runner = SimpleNamespace(
        requests={"long": SimpleNamespace(pooling_states=states)},
        late_interaction_runner=LateInteractionRunner(),
    )
    asked: list[Any] = []
    core = make_core(asked, runner="pooling")
    core.model_executor.collective_rpc = lambda what, *args: (
        [what(SimpleNamespace(model_runner=runner))] if callable(what) else asked.append(what)
    )
    core.collective_rpc("update_weights")
    assert not states.hidden_states_cache and asked[-1] == "update_weights"


@pytest.mark.parametrize("is_beside", [False, True])
def test_queries_that_wait_for_documents_keep_weights_out(is_beside: bool) -> None:
    """Documents would be compared with what old weights made of the query."""
    states = PoolingStates()
    states.hidden_states_cache.append(torch.ones(2, 3))
    comparing = LateInteractionRunner()
    comparing._query_cache["query"] = torch.ones(2, 3)
    pooling = SimpleNamespace(late_interaction_runner=comparing)
    pooling.requests = {"long": SimpleNamespace(pooling_states=states)}
    runner = SimpleNamespace(pooling_runner=pooling) if is_beside else pooling
    asked: list[Any] = []
    core = make_core(asked, runner="pooling")
    worker = SimpleNamespace(model_runner=runner)
    core.model_executor.collective_rpc = lambda what, *args: (
        [what(worker)] if callable(what) else None
    )
    with pytest.raises(ExchangeError, match="a query of old weights waits for documents"):
        core.collective_rpc("update_weights")
    # The request goes on with what it has.
    assert states.hidden_states_cache and not asked
    comparing.clear()
    assert not drop_parts(worker)
    # On a stage that does not pool.
    assert not drop_parts(SimpleNamespace(model_runner=SimpleNamespace(pooling_runner=None)))


class Dropping:
    def reset_cache(self) -> bool:
        return True


class Keeping:
    """As LMCache's: vLLM's own method, which says None, is taken for success."""

    reset_cache = KVConnectorBase_V1.reset_cache


class Tiered(Dropping):
    """As vLLM's offloading to files, which go on with what is in them."""

    connector_scheduler = SimpleNamespace(manager=SimpleNamespace(secondary_tiers=["fs"]))


class Managed(OffloadingConnector):
    """vLLM's connector that offloads keys, which says of any manager that it has dropped them."""

    def __init__(self, manager: type | None) -> None:
        if manager is None:
            self.connector_scheduler = None
        else:
            scheduler = SimpleNamespace(manager=manager.__new__(manager), reset_cache=lambda: None)
            self.connector_scheduler = scheduler  # type: ignore[assignment]


class InFiles(CPUOffloadingManager):
    """As managers that keep keys in files: they have no method of their own that drops them."""

    reset_cache = OffloadingManager.reset_cache


class MooncakeStoreConnector(Dropping):
    """By the name of vLLM's, whose module needs a package that is not there."""


class Several(Dropping):
    def __init__(self, *parts: object) -> None:
        self.sub_connectors = parts


@pytest.mark.parametrize(
    ("keys", "images", "said"),
    [
        (Keeping(), None, "Keeping may cache"),
        (Tiered(), None, "Tiered may cache"),
        (Several(Dropping(), Keeping(), Tiered()), None, "Keeping, Tiered may cache"),
        (None, Keeping(), "Keeping may cache"),
        (Several(Dropping()), None, ""),
        (Managed(InFiles), None, "Managed may cache"),
        (Managed(None), None, "Managed may cache"),
        (Several(Managed(InFiles), Dropping()), None, "Managed may cache"),
        (Managed(CPUOffloadingManager), None, ""),
    ],
)
def test_external_caches_that_cannot_drop_keep_weights_out(
    keys: object, images: object, said: str
) -> None:
    """Prompts would be answered by new weights over keys of old ones, and nobody told."""
    asked: list[Any] = []
    core = make_core(asked)
    core.scheduler.connector, core.scheduler.ec_connector = keys, images
    if said:
        with pytest.raises(ExchangeError, match=said):
            core.collective_rpc("update_weights")
        assert not asked
    else:
        core.collective_rpc("update_weights")
        assert asked[-1] == "update_weights"


@pytest.mark.parametrize("workers", [1, 2])
def test_a_store_that_other_workers_fill_again_keeps_weights_out(workers: int) -> None:
    """vLLM clears it once the first worker has put what it was to put, whatever the others still have to."""
    asked: list[Any] = []
    core = make_core(asked, workers=workers)
    core.scheduler.connector = MooncakeStoreConnector()
    if workers == 1:
        core.collective_rpc("update_weights")
        assert asked[-1] == "update_weights"
    else:
        with pytest.raises(ExchangeError, match="MooncakeStoreConnector may cache"):
            core.collective_rpc("update_weights")
        assert not asked


def test_a_step_that_is_under_way_puts_nothing_into_a_store_after_it_was_cleared() -> None:
    """Workers do what they are asked in order, and vLLM's core goes on while they do it."""
    store: list[str] = []
    weights = ["old"]
    core = make_core([])
    core.reset_prefix_cache = lambda **how: store.clear()
    with ThreadPoolExecutor(1) as worker:

        def ask(what: str, *args: object) -> None:
            worker.submit(lambda: what != "update_weights" or weights.append("new")).result()

        core.model_executor.collective_rpc = ask

        def step() -> None:
            time.sleep(0.2)
            store.append(f"keys of {weights[-1]} weights")

        worker.submit(step)
        core.collective_rpc("update_weights")
    assert weights[-1] == "new" and not store
