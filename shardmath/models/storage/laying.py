"""Laying: the position of each component in one stored tensor, per dimension and mesh coordinate.

1. A dimension of the stored tensor is a **stack** (of tensors numbered by an index) or corresponds to one dimension of
   its components. A row's words describe the components' dimensions in stored order.
2. A shape is laid out once per row and mesh axes; layers and experts of equal shapes share the result.

>>> from shardmath.models.storage import rows
>>> (row,) = rows.parse("qkv = [q k v] : (tp q + tp k + tp v) h")
>>> laid = lay(row, {"q": (8, 4), "k": (2, 4), "v": (2, 4)}, Frame({"tp": 2}, {}, {}))
>>> laid.shape({"tp": 0}), laid.cuts("k", {"tp": 0})
((6, 4), [(slice(4, 5, 1), slice(0, 4, 1))])
>>> [str(dimension.runs({"tp": 1})) for dimension in laid.dims["k"]]
['[1:2]', '[0:4]']
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from shardmath.base.errors import LayoutError, StoreError
from shardmath.base.memo import memo
from shardmath.base.text import plural
from shardmath.layouts.algebra.dimension import Dimension
from shardmath.layouts.algebra.runs import Runs, restrict
from shardmath.layouts.fitting import Trim, fit, trim
from shardmath.models.storage.cutting import Frame, axes_of, lay_out
from shardmath.models.storage.rows import Row
from shardmath.models.storage.structure import GroupedDim, Number, Structure, list_words

__all__ = ["Laid", "Stack", "give_words", "lay", "order_of", "stack_names"]

Shape: TypeAlias = tuple[int, ...]
Coords: TypeAlias = Mapping[str, int]
_Point: TypeAlias = tuple[int, ...]
"""A coordinate on each of some axes."""
_Sizes: TypeAlias = tuple[tuple[str, int], ...]
"""Names with their sizes, in order."""


@dataclass(frozen=True, slots=True)
class Stack:
    """A stack of `count` tensors, such as experts, along one dimension, and the indices of those that each rank has:
    `held`, by the rank's coordinates on `axes`."""

    index: str
    count: int
    axes: tuple[str, ...]
    held: Mapping[_Point, Runs]

    def at(self, coords: Coords) -> Runs:
        """Return which of the stacked tensors, such as experts, are on the ranks at the mesh coordinates `coords`:
        their indices in the stack, as Runs (index ranges)."""
        return self.held[tuple(coords[axis] for axis in self.axes)]

    def list_holders(self) -> list[tuple[_Point, ...]]:
        """Return a list with one tuple for each tensor of the stack, in order: the mesh coordinates of the ranks that
        hold the tensor. Each coordinate is a tuple of ints, one per mesh axis in the field `axes`."""
        holders: list[list[_Point]] = [[] for _ in range(self.count)]
        for point, runs in self.held.items():
            for number in runs.indices().tolist():
                if number >= 0:  # a hole is -1
                    holders[number].append(point)
        return list(map(tuple, holders))


@dataclass(frozen=True, slots=True)
class _StoredDim:
    """A stored dimension that corresponds to a dimension of the components: its parts at each coordinate."""

    axes: tuple[str, ...]
    lengths: Mapping[_Point, int]
    trims: Mapping[str, Mapping[_Point, Trim]]


