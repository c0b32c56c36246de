"""Local: what one rank does at an end for a tensor that it holds, in numpy.

1. It is slow and obvious: backends do the same to their own tensors, and are compared with it bit for bit.
2. What a transform makes is looked at before it is kept: as many arrays as it said, of those shapes and dtypes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from shardmath.base.errors import PlanError
from shardmath.base.text import plural
from shardmath.layouts.layout import Layout
from shardmath.values.formats.elements import Array, numpy_type, read_elements
from shardmath.values.transforms.packing import pack, unpack
from shardmath.values.transforms.wires import Wired

__all__ = ["Arrays", "WireJob", "finalize", "find_array", "prepare"]

Arrays: TypeAlias = Mapping[str, Array] | Array
"""Local arrays by local name; the one array of a side without names."""


Named: TypeAlias = tuple[tuple[str, Layout], ...]
"""Local tensors by name."""


Shape: TypeAlias = tuple[int, ...]


class WireJob(NamedTuple):
    """A local tensor of a rank with its companions, and the wire tensors that stand for it, by local name; `wired` is
    None, and the names are one, where it travels as it is."""

    tensor: str
    held: Named
    wires: Named
    wired: Wired | None

    @property
    def key(self) -> str:
        """The tensor's local name."""
        return self.held[0][0]

    @property
    def layout(self) -> Layout:
        """The tensor's layout."""
        return self.held[0][1]


def find_array(arrays: Arrays, key: str, rank: int) -> Array:
    """The local array of that name. Raises PlanError where it is missing."""
    if not isinstance(arrays, Mapping):
        arrays = {"": arrays}
    if key not in arrays:
        names = ", ".join(map(repr, arrays)) or "none"
        raise PlanError(f"rank {rank} gives no array {key!r}; it gives {names}")
    return arrays[key]


def prepare(job: WireJob, rank: int, given: tuple[Array, ...]) -> dict[str, Array]:
    """The wire tensors of a local array and its companions."""
    wired = job.wired
    names = [key for key, _ in job.wires]
    made = given
    if wired is not None and not wired.as_held.source:
        made = _make_wires(job, wired, rank, given)
    return dict(zip(names, made, strict=True))


def _make_wires(
    job: WireJob, wired: Wired, rank: int, given: tuple[Array, ...]
) -> tuple[Array, ...]:
    """What the transform makes of them. Raises PlanError where that is not what it says."""
    arrays = _read_all(given, job.held, rank)
    packed = []
    for array, (_, layout) in zip(arrays, job.held, strict=True):
        # It may be the caller's own memory, of which a function that works in place would make another source.
        own = pack(layout, rank, array).view()
        own.flags.writeable = False
        packed.append(own)
    if not packed[0].size:
        empty = _make_empty(job.wires, rank)
        # What stands for all of a dimension is there of nothing, too.
        if not any(one.size for one in empty):
            return empty
    values: Any = tuple(packed) if len(packed) > 1 else packed[0]
    made = wired.transform.prepare(values, wired.src, wired.dst)
    arrays = tuple(made)
    if len(arrays) != len(job.wires):
        what = f"tensor {job.tensor!r}: {wired.transform} makes {plural(arrays, 'array')}"
        raise PlanError(f"{what} for {plural(job.wires, 'component')}; make one for each")
    return _read_all(arrays, job.wires, rank)


def _make_empty(wires: Named, rank: int) -> tuple[Array, ...]:
    """The wire tensors of a rank that holds nothing: no function has to be written for that."""
    made = []
    for _, layout in wires:
        shape = layout.local_shape(rank)
        empty = np.zeros(shape, numpy_type(layout.dtype))
        made.append(empty)
    return tuple(made)


def _read_all(given: Sequence[object], held: Named, rank: int) -> tuple[Array, ...]:
    """The arrays as they are held there. Raises PlanError for one of another shape or dtype."""
    read = []
    for array, (key, layout) in zip(given, held, strict=True):
        own = _read_local(array, key, layout, rank)
        read.append(own)
    return tuple(read)


def _read_local(given: object, key: str, layout: Layout, rank: int) -> Array:
    what = f"rank {rank}: array {key!r}"
    array = read_elements(given, layout.dtype, what)
    expected = layout.local_shape(rank)
    if array.shape != expected:
        there = f"{layout} has {expected} there"
        raise PlanError(f"{what} has shape {array.shape}, {there}; pass that local array")
    return array


def finalize(
    job: WireJob, rank: int, given: Sequence[Array], into: Sequence[Array | None]
) -> dict[str, Array]:
    """The local array of the wire tensors, and its companions; those of `into` themselves where they are given."""
    wired = job.wired
    made = {}
    if wired is None or wired.as_held.destination:
        for array, out, (key, layout) in zip(given, into, job.held, strict=True):
            made[key] = array
            if out is not None:
                packed = pack(layout, rank, array)
                made[key] = _put(job, key, layout, rank, packed, out)
        return made
    computed = _compute(job, wired, rank, given)
    for packed, out, (key, layout) in zip(computed, into, job.held, strict=True):
        if out is None:
            shape = layout.local_shape(rank)
            out = np.zeros(shape, packed.dtype)
        made[key] = _put(job, key, layout, rank, packed, out)
    return made


def _put(job: WireJob, key: str, layout: Layout, rank: int, packed: Array, out: Array) -> Array:
    """The local array, with what was made in it."""
    if job.wired is None:
        unpack(layout, rank, packed, out)
        return out
    # As words on both sides, where the arrays are another library's.
    own = _read_local(out, key, layout, rank)
    values = read_elements(packed, layout.dtype, f"array {key!r}")
    unpack(layout, rank, values, own)
    return out


def _compute(job: WireJob, wired: Wired, rank: int, given: Sequence[Array]) -> list[Array]:
    """What the rank holds of the tensor and its companions, packed."""
    arrays = _read_all(given, job.wires, rank)
    shapes = [_count_held(layout, rank) for _, layout in job.held]
    if any(0 not in shape for shape in shapes):
        made = wired.transform.finalize(arrays, wired.src, wired.dst)
        return _read_made(job, wired, rank, made, shapes)
    empty = []
    for shape, (_, layout) in zip(shapes, job.held, strict=True):
        kind = numpy_type(layout.dtype)
        empty.append(np.zeros(shape, kind))
    return empty


def _count_held(layout: Layout, rank: int) -> Shape:
    """How many positions of each dimension the rank holds."""
    return tuple(runs.size for runs in layout.runs(rank))


def _read_made(
    job: WireJob, wired: Wired, rank: int, made: Any, shapes: Sequence[Shape]
) -> list[Array]:
    """What a transform made, if it is what it says. Raises PlanError if not."""
    values = (made,)
    if len(job.held) > 1:
        values = tuple(made)
    if len(values) != len(job.held):
        what = f"{wired.transform} makes {plural(values, 'array')} of {job.key!r}"
        raise PlanError(f"{what}, and {plural(job.held, 'tensor')} hold it; make one for each")
    packed = []
    for value, expected, (key, layout) in zip(values, shapes, job.held, strict=True):
        what = f"what {wired.transform} makes of {key!r}"
        array = read_elements(value, layout.dtype, what)
        _check_shape(what, array.shape, expected, rank)
        packed.append(array)
    return packed


def _check_shape(what: str, found: Shape, expected: Shape, rank: int) -> None:
    """Raise PlanError for another shape than the rank holds."""
    if found != expected:
        fix = "make that shape"
        raise PlanError(f"{what} has shape {found}, rank {rank} holds {expected}; {fix}")
