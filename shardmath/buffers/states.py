"""Optimizer state in sharded buffers as layouts, for plans, checkpoints and proofs.

1. Rank r of n has the r-th n-th of every bucket; its shards, bucket after bucket, are one flat array, in which all
   views of a Store lie. Padding belongs to no parameter: plans neither move nor miss it.
2. As a flat tensor, a parameter's state is Ragged over its elements: consecutive pieces by rank, most of them empty.
3. In the parameter's shape it is windows (`windows`). If tensor parallelism divides the parameter, a buffer's ranges
   count the elements of each rank's part.
4. Parameters that are cut in the same way have the same layouts, so that one plan is made for all of them.

>>> from shardmath.buffers.megatron_ddp import distributed_optimizer
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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Literal, TypeAlias, overload

from shardmath.base.arguments import as_integer, instance, known, listed, mapping
from shardmath.base.errors import ParamLayoutError
from shardmath.base.text import shown
from shardmath.buffers.grouping import apply_rule, check_rule
from shardmath.buffers.param import Param, read_params
from shardmath.buffers.param_layout import PerBufferParamLayout, Rule
from shardmath.buffers.shares import (
    SHARD,
    Axis,
    Cuts,
    Shares,
    axes_of,
    check_shards,
    list_shares,
)
from shardmath.buffers.windows import GroupShares, make_windows
from shardmath.layouts.algebra.mesh import Mesh
from shardmath.layouts.algebra.runs import Runs, identity
from shardmath.layouts.holdings import Windows
from shardmath.layouts.layout import Layout
from shardmath.layouts.placement import Ragged
from shardmath.layouts.store import Store, View

__all__ = [
    "model_parallel_state",
    "state_layouts",
    "state_store",
]


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
) -> tuple[dict[str, Windows], Store]: ...


def state_layouts(
    buffer_layout: PerBufferParamLayout,
    mesh: Mesh,
    *,
    axis: Axis = None,
    shape: Literal["flat", "nd"] = "flat",
    dtype: object = "float32",
    ranks: Iterable[int] | None = None,
    buffer: str = SHARD,
) -> dict[str, Layout] | tuple[dict[str, Windows], Store]:
    """Return, by parameter name, the layouts of one optimizer state, such as Adam's `exp_avg`, in a flat buffer that
    ranks along `axis` divide. `shape="flat"` gives each parameter a 1-D layout; "nd" gives it one layout per slice, and
    also returns a Store: the slices' offsets in the flat array, named `buffer`, of each rank in `ranks`.

    With `shape="flat"`, name -> Layout of (numel,), Ragged along `axis`; `state_store` gives where it lies. With
    `shape="nd"`, name -> windows of the parameter's shape, and the Store of views into each rank's flat array; local
    tensors are called `name`, or `name[i]` if there are several windows; with `ranks`, the Store has views of these
    ranks only, and `buffer` names the array. Without `axis` all axes of the mesh share the buffer; ranks along other
    axes hold replicas.

    State saved in the parameters' shapes can be loaded under any rule and any parallelism; state saved flat, only
    flat. A model of several buffers has the layouts of all of them, each on the mesh of its ranks, with arrays of
    different names.

    Raises ParamLayoutError for another number of ranks than the buffer is laid out for (except one rank, which has
    all of it), if ranks do not divide a bucket evenly, or if shapes are needed and unknown.
    """
    if known(shape, ("flat", "nd")) is None:
        raise ParamLayoutError(
            f"shape={shown(shape)} is not an option; use 'flat', or 'nd' for the parameters' shapes"
        )
    axes = axes_of(mesh, axis)
    groups = mesh.groups(axes)
    shards = len(groups[0])
    if shape == "flat":
        if ranks is not None or buffer != SHARD:
            raise ParamLayoutError(
                "ranks= and buffer= need shape='nd', and shape is 'flat'; pass them to state_store"
            )
        return _make_flat(buffer_layout, mesh, axes, shards, dtype)
    check_shards(buffer_layout, shards)
    shapes = _read_shapes(buffer_layout)
    # Parameters of one shape share the same Runs objects: `make_windows` finds equal windows by id.
    whole_runs = {sizes: tuple(map(identity, sizes)) for sizes in set(buffer_layout.shapes)}
    shares_by_name = {}
    cuts: Cuts = {}
    for name, shares in list_shares(buffer_layout, shards, cuts):
        runs = whole_runs[shapes[name]]
        shares_by_name[name] = [GroupShares(group, runs, shares) for group in groups]
    wanted = _read_ranks(ranks)
    return make_windows(shapes, shares_by_name, dtype, wanted, buffer)


def _read_shapes(buffer: PerBufferParamLayout) -> dict[str, tuple[int, ...]]:
    """The shape of each parameter. Raises ParamLayoutError if the buffer does not have shapes."""
    if len(buffer.shapes) != len(buffer.placed):
        what = "the buffer's layout has no shapes"
        fix = "make it with PerBufferParamLayout(..., shapes=), or use shape='flat'"
        raise ParamLayoutError(f"{what}; {fix}")
    return dict(zip(buffer.param_index_map, buffer.shapes, strict=True))


def _make_flat(
    buffer: PerBufferParamLayout, mesh: Mesh, axes: tuple[str, ...], shards: int, dtype: object
) -> dict[str, Layout]:
    """The flat layout of each parameter; parameters that are cut in the same way share it."""
    layout_of: dict[int, Layout] = {}
    layouts: dict[str, Layout] = {}
    known_cuts: Cuts = {}
    for name, shares in list_shares(buffer, shards, known_cuts):
        key = id(shares.cuts)
        if key not in layout_of:
            sizes = [0] * shards
            for cut in shares.cuts:
                sizes[cut.shard] = cut.hi - cut.lo
            ragged = Ragged(0, tuple(sizes))
            spec = {axes: ragged} if axes else {}
            layout_of[key] = Layout((sum(sizes),), mesh, spec, dtype=dtype)
        layouts[name] = layout_of[key]
    return layouts


def state_store(
    buffer_layout: PerBufferParamLayout,
    mesh: Mesh,
    *,
    axis: Axis = None,
    ranks: Iterable[int] | None = None,
    buffer: str = SHARD,
) -> Store:
    """Return a Store: where each parameter's state lies in the flat array, named `buffer`, of each rank in `ranks`
    (default: all); the ranks along `axis` share the buffer.

    The local tensors are the flat ones of `state_layouts`. There is a view per parameter and rank, at 0 for local
    tensors without elements: give `ranks` if the mesh has many. Raises ParamLayoutError as `state_layouts` does.
    """
    axes = axes_of(mesh, axis)
    shards = math.prod(mesh.axis_size(name) for name in axes)
    check_shards(buffer_layout, shards)
    given_ranks = _read_ranks(ranks)
    wanted = set(mesh.ranks)
    if given_ranks is not None:
        wanted &= given_ranks
    pairs = itertools.product(buffer_layout.param_index_map, wanted)
    views = {pair: View(buffer) for pair in pairs}
    known_cuts: Cuts = {}
    for group in mesh.groups(axes):
        # In a large mesh most groups have none of the ranks.
        if wanted.isdisjoint(group):
            continue
        for name, shares in list_shares(buffer_layout, shards, known_cuts):
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
) -> tuple[dict[str, Windows], Store]:
    """Lay out one optimizer state, such as Adam's `exp_avg`: model-parallel ranks divide the parameters by `layouts`,
    and the data-parallel ranks along `axis` divide each model-parallel part again, in flat buffers that `rule` lays
    out. Return, by parameter name, a layout for each slice that ranks hold, and a Store: the slices' offsets in the
    ranks' flat arrays.

    `params` in forward order have their global shapes; `layouts` give, by name, the part of each parameter that each
    rank of `mesh` has, equal along `axis`, the data-parallel axis. Each group along `axis` has a separate buffer, which
    `rule` lays out for the group's parts, with `options` and the group's size as `data_parallel_world_size`. With
    `ranks`, the Store has views of these ranks only; `buffer` names the array.

    Raises ParamLayoutError if ranks along `axis` have different parts of a parameter, if a layout is missing, or if
    the rule does not take the options.
    """
    if "data_parallel_world_size" in options:
        given = options["data_parallel_world_size"]
        what = f"data_parallel_world_size={shown(given)} is passed, and is the size of each group"
        raise ParamLayoutError(f"{what}; leave it out")
    listed = read_params(params)
    _check_parameters(listed, layouts)
    shares_by_name: dict[str, list[GroupShares]] = {param.name: [] for param in listed}
    shares_by_sizes: dict[_Sizes, list[tuple[str, Shares]]] = {}
    known_cuts: Cuts = {}
    axes = axes_of(mesh, axis)
    check_rule(rule, "rule")
    for group in mesh.groups(axes):
        parts = _find_parts(listed, layouts, group)
        sizes = {name: tuple(map(len, runs)) for name, runs in parts.items()}
        key = tuple(sizes.items())
        if key not in shares_by_sizes:
            group_params = _make_local(listed, sizes)
            count = len(group)
            group_options = {**options, "data_parallel_world_size": count}
            buffer_layout = apply_rule(rule, group_params, group_options)
            shares_by_sizes[key] = list(list_shares(buffer_layout, count, known_cuts))
        for name, shares in shares_by_sizes[key]:
            shares_by_name[name].append(GroupShares(group, parts[name], shares))
    shapes = {param.name: param.shape for param in listed}
    wanted = _read_ranks(ranks)
    return make_windows(shapes, shares_by_name, dtype, wanted, buffer)


_Sizes: TypeAlias = tuple[tuple[str, tuple[int, ...]], ...]
"""The name and the local shape of each parameter: equal ones are laid out once."""


def _read_ranks(ranks: Iterable[int] | None) -> set[int] | None:
    """The ranks as ints; None for all. Raises ParamLayoutError."""
    if ranks is None:
        return None
    given = listed(ranks, "ranks", ParamLayoutError)
    return {as_integer(rank, "a rank", ParamLayoutError) for rank in given}


def _make_local(params: Iterable[Param], sizes: Mapping[str, tuple[int, ...]]) -> list[Param]:
    """The parameters of which the group has a part, in the shapes of the parts."""
    local = []
    for param in params:
        shape = sizes.get(param.name)
        if shape is not None:
            local.append(replace(param, shape=shape))
    return local


def _check_parameters(params: Sequence[Param], layouts: Mapping[str, Layout]) -> None:
    """Raise ParamLayoutError unless each parameter, here of its global shape, has a layout of that, without addends."""
    mapping(layouts, "layouts are ", "name to Layout", ParamLayoutError)
    missing = [param.name for param in params if param.name not in layouts]
    if missing:
        what = f"no layouts for {missing[:8]}, {len(missing)} of {len(params)} parameters"
        raise ParamLayoutError(f"{what}; give one for each parameter")
    for param in params:
        name = param.name
        fix = f"give the Layout of parameter {name!r}"
        layout = instance(layouts[name], Layout, fix, ParamLayoutError)
        if layout.shape != param.shape:
            what = f"parameter {name!r} has shape {param.shape}, its layout {layout.shape}"
            raise ParamLayoutError(f"{what}; give a layout of shape {param.shape}")
        if layout.addend_axes:
            what = f"parameter {name!r} is {layout}"
            fix = "give its layout after the reduction, without Partial"
            raise ParamLayoutError(f"{what}: addends have no optimizer state; {fix}")


def _find_parts(
    params: Sequence[Param], layouts: Mapping[str, Layout], group: Sequence[int]
) -> dict[str, tuple[Runs, ...]]:
    """The part of each parameter that all ranks of the group have; parameters without a part are left out."""
    parts_of: dict[Layout, set[tuple[Runs, ...] | None]] = {}
    part_by_name: dict[str, tuple[Runs, ...]] = {}
    for param in params:
        layout = layouts[param.name]
        if layout not in parts_of:
            mesh = layout.mesh
            parts_of[layout] = {layout.runs(rank) if rank in mesh else None for rank in group}
        if len(parts_of[layout]) > 1:
            ranks = ", ".join(map(str, group))
            what = f"parameter {param.name!r} is {layout}; ranks {ranks} share a buffer"
            fix = "pass the axis= along which ranks hold the same part"
            raise ParamLayoutError(f"{what}, and hold different parts; {fix}")
        (part,) = parts_of[layout]
        if part is not None:
            part_by_name[param.name] = part
    return part_by_name
