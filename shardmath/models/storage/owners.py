"""Owners: which ranks have which numbers of a row's indices.

1. A declared index has a spot for each number: coordinates, chunk and local number.
2. A **stacked** index is a dimension of the stored tensor, or spread in its name as {ep e}: a structure says what
   each coordinate has. A row has one at most.
3. The owners of one number of a stack are a sub-mesh. Where several coordinates have it, and others have not, they
   lie along an axis `copy` of their own.
4. What a row lays out for one layer or expert, those that are alike share.

>>> side = Stored(rows.parse("w{ep e} = {e}.w : h"), (Mesh(dp=2, ep=2),))
>>> owner = Owners(side, side.rows[0]).find((), count=4)
>>> owner.meshes[3], str(owner.stack.at({"ep": 1}))
(Mesh(dp=2, ranks=[1, 3]), '[2:4]')
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from shardmath.base.errors import LayoutError, StoreError
from shardmath.base.text import count_ranks
from shardmath.layouts.algebra.mesh import Mesh
from shardmath.layouts.layout import Layout, intern
from shardmath.models.storage import rows
from shardmath.models.storage.cutting import Frame, axes_of, lay_out
from shardmath.models.storage.laying import Laid, Stack, lay, stack_names
from shardmath.models.storage.rows import Row
from shardmath.models.storage.stored import Entry, Stored, Vocabulary
from shardmath.models.storage.structure import GroupedDim, Term, Word, list_words

__all__ = ["OwnedTensor", "Layouts", "Maker", "Owner", "Owners", "pile"]


class Owner(NamedTuple):
    """Who has a stored tensor, or a stack.

    `meshes` has one mesh per number of the stack, or one; `local` the local numbers of the other indices.
    """

    meshes: tuple[Mesh, ...]
    chunk: int
    local: Mapping[str, int]
    stack: Stack | None

    @property
    def mask(self) -> int:
        """The ranks that have any of it, as the bits of an integer: such sets are compared in one step."""
        ranks = {rank for mesh in set(self.meshes) for rank in mesh.ranks}
        return sum(1 << rank for rank in ranks)

    def name(self, row: Row, star: str, local: Sequence[int]) -> list[str]:
        """The names that ranks store; an index that is spread in them has these local numbers."""
        numbers = dict(self.local)
        spread = row.spread
        if self.stack is None or spread is None:
            name = row.native.fill(numbers, star=star)
            return [name] * len(local)
        names = []
        for number in local:
            numbers[self.stack.index] = number
            numbers[spread.name] = number
            name = row.native.fill(numbers, star=star)
            names.append(name)
        return names

    def list_names(self, row: Row, star: str) -> list[str]:
        """All names under which any rank stores a part of it."""
        most = max(map(len, self.stack.held.values())) if self.stack else 1
        named = self.name(row, star, range(most))
        return list(dict.fromkeys(named))


@dataclass
class _Found:
    """What is known of an owner so far."""

    where: dict[str, int]
    local: dict[str, int]
    chunk: int = 0


class Owners:
    """Finds the owners of a row's instances. Raises StoreError where no mesh has the row's axes."""

    def __init__(self, stored: Stored, row: Row) -> None:
        self.stored = stored
        self.row = row
        self.indices = [index.name for index in row.logical.indices]
        self.in_dims = stack_names(row)
        self.stacked = self._find_stacked()
        self.mesh = self._choose_mesh()
        self.stacks: dict[int, Stack] = {}
        self.meshes: dict[object, tuple[Mesh, ...]] = {}

    def _find_stacked(self) -> str | None:
        """The index that is a dimension, or spread in the native name. Raises StoreError for two, and for one twice."""
        native = {word for index in self.row.native.indices for word in index.words}
        both = native.intersection(self.in_dims.values())
        if both:
            what = f"index {min(both)} is a dimension, and in the stored name"
            raise StoreError(f"{what}; write it in one of them")
        spread = self.row.spread
        words = spread.words if spread else ()
        found = [name for name in self.indices if name in words or name in self.in_dims.values()]
        if len(found) > 1:
            raise StoreError(f"indices {' and '.join(found)} are both stacked; declare one of them")
        return found[0] if found else None

    def place_stacked(self) -> int | None:
        """Which of the row's indices is stacked, counted from 0; None where none is."""
        return None if self.stacked is None else self.indices.index(self.stacked)

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

    def find(self, numbers: Sequence[int], count: int) -> Owner:
        """Who has what these numbers of the indices that are not stacked say, in a stack of so many.

        Raises StoreError for a number that no spot is declared for, and for one that nobody has.
        """
        found = self._locate(numbers)
        stack = self._find_stack(count) if self.stacked else None
        if stack is not None:
            _check_free(self.row, found.where.keys() & stack.axes)
        key = (*found.where.items(), count)
        meshes = self.meshes.get(key)
        if meshes is None:
            listed = self._list_meshes(found.where, stack)
            meshes = tuple(listed)
            self.meshes[key] = meshes
        return Owner(meshes, found.chunk, found.local, stack)

    def _locate(self, numbers: Sequence[int]) -> _Found:
        """Where these numbers of the indices that are not stacked are, and the row's place."""
        found = _Found({}, {})
        declared = self.stored.indices
        others = [index for index in self.indices if index != self.stacked]
        for index, number in zip(others, numbers, strict=True):
            if index in declared:
                self._go_to_spot(index, number, found)
            else:
                found.local[index] = number
        place = self.row.place
        if place:
            self._go_to(place, found)
        return found

    def _go_to_spot(self, index: str, number: int, found: _Found) -> None:
        """Note where this number of a declared index is."""
        spots = self.stored.indices[index]
        if number >= len(spots):
            raise StoreError(
                f"index {index!r} is declared for {len(spots)} numbers, a tensor has number {number}"
            )
        spot = spots[number]
        # An index without virtual stages, such as one of experts, is in the chunk of the others.
        if spot.chunk and found.chunk not in (0, spot.chunk):
            what = f"index {index!r} puts number {number} in chunk {spot.chunk}, another one in {found.chunk}"
            raise StoreError(f"{what}; declare one chunk for '{self.row}'")
        found.chunk = max(found.chunk, spot.chunk)
        found.local[index] = spot.number
        for axis, at in spot.coords.items():
            self._go_along(axis, at, found, f"index {index!r}")

    def _go_along(self, axis: str, at: int, found: _Found, what: str) -> None:
        """Note a coordinate. Raises StoreError where the tensor is at another one already."""
        before = found.where.setdefault(axis, at)
        if before != at:
            raise StoreError(
                f"'{self.row}' is at {axis}={before} and, by {what}, at {axis}={at}; declare one place for it"
            )

    def _go_to(self, place: rows.AxisPlace, found: _Found) -> None:
        """Note the coordinate of the place; at the last one, the last chunk too."""
        size = self.mesh.axis_size(place.axis)
        if not -size <= place.at < size:
            what = f"'{place}' is not on axis {place.axis!r} of size {size}"
            raise StoreError(f"{what}; use 0 to {size - 1}, or -1 for the last")
        self._go_along(place.axis, place.at % size, found, str(place))
        if place.at == -1:
            # What stands behind all layers is in the last virtual stage, of which all stages have as many.
            declared = self.stored.indices.values()
            spots = itertools.chain.from_iterable(declared)
            chunks = [spot.chunk for spot in spots]
            found.chunk = max(chunks, default=0)

    def _find_stack(self, count: int) -> Stack:
        """Who has which of so many numbers."""
        stack = self.stacks.get(count)
        if stack is None:
            stack = self._make_stack(count)
            self.stacks[count] = stack
        return stack

    def _make_stack(self, count: int) -> Stack:
        stored = self.stored
        index = self.stacked or ""
        group = self._find_group(index)
        lengths = {index: count}
        frame = Frame(self.mesh.shape, stored.numbers, lengths, stored.exact)
        axes = axes_of(group, frame)
        sizes = map(self.mesh.axis_size, axes)
        coordinates = map(range, sizes)
        held = {}
        for at in itertools.product(*coordinates):
            coords = dict(zip(axes, at, strict=True))
            try:
                held[at] = lay_out(group, frame, coords)
            except LayoutError as error:
                ranks = self.mesh.select(**coords).ranks
                raise LayoutError(f"{count_ranks(ranks)}: {error}") from error
        return Stack(index, count, axes, held)

    def _find_group(self, index: str) -> GroupedDim:
        """The structure of the index: its dimension, or its words in the native name."""
        dims = self.row.dims or ()
        for i, name in self.in_dims.items():
            if name == index:
                dim = dims[i]
                return dim if isinstance(dim, GroupedDim) else _make_group(Word(dim))
        spread = self.row.spread
        written = spread.words if spread else (index,)
        words = map(_read_word, written)
        return _make_group(*words)

    def _list_meshes(self, where: Mapping[str, int], stack: Stack | None) -> Iterator[Mesh]:
        """The ranks that have each number of the stack, or the stored tensor."""
        whole = self.mesh.select(**where)
        if stack is None:
            yield whole
            return
        known: dict[object, Mesh] = {}
        everywhere = len(stack.held)
        for number, holders in enumerate(stack.list_holders()):
            if not holders:
                raise StoreError(f"no rank has number {number} of '{self.row}'; store every number")
            if len(holders) == everywhere:
                yield whole
                continue
            mesh = known.get(holders)
            if mesh is None:
                mesh = self._make_mesh(where, stack, holders)
                known[holders] = mesh
            yield mesh

    def _make_mesh(
        self, where: Mapping[str, int], stack: Stack, holders: tuple[tuple[int, ...], ...]
    ) -> Mesh:
        """The sub-mesh at these coordinates, and at those of the holders of one number."""
        parts = []
        for holder in holders:
            at = dict(zip(stack.axes, holder, strict=True))
            parts.append(self.mesh.select(**where, **at))
        # Redundant experts: the copies of one number are as many sub-meshes of one shape.
        return parts[0] if len(parts) == 1 else pile(parts)