@dataclass(frozen=True, slots=True)
class Laid:
    """How a stored tensor, such as qkv, is divided among ranks. `stored[d]` gives the local length of dimension d by
    mesh coordinate; `dims["q"]` says how each dimension of the logical tensor q is divided."""

    order: tuple[int, ...]
    stored: tuple[Stack | _StoredDim, ...]
    dims: Mapping[str, tuple[Dimension, ...]]

    def shape(self, coords: Coords) -> Shape:
        """The local shape of the stored tensor on the ranks at the mesh coordinates `coords`."""
        sizes = []
        for stored in self.stored:
            if isinstance(stored, Stack):
                sizes.append(len(stored.at(coords)))
            else:
                sizes.append(stored.lengths[tuple(coords[axis] for axis in stored.axes)])
        return tuple(sizes)

    def cuts(
        self, component: str, coords: Coords, numbers: Iterable[int] = (0,)
    ) -> list[tuple[int | slice, ...]]:
        """List the index tuples that select `component`, such as q, from the stored tensor on the ranks at `coords`:
        one tuple for each of `numbers`. A number is an index into stacked tensors, such as experts, and has no effect
        if nothing is stacked.

        `coords` are the mesh coordinates of ranks that store the tensor. If the stored tensor is a stack, a tuple has
        the position in the stack instead of a slice.
        """
        spans = []
        stack_dim = None
        for dim, stored in enumerate(self.stored):
            if isinstance(stored, Stack):
                stack_dim = dim
                spans.append(slice(0))  # each of `numbers` replaces it below
            else:
                point = tuple(coords[axis] for axis in stored.axes)
                spans.append(stored.trims[component][point].span)
        if stack_dim is None:
            cut = tuple(spans)
            return [cut for _ in numbers]
        before, after = spans[:stack_dim], spans[stack_dim + 1 :]
        return [(*before, number, *after) for number in numbers]


def order_of(transpose: str, ndim: int) -> tuple[int, ...]:
    """Return, for each stored dimension, the logical dimension that it holds if a tensor is stored as `transpose` says
    ("", ".T" or ".mT")."""
    order = list(range(ndim))
    if transpose == ".T":
        order.reverse()
    elif transpose == ".mT":
        order[-2:] = reversed(order[-2:])
    return tuple(order)


def stack_names(row: Row) -> dict[int, str]:
    """Return a dict from each dimension along which tensors, such as experts, are stacked to the placeholder that
    numbers them in their names. For the storage rule `row` = `w = x.{e}.w : e n h`, this is {0: "e"}: dimension 0
    stacks x.0.w, x.1.w and so on."""
    indices = {index.name for index in row.logical.indices}
    stacks: dict[int, str] = {}
    for i, dim in enumerate(row.dims or ()):
        words = {str(word.name) for word in list_words((dim,))}
        if isinstance(dim, str):
            words.add(dim)
        for name in indices & words:
            if name in stacks.values():
                what = f"index {name!r} is in two dimensions of '{row}', and tensors are stacked along one"
                raise StoreError(f"{what}; write the index in one of them")
            stacks[i] = name
    return stacks


def lay(row: Row, shapes: Mapping[str, Shape], frame: Frame, stack: Stack | None = None) -> Laid:
    """Return the layout of a stored tensor, such as a fused qkv, as the storage rule `row` declares it. `shapes` has
    the shapes of its parts, such as q; `frame` the sizes of mesh axes; and `stack` says which experts each rank has.

    Raises StoreError if the words do not fit the shapes, LayoutError if a size does not divide.
    """
    ndim = _count_dims(shapes)
    order = order_of(row.transpose, ndim)
    logical_dims = iter(order)
    stored: list[Stack | _StoredDim] = []
    by_dim: dict[int, Mapping[str, Dimension]] = {}
    named: set[str] = set()
    omitted: set[str] = set()
    for word, index in give_words(row, ndim):
        if index is not None and stack is not None:
            stored.append(stack)
            continue
        if isinstance(word, str) and word in frame.axes:
            fix = f"write ({word} n) for a dimension that it divides, or another name"
            raise LayoutError(f"dimension {word!r} of '{row}' is a mesh axis; {fix}")
        d = next(logical_dims)
        lengths = tuple((name, shape[d]) for name, shape in shapes.items())
        stored_dim, by_dim[d], named_here = _lay_dim(word, lengths, *_freeze(frame))
        named |= named_here
        # A dimension that names no component, such as h of q, k and v, is the same for all, and omits none.
        if named_here:
            omitted |= shapes.keys() - named_here
        stored.append(stored_dim)
    _check_named(row, shapes, named, omitted)
    dims = {}
    for name in shapes:
        dims[name] = tuple(by_dim[d][name] for d in range(ndim))
    return Laid(order, tuple(stored), dims)


