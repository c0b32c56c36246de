"""Binding: which row of a side stores which tensor, and where each rank has it.

1. The first row all of whose tensors exist takes them. What no row takes is an error, and so is all else that
   does not fit, in one message.
2. Plans speak of logical tensors: each has one layout. Names that ranks store are made when a rank asks.

>>> from shardmath.storage import rows
>>> side = Stored(rows.parse('''
... qkv.* = [q k v].* : (tp q + tp k + tp v) h
... o.*   = o.*       : h (tp n)
... '''), (Mesh(dp=2, tp=2),))
>>> bound = bind(side, {f"{name}.weight": ((4, 4), "float32") for name in "qkvo"})
>>> print(bound.layouts["k.weight"])
float32[4, 4] (tp n) h on dp=2 tp=2
>>> bound.natives(1), bound.slots(1)["k.weight"].cut
({(0, 'qkv.weight'): (6, 4), (0, 'o.weight'): (4, 2)}, (slice(2, 4, 1), slice(0, 4, 1)))
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from shardmath.algebra.mesh import Mesh
from shardmath.algebra.runs import Runs
from shardmath.base.errors import ShardError, StoreError
from shardmath.layouts.layout import Layout, intern
from shardmath.storage.cutting import Frame
from shardmath.storage.laying import Laid, lay, stack_names
from shardmath.storage.names import STARS, Index, split
from shardmath.storage.owners import Owner, Owners, pile
from shardmath.storage.rows import Row
from shardmath.storage.stored import Shapes, Slot, Stored

__all__ = ["Bound", "bind"]

_Numbers: TypeAlias = tuple[int, ...]
_Shape: TypeAlias = tuple[int, ...]
_Named: TypeAlias = Mapping[_Numbers, str]
"""The tensors of one template, by their numbers."""

SHOWN = 5
"""Tensors without a row that a message names."""


class _Instance(NamedTuple):
    """One stored tensor, or one number of a stack."""

    laid: Laid
    owner: Owner
    layouts: tuple[Layout, ...]


@dataclass(frozen=True, slots=True)
class _Held:
    """What one row stores with one star: its components, their names, and its instances by number."""

    row: Row
    star: str
    components: tuple[str, ...]
    names: tuple[_Named, ...]
    instances: Mapping[_Numbers, _Instance]


@dataclass(frozen=True, slots=True)
class Bound:
    """A side whose tensors are known: the layout of each, and where ranks store it."""

    stored: Stored
    layouts: Mapping[str, Layout]
    held: tuple[_Held, ...]

    def slots(self, rank: int) -> dict[str, Slot]:
        """Where each tensor that the rank holds a part of lies, by logical name."""
        return {name: slot for name, slot, _ in self.visit(rank)}

    def natives(self, rank: int) -> dict[tuple[int, str], _Shape]:
        """The shape of each tensor that the rank stores, by chunk and name."""
        return {(slot.chunk, slot.native): shape for _, slot, shape in self.visit(rank)}

    def visit(self, rank: int) -> Iterator[tuple[str, Slot, _Shape]]:
        """(logical name, slot, shape of the stored tensor) of all that the rank holds."""
        coords: dict[str, int] = {}
        for mesh in self.stored.meshes:
            coords = {**mesh.coords(rank), **coords}
        for held in self.held:
            in_dims = stack_names(held.row).values()
            for numbers, one in held.instances.items():
                if rank in one.owner.mesh:
                    found = _Stored(held, one, coords, in_dims)
                    yield from found.list_slots(numbers)


class _Stored:
    """One stored tensor of a rank at these coordinates."""

    def __init__(
        self, held: _Held, one: _Instance, coords: Mapping[str, int], in_dims: Iterable[str]
    ) -> None:
        self.held = held
        self.one = one
        self.coords = coords
        local = dict(one.owner.local)
        for index, (number, stack) in one.owner.stacks.items():
            local[index] = _find_position(stack.at(coords), number)
        self.stacked = {index: local[index] for index in in_dims}
        self.native = self._fill(local)

    def _fill(self, local: Mapping[str, int]) -> str:
        """The native name; an index that is spread in it has its local number."""
        numbers = dict(local)
        row = self.held.row
        for spread in row.native.indices:
            numbers[spread.name] = local[_find_index(spread, local)]
        return row.native.fill(numbers, star=self.held.star)

    def list_slots(self, numbers: _Numbers) -> Iterator[tuple[str, Slot, _Shape]]:
        """(logical name, slot, shape of the stored tensor) of each component."""
        laid = self.one.laid
        held = self.held
        chunk = self.one.owner.chunk
        shape = laid.shape(self.coords)
        for component, names in zip(held.components, held.names, strict=True):
            cut = laid.cut(component, self.coords, self.stacked)
            slot = Slot(chunk, self.native, cut, laid.order, held.row.function)
            yield names[numbers], slot, shape


def _find_index(spread: Index, local: Mapping[str, int]) -> str:
    """Which word is the index; the others are axes and numbers."""
    return next(word.rstrip("~") for word in spread.words if word.rstrip("~") in local)


def _find_position(runs: Runs, number: int) -> int:
    """The local number of a global one that the runs hold."""
    for lo, g, n in runs.segments:
        if g <= number < g + n:
            return lo + number - g
    raise StoreError(f"number {number} is not in {runs}")


def bind(stored: Stored, shapes: Shapes) -> Bound:
    """Which of these tensors lies where.

    Raises StoreError with all that does not fit.
    """
    return _Binder(stored, shapes).bind()


class _Binder:
    """Gives tensors to rows, once."""

    def __init__(self, stored: Stored, shapes: Shapes) -> None:
        self.stored = stored
        self.shapes = shapes
        self.templates: dict[str, dict[_Numbers, str]] = {}
        for name in shapes:
            template, numbers = split(name)
            self.templates.setdefault(template, {})[numbers] = name
        self.layouts: dict[str, Layout] = {}

    def bind(self) -> Bound:
        """All rows, and an error for all that does not fit."""
        held = []
        faults = []
        for row in self._list_rows():
            for star in STARS if row.logical.starred else ("",):
                try:
                    found = self._hold(row, star)
                except ShardError as error:
                    faults.append(f"{error}\nin the row {row}")
                    continue
                if found is not None:
                    held.append(found)
        self._check(faults)
        return Bound(self.stored, self.layouts, tuple(held))

    def _list_rows(self) -> Iterator[Row]:
        """The rows, and one for each template that an open row takes."""
        for row in self.stored.rows:
            if not row.logical.is_open:
                yield row
                continue
            start = row.logical.template()
            # What a row before has taken it does not take again, so all that begin so may be tried.
            for template in self.templates:
                if template.startswith(start):
                    yield row.close(template.removeprefix(start))

    def _check(self, faults: list[str]) -> None:
        """Raise StoreError with all that does not fit."""
        missing = [name for name in self.shapes if name not in self.layouts]
        if missing and not faults:
            more = f" and {len(missing) - SHOWN} more" if len(missing) > SHOWN else ""
            faults.append(f"no row stores {', '.join(missing[:SHOWN])}{more}; add rows for them")
        if faults:
            raise StoreError("\n".join(faults))

    def _hold(self, row: Row, star: str) -> _Held | None:
        """What the row stores with this star; None for nothing."""
        words = row.logical.components or ("",)
        names = []
        for word in words:
            template = row.logical.template(word, star)
            names.append(self.templates.get(template, {}))
        taken = list(self._list_taken(row, names))
        if not taken:
            return None
        instances = _Maker(self.stored, self.shapes, row, words, names).make(taken)
        for numbers, one in list(instances.items()):
            own = [of[numbers] for of in names]
            if not self._note(row, own, one):
                del instances[numbers]
        return _Held(row, star, words, tuple(names), instances)

    def _list_taken(self, row: Row, names: Sequence[_Named]) -> Iterator[_Numbers]:
        """The numbers for which all components are there, and no row before has taken them."""
        first, *rest = names
        for numbers, name in first.items():
            taken = name in self.layouts
            complete = all(numbers in other for other in rest)
            if complete and taken == row.also and self._applies(row, numbers):
                yield numbers

    def _applies(self, row: Row, numbers: _Numbers) -> bool:
        """Whether the row's conditions hold."""
        indices = (index.name for index in row.logical.indices)
        by_index = dict(zip(indices, numbers, strict=True))
        needed = row.needs is None or row.needs.fill(by_index) in self.shapes
        return needed and (row.lacks is None or row.lacks.fill(by_index) not in self.shapes)

    def _note(self, row: Row, names: list[str], one: _Instance) -> bool:
        """Keep the layouts; False for a copy where the tensor is already."""
        for name, layout in zip(names, one.layouts, strict=True):
            if not row.also:
                self.layouts[name] = layout
                continue
            # Where one stage is first and last, the copy is the tensor itself.
            before = self.layouts[name]
            if not set(before.mesh.ranks).isdisjoint(layout.mesh.ranks):
                return False
            self.layouts[name] = _merge(before, layout)
        return True


