"""Layout: who holds what of one tensor.

1. A layout is shape + dtype + mesh + the stages of digits of each dimension + the Partial axes.
2. Three spellings make the same value: a tuple with one placement a mesh axis, applied left to right (DTensor);
   a mapping from axis, or tuple of axes, to placement, applied in its order; text.
3. One tuple with StridedShard has two readings: `"placement"` applies the splits as written, `"order"` decodes the
   order of splits that the strides stand for (what FSDP2 stores). They differ where sizes do not divide.
4. Layouts are interned: equal layouts are one object. Equality is structural; `equivalent` compares what ranks hold.
5. What a rank holds is a product over dimensions, each depending only on the axes that divide it.

>>> a = Layout((9, 4), Mesh(dp=4, tp=2), "(tp dp n) h", dtype="bfloat16")
>>> print(a)
bfloat16[9, 4] (tp dp n) h on dp=4 tp=2
>>> a.local_shape(6), [str(runs) for runs in a.runs(7)]
((0, 4), ['[8:9]', '[0:4]'])
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, SupportsIndex, TypeAlias
from typing import cast as typed

import numpy as np
from numpy.typing import NDArray

from shardmath.algebra.box import Box
from shardmath.algebra.dimension import Chunks, Digit, Dimension, Stage, divided
from shardmath.algebra.mesh import Mesh
from shardmath.algebra.partition import partition
from shardmath.algebra.runs import Runs, identity, restrict
from shardmath.base import dtypes
from shardmath.base.digest import digest
from shardmath.base.drawn import html, svg
from shardmath.base.errors import LayoutError, MeshError, PlacementError
from shardmath.base.given import instance, known, listed, mapping, plural, shown, text
from shardmath.base.integers import whole
from shardmath.base.memo import memo
from shardmath.base.public import public
from shardmath.layouts.notation import NAMES, Partials, Rules, padded, parse, rule_names, unparse
from shardmath.layouts.placement import (
    Partial,
    Placement,
    Replicate,
    Shard,
    Spec,
    StridedShard,
    check_protocol,
    stage_of,
)

__all__ = [
    "AxisSpec",
    "Layout",
    "Reading",
    "cast",
    "equivalent",
    "holdings_digest",
    "relabelled",
    "repartialed",
    "sliced",
    "transposed",
    "window",
]

Reading: TypeAlias = Literal["placement", "order"]
AxisSpec: TypeAlias = (
    str
    | Sequence[Spec]
    | Mapping[str, Spec]
    | Mapping[tuple[str, ...], Spec]
    | Mapping[str | tuple[str, ...], Spec]
)
"""The three spellings: text, one placement a mesh axis, or axis -> placement."""

MOST_BYTES = 1 << 56
"""Of one tensor; sums over tensors and ranks stay exact in 64 bits."""

_Key: TypeAlias = tuple[tuple[int, ...], str, Mesh, tuple[Dimension, ...], Partials]
_interned: weakref.WeakValueDictionary[_Key, Layout] = weakref.WeakValueDictionary()


@public
@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False, repr=False, init=False)
class Layout:
    """Who holds what of a tensor of global shape `shape`.

    `spec` is one of the three spellings; `dtype` a numpy- or torch-style name; `reading` says what StridedShard means;
    `stored` gives, per dimension, a padded length or the Runs from stored to logical positions; `rules` names the
    placements that text refers to by `@name`. Raises LayoutError, PlacementError or NotationError.
    """

    shape: tuple[int, ...]
    dtype: str
    mesh: Mesh
    dims: tuple[Dimension, ...]
    partial: Partials
    _form: Layout | None
    _digest: tuple[str, str] | None

    def __new__(
        cls,
        shape: Iterable[int],
        mesh: Mesh,
        spec: AxisSpec,
        *,
        dtype: object = "float32",
        reading: Reading = "placement",
        stored: Mapping[int, int | Runs] | None = None,
        rules: Rules | None = None,
    ) -> Layout:
        sizes = _shape(shape)
        if not isinstance(mesh, Mesh):
            raise LayoutError(
                f"mesh is {shown(mesh)}; give a shardmath.Mesh, for example Mesh(dp=4, tp=2)"
            )
        if known(reading, ("placement", "order")) is None:
            raise LayoutError(
                f"reading={shown(reading)} is not a reading; use 'placement' or 'order'"
            )
        if not isinstance(spec, str | Sequence | Mapping) or isinstance(
            spec, bytes | bytearray | memoryview | range
        ):
            raise LayoutError(
                f"spec is {shown(spec)}; give text, one placement a mesh axis, or a mapping from axis to placement"
            )
        name = dtypes.canonical(dtype)
        if isinstance(spec, str):
            dims, partial = _from_text(spec, sizes, mesh, stored, rules)
        else:
            dims, partial = _from_placements(
                spec, sizes, mesh, reading, {} if stored is None else stored
            )
        return _intern(sizes, name, mesh, dims, partial)

    def __repr__(self) -> str:
        rules = f", rules={self.rules!r}" if self.rules else ""
        return f"Layout({self.shape}, {self.mesh!r}, {self.text!r}, dtype={self.dtype!r}{rules})"

    def __str__(self) -> str:
        axes = " ".join(f"{name}={n}" for name, n in self.mesh.axes) or "one rank"
        return f"{self.dtype}{list(self.shape)} {self.text or 'scalar'} on {axes}"

    def __reduce__(self) -> tuple[object, ...]:
        return _intern, (self.shape, self.dtype, self.mesh, self.dims, self.partial)

    def svg(self) -> str:
        """A picture as an SVG document: which ranks hold which elements."""
        return svg(self)

    def _repr_html_(self) -> str:
        return html(self)

    @property
    def text(self) -> str:
        """The canonical notation; reading it back with the same `rules` gives this layout."""
        return unparse(self.dims, self.partial, self.mesh.shape)

    @property
    def rules(self) -> dict[str, Placement]:
        """The placements that `text` refers to by `@name`."""
        return {name: by for by, name in rule_names(self.dims).items()}  # type: ignore[misc]

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    @property
    def form(self) -> Layout:
        """The same layout with ranks named by their position in the mesh: equal forms differ in ranks alone."""
        if self._form is None:
            form = _intern(
                self.shape, self.dtype, _positions(self.mesh.axes), self.dims, self.partial
            )
            object.__setattr__(self, "_form", form)
        return self._form  # type: ignore[return-value]

    @property
    def itemsize(self) -> int:
        """Bytes an element."""
        return dtypes.ITEMSIZE[self.dtype]

    @property
    def op(self) -> str | None:
        """The reduction that the Partial axes wait for, None without any."""
        return self.partial[0][1] if self.partial else None

    @property
    def free_axes(self) -> tuple[str, ...]:
        """The mesh axes along which ranks hold the same: neither dividing nor Partial, in mesh order."""
        used = {name for dim in self.dims for name in dim.axes} | {name for name, _ in self.partial}
        return tuple(name for name in self.mesh.shape if name not in used)

    def runs(self, rank: int) -> tuple[Runs, ...]:
        """One Runs a dimension: which global positions lie at which local ones.

        Raises MeshError for a rank outside the mesh.
        """
        return _runs(self, whole(rank, "rank", MeshError))

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """Shape of the local tensor, padding included. Raises MeshError for a rank outside the mesh."""
        return tuple(map(len, self.runs(rank)))

    def indices(self, rank: int) -> tuple[NDArray[np.int64], ...]:
        """One int64 array a dimension: the global index of each local position, -1 for none."""
        return tuple(runs.indices() for runs in self.runs(rank))

    def holes(self, rank: int) -> bool:
        """Whether some local cells are not this tensor's."""
        return any(runs.size < len(runs) for runs in self.runs(rank))


