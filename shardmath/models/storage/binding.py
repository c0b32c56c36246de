"""Binding: the row of a side that stores each tensor, and where each rank has the tensor.

1. The first row all of whose tensors exist takes them. Tensors that no row takes, and everything else that does not
   fit, are errors in one message.
2. Plans name logical tensors, each with one layout. The names that a rank stores are computed for that rank on request.
3. No rank stores two logical tensors in the same cells: one instance of one row stores each name of a rank.
   A logical tensor may be stored under several names, and have copies on other ranks.

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
import difflib
import itertools
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from shardmath.base.errors import ShardError, StoreError
from shardmath.layouts.layout import Layout, intern
from shardmath.models.storage.laying import stack_names
from shardmath.models.storage.names import STARS, matches, split
from shardmath.models.storage.owners import Layouts, Maker, OwnedTensor, pile
from shardmath.models.storage.rows import Row
from shardmath.models.storage.stored import Shapes, Slot, Stored, Vocabulary

__all__ = ["Bound", "Held", "bind"]

_Numbers: TypeAlias = tuple[int, ...]
_Shape: TypeAlias = tuple[int, ...]

SHOWN = 5
"""The most tensors without a row that a message names."""
SHOWN_ROWS = 3
"""The most rows that a message shows for a tensor without one."""
SIMILAR = 0.85
"""How alike names are, from 0 to 1, that a message takes for a name with a mistake."""


@dataclass(frozen=True, slots=True)
class Held:
    """The stored tensors that one row declares; a row is a line of text that says how ranks store tensors. `star` is
    the word, "weight" or "bias", that replaces `*` in the row's names, or "" if they have no `*`."""

    row: Row
    star: str
    components: tuple[str, ...]
    blocks: tuple[OwnedTensor, ...]

    @property
    def names(self) -> set[str]:
        """The names of the logical (checkpoint) tensors that the stored tensors in `self.blocks` contain."""
        lists_of_names = itertools.chain.from_iterable(block.names for block in self.blocks)
        return set(itertools.chain.from_iterable(lists_of_names))


@dataclass(frozen=True, slots=True)
class Bound:
    """A trainer or engine whose declared storage is matched to tensors: the layout of each, and where each rank stores
    it; made by `bind`."""

    stored: Stored
    layouts: Mapping[str, Layout]
    held: tuple[Held, ...]

    @property
    def ranks(self) -> Collection[int]:
        """All ranks of this trainer or engine."""
        return self.stored.meshes[0].ranks

    def slots(self, rank: int) -> dict[str, Slot]:
        """A dict from each logical tensor's name to the Slot (stored tensor, slices) where `rank` stores its part."""
        return {name: slot for name, slot, _ in self.visit(rank)}

    def natives(self, rank: int) -> dict[tuple[int, str], _Shape]:
        """The shape of each tensor that `rank` stores, by (virtual stage, stored name)."""
        natives = {}
        for held, block, coords, numbers in self._list_blocks(rank, self.held):
            # Components have the same stored tensors, which are named once.
            names = block.owner.name(held.row, held.star, [local for local, _ in numbers])
            keys = zip(itertools.repeat(block.owner.chunk), names)
            natives.update(dict.fromkeys(keys, block.laid.shape(coords)))
        return natives

    def row_of(self, native: tuple[int, str], rank: int) -> Row:
        """The Row (declaration) of how `rank` stores the tensor `native`. Raises StoreError if it does not."""
        for held in self.held:
            for _, slot, _ in self.visit(rank, (held,)):
                if (slot.chunk, slot.native) == native:
                    return held.row
        raise StoreError(
            f"rank {rank} stores no {native[1]!r} in chunk {native[0]}; pass a key of natives({rank})"
        )

    def find_computed(self, names: Collection[str]) -> tuple[str, Slot] | None:
        """Return the name and Slot (location) of a tensor in `names` that is stored as a function of its values, such
        as neg_exp; or None."""
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
        """Yield (logical name, Slot (location), stored tensor's shape) for each tensor with a part on `rank`, or only
        for those declared by `rows`."""
        for at in self._list_blocks(rank, self.held if rows is None else rows):
            yield from _list_slots(*at)

    def _list_blocks(self, rank: int, rows: Iterable[Held]) -> Iterator[_BlockAt]:
        """The stored tensors on the rank that these rows declare."""
        # An axis in several meshes of a side gives a rank the same coordinate in all of them.
        coords: dict[str, int] = {}
        for mesh in self.stored.meshes:
            coords = {**mesh.coords(rank), **coords}
        for held in rows:
            for block in held.blocks:
                meshes = block.owner.meshes
                pairs = _list_numbers(block, coords)
                rank_pairs = [(local, number) for local, number in pairs if rank in meshes[number]]
                if rank_pairs:
                    yield _BlockAt(held, block, coords, rank_pairs)


