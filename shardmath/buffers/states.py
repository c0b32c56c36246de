"""Optimizer state in sharded buffers, as layouts: what plans, checkpoints and proofs take.

1. Rank r of n has the r-th n-th of every bucket; its shards, bucket after bucket, are one flat array, in which all
   views of a Store lie. Padding belongs to nobody: it is not moved, and not missed.
2. Seen flat, a parameter's state is Ragged over its elements: rank by rank consecutive pieces, most of them empty.
3. Seen in its own shape it is windows: a row-major range of a tensor of d dimensions is at most 2 d - 1 boxes. Where a
   parameter is itself divided, by tensor parallelism, ranges are of what each rank has of it; ranks that have the same
   of it in buffers that are cut elsewhere hold the pieces between all of these cuts.
4. Parameters that are cut alike have the same layouts, so that a plan is made once for all of them.

>>> from shardmath.buffers.ddp import distributed_optimizer
>>> buffer = distributed_optimizer([Param("w", (4, 5)), Param("b", (108,))], data_parallel_world_size=2)
>>> buffer.bucket_indices, state_layouts(buffer, Mesh(dp=2))["b"].text
(((0, 256),), '(dp[108 0] n)')
>>> flat = state_layouts(distributed_optimizer([Param("w", (20, 10))], data_parallel_world_size=2), Mesh(dp=2))["w"]
>>> flat.text, flat.local_shape(1)
('(dp[128 72] n)', (72,))
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple, TypeAlias, overload

from shardmath.algebra.box import flat_boxes, volume
from shardmath.algebra.mesh import Mesh
from shardmath.algebra.runs import Runs, compose, from_ranges, identity
from shardmath.base.errors import ParamLayoutError
from shardmath.base.given import instance, known, listed, mapping, shown
from shardmath.base.integers import as_integer
from shardmath.buffers.param import Param, forward
from shardmath.buffers.param_layout import PerBufferParamLayout, Rule
from shardmath.buffers.shares import (
    SHARD,
    Axis,
    Cut,
    Cuts,
    Shares,
    axes_of,
    check_shards,
    groups_of,
    parameter_shares,
)
from shardmath.layouts.layout import Layout
from shardmath.layouts.placement import Ragged
from shardmath.layouts.store import Store, View, local_name

__all__ = [
    "model_parallel_state",
    "state_layouts",
    "state_store",
]

Windows: TypeAlias = dict[str, tuple[Layout, ...]]


@overload
def state_layouts(
    buffer_layout: PerBufferParamLayout,
    mesh: Mesh,
    *,
    axis: Axis = None,
    shape: Literal["flat"] = "flat",
    dtype: object = ...,
) -> dict[str, Layout]: ...


@overload
def state_layouts(
    buffer_layout: PerBufferParamLayout,
    mesh: Mesh,
    *,
    axis: Axis = None,
    shape: Literal["nd"],
    dtype: object = ...,
    ranks: Iterable[int] | None = ...,
    buffer: str = ...,
) -> tuple[Windows, Store]: ...


def state_layouts(
    buffer_layout: PerBufferParamLayout,
    mesh: Mesh,
    *,
    axis: Axis = None,
    shape: Literal["flat", "nd"] = "flat",
    dtype: object = "float32",
    ranks: Iterable[int] | None = None,
    buffer: str = SHARD,
) -> dict[str, Layout] | tuple[Windows, Store]:
    """How ranks hold what an optimizer keeps of each parameter, in the order of the buffer's map.

    With `shape="flat"`, name -> Layout of (numel,), Ragged along `axis`; `state_store` says where it lies. With
    `shape="nd"`, name -> windows of the parameter's own shape, and the Store of views into each rank's flat array;
    local tensors are called `name`, or `name[i]` where there are several windows; with `ranks`, it has views of these
    ranks only, and `buffer` names the array. Without `axis` all axes of the mesh share the buffer; ranks along other
    axes than these hold the same.

    What is saved in the parameters' shapes can be loaded under any rule and any parallelism; what is saved flat, only
    flat. A model of several buffers has the layouts of all of them, each on the mesh of its ranks, with arrays of
    different names.

    Raises ParamLayoutError for another number of ranks than the buffer is laid out for (but one, which has all of it),
    where ranks do not divide a bucket evenly, or where shapes are needed and unknown.
    """
    if known(shape, ("flat", "nd")) is None:
        raise ParamLayoutError(
            f"shape={shown(shape)}; use 'flat', or 'nd' for the shapes of the parameters"
        )
    groups = groups_of(mesh, axis)
    if shape == "flat":
        if ranks is not None or buffer != SHARD:
            raise ParamLayoutError(
                "ranks= and buffer= are for the Store of shape='nd'; give them to state_store"
            )
        return _flat(buffer_layout, mesh, axis, len(groups[0]), dtype)
    check_shards(buffer_layout, len(groups[0]))
    if len(buffer_layout.shapes) != len(buffer_layout.placed):
        raise ParamLayoutError(
            "the buffer's layout has no shapes; make it with PerBufferParamLayout(..., shapes=), or use shape='flat'"
        )
    shapes = dict(zip(buffer_layout.param_index_map, buffer_layout.shapes, strict=True))
    entire = {dims: tuple(map(identity, dims)) for dims in set(buffer_layout.shapes)}
    interned: Cuts = {}
    held = {
        name: [_Held(group, entire[shapes[name]], shares) for group in groups]
        for name, shares in parameter_shares(buffer_layout, len(groups[0]), interned)
    }
    return _windowed(shapes, held, dtype, ranks, buffer)


class _Held(NamedTuple):
    """How one data-parallel group holds a tensor: its ranks, what they have of each dimension, and the shares of it."""

    group: tuple[int, ...]
    runs: tuple[Runs, ...]
    shares: Shares


def _flat(
    buffer: PerBufferParamLayout, mesh: Mesh, axis: Axis, shards: int, dtype: object
) -> dict[str, Layout]:
    axes = axes_of(mesh, axis)
    known: dict[int, Layout] = {}
    out: dict[str, Layout] = {}
    interned: Cuts = {}
    for name, (cuts, _, _) in parameter_shares(buffer, shards, interned):
        if id(cuts) not in known:
            sizes = [0] * shards
            for cut in cuts:
                sizes[cut.shard] = cut.hi - cut.lo
            spec = {axes: Ragged(0, tuple(sizes))} if axes else {}
            known[id(cuts)] = Layout((sum(sizes),), mesh, spec, dtype=dtype)
        out[name] = known[id(cuts)]
    return out


def state_store(
    buffer_layout: PerBufferParamLayout,
    mesh: Mesh,
    *,
    axis: Axis = None,
    ranks: Iterable[int] | None = None,
    buffer: str = SHARD,
) -> Store:
    """Where the flat layouts' local tensors lie in the flat arrays of `ranks`, all of the mesh if not given.

    `buffer` names the array. There is a view of each parameter and rank, of local tensors without elements at 0: name
    `ranks` where there are many. Raises ParamLayoutError as `state_layouts` does.
    """
    sizes = [mesh.axis_size(name) for name in axes_of(mesh, axis)]
    check_shards(buffer_layout, math.prod(sizes))
    wanted = set(mesh.ranks) if ranks is None else set(mesh.ranks) & _chosen(ranks)
    pairs = itertools.product(buffer_layout.param_index_map, wanted)
    views = {pair: View(buffer) for pair in pairs}
    interned: Cuts = {}
    for group in groups_of(mesh, axis):
        if not wanted.intersection(group):
            continue
        for name, shares in parameter_shares(buffer_layout, len(group), interned):
            for cut in shares.cuts:
                rank = group[cut.shard]
                if rank in wanted:
                    views[name, rank] = View(buffer, shares.place(cut))
    return Store(views)


def model_parallel_state(
    params: Iterable[Param],
    layouts: Mapping[str, Layout],
    *,
    mesh: Mesh,
    axis: Axis,
    rule: Rule,
    dtype: object = "float32",
    ranks: Iterable[int] | None = None,
    buffer: str = SHARD,
    **options: object,
) -> tuple[Windows, Store]:
    """How ranks hold the optimizer state of parameters that are themselves divided: windows, and where they lie.

    `params` in forward order have their global shapes; `layouts` say, by name, which ranks of `mesh` have what of each,
    alike along `axis`, the data-parallel axis. Each group along `axis` has a buffer of its own, which `rule` lays out
    for what the group has, with `options` and the group's size as `data_parallel_world_size`. With `ranks`, the Store
    has views of these ranks only; `buffer` names the array.

    Raises ParamLayoutError where ranks along `axis` have different parts of a parameter, or a layout is missing.
    """
    listed = forward(params)
    _check_parameters(listed, layouts)
    held: dict[str, list[_Held]] = {param.name: [] for param in listed}
    known: dict[object, list[tuple[str, Shares]]] = {}
    interned: Cuts = {}
    for group in groups_of(mesh, axis):
        parts = _parts(listed, layouts, group)
        shapes = tuple((name, tuple(map(len, runs))) for name, runs in parts.items())
        if shapes not in known:
            local = [
                replace(p, shape=shape)
                for p, (_, shape) in zip(_named(listed, parts), shapes, strict=True)
            ]
            laid = rule(local, data_parallel_world_size=len(group), **options)
            known[shapes] = list(parameter_shares(laid, len(group), interned))
        for name, shares in known[shapes]:
            held[name].append(_Held(group, parts[name], shares))
    return _windowed({param.name: param.shape for param in listed}, held, dtype, ranks, buffer)


def _chosen(ranks: Iterable[int]) -> set[int]:
    return {
        as_integer(rank, "a rank", ParamLayoutError)
        for rank in listed(ranks, "ranks", ParamLayoutError)
    }


def _named(params: Iterable[Param], names: Container[str]) -> Iterator[Param]:
    return (param for param in params if param.name in names)


def _check_parameters(params: Sequence[Param], layouts: Mapping[str, Layout]) -> None:
    mapping(layouts, "layouts are ", "name to Layout", ParamLayoutError)
    missing = [param.name for param in params if param.name not in layouts]
    if missing:
        raise ParamLayoutError(f"no layouts for {missing[:8]}; give one for each parameter")
    for name, shape, layout in ((param.name, param.shape, layouts[param.name]) for param in params):
        instance(layout, Layout, f"give the Layout of parameter {name!r}", ParamLayoutError)
        if layout.shape != shape:
            raise ParamLayoutError(
                f"parameter {name!r} has shape {shape}, its layout {layout.shape}; make them agree"
            )
        if layout.partial:
            raise ParamLayoutError(
                f"parameter {name!r} is {layout}: addends have no optimizer state; reduce them"
            )


def _parts(
    params: Sequence[Param], layouts: Mapping[str, Layout], group: Sequence[int]
) -> dict[str, tuple[Runs, ...]]:
    """What all ranks of the group have of each parameter; those of which they have no part are left out."""
    known: dict[Layout, set[tuple[Runs, ...] | None]] = {}
    out: dict[str, tuple[Runs, ...]] = {}
    for name, layout in ((param.name, layouts[param.name]) for param in params):
        if layout not in known:
            known[layout] = {layout.runs(rank) if rank in layout.mesh else None for rank in group}
        if len(known[layout]) > 1:
            what = (
                f"parameter {name!r} is {layout}; ranks {', '.join(map(str, group))} share a buffer"
            )
            raise ParamLayoutError(
                f"{what}, and hold different parts; name the axis along which they hold the same"
            )
        (part,) = known[layout]
        if part is not None:
            out[name] = part
    return out


class _Place(NamedTuple):
    """Which window it is, of which cut of which group, on which rank, and how far into the cut it lies."""

    window: int
    held: int
    cut: Cut
    rank: int
    within: int


def _windowed(
    shapes: Mapping[str, tuple[int, ...]],
    held: Mapping[str, Sequence[_Held]],
    dtype: object,
    ranks: Iterable[int] | None,
    buffer: str,
) -> tuple[Windows, Store]:
    wanted = None if ranks is None else _chosen(ranks)
    known: dict[object, tuple[tuple[Layout, ...], list[_Place]]] = {}
    out: Windows = {}
    views: dict[tuple[str, int], View] = {}
    for name, groups in held.items():
        key = shapes[name], tuple((one.group, id(one.runs), id(one.shares.cuts)) for one in groups)
        if key not in known:
            windows, places = _windows(name, shapes[name], groups, dtype)
            known[key] = (
                windows,
                [place for place in places if wanted is None or place.rank in wanted],
            )
        out[name], places = known[key]
        for window, number, cut, rank, within in places:
            at = groups[number].shares.place(cut) + within
            views[local_name(name, window, len(out[name])), rank] = View(buffer, at)
    _check_names(out)
    return out, Store(views)


def _check_names(windows: Windows) -> None:
    """A window's name is no parameter's."""
    for name in windows:
        owner, bracket, number = name.rpartition("[")
        others = len(windows.get(owner, ())) if bracket else 0
        if others > 1 and number in {f"{i}]" for i in range(others)}:
            raise ParamLayoutError(
                f"parameter {name!r} has the name of a window of parameter {owner!r}; rename one"
            )


def _windows(
    name: str, shape: tuple[int, ...], groups: Sequence[_Held], dtype: object
) -> tuple[tuple[Layout, ...], list[_Place]]:
    """The windows of a tensor, and where each rank has each."""
    same: dict[tuple[Runs, ...], list[tuple[int, Cut]]] = {}
    for number, one in enumerate(groups):
        same.setdefault(one.runs, []).extend((number, cut) for cut in one.shares.cuts)
    windows: list[Layout] = []
    places: list[_Place] = []
    for runs, cuts in same.items():
        for lo, hi, holders in _pieces(cuts):
            ranks = [groups[number].group[cut.shard] for number, cut in holders]
            mesh = Mesh(ranks=ranks) if len(ranks) == 1 else Mesh(replica=len(ranks), ranks=ranks)
            at = lo
            for box in flat_boxes(tuple(map(len, runs)), lo, hi):
                stored = {d: compose(from_ranges([span]), runs[d]) for d, span in enumerate(box)}
                for (number, cut), rank in zip(holders, ranks, strict=True):
                    places.append(_Place(len(windows), number, cut, rank, at - cut.lo))
                windows.append(Layout(shape, mesh, {}, dtype=dtype, stored=stored))
                at += volume(box)
    if not windows:
        if not groups:
            raise ParamLayoutError(
                f"parameter {name!r}: no rank of the mesh has a part of it; give its ranks"
            )
        stored = dict(enumerate(groups[0].runs))
        windows.append(
            Layout(shape, Mesh(ranks=groups[0].group[:1]), {}, dtype=dtype, stored=stored)
        )
        places.append(_Place(0, 0, Cut(0, 0, 0), groups[0].group[0], 0))
    return tuple(windows), places


def _pieces(cuts: Sequence[tuple[int, Cut]]) -> Iterator[tuple[int, int, list[tuple[int, Cut]]]]:
    """The pieces between all borders of the cuts, and who has each."""
    coming = sorted(cuts, key=lambda pair: pair[1].lo, reverse=True)
    here: list[tuple[int, Cut]] = []
    for lo, hi in itertools.pairwise(sorted({x for _, cut in cuts for x in (cut.lo, cut.hi)})):
        here = [pair for pair in here if pair[1].hi > lo]
        while coming and coming[-1][1].lo <= lo:
            here.append(coming.pop())
        if here:
            yield lo, hi, sorted(here)
