"""Layouts of JAX's shardings, against what JAX says that each device holds."""

from __future__ import annotations

import random
from typing import Any

import jax
import numpy as np
import pytest
import torch
from jax._src.sharding_impls import (
    GSPMDSharding,  # of computations compiled without explicit shardings
)
from jax.sharding import (
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
    Sharding,
    SingleDeviceSharding,
)

import shardmath as sm
import shardmath_jax

P = PartitionSpec
SHAPES = {
    1: [(1,)],
    2: [(2,), (2, 1)],
    4: [(4,), (2, 2)],
    6: [(6,), (2, 3), (3, 2)],
    8: [(8,), (2, 4), (4, 2), (2, 2, 2)],
}
"""Shapes of meshes, by number of devices."""
SIZES = (1, 4, 6, 8, 9, 12, 16, 24)
DEVICES = jax.devices()


def draw(rng: random.Random) -> tuple[NamedSharding, int]:
    """A random NamedSharding, on some devices in random order, and the number of dimensions of its arrays."""
    count = rng.choice(list(SHAPES))
    grid = np.array(rng.sample(DEVICES, count), object).reshape(rng.choice(SHAPES[count]))
    names = ("a", "b", "c")[: grid.ndim]
    ndim = rng.randrange(4)
    entries: list[tuple[str, ...]] = [()] * ndim
    for axis in rng.sample(names, len(names)):
        if ndim and rng.random() < 0.75:
            entries[rng.randrange(ndim)] += (axis,)
    # P("a") and P(("a",)) mean the same, and trailing None may be left out.
    spec: list[Any] = [
        entry[0] if len(entry) == 1 and rng.random() < 0.7 else (entry or None) for entry in entries
    ]
    while spec and spec[-1] is None and rng.random() < 0.5:
        spec.pop()
    return NamedSharding(Mesh(grid, names), P(*spec)), ndim


def check_holds(layout: sm.Layout, sharding: Sharding, shape: tuple[int, ...]) -> None:
    """Each device holds the same positions, in the same order, by the layout and by JAX."""
    held = sharding.devices_indices_map(shape)
    assert sorted(layout.mesh.ranks) == sorted(device.id for device in held)
    for device, index in held.items():
        positions = [np.arange(n)[part] for part, n in zip(index, shape, strict=True)]
        for mine, theirs in zip(layout.indices(device.id), positions, strict=True):
            assert np.array_equal(mine, theirs), (layout, sharding, shape)


def test_random_shardings() -> None:
    """Of 1,500, at least 1,000 divide evenly; JAX refuses the others with its own error, and so do we."""
    rng = random.Random(0)
    read = 0
    for _ in range(1500):
        sharding, ndim = draw(rng)
        shape = tuple(rng.choice(SIZES) for _ in range(ndim))
        try:
            sharding.shard_shape(shape)
        except ValueError as error:
            with pytest.raises(type(error)):
                shardmath_jax.from_sharding(sharding, shape)
            continue
        layout = shardmath_jax.from_sharding(sharding, shape, dtype="bfloat16")
        check_holds(layout, sharding, shape)
        back = shardmath_jax.to_sharding(layout)
        assert back.is_equivalent_to(sharding, ndim)
        read += 1
    assert read >= 1000


def test_shardings_of_other_classes() -> None:
    """By what each device holds."""
    rng = random.Random(1)
    single = SingleDeviceSharding(DEVICES[3])
    check_holds(shardmath_jax.from_sharding(single, (4, 4)), single, (4, 4))
    read = 0
    for _ in range(300):
        named, ndim = draw(rng)
        shape = tuple(rng.choice((8, 24)) for _ in range(ndim))
        try:
            named.shard_shape(shape)
        except ValueError:
            continue
        other = GSPMDSharding(tuple(named.mesh.devices.flat), named._to_xla_hlo_sharding(ndim))
        layout = shardmath_jax.from_sharding(other, shape)
        check_holds(layout, other, shape)
        assert sm.equivalent(layout, shardmath_jax.from_sharding(named, shape))
        read += 1
    assert read >= 200


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("(a n) h", "9 positions do not divide evenly into 4 parts; pad the array to 12"),
        ("h (2 a n)", "its parts are not consecutive"),
        ("h (a n)=12", "no padding"),
        ("n h {max: a}", "unreduced sums, but no max"),
    ],
)
def test_what_jax_cannot_say(text: str, why: str) -> None:
    layout = sm.Layout((9, 8), sm.Mesh(a=4), text)
    with pytest.raises(sm.PlacementError, match=why):
        shardmath_jax.to_sharding(layout)


def test_unreduced_sums() -> None:
    mesh = Mesh(np.array(DEVICES).reshape(2, 4), ("dp", "tp"), axis_types=(AxisType.Explicit,) * 2)
    sharding = NamedSharding(mesh, P(None, "tp", unreduced={"dp"}))
    layout = shardmath_jax.from_sharding(sharding, (16, 4))
    assert str(layout) == "float32[16, 4] _0 (tp _1) {sum: dp} on dp=2 tp=4" or layout == sm.Layout(
        (16, 4), sm.Mesh(dp=2, tp=4), "n (tp h) {sum: dp}"
    )
    assert shardmath_jax.to_sharding(layout).spec == sharding.spec