def _check_free(row: Row, fixed: Set[str]) -> None:
    """Raise StoreError for axes that divide the row's tensor, and of which it has one coordinate."""
    if fixed:
        what = f"'{row}' divides by {min(fixed)!r}, and is at one coordinate of it"
        raise StoreError(f"{what}; leave the axis out of one of the two")


def _read_word(written: str) -> Word:
    """A word of an index in a name."""
    name = written.rstrip("~")
    return Word(name, balanced=written.endswith("~"))


def _make_group(*words: Word) -> GroupedDim:
    """The group of one term."""
    term = Term(words)
    stage = (term,)
    return GroupedDim((stage,))


def pile(meshes: Sequence[Mesh]) -> Mesh:
    """Meshes of the same axes, one after the other along an axis of copies."""
    ranks = [rank for mesh in meshes for rank in mesh.ranks]
    shape = {"copy": len(meshes), **meshes[0].shape}
    return Mesh(shape, ranks=ranks)


class OwnedTensor(NamedTuple):
    """A stored tensor: its components' names, one list per component, by number of the stack."""

    names: tuple[list[str], ...]
    laid: Laid
    owner: Owner


Layouts: TypeAlias = tuple[tuple[Layout, ...], ...]
"""Those of a block's components, by number of the stack."""


class Maker:
    """Makes the stored tensors of one row: layers and experts that are alike share what is laid out."""

    def __init__(
        self, stored: Stored, vocabulary: Vocabulary, row: Row, components: tuple[str, ...]
    ) -> None:
        self.stored = stored
        self.vocabulary = vocabulary
        self.row = row
        self.components = components
        self.owners = Owners(stored, row)
        self.laid: dict[object, Laid] = {}
        self.made: dict[object, Layouts] = {}

    def make(
        self, numbers: Sequence[int], names: Sequence[Mapping[int, str]]
    ) -> tuple[OwnedTensor, Layouts]:
        """The stored tensor of these numbers; `names` are its components' by number of the stack.

        Raises StoreError where numbers of a stack are missing, or differ in shape or dtype.
        """
        ordered = tuple(self.vocabulary.order(of, self.owners.stacked) for of in names)
        count = len(ordered[0])
        owner = self.owners.find(numbers, count)
        entries = tuple(self.vocabulary.shapes[of[0]] for of in ordered)
        key = entries, count
        laid = self.laid.get(key)
        if laid is None:
            laid = self._lay(entries, owner)
            self.laid[key] = laid
        # Layers of one stage have their owners' meshes, and so their layouts, as one tuple.
        shared = key, id(owner.meshes)
        layouts = self.made.get(shared)
        if layouts is None:
            layouts = self._make_layouts(entries, laid, owner)
            self.made[shared] = layouts
        return OwnedTensor(ordered, laid, owner), layouts

    def _lay(self, entries: tuple[Entry, ...], owner: Owner) -> Laid:
        stored = self.stored
        axes = self.owners.mesh.shape
        frame = Frame(axes, stored.numbers, {}, stored.exact)
        shapes = [shape for shape, _ in entries]
        by_word = dict(zip(self.components, shapes, strict=True))
        return lay(self.row, by_word, frame, owner.stack)

    def _make_layouts(self, entries: tuple[Entry, ...], laid: Laid, owner: Owner) -> Layouts:
        """The layouts of each component, by number."""
        layouts = []
        meshes = set(owner.meshes)
        for word, (shape, dtype) in zip(self.components, entries, strict=True):
            dims = laid.dims[word]
            divided = {axis for dim in dims for axis in dim.axes}
            for mesh in meshes:
                _check_free(self.row, divided.difference(mesh.shape))
            by_mesh = {mesh: intern(shape, dtype, mesh, dims, ()) for mesh in meshes}
            by_number = map(by_mesh.__getitem__, owner.meshes)
            layouts.append(tuple(by_number))
        return tuple(layouts)