@memo(512)
def _positions(axes: tuple[tuple[str, int], ...]) -> Mesh:
    return Mesh(dict(axes))


@memo(512)
def _runs(layout: Layout, rank: int) -> tuple[Runs, ...]:
    coords = layout.mesh.coords(rank)
    return tuple(dim.runs(coords) for dim in layout.dims)


def _intern(
    shape: tuple[int, ...], dtype: str, mesh: Mesh, dims: tuple[Dimension, ...], partial: Partials
) -> Layout:
    """The one Layout of these canonical fields."""
    key = (shape, dtype, mesh, dims, partial)
    found = _interned.get(key)
    if found is None:
        _check_axes(mesh, dims, partial)
        _check_size(shape, dtype, dims)
        found = object.__new__(Layout)
        for name, value in zip(("shape", "dtype", "mesh", "dims", "partial"), key, strict=True):
            object.__setattr__(found, name, value)
        object.__setattr__(found, "_form", None)
        object.__setattr__(found, "_digest", None)
        found = _interned.setdefault(key, found)
    return found


def _shape(shape: object) -> tuple[int, ...]:
    one = isinstance(shape, SupportsIndex) and not isinstance(shape, Iterable)
    given = (shape,) if one else listed(shape, "sizes", LayoutError)
    sizes = tuple(whole(n, f"a size of shape {given}", LayoutError) for n in given)
    if min(sizes, default=0) < 0:
        raise LayoutError(f"shape {sizes} has {min(sizes)}; sizes are >= 0")
    return sizes


