"""Local: a rank's work on one tensor at one end, in numpy.

1. It is slow and obvious: backends do the same to their own tensors, and tests compare them with it bit for bit.
2. A transform's results are checked: as many arrays as it declared, of the declared shapes and dtypes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from shardmath.base.errors import PlanError
from shardmath.base.text import plural
from shardmath.layouts.holdings import label
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
    """A rank's task for one tensor at the source or destination of a move. `held` lists the tensor and its companions,
    such as scales; `wires` lists the tensors that are sent in their place (at the source) or received (at the
    destination). Both are tuples of pairs: a local tensor's name and its layout.

    `wired` is None if the tensor travels as it is, under the same name.
    """

    tensor: str
    held: Named
    wires: Named
    wired: Wired | None

    @property
    def key(self) -> str:
        """The key of the tensor's local array in the rank's dict of arrays: the first name in `held`, which lists
        companions, such as scales, after the tensor."""
        return self.held[0][0]

    @property
    def layout(self) -> Layout:
        """The layout of the tensor itself, not of a companion."""
        return self.held[0][1]


def find_array(arrays: Arrays, key: str, rank: int) -> Array:
    """Return the local array named `key` from `arrays`, a dict of arrays by name; a single array instead of a dict has
    the name "". Raises PlanError, which names the `rank`, if no array has this name."""
    if not isinstance(arrays, Mapping):
        arrays = {"": arrays}
    if key not in arrays:
        fix = f"pass it with {', '.join(map(repr, arrays))}" if arrays else "pass it"
        raise PlanError(f"rank {rank}: array {key!r} is missing; {fix}")
    return arrays[key]


def prepare(job: WireJob, rank: int, given: tuple[Array, ...]) -> dict[str, Array]:
    """Return a dict from the names in `job.wires` to the arrays that `rank` sends, made from `given`. The arrays
    `given` are the rank's parts of a tensor and its companions, such as scales, in the order of `job.held`."""
    wired = job.wired
    names = [key for key, _ in job.wires]
    made = given
    if wired is not None and not wired.as_held.source:
        made = _make_wires(job, wired, rank, given)
    return dict(zip(names, made, strict=True))


def _make_wires(
    job: WireJob, wired: Wired, rank: int, given: tuple[Array, ...]
) -> tuple[Array, ...]:
    """The wire tensors that the transform makes. Raises PlanError if they are not as declared."""
    arrays = _read_all(given, job.held, rank)
    packed = []
    for array, (_, layout) in zip(arrays, job.held, strict=True):
        # This may be the caller's memory, so a function that works in place would change the source.
        read_only = pack(layout, rank, array).view()
        read_only.flags.writeable = False
        packed.append(read_only)
    if not packed[0].size:
        empty = _make_empty(job.wires, rank)
        # A position that stands for a whole dimension exists even on a rank that holds nothing. Without such positions
        # there is nothing to compute.
        if not any(wire.size for wire in empty):
            return empty
    values: Any = tuple(packed) if len(packed) > 1 else packed[0]
    made = wired.transform.prepare(values, wired.src, wired.dst)
    arrays = tuple(made)
    if len(arrays) != len(job.wires):
        what = f"{label(job.tensor)}: {wired.transform} makes {plural(arrays, 'array')}"
        fix = "make one array per component"
        raise PlanError(f"{what} for {plural(job.wires, 'component')}; {fix}")
    return _read_all(arrays, job.wires, rank)


def _make_empty(wires: Named, rank: int) -> tuple[Array, ...]:
    """The wire tensors of a rank that holds nothing, for which no function of a transform is called."""
    made = []
    for _, layout in wires:
        shape = layout.local_shape(rank)
        empty = np.zeros(shape, numpy_type(layout.dtype))
        made.append(empty)
    return tuple(made)


def _read_all(given: Sequence[object], held: Named, rank: int) -> tuple[Array, ...]:
    """The arrays, checked against the layouts. Raises PlanError for one of another shape or dtype."""
    checked = []
    for array, (key, layout) in zip(given, held, strict=True):
        checked.append(_read_local(array, key, layout, rank))
    return tuple(checked)


