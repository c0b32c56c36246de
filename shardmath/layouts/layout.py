"""Layout: which ranks hold which elements of one tensor.

1. A layout is shape + dtype + mesh + the stages of digits of each dimension + the Partial axes.
2. Three spellings (`spelling`) make the same value: a tuple with one placement per mesh axis; a mapping
   from axis, or tuple of axes, to placement; text.
3. One tuple with StridedShard has two readings: `"placement"` applies the splits as written, `"order"`
   decodes the order of splits that the strides stand for (what FSDP2 stores). They differ if sizes do
   not divide evenly.
4. Layouts are interned: equal layouts are one object. Equality is structural; `equivalent` compares
   what ranks hold.
5. What a rank holds is a product over dimensions, each depending only on the axes that divide it.

>>> a = Layout((9, 4), Mesh(dp=4, tp=2), "(tp dp n) h", dtype="bfloat16")
>>> print(a)
bfloat16[9, 4] (tp dp n) h on dp=4 tp=2
>>> a.local_shape(6), [str(runs) for runs in a.runs(7)]
((0, 4), ['[8:9]', '[0:4]'])
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, SupportsIndex, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardmath.base import dtypes
from shardmath.base.arguments import as_integer, known, listed
from shardmath.base.drawn import html, svg
from shardmath.base.errors import LayoutError, MeshError
from shardmath.base.memo import memo
from shardmath.base.public import public
from shardmath.base.text import shown
from shardmath.layouts.algebra.dimension import Dimension
from shardmath.layouts.algebra.mesh import Mesh
from shardmath.layouts.algebra.runs import Runs
from shardmath.layouts.notation import Partials
from shardmath.layouts.placement import Placement
from shardmath.layouts.reader import Rules
from shardmath.layouts.spelling import AxisSpec, Reading, Stored, from_placements, from_text
from shardmath.layouts.unparse import rule_names, unparse

if TYPE_CHECKING:
    from shardmath.layouts.algebra.box import Box

__all__ = ["Layout", "intern"]

MOST_BYTES = 1 << 56
"""The largest tensor; sums over tensors and ranks stay exact in 64 bits."""

_Key: TypeAlias = tuple[tuple[int, ...], str, Mesh, tuple[Dimension, ...], Partials]
_interned: weakref.WeakValueDictionary[_Key, Layout] = weakref.WeakValueDictionary()


@public
@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False, repr=False, init=False)
class Layout:
    """A layout: which ranks hold which elements of a tensor of global shape `shape`.

    `spec` is one of the three spellings; `dtype` a numpy- or torch-style name; `reading` says what
    StridedShard means; `stored` gives, per dimension, a padded length or the Runs from stored to logical
    positions; `rules` names the placements that text refers to by `@name`.
    Raises LayoutError, PlacementError or NotationError.
    """

    shape: tuple[int, ...]
    dtype: str
    mesh: Mesh
    dims: tuple[Dimension, ...]
    partial: Partials
    _form: Layout | None
    _digest: tuple[str, str] | None  # kept by `holdings.holdings_digest`

    def __new__(
        cls,
        shape: Iterable[int],
        mesh: Mesh,
        spec: AxisSpec,
        *,
        dtype: object = "float32",
        reading: Reading = "placement",
        stored: Stored | None = None,
        rules: Rules | None = None,
    ) -> Layout:
        sizes = _read_shape(shape)
        _check_arguments(mesh, spec, reading)
        name = dtypes.canonical(dtype)
        if isinstance(spec, str):
            dims, partial = from_text(spec, sizes, mesh, stored, rules)
        else:
            held = {} if stored is None else stored
            dims, partial = from_placements(spec, sizes, mesh, reading, held)
        return intern(sizes, name, mesh, dims, partial)

    def __repr__(self) -> str:
        rules = f", rules={self.rules!r}" if self.rules else ""
        return f"Layout({self.shape}, {self.mesh!r}, {self.text!r}, dtype={self.dtype!r}{rules})"

    def __str__(self) -> str:
        axes = " ".join(f"{name}={n}" for name, n in self.mesh.axes) or "one rank"
        return f"{self.dtype}{list(self.shape)} {self.text or 'scalar'} on {axes}"

    def __reduce__(self) -> tuple[object, ...]:
        return intern, (self.shape, self.dtype, self.mesh, self.dims, self.partial)

    def svg(self) -> str:
        """Return a picture of which ranks hold which elements, as an SVG document."""
        return svg(self)

    def _repr_html_(self) -> str:
        return html(self)

    @property
    def text(self) -> str:
        """The layout as text in canonical notation. Reading the text gives this layout; if it has custom placements,
        reading needs the same `rules` (a mapping from name in the text to placement)."""
        return unparse(self.dims, self.partial, self.mesh.shape)

    @property
    def rules(self) -> dict[str, Placement]:
        """The custom placements to which the layout's text refers as `@name`, as a dict whose keys are the names
        without @."""
        return {name: by for by, name in rule_names(self.dims).items()}  # type: ignore[misc]

    @property
    def ndim(self) -> int:
        """The number of dimensions of the tensor."""
        return len(self.shape)

    @property
    def form(self) -> Layout:
        """The layout with each rank replaced by its position in the mesh.

        Layouts that differ only in ranks share one form.
        """
        if self._form is None:
            mesh = _number_ranks(self.mesh.axes)
            form = intern(self.shape, self.dtype, mesh, self.dims, self.partial)
            object.__setattr__(self, "_form", form)
        return self._form  # type: ignore[return-value]

    @property
    def itemsize(self) -> int:
        """The number of bytes per element."""
        return dtypes.ITEMSIZE[self.dtype]

    @property
    def op(self) -> str | None:
        """The reduction, such as "sum", that makes the tensor from the values of ranks along the Partial axes; None if
        the layout has no Partial axes."""
        return self.partial[0][1] if self.partial else None

    @property
    def addend_axes(self) -> tuple[str, ...]:
        """The names of the Partial axes along which several ranks hold addends. If there are none, ranks hold whole
        values: a Partial axis of one rank makes no difference."""
        return tuple(name for name, _ in self.partial if self.mesh.axis_size(name) > 1)

    @property
    def free_axes(self) -> tuple[str, ...]:
        """The names of the mesh axes that neither divide a dimension nor are Partial: along them, ranks hold copies."""
        used = {name for name, _ in self.partial}
        for dim in self.dims:
            used.update(dim.axes)
        return tuple(name for name in self.mesh.shape if name not in used)

    def runs(self, rank: int) -> tuple[Runs, ...]:
        """Return the global position of each local position of `rank`, as one Runs per dimension.

        Raises MeshError for a rank outside the mesh.
        """
        return _runs(self, as_integer(rank, "rank", MeshError))

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """Return the shape of the local tensor of `rank`, padding included.

        Raises MeshError for a rank outside the mesh.
        """
        runs = self.runs(rank)
        return tuple(map(len, runs))

    def indices(self, rank: int) -> tuple[NDArray[np.int64], ...]:
        """Return the global index of each local position of `rank`, -1 in holes, as one int64 array per dimension."""
        runs = self.runs(rank)
        return tuple(dim_runs.indices() for dim_runs in runs)

    def boxes(self, rank: int) -> tuple[tuple[Box, Box], ...]:
        """Return the elements that `rank` holds, as pairs (local box, global box) of equal shape. A box has one (start,
        stop) per dimension; pairs are in row-major order of the local box.

        Local boxes are disjoint, and so are global ones; no box contains a hole. A scalar is one pair of
        boxes without dimensions. Raises MeshError for a rank outside the mesh.

        >>> Layout((6, 4), Mesh(tp=2), "(2 tp n) h").boxes(1)
        ((((0, 1), (0, 4)), ((2, 3), (0, 4))), (((1, 2), (0, 4)), ((5, 6), (0, 4))))
        """
        by_dim = [runs.segments for runs in self.runs(rank)]
        pairs = []
        for segments in itertools.product(*by_dim):
            local_box = tuple((local, local + n) for local, _, n in segments)
            global_box = tuple((g, g + n) for _, g, n in segments)
            pairs.append((local_box, global_box))
        return tuple(pairs)

    def holes(self, rank: int) -> bool:
        """Return whether the local tensor of `rank` has holes: positions that hold no element of the tensor."""
        runs = self.runs(rank)
        return any(dim_runs.size < len(dim_runs) for dim_runs in runs)


@memo(512)
def _number_ranks(axes: tuple[tuple[str, int], ...]) -> Mesh:
    """The mesh of these axes over ranks 0, 1, ..., as positions are numbered."""
    return Mesh(dict(axes))


@memo(512)
def _runs(layout: Layout, rank: int) -> tuple[Runs, ...]:
    coords = layout.mesh.coords(rank)
    return tuple(dim.runs(coords) for dim in layout.dims)


def intern(
    shape: tuple[int, ...], dtype: str, mesh: Mesh, dims: tuple[Dimension, ...], partial: Partials
) -> Layout:
    """Return the Layout with these fields, the same object for equal fields. `dtype` must be a full name, such as
    "float32", and `dims` must not contain cuts that change nothing.

    Raises LayoutError if the fields contradict each other.
    """
    key = (shape, dtype, mesh, dims, partial)
    layout = _interned.get(key)
    if layout is None:
        _check_axes(mesh, dims, partial)
        _check_size(shape, dtype, dims)
        layout = object.__new__(Layout)
        for name, value in zip(("shape", "dtype", "mesh", "dims", "partial"), key, strict=True):
            object.__setattr__(layout, name, value)
        object.__setattr__(layout, "_form", None)
        object.__setattr__(layout, "_digest", None)
        layout = _interned.setdefault(key, layout)
    return layout


def _read_shape(shape: object) -> tuple[int, ...]:
    """The sizes as Python's integers; a single number is one size."""
    if isinstance(shape, SupportsIndex) and not isinstance(shape, Iterable):
        items: tuple[object, ...] = (shape,)
    else:
        items = listed(shape, "sizes", LayoutError)
    sizes = tuple(as_integer(n, f"a size of shape {items}", LayoutError) for n in items)
    if min(sizes, default=0) < 0:
        raise LayoutError(f"shape {sizes} has a size of {min(sizes)}; give sizes of 0 or more")
    return sizes