class _BlockAt(NamedTuple):
    """A stored tensor of a row at the coordinates of a rank, with (local number, number) of each stacked tensor that
    the rank has; (0, 0) without a stack."""

    held: Held
    block: OwnedTensor
    coords: Mapping[str, int]
    numbers: list[tuple[int, int]]


def _list_numbers(block: OwnedTensor, coords: Mapping[str, int]) -> list[tuple[int, int]]:
    """(local number, number) of each tensor of a stack, such as experts in one dimension, at these coordinates; (0, 0)
    without a stack."""
    stack = block.owner.stack
    if stack is None:
        return [(0, 0)]
    numbers = stack.at(coords).indices().tolist()  # -1 in a hole of the stack
    return [(local, number) for local, number in enumerate(numbers) if number >= 0]


def _list_slots(
    held: Held, block: OwnedTensor, coords: Mapping[str, int], numbers: list[tuple[int, int]]
) -> Iterator[tuple[str, Slot, _Shape]]:
    """(logical name, slot, shape of the stored tensor) of each component, for these (local number, number)."""
    laid = block.laid
    order = laid.order
    shape = laid.shape(coords)
    owner = block.owner
    chunk = owner.chunk
    function = held.row.function
    local_numbers = [local_number for local_number, _ in numbers]
    natives = owner.name(held.row, held.star, local_numbers)
    for component, names in zip(held.components, block.names, strict=True):
        cuts = laid.cuts(component, coords, local_numbers)
        for (_, number), native, cut in zip(numbers, natives, cuts, strict=True):
            slot = Slot(chunk, native, cut, order, function)
            yield names[number], slot, shape


def bind(stored: Stored, tensors: Shapes | Vocabulary, unused: Sequence[str] = ()) -> Bound:
    """Match `tensors` (shapes and dtypes by name) to the rows of `stored`, lines of text that say how ranks store
    tensors; return a Bound with the tensors' layouts. Tensors that match a glob in `unused` need no row.

    Raises StoreError with everything that does not fit.
    """
    vocabulary = tensors if isinstance(tensors, Vocabulary) else Vocabulary(tensors)
    return _Binder(stored, vocabulary, unused).bind()


def _list_templates(row: Row) -> list[str]:
    """The templates of the names of all tensors that the row stores; none for an open row."""
    if row.logical.is_open:
        return []
    stars = STARS if row.logical.starred else ("",)
    words = row.logical.components or ("",)
    return [row.logical.template(word, star) for word in words for star in stars]