def _read_local(given: object, key: str, layout: Layout, rank: int) -> Array:
    what = f"rank {rank}: array {key!r}"
    array = read_elements(given, layout.dtype, what)
    expected = layout.local_shape(rank)
    if array.shape != expected:
        raise PlanError(
            f"{what} has shape {array.shape}, but {layout} gives this rank {expected}; "
            f"pass an array of that shape"
        )
    return array


def finalize(
    job: WireJob, rank: int, given: Sequence[Array], into: Sequence[Array | None]
) -> dict[str, Array]:
    """Return a dict from the names in `job.held` (a tensor and its companions) to arrays made from `given`, the arrays
    that `rank` received, in the order of `job.wires`. `into` has an item per name: the array in which to write and
    return the result, or None for a result in other memory."""
    wired = job.wired
    made = {}
    if wired is None or wired.as_held.destination:
        # What arrives has the layouts of `job.held` already, and nothing is computed.
        for array, out, (key, layout) in zip(given, into, job.held, strict=True):
            made[key] = array
            if out is not None:
                packed = pack(layout, rank, array)
                made[key] = _put(job, key, layout, rank, packed, out)
        return made
    packed_arrays = _compute(job, wired, rank, given)
    for packed, out, (key, layout) in zip(packed_arrays, into, job.held, strict=True):
        if out is None:
            shape = layout.local_shape(rank)
            out = np.zeros(shape, packed.dtype)
        made[key] = _put(job, key, layout, rank, packed, out)
    return made


def _put(job: WireJob, key: str, layout: Layout, rank: int, packed: Array, out: Array) -> Array:
    """Write the packed values into the local array `out`, and return it."""
    is_untransformed = job.wired is None
    if is_untransformed:
        unpack(layout, rank, packed, out)
        return out
    # Arrays of another library, such as ml_dtypes, are viewed as plain words on both sides.
    target = _read_local(out, key, layout, rank)
    values = read_elements(packed, layout.dtype, f"array {key!r}")
    unpack(layout, rank, values, target)
    return out


def _compute(job: WireJob, wired: Wired, rank: int, given: Sequence[Array]) -> list[Array]:
    """The rank's packed arrays of the tensor and its companions."""
    arrays = _read_all(given, job.wires, rank)
    shapes = [_count_held(layout, rank) for _, layout in job.held]
    holds_elements = any(0 not in shape for shape in shapes)
    if holds_elements:
        made = wired.transform.finalize(arrays, wired.src, wired.dst)
        return _read_made(job, wired, rank, made, shapes)
    # On a rank that holds nothing, no function is called: its arrays are empty.
    dtypes = [numpy_type(layout.dtype) for _, layout in job.held]
    return list(map(np.zeros, shapes, dtypes))


def _count_held(layout: Layout, rank: int) -> Shape:
    """How many positions of each dimension the rank holds."""
    return tuple(runs.size for runs in layout.runs(rank))


def _read_made(
    job: WireJob, wired: Wired, rank: int, made: Any, shapes: Sequence[Shape]
) -> list[Array]:
    """The arrays that a transform made. Raises PlanError if they are not as declared."""
    values = tuple(made) if len(job.held) > 1 else (made,)
    if len(values) != len(job.held):
        what = f"{wired.transform} makes {plural(values, 'array')} of {job.key!r}"
        fix = "make one array per tensor"
        raise PlanError(f"{what}, which is held as {plural(job.held, 'tensor')}; {fix}")
    packed = []
    for value, expected, (key, layout) in zip(values, shapes, job.held, strict=True):
        what = f"the result of {wired.transform} for {key!r}"
        array = read_elements(value, layout.dtype, what)
        _check_shape(what, array.shape, expected, rank)
        packed.append(array)
    return packed


def _check_shape(what: str, found: Shape, expected: Shape, rank: int) -> None:
    """Raise PlanError if the shape is not what the rank holds."""
    if found != expected:
        fix = "return an array of that shape"
        raise PlanError(f"{what} has shape {found}, but rank {rank} holds {expected}; {fix}")
