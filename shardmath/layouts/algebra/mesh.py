"""Mesh: named axes over any ranks, with no devices and no process group.

1. Axes are ordered and the last one is fastest: rank number i of `ranks` has the row-major
   coordinates of i.
2. Ranks are any distinct non-negative integers in any order.
3. A mesh is abstract: a notebook may hold one of 16,000 ranks.
4. Axes can be split, merged, transposed and selected; all but `select` keep the same ranks.
5. `groups` are the ranks along some axes, as process groups have them.

>>> mesh = Mesh(dp=4, tp=2)
>>> mesh.coords(5)
{'dp': 2, 'tp': 1}
>>> mesh.select(tp=1)
Mesh(dp=4, ranks=[1, 3, 5, 7])
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from keyword import iskeyword

import numpy as np
from numpy.typing import NDArray

from shardmath.base.arguments import as_integer, listed, mapping, text
from shardmath.base.drawn import html, svg
from shardmath.base.errors import MeshError
from shardmath.base.public import public
from shardmath.base.text import plural, show_ranks, shown

__all__ = ["Mesh", "strides"]


MOST_RANKS = 1 << 24
"""More ranks than any machine has; sums over them stay exact in 64 bits."""


def strides(sizes: Iterable[int]) -> tuple[int, ...]:
    """Return the row-major strides, in elements, of an array of shape `sizes`.

    >>> strides((4, 3, 2))
    (6, 2, 1)
    """
    out = []
    step = 1
    for n in reversed(tuple(sizes)):
        out.append(step)
        step *= n
    return tuple(reversed(out))


@public
@dataclass(frozen=True, slots=True, repr=False, init=False)
class Mesh:
    """A grid of ranks with named axes: each rank has a coordinate on every axis.

    `Mesh(dp=4, tp=2)` has ranks 0..7; `ranks=` gives any others, one for each coordinate, last axis
    fastest. `Mesh({"dp": 4})` spells axes whose names are not Python words. `Mesh()` has only rank
    0. Raises MeshError for sizes below 1, repeated or negative ranks, or a wrong number of
    them.
    """

    axes: tuple[tuple[str, int], ...]
    ranks: tuple[int, ...]
    _positions: dict[int, int] = field(compare=False)
    _hash: int = field(compare=False)
    _steps: dict[str, NDArray[np.int64]] = field(compare=False)

    def __init__(
        self,
        axes: Mapping[str, int] | None = None,
        /,
        *more: object,
        ranks: Iterable[int] | None = None,
        **sizes: int,
    ) -> None:
        if more or not isinstance(axes, Mapping | None):
            given = (axes, *more) if more else axes
            fix = "give a mapping from name to size, or keywords: Mesh(dp=4, tp=2)"
            raise MeshError(f"mesh axes are {given!r}; {fix}")
        spelled = {**(axes or {}), **sizes}
        named = dict(_check_axis(name, n) for name, n in spelled.items())
        total = math.prod(named.values())
        if total > MOST_RANKS:
            raise MeshError(f"mesh {named} has {total} ranks; make it at most {MOST_RANKS}")
        numbers = _read_ranks(range(total) if ranks is None else ranks)
        _check_ranks(numbers, total, named)
        object.__setattr__(self, "axes", tuple(named.items()))
        object.__setattr__(self, "ranks", numbers)
        self._index(total)

    def _index(self, total: int) -> None:
        """Precompute what is looked up often: positions by rank, the hash, and coordinates by axis."""
        positions = {rank: i for i, rank in enumerate(self.ranks)}
        sizes = [n for _, n in self.axes]
        numbers = np.arange(total)
        steps = {}
        for (name, _), stride in zip(self.axes, strides(sizes), strict=True):
            steps[name] = numbers // stride  # modulo the axis's size, the coordinate on it
        object.__setattr__(self, "_positions", positions)
        object.__setattr__(self, "_hash", hash((self.axes, self.ranks)))
        object.__setattr__(self, "_steps", steps)

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        if any(iskeyword(name) or name == "ranks" for name, _ in self.axes):
            words = [repr(self.shape)]
        else:
            words = [f"{name}={n}" for name, n in self.axes]
        return f"Mesh({', '.join(words + self._rank_words())})"

    def _rank_words(self) -> list[str]:
        """The argument `ranks` of the repr, or nothing if the mesh has ranks 0, 1, ..."""
        first, last = self.ranks[0], self.ranks[-1]
        if self.ranks != tuple(range(first, first + self.size)):
            return [f"ranks={list(self.ranks)}"]
        if first:
            return [f"ranks=range({first}, {last + 1})"]
        return []

    def __reduce__(self) -> tuple[object, ...]:
        return _make_mesh, (self.axes, self.ranks)

    def svg(self, *, topology: object = None) -> str:
        """Draw the mesh as an SVG document, with ranks at their coordinates. If `topology` is given (a Topology, which
        describes a cluster), ranks are colored by node."""
        return svg(self, topology=topology)

    def _repr_html_(self) -> str:
        return html(self)

    @property
    def shape(self) -> dict[str, int]:
        """The size of each axis, by name, in order."""
        return dict(self.axes)

    @property
    def size(self) -> int:
        """The number of ranks in the mesh."""
        return len(self.ranks)

    def __contains__(self, rank: object) -> bool:
        try:
            return rank in self._positions
        except Exception:  # for values that cannot be looked up, such as a list
            return as_integer(rank, "rank", MeshError) in self._positions

    def position(self, rank: int) -> int:
        """Return the row-major position of `rank` in the mesh. Raises MeshError if it is not in the mesh."""
        number = rank if type(rank) is int else as_integer(rank, "rank", MeshError)
        index = self._positions.get(number)
        if index is None:
            what = f"rank {rank} is not in {self}"
            listed = show_ranks(self.ranks, noun=False, joined_from=None, most=16)
            raise MeshError(f"{what}; use one of its ranks, {listed}")
        return index

    def coords(self, rank: int) -> dict[str, int]:
        """Return the coordinates of `rank` as a dict by axis name. Raises MeshError if the rank is not in the mesh."""
        index = self.position(rank)
        sizes = [n for _, n in self.axes]
        coords = {}
        for (name, n), stride in zip(self.axes, strides(sizes), strict=True):
            coords[name] = index // stride % n
        return coords

    def coordinate(self, names: Iterable[str]) -> NDArray[np.int64]:
        """Return an int64 array with one number per rank, in the order of the mesh: the rank's coordinate on the axes
        `names`, flattened into one axis in row-major order."""
        out = np.zeros(self.size, np.int64)
        for name in _read_names(names):
            n = self.axis_size(name)
            coordinate = self._steps[name] % n
            out = out * n + coordinate
        return out

    def ranks_along(self, names: Iterable[str]) -> tuple[frozenset[int], ...]:
        """Merge the axes `names` into one, the first varying slowest. Return a tuple with the set of ranks at each
        coordinate along it, in order.

        >>> Mesh(dp=2, tp=2).ranks_along(["tp"])
        (frozenset({0, 2}), frozenset({1, 3}))
        """
        axes = _read_names(names)
        coordinate = self.coordinate(axes)
        ranks = np.array(self.ranks)
        count = math.prod(map(self.axis_size, axes))
        return tuple(frozenset(ranks[coordinate == i].tolist()) for i in range(count))

    def axis_size(self, name: str) -> int:
        """Return the number of coordinates on the axis `name`. Raises MeshError if there is no such axis."""
        if isinstance(name, str):
            for axis, n in self.axes:
                if axis == name:
                    return n
        fix = f"use one of its axes, {', '.join(self.shape)}" if self.axes else "it has no axes"
        raise MeshError(f"axis {shown(name)} is not in {self}; {fix}")

    def array(self) -> NDArray[np.int64]:
        """Return the ranks as an int64 array with one dimension per axis."""
        sizes = [n for _, n in self.axes]
        return np.array(self.ranks, np.int64).reshape(sizes)

    def split(self, name: str, /, **parts: int) -> Mesh:
        """Return the mesh with axis `name` replaced by the axes in the keyword arguments (new name=size), of which the
        last varies fastest: `mesh.split("tp", kv=2, rep=4)`.

        Raises MeshError unless the sizes multiply to the size of the axis.
        """
        n = self.axis_size(name)
        new_axes = dict(_check_axis(part, size) for part, size in parts.items())
        product = math.prod(new_axes.values())
        if product != n:
            sizes = " ".join(f"{part}={size}" for part, size in new_axes.items()) or "of no axes"
            what = f"mesh axis {name!r} has size {n}, but the product of its parts {sizes} is {product}"
            raise MeshError(f"{what}; give parts whose product is {n}")
        axes: list[tuple[str, int]] = []
        for axis in self.axes:
            axes += new_axes.items() if axis[0] == name else [axis]
        return _make_mesh(tuple(axes), self.ranks)

    def merge(self, names: Iterable[str], into: str) -> Mesh:
        """Return the mesh with the axes `names` merged, the first varying slowest, into one axis. The new axis is
        called `into`, and stands where the first of `names` stood.

        Raises MeshError if no axis is named, or one twice.
        """
        merged = _read_names(names)
        if not merged or len(set(merged)) != len(merged):
            raise MeshError(f"cannot merge axes {merged} of {self}; give one or more, each once")
        product = math.prod(self.axis_size(name) for name in merged)
        into, size = _check_axis(into, product)
        axes: list[tuple[str, int]] = []
        order: list[str] = []
        for name, n in self.axes:
            if name == merged[0]:
                axes.append((into, size))
                order += merged
            elif name not in merged:
                axes.append((name, n))
                order.append(name)
        return _make_mesh(tuple(axes), self.transpose(order).ranks)

    def transpose(self, names: Iterable[str]) -> Mesh:
        """Return the mesh with its axes in the order `names`; each rank keeps its coordinates.

        Raises MeshError unless all are named once.
        """
        order = _read_names(names)
        before = list(self.shape)
        if sorted(order) != sorted(before):
            raise MeshError(f"cannot transpose {self} to {order}; give each of its axes once")
        index = [before.index(name) for name in order]
        axes = tuple(self.axes[i] for i in index)
        array = self.array().transpose(index)
        ranks = array.ravel().tolist()
        return _make_mesh(axes, tuple(ranks))

    def select(self, **coords: int) -> Mesh:
        """Return the mesh of the ranks at the coordinates in the keyword arguments (axis=coordinate), such as
        `mesh.select(pp=0)`. The mesh returned does not have these axes.

        Raises MeshError for an unknown axis or a coordinate that the axis does not have.
        """
        for name, given in coords.items():
            coordinate = as_integer(given, f"coordinate on axis {name!r}", MeshError)
            n = self.axis_size(name)
            if not 0 <= coordinate < n:
                what = f"coordinate {given} is not on axis {name!r} of size {n}"
                raise MeshError(f"{what}; use 0..{n - 1}")
        index = tuple(coords.get(name, slice(None)) for name in self.shape)
        axes = tuple(axis for axis in self.axes if axis[0] not in coords)
        array = self.array()[index]
        ranks = array.ravel().tolist()
        return _make_mesh(axes, tuple(ranks))

    def groups(self, axes: Iterable[str]) -> tuple[tuple[int, ...], ...]:
        """Return the ranks as groups (tuples): ranks of one group differ only in their coordinates on `axes`.

        In a group the first axis named is slowest; groups are in row-major order of the other axes.
        Raises MeshError for an axis that the mesh does not have, or one named twice.

        >>> Mesh(dp=2, tp=3).groups(["tp"])
        ((0, 1, 2), (3, 4, 5))
        >>> Mesh(dp=2, tp=3).groups(["dp"])
        ((0, 3), (1, 4), (2, 5))
        """
        along = _read_names(axes)
        count = math.prod(map(self.axis_size, along))
        if len(set(along)) != len(along):
            raise MeshError(f"cannot group ranks along {along}, with an axis twice; give it once")
        names = list(self.shape)
        others = [name for name in names if name not in along]
        order = [names.index(name) for name in others + list(along)]
        ranks = self.array().transpose(order)
        groups = ranks.reshape(-1, count).tolist()
        return tuple(map(tuple, groups))

    def relabel(self, ranks: Mapping[int, int]) -> Mesh:
        """Return the mesh with ranks renumbered by `ranks` (old -> new); other ranks keep their numbers.

        Raises MeshError if two ranks get one number.
        """
        new = mapping(ranks, "ranks are ", "old to new ranks", MeshError)
        renamed = [new.get(rank, rank) for rank in self.ranks]
        return _make_mesh(self.axes, tuple(renamed))


def _make_mesh(axes: tuple[tuple[str, int], ...], ranks: tuple[int, ...]) -> Mesh:
    """The mesh of these axes. Raises MeshError if two axes have one name."""
    names = [name for name, _ in axes]
    if len(set(names)) != len(names):
        what = f"two axes of mesh {', '.join(names)} would have one name"
        raise MeshError(f"{what}; choose a name that the mesh does not have")
    return Mesh(dict(axes), ranks=ranks)


def _read_ranks(ranks: object) -> tuple[int, ...]:
    """The ranks as ints. Raises MeshError for other values."""
    if isinstance(ranks, range):
        return tuple(ranks)
    given = listed(ranks, "ranks", MeshError)
    return tuple(as_integer(rank, "a rank", MeshError) for rank in given)


def _read_names(names: object) -> tuple[str, ...]:
    """The names; a str is read as names of one letter each. Raises MeshError for other values."""
    if isinstance(names, str):
        names = tuple(names)
    given = listed(names, "axes", MeshError)
    return tuple(text(name, "the name of an axis", MeshError) for name in given)


def _check_axis(name: object, size: object) -> tuple[str, int]:
    """The axis as a plain str and an int. Raises MeshError for other names, or sizes below 1."""
    if not isinstance(name, str) or not name.isidentifier():
        what = f"axis name {shown(name)} is not an identifier"
        raise MeshError(f"{what}; use letters, digits and underscores, and begin with a letter")
    n = as_integer(size, f"the size of axis {name!r}", MeshError)
    if n < 1:
        raise MeshError(
            f"mesh axis {name!r} has size {n}, but must have 1 or more; give a larger one"
        )
    return text(name, "the name of an axis", MeshError), n


def _check_ranks(ranks: tuple[int, ...], total: int, axes: Mapping[str, int]) -> None:
    """Raise MeshError unless there are `total` distinct ranks from 0 to MOST_RANKS - 1."""
    mesh = " ".join(f"{name}={n}" for name, n in axes.items()) or "without axes"
    if len(ranks) != total:
        what = f"ranks= has {plural(ranks, 'rank')}, but the mesh {mesh} has {total}"
        raise MeshError(f"{what}; give one rank for each coordinate, {total} in all")
    if len(set(ranks)) != total:
        twice = next(rank for rank, count in Counter(ranks).items() if count > 1)
        what = f"rank {twice} appears twice in the mesh {mesh}"
        raise MeshError(f"{what}; give {total} different ranks")
    if max(ranks) >= MOST_RANKS:
        what = f"rank {max(ranks)} of the mesh {mesh} is too large"
        raise MeshError(f"{what}; give ranks below {MOST_RANKS}")
    if min(ranks) < 0:
        raise MeshError(f"rank {min(ranks)} of the mesh {mesh} is negative; number ranks from 0")