def _check_size(shape: tuple[int, ...], dtype: str, dims: tuple[Dimension, ...]) -> None:
    """Bytes are counted in 64 bits."""
    for sizes in (shape, tuple(dim.stored_size for dim in dims)):
        if math.prod(sizes) * dtypes.ITEMSIZE[dtype] > MOST_BYTES:
            raise LayoutError(
                f"{dtype}{list(sizes)} has more than {MOST_BYTES} bytes; divide the tensor"
            )


def _check_axes(mesh: Mesh, dims: tuple[Dimension, ...], partial: Partials) -> None:
    """Each axis has one use, and all reductions are one."""
    used: dict[str, str] = {}
    uses = [(name, f"dimension {d}") for d, dim in enumerate(dims) for name in dim.axes]
    for name, use in uses + [(name, f"Partial({op!r})") for name, op in partial]:
        if name in used:
            raise LayoutError(
                f"mesh axis {name!r} is used in {used[name]} and in {use}; an axis has one use"
            )
        used[name] = use
    ops = dict.fromkeys(op for _, op in partial)
    if len(ops) > 1:
        shown = ", ".join(f"{op} on {name}" for name, op in partial)
        raise LayoutError(
            f"Partial axes wait for different reductions: {shown}; reduce one of them first"
        )


def _from_text(
    spec: str,
    shape: tuple[int, ...],
    mesh: Mesh,
    stored: Mapping[int, int | Runs] | None,
    rules: Rules | None,
) -> tuple[tuple[Dimension, ...], Partials]:
    if stored is not None and len(_mapping(stored, "stored=", "dimension to a length or Runs")):
        raise LayoutError(
            f"stored={shown(stored)} beside the text {spec!r}; write it in the text: (n)=8 or (n)=<0:4 -4>"
        )
    if rules is None or not _mapping(rules, "rules=", "name to placement"):
        return _parsed(text(spec, "spec", LayoutError), shape, mesh.axes)
    for by in rules.values():
        check_protocol(by)
    return parse(spec, shape, mesh.shape, rules)


def _mapping(given: object, what: str, of: str) -> Mapping[Any, Any]:
    return mapping(given, what, of, LayoutError)


@memo()
def _parsed(
    spec: str, shape: tuple[int, ...], axes: tuple[tuple[str, int], ...]
) -> tuple[tuple[Dimension, ...], Partials]:
    return parse(spec, shape, dict(axes), {})


def _key_axes(key: object) -> tuple[str, ...]:
    axes = (key,) if isinstance(key, str) else key
    if not isinstance(axes, tuple) or not axes or not all(isinstance(name, str) for name in axes):
        raise LayoutError(
            f"{shown(key)} is no mesh axis; the keys of a spec are axis names or tuples of them"
        )
    return tuple(text(name, "a mesh axis", LayoutError) for name in axes)


def _is_axes(entry: object) -> bool:
    """Whether it is a name, or a tuple of names."""
    several = isinstance(entry, tuple) and len(entry) > 0
    return isinstance(entry, str) or (
        several and all(isinstance(name, str) for name in typed(Iterable[object], entry))
    )


def _of_axes(spec: Sequence[object]) -> str:
    """What to write instead of the mesh axes of each dimension, as JAX's PartitionSpec lists them."""
    words = []
    for d, entry in enumerate(spec):
        axes = (entry,) if isinstance(entry, str) else entry if isinstance(entry, tuple) else ()
        free = NAMES[d] if d < len(NAMES) else f"n{d}"
        words.append(f"({' '.join(map(str, axes))} {free})" if axes else free)
    what = f"spec {shown(tuple(spec))} names mesh axes by dimension, as JAX's PartitionSpec; a tuple has a placement"
    return f"{what} for each mesh axis: write the text {' '.join(words)!r}"


_Named: TypeAlias = list[tuple[tuple[str, ...], Spec]]


