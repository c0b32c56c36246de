"""Caches: results that an engine has computed with old weights are dropped before its first step with new ones.

1. vLLM leaves that to whoever ends an update. Until then, requests in flight are sampled with new weights over keys of
   old ones, and prompts are found in caches that belong to the old weights.
2. An engine's core does one thing at a time. So what is dropped within the call that brings weights is gone before any
   step, whoever calls, and whatever becomes of the caller.
3. It is dropped before weights come: if vLLM cannot drop it, the engine takes no weights and is unchanged.
4. Before that, workers end the steps that they were given. A step that runs as caches are dropped would put keys of
   old weights into an external cache afterwards.
5. Requests in flight are computed again from their first token to where they are, and continue with the new weights.
6. vLLM cannot drop the keys of requests that wait with them, such as sessions between two inputs of a stream, and then
   keeps the keys of prompts, too. It does not notice if an external cache cannot drop its keys.
7. Models that pool keep the outputs of a prompt's first parts until its last part, and vLLM returns them together with
   the outputs that are computed again. Of a query that documents are compared with, it keeps all outputs, and cannot
   compute them again.
8. Replicas of a mixture of experts compute each step together, including replicas without requests, so they take
   weights only while none of them steps.
9. The weights of a sleeping engine have no memory, and those that vLLM keeps elsewhere come back as it wakes up.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.engine.core import DPEngineCoreProc, EngineCore
from vllm.v1.kv_offload.base import OffloadingManager

from shardmath.base.errors import ExchangeError
from shardmath.base.text import message_of
from shardmath_vllm.infos import BACKEND
from shardmath_vllm.workers.answers import sleep_until_answered

__all__ = ["drop_caches", "drop_parts"]

DONE = "_shardmath_drops_caches"

MOONCAKE = "MooncakeStoreConnector"
"""A connector whose workers put keys into a store from threads of their own."""


def drop_caches() -> None:
    """Patch vLLM's engines in this process, so that they drop cached keys and values, encoder outputs and pooling
    outputs of the old weights before new ones arrive. A second call does nothing.
    """
    if hasattr(EngineCore, DONE):
        return
    EngineCore.collective_rpc = _drop_before(EngineCore.collective_rpc)
    setattr(EngineCore, DONE, True)


def _drop_before(ask: Callable[..., Any]) -> Callable[..., Any]:
    """`collective_rpc` that drops caches before workers are asked to take weights."""

    # `wraps` keeps the signature, by which vLLM converts the arguments of a server's requests.
    @wraps(ask)
    def collective_rpc(self: Any, method: Any, *args: Any, **named: Any) -> Any:
        if method == "update_weights" and _is_ours(self.vllm_config):
            _check_awake(self.model_executor)
            _check_steps_alone(self)
            _check_can_drop(self.scheduler, self.vllm_config.parallel_config.world_size)
            # Workers do what they are asked in order, so they have ended all steps once they have done this. vLLM's
            # core does the same before it drops caches for a pause.
            self.model_executor.collective_rpc("synchronize_device")
            if self.vllm_config.model_config.runner_type == "pooling":
                _drop_pooled(self.model_executor)
            _drop(self)
            sleep_until_answered(self.model_executor)
        return ask(self, method, *args, **named)

    return collective_rpc


def _is_ours(config: Any) -> bool:
    """Whether the engine of this vLLM configuration receives weights through shardmath."""
    transfer = config.weight_transfer_config
    return transfer is not None and transfer.backend == BACKEND


def _check_awake(executor: Any) -> None:
    """Raise ExchangeError if the weights sleep. The KV cache may: nothing is left of it that is of old weights."""
    if "weights" in executor.sleeping_tags:
        raise ExchangeError(
            "this engine sleeps, so its weights have no memory; POST /wake_up?tags=weights first, or call "
            "llm.wake_up(tags=['weights'])"
        )


def _check_steps_alone(core: Any) -> None:
    """Raise ExchangeError if replicas wait for this one's next step, so that they could never take weights with it."""
    if isinstance(core, DPEngineCoreProc) and core.engines_running:
        raise ExchangeError(
            "this engine is not paused, but its data-parallel replicas compute each step together, so that one that "
            "takes weights would block the others; POST /pause?mode=keep first, and /resume afterwards"
        )