def test_unreduced_sums_are_not_a_process_s() -> None:
    mesh = Mesh(np.array(DEVICES), ("d",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        rows = jax.device_put(np.ones((8, 8), np.float32), P("d", None))
        summed = P(None, None, unreduced={"d"})
        array = jax.jit(lambda x: jax.numpy.matmul(x.T, x, out_sharding=summed))(rows)
    with pytest.raises(sm.LayoutError, match="summands of the array; move it to a sharding"):
        shardmath_jax.held_by_process(array)


def test_arrays_of_numpy_are_not_a_process_s() -> None:
    with pytest.raises(sm.LayoutError, match=r"is a numpy.ndarray; pass a jax.Array"):
        shardmath_jax.held_by_process(np.ones((8, 8)))


def test_unconstrained_dimensions_are_refused() -> None:
    mesh = Mesh(np.array(DEVICES), ("d",))
    with pytest.raises(sm.LayoutError, match=r"dimension 1 of .* is unconstrained; name the axes"):
        shardmath_jax.from_sharding(NamedSharding(mesh, P("d", P.UNCONSTRAINED)), (8, 8))


def test_ranks_that_are_not_ids() -> None:
    sharding = NamedSharding(Mesh(np.array(DEVICES[:4]), ("d",)), P("d"))
    moved = shardmath_jax.from_sharding(sharding, (8,), rank_of=lambda device: 10 - device.id)
    assert moved.mesh.ranks == (10, 9, 8, 7)
    with pytest.raises(sm.MeshError, match=r"rank_of gives rank 0 to .* and to "):
        shardmath_jax.from_sharding(sharding, (8,), rank_of=lambda device: device.process_index)
    with pytest.raises(sm.MeshError, match=r"rank 10 of .* has no device"):
        shardmath_jax.to_sharding(moved)
    devices = {10 - device.id: device for device in DEVICES[:4]}
    assert shardmath_jax.to_sharding(moved, devices).is_equivalent_to(sharding, 1)


def test_shards_are_views_and_make_arrays() -> None:
    sharding = NamedSharding(Mesh(np.array(DEVICES).reshape(2, 4), ("a", "b")), P("b", "a"))
    whole = np.arange(64, dtype=np.float32).reshape(8, 8)
    array = jax.device_put(whole, sharding)
    layout = shardmath_jax.layout_of(array)
    shards = shardmath_jax.local_shards(array)
    for rank, shard in shards.items():
        assert np.array_equal(shard, whole[np.ix_(*layout.indices(rank))])
        assert torch.from_dlpack(shard).data_ptr() == shard.unsafe_buffer_pointer()
        assert np.asarray(shard).ctypes.data == shard.unsafe_buffer_pointer()
    for make in (np.asarray, torch.from_dlpack, lambda shard: shard):
        given = {rank: make(shard) for rank, shard in shards.items()}
        again = shardmath_jax.to_array(sharding, (8, 8), given)
        assert again.sharding == sharding and np.array_equal(again, whole)
    with pytest.raises(sm.LayoutError, match="but not rank 7"):
        shardmath_jax.to_array(sharding, (8, 8), {rank: shards[rank] for rank in range(7)})
    with pytest.raises(sm.LayoutError, match=r"rank 0 has shape \(8, 8\), but"):
        shardmath_jax.to_array(sharding, (8, 8), dict.fromkeys(range(8), whole))


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "bool", "complex64"])
def test_dtypes(dtype: str) -> None:
    array = jax.numpy.zeros((8, 2), dtype)
    assert shardmath_jax.layout_of(array).dtype == dtype


def test_what_would_lose_bits_or_has_no_devices() -> None:
    sharding = NamedSharding(Mesh(np.array(DEVICES[:2]), ("d",)), P("d"))
    wide = {rank: np.full(2, 2**40 + 1, np.int64) for rank in range(2)}
    with pytest.raises(sm.LayoutError, match="rank 0 is int64, and JAX would make it int32"):
        shardmath_jax.to_array(sharding, (4,), wide)
    abstract = NamedSharding(sharding.mesh.abstract_mesh, P("d"))
    with pytest.raises(sm.MeshError, match="abstract mesh, without devices"):
        shardmath_jax.from_sharding(abstract, (4,))
    layout = shardmath_jax.from_sharding(sharding, (4,))
    with pytest.raises(sm.MeshError, match="devices is a list; pass a dict"):
        shardmath_jax.to_sharding(layout, jax.devices())
    with pytest.raises(sm.MeshError, match=r"gives 2 ranks of .* only 1 devices"):
        shardmath_jax.to_sharding(layout, dict.fromkeys(range(2), DEVICES[0]))
    longer = NamedSharding(sharding.mesh, P("d", None))
    with pytest.raises(sm.LayoutError, match="has 2 entries, but the shape"):
        shardmath_jax.from_sharding(longer, (4,))
