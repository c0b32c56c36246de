"""Transform laws: the laws of every transform, wherever its tensor is cut.

A transform sends other tensors, its **wires**, in place of one tensor. A **job** is a rank's task for one tensor at
one end: it lists the tensor and its wires there.

Check a custom transform with `check_transform`:

    @given(testing.transform_cases(mine, (6, 64), "float32", "bfloat16"))
    def test_mine(case):
        testing.check_transform(*case)
"""

from __future__ import annotations

import math
from typing import Any

import hypothesis.strategies as st
import numpy as np

from shardmath.layouts.algebra.dimension import Dimension, cells
from shardmath.layouts.algebra.mesh import Mesh
from shardmath.layouts.algebra.runs import Runs
from shardmath.layouts.fitting import fit
from shardmath.layouts.layout import Layout, intern
from shardmath.plans.plan import plan
from shardmath.proofs.simulate import simulate
from shardmath.testing.strategies import layouts
from shardmath.values.formats.elements import Array, numpy_type
from shardmath.values.transforms.components import End, Form, Transform
from shardmath.values.transforms.packing import pack
from shardmath.values.transforms.transformed import Transformed, transformed

__all__ = ["TRANSFORM_LAWS", "check_transform", "transform_cases"]

Case = tuple[Transform, Layout, Layout, int]
"""A transform, the layouts of its tensor at both ends, and a seed of its elements."""


def check_transform(transform: Transform, src: Layout, dst: Layout, seed: int) -> None:
    """Check that `transform` obeys each law in TRANSFORM_LAWS, for a tensor with layout `src` before the transform and
    `dst` after it, whose values are drawn by `seed`. Raises AssertionError if a law is broken: for example, if
    transforming a part does not give a part of the transformed whole."""
    for law in TRANSFORM_LAWS:
        law(transform, src, dst, seed)


def preparing_commutes_with_slicing(
    transform: Transform, src: Layout, dst: Layout, seed: int
) -> None:
    """Check that `transform.prepare`, which computes the tensors to send, commutes with slicing: on each rank of `src`,
    `prepare(part)` equals the rank's part of `prepare(whole)`. The values are random, drawn by `seed`."""
    whole, parts = _transform_whole_and_parts(transform, src, dst)
    tensor = _draw_tensor(src, seed)
    wires = whole.prepare(0, {"w": tensor})
    for rank in src.mesh.ranks:
        found = parts.prepare(rank, {"w": _distribute(src, rank, tensor)})
        _check_parts(parts, "source", rank, wires, found)


def finalizing_commutes_with_slicing(
    transform: Transform, src: Layout, dst: Layout, seed: int
) -> None:
    """Check that `transform.finalize`, which computes a destination tensor from received tensors, commutes with
    slicing: on each rank of `dst`, `finalize(parts)` equals the rank's part of `finalize(whole)`. The values are
    random, drawn by `seed`."""
    whole, parts = _transform_whole_and_parts(transform, src, dst)
    wires = whole.prepare(0, {"w": _draw_tensor(src, seed)})
    tensor = _only(whole.finalize(0, wires))
    for rank in dst.mesh.ranks:
        given = {}
        for job in parts.jobs(rank, "destination"):
            for key, layout in job.wires:
                given[key] = _distribute(layout, rank, wires[key])
        found = _only(parts.finalize(rank, given))
        _check_held(dst, rank, found, tensor)


def moving_is_transforming(transform: Transform, src: Layout, dst: Layout, seed: int) -> None:
    """Check that a move with `transform` gives each rank its part of the transformed tensor. The move computes the
    tensors to send by `transform.prepare`, sends them, and computes the destination tensor from received ones by
    `transform.finalize`."""
    whole, parts = _transform_whole_and_parts(transform, src, dst)
    tensor = _draw_tensor(src, seed)
    wires = whole.prepare(0, {"w": tensor})
    wanted = _only(whole.finalize(0, wires))
    held = {}
    for rank in src.mesh.ranks:
        local = _distribute(src, rank, tensor)
        held[rank] = parts.prepare(rank, {"w": local})
    wire_plan = plan(parts.src, parts.dst)
    arrived: Any = simulate(wire_plan, held)
    for rank in dst.mesh.ranks:
        found = _only(parts.finalize(rank, arrived[rank]))
        _check_held(dst, rank, found, wanted)


def outside_is_kept(transform: Transform, src: Layout, dst: Layout, seed: int) -> None:
    """Check that a move leaves holes (positions without an element) of destination tensors unchanged when it writes the
    result of `transform.finalize`, which computes a destination tensor from received ones."""
    whole, parts = _transform_whole_and_parts(transform, src, dst)
    wires = whole.prepare(0, {"w": _draw_tensor(src, seed)})
    for rank in dst.mesh.ranks:
        (job,) = parts.jobs(rank, "destination")
        given = {}
        for key, layout in job.wires:
            given[key] = _distribute(layout, rank, wires[key])
        kind = numpy_type(dst.dtype)
        shape = dst.local_shape(rank)
        # Bytes of 1 are a number of any dtype, neither 0 nor NaN.
        ones = np.full(math.prod(shape) * kind.itemsize, 1, np.uint8)
        before = ones.view(kind).reshape(shape)
        after = before.copy()
        parts.finalize(rank, given, {"w": after})
        held = np.zeros(after.shape, bool)
        index = [np.flatnonzero(positions >= 0) for positions in dst.indices(rank)]
        held[np.ix_(*index)] = True
        what = f"rank {rank}: finalizing changed holes of the destination; write only its elements"
        assert (after[~held] == before[~held]).all(), what


