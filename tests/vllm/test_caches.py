"""Caches go within the call that brings weights, before these come, and with no other call."""

from __future__ import annotations

from inspect import signature
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1
from vllm.v1.engine.core import EngineCore

from shardmath import ExchangeError
from shardmath_vllm.workers.caches import drop_caches


def make_core(asked: list[Any], backend: str = "shardmath", images: bool = False) -> Any:
    """An engine's core that notes what it drops, and what its workers are asked."""
    drop_caches()
    core: Any = EngineCore.__new__(EngineCore)
    core.scheduler = SimpleNamespace(kv_holding_waiting=[], connector=None, ec_connector=None)
    core.model_executor = SimpleNamespace(collective_rpc=lambda what, *args: asked.append(what))
    core.vllm_config = SimpleNamespace(
        weight_transfer_config=SimpleNamespace(backend=backend),
        model_config=SimpleNamespace(is_multimodal_model=images),
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
    """So whatever then becomes of workers, nothing is left that is of other weights than they have."""
    asked: list[Any] = []
    core = make_core(asked, backend, images)
    core.collective_rpc("start_weight_update")
    core.collective_rpc("update_weights")
    dropped: list[Any] = [{"reset_running_requests": True, "reset_connector": True}]
    dropped += ["encoder"] * images
    ours = dropped if backend == "shardmath" else []
    assert asked == ["start_weight_update", *ours, "update_weights"]


def fail() -> None:
    raise RuntimeError("Failed to reset KV cache")


@pytest.mark.parametrize(
    ("drop", "said"),
    [
        (fail, "cannot drop the keys of old weights now: Failed to reset KV cache; send again"),
        (lambda: False, "an external cache of keys did not drop"),
    ],
)
def test_what_is_not_dropped_keeps_weights_out(drop: Any, said: str) -> None:
    """As where a connector still sends keys of requests that have ended, or its server is not reached."""
    asked: list[Any] = []
    core = make_core(asked)
    core.reset_prefix_cache = lambda **how: drop()
    with pytest.raises(ExchangeError, match=said):
        core.collective_rpc("update_weights")
    assert not asked


def test_requests_that_wait_with_keys_keep_weights_out() -> None:
    """Those of a session that waits for its next input would go on under new weights, and so would all prompts'."""
    asked: list[Any] = []
    core = make_core(asked)
    core.scheduler.kv_holding_waiting = [SimpleNamespace(request_id="talk")]
    with pytest.raises(ExchangeError, match=r"requests 'talk' wait with keys .* end them"):
        core.collective_rpc("update_weights")
    assert not asked


class Dropping:
    def reset_cache(self) -> bool:
        return True


class Keeping:
    """As LMCache's: vLLM's own method, which says None, is taken for success."""

    reset_cache = KVConnectorBase_V1.reset_cache


class Tiered(Dropping):
    """As vLLM's offloading to files, which go on with what is in them."""

    connector_scheduler = SimpleNamespace(manager=SimpleNamespace(secondary_tiers=["fs"]))


class Several(Dropping):
    def __init__(self, *parts: object) -> None:
        self.sub_connectors = parts


@pytest.mark.parametrize(
    ("keys", "images", "said"),
    [
        (Keeping(), None, "Keeping may keep"),
        (Tiered(), None, "Tiered may keep"),
        (Several(Dropping(), Keeping(), Tiered()), None, "Keeping, Tiered may keep"),
        (None, Keeping(), "Keeping may keep"),
        (Several(Dropping()), None, ""),
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
