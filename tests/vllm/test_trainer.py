"""What a trainer's rank finds before it says that it is ready: later, engines have given up their weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardmath as sm
from shardmath import ExchangeError, StoreError
from shardmath_torch.groups import compat
from shardmath_torch.tensors.refits.views import bind_side
from shardmath_vllm import Source, Trainer
from tests.vllm import engine

SHAPES = dict.fromkeys(("first", "second"), ((4, 4), "float32"))


@pytest.fixture(scope="module", autouse=True)
def one_process() -> Iterator[None]:
    """Rank 0 of two, of which the other is not there."""
    engine.leave()
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.fixture
def trainer() -> Trainer:
    """One that has met an engine, which stores the same."""
    side = {name: sm.Layout((4, 4), sm.Mesh(dp=2), "(dp n) m") for name in SHAPES}
    stored = {name: sm.Layout((4, 4), sm.Mesh(ranks=[2]), "n m") for name in SHAPES}
    planned = sm.refit(side, {"engine 0": stored}, SHAPES)
    link: Any = SimpleNamespace(place=0, planned=planned, group=dist.group.WORLD)
    return Trainer([], Source({name: divide([0, 1]) for name in SHAPES}, side, SHAPES), link)


def divide(ranks: list[int]) -> DTensor:
    """Rows, the first ones on the first of the ranks."""
    return DTensor.from_local(torch.ones(2, 4), DeviceMesh("cpu", ranks), [Shard(0)])


def free(tensor: DTensor) -> Tensor:
    """As those do who keep weights elsewhere meanwhile."""
    tensor.to_local().untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (free, "'second' reaches 32 bytes into a storage of 0"),
        (lambda tensor: tensor.to_local().to("meta"), "'second' has no memory on 'meta'"),
        (lambda tensor: tensor.to_local().to_sparse(), "'second' is stored as torch.sparse"),
        (lambda tensor: torch._neg_view(tensor.to_local()), "'second' is a lazy .* negative"),
        (lambda tensor: divide([1, 0]), "'second' is a DTensor .* other elements on rank 0"),
        (lambda tensor: tensor.to_local().double(), "'second' is float64, but was float32"),
        (lambda tensor: tensor.to_local()[1:], r"stores 'second' as \(2, 4\), the rank has \(1"),
    ],
)
def test_a_tensor_that_cannot_be_sent_is_found(
    trainer: Trainer, change: Callable[[DTensor], Tensor], why: str
) -> None:
    trainer._check()
    tensors: Any = trainer.source.tensors
    tensors["second"] = change(tensors["second"])
    with pytest.raises((ExchangeError, StoreError), match=f"(?s){why}"):
        trainer._check()


def test_tensors_that_stay_where_they_are_are_compared_with_the_plan_once(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[object] = []

    def bind(*args: Any) -> Any:
        calls.append(args)
        return bind_side(*args)

    monkeypatch.setattr("shardmath_vllm.trainer.bind_side", bind)
    tensors: Any = trainer.source.tensors
    trainer._check()
    tensors["second"].to_local().add_(1)  # as an optimizer
    trainer._check()
    assert len(calls) == 1
    tensors["second"] = divide([0, 1])
    trainer._check()
    assert len(calls) == 2


def test_a_tensor_that_is_not_there_is_found(trainer: Trainer) -> None:
    tensors: Any = trainer.source.tensors
    del tensors["second"]
    with pytest.raises(StoreError, match=r"stores 'second' as .* the rank has no such tensor"):
        trainer._check()


def test_tensors_on_another_device_than_the_group_are_found(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compat, "device_of", lambda group: torch.device("cuda", 1))
    with pytest.raises(ExchangeError, match=r"'first' is on device 'cpu', .* on 'cuda:1'"):
        trainer._check()
