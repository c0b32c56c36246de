"""Shardings: JAX's as layouts, layouts as JAX's, and the shards of arrays.

1. A rank is a device. Its number is the device's id, unless `rank_of` gives another: two jobs that meet number their
   devices apart, for example by `lambda device: 4 + device.process_index`.
2. What JAX refuses is an error of JAX, with its words: a dimension that does not divide evenly.
3. Memory kinds say where a shard lies, not which elements it has, and are not part of a layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.experimental.multihost_utils import global_array_to_host_local_array
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

import shardmath as sm
from shardmath.base.errors import LayoutError, MeshError
from shardmath.base.text import shown
from shardmath.layouts.algebra.runs import from_ranges
from shardmath.layouts.per_axis import find_axes

__all__ = [
    "from_sharding",
    "held_by_process",
    "layout_of",
    "local_shards",
    "to_array",
    "to_sharding",
]

RankOf: TypeAlias = Callable[[Any], int]
"""A function that takes a device, and returns the rank that it is."""


def _by_id(device: Any) -> int:
    """The rank of a device: its id."""
    return int(device.id)


def layout_of(array: jax.Array, *, rank_of: RankOf = _by_id) -> sm.Layout:
    """Return the layout of a JAX array on its devices. See `from_sharding`. Raises LayoutError for dtypes that
    shardmath does not know, such as int4.
    """
    return from_sharding(array.sharding, array.shape, dtype=array.dtype.name, rank_of=rank_of)


def from_sharding(
    sharding: Sharding,
    shape: Sequence[int],
    *,
    dtype: str = "float32",
    rank_of: RankOf = _by_id,
) -> sm.Layout:
    """Return the layout of an array of this `shape` under `sharding`, of any class that JAX has, on devices.

    Axes of a NamedSharding's mesh keep their names; a sum along `unreduced` axes is left. Other shardings give the
    layout that `shardmath.from_holdings` finds. Raises ValueError, as JAX does, if a dimension does not divide evenly;
    LayoutError if a dimension is `PartitionSpec.UNCONSTRAINED`; MeshError if two devices have the same rank.
    """
    sizes = tuple(shape)
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, AbstractMesh):
        what = f"{sharding} has an abstract mesh, without devices"
        raise MeshError(f"{what}; pass NamedSharding(mesh, sharding.spec), with a Mesh of devices")
    # JAX's own refusal of sizes that do not divide evenly.
    sharding.shard_shape(sizes)
    if isinstance(sharding, NamedSharding):
        return _read_named(sharding, sizes, dtype, rank_of)
    ranks = _number(sharding.device_set, rank_of)
    held = {
        ranks[device]: [_read_slice(part, n) for part, n in zip(index, sizes, strict=True)]
        for device, index in sharding.devices_indices_map(sizes).items()
    }
    return _find_layout(sharding, sizes, held, dtype)


def _find_layout(
    sharding: Sharding, sizes: tuple[int, ...], held: Mapping[int, list[sm.Runs]], dtype: str
) -> sm.Layout:
    """The layout in which each rank has its ranges in `held`. Raises LayoutError if no single layout has them."""
    found = sm.from_holdings(sizes, held, dtype=dtype)
    if isinstance(found, tuple):
        what = f"no single layout has what the devices of {sharding} hold"
        raise LayoutError(f"{what} of shape {sizes}; move the array to a NamedSharding first")
    return found


def _read_named(
    sharding: NamedSharding, sizes: tuple[int, ...], dtype: str, rank_of: RankOf
) -> sm.Layout:
    """The layout of a NamedSharding: the axes of its mesh, and the text of its PartitionSpec."""
    spec = sharding.spec
    devices = sharding.mesh.devices
    axes = dict(zip(sharding.mesh.axis_names, devices.shape, strict=True))
    ranks = _number(devices.flat, rank_of)
    mesh = sm.Mesh(axes, ranks=[ranks[device] for device in devices.flat])
    named = spec.partitions
    if len(named) > len(sizes):
        what = f"{spec} has {len(named)} entries, but the shape {sizes} has {len(sizes)} dimensions"
        raise LayoutError(f"{what}; give the array's own sharding and shape")
    entries = [*named, *[None] * (len(sizes) - len(named))]
    # Longer than the name of any axis.
    free = "_" * (1 + max(map(len, axes), default=0))
    words = [_write_entry(spec, d, entry, f"{free}{d}") for d, entry in enumerate(entries)]
    text = " ".join(words) or "..."
    summed = " ".join(f"{{sum: {axis}}}" for axis in sorted(spec.unreduced))
    return sm.Layout(sizes, mesh, f"{text} {summed}".strip(), dtype=dtype)


def _write_entry(spec: PartitionSpec, d: int, entry: Any, free: str) -> str:
    """The notation of dimension d, where the PartitionSpec has this entry; `free` names a rank's part."""
    if entry is PartitionSpec.UNCONSTRAINED:
        what = f"dimension {d} of {spec} is unconstrained"
        raise LayoutError(f"{what}; name the axes that divide it, or None")
    axes = (entry,) if isinstance(entry, str) else tuple(entry or ())
    return f"({'*'.join(axes)} {free})" if axes else free