def _named(spec: AxisSpec, mesh: Mesh) -> _Named:
    """(axes, placement) in the order in which they are applied."""
    pairs: _Named
    if not isinstance(spec, Mapping) and any(map(_is_axes, spec)):
        raise LayoutError(_of_axes(typed(Sequence[object], spec)))
    if isinstance(spec, Mapping):
        pairs = [(_key_axes(key), value) for key, value in spec.items()]
    elif len(spec) == len(mesh.axes):
        pairs = list(
            zip(((name,) for name in mesh.shape), typed(Sequence[Spec], spec), strict=True)
        )
    else:
        axes = ", ".join(mesh.shape) or "none"
        what = f"{plural(spec, 'placement')} {tuple(spec)} for {plural(mesh.axes, 'mesh axis', 'mesh axes')} ({axes})"
        raise LayoutError(f"{what}; give one an axis, or a mapping")
    for names, value in pairs:
        for name in names:
            if name not in mesh.shape:
                shown = " ".join(f"{axis}={n}" for axis, n in mesh.axes)
                raise LayoutError(
                    f"{value} on axis {name!r}: mesh {shown} has no such axis; "
                    f"its axes are {', '.join(mesh.shape) or 'none'}"
                )
    return pairs


def _from_placements(
    spec: AxisSpec,
    shape: tuple[int, ...],
    mesh: Mesh,
    reading: Reading,
    stored: Mapping[int, int | Runs],
) -> tuple[tuple[Dimension, ...], Partials]:
    pairs = _named(spec, mesh)
    _check_once(pairs)
    by_dim: list[_Named] = [[] for _ in shape]
    for axes, value in pairs:
        if not isinstance(value, Replicate | Partial):
            by_dim[_dim(value, shape)].append((axes, value))
    partial = {
        name: value.op for axes, value in pairs if isinstance(value, Partial) for name in axes
    }
    kept = _stored(stored, shape)
    dims = []
    for d, (n, named) in enumerate(zip(shape, by_dim, strict=True)):
        stages = _ordered(named, mesh) if reading == "order" else _written(named, mesh)
        size = n if kept[d] is None else len(kept[d] or ())
        dims.append(_dimension(d, shape, size, stages, kept[d]))
    return tuple(dims), tuple((name, partial[name]) for name in mesh.shape if name in partial)


def _dimension(
    d: int, shape: tuple[int, ...], size: int, stages: list[Stage], stored: Runs | None
) -> Dimension:
    try:
        return Dimension(shape[d], (divided(size, stages),), stored)
    except PlacementError as error:
        raise PlacementError(f"dimension {d} of shape {shape}: {error}") from None


def _check_once(pairs: _Named) -> None:
    seen: dict[str, Spec] = {}
    for axes, value in pairs:
        for name in axes:
            if name in seen:
                raise LayoutError(
                    f"mesh axis {name!r} is used twice, by {seen[name]} and {value}; an axis has one placement"
                )
            seen[name] = value


def _dim(value: Placement, shape: tuple[int, ...]) -> int:
    dim = getattr(value, "dim", None)
    if isinstance(dim, bool) or not isinstance(dim, SupportsIndex):
        raise PlacementError(
            f"{value!r} is not a placement; give it `dim` and `split(n, parts) -> tuple of Runs`"
        )
    d = whole(dim, f"the dimension of {shown(value)}", PlacementError)
    if not -len(shape) <= d < len(shape):
        raise LayoutError(
            f"{value} divides dimension {d}, shape {shape} has {len(shape)}; use {-len(shape)}..{len(shape) - 1}"
        )
    return d % len(shape)


def _stored(stored: Mapping[int, int | Runs], shape: tuple[int, ...]) -> list[Runs | None]:
    out: list[Runs | None] = [None] * len(shape)
    for key, value in _mapping(stored, "stored=", "dimension to a length or Runs").items():
        d = whole(key, "a dimension of stored=", LayoutError)
        if not -len(shape) <= d < len(shape):
            raise LayoutError(
                f"stored= names dimension {d}, shape {shape} has {len(shape)}; use {-len(shape)}..{len(shape) - 1}"
            )
        if out[d] is not None:
            raise LayoutError(
                f"stored= names dimension {d % len(shape)} of shape {shape} twice; name it once"
            )
        size = f"the stored size of dimension {d}"
        out[d] = (
            value if isinstance(value, Runs) else padded(shape[d], whole(value, size, LayoutError))
        )
    return out


def _sizes(axes: tuple[str, ...], mesh: Mesh) -> tuple[int, ...]:
    return tuple(mesh.axis_size(name) for name in axes)


