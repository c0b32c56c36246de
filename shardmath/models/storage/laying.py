"""Laying: where each component of one stored tensor lies, dimension by dimension, at every coordinate.

1. A dimension of the stored tensor is a **stack** (of tensors numbered by an index) or shows one dimension of its
   components. A row's words are given to the components' dimensions in the order in which they are stored.
2. A shape is laid out once for each row and mesh axes; layers and experts of equal shapes share it.

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
from shardmath.layouts.algebra.dimension import Dimension
from shardmath.layouts.algebra.runs import Runs, restrict
from shardmath.layouts.fitting import Trim, fit, trim
from shardmath.models.storage.cutting import Frame, axes_of, lay_out
from shardmath.models.storage.rows import Row
from shardmath.models.storage.structure import GroupedDim, Number, Structure, list_words

__all__ = ["Laid", "Stack", "give_words", "lay", "order_of", "stack_names"]

Shape: TypeAlias = tuple[int, ...]
Coords: TypeAlias = Mapping[str, int]
_At: TypeAlias = tuple[int, ...]
"""A coordinate on each of some axes."""
_Sizes: TypeAlias = tuple[tuple[str, int], ...]
"""Names and what is counted of each, in order."""


@dataclass(frozen=True, slots=True)
class Stack:
    """Which of `count` numbers of an index lie at each coordinate of some mesh axes, in local order."""

    index: str
    count: int
    axes: tuple[str, ...]
    held: Mapping[_At, Runs]

    def at(self, coords: Coords) -> Runs:
        """Local to global numbers."""
        return self.held[tuple(coords[axis] for axis in self.axes)]

    def list_holders(self) -> list[tuple[_At, ...]]:
        """The coordinates that have each number."""
        found: list[list[_At]] = [[] for _ in range(self.count)]
        for at, runs in self.held.items():
            for number in runs.indices().tolist():
                if number >= 0:
                    found[number].append(at)
        return list(map(tuple, found))


@dataclass(frozen=True, slots=True)
class _Shown:
    """One stored dimension that shows a dimension of the components: its parts at each coordinate."""

    axes: tuple[str, ...]
    lengths: Mapping[_At, int]
    trims: Mapping[str, Mapping[_At, Trim]]


@dataclass(frozen=True, slots=True)
class Laid:
    """A stored tensor: its dimensions in stored order, and the components' in their own."""

    order: tuple[int, ...]
    stored: tuple[Stack | _Shown, ...]
    dims: Mapping[str, tuple[Dimension, ...]]

    def shape(self, coords: Coords) -> Shape:
        """Of the stored tensor at these coordinates."""
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
        """What takes the component out of the stored tensor, for each of these local numbers of a stack."""
        spans = []
        stacked = None
        for i, stored in enumerate(self.stored):
            if isinstance(stored, Stack):
                stacked = i
                spans.append(slice(0))
            else:
                at = tuple(coords[axis] for axis in stored.axes)
                spans.append(stored.trims[component][at].span)
        if stacked is None:
            return [tuple(spans) for _ in numbers]
        before, behind = spans[:stacked], spans[stacked + 1 :]
        return [(*before, number, *behind) for number in numbers]


def order_of(transpose: str, ndim: int) -> tuple[int, ...]:
    """Which dimension of a component each stored one shows."""
    order = list(range(ndim))
    if transpose == ".T":
        order.reverse()
    elif transpose == ".mT":
        order[-2:] = reversed(order[-2:])
    return tuple(order)


def stack_names(row: Row) -> dict[int, str]:
    """The stored dimensions that are stacks, and the index of each."""
    stacked = {index.name for index in row.logical.indices}
    found: dict[int, str] = {}
    for i, dim in enumerate(row.dims or ()):
        words = {str(word.name) for word in list_words((dim,))}
        if isinstance(dim, str):
            words.add(dim)
        for name in stacked & words:
            if name in found.values():
                what = f"index {name!r} is in two dimensions of '{row}'"
                raise StoreError(f"{what}; a stack has one, in which its tensors lie in order")
            found[i] = name
    return found


