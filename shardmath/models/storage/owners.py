"""Owners: the ranks that have each number of a row's indices.

1. A declared index has a spot for each number: coordinates, chunk and local number.
2. A **stacked** index is a dimension of the stored tensor, or is spread in its name as {ep e}: a structure says which
   numbers each coordinate has. A row has at most one.
3. The owners of one number of a stack are a sub-mesh. If several coordinates have the number, and others do not, an
   extra axis `copy` runs over them.
4. Layers and experts of equal shapes share what a row lays out for one of them.

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
from shardmath.models.storage.stored import Entry, Spot, Stored, Vocabulary
from shardmath.models.storage.structure import GroupedDim, Term, Word, list_words

__all__ = ["OwnedTensor", "Layouts", "Maker", "Owner", "Owners", "pile"]


class Owner(NamedTuple):
    """The ranks that hold a stored tensor or, if it stacks several tensors, the ranks that hold each of these.

    `meshes` has one mesh per number of the stack, or one without a stack; `local` has the other indices' local numbers.
    """

    meshes: tuple[Mesh, ...]
    chunk: int
    local: Mapping[str, int]
    stack: Stack | None

    @property
    def mask(self) -> int:
        """The ranks that hold any part of the tensor, as an integer in which bit r is set for rank r."""
        ranks = {rank for mesh in set(self.meshes) for rank in mesh.ranks}
        return sum(1 << rank for rank in ranks)

    def name(self, row: Row, star: str, local: Sequence[int]) -> list[str]:
        """List the names under which ranks store their experts: for each index in `local`, the name of a rank's expert
        at that index, counted from 0. In the names of the storage rule `row`, `star` replaces `*`, and the index
        replaces a placeholder such as {ep e}."""
        spread = row.spread
        if self.stack is None or spread is None:
            name = row.native.fill(self.local, star=star)
            return [name] * len(local)
        # Both {e} and {ep e} stand for the expert's number, which alone differs from name to name.
        expert = "{0}"
        pattern = row.native.fill(
            {**self.local, self.stack.index: expert, spread.name: expert}, star=star
        )
        return list(map(pattern.format, local))

    def list_names(self, row: Row, star: str) -> list[str]:
        """List, without repetition, the names under which ranks store the tensor of the storage rule `row`; `star`
        replaces `*` in the names. There is one name, except that experts stored as separate tensors have one for each
        expert index on a rank."""
        most = max(map(len, self.stack.held.values())) if self.stack else 1
        named = self.name(row, star, range(most))
        return list(dict.fromkeys(named))


@dataclass
class _Location:
    """Coordinates, local numbers and chunk of an owner, filled in index by index. The chunk is None if nothing has said
    it so far."""

    coords: dict[str, int]
    local: dict[str, int]
    chunk: int | None = None


class Owners:
    """A finder of the ranks that hold the tensors of one Row (a rule for how tensors of one name pattern are stored).

    Raises StoreError if no mesh has all of the row's axes.
    """

    def __init__(self, stored: Stored, row: Row) -> None:
        self.stored = stored
        self.row = row
        self.indices = [index.name for index in row.logical.indices]
        # The declared indices with virtual stages. Found once: an index may have thousands of numbers.
        self.staged = [name for name, spots in stored.indices.items() if _has_stages(spots)]
        self.in_dims = stack_names(row)
        self.stacked = self._find_stacked()
        self.mesh = self._choose_mesh()
        self.stacks: dict[int, Stack] = {}  # by the number of tensors in the stack
        self.meshes: dict[object, tuple[Mesh, ...]] = {}  # by coordinates, and number in the stack

    def _find_stacked(self) -> str | None:
        """The index that is a dimension or spread in the native name. Raises StoreError for two, or one in both."""
        in_name = {word for index in self.row.native.indices for word in index.words}
        both = in_name.intersection(self.in_dims.values())
        if both:
            what = f"index {min(both)!r} of '{self.row}' is a dimension, and in the stored name"
            raise StoreError(f"{what}; write it in only one of the two")
        spread = self.row.spread
        words = spread.words if spread else ()
        stacked = [name for name in self.indices if name in words or name in self.in_dims.values()]
        if len(stacked) > 1:
            listed = " and ".join(stacked)
            what = f"'{self.row}' stacks the tensors of both indices {listed}"
            raise StoreError(f"{what}; write one of them without an axis in both names, as {{l}}")
        return stacked[0] if stacked else None

    def place_stacked(self) -> int | None:
        """Return the position (0, 1, ...) of the placeholder that numbers stacked tensors, such as {e} for experts,
        among all placeholders of the logical name. Returns None if no tensors are stacked."""
        return None if self.stacked is None else self.indices.index(self.stacked)

    def _choose_mesh(self) -> Mesh:
        """The first mesh with all axes that the row names."""
        known = {axis for mesh in self.stored.meshes for axis in mesh.shape}
        named = known.intersection(self._list_words())
        for mesh in self.stored.meshes:
            if named <= set(mesh.shape):
                return mesh
        axes = ", ".join(sorted(named))
        meshes = "; ".join(map(str, self.stored.meshes))
        what = (
            f"'{self.row}' names the axes {axes}, and no mesh of the side has all of them: {meshes}"
        )
        raise StoreError(f"{what}; add a mesh that has them to meshes=")

    def _list_words(self) -> Iterator[object]:
        """The words that may be axes: those of the structure, of indices and of the place."""
        yield from (word.name for word in list_words(self.row.dims or ()))
        for index in self.row.native.indices:
            yield from (word.rstrip("~") for word in index.words)
        if self.row.place:
            yield self.row.place.axis

    def find(self, numbers: Sequence[int], count: int) -> Owner:
        """Return the Owner (ranks) of a stored tensor that stacks `count` tensors, such as experts. `numbers` are the
        numbers in their logical names, such as the layer, without the expert number.

        `numbers` leaves out the stacked index; without one, `count` has no effect. Raises StoreError for a number
        without a declared spot, and for one that no rank has.
        """
        location = self._locate(numbers)
        stack = self._find_stack(count) if self.stacked else None
        if stack is not None:
            _check_free(self.row, location.coords.keys() & stack.axes)
        key = (*location.coords.items(), count)
        meshes = self.meshes.get(key)
        if meshes is None:
            meshes = tuple(self._list_meshes(location.coords, stack))
            self.meshes[key] = meshes
        return Owner(meshes, location.chunk or 0, location.local, stack)

    def _locate(self, numbers: Sequence[int]) -> _Location:
        """The location given by these numbers of the indices that are not stacked, and by the row's place."""
        location = _Location({}, {})
        others = [index for index in self.indices if index != self.stacked]
        for index, number in zip(others, numbers, strict=True):
            if index in self.stored.indices:
                self._add_spot(index, number, location)
            else:
                location.local[index] = number
        if self.row.place:
            self._add_place(self.row.place, location)
        return location

    def _add_spot(self, index: str, number: int, location: _Location) -> None:
        """Add the spot of this number of a declared index to the location."""
        spots = self.stored.indices[index]
        if number >= len(spots):
            raise StoreError(
                f"index {index!r} is declared for {len(spots)} numbers, and a tensor has number {number}; "
                f"declare {number + 1} numbers, or leave the tensor out"
            )
        spot = spots[number]
        # An index without virtual stages, such as one of experts, is in the chunk of the others.
        if index in self.staged:
            self._add_chunk(spot.chunk, location, f"index {index!r}")
        location.local[index] = spot.number
        for axis, coordinate in spot.coords.items():
            self._add_coordinate(axis, coordinate, location, f"index {index!r}")

    def _add_coordinate(self, axis: str, coordinate: int, location: _Location, why: str) -> None:
        """Add a coordinate to the location. Raises StoreError if it has another one on the axis."""
        before = location.coords.setdefault(axis, coordinate)
        if before != coordinate:
            raise StoreError(
                f"'{self.row}' is at {axis}={before} and, by {why}, at {axis}={coordinate}; "
                f"make the two equal, or leave one of them out"
            )

    def _add_chunk(self, chunk: int, location: _Location, why: str) -> None:
        """Set the location's chunk. Raises StoreError if it is in another one."""
        if location.chunk not in (None, chunk):
            raise StoreError(
                f"'{self.row}' is in chunk {location.chunk} and, by {why}, in chunk {chunk}; "
                f"make the two equal, or leave one of them out"
            )
        location.chunk = chunk

    def _add_place(self, place: rows.AxisPlace, location: _Location) -> None:
        """Add the coordinate of the row's place to the location; for the last one, the last chunk too. A number of an
        index, such as the last layer's, places the tensor where this number is."""
        if place.axis in self.stored.indices:
            self._add_spot_of(place, location)
            return
        size = self.mesh.axis_size(place.axis)
        if not -size <= place.at < size:
            what = f"'{place}' is not on axis {place.axis!r} of size {size}"
            raise StoreError(f"{what}; use 0 to {size - 1}, or -1 for the last")
        self._add_coordinate(place.axis, place.at % size, location, str(place))
        if place.at == -1:
            self._add_last_chunk(place, location)

    def _add_spot_of(self, place: rows.AxisPlace, location: _Location) -> None:
        """Add the coordinates and the chunk of a number of a declared index. Raises StoreError for a number that the
        index does not have."""
        spots = self.stored.indices[place.axis]
        if not -len(spots) <= place.at < len(spots):
            what = f"'{place}' is not a number of index {place.axis!r}, which has {len(spots)}"
            raise StoreError(f"{what}; use one of its numbers, or -1 for the last")
        spot = spots[place.at]
        self._add_chunk(spot.chunk, location, str(place))
        for axis, coordinate in spot.coords.items():
            self._add_coordinate(axis, coordinate, location, str(place))

    def _add_last_chunk(self, place: rows.AxisPlace, location: _Location) -> None:
        """Add the last virtual stage to the location of tensors behind all layers, if the row's place is on the axis of
        pipeline stages. Every pipeline stage has equally many virtual stages."""
        spots = [spot for index in self.staged for spot in self.stored.indices[index]]
        axes = {axis for spot in spots for axis in spot.coords}
        # The last coordinate of an axis without pipeline stages is in any of them.
        if spots and (place.axis in axes or not axes):
            self._add_chunk(max(spot.chunk for spot in spots), location, str(place))

    def _find_stack(self, count: int) -> Stack:
        """The stack of `count` numbers, made once per count."""
        stack = self.stacks.get(count)
        if stack is None:
            stack = self._make_stack(count)
            self.stacks[count] = stack
        return stack

    def _make_stack(self, count: int) -> Stack:
        """The stack of `count` numbers: those that each coordinate has. Raises LayoutError as `lay_out` does."""
        stored = self.stored
        index = self.stacked or ""  # only rows with a stacked index have a stack
        group = self._find_group(index)
        frame = Frame(self.mesh.shape, stored.numbers, {index: count}, stored.exact)
        axes = axes_of(group, frame)
        sizes = map(self.mesh.axis_size, axes)
        held = {}
        for point in itertools.product(*map(range, sizes)):
            coords = dict(zip(axes, point, strict=True))
            try:
                held[point] = lay_out(group, frame, coords)
            except LayoutError as error:
                ranks = self.mesh.select(**coords).ranks
                raise LayoutError(f"{count_ranks(ranks)}: {error}") from error
        return Stack(index, count, axes, held)

    def _find_group(self, index: str) -> GroupedDim:
        """The structure of the stacked index: its dimension, or its words in the native name."""
        dims = self.row.dims or ()
        for i, name in self.in_dims.items():
            if name == index:
                dim = dims[i]
                return dim if isinstance(dim, GroupedDim) else _make_group(Word(dim))
        spread = self.row.spread
        words = map(_read_word, spread.words if spread else (index,))
        return _make_group(*words)

    def _list_meshes(self, coords: Mapping[str, int], stack: Stack | None) -> Iterator[Mesh]:
        """The mesh at these coordinates, for each number of the stack or, without one, the stored tensor."""
        whole = self.mesh.select(**coords)
        if stack is None:
            yield whole
            return
        known: dict[object, Mesh] = {}  # by holders
        all_coordinates = len(stack.held)
        for number, holders in enumerate(stack.list_holders()):
            if not holders:
                what = f"no rank has number {number} of the {stack.count} that '{self.row}' stacks"
                raise StoreError(f"{what}; write a structure that stores every number")
            if len(holders) == all_coordinates:
                yield whole
                continue
            mesh = known.get(holders)
            if mesh is None:
                mesh = self._make_mesh(coords, stack, holders)
                known[holders] = mesh
            yield mesh

    def _make_mesh(
        self, coords: Mapping[str, int], stack: Stack, holders: tuple[tuple[int, ...], ...]
    ) -> Mesh:
        """The mesh at these coordinates, restricted to the holders of one number."""
        parts = []
        for holder in holders:
            held_at = dict(zip(stack.axes, holder, strict=True))
            parts.append(self.mesh.select(**coords, **held_at))
        # Redundant experts: every copy of a number is a sub-mesh, and all have one shape.
        return parts[0] if len(parts) == 1 else pile(parts)


