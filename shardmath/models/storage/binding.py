"""Binding: which row of a side stores which tensor, and where each rank has it.

1. The first row all of whose tensors exist takes them. What no row takes is an error, and so is all else that
   does not fit, in one message.
2. Plans speak of logical tensors: each has one layout. Names that ranks store are made when a rank asks.
3. No rank stores two logical tensors in the same cells: what a rank has under one name, one instance of one row
   stores there. A logical tensor that is stored under several names is legal, and so are copies on other ranks.

>>> from shardmath.layouts.algebra.mesh import Mesh
>>> from shardmath.models.storage import rows
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

import dataclasses
import itertools
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from shardmath.base.errors import ShardError, StoreError
from shardmath.layouts.layout import Layout, intern
from shardmath.models.storage.laying import stack_names
from shardmath.models.storage.names import STARS, matches
from shardmath.models.storage.owners import Layouts, Maker, OwnedTensor, pile
from shardmath.models.storage.rows import Row
from shardmath.models.storage.stored import Shapes, Slot, Stored, Vocabulary

__all__ = ["Bound", "Held", "bind"]

_Numbers: TypeAlias = tuple[int, ...]
_Shape: TypeAlias = tuple[int, ...]

SHOWN = 5
"""Tensors without a row that a message names."""


@dataclass(frozen=True, slots=True)
class Held:
    """What one row stores with one star."""

    row: Row
    star: str
    components: tuple[str, ...]
    blocks: tuple[OwnedTensor, ...]

    @property
    def names(self) -> set[str]:
        """All logical tensors in it."""
        by_component = itertools.chain.from_iterable(block.names for block in self.blocks)
        return set(itertools.chain.from_iterable(by_component))


@dataclass(frozen=True, slots=True)
class Bound:
    """A side whose tensors are known: the layout of each, and where ranks store it."""

    stored: Stored
    layouts: Mapping[str, Layout]
    held: tuple[Held, ...]

    @property
    def ranks(self) -> Collection[int]:
        """The ranks of the side."""
        return self.stored.meshes[0].ranks

    def slots(self, rank: int) -> dict[str, Slot]:
        """Where each tensor that the rank holds a part of lies, by logical name."""
        return {name: slot for name, slot, _ in self.visit(rank)}

    def natives(self, rank: int) -> dict[tuple[int, str], _Shape]:
        """The shape of each tensor that the rank stores, by chunk and name."""
        return {(slot.chunk, slot.native): shape for _, slot, shape in self.visit(rank)}

    def row_of(self, native: tuple[int, str], rank: int) -> Row:
        """The row by which the rank stores this tensor. Raises StoreError where it does not."""
        for held in self.held:
            for _, slot, _ in self.visit(rank, (held,)):
                if (slot.chunk, slot.native) == native:
                    return held.row
        raise StoreError(
            f"rank {rank} stores no {native[1]!r} in chunk {native[0]}; see its natives"
        )

    def find_computed(self, names: Collection[str]) -> tuple[str, Slot] | None:
        """The first of these logical tensors that any rank stores as a function of it, and where; None for none."""
        for held in self.held:
            # Few rows have functions, and only those are looked at rank by rank.
            if not held.row.function or held.names.isdisjoint(names):
                continue
            for rank in self.ranks:
                for name, slot, _ in self.visit(rank, (held,)):
                    if name in names:
                        return name, slot
        return None

    def visit(
        self, rank: int, rows: Sequence[Held] | None = None
    ) -> Iterator[tuple[str, Slot, _Shape]]:
        """(logical name, slot, shape of the stored tensor) of all that the rank holds, by these rows."""
        # Axes of one name mean the same on all meshes of a side, so that coordinates can be one mapping.
        coords: dict[str, int] = {}
        for mesh in self.stored.meshes:
            coords = {**mesh.coords(rank), **coords}
        for held in self.held if rows is None else rows:
            for block in held.blocks:
                numbers = [
                    (local, number)
                    for local, number in _list_numbers(block, coords)
                    if rank in block.owner.meshes[number]
                ]
                if numbers:
                    yield from _list_slots(held, block, coords, numbers)


def _list_numbers(block: OwnedTensor, coords: Mapping[str, int]) -> list[tuple[int, int]]:
    """(local number, number) of all that is stacked at these coordinates."""
    stack = block.owner.stack
    if stack is None:
        return [(0, 0)]
    numbers = stack.at(coords).indices().tolist()
    return [(local, number) for local, number in enumerate(numbers) if number >= 0]


def _list_slots(
    held: Held, block: OwnedTensor, coords: Mapping[str, int], numbers: list[tuple[int, int]]
) -> Iterator[tuple[str, Slot, _Shape]]:
    """(logical name, slot, shape of the stored tensor) of each component, for these numbers."""
    laid = block.laid
    order = laid.order
    shape = laid.shape(coords)
    owner = block.owner
    chunk = owner.chunk
    function = held.row.function
    local = [own for own, _ in numbers]
    natives = owner.name(held.row, held.star, local)
    for component, names in zip(held.components, block.names, strict=True):
        cuts = laid.cuts(component, coords, local)
        for (_, number), native, cut in zip(numbers, natives, cuts, strict=True):
            slot = Slot(chunk, native, cut, order, function)
            yield names[number], slot, shape


def bind(stored: Stored, tensors: Shapes | Vocabulary, unused: Sequence[str] = ()) -> Bound:
    """Which of these tensors lies where. No row has to store what fits a glob of `unused`.

    Raises StoreError with all that does not fit.
    """
    vocabulary = tensors if isinstance(tensors, Vocabulary) else Vocabulary(tensors)
    return _Binder(stored, vocabulary, unused).bind()


class _Binder:
    """Gives tensors to rows, once."""

    def __init__(self, stored: Stored, vocabulary: Vocabulary, unused: Sequence[str]) -> None:
        self.stored = stored
        self.vocabulary = vocabulary
        self.unused = unused
        self.shapes = vocabulary.shapes
        self.layouts: dict[str, Layout] = {}

    def bind(self) -> Bound:
        """All rows, and an error for all that does not fit."""
        held: list[Held] = []
        faults: list[str] = []
        for row in self._list_rows():
            for star in STARS if row.logical.starred else ("",):
                try:
                    held += self._hold(row, star)
                except ShardError as error:
                    faults.append(f"{error}\nin the row {row}")
        bound = Bound(self.stored, self.layouts, tuple(held))
        faults += _list_shared(bound)
        self._check(faults)
        return bound

    def _list_rows(self) -> Iterator[Row]:
        """The rows, and one for each template that an open row takes."""
        for row in self.stored.rows:
            if not row.logical.is_open:
                yield row
                continue
            start = row.logical.template()
            # What a row before has taken it does not take again, so all that begin so may be tried.
            for template in self.vocabulary.templates:
                if template.startswith(start):
                    yield row.close(template.removeprefix(start))

    def _check(self, faults: list[str]) -> None:
        """Raise StoreError with all that does not fit."""
        without = [name for name in self.shapes if name not in self.layouts]
        missing = [name for name in without if not matches(name, self.unused)]
        if missing and not faults:
            more = f" and {len(missing) - SHOWN} more" if len(missing) > SHOWN else ""
            faults.append(f"no row stores {', '.join(missing[:SHOWN])}{more}; add rows for them")
        if faults:
            raise StoreError("\n".join(faults))

    def _hold(self, row: Row, star: str) -> Iterator[Held]:
        """What the row stores with this star, if it is anything."""
        words = row.logical.components or ("",)
        templates = [row.logical.template(word, star) for word in words]
        if not set(templates) <= self.vocabulary.templates.keys():
            return
        blocks = self._make_blocks(row, words, templates)
        if blocks:
            yield Held(row, star, words, tuple(blocks))

    def _make_blocks(
        self, row: Row, words: tuple[str, ...], templates: Sequence[str]
    ) -> list[OwnedTensor]:
        """The stored tensors of the row whose components' names are of these templates."""
        maker = Maker(self.stored, self.vocabulary, row, words)
        stacked = maker.owners.place_stacked()
        found = [self.vocabulary.find(template, stacked) for template in templates]
        blocks = []
        for numbers in self._list_taken(row, found, stacked):
            names = [of[numbers] for of in found]
            block, layouts = maker.make(numbers, names)
            if self._note(row, block, layouts):
                blocks.append(block)
        return blocks

    def _list_taken(
        self, row: Row, found: Sequence[Mapping[_Numbers, Mapping[int, str]]], stacked: int | None
    ) -> Iterator[_Numbers]:
        """The numbers for which all components are there, and no row before has taken them."""
        first, *rest = found
        for numbers, names in first.items():
            others = [other.get(numbers, {}) for other in rest]
            complete = all(other.keys() == names.keys() for other in others)
            if not complete or not self._applies(row, numbers, stacked):
                continue
            if self._is_due(row, (names, *others)):
                yield numbers

    def _is_due(self, row: Row, components: Sequence[Mapping[int, str]]) -> bool:
        """Whether the row takes these tensors: free ones, or a copy those that are taken.

        Raises StoreError where a row before has taken some of them.
        """
        names = [name for of in components for name in of.values()]
        # Nearly always, and then nothing is looked at one by one.
        if self.layouts.keys().isdisjoint(names):
            return not row.also
        taken = [name for name in names if name in self.layouts]
        if len(taken) == len(names):
            return row.also
        free = next(name for name in names if name not in self.layouts)
        what = f"{taken[0]!r} is stored by a row before, and {free!r} is not"
        raise StoreError(f"{what}; leave it out there, or begin one of the rows with 'also'")

    def _applies(self, row: Row, numbers: _Numbers, stacked: int | None) -> bool:
        """Whether the row's conditions hold. Raises StoreError for one that asks by the stacked index."""
        indices = [index.name for index in row.logical.indices]
        if stacked is not None:
            del indices[stacked]
        by_index = dict(zip(indices, numbers, strict=True))
        try:
            if row.needs is not None and row.needs.fill(by_index) not in self.shapes:
                return False
            return row.lacks is None or row.lacks.fill(by_index) not in self.shapes
        except KeyError as error:
            what = f"'{row}' asks for a tensor of each {error}, and stacks them"
            raise StoreError(f"{what}; ask for one tensor, by the other indices") from None

    def _note(self, row: Row, block: OwnedTensor, layouts: Layouts) -> bool:
        """Keep the layouts; False for a copy where the tensors are already."""
        names = itertools.chain(*block.names)
        by_name = dict(zip(names, itertools.chain(*layouts), strict=True))
        if row.also:
            by_name = self._join_copies(row, by_name)
        self.layouts.update(by_name)
        return bool(by_name)

    def _join_copies(self, row: Row, copies: Mapping[str, Layout]) -> dict[str, Layout]:
        """The layouts with those of the copies; none where the copies are the tensors themselves.

        Raises StoreError for a copy of which some ranks have the tensor by a row before, and others do not.
        """
        joined: dict[str, Layout] = {}
        for name, copy in copies.items():
            before = self.layouts[name]
            having = set(before.mesh.ranks).intersection(copy.mesh.ranks)
            if not having:
                joined[name] = _merge(before, copy)
                continue
            # Where one stage is first and last, the copy is the tensor itself.
            lacking = set(copy.mesh.ranks) - having
            if lacking:
                what = f"rank {min(having)} has {name!r} by a row before '{row}', and rank {min(lacking)} does not"
                raise StoreError(f"{what}; place the copy on ranks without it")
        if joined and len(joined) < len(copies):
            had = next(name for name in copies if name not in joined)
            what = f"ranks of '{row}' have {had!r} by a row before, and not {min(joined)!r}"
            raise StoreError(f"{what}; store the two by rows of their own")
        return joined