def lay(row: Row, shapes: Mapping[str, Shape], frame: Frame, stack: Stack | None = None) -> Laid:
    """The stored tensor of these components; the stack says what lies where of its index.

    Raises StoreError where the words do not fit the shapes, LayoutError for what does not divide.
    """
    ndim = _count_dims(shapes)
    order = order_of(row.transpose, ndim)
    shown = iter(order)
    stored: list[Stack | _Shown] = []
    by_dim: dict[int, Mapping[str, Dimension]] = {}
    placed: set[str] = set()
    lacking: set[str] = set()
    for word, index in give_words(row, ndim):
        if index is not None and stack is not None:
            stored.append(stack)
            continue
        if isinstance(word, str) and word in frame.axes:
            fix = f"write ({word} n) where it divides one"
            raise LayoutError(f"dimension {word!r} of '{row}' is a mesh axis; {fix}")
        d = next(shown)
        lengths = {name: shape[d] for name, shape in shapes.items()}
        spans = tuple(lengths.items())
        part, by_dim[d], named = _show(word, spans, *_freeze(frame))
        placed |= named
        if named:
            lacking |= shapes.keys() - named
        stored.append(part)
    _check_placed(row, shapes, placed, lacking)
    dims = {}
    for name in shapes:
        dims[name] = tuple(by_dim[d][name] for d in range(ndim))
    return Laid(order, tuple(stored), dims)


def _count_dims(shapes: Mapping[str, Shape]) -> int:
    """How many dimensions the components have. Raises StoreError where they differ."""
    ndims = {len(shape) for shape in shapes.values()}
    if len(ndims) != 1:
        raise StoreError(f"components {dict(shapes)} differ in dimensions; store them apart")
    return ndims.pop()


def _check_placed(
    row: Row, shapes: Mapping[str, Shape], placed: set[str], lacking: set[str]
) -> None:
    """Raise StoreError for one of several components that no dimension names, or not each that names others."""
    for name in shapes:
        if len(shapes) > 1 and name not in placed:
            raise StoreError(f"component {name!r} is in no dimension; write it in '{row}'")
        if name in lacking:
            what = f"component {name!r} is not in every dimension that names others"
            raise StoreError(f"{what}; write it there, or none of them, in '{row}'")


def give_words(row: Row, ndim: int) -> list[tuple[Structure, str | None]]:
    """A word for every stored dimension, and the index where it is a stack."""
    if row.dims is None:
        return [("...", None)] * ndim
    stacks = stack_names(row)
    shown = [dim for i, dim in enumerate(row.dims) if i not in stacks]
    given = iter(_expand(shown, ndim, row))
    words: list[tuple[Structure, str | None]] = []
    rest = max(ndim - len(shown) + 1, 0)
    for i, dim in enumerate(row.dims):
        if i in stacks:
            words.append((dim, stacks[i]))
            continue
        count = rest if dim == "..." else 1
        # A tensor of fewer dimensions takes the first words, and leaves the last.
        taken = itertools.islice(given, count)
        words += [(word, None) for word in taken]
    return words


def _expand(shown: list[Structure], ndim: int, row: Row) -> list[Structure]:
    """One word for each of so many dimensions."""
    words = list(shown)
    if "..." in words:
        at = words.index("...")
        words[at : at + 1] = ["..."] * max(ndim - len(shown) + 1, 0)
    if len(words) < ndim:
        raise StoreError(f"'{row}' has {len(words)} dimensions, its tensor {ndim}; add '...'")
    return words[:ndim]


def _freeze(frame: Frame) -> tuple[_Sizes, _Sizes, bool]:
    """What a dimension depends on of a frame."""
    return tuple(frame.axes.items()), tuple(frame.numbers.items()), frame.exact