def _has_stages(spots: Sequence[Spot]) -> bool:
    """Whether an index with these spots says in which virtual stage each number is."""
    return any(spot.chunk for spot in spots)


def _check_free(row: Row, fixed: Set[str]) -> None:
    """Raise StoreError for axes that divide the row's tensor while the tensor is at one coordinate of them."""
    if fixed:
        what = f"'{row}' divides by axis {min(fixed)!r}, and is at only one coordinate of this axis"
        raise StoreError(
            f"{what}; leave the axis out of its structure, or out of its place or index"
        )


def _read_word(written: str) -> Word:
    """A word of a spread index, such as ep or ep~."""
    name = written.rstrip("~")
    return Word(name, balanced=written.endswith("~"))


def _make_group(*words: Word) -> GroupedDim:
    """The group of one term, which has these words."""
    return GroupedDim(((Term(words),),))


def pile(meshes: Sequence[Mesh]) -> Mesh:
    """Join meshes of equal shape into one mesh with a new first axis, along which `meshes` follow each other. The axis
    is named "copy" or, if the meshes have such an axis, "copy2", "copy3" and so on."""
    ranks = [rank for mesh in meshes for rank in mesh.ranks]
    axes = meshes[0].shape
    names = itertools.chain(["copy"], (f"copy{number}" for number in itertools.count(2)))
    new = next(name for name in names if name not in axes)
    shape = {new: len(meshes), **axes}
    return Mesh(shape, ranks=ranks)


