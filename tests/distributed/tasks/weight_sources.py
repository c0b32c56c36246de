"""Classes that look as vLLM's WeightSource of 0.33 and of 0.32 do, and trainers of four ranks that send by them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

import shardmath_vllm as sv
from shardmath_vllm.source import read_layout
from tests.distributed.transfer.plain_engine import PlainEngine

__all__ = ["METAS", "Meta", "Old", "Pieces", "Replicate", "Shard", "Strided", "Whole", "send"]

TRAINERS = 4
TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Replicate:
    """As vLLM's."""


@dataclass(frozen=True)
class Shard:
    """As vLLM's."""

    dim: int


@dataclass(frozen=True)
class Strided:
    """Which vLLM lacks."""


@dataclass(frozen=True)
class Meta:
    """As vLLM's ParamMeta."""

    name: str
    shape: tuple[int, ...]
    owners: tuple[int, ...] | None = None
    mesh_shape: tuple[int, ...] | None = None
    placements: tuple[Any, ...] | None = None
    dtype: torch.dtype = torch.float32


METAS = [
    Meta("all", (3,)),
    # Rows of 3, 3, 1 and 0.
    Meta("uneven", (7, 2), (0, 1, 2, 3), (4,), (Shard(0),)),
    # FSDP within tensor parallelism: 4 + 3 rows, each divided further. Ranks are dp * 2 + tp.
    Meta("strided", (7, 2), (0, 2, 1, 3), (2, 2), (Shard(0), Shard(0))),
    Meta("both", (5, 6), (0, 1, 2, 3), (2, 2), (Shard(1), Shard(0))),
    Meta("hybrid", (5, 2), (0, 1, 2, 3), (2, 2), (Replicate(), Shard(0))),
    Meta("two", (4, 2), (3, 1), (2,), (Shard(0),)),
    Meta("one", (4,), (2,), (1,), None),
]


class Pieces:
    """One of 0.33 that yields this rank's pieces."""

    def __init__(self, rank: int, metas: list[Meta], whole: dict[str, Tensor]) -> None:
        self.whole = whole
        self.rank = rank
        self._metas = metas

    @cached_property
    def metadata(self) -> list[Meta]:
        return self._metas

    def owned_names(self, rank: int) -> list[str]:
        return [meta.name for meta in self.metadata if meta.owners is None or rank in meta.owners]

    def implements_iter_local(self) -> bool:
        return True

    def iter_local(self) -> Iterator[tuple[str, Tensor]]:
        for meta in self.metadata:
            layout = read_layout(meta, TRAINERS)
            if self.rank in layout.mesh.ranks:
                kept = [torch.as_tensor(each) for each in layout.indices(self.rank)]
                # A new tensor each time.
                yield meta.name, self.whole[meta.name][torch.meshgrid(*kept, indexing="ij")].clone()


class Whole(Pieces):
    """One of 0.33 that yields whole tensors alone."""

    def implements_iter_local(self) -> bool:
        return False

    def iter_full(self) -> Iterator[tuple[str, Tensor]]:
        for name in self.owned_names(self.rank):
            yield name, self.whole[name].clone()


class Old:
    """One of 0.32."""

    def __init__(self, rank: int, metas: list[Meta], whole: dict[str, Tensor]) -> None:
        self.whole = whole
        self._metas = metas

    def metadata(self) -> list[Any]:
        return [_OldMeta(meta.name, meta.dtype, meta.shape) for meta in self._metas]

    def held_names(self) -> list[str] | None:
        return None

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.whole.items()


@dataclass(frozen=True)
class _OldMeta:
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


def send(rank: int, port: int, make: Callable[..., Any], dtype: str | None) -> list[bool]:
    """Whether an engine on rank 0 has the tensors after each of two updates; and whether this rank kept none after."""
    if rank >= TRAINERS:
        return []
    whole = {meta.name: torch.rand(meta.shape).bfloat16().float() for meta in METAS}
    # The same on all ranks.
    for number, tensor in enumerate(whole.values()):
        tensor.copy_(torch.arange(tensor.numel()).reshape(tensor.shape) + number)
    source = make(rank, METAS, whole)
    engine = PlainEngine(_hold({n: torch.zeros_like(w) for n, w in whole.items()}, dtype))
    info = sv.TrainerInfo(
        f"127.0.0.1:{port}", TRAINERS, 1, dtype=dtype, rank=rank, timeout=TIMEOUT_S
    )
    clients = [engine] if rank == 0 else []
    trainer = sv.Trainer.trainer_init(info, client=clients, source=source)
    found = []
    for _ in range(2):
        for tensor in whole.values():
            tensor.add_(1)
        trainer.send_weights()
        found.append(not trainer.source.tensors)
        if rank == 0:
            arrived = dict(engine.module.named_parameters())
            found += [torch.equal(arrived[name].float(), whole[name]) for name in whole]
    trainer.shutdown()
    if engine.link is not None:
        engine.link.leave()
    return found


def _hold(tensors: dict[str, Tensor], dtype: str | None) -> nn.Module:
    """A module with these parameters."""
    module = nn.Module()
    for name, tensor in tensors.items():
        held = tensor if dtype is None else tensor.to(getattr(torch, dtype))
        module.register_parameter(name, nn.Parameter(held, requires_grad=False))
    return module