def _merge(one: Layout, other: Layout) -> Layout:
    """The layout of two copies on different ranks. Raises StoreError where they lie otherwise."""
    if one.dims != other.dims or one.mesh.shape != other.mesh.shape:
        raise StoreError(f"copies '{one}' and '{other}' lie otherwise; store them alike")
    mesh = pile([one.mesh, other.mesh])
    return intern(one.shape, one.dtype, mesh, one.dims, ())


# Two logical tensors in the same cells

DIGITS = re.compile(r"(?:\d|\{\})+")
"""Numbers of a name, and where an index puts one."""


def _list_shared(bound: Bound) -> Iterator[str]:
    """What to say of rows that store two logical tensors in one stored tensor of a rank."""
    alike: dict[str, list[Held]] = {}
    for held in bound.held:
        template = held.row.native.template(star=held.star)
        pattern = DIGITS.sub("#", template)
        alike.setdefault(pattern, []).append(held)
    for group in alike.values():
        # Nearly all rows are alone with their names, and then no name is made.
        if len(group) > 1 or not _is_distinct(group[0].row, bound.stored):
            fault = _find_shared(bound, group)
            if fault:
                yield fault


def _is_distinct(row: Row, stored: Stored) -> bool:
    """Whether the row's own names differ: by indices that are everywhere, under their own numbers."""
    runs = DIGITS.findall(row.native.template())
    if any(run.count("{}") > 1 for run in runs):
        # Two numbers in one run of digits: 1 and 11 read as 11 and 1.
        return False
    named = {word for index in row.native.indices for word in index.words}
    indices = {index.name for index in row.logical.indices}
    indices.difference_update(stack_names(row).values())
    return indices <= named and indices.isdisjoint(stored.indices)