def _count_dims(shapes: Mapping[str, Shape]) -> int:
    """The number of dimensions of every component. Raises StoreError if they differ."""
    ndims = {len(shape) for shape in shapes.values()}
    if len(ndims) != 1:
        what = f"components of one stored tensor have shapes {dict(shapes)}, of different length"
        raise StoreError(f"{what}; write a separate row for each")
    return ndims.pop()


def _check_named(row: Row, shapes: Mapping[str, Shape], named: set[str], omitted: set[str]) -> None:
    """Raise StoreError if no dimension names one of several components, or if one that names others omits it. `named`
    are the components that some dimension names, `omitted` those that a dimension with names of others lacks."""
    for name in shapes:
        if len(shapes) > 1 and name not in named:
            what = f"component {name!r} is in no dimension of '{row}'"
            raise StoreError(f"{what}; write it in one, such as ({' + '.join(shapes)})")
        if name in omitted:
            what = f"a dimension of '{row}' names other components, but not {name!r}"
            raise StoreError(f"{what}; write all components there, or none of them")


def give_words(row: Row, ndim: int) -> list[tuple[Structure, str | None]]:
    """Return a pair for each dimension of a stored tensor, as the storage rule `row` declares it. The first item is the
    dimension's parsed notation, such as (tp n); the second is the placeholder, such as "e", that numbers tensors
    stacked along the dimension, or None.

    `ndim` is the number of dimensions that are not stacks.
    """
    if row.dims is None:
        return [("...", None)] * ndim
    stacks = stack_names(row)
    unstacked = [dim for i, dim in enumerate(row.dims) if i not in stacks]
    expanded = iter(_expand_dots(unstacked, ndim, row))
    words: list[tuple[Structure, str | None]] = []
    # The number of dimensions for which '...' stands; it is itself one of the words.
    dots = max(ndim - len(unstacked) + 1, 0)
    for i, dim in enumerate(row.dims):
        if i in stacks:
            words.append((dim, stacks[i]))
            continue
        count = dots if dim == "..." else 1
        # A tensor with fewer dimensions uses the first words; islice is then empty for the last.
        words += [(word, None) for word in itertools.islice(expanded, count)]
    return words


def _expand_dots(dims: list[Structure], ndim: int, row: Row) -> list[Structure]:
    """One word for each of `ndim` dimensions: '...' stands for as many as are left."""
    words = list(dims)
    if "..." in words:
        at = words.index("...")
        words[at : at + 1] = ["..."] * max(ndim - len(dims) + 1, 0)
    if len(words) < ndim:
        what = f"'{row}' has {plural(words, 'dimension')}, its tensor {ndim}"
        raise StoreError(f"{what}; write one word per dimension, or '...' for those left out")
    return words[:ndim]  # a tensor with fewer dimensions uses the first words


def _freeze(frame: Frame) -> tuple[_Sizes, _Sizes, bool]:
    """The parts of a frame on which a dimension depends, as a hashable key."""
    return tuple(frame.axes.items()), tuple(frame.numbers.items()), frame.exact


@memo(1024)
def _lay_dim(
    word: Structure, sizes: _Sizes, mesh: _Sizes, numbers: _Sizes, exact: bool
) -> tuple[_StoredDim, dict[str, Dimension], set[str]]:
    """One dimension as stored, each component's dimension in a layout, and the components that the word names.

    Cached, since engines that are copies of each other differ only in ranks.
    """
    lengths = dict(sizes)
    if isinstance(word, str):
        stored, fitted = _lay_whole(lengths)
        return stored, fitted, set()
    words = {part.name for part in list_words((word,))}
    named = {name for name in lengths if name in words}
    # Components that a dimension does not name, such as h of q, k and v, all lie in it in the same way.
    frame = Frame(dict(mesh), dict(numbers), lengths if named else _unify(lengths), exact)
    stored, fitted = _lay_group(word, frame)
    if not named:  # `_unify` has made them one component without a name
        trims = dict.fromkeys(lengths, stored.trims[""])
        stored = dataclasses.replace(stored, trims=trims)
        fitted = dict.fromkeys(lengths, fitted[""])
    return stored, fitted, named