def _written(named: _Named, mesh: Mesh) -> list[Stage]:
    """A stage a placement, as written."""
    return [stage_of(value, axes, _sizes(axes, mesh)) for axes, value in named]  # type: ignore[arg-type]


def _ordered(named: _Named, mesh: Mesh) -> list[Stage]:
    """The order reading: all Shard and StridedShard of the dimension as one stage, in the order they stand for.

    Right to left, each goes where the product of the sizes before it is its split factor (torch 2.13
    `_StridedShard` decoding). Raises PlacementError where there is no such place.
    """
    if not any(isinstance(value, StridedShard) for _, value in named):
        return _written(named, mesh)
    order: list[tuple[str, ...]] = []
    for axes, value in reversed(named):
        if not isinstance(value, Shard | StridedShard):
            raise PlacementError(
                f"reading='order': {value} beside {StridedShard.__name__} on one dimension; use reading='placement'"
            )
        factor = value.split_factor if isinstance(value, StridedShard) else 1
        order.insert(_place(order, factor, value, mesh), axes)
    return [
        tuple(
            Digit(Chunks(math.prod(_sizes(axes, mesh))), axes, _sizes(axes, mesh)) for axes in order
        )
    ]


def _place(order: list[tuple[str, ...]], factor: int, value: Spec, mesh: Mesh) -> int:
    product = 1
    for at, axes in enumerate([*order, ()]):
        if product == factor:
            return at
        product *= math.prod(_sizes(axes, mesh))
    sizes = (
        " ".join(f"{'*'.join(axes)}={math.prod(_sizes(axes, mesh))}" for axes in order) or "none"
    )
    fix = "use reading='placement', which applies the splits as written"
    raise PlacementError(
        f"reading='order': {value} stands for no order: the axes right of it on its dimension are {sizes}; {fix}"
    )


def _holdings(layout: Layout) -> tuple[object, ...]:
    """What each rank holds, spelled in one way."""
    ranks = layout.mesh.ranks
    ascending = tuple(sorted(ranks))
    order = None if ascending == ranks else tuple(np.argsort(ranks).tolist())
    return _held_by_position(layout.form, order), ascending


_Order: TypeAlias = tuple[int, ...] | None
"""An order of positions; None for as they are."""


def _held_by_position(form: Layout, order: _Order) -> tuple[object, ...]:
    """Of each position, in this order: its part of each dimension and its addend."""
    dims = tuple(_numbered(dim, form.mesh, order) for dim in form.dims)
    return form.shape, form.dtype, dims, _addends(form, order)


def _addends(form: Layout, order: _Order) -> tuple[object, ...]:
    """What the Partial axes wait for, and the addend of each position; nothing where there is one addend."""
    if not form.partial:
        return ()
    at = form.mesh.coordinate(name for name, _ in form.partial)
    addend = at if order is None else at[list(order)]
    return (form.op, *addend.tolist()) if addend.any() else ()


@memo()
def _numbered(
    dim: Dimension, mesh: Mesh, order: _Order
) -> tuple[tuple[Runs, ...], tuple[int, ...]]:
    """The parts in the order of the first position that holds them, and each position's number."""
    parts = partition(dim)
    if len(parts.parts) == 1:
        return parts.parts, ()
    at = parts.by_rank(mesh)
    held = (at if order is None else at[list(order)]).tolist()
    number = {part: i for i, part in enumerate(dict.fromkeys(held))}
    return tuple(parts.parts[part] for part in number), tuple(map(number.__getitem__, held))


@memo()
def _digest_of_dimension(dim: Dimension, mesh: Mesh, order: _Order) -> str:
    return digest(_numbered(dim, mesh, order))


@memo()
def _digest_by_position(form: Layout, order: _Order) -> str:
    dims = tuple(_digest_of_dimension(dim, form.mesh, order) for dim in form.dims)
    return digest((form.shape, form.dtype, form.mesh.size, dims, _addends(form, order)))


@memo()
def _digest_of_ranks(mesh: Mesh) -> tuple[_Order, str]:
    """The order of positions by ascending rank, None if they are so, and a digest of the ranks."""
    ascending = tuple(sorted(mesh.ranks))
    order = None if ascending == mesh.ranks else tuple(np.argsort(mesh.ranks).tolist())
    return order, digest(ascending)


def holdings_digest(layout: Layout) -> tuple[str, str]:
    """Digests of what ranks hold and of the order of addends, and of the ranks; the same for every spelling."""
    if layout._digest is None:
        order, ranks = _digest_of_ranks(layout.mesh)
        object.__setattr__(layout, "_digest", (_digest_by_position(layout.form, order), ranks))
    return layout._digest  # type: ignore[return-value]