def _find_shared(bound: Bound, group: Sequence[Held]) -> str:
    """The first two logical tensors of these rows that a rank has in one stored tensor; "" for none."""
    masks: dict[int, int] = {}
    taken: dict[tuple[int, str], int] = {}
    for held in group:
        for block in held.blocks:
            owner = block.owner
            # Blocks of one stage share the tuple.
            shared = id(owner.meshes)
            if shared not in masks:
                masks[shared] = owner.mask
            for name in owner.list_names(held.row, held.star):
                key = owner.chunk, name
                before = taken.get(key, 0)
                both = before & masks[shared]
                if both:
                    fault = _explain_shared(bound, group, key, both)
                    if fault:
                        return fault
                taken[key] = before | masks[shared]
    return ""


def _explain_shared(bound: Bound, group: Sequence[Held], key: tuple[int, str], ranks: int) -> str:
    """What the first of these ranks stores there twice; "" where they have one of the tensors under another name."""
    chunk, native = key
    for rank in range(ranks.bit_length()):
        if not ranks >> rank & 1:
            continue
        found = _list_sharing(bound, group, key, rank)
        if len(found) > 1:
            (one, row), (other, again) = found[:2]
            where = f"{native!r} of chunk {chunk}" if chunk else repr(native)
            what = f"rank {rank} stores {one!r} and {other!r} in the same cells of {where}"
            if row == again:
                return f"{what}; give them two names or chunks\nin the row {row}"
            return f"{what}; give them two names, or one row\nin the rows {row}\nand {again}"
    return ""


def _list_sharing(
    bound: Bound, group: Sequence[Held], key: tuple[int, str], rank: int
) -> list[tuple[str, Row]]:
    """The first logical tensor of each block that the rank has in this stored tensor, and the block's row."""
    found = []
    for held in group:
        for block in held.blocks:
            alone = dataclasses.replace(held, blocks=(block,))
            for name, slot, _ in bound.visit(rank, (alone,)):
                if (slot.chunk, slot.native) == key:
                    found.append((name, held.row))
                    break
    return found
