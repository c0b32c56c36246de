"""Models whose shards cannot be sent are errors, before anything asks a server."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from peft import LoraConfig, get_peft_model
from torch import nn
from trl.experimental.async_grpo import async_grpo_trainer

from shardmath_trl import connecting
from tests.trl import async_sync

NOWHERE = "http://127.0.0.1:9"
FSDP1 = SimpleNamespace(fsdp_version=1, activation_checkpointing=False)
FSDP2 = SimpleNamespace(fsdp_version=2, activation_checkpointing=False)
WRAPPING = SimpleNamespace(fsdp_version=2, activation_checkpointing=True)


def check(model: nn.Module, zero: int | None = None, fsdp: Any = None) -> None:
    """Check a model under these plugins of accelerate."""
    deepspeed = None if zero is None else SimpleNamespace(zero_stage=zero)
    state = SimpleNamespace(deepspeed_plugin=deepspeed, fsdp_plugin=fsdp)
    connecting.check_model(SimpleNamespace(state=state), model)


@pytest.mark.parametrize(
    ("plugins", "says"),
    [
        ({"zero": 3}, "under DeepSpeed ZeRO-3"),
        ({"fsdp": FSDP1}, "under FSDP1"),
        ({"fsdp": WRAPPING}, "fsdp_activation_checkpointing wraps layers"),
    ],
    ids=["zero3", "fsdp1", "wrapping"],
)
def test_what_cannot_send_shards_is_an_error(plugins: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        check(nn.Linear(2, 2), **plugins)


@pytest.mark.parametrize("plugins", [{}, {"zero": 2}, {"fsdp": FSDP2}], ids=str)
def test_what_can_is_none(plugins: dict[str, Any]) -> None:
    check(nn.Linear(2, 2), **plugins)


def test_adapters_are_an_error() -> None:
    adapted = get_peft_model(nn.Sequential(nn.Linear(2, 2)), LoraConfig(target_modules=["0"]))
    with pytest.raises(ValueError, match="PEFT adapters"):
        check(adapted)


@pytest.mark.parametrize("is_fsdp1", [False, True], ids=["adapters", "fsdp1"])
def test_async_grpo_checks_before_it_makes_rollouts(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_fsdp1: bool
) -> None:
    made = mock.Mock()
    monkeypatch.setattr(async_grpo_trainer, "VLLMClient", made)
    own = async_grpo_trainer.get_peak_flops_per_device
    more, says = {"peft_config": LoraConfig(task_type="CAUSAL_LM")}, "PEFT adapters"
    if is_fsdp1:
        backend = SimpleNamespace(is_zero3=False, fsdp_version=1)
        monkeypatch.setattr(connecting, "DistributedBackend", lambda _: backend)
        more, says = {}, "under FSDP1"
    with pytest.raises(ValueError, match=says):
        async_sync.construct(str(folder / "tiny"), NOWHERE, str(tmp_path), **more)
    assert not made.called
    assert async_grpo_trainer.get_peak_flops_per_device is own