class OwnedTensor(NamedTuple):
    """A stored tensor: which logical tensors it contains, where they are in it, and which ranks have it. `names` has a
    list for each component, such as q: one logical name, or one for each stacked expert."""

    names: tuple[list[str], ...]
    laid: Laid
    owner: Owner


Layouts: TypeAlias = tuple[tuple[Layout, ...], ...]
"""The layouts of each component of a stored tensor, by number of the stack."""


class Maker:
    """A maker of OwnedTensors: one for each stored tensor that a row (a storage rule) describes, together with the
    layouts of the logical tensors in it."""

    def __init__(
        self, stored: Stored, vocabulary: Vocabulary, row: Row, components: tuple[str, ...]
    ) -> None:
        self.stored = stored
        self.vocabulary = vocabulary
        self.row = row
        self.components = components
        self.owners = Owners(stored, row)
        self.laid: dict[object, Laid] = {}  # by shapes, dtypes and number in the stack
        self.made: dict[object, Layouts] = {}  # by the same, and the owner's meshes

    def make(
        self, numbers: Sequence[int], names: Sequence[Mapping[int, str]]
    ) -> tuple[OwnedTensor, Layouts]:
        """Return the stored tensor that consists of the logical tensors `names`, and their layouts: layouts[i][j] is
        for component i, such as gate or up, and expert j. `names[i]` maps the experts' numbers to the names for
        component i; `numbers` has the numbers that all names share, such as the layer's.

        Layouts are in order of expert number. Raises StoreError if
        numbers of a stack are missing, or differ in shape or dtype.
        """
        ordered = tuple(
            self.vocabulary.order(by_number, self.owners.stacked) for by_number in names
        )
        count = len(ordered[0])
        owner = self.owners.find(numbers, count)
        entries = tuple(self.vocabulary.shapes[listed[0]] for listed in ordered)
        key = entries, count
        laid = self.laid.get(key)
        if laid is None:
            laid = self._lay(entries, owner)
            self.laid[key] = laid
        # Layers of one stage share one tuple of meshes, and so of layouts.
        shared = key, id(owner.meshes)
        layouts = self.made.get(shared)
        if layouts is None:
            layouts = self._make_layouts(entries, laid, owner)
            self.made[shared] = layouts
        return OwnedTensor(ordered, laid, owner), layouts

    def _lay(self, entries: tuple[Entry, ...], owner: Owner) -> Laid:
        """The positions of components with these shapes in the stored tensor."""
        frame = Frame(self.owners.mesh.shape, self.stored.numbers, {}, self.stored.exact)
        shapes = [shape for shape, _ in entries]
        by_word = dict(zip(self.components, shapes, strict=True))
        return lay(self.row, by_word, frame, owner.stack)

    def _make_layouts(self, entries: tuple[Entry, ...], laid: Laid, owner: Owner) -> Layouts:
        """The layout of each component, by number of the stack."""
        layouts = []
        meshes = set(owner.meshes)
        for word, (shape, dtype) in zip(self.components, entries, strict=True):
            dims = laid.dims[word]
            divided = {axis for dim in dims for axis in dim.axes}
            for mesh in meshes:
                _check_free(self.row, divided.difference(mesh.shape))
            by_mesh = {mesh: intern(shape, dtype, mesh, dims, ()) for mesh in meshes}
            layouts.append(tuple(by_mesh[mesh] for mesh in owner.meshes))
        return tuple(layouts)