TRANSFORM_LAWS = (
    preparing_commutes_with_slicing,
    finalizing_commutes_with_slicing,
    moving_is_transforming,
    outside_is_kept,
)
"""The laws that every transform keeps, a tuple of functions law(transform, src, dst, seed) that raise AssertionError if
broken; `check_transform` calls all."""


def _transform_whole_and_parts(
    transform: Transform, src: Layout, dst: Layout
) -> tuple[Transformed, Transformed]:
    """The transform of the tensor on one rank, and of the tensor as these layouts hold it."""
    whole_src = Layout(src.shape, Mesh(), "...", dtype=src.dtype)
    whole_dst = Layout(dst.shape, Mesh(), "...", dtype=dst.dtype)
    rules = {"w": transform}
    whole = transformed({"w": whole_src}, {"w": whole_dst}, rules)
    parts = transformed({"w": src}, {"w": dst}, rules)
    return whole, parts


def _draw_tensor(layout: Layout, seed: int) -> Array:
    """A tensor of random bits, so that all kinds of numbers are in it."""
    kind = numpy_type(layout.dtype)
    rng = np.random.default_rng(seed)
    if kind.kind == "b":
        return rng.integers(0, 2, layout.shape).astype(bool)
    data = rng.bytes(math.prod(layout.shape) * kind.itemsize)
    return np.frombuffer(data, kind).reshape(layout.shape).copy()


def _distribute(layout: Layout, rank: int, tensor: Array) -> Array:
    """The rank's local array, with zeros in holes."""
    local = np.zeros(layout.local_shape(rank), tensor.dtype)
    local_index = []
    global_index = []
    for index in layout.indices(rank):
        local_index.append(np.flatnonzero(index >= 0))
        global_index.append(index[index >= 0])
    local[np.ix_(*local_index)] = tensor[np.ix_(*global_index)]
    return local


def _only(arrays: Any) -> Array:
    """The one array of one tensor."""
    (array,) = arrays.values()
    found: Array = array
    return found


def _check_parts(
    parts: Transformed, end: End, rank: int, wires: dict[str, Array], found: dict[str, Array]
) -> None:
    """Assert that each wire tensor of the rank is its part of the whole."""
    for job in parts.jobs(rank, end):
        for key, layout in job.wires:
            _check_same(found[key], _distribute(layout, rank, wires[key]), rank)


def _check_held(layout: Layout, rank: int, found: Array, tensor: Array) -> None:
    """Assert that the elements that the rank holds are the tensor's."""
    held = pack(layout, rank, found)
    wanted = _distribute(layout, rank, tensor)
    _check_same(held, pack(layout, rank, wanted), rank)


def _check_same(found: Array, wanted: Array, rank: int) -> None:
    """Assert that the arrays are bit for bit the same."""
    what = f"rank {rank}: the transform of a part has shape {found.shape}"
    fix = "compute every element only from the block that it is in"
    assert found.shape == wanted.shape, f"{what}, the part of the whole {wanted.shape}; {fix}"
    what = f"rank {rank}: the transform of a part is {found}, the part of the whole is {wanted}"
    assert found.tobytes() == wanted.tobytes(), f"{what}; {fix}"


# Cases


@st.composite
def transform_cases(
    draw: st.DrawFn,
    transform: Transform,
    shape: tuple[int, ...],
    src: str,
    dst: str,
    dst_shape: tuple[int, ...] | None = None,
) -> Case:
    """A hypothesis strategy for the arguments of `check_transform`: `transform`, two layouts that keep its blocks
    (elements computed together) whole, and a seed. The tensor has `shape` and dtype `src` at the source, `dst_shape`
    (default: `shape`) and dtype `dst` at the destination.

    Blocks that span a dimension may be cut. Parts may be strided, block-cyclic, permuted, empty, held by several ranks,
    and next to holes.
    """
    ends = Form(shape, src), Form(shape if dst_shape is None else dst_shape, dst)
    first = draw(_legal_layouts(transform, *ends, "source"))
    last = draw(_legal_layouts(transform, *ends, "destination"))
    return transform, first, last, draw(st.integers(0, 1 << 32))


@st.composite
def _legal_layouts(draw: st.DrawFn, transform: Transform, src: Form, dst: Form, end: End) -> Layout:
    """A layout of the tensor at one end that cuts no block: a layout of blocks, each of which is then widened."""
    form = src if end == "source" else dst
    ndim = len(form.shape)
    parts = transform.components(src, dst)
    by_part = [part.block(ndim, end) for part in parts]
    blocks = []
    counts = []
    for n, *part_sizes in zip(form.shape, *by_part, strict=True):
        # A part without a block size spans the dimension, and does not restrict where it is cut.
        block = math.lcm(*(size or 1 for size in part_sizes))
        blocks.append(block)
        counts.append(-(-n // block))
    drawn: Layout = draw(layouts(tuple(counts)))
    dims = []
    for n, block, dim in zip(form.shape, blocks, drawn.dims, strict=True):
        widened = _widen(dim, block, n)
        dims.append(widened)
    return intern(form.shape, form.dtype, drawn.mesh, tuple(dims), ())


def _widen(dim: Dimension, block: int, n: int) -> Dimension:
    """The dimension of elements, given a dimension of blocks; a shorter last block leaves a hole after it."""
    if block == 1:
        return dim
    held = []
    for runs in cells(dim):
        segments = []
        for lo, g, count in runs.segments:
            first = g * block
            stop = min((g + count) * block, n)
            segments.append((lo * block, first, stop - first))
        held.append(Runs(segments, len(runs) * block))
    return fit(n, dim.axes, held)