def _check_can_drop(scheduler: Any, workers: int) -> None:
    """Raise ExchangeError if waiting requests hold cached keys, or a connector cannot drop keys of old weights in an
    engine of so many workers.
    """
    names = ", ".join(repr(request.request_id) for request in scheduler.kv_holding_waiting)
    if names:
        raise ExchangeError(
            f"requests {names} wait with keys and values of old weights, which vLLM cannot drop for streaming "
            f"sessions; end them, or call send_weights once they have continued"
        )
    keeping = _list_keeping(scheduler.connector, workers)
    if scheduler.ec_connector is not None:
        keeping.append(type(scheduler.ec_connector).__name__)
    if keeping:
        raise ExchangeError(
            f"{', '.join(keeping)} may cache what was computed with old weights, which vLLM cannot drop there; "
            f"start the engine without that connector"
        )


def _list_keeping(connector: Any, workers: int) -> list[str]:
    """The class names of connectors, this one or those in it, that cannot drop the keys that they keep elsewhere."""
    if connector is None:
        return []
    parts = getattr(connector, "sub_connectors", None)
    if parts is not None:
        return [name for part in parts for name in _list_keeping(part, workers)]
    kind = type(connector)
    drops = kind.reset_cache is not KVConnectorBase_V1.reset_cache
    # Before the store is cleared, vLLM waits for the first worker's thread only: others may put old keys afterwards.
    is_refilled = workers > 1 and any(base.__name__ == MOONCAKE for base in kind.__mro__)
    return (
        [] if drops and not is_refilled and not _offloads_for_good(connector) else [kind.__name__]
    )


def _offloads_for_good(connector: Any) -> bool:
    """Whether a connector offloads keys to where they stay although vLLM asks the connector to drop them."""
    manager = getattr(getattr(connector, "connector_scheduler", None), "manager", None)
    if manager is None:
        # The method of the connector itself says nothing of what its manager does.
        return isinstance(connector, OffloadingConnector)
    # The base class's method drops nothing. Managers that keep keys in files have no other.
    keeps = getattr(type(manager), "reset_cache", None) is OffloadingManager.reset_cache
    # Tiers behind memory, such as files and servers: vLLM does not drop what they keep.
    return keeps or bool(getattr(manager, "secondary_tiers", ()))


def _drop_pooled(executor: Any) -> None:
    """Drop pooled outputs for parts of prompts on all workers. Raises ExchangeError if a worker keeps a query."""
    if any(executor.collective_rpc(drop_parts)):
        raise ExchangeError(
            "a query of old weights waits for documents that are compared with it, and vLLM cannot compute it again; "
            "call send_weights once these requests have ended"
        )


def drop_parts(worker: Any) -> bool:
    """Drop the outputs that a pooling worker has cached for parts of prompts. Returns True, and drops nothing, if the
    worker holds the cached outputs of a query (for late interaction); otherwise returns False.
    """
    runner = worker.model_runner
    # One of vLLM's two model runners has a `pooling_runner` (None except on the last pipeline stage), which drops parts
    # by itself. The other one pools, and has `requests`.
    pooling = getattr(runner, "pooling_runner", runner)
    if pooling is not None and pooling.late_interaction_runner._query_cache:
        return True
    for request in getattr(runner, "requests", {}).values():
        request.pooling_states.clean()
    return False


def _drop(core: Any) -> None:
    """Drop the engine's caches of keys and of encoded images. Raises ExchangeError if some keys remain."""
    try:
        # reset_running_requests: else vLLM drops nothing as long as requests are in flight.
        dropped = core.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    except RuntimeError as error:
        # For example, a connector still sends the keys of requests that have ended.
        raise ExchangeError(
            f"vLLM cannot drop cached keys and values of old weights now: {message_of(error)}; call send_weights again"
        ) from error
    if dropped is False:
        raise ExchangeError(
            "an external cache did not drop keys and values of old weights; clear it, or start the engine again"
        )
    if core.vllm_config.model_config.is_multimodal_model:
        core.reset_encoder_cache()