def equivalent(a: Layout, b: Layout) -> bool:
    """Whether every rank holds the same of the same tensor, in the same order, under both layouts."""
    for x in (a, b):
        instance(x, Layout, "equivalent compares two layouts", LayoutError)
    return a is b or _holdings(a) == _holdings(b)


def repartialed(layout: Layout, axes: Iterable[str], op: str = "sum") -> Layout:
    """The same division with addends along exactly these axes, waiting for `op`."""
    named = set(axes)
    partial = tuple((name, op) for name in layout.mesh.shape if name in named)
    return _intern(layout.shape, layout.dtype, layout.mesh, layout.dims, partial)


def cast(layout: Layout, dtype: object) -> Layout:
    """The same holdings with elements of another type. Raises LayoutError for an unknown one."""
    _check_layout(layout)
    return _intern(layout.shape, dtypes.canonical(dtype), layout.mesh, layout.dims, layout.partial)


def relabelled(layout: Layout, ranks: Mapping[int, int]) -> Layout:
    """The same layout with every rank renamed; ranks not named keep their number.

    Raises MeshError if two ranks get one name.
    """
    _check_layout(layout)
    return _intern(
        layout.shape, layout.dtype, layout.mesh.relabel(ranks), layout.dims, layout.partial
    )


def transposed(layout: Layout, order: Sequence[int]) -> Layout:
    """The layout of the tensor with its dimensions in another order. Raises LayoutError unless each is named once."""
    _check_layout(layout)
    new = tuple(
        whole(d, "a dimension", LayoutError) for d in listed(order, "dimensions", LayoutError)
    )
    if sorted(new) != list(range(layout.ndim)):
        raise LayoutError(
            f"cannot transpose shape {layout.shape} to {new}; name each of 0..{layout.ndim - 1} once"
        )
    shape = tuple(layout.shape[d] for d in new)
    return _intern(
        shape, layout.dtype, layout.mesh, tuple(layout.dims[d] for d in new), layout.partial
    )


def _check_layout(layout: object) -> None:
    instance(layout, Layout, "give a shardmath.Layout", LayoutError)


def _inside(layout: Layout, box: Box) -> Box:
    """The box, in integers. Raises LayoutError unless it is one of the layout's tensor."""
    _check_layout(layout)
    spans = [
        listed(span, "the start and stop of a box", LayoutError)
        for span in listed(box, "spans", LayoutError)
    ]
    out = [
        tuple(whole(border, f"a border of box {spans}", LayoutError) for border in span)
        for span in spans
    ]
    fits = len(out) == layout.ndim and all(len(span) == 2 for span in out)
    if not fits or any(
        not 0 <= span[0] <= span[-1] <= n for span, n in zip(out, layout.shape, strict=True)
    ):
        raise LayoutError(
            f"box {box} is not inside shape {layout.shape}; give one (start, stop) a dimension"
        )
    return typed(Box, tuple(out))


def window(layout: Layout, box: Box) -> Layout:
    """The same local tensors with holes outside `box`, one (start, stop) per dimension.

    Raises LayoutError for a box that is not inside the tensor.
    """
    box = _inside(layout, box)
    dims = (
        _windowed(dim, lo, hi, 0, dim.size) for dim, (lo, hi) in zip(layout.dims, box, strict=True)
    )
    return _intern(layout.shape, layout.dtype, layout.mesh, tuple(dims), layout.partial)


def sliced(layout: Layout, box: Box) -> Layout:
    """The layout of the slice `box` as a tensor of its own, in the same local tensors: holes outside it.

    Raises LayoutError for a box that is not inside the tensor.
    """
    box = _inside(layout, box)
    dims = (
        _windowed(dim, lo, hi, lo, hi - lo) for dim, (lo, hi) in zip(layout.dims, box, strict=True)
    )
    return _intern(
        tuple(hi - lo for lo, hi in box), layout.dtype, layout.mesh, tuple(dims), layout.partial
    )


def _windowed(dim: Dimension, lo: int, hi: int, origin: int, size: int) -> Dimension:
    kept = restrict(identity(dim.size) if dim.stored is None else dim.stored, lo, hi)
    return Dimension(
        size, dim.fields, Runs(((a, g - origin, n) for a, g, n in kept.segments), len(kept))
    )
