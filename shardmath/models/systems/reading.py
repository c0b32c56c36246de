"""Reading rows backwards: the logical tensors of one rank, from the shapes of its stored tensors.

1. A row is read if its native name exists. Rows with conditions are read after all other rows, and then open rows read
   what is left.
2. In a dimension, a component with a number has that many positions; the others have equal parts of the rest.

>>> from shardmath.layouts.algebra.mesh import Mesh
>>> from shardmath.models.storage import rows
>>> side = Stored(rows.parse("qk.* = [q k].* : (q=6 + k) h"), (Mesh(all=1),))
>>> read_logical(side, {"qk.weight": ((8, 4), "float32")})
{'q.weight': ((6, 4), 'float32'), 'k.weight': ((2, 4), 'float32')}
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

from shardmath.base.errors import StoreError
from shardmath.models.storage.laying import give_words, order_of, stack_names
from shardmath.models.storage.names import STARS, split
from shardmath.models.storage.rows import Row
from shardmath.models.storage.stored import Shapes, Stored
from shardmath.models.storage.structure import Number, Structure, list_words

__all__ = ["read_logical"]

_Shape: TypeAlias = tuple[int, ...]
_Numbers: TypeAlias = tuple[int, ...]
_Entry: TypeAlias = tuple[_Shape, str]
_Named: TypeAlias = tuple[str, dict[str, int], _Shape]
"""A component's word, its numbers in stacks by index, and its shape."""


def read_logical(stored: Stored, natives: Shapes) -> dict[str, _Entry]:
    """Compute the shape and dtype of each logical (checkpoint) tensor, by name, from `natives`, the tensors that one
    rank stores as `stored` declares.

    Raises StoreError for shapes that do not fit the side's numbers.
    """
    return _Reader(stored, natives).read()


