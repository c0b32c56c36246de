"""Caches: what an engine has computed with old weights goes before its first step with new ones.

1. vLLM leaves that to whoever ends an update. Until then it samples with new weights over keys of old ones, where
   requests are under way, and finds prompts in its caches that are of old weights.
2. An engine's core does one thing at a time. So what is dropped within the call that brings weights is gone before any
   step, whoever calls, and whatever becomes of the caller.
3. Requests under way are computed again from their first token to where they are, and go on with the new weights.
4. vLLM cannot drop the keys of requests that wait with them, such as sessions between two inputs of a stream, and then
   keeps those of prompts, too. So an engine with such requests is asked to take nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from vllm.v1.engine.core import EngineCore

from shardmath.base.errors import ExchangeError
from shardmath_vllm.infos import BACKEND

__all__ = ["drop_caches"]

DONE = "_shardmath_drops_caches"


def drop_caches() -> None:
    """Have vLLM's engines in this process do so; again does nothing."""
    if hasattr(EngineCore, DONE):
        return
    EngineCore.collective_rpc = _drop_after(EngineCore.collective_rpc)
    setattr(EngineCore, DONE, True)


def _drop_after(ask: Callable[..., Any]) -> Callable[..., Any]:
    """`collective_rpc` that drops caches once workers were asked to take weights."""

    # With its signature, by which vLLM converts what a server's process asks of it.
    @wraps(ask)
    def collective_rpc(self: Any, method: Any, *args: Any, **named: Any) -> Any:
        if method != "update_weights" or not _is_ours(self.vllm_config):
            return ask(self, method, *args, **named)
        _check_can_drop(self)
        try:
            return ask(self, method, *args, **named)
        finally:
            # Also where a worker has failed: others may have new weights.
            _drop(self)

    return collective_rpc


def _is_ours(config: Any) -> bool:
    """Whether the engine takes weights by this backend."""
    transfer = config.weight_transfer_config
    return transfer is not None and transfer.backend == BACKEND


def _check_can_drop(core: Any) -> None:
    """Raise ExchangeError where requests wait with keys, before their engine's workers come to take weights."""
    names = ", ".join(repr(request.request_id) for request in core.scheduler.kv_holding_waiting)
    if names:
        raise ExchangeError(
            f"requests {names} wait with keys that vLLM cannot drop, as sessions between inputs of a stream do; "
            f"end them, or send once they have gone on"
        )


def _drop(core: Any) -> None:
    """Drop the keys of all requests and prompts, and what was made of images."""
    try:
        # Without requests under way, nothing would be dropped as long as there are any.
        dropped = core.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
        if dropped is False:
            raise ExchangeError(
                "weights are new, and an external cache of keys did not drop those of old ones; "
                "drop them there, or start the engine anew"
            )
    finally:
        if core.vllm_config.model_config.is_multimodal_model:
            core.reset_encoder_cache()
