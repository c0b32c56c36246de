"""Random plans with data, and what must come of them: the oracle is `shardmath.simulate`."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar
from unittest import mock

import ml_dtypes
import numpy as np

import shardmath as sm
from shardmath.base.dtypes import itemsize
from shardmath.layouts.store import local_name
from shardmath.proofs.simulate import FOLD
from tests.distributed.tasks.scenarios import Bytes, Case

Arrays = dict[int, dict[str, np.ndarray[Any, np.dtype[Any]]]]
_T = TypeVar("_T")

STEP = 1 if os.environ.get("HYPOTHESIS_PROFILE") == "deep" else 8
"""One of so many cases is moved where cases differ in little. Eight processes take 50 ms of two cores for a move."""


def thinned(items: Sequence[_T], turn: int = 0) -> Sequence[_T]:
    """One of every STEP items, at least one; those of another `turn` are others, and STEP turns have all."""
    step = min(STEP, max(len(items), 1))
    return items[turn % step :: step]


def numpy_dtype(name: str) -> np.dtype[Any]:
    """numpy's type of that name, ml_dtypes' where numpy has none, plain words where neither has."""
    if hasattr(np, name):
        return np.dtype(name)
    if hasattr(ml_dtypes, name):
        return np.dtype(getattr(ml_dtypes, name))
    return np.dtype({1: "uint8", 4: "uint32"}[itemsize(name)])


def held(side: Mapping[str, tuple[sm.Layout, ...]]) -> Iterator[tuple[int, str, sm.Layout]]:
    """(rank, local buffer key, layout) of all that is stored on a side."""
    for name, windows in side.items():
        for i, layout in enumerate(windows):
            for rank in layout.mesh.ranks:
                yield rank, local_name(name, i, len(windows)), layout


def random_arrays(side: Mapping[str, tuple[sm.Layout, ...]], rng: np.random.Generator) -> Arrays:
    """Arrays with small values of every sign; bytes for types without arithmetic."""
    out: Arrays = {}
    for rank, key, layout in held(side):
        shape, kind = layout.local_shape(rank), numpy_dtype(layout.dtype)
        out.setdefault(rank, {})[key] = _values(shape, kind, rng)
    return out


def _values(shape: tuple[int, ...], kind: np.dtype[Any], rng: np.random.Generator) -> Any:
    if kind.kind in "fcV" and kind.itemsize > 1:
        real = rng.standard_normal(shape)
        return np.asarray(
            real + 1j * rng.standard_normal(shape) if kind.kind == "c" else real
        ).astype(kind)
    if kind.kind == "b":
        return np.asarray(rng.integers(0, 2, shape)).astype(kind)
    return np.frombuffer(rng.bytes(int(np.prod(shape)) * kind.itemsize), kind).reshape(shape).copy()


def as_bytes(arrays: Arrays, side: Mapping[str, tuple[sm.Layout, ...]]) -> dict[int, Bytes]:
    """The arrays as workers take them."""
    dtypes = {(rank, key): layout.dtype for rank, key, layout in held(side)}
    return {
        rank: {key: (a.shape, dtypes[rank, key], a.tobytes()) for key, a in named.items()}
        for rank, named in arrays.items()
    }


def make_case(
    plan: sm.Plan, seed: int = 0, **rest: Any
) -> tuple[Case, dict[int, dict[str, bytes]]]:
    """The plan with random data on both sides, and the destinations' bytes that must come of it."""
    rng = np.random.default_rng(seed)
    src, dst = random_arrays(plan.src, rng), random_arrays(plan.dst, rng)
    case = Case(plan, as_bytes(src, plan.src), as_bytes(dst, plan.dst), **rest)
    return case, expected(plan, src, dst)


def _product(a: Any, b: Any) -> Any:
    """numpy's complex product rounds otherwise in vectors than at their ends; this one is the textbook's everywhere."""
    if not np.iscomplexobj(a):
        return np.multiply(a, b)
    out = np.empty_like(a)
    out.real, out.imag = a.real * b.real - a.imag * b.imag, a.real * b.imag + a.imag * b.real
    return out


def expected(plan: sm.Plan, src: Arrays, dst: Arrays) -> dict[int, dict[str, bytes]]:
    """What simulate says in the tensors' own cells, what was there before in holes."""
    windows = [w for side in plan.src.values() for w in side]
    single = not plan.is_tree and len(windows) == 1
    shards: Any = {rank: named[""] for rank, named in src.items()} if single else src
    with np.errstate(all="ignore"), mock.patch.dict(FOLD, {"product": _product}):
        done: Any = sm.simulate(plan, shards)
    out: dict[int, dict[str, bytes]] = {}
    for rank, key, layout in held(plan.dst):
        now, before = (
            np.asarray(done[rank][key] if isinstance(done[rank], dict) else done[rank]),
            dst[rank][key],
        )
        own = np.ix_(*(np.flatnonzero(index >= 0) for index in layout.indices(rank)))
        before = before.copy()
        before[own] = now[own]
        out.setdefault(rank, {})[key] = before.tobytes()
    return out


def random_plan(
    seed: int, *, ops: tuple[str, ...] = ("sum", "max", "min", "product", "avg"), world: int = 8
) -> sm.Plan:
    """A plan between two random layouts on random meshes of ranks below `world`."""
    rng = random.Random(seed)
    while True:
        shape = tuple(rng.choice((0, 1, 2, 3, 5, 7, 8, 12, 16)) for _ in range(rng.randrange(4)))
        dtype = rng.choice(("float32", "float64", "bfloat16", "float16", "int32", "uint8"))
        op = rng.choice(ops) if ops and rng.random() < 0.5 else None
        try:
            return sm.plan(*(random_layout(rng, shape, dtype, op, world) for _ in range(2)))
        except sm.ShardError:
            continue


def random_layout(
    rng: random.Random, shape: tuple[int, ...], dtype: str, op: str | None, world: int
) -> sm.Layout:
    sizes = rng.choice(
        [(1,), (2,), (3,), (4,), (2, 2), (2, 3), (4, 2), (2, 2, 2), (8,), (5,), (7,)]
    )
    total = int(np.prod(sizes))
    ranks = rng.sample(range(world), total) if rng.random() < 0.5 else range(total)
    mesh = sm.Mesh(dict(zip("abc", sizes, strict=False)), ranks=ranks)
    return sm.Layout(
        shape, mesh, [_random_placement(rng, len(shape), op) for _ in sizes], dtype=dtype
    )


def _random_placement(rng: random.Random, ndim: int, op: str | None) -> Any:
    if op and rng.random() < 0.4:
        return sm.Partial(op)
    if not ndim or rng.random() < 0.25:
        return sm.Replicate()
    d = rng.randrange(ndim)
    return rng.choice(
        (
            sm.Shard(d),
            sm.Shard(d),
            sm.Balanced(d),
            sm.StridedShard(d, rng.choice((2, 3))),
            sm.BlockCyclic(d, 2),
        )
    )
