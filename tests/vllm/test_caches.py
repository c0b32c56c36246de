"""Caches go within the call that brings weights, whatever becomes of it, and with no other call."""

from __future__ import annotations

from inspect import signature
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.engine.core import EngineCore

from shardmath import ExchangeError
from shardmath_vllm.workers.caches import drop_caches


def test_vllm_still_sees_what_the_call_takes() -> None:
    """A server's own process asks an engine's core by that."""
    drop_caches()
    taken = list(signature(EngineCore.collective_rpc).parameters)
    assert taken == ["self", "method", "timeout", "args", "kwargs"]


@pytest.mark.parametrize("backend", ["shardmath", "nccl"])
@pytest.mark.parametrize("images", [False, True])
def test_caches_go_with_the_weights(backend: str, images: bool) -> None:
    drop_caches()
    dropped: list[Any] = []

    def ask(method: str, *args: Any) -> list[str]:
        if method == "update_weights" and len(dropped) > 2:
            raise RuntimeError("a worker failed")
        return [method]

    core: Any = EngineCore.__new__(EngineCore)
    core.model_executor = SimpleNamespace(collective_rpc=ask)
    core.scheduler = SimpleNamespace(kv_holding_waiting=[])
    core.vllm_config = SimpleNamespace(
        weight_transfer_config=SimpleNamespace(backend=backend),
        model_config=SimpleNamespace(is_multimodal_model=images),
    )
    core.reset_prefix_cache = lambda **how: dropped.append(how)
    core.reset_encoder_cache = lambda: dropped.append("encoder")
    assert core.collective_rpc("start_weight_update") == ["start_weight_update"]
    assert not dropped
    assert core.collective_rpc("update_weights") == ["update_weights"]
    wanted: list[Any] = [{"reset_running_requests": True, "reset_connector": True}]
    wanted += ["encoder"] * images
    assert dropped == (wanted if backend == "shardmath" else [])
    dropped += ["old"] * 3
    with pytest.raises(RuntimeError, match="a worker failed"):
        core.collective_rpc("update_weights")
    assert dropped.count("old") == 3
    assert dropped[dropped.index("old") + 3 :] == (wanted if backend == "shardmath" else [])


def test_what_cannot_be_dropped_does_not_keep_the_rest() -> None:
    drop_caches()
    dropped: list[str] = []

    def fail(**how: bool) -> None:
        raise RuntimeError("requests are under way")

    core: Any = EngineCore.__new__(EngineCore)
    core.model_executor = SimpleNamespace(collective_rpc=lambda method: [method])
    core.scheduler = SimpleNamespace(kv_holding_waiting=[])
    core.vllm_config = SimpleNamespace(
        weight_transfer_config=SimpleNamespace(backend="shardmath"),
        model_config=SimpleNamespace(is_multimodal_model=True),
    )
    core.reset_prefix_cache = fail
    core.reset_encoder_cache = lambda: dropped.append("encoder")
    with pytest.raises(RuntimeError, match="requests are under way"):
        core.collective_rpc("update_weights")
    assert dropped == ["encoder"]


def test_keys_that_vllm_cannot_drop_keep_weights_out() -> None:
    """Those of a session that waits for its next input would go on under new weights, and so would all prompts'."""
    drop_caches()
    asked: list[str] = []
    core: Any = EngineCore.__new__(EngineCore)
    core.model_executor = SimpleNamespace(collective_rpc=asked.append)
    core.scheduler = SimpleNamespace(kv_holding_waiting=[SimpleNamespace(request_id="talk")])
    core.vllm_config = SimpleNamespace(
        weight_transfer_config=SimpleNamespace(backend="shardmath"),
    )
    with pytest.raises(ExchangeError, match=r"requests 'talk' wait with keys .* end them"):
        core.collective_rpc("update_weights")
    assert not asked


def test_an_external_cache_that_does_not_drop_is_an_error() -> None:
    """A connector answers so where its server is not reached."""
    drop_caches()
    core: Any = EngineCore.__new__(EngineCore)
    core.scheduler = SimpleNamespace(kv_holding_waiting=[])
    core.model_executor = SimpleNamespace(collective_rpc=lambda method: [method])
    core.vllm_config = SimpleNamespace(
        weight_transfer_config=SimpleNamespace(backend="shardmath"),
        model_config=SimpleNamespace(is_multimodal_model=False),
    )
    core.reset_prefix_cache = lambda **how: False
    with pytest.raises(ExchangeError, match="an external cache of keys did not drop"):
        core.collective_rpc("update_weights")