def _number(devices: Iterable[Any], rank_of: RankOf) -> dict[Any, int]:
    """The rank of each device. Raises MeshError if two have the same."""
    ranks = {device: rank_of(device) for device in devices}
    owner: dict[int, Any] = {}
    for device, rank in ranks.items():
        if owner.setdefault(rank, device) is not device:
            what = f"rank_of gives rank {rank} to {owner[rank]} and to {device}"
            raise MeshError(
                f"{what}; give each device its own, such as its id, or start one process per device"
            )
    return ranks


def _read_slice(part: slice, n: int) -> sm.Runs:
    """The positions that a device holds of a dimension of `n`."""
    start, stop, _ = part.indices(n)
    return from_ranges([(start, stop)])


def to_sharding(
    layout: sm.Layout,
    devices: Mapping[int, Any] | None = None,
    *,
    memory_kind: str | None = None,
) -> NamedSharding:
    """Return the NamedSharding under which each device holds what its rank holds in `layout`.

    `devices` maps ranks to devices; without it, a rank is the device with that id. Axes of the new mesh are automatic,
    or explicit if they are summed. Raises PlacementError for what JAX cannot express (uneven, strided or padded parts,
    and reductions other than sums), and MeshError for a rank without a device, or two with the same one.
    """
    entries = [axes[0] if len(axes) == 1 else axes or None for axes in find_axes(layout)]
    grid = _list_devices(layout, devices)
    axes = layout.mesh.shape or {"all": layout.mesh.size}
    summed = frozenset(axis for axis, _ in layout.partial)
    # JAX knows unreduced sums only along explicit axes.
    types = tuple(AxisType.Explicit if axis in summed else AxisType.Auto for axis in axes)
    mesh = Mesh(grid.reshape(tuple(axes.values())), tuple(axes), axis_types=types)
    spec = PartitionSpec(*entries, unreduced=summed)
    return NamedSharding(mesh, spec, memory_kind=memory_kind)


def _list_devices(layout: sm.Layout, devices: Mapping[int, Any] | None) -> np.ndarray[Any, Any]:
    """The devices of the layout's ranks, in the order of its mesh. Raises MeshError for a rank without one, and for two
    with the same one.
    """
    by_rank = {_by_id(device): device for device in jax.devices()} if devices is None else devices
    if not isinstance(by_rank, Mapping):
        raise MeshError(f"devices is a {type(by_rank).__name__}; pass a dict {{rank: device}}")
    missing = [rank for rank in layout.mesh.ranks if rank not in by_rank]
    if missing:
        what = f"rank {missing[0]} of {layout} has no device; there are {shown(sorted(by_rank))}"
        raise MeshError(f"{what}; pass devices={{rank: device}}")
    grid = np.empty(layout.mesh.size, object)
    grid[:] = [by_rank[rank] for rank in layout.mesh.ranks]
    if len(set(grid)) < len(grid):
        what = f"devices= gives {len(grid)} ranks of {layout} only {len(set(grid))} devices"
        raise MeshError(f"{what}; give each rank its own device")
    return grid