@memo(1024)
def _show(
    word: Structure, spans: _Sizes, mesh: _Sizes, numbers: _Sizes, exact: bool
) -> tuple[_Shown, dict[str, Dimension], set[str]]:
    """One dimension: where each component lies in it, its dimension in a layout, and who is named in it.

    Kept, since engines that are copies of each other differ in ranks alone.
    """
    lengths = dict(spans)
    if isinstance(word, str):
        shown, fitted = _show_whole(lengths)
        return shown, fitted, set()
    words = {part.name for part in list_words((word,))}
    named = {name for name in lengths if name in words}
    # Components that a dimension does not name, such as h of q, k and v, all lie in it in the same way.
    own = lengths if named else _only(lengths)
    frame = Frame(dict(mesh), dict(numbers), own, exact)
    shown, fitted = _show_group(word, frame)
    if not named:
        trims = dict.fromkeys(lengths, shown.trims[""])
        shown = dataclasses.replace(shown, trims=trims)
        fitted = dict.fromkeys(lengths, fitted[""])
    return shown, fitted, named


def _show_group(group: GroupedDim, frame: Frame) -> tuple[_Shown, dict[str, Dimension]]:
    """A dimension that a group divides, for each component of the frame."""
    axes = axes_of(group, frame)
    sizes = {axis: frame.axes[axis] for axis in axes}
    held = _cut_everywhere(group, frame, sizes)
    # Of the stored tensor itself: padding and holes are cells too.
    total = {at: len(runs) for at, runs in held.items()}
    words = {word.name for word in list_words((group,))}
    trims, fitted = _fit_each(frame.lengths, held, sizes, words)
    return _Shown(axes, total, trims), fitted


def _cut_everywhere(word: GroupedDim, frame: Frame, sizes: Mapping[str, int]) -> dict[_At, Runs]:
    """What every coordinate of these axes stores."""
    held = {}
    for at in itertools.product(*map(range, sizes.values())):
        coords = dict(zip(sizes, at, strict=True))
        held[at] = lay_out(word, frame, coords)
    return held


def _fit_each(
    spans: Mapping[str, int],
    held: Mapping[_At, Runs],
    sizes: Mapping[str, int],
    words: Iterable[Number],
) -> tuple[dict[str, dict[_At, Trim]], dict[str, Dimension]]:
    """The view of each component at every coordinate, and its dimension in a layout. Those among the words, and one
    without a name, are to be stored whole.
    """
    trims = {}
    fitted = {}
    start = 0
    for name, n in spans.items():
        stop = start + n
        own = [_extract(runs, start, stop) for runs in held.values()]
        if not name or name in words:
            _check_stored(name, n, own)
        trimmed = list(map(trim, own))
        views = [view for view, _ in trimmed]
        inside = [runs for _, runs in trimmed]
        trims[name] = dict(zip(held, views, strict=True))
        fitted[name] = fit(n, sizes, inside)
        start = stop
    return trims, fitted


def _check_stored(name: str, n: int, held: Iterable[Runs]) -> None:
    """Raise LayoutError for a component that is stored in part, as by an axis that cuts it twice."""
    spans = sorted((start, start + size) for runs in held for _, start, size in runs.segments)
    end = 0
    for start, stop in [*spans, (n, n)]:
        if start > end:
            of = f" of {name!r}" if name else ""
            raise LayoutError(f"no rank stores number {end} of {n}{of}; cut by each axis once")
        end = max(end, stop)


def _only(lengths: Mapping[str, int]) -> dict[str, int]:
    """The one length that all components have, for a dimension that names none of them."""
    if len(set(lengths.values())) != 1:
        raise StoreError(f"components have {dict(lengths)} positions; name them in the dimension")
    return {"": next(iter(lengths.values()))}


def _show_whole(lengths: Mapping[str, int]) -> tuple[_Shown, dict[str, Dimension]]:
    """A dimension that every rank has whole."""
    (n,) = _only(lengths).values()
    segments = ((0, 0, n),) if n else ()
    whole = Runs(segments, n)
    dimension = fit(n, {}, [whole])
    nowhere: _At = ()
    view = {nowhere: Trim(0, 1, n)}
    trims = dict.fromkeys(lengths, view)
    shown = _Shown((), {nowhere: n}, trims)
    return shown, dict.fromkeys(lengths, dimension)


def _extract(runs: Runs, start: int, stop: int) -> Runs:
    """What is stored of one component, counted from its own beginning."""
    kept = restrict(runs, start, stop)
    moved = [(lo, g - start, n) for lo, g, n in kept.segments]
    return Runs(moved, len(kept))