class _Maker:
    """Makes the instances of one row: layers and experts that are alike share what is laid out."""

    def __init__(
        self,
        stored: Stored,
        shapes: Shapes,
        row: Row,
        components: tuple[str, ...],
        names: Sequence[_Named],
    ) -> None:
        self.stored = stored
        self.shapes = shapes
        self.row = row
        self.components = components
        self.names = names
        self.owners = Owners(stored, row)
        self.laid: dict[object, Laid] = {}
        self.made: dict[object, tuple[Layout, ...]] = {}

    def make(self, taken: list[_Numbers]) -> dict[_Numbers, _Instance]:
        """The instances by their numbers."""
        counts = self._count(taken)
        indices = self.owners.indices
        made = {}
        for numbers in taken:
            own = {}
            for i, index in enumerate(indices):
                if index in self.owners.stacked:
                    own[index] = counts[index, numbers[:i] + numbers[i + 1 :]]
            owner = self.owners.find(numbers, own)
            made[numbers] = self._make_one(numbers, owner)
        return made

    def _count(self, taken: list[_Numbers]) -> dict[tuple[str, _Numbers], int]:
        """How many numbers each stacked index has, for each choice of the other numbers."""
        seen: dict[tuple[str, _Numbers], set[int]] = {}
        for i, index in enumerate(self.owners.indices):
            if index in self.owners.stacked:
                for numbers in taken:
                    others = numbers[:i] + numbers[i + 1 :]
                    seen.setdefault((index, others), set()).add(numbers[i])
        for (index, _), found in seen.items():
            absent = set(range(max(found) + 1)) - found
            if absent:
                raise StoreError(
                    f"number {min(absent)} of index {index!r} is missing, {max(found)} is there; "
                    f"give all of a stack"
                )
        return {key: len(found) for key, found in seen.items()}

    def _make_one(self, numbers: _Numbers, owner: Owner) -> _Instance:
        """The instance of these numbers."""
        names = [of[numbers] for of in self.names]
        entries = [self.shapes[name] for name in names]
        laid = self._lay(tuple(shape for shape, _ in entries), owner)
        key = id(laid), owner.mesh, tuple(dtype for _, dtype in entries)
        if key not in self.made:
            self.made[key] = self._make_layouts(entries, laid, owner.mesh)
        return _Instance(laid, owner, self.made[key])

    def _lay(self, shapes: tuple[_Shape, ...], owner: Owner) -> Laid:
        stacks = {name: stack for name, (_, stack) in owner.stacks.items()}
        # Stacks are kept by `owners`, so that their identities stay theirs.
        key = shapes, *map(id, stacks.values())
        if key not in self.laid:
            axes = self.owners.mesh.shape
            frame = Frame(axes, self.stored.numbers, {}, self.stored.exact)
            by_word = dict(zip(self.components, shapes, strict=True))
            self.laid[key] = lay(self.row, by_word, frame, stacks)
        return self.laid[key]

    def _make_layouts(
        self, entries: list[tuple[_Shape, str]], laid: Laid, mesh: Mesh
    ) -> tuple[Layout, ...]:
        """A layout per component."""
        layouts = []
        for word, (shape, dtype) in zip(self.components, entries, strict=True):
            layouts.append(intern(shape, dtype, mesh, laid.dims[word], ()))
        return tuple(layouts)


def _merge(one: Layout, other: Layout) -> Layout:
    """The layout of two copies on different ranks. Raises StoreError where they lie otherwise."""
    if one.dims != other.dims or one.mesh.shape != other.mesh.shape:
        raise StoreError(f"copies '{one}' and '{other}' lie otherwise; store them alike")
    mesh = pile([one.mesh, other.mesh])
    return intern(one.shape, one.dtype, mesh, one.dims, ())