class _Binder:
    """Binds the tensors of a vocabulary to the rows of a side."""

    def __init__(self, stored: Stored, vocabulary: Vocabulary, unused: Sequence[str]) -> None:
        self.stored = stored
        self.vocabulary = vocabulary
        self.unused = unused
        self.shapes = vocabulary.shapes
        self.layouts: dict[str, Layout] = {}

    def bind(self) -> Bound:
        """Match each row (storage declaration) to the tensors that it stores; return the result as a Bound.

        Raises StoreError, which lists everything that does not fit.
        """
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
        """The rows; instead of an open row, which does not say how names end, a row for each template (name with {} in
        place of numbers) that it may take."""
        for row in self.stored.rows:
            if not row.logical.is_open:
                yield row
                continue
            start = row.logical.template()
            # Every template with this beginning may be tried: tensors that a row before has taken are left out later.
            for template in self.vocabulary.templates:
                if template.startswith(start):
                    yield row.close(template.removeprefix(start))

    def _check(self, faults: list[str]) -> None:
        """Raise StoreError with these faults, or else with the tensors that no row stores."""
        unbound = [name for name in self.shapes if name not in self.layouts]
        missing = [name for name in unbound if not matches(name, self.unused)]
        if missing and not faults:
            more = f" and {len(missing) - SHOWN} more" if len(missing) > SHOWN else ""
            listed = ", ".join(missing[:SHOWN])
            faults.append(f"no row stores {listed}{more}; add rows for them, or leave them out")
            faults += self._list_nearest(missing[0])
        if faults:
            raise StoreError("\n".join(faults))

    def _list_nearest(self, name: str) -> list[str]:
        """Lines with the rows that come nearest to storing the tensor `name`: they name it, but do not apply, or they
        name one that is spelled nearly alike."""
        rows: dict[str, list[Row]] = {}
        for row in self.stored.rows:
            for template in _list_templates(row):
                rows.setdefault(template, []).append(row)
        template, _ = split(name)
        similar = difflib.get_close_matches(template, rows, n=SHOWN_ROWS, cutoff=SIMILAR)
        nearest = dict.fromkeys(itertools.chain.from_iterable(rows[near] for near in similar))
        lines = [f"    {row}{self._explain(row, name)}" for row in nearest]
        heading = f"the nearest rows to {name} are" if lines else ""
        return list(filter(None, [heading, *lines[:SHOWN_ROWS]]))

    def _explain(self, row: Row, name: str) -> str:
        """Why the row does not store the tensor: another tensor is missing; "" if it is a row of another tensor."""
        _, numbers = split(name)
        indices = [index.name for index in row.logical.indices]
        # A row of another tensor may have other numbers.
        by_index = dict(zip(indices, numbers, strict=False))
        for star in STARS if len(indices) == len(numbers) else ():
            words = row.logical.components or ("",)
            needed = [row.logical.fill(by_index, word, star) for word in words]
            absent = [other for other in needed if other not in self.shapes]
            if name in needed and absent:
                return f", but there is no {absent[0]}"
        return ""

    def _hold(self, row: Row, star: str) -> Iterator[Held]:
        """The stored tensors of the row with this star, if there are any."""
        words = row.logical.components or ("",)  # without [...] the name is of one component
        templates = [row.logical.template(word, star) for word in words]
        if not set(templates) <= self.vocabulary.templates.keys():
            return
        blocks = self._make_blocks(row, words, templates)
        if blocks:
            yield Held(row, star, words, tuple(blocks))

    def _make_blocks(
        self, row: Row, words: tuple[str, ...], templates: Sequence[str]
    ) -> list[OwnedTensor]:
        """The stored tensors of the row, whose components have these templates as names."""
        maker = Maker(self.stored, self.vocabulary, row, words)
        stacked = maker.owners.place_stacked()
        by_component = [self.vocabulary.find(template, stacked) for template in templates]
        blocks = []
        for numbers in self._list_taken(row, by_component, stacked):
            names = [by_numbers[numbers] for by_numbers in by_component]
            block, layouts = maker.make(numbers, names)
            is_new = self._note(row, block, layouts)
            if is_new:
                blocks.append(block)
        return blocks

    def _list_taken(
        self,
        row: Row,
        by_component: Sequence[Mapping[_Numbers, Mapping[int, str]]],
        stacked: int | None,
    ) -> Iterator[_Numbers]:
        """The numbers in names, such as the layer's, for which all components exist, and no row before has taken them.
        `by_component` has the names of each component, by these numbers and then by its number in the stack."""
        first, *rest = by_component
        for numbers, names in first.items():
            others = [other.get(numbers, {}) for other in rest]
            complete = all(other.keys() == names.keys() for other in others)
            if not complete or not self._applies(row, numbers, stacked):
                continue
            if self._is_due(row, (names, *others)):
                yield numbers

    def _is_due(self, row: Row, components: Sequence[Mapping[int, str]]) -> bool:
        """Whether the row takes these tensors: a plain row takes free ones, an `also` row taken ones.

        Raises StoreError if a row before has taken only some of them.
        """
        names = [name for by_number in components for name in by_number.values()]
        # Nearly always all are free, and then no name is looked at one by one.
        if self.layouts.keys().isdisjoint(names):
            return not row.also
        taken = [name for name in names if name in self.layouts]
        if len(taken) == len(names):
            return row.also
        free = next(name for name in names if name not in self.layouts)
        what = f"a row before stores {taken[0]!r}, but not {free!r}, which this row stores with it"
        raise StoreError(f"{what}; leave {taken[0]!r} out of one of the two rows")

    def _applies(self, row: Row, numbers: _Numbers, stacked: int | None) -> bool:
        """Whether the vocabulary has the tensor that the row needs, and not the one that it lacks.

        `numbers` leaves out the stacked index, which is at position `stacked`. Raises StoreError for a condition with
        the stacked index.
        """
        indices = [index.name for index in row.logical.indices]
        if stacked is not None:
            del indices[stacked]
        by_index = dict(zip(indices, numbers, strict=True))
        try:
            if row.needs is not None and row.needs.fill(by_index) not in self.shapes:
                return False
            return row.lacks is None or row.lacks.fill(by_index) not in self.shapes
        except KeyError as error:
            what = f"the condition of '{row}' has the index {error}, along which the row stacks tensors"
            raise StoreError(f"{what}; write the condition without this index") from None

    def _note(self, row: Row, block: OwnedTensor, layouts: Layouts) -> bool:
        """Note the layouts of the block's tensors; return False if `row` is an `also` row whose ranks all have the
        tensors already, by another row."""
        by_name = dict(zip(itertools.chain(*block.names), itertools.chain(*layouts), strict=True))
        if row.also:
            by_name = self._join_copies(row, by_name)
        self.layouts.update(by_name)
        return bool(by_name)

    def _join_copies(self, row: Row, copies: Mapping[str, Layout]) -> dict[str, Layout]:
        """The layouts over the tensors' ranks and the copies'; empty if the copies are the tensors themselves.

        Raises StoreError if only some ranks of a copy, or only some of the copies, have the tensor by a row before.
        """
        joined: dict[str, Layout] = {}
        for name, copy in copies.items():
            before = self.layouts[name]
            having = set(before.mesh.ranks).intersection(copy.mesh.ranks)
            if not having:
                joined[name] = _pile_copies(before, copy)
                continue
            # Without lacking ranks the copy is the tensor itself, as where one stage is first and last.
            lacking = set(copy.mesh.ranks) - having
            if lacking:
                what = f"rank {min(having)} stores {name!r} by a row before '{row}', and rank {min(lacking)} does not"
                raise StoreError(
                    f"{what}; place the copy, with @axis=coordinate, on ranks without it"
                )
        if joined and len(joined) < len(copies):
            stored = next(name for name in copies if name not in joined)
            what = f"ranks of '{row}' store {stored!r} by a row before, but not {min(joined)!r}"
            raise StoreError(f"{what}; write a separate row for each of the two")
        return joined


