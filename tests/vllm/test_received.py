"""Memory in which layers are received, one after the other, and processors that wait for it."""

from __future__ import annotations

import math
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from vllm import _custom_ops as ops
from vllm.model_executor.layers import utils
from vllm.platforms import current_platform

from shardmath_vllm.workers.answers import sleep_until_answered
from shardmath_vllm.workers.memory import LEAST, Lent, take_like
from shardmath_vllm.workers.repacking import drop_kernels, packs_apart


def make(count: int = LEAST // 4) -> Tensor:
    return torch.empty(count, 2, dtype=torch.bfloat16)


def test_the_next_layer_is_received_in_the_memory_of_this_one() -> None:
    lent = Lent()
    first = take_like(make(), lent)
    assert first.shape == make().shape and first.dtype == torch.bfloat16
    address = first.data_ptr()
    first.fill_(3.0)
    del first
    second = take_like(make(), lent)
    # The very memory, with what was in it.
    assert second.data_ptr() == address and float(second[0, 0]) == 3.0
    assert take_like(make(), lent).data_ptr() != address


def test_memory_that_somebody_has_is_not_lent_again() -> None:
    """A kernel may keep a view of what it was made of."""
    lent = Lent()
    tensor = take_like(make(), lent)
    view = nn.Parameter(tensor, requires_grad=False).data[1:]
    tensor.fill_(3.0)
    del tensor
    take_like(make(), lent).fill_(5.0)
    assert view.eq(3.0).all()


@pytest.mark.parametrize("end", [Lent.drop, Lent.end])
def test_memory_that_no_tensor_needs_goes_back(end: Any) -> None:
    lent = Lent()
    tensors = [take_like(make(), lent), take_like(make(LEAST), lent)]
    tensors.pop()
    end(lent)
    assert not lent._unused
    # What comes back after the end of an update goes on to the system.
    tensors.pop()
    assert len(lent._unused) == (end is Lent.drop)


def test_small_tensors_are_not_lent() -> None:
    small = torch.empty(3)
    assert take_like(small, Lent()) is small


@pytest.mark.skipif(not current_platform.is_cpu(), reason="other devices pack nothing")
def test_packed_weights_are_freed_before_they_are_packed_again() -> None:
    """A linear layer has no kernel in between; a module without weights that are packed has none to free."""
    if not ops._supports_onednn:
        pytest.skip("this processor packs nothing")
    assert not packs_apart(nn.Linear(4, 4))
    module: Any = nn.Module()
    weight = torch.randn(512, 256).to(torch.bfloat16)
    hidden = torch.randn(3, 256).to(torch.bfloat16)
    for sign in 1, -1:
        module.weight = nn.Parameter(sign * weight, requires_grad=False)
        utils.dispatch_cpu_unquantized_gemm(module, remove_weight=True)
        out = module.cpu_linear(hidden, module.weight, None)
        torch.testing.assert_close(out, hidden @ (sign * weight).t(), rtol=0.1, atol=0.5)
        assert packs_apart(module)
        drop_kernels([module])
        # All ranks still find the module among those that pack apart, also one on which an update failed here.
        assert module.cpu_linear is None and packs_apart(module)


def test_an_engine_sleeps_until_its_workers_answer() -> None:
    now = time.monotonic()
    spinning = SimpleNamespace(last_read=now)
    queues = [SimpleNamespace(_spin_condition=spinning), SimpleNamespace(_spin_condition=None)]
    executor = SimpleNamespace(response_mqs=[*queues, SimpleNamespace()])
    sleep_until_answered(executor)
    assert spinning.last_read == -math.inf
    # One worker, in the engine's own process.
    sleep_until_answered(SimpleNamespace())
