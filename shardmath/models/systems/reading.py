"""Reading rows backwards: which logical tensors one rank stores, from the shapes of what it stores.

1. A row is read where its native name is there. Rows that ask for another tensor are read once the others are, and then
   what no row has taken.
2. In a dimension, components with a number have so many positions, the others equal parts of what is left.

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
_Entry: TypeAlias = tuple[_Shape, str]
_Named: TypeAlias = tuple[str, dict[str, int], _Shape]
"""A component's word, the numbers of it in stacks, and its shape."""


def read_logical(stored: Stored, natives: Shapes) -> dict[str, _Entry]:
    """The logical tensors of a side of one rank whose stored tensors have these shapes and dtypes.

    Raises StoreError for shapes that the side's numbers do not fit.
    """
    return _Reader(stored, natives).read()


class _Reader:
    """Gives stored tensors to rows, once."""

    def __init__(self, stored: Stored, natives: Shapes) -> None:
        self.stored = stored
        self.natives = natives
        self.left: dict[str, dict[_Shape, str]] = {}
        for name in natives:
            template, numbers = split(name)
            self.left.setdefault(template, {})[numbers] = name
        self.found: dict[str, _Entry] = {}

    def read(self) -> dict[str, _Entry]:
        """All logical tensors."""
        conditional = [row for row in self.stored.rows if row.needs or row.lacks]
        reserved = {row.native.template(star=star) for row in conditional for star in STARS}
        # What a conditional row may want is kept from the open row at the end until its condition can be told.
        for row in self.stored.rows:
            if row not in conditional:
                self._read_row(row, reserved)
        for row in self.stored.rows:
            self._read_row(row, set())
        return self.found

    def _read_row(self, row: Row, reserved: set[str]) -> None:
        """What the row stores, and no row before it."""
        for closed in self._close(row):
            for star in STARS if row.logical.starred else ("",):
                template = closed.native.template(star=star)
                if template not in reserved:
                    self._read_template(closed, star, self.left.get(template, {}))

    def _close(self, row: Row) -> Iterator[Row]:
        """The row, or one for each template that an open row takes."""
        if not row.native.is_open:
            yield row
            return
        start = row.native.template()
        for template in list(self.left):
            if template.startswith(start):
                yield row.close(template.removeprefix(start))

    def _read_template(self, row: Row, star: str, left: dict[_Shape, str]) -> None:
        """The tensors of one template that the row stores."""
        for local, name in list(left.items()):
            numbers = self._find_numbers(row, local)
            if numbers is None or not self._applies(row, numbers):
                continue
            del left[local]
            shape, dtype = self.natives[name]
            for word, chosen, own in self._list_components(row, shape):
                logical = row.logical.fill({**numbers, **chosen}, word, star)
                self.found[logical] = own, dtype

    def _find_numbers(self, row: Row, local: _Shape) -> dict[str, int] | None:
        """The global numbers of local ones; None where the row has none of them."""
        numbers = {}
        for index, number in zip(row.native.indices, local, strict=True):
            found = self._find_number(index.name, number)
            if found is None:
                return None
            numbers[index.name] = found
        return numbers

    def _find_number(self, index: str, local: int) -> int | None:
        """The global number of a local one."""
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
        """Each tensor that lies in a stored one of this shape."""
        components = row.logical.components or ("",)
        sizes, counts = self._measure(row, shape)
        for chosen in itertools.product(*map(range, counts.values())):
            numbers = dict(zip(counts, chosen, strict=True))
            for word in components:
                yield word, numbers, tuple(sizes[d][word] for d in sorted(sizes))

    def _measure(self, row: Row, shape: _Shape) -> tuple[dict[int, dict[str, int]], dict[str, int]]:
        """How many positions components have in each of their dimensions, and how many there are in stacks."""
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
        """How many positions of a stored dimension each component has."""
        named = _list_named(structure, components)
        if not named:
            return dict.fromkeys(components, length)
        sizes = {
            name: self._look_up(stored) for name, stored in named.items() if stored is not None
        }
        others = named.keys() - sizes.keys()
        rest = length - sum(sizes.values())
        # Without others nothing may be left, which any number above the rest says.
        each, over = divmod(rest, len(others) or length + 1)
        if rest < 0 or over:
            known = ", ".join(f"{name}={n}" for name, n in sizes.items()) or "equal parts"
            raise StoreError(
                f"{length} positions are not {known} of {', '.join(named)} in '{row}'; "
                f"check the sizes that the configuration says"
            )
        return {**sizes, **dict.fromkeys(others, each)}

    def _look_up(self, number: Number) -> int:
        """The integer that is meant."""
        return number if isinstance(number, int) else self.stored.numbers[number]


def _list_named(structure: Structure, components: Sequence[str]) -> dict[str, Number | None]:
    """The components that a dimension names, and as how many positions each is stored."""
    words = () if isinstance(structure, str) else list_words((structure,))
    stored = {word.name: word.stored for word in words}
    return {name: stored[name] for name in components if name in stored}