class _Reader:
    """Assigns stored tensors to rows, and collects the logical tensors in them."""

    def __init__(self, stored: Stored, natives: Shapes) -> None:
        self.stored = stored
        self.natives = natives
        self.unread: dict[str, dict[_Numbers, str]] = {}  # names by template, then by numbers in it
        for name in natives:
            template, numbers = split(name)
            self.unread.setdefault(template, {})[numbers] = name
        self.found: dict[str, _Entry] = {}

    def read(self) -> dict[str, _Entry]:
        """Return the shape and dtype of every logical (checkpoint) tensor, by name. It can be called only once per
        instance."""
        conditional = [row for row in self.stored.rows if row.needs or row.lacks]
        reserved = {row.native.template(star=star) for row in conditional for star in STARS}
        # Until conditions are known, an open row (... = ...) must not take what a conditional row may need.
        for row in self.stored.rows:
            if row not in conditional:
                self._read_row(row, reserved)
        for row in self.stored.rows:
            self._read_row(row, set())
        return self.found

    def _read_row(self, row: Row, reserved: set[str]) -> None:
        """Read the stored tensors of the row that no row before it has taken."""
        for closed in self._close(row):
            for star in STARS if row.logical.starred else ("",):
                template = closed.native.template(star=star)
                if template not in reserved:
                    self._read_template(closed, star, self.unread.get(template, {}))

    def _close(self, row: Row) -> Iterator[Row]:
        """The row, or, for an open row, one per template that it takes."""
        if not row.native.is_open:
            yield row
            return
        start = row.native.template()
        for template in list(self.unread):
            if template.startswith(start):
                yield row.close(template.removeprefix(start))

    def _read_template(self, row: Row, star: str, unread: dict[_Numbers, str]) -> None:
        """Read the stored tensors of one template by the row, and take those that it reads out of `unread`.

        `unread` has their names by local numbers of the indices; `star` is "weight" or "bias", what `*` stands for.
        """
        for local, name in list(unread.items()):
            numbers = self._find_numbers(row, local)
            if numbers is None or not self._applies(row, numbers):
                continue
            del unread[local]
            shape, dtype = self.natives[name]
            for word, stacked, component_shape in self._list_components(row, shape):
                logical = row.logical.fill({**numbers, **stacked}, word, star)
                self.found[logical] = component_shape, dtype

    def _find_numbers(self, row: Row, local: _Numbers) -> dict[str, int] | None:
        """The global numbers of local ones, by index; None if one of them does not exist."""
        numbers = {}
        for index, number in zip(row.native.indices, local, strict=True):
            global_number = self._find_number(index.name, number)
            if global_number is None:
                return None
            numbers[index.name] = global_number
        stacked = stack_names(row).values()
        for index in row.logical.indices:
            # A native name without the index can store the tensors of one number only.
            if index.name not in numbers and index.name not in stacked:
                if not self.stored.indices.get(index.name, (None,)):
                    return None
                numbers[index.name] = 0
        return numbers

    def _find_number(self, index: str, local: int) -> int | None:
        """The number in the model of number `local` on the rank; None if the model does not have it."""
        if index not in self.stored.indices:
            return local
        for number, spot in enumerate(self.stored.indices[index]):
            if spot.number == local:
                return number
        return None

    def _applies(self, row: Row, numbers: Mapping[str, int]) -> bool:
        """Whether the row's conditions hold."""
        needed = row.needs is None or row.needs.fill(numbers) in self.found
        return needed and (row.lacks is None or row.lacks.fill(numbers) not in self.found)

    def _list_components(self, row: Row, shape: _Shape) -> Iterator[_Named]:
        """(component, numbers by index of a stack, shape) of each logical tensor in a stored one of this shape."""
        components = row.logical.components or ("",)
        sizes_by_dim, counts = self._measure(row, shape)
        for stacked in itertools.product(*map(range, counts.values())):
            numbers = dict(zip(counts, stacked, strict=True))
            for word in components:
                yield word, numbers, tuple(sizes_by_dim[d][word] for d in sorted(sizes_by_dim))

    def _measure(self, row: Row, shape: _Shape) -> tuple[dict[int, dict[str, int]], dict[str, int]]:
        """(sizes of components by dimension, lengths of stacks by index) for a stored tensor of this shape."""
        ndim = len(shape) - len(stack_names(row))
        order = iter(order_of(row.transpose, ndim))
        components = row.logical.components or ("",)
        sizes: dict[int, dict[str, int]] = {}
        counts: dict[str, int] = {}
        for (structure, index), length in zip(give_words(row, ndim), shape, strict=True):
            if index is None:
                sizes[next(order)] = self._divide(structure, components, length, row)
            else:
                counts[index] = length
        return sizes, counts

    def _divide(
        self, structure: Structure, components: Sequence[str], length: int, row: Row
    ) -> dict[str, int]:
        """The positions of each component in a stored dimension. Raises StoreError if they do not add up."""
        named = _list_named(structure, components)
        if not named:
            return dict.fromkeys(components, length)
        sizes = {
            name: self._look_up(stored) for name, stored in named.items() if stored is not None
        }
        others = named.keys() - sizes.keys()
        rest = length - sum(sizes.values())
        # Without others the rest must be 0: a divisor above it makes all of it the remainder.
        each, remainder = divmod(rest, len(others) or length + 1)
        if rest < 0 or remainder:
            listed = ", ".join(f"{name}={n}" for name, n in sizes.items())
            known = f"{listed} (together {sum(sizes.values())})" if listed else "equal parts"
            raise StoreError(
                f"{length} positions cannot be divided into {', '.join(named)} with {known}, in "
                f"'{row}'; give the configuration that belongs to these tensors"
            )
        return {**sizes, **dict.fromkeys(others, each)}

    def _look_up(self, number: Number) -> int:
        """The value of a number."""
        return number if isinstance(number, int) else self.stored.numbers[number]


def _list_named(structure: Structure, components: Sequence[str]) -> dict[str, Number | None]:
    """The components that a dimension names, with the number of stored positions that it gives for each, if any."""
    stored = {word.name: word.stored for word in list_words((structure,))}
    return {name: stored[name] for name in components if name in stored}
