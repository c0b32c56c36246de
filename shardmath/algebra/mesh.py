"""Mesh: named axes over any ranks, with no devices and no process group.

1. Axes are ordered and the last one is fastest: rank number i of `ranks` has the row-major coordinates of i.
2. Ranks are any distinct non-negative integers in any order.
3. A mesh is abstract: a notebook may hold one of 16,000 ranks.
4. Axes can be split, merged, transposed and selected; all but `select` keep the same ranks.

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

from shardmath.base.drawn import html, svg
from shardmath.base.errors import MeshError
from shardmath.base.given import listed, mapping, plural, shown, text
from shardmath.base.integers import whole
from shardmath.base.public import public

__all__ = ["Mesh", "strides"]


MOST_RANKS = 1 << 24
"""More ranks than any machine has; sums over them stay exact in 64 bits."""


def strides(sizes: Iterable[int]) -> tuple[int, ...]:
    """Row-major strides of an array of these sizes.

    >>> strides((4, 3, 2))
    (6, 2, 1)
    """
    out, step = [], 1
    for n in reversed(tuple(sizes)):
        out.append(step)
        step *= n
    return tuple(reversed(out))


@public
@dataclass(frozen=True, slots=True, repr=False, init=False)
class Mesh:
    """Named axes over ranks.

    `Mesh(dp=4, tp=2)` has ranks 0..7; `ranks=` gives any others, one for each coordinate, last axis fastest.
    `Mesh({"dp": 4})` spells axes whose names are not Python words. `Mesh()` is rank 0 alone.
    Raises MeshError for sizes below 1, repeated or negative ranks, or a wrong number of them.
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
            raise MeshError(
                f"axes are {given!r}; give a mapping from name to size, or keywords: Mesh(dp=4, tp=2)"
            )
        named = dict(_axis(name, n) for name, n in {**(axes or {}), **sizes}.items())
        total = math.prod(named.values())
        if total > MOST_RANKS:
            raise MeshError(f"mesh {named} has {total} ranks; give at most {MOST_RANKS}")
        given = _ranks(range(total) if ranks is None else ranks)
        _check_ranks(given, total, named)
        object.__setattr__(self, "axes", tuple(named.items()))
        object.__setattr__(self, "ranks", given)
        object.__setattr__(self, "_positions", {r: i for i, r in enumerate(given)})
        object.__setattr__(self, "_hash", hash((self.axes, given)))
        steps = zip(named, strides(named.values()), strict=True)
        object.__setattr__(self, "_steps", {name: np.arange(total) // step for name, step in steps})

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        keyword = not any(iskeyword(name) or name == "ranks" for name, _ in self.axes)
        shown = [f"{name}={n}" for name, n in self.axes] if keyword else [repr(self.shape)]
        return f"Mesh({', '.join(shown + self._ranks_text())})"

    def _ranks_text(self) -> list[str]:
        first, last = self.ranks[0], self.ranks[-1]
        if self.ranks == tuple(range(first, first + self.size)):
            return [f"ranks=range({first}, {last + 1})"] if first else []
        return [f"ranks={list(self.ranks)}"]

    def __reduce__(self) -> tuple[object, ...]:
        return _mesh, (self.axes, self.ranks)

    def svg(self, *, topology: object = None) -> str:
        """A picture as an SVG document: ranks at their coordinates, with a `Topology` one colour per node."""
        return svg(self, topology=topology)

    def _repr_html_(self) -> str:
        return html(self)

    @property
    def shape(self) -> dict[str, int]:
        """Size of each axis, in order."""
        return dict(self.axes)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.ranks)

    def __contains__(self, rank: object) -> bool:
        return rank in self._positions

    def position(self, rank: int) -> int:
        """Row-major position of `rank`. Raises MeshError if it is not in the mesh."""
        at = self._positions.get(rank if type(rank) is int else whole(rank, "rank", MeshError))
        if at is None:
            raise MeshError(f"rank {rank} is not in {self}; its ranks are {_short(self.ranks)}")
        return at

    def coords(self, rank: int) -> dict[str, int]:
        """The coordinate of `rank` on each axis. Raises MeshError if it is not in the mesh."""
        at, out = self.position(rank), {}
        for (name, n), step in zip(self.axes, strides(n for _, n in self.axes), strict=True):
            out[name] = at // step % n
        return out

    def coordinate(self, names: Iterable[str]) -> NDArray[np.int64]:
        """Every rank's coordinate on the flattened axes `names` (first slowest): int64 of shape (size,)."""
        out = np.zeros(self.size, np.int64)
        for name in _names(names):
            n = self.axis_size(name)
            out = out * n + self._steps[name] % n
        return out

    def axis_size(self, name: str) -> int:
        """Coordinates on the axis. Raises MeshError if there is no such axis."""
        for axis, n in self.axes if isinstance(name, str) else ():
            if axis == name:
                return n
        raise MeshError(
            f"axis {shown(name)} is not in {self}; its axes are {', '.join(self.shape) or 'none'}"
        )

    def array(self) -> NDArray[np.int64]:
        """The ranks as an array with one dimension an axis."""
        return np.array(self.ranks, np.int64).reshape([n for _, n in self.axes])

    def split(self, name: str, /, **parts: int) -> Mesh:
        """The axis in two or more, first slowest: `mesh.split("tp", kv=2, rep=4)`.

        Raises MeshError unless the sizes multiply to the axis's.
        """
        n = self.axis_size(name)
        into = dict(_axis(part, size) for part, size in parts.items())
        if math.prod(into.values()) != n:
            raise MeshError(
                f"axis {name!r} has size {n}, the parts {into} multiply to {math.prod(into.values())}; make them agree"
            )
        return _mesh(
            tuple(p for axis in self.axes for p in (into.items() if axis[0] == name else [axis])),
            self.ranks,
        )

    def merge(self, names: Iterable[str], into: str) -> Mesh:
        """The axes as one, first slowest, in the place of the first; the other axes keep their order.

        Raises MeshError if fewer than one axis is named, or one twice.
        """
        merged = _names(names)
        if not merged or len(set(merged)) != len(merged):
            raise MeshError(f"cannot merge axes {merged}: name each of one or more axes once")
        into, size = _axis(into, math.prod(self.axis_size(name) for name in merged))
        rest = [name for name in self.shape if name not in merged or name == merged[0]]
        order = [name for key in rest for name in (merged if key == merged[0] else (key,))]
        axes = tuple(
            (into, size) if key == merged[0] else (key, self.axis_size(key)) for key in rest
        )
        return _mesh(axes, self.transpose(order).ranks)

    def transpose(self, names: Iterable[str]) -> Mesh:
        """The same coordinates with the axes in another order. Raises MeshError unless all are named once."""
        order = _names(names)
        if len(order) != len(self.axes) or set(order) != set(self.shape):
            raise MeshError(f"cannot transpose {self} to {order}; name each of its axes once")
        index = [list(self.shape).index(name) for name in order]
        return _mesh(
            tuple((name, self.axis_size(name)) for name in order),
            tuple(self.array().transpose(index).ravel().tolist()),
        )

    def select(self, **coords: int) -> Mesh:
        """The sub-mesh at these coordinates: `mesh.select(pp=0)`; the axes named are gone from it.

        Raises MeshError for an unknown axis or a coordinate that it does not have.
        """
        for name, at in coords.items():
            if not 0 <= whole(at, f"coordinate on axis {name!r}", MeshError) < self.axis_size(name):
                raise MeshError(
                    f"coordinate {at} is not on axis {name!r} of size {self.axis_size(name)}; "
                    f"use 0..{self.axis_size(name) - 1}"
                )
        index = tuple(coords.get(name, slice(None)) for name in self.shape)
        axes = tuple(axis for axis in self.axes if axis[0] not in coords)
        return _mesh(axes, tuple(self.array()[index].ravel().tolist()))

    def relabel(self, ranks: Mapping[int, int]) -> Mesh:
        """The same mesh with every rank renamed; ranks not named keep their number.

        Raises MeshError if two ranks get one name.
        """
        new = mapping(ranks, "ranks are ", "old to new ranks", MeshError)
        return _mesh(self.axes, tuple(new.get(r, r) for r in self.ranks))


def _mesh(axes: tuple[tuple[str, int], ...], ranks: tuple[int, ...]) -> Mesh:
    names = [name for name, _ in axes]
    if len(set(names)) != len(names):
        raise MeshError(
            f"axes {', '.join(names)} repeat a name; choose one that the mesh does not have"
        )
    return Mesh(dict(axes), ranks=ranks)


def _ranks(ranks: object) -> tuple[int, ...]:
    if isinstance(ranks, range):
        return tuple(ranks)
    return tuple(whole(r, "a rank", MeshError) for r in listed(ranks, "ranks", MeshError))


def _names(names: object) -> tuple[str, ...]:
    """The names; text is a list of names of one letter."""
    given = tuple(names) if isinstance(names, str) else listed(names, "axes", MeshError)
    return tuple(text(name, "the name of an axis", MeshError) for name in given)


def _axis(name: object, size: object) -> tuple[str, int]:
    if not isinstance(name, str) or not name.isidentifier():
        raise MeshError(
            f"axis name {shown(name)} is not a word; use letters, digits and underscores"
        )
    n = whole(size, f"the size of axis {name!r}", MeshError)
    if n < 1:
        raise MeshError(f"axis {name!r} has size {n}; give every axis at least one coordinate")
    return text(name, "the name of an axis", MeshError), n


def _check_ranks(ranks: tuple[int, ...], total: int, axes: Mapping[str, int]) -> None:
    shown = " ".join(f"{name}={n}" for name, n in axes.items()) or "no axes"
    if len(ranks) != total:
        raise MeshError(
            f"{plural(ranks, 'rank')} for a mesh {shown} of {total}; give one rank for each coordinate"
        )
    if len(set(ranks)) != total:
        twice = next(r for r, count in Counter(ranks).items() if count > 1)
        raise MeshError(
            f"rank {twice} appears twice in the mesh {shown}; a rank has one coordinate"
        )
    if max(ranks) >= MOST_RANKS:
        raise MeshError(
            f"rank {max(ranks)} of the mesh {shown} is too large; ranks are below {MOST_RANKS}"
        )
    if min(ranks) < 0:
        raise MeshError(f"rank {min(ranks)} of the mesh {shown} is negative; number ranks from 0")


def _short(ranks: tuple[int, ...]) -> str:
    return (
        ", ".join(map(str, ranks))
        if len(ranks) <= 16
        else f"{', '.join(map(str, ranks[:8]))}, ... ({len(ranks)} in all)"
    )