def _pile_copies(one: Layout, other: Layout) -> Layout:
    """The layout of two copies on different ranks; `one` may stand for several already. Raises StoreError if the copies
    are laid out differently."""
    meshes = [one.mesh, other.mesh]
    axes = list(one.mesh.shape)
    # One axis more, before the axes of the copy: along it are the copies so far.
    if axes and axes[1:] == list(other.mesh.shape):
        copies = range(one.mesh.shape[axes[0]])
        meshes = [*(one.mesh.select(**{axes[0]: copy}) for copy in copies), other.mesh]
    if one.dims != other.dims or meshes[0].shape != other.mesh.shape:
        what = f"a tensor has layout '{one}', and its copy, by the row with 'also', '{other}'"
        raise StoreError(f"{what}; divide both by the same axes in the same way")
    return intern(one.shape, one.dtype, pile(meshes), one.dims, ())


# Two logical tensors in the same cells

DIGITS = re.compile(r"(?:\d|\{\})+")
"""The digits of a name, and the places where an index puts some."""


def _list_shared(bound: Bound) -> Iterator[str]:
    """An error for each set of rows that store two logical tensors in one stored tensor of a rank."""
    by_pattern: dict[str, list[Held]] = {}
    for held in bound.held:
        template = held.row.native.template(star=held.star)
        pattern = DIGITS.sub("#", template)
        by_pattern.setdefault(pattern, []).append(held)
    for group in by_pattern.values():
        # Nearly all rows share their pattern with no other row, and then no name is made.
        if len(group) > 1 or not _is_distinct(group[0].row, bound.stored):
            fault = _find_shared(bound, group)
            if fault:
                yield fault