def local_shards(array: jax.Array, *, rank_of: RankOf = _by_id) -> dict[int, jax.Array]:
    """Return this process's shards of an array by rank, each an array on one device, without a copy.

    `numpy.asarray(shard)` and `torch.from_dlpack(shard)` are views of its memory, if the device is a CPU.
    """
    ranks = _number(array.sharding.device_set, rank_of)
    return {ranks[shard.device]: shard.data for shard in array.addressable_shards}


def held_by_process(array: jax.Array) -> tuple[sm.Layout, jax.Array]:
    """Return the layout of an array over processes, and the part that this process has on all of its devices together.
    A process is the rank `jax.process_index()`.

    The part is one array on a CPU device, without a copy if the process has only that device. Raises LayoutError for
    unreduced sums, for other values than arrays of JAX, and on a process that has none of the array's devices; and
    ValueError, as JAX does, if a process's devices are not a block of the mesh.
    """
    if not isinstance(array, jax.Array):
        what = f"array is a {type(array).__module__}.{type(array).__name__}"
        raise LayoutError(f"{what}; pass a jax.Array, such as jax.numpy.asarray(array)")
    sharding, sizes = array.sharding, array.shape
    if layout_of(array).partial:
        what = f"the devices of {sharding} hold summands of the array"
        raise LayoutError(f"{what}; move it to a sharding without unreduced axes first")
    if not sharding.addressable_devices:
        what = f"process {jax.process_index()} has none of the devices of {sharding}"
        raise LayoutError(
            f"{what}; call held_by_process on the processes that have one, or add devices of this one to the mesh"
        )
    held: dict[int, list[set[tuple[int, int]]]] = {}
    for device, index in sharding.devices_indices_map(sizes).items():
        ranges = held.setdefault(device.process_index, [set() for _ in sizes])
        for dim, part, n in zip(ranges, index, sizes, strict=True):
            start, stop, _ = part.indices(n)
            dim.add((start, stop))
    runs = {rank: [from_ranges(sorted(dim)) for dim in ranges] for rank, ranges in held.items()}
    layout = _find_layout(sharding, sizes, runs, array.dtype.name)
    if isinstance(sharding, NamedSharding):
        array = global_array_to_host_local_array(array, sharding.mesh, sharding.spec)
    return layout, jax.device_put(array, jax.local_devices(backend="cpu")[0])


def to_array(
    sharding: Sharding,
    shape: Sequence[int],
    shards: Mapping[int, Any],
    *,
    rank_of: RankOf = _by_id,
) -> jax.Array:
    """Return the array of this `shape` under `sharding` whose shards on this process's devices are `shards`, by rank.

    A shard is an array of JAX or numpy, or an object with DLPack, such as a torch tensor. It is copied to its device
    unless JAX can share its memory: do not write to it afterwards. Raises LayoutError if a shard is missing, has
    another shape, or has a dtype that JAX would make narrower.
    """
    sizes = tuple(shape)
    expected = sharding.shard_shape(sizes)
    ranks = _number(sharding.device_set, rank_of)
    placed = []
    for device in sorted(sharding.addressable_devices, key=ranks.__getitem__):
        rank = ranks[device]
        if rank not in shards:
            what = f"shards has ranks {shown(sorted(shards))}, but not rank {rank}, {device}"
            raise LayoutError(f"{what}; give one shard for each device of this process")
        shard = _as_jax(shards[rank])
        if shard.shape != expected:
            what = f"the shard of rank {rank} has shape {tuple(shard.shape)}, but {sharding} gives {expected}"
            raise LayoutError(f"{what} of {sizes}; give its local part")
        put = jax.device_put(shard, device)
        if put.dtype != shard.dtype:
            what = f"the shard of rank {rank} is {shard.dtype}, and JAX would make it {put.dtype}"
            raise LayoutError(f"{what}; cast it, or set jax_enable_x64")
        placed.append(put)
    return jax.make_array_from_single_device_arrays(sizes, sharding, placed)


def _as_jax(shard: Any) -> Any:
    """The shard as something that `jax.device_put` takes."""
    if isinstance(shard, np.ndarray | jax.Array):
        return shard
    return jax.dlpack.from_dlpack(shard)