def _check_arguments(mesh: object, spec: object, reading: object) -> None:
    """Raise LayoutError for a mesh, spec or reading of another type."""
    if not isinstance(mesh, Mesh):
        raise LayoutError(
            f"mesh is {shown(mesh)}; give a shardmath.Mesh, for example Mesh(dp=4, tp=2)"
        )
    if known(reading, ("placement", "order")) is None:
        raise LayoutError(f"reading={shown(reading)} is not known; use 'placement' or 'order'")
    is_spec = isinstance(spec, str | Sequence | Mapping)
    # Sequences, but not of placements.
    if not is_spec or isinstance(spec, bytes | bytearray | memoryview | range):
        raise LayoutError(
            f"spec is {shown(spec)}; "
            f"give text, one placement per mesh axis, or a mapping from axis to placement"
        )


def _check_size(shape: tuple[int, ...], dtype: str, dims: tuple[Dimension, ...]) -> None:
    """Raise LayoutError for more than MOST_BYTES: bytes are counted in 64 bits."""
    for sizes in (shape, tuple(dim.stored_size for dim in dims)):
        nbytes = math.prod(sizes) * dtypes.ITEMSIZE[dtype]
        if nbytes > MOST_BYTES:
            raise LayoutError(
                f"{dtype}{list(sizes)} has more than {MOST_BYTES} bytes; store it as several smaller tensors"
            )


def _check_axes(mesh: Mesh, dims: tuple[Dimension, ...], partial: Partials) -> None:
    """Raise LayoutError unless each axis has one use, and all Partial axes wait for one reduction."""
    uses = [(name, f"dimension {d}") for d, dim in enumerate(dims) for name in dim.axes]
    uses += [(name, f"Partial({op!r})") for name, op in partial]
    use_of: dict[str, str] = {}
    for name, use in uses:
        if name in use_of:
            raise LayoutError(
                f"mesh axis {name!r} is used in {use_of[name]} and in {use}; leave it out of one"
            )
        use_of[name] = use
    if len({op for _, op in partial}) > 1:
        waiting = ", ".join(f"{op} on {name}" for name, op in partial)
        raise LayoutError(
            f"Partial axes have different reductions, {waiting}; give all the same reduction"
        )
