"""Refits that let go of what was bound: tensors go, and others are bound in their place."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

import shardmath as sm
import shardmath_torch as smt
from tests.distributed.tasks import fp8
from tests.distributed.tasks.dtensors import caught

__all__ = ["release"]

SHAPES = {"a": ((8, 12), "float32"), "b": ((5, 4), "float32")}

Held = tuple[dict[str, Tensor] | None, Mapping[str, dict[str, Tensor]] | None]


def release(rank: int, quantizes: bool, options: dict[str, Any]) -> tuple[int, str, list[str]]:
    """How many tensors are there once they were let go, what a move then says, and what is wrong after the next."""
    side = _Quantized() if quantizes else _Plain()
    refit = smt.Refit(side.planned, timeout=30.0, **options)
    held = side.bring(rank, 0)
    refit.prepare(*held)
    refit(acknowledge=True)
    wires = list(_list_wires(refit))
    assert bool(wires) == (quantizes and rank < 4)
    known = [weakref.ref(tensor) for tensor in [*_list_tensors(held), *wires]]
    assert known
    del wires
    refit.release()
    del held
    left = sum(one() is not None for one in known)
    told = caught(refit)
    # Other weights, in other memory.
    again = side.bring(rank, 1)
    refit.prepare(*again)
    refit(acknowledge=True)
    wrong = []
    for name, own in (again[1] or {}).items():
        wrong += fp8.compare(own, side.want(name, rank, 1))
    return left, told[1], wrong


def _list_tensors(held: Held) -> Iterator[Tensor]:
    src, dst = held
    yield from (src or {}).values()
    for own in (dst or {}).values():
        yield from own.values()


def _list_wires(refit: smt.Refit) -> Iterator[Tensor]:
    """What travels in the place of this rank's tensors."""
    if refit._transform_stage is not None:
        for worker in refit._transform_stage._workers:
            yield from worker.buffers.values()


class _Quantized:
    """What `fp8` moves: data and scales are made of weights at their source."""

    def __init__(self) -> None:
        self.planned = fp8.plan()

    def bring(self, rank: int, seed: int) -> Held:
        if rank < 4:
            return fp8._cut(rank, fp8.draw(seed)), None
        (name,) = (name for name, ranks in fp8.ENGINES.items() if rank in ranks)
        own = self.want(name, rank, seed)
        return None, {name: {key: torch.zeros_like(tensor) for key, tensor in own.items()}}

    def want(self, name: str, rank: int, seed: int) -> dict[str, Tensor]:
        return fp8._fill(self.planned.engines[name], fp8.draw(seed), rank)


class _Plain:
    """Two matrices of rows, which become columns."""

    def __init__(self) -> None:
        rows = _lay(sm.Mesh(dp=4), "(dp n) h")
        self.columns = _lay(sm.Mesh(tp=4, ranks=range(4, 8)), "n (tp h)")
        self.planned = sm.refit(rows, {"only": self.columns}, SHAPES)
        self.rows = rows

    def bring(self, rank: int, seed: int) -> Held:
        if rank < 4:
            return self._cut(self.rows, rank, seed), None
        own = self._cut(self.columns, rank, seed)
        return None, {"only": {key: torch.zeros_like(tensor) for key, tensor in own.items()}}

    def want(self, name: str, rank: int, seed: int) -> dict[str, Tensor]:
        return self._cut(self.columns, rank, seed)

    def _cut(self, layouts: Mapping[str, sm.Layout], rank: int, seed: int) -> dict[str, Tensor]:
        torch.manual_seed(seed)
        own = {}
        for name, (shape, _) in SHAPES.items():
            whole = torch.randn(shape)
            first, second = map(torch.from_numpy, layouts[name].indices(rank))
            own[name] = whole[first][:, second].contiguous()
        return own


def _lay(mesh: sm.Mesh, text: str) -> dict[str, sm.Layout]:
    return {name: sm.Layout(shape, mesh, text, dtype=d) for name, (shape, d) in SHAPES.items()}