def _is_distinct(row: Row, stored: Stored) -> bool:
    """Whether the row's names surely differ: they have every index that is not stacked, by its global number."""
    if any(digits.count("{}") > 1 for digits in DIGITS.findall(row.native.template())):
        # Two numbers without text between them: 1 and 11 read as 11 and 1.
        return False
    words_in_name = {word for index in row.native.indices for word in index.words}
    unstacked = {index.name for index in row.logical.indices}
    unstacked.difference_update(stack_names(row).values())
    # A declared index stands in names by its local number, which other numbers of the index may have too.
    return unstacked <= words_in_name and unstacked.isdisjoint(stored.indices)


def _find_shared(bound: Bound, group: Sequence[Held]) -> str:
    """The error for the first stored tensor in which a rank has two logical tensors of the group; "" for none."""
    # Bit r of a mask stands for rank r. `masks` has the ranks of a tuple of meshes, by its id; `stored_masks` the ranks
    # that have a stored tensor so far, by (chunk, name).
    masks: dict[int, int] = {}
    stored_masks: dict[tuple[int, str], int] = {}
    for held in group:
        for block in held.blocks:
            owner = block.owner
            # Blocks of one stage share the tuple of meshes.
            meshes = id(owner.meshes)
            if meshes not in masks:
                masks[meshes] = owner.mask
            for name in owner.list_names(held.row, held.star):
                native = owner.chunk, name
                before = stored_masks.get(native, 0)
                # Ranks that may store both; `_explain_shared` looks whether one does.
                shared = before & masks[meshes]
                fault = _explain_shared(bound, group, native, shared) if shared else ""
                if fault:
                    return fault
                stored_masks[native] = before | masks[meshes]
    return ""


def _explain_shared(bound: Bound, group: Sequence[Held], native: tuple[int, str], mask: int) -> str:
    """The error for the first rank of the mask that stores two tensors in `native`; "" if none of them does."""
    chunk, native_name = native
    for rank in range(mask.bit_length()):
        if not mask >> rank & 1:
            continue
        sharing = _list_sharing(bound, group, native, rank)
        if len(sharing) > 1:
            (one, row), (other, other_row) = sharing[:2]
            where = f"{native_name!r} of chunk {chunk}" if chunk else repr(native_name)
            what = f"rank {rank} stores {one!r} and {other!r} in the same cells of {where}"
            if row == other_row:
                fix = "write an index that differs into the stored name, or give them two chunks"
                return f"{what}; {fix}\nin the row {row}"
            fix = "write two stored names, or store both by one row"
            return f"{what}; {fix}\nin the rows {row}\nand {other_row}"
    return ""


def _list_sharing(
    bound: Bound, group: Sequence[Held], native: tuple[int, str], rank: int
) -> list[tuple[str, Row]]:
    """(first logical tensor, row) of each block that the rank stores in this stored tensor."""
    sharing = []
    for held in group:
        for block in held.blocks:
            one_block = dataclasses.replace(held, blocks=(block,))
            for name, slot, _ in bound.visit(rank, (one_block,)):
                if (slot.chunk, slot.native) == native:
                    sharing.append((name, held.row))
                    break
    return sharing