def _lay_group(group: GroupedDim, frame: Frame) -> tuple[_StoredDim, dict[str, Dimension]]:
    """A dimension that a group divides: as stored, and as each component's dimension in a layout."""
    axes = axes_of(group, frame)
    sizes = {axis: frame.axes[axis] for axis in axes}
    runs_at = _lay_everywhere(group, frame, sizes)
    # The stored tensor's length counts padding and holes, which are cells too.
    total = {point: len(runs) for point, runs in runs_at.items()}
    words = {word.name for word in list_words((group,))}
    # Both by component: the view of it at each coordinate, and its dimension in a layout.
    trims, fitted = _fit_each(frame.lengths, runs_at, sizes, words)
    return _StoredDim(axes, total, trims), fitted


def _lay_everywhere(
    group: GroupedDim, frame: Frame, sizes: Mapping[str, int]
) -> dict[_Point, Runs]:
    """The positions that every coordinate of these axes stores."""
    runs_at = {}
    for point in itertools.product(*map(range, sizes.values())):
        coords = dict(zip(sizes, point, strict=True))
        runs_at[point] = lay_out(group, frame, coords)
    return runs_at


def _fit_each(
    lengths: Mapping[str, int],
    runs_at: Mapping[_Point, Runs],
    sizes: Mapping[str, int],
    words: Iterable[Number],
) -> tuple[dict[str, dict[_Point, Trim]], dict[str, Dimension]]:
    """The view of each component at every coordinate, and its dimension in a layout. `runs_at` has what each coordinate
    stores of all components, whose positions follow each other.

    Raises LayoutError if a component that the words name, or one without a name, is not stored whole.
    """
    trims = {}
    fitted = {}
    start = 0
    for name, n in lengths.items():
        stop = start + n
        parts = [_extract(runs, start, stop) for runs in runs_at.values()]
        if not name or name in words:
            _check_stored(name, n, parts)
        views, trimmed = zip(*map(trim, parts), strict=True)
        trims[name] = dict(zip(runs_at, views, strict=True))
        fitted[name] = fit(n, sizes, trimmed)
        start = stop
    return trims, fitted


def _check_stored(name: str, n: int, parts: Iterable[Runs]) -> None:
    """Raise LayoutError if a position of the component is not stored, as when an axis cuts it twice."""
    spans = sorted((start, start + size) for runs in parts for _, start, size in runs.segments)
    end = 0
    # The empty span (n, n) finds a gap after the last position that is stored.
    for start, stop in [*spans, (n, n)]:
        if start > end:
            of = f" of {name!r}" if name else ""
            what = f"no rank stores position {end} of the {n} positions{of}"
            raise LayoutError(f"{what}; cut by each axis once")
        end = max(end, stop)


def _unify(lengths: Mapping[str, int]) -> dict[str, int]:
    """The length that all components share, under an empty name. Raises StoreError if they differ."""
    if len(set(lengths.values())) != 1:
        what = f"components have different sizes in one dimension: {dict(lengths)}"
        raise StoreError(f"{what}; name them there, as in ({' + '.join(lengths)})")
    return {"": next(iter(lengths.values()))}


def _lay_whole(lengths: Mapping[str, int]) -> tuple[_StoredDim, dict[str, Dimension]]:
    """A dimension that every rank has whole."""
    (n,) = _unify(lengths).values()  # raises if the components differ
    segments = ((0, 0, n),) if n else ()
    whole = Runs(segments, n)
    dimension = fit(n, {}, [whole])
    only_point: _Point = ()  # the coordinate on no axes
    view = {only_point: Trim(0, 1, n)}
    trims = dict.fromkeys(lengths, view)
    return _StoredDim((), {only_point: n}, trims), dict.fromkeys(lengths, dimension)


def _extract(runs: Runs, start: int, stop: int) -> Runs:
    """The stored positions from `start` to `stop`, one component's, counted from its beginning."""
    kept = restrict(runs, start, stop)
    shifted = [(local, position - start, n) for local, position, n in kept.segments]
    return Runs(shifted, len(kept))
