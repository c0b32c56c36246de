"""Owners: which ranks have which numbers of a row's indices.

1. A declared index has a spot for each number: coordinates, chunk and local number.
2. A **stacked** index is a dimension of the stored tensor, or spread in its name as {ep e}: a structure says what
   each coordinate has.
3. The owners of one instance are a sub-mesh. Where several coordinates have a number, and others have not, they
   lie along an axis `copy` of their own.

>>> side = Stored(rows.parse("w{ep e} = {e}.w : h"), (Mesh(dp=2, ep=2),))
>>> owners = Owners(side, side.rows[0])
>>> owner = owners.find((3,), {"e": 4})
>>> owner.mesh, [str(stack.at({"ep": 1})) for _, stack in owner.stacks.values()]
(Mesh(dp=2, ranks=[1, 3]), ['[2:4]'])
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from shardmath.algebra.mesh import Mesh
from shardmath.algebra.runs import Runs
from shardmath.base.errors import StoreError
from shardmath.storage import rows
from shardmath.storage.cutting import Frame, axes_of, lay_out
from shardmath.storage.laying import Stack, stack_names
from shardmath.storage.rows import Row
from shardmath.storage.stored import Stored
from shardmath.storage.structure import Group, Term, Word, list_words

__all__ = ["Owner", "Owners", "pile"]

Coords: TypeAlias = Mapping[str, int]
_Holders: TypeAlias = tuple[tuple[tuple[str, int], ...], ...]


class Owner(NamedTuple):
    """Who has one instance of a row.

    `local` has the local numbers of indices that are not stacked; `stacks` the global ones of those that are, with
    who has which.
    """

    mesh: Mesh
    chunk: int
    local: Mapping[str, int]
    stacks: Mapping[str, tuple[int, Stack]]


@dataclass
class _Found:
    """What is known of an owner so far."""

    where: dict[str, int]
    local: dict[str, int]
    stacks: dict[str, tuple[int, Stack]]
    chunk: int = 0


class Owners:
    """Finds the owners of a row's instances. Raises StoreError where no mesh has the row's axes."""

    def __init__(self, stored: Stored, row: Row) -> None:
        self.stored = stored
        self.row = row
        self.indices = [index.name for index in row.logical.indices]
        self.in_dims = stack_names(row)
        self.stacked = {*self.in_dims.values(), *self._list_spread()}
        self.mesh = self._choose_mesh()
        self.stacks: dict[tuple[str, int], Stack] = {}
        self.meshes: dict[object, Mesh] = {}

    def _list_spread(self) -> Iterator[str]:
        """The indices that the native name spreads over axes."""
        spread = self.row.spread
        if spread is not None:
            yield from (name for name in self.indices if name in spread.words)

    def _choose_mesh(self) -> Mesh:
        """The first mesh that has all axes that the row names."""
        known = {axis for mesh in self.stored.meshes for axis in mesh.shape}
        named = known.intersection(self._list_words())
        for mesh in self.stored.meshes:
            if named <= set(mesh.shape):
                return mesh
        axes = ", ".join(sorted(named))
        raise StoreError(f"no mesh has all of the axes {axes}; give the side one")

    def _list_words(self) -> Iterator[object]:
        """All that may be an axis: words of the structure, of an index, and the place."""
        yield from (word.name for word in list_words(self.row.dims or ()))
        for index in self.row.native.indices:
            yield from (word.rstrip("~") for word in index.words)
        if self.row.place:
            yield self.row.place.axis

    def find(self, numbers: Sequence[int], counts: Mapping[str, int]) -> Owner:
        """Who has the instance of these numbers; `counts` say how many a stacked index has.

        Raises StoreError for a number that no spot is declared for, and for one that nobody has.
        """
        found = _Found({}, {}, {})
        for index, number in zip(self.indices, numbers, strict=True):
            if index in self.stacked:
                found.stacks[index] = number, self._find_stack(index, counts[index])
            elif index in self.stored.indices:
                self._go_to_spot(index, number, found)
            else:
                found.local[index] = number
        if self.row.place:
            self._go_to(self.row.place, found)
        mesh = self._select(found)
        return Owner(mesh, found.chunk, found.local, found.stacks)

    def _go_to_spot(self, index: str, number: int, found: _Found) -> None:
        """Note where this number of a declared index is."""
        spots = self.stored.indices[index]
        if number >= len(spots):
            raise StoreError(
                f"index {index!r} is declared for {len(spots)} numbers, a tensor has number {number}"
            )
        spot = spots[number]
        found.where.update(spot.coords)
        found.chunk = spot.chunk
        found.local[index] = spot.number

    def _go_to(self, place: rows.Place, found: _Found) -> None:
        """Note the coordinate of the place. The last one's own is the last chunk there."""
        size = self.mesh.axis_size(place.axis)
        found.where[place.axis] = place.at % size
        if place.at < 0:
            # What stands behind all layers is with the last of them, in its virtual stage.
            spots = itertools.chain.from_iterable(self.stored.indices.values())
            found.chunk = max((spot.chunk for spot in spots), default=0)

    def _find_stack(self, index: str, count: int) -> Stack:
        """Who has which numbers of a stacked index."""
        key = index, count
        if key not in self.stacks:
            self.stacks[key] = self._make_stack(index, count)
        return self.stacks[key]

    def _make_stack(self, index: str, count: int) -> Stack:
        group = self._find_group(index)
        frame = Frame(self.mesh.shape, self.stored.numbers, {index: count}, self.stored.exact)
        axes = axes_of(group, frame)
        sizes = [self.mesh.axis_size(axis) for axis in axes]
        held = {}
        for at in itertools.product(*map(range, sizes)):
            coords = dict(zip(axes, at, strict=True))
            held[at] = lay_out(group, frame, coords)
        return Stack(axes, held)

    def _find_group(self, index: str) -> Group:
        """The structure of the index: its dimension, or its words in the native name."""
        for i, name in self.in_dims.items():
            if name == index and self.row.dims:
                dim = self.row.dims[i]
                return dim if isinstance(dim, Group) else Group(((Term((Word(dim),)),),))
        spread = self.row.spread
        words = spread.words if spread else (index,)
        return Group(((Term(_read_words(words)),),))

    def _select(self, found: _Found) -> Mesh:
        """The ranks that have the instance."""
        holders = []
        for number, stack in found.stacks.values():
            own = _list_holders(stack, number)
            if len(own) < len(stack.held):
                holders.append(own)
        key = (*found.where.items(), *holders)
        if key not in self.meshes:
            self.meshes[key] = self._make_mesh(found.where, holders)
        return self.meshes[key]

    def _make_mesh(self, where: Coords, holders: list[_Holders]) -> Mesh:
        """The sub-mesh at these coordinates, and at one choice of holders of each number."""
        parts = []
        # Redundant experts: the copies of one number are as many sub-meshes of one shape.
        for chosen in itertools.product(*holders):
            at = dict(where)
            for holder in chosen:
                at.update(holder)
            parts.append(self.mesh.select(**at))
        if not parts:
            raise StoreError(f"'{self.row}' has a number that no rank has; store every number")
        return parts[0] if len(parts) == 1 else pile(parts)


def _read_words(words: Sequence[str]) -> tuple[Word, ...]:
    """The words of an index in a name."""
    return tuple(Word(word.rstrip("~"), balanced=word.endswith("~")) for word in words)


def _list_holders(stack: Stack, number: int) -> _Holders:
    """The coordinates that have the number."""
    found = []
    for at, runs in stack.held.items():
        if _holds(runs, number):
            found.append(tuple(zip(stack.axes, at, strict=True)))
    return tuple(found)


def _holds(runs: Runs, number: int) -> bool:
    return any(g <= number < g + n for _, g, n in runs.segments)


def pile(meshes: Sequence[Mesh]) -> Mesh:
    """Meshes of the same axes, one after the other along an axis of copies."""
    ranks = [rank for mesh in meshes for rank in mesh.ranks]
    return Mesh({"copy": len(meshes), **meshes[0].shape}, ranks=ranks)
