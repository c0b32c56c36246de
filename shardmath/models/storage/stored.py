"""Stored: how one side stores its tensors, as rows, meshes and numbers.

1. A side has one or more **meshes** over the same ranks; a row lies on the first one that has all axes it names.
2. A **declared index**, such as the layer, says for each of its numbers at which coordinates it is, in which
   chunk (virtual stage) of the model there, and which number it has in that chunk. An index that is not declared is
   everywhere, under its own number.
3. It is a small value: it compares, pickles, and goes through JSON with its digest, so that ranks of the other side
   learn it as text.

>>> side = Stored(rows.parse("qkv.* = [q k v].* : (tp q hd + tp k hd + tp v hd) h"), (Mesh(tp=2),), numbers={"hd": 64})
>>> print(side)
# Mesh(tp=2)
# hd=64
qkv.* = [q k v].* : (tp q hd + tp k hd + tp v hd) h
>>> Stored.from_json(side.to_json()) == side
True
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeAlias

from shardmath.base.arguments import as_integer, instance, known, listed, mapping, text
from shardmath.base.digest import digest, read_digested
from shardmath.base.dtypes import canonical
from shardmath.base.errors import ShardError, StoreError
from shardmath.base.text import shown
from shardmath.layouts.algebra.mesh import Mesh
from shardmath.layouts.layout import Layout
from shardmath.models.storage import rows
from shardmath.models.storage.names import split
from shardmath.models.storage.rows import Row

__all__ = ["Entry", "Shapes", "KnownSide", "Slot", "Spot", "Stored", "Vocabulary", "replicates"]

FORMAT = "shardmath declared storage"
VERSION = 1
MOST_SIZE = 1 << 56
"""Of a dimension; layouts count bytes in 64 bits."""
UNKNOWN = ("refuse", "replicate")
Entry: TypeAlias = tuple[tuple[int, ...], str]
"""Global shape and dtype of a logical tensor."""
Shapes: TypeAlias = Mapping[str, Entry]
"""Global shape and dtype of each logical tensor, by name."""


class Spot(NamedTuple):
    """Where one number of a declared index is: coordinates, chunk, and its number there."""

    coords: Mapping[str, int]
    chunk: int
    number: int


class Slot(NamedTuple):
    """Where a local tensor lies: `native[cut]`, its dimensions then put in `order`; `function` makes it."""

    chunk: int
    native: str
    cut: tuple[int | slice, ...]
    order: tuple[int, ...]
    function: str


class KnownSide(Protocol):
    """A side whose tensors are known: the layout of each, and where ranks store it."""

    @property
    def layouts(self) -> Mapping[str, Layout]:
        """The layout of each logical tensor."""
        ...

    @property
    def ranks(self) -> Collection[int]:
        """The ranks of the side."""
        ...

    def slots(self, rank: int) -> dict[str, Slot]:
        """Where each tensor that the rank holds a part of lies, by logical name."""
        ...

    def natives(self, rank: int) -> dict[tuple[int, str], tuple[int, ...]]:
        """The shape of each tensor that the rank stores, by chunk and name."""
        ...

    def row_of(self, native: tuple[int, str], rank: int) -> object:
        """What says how the rank stores this tensor, for people. Raises StoreError where it does not."""
        ...

    def visit(self, rank: int) -> Iterator[tuple[str, Slot, tuple[int, ...]]]:
        """(logical name, slot, shape of the stored tensor) of all that the rank holds."""
        ...

    def find_computed(self, names: Collection[str]) -> tuple[str, Slot] | None:
        """The first of these logical tensors that any rank stores as a function of it, and where; None for none."""
        ...


@dataclass(frozen=True, slots=True)
class Stored:
    """How a side stores its tensors (see the module).

    With `exact`, what axes cut they must divide; else parts are ceil-chunks. Raises StoreError for meshes over
    different ranks, and for none, and for rows that are not parsed.
    """

    rows: tuple[Row, ...]
    meshes: tuple[Mesh, ...]
    indices: Mapping[str, tuple[Spot, ...]] = field(default_factory=dict)
    numbers: Mapping[str, int] = field(default_factory=dict)
    exact: bool = True

    def __post_init__(self) -> None:
        # Copies, so that nobody changes what the value says.
        kept = {
            "rows": tuple(map(_check_row, self.rows)),
            "meshes": listed(self.meshes, "meshes", StoreError),
            "indices": dict(self.indices),
            "numbers": dict(self.numbers),
        }
        for name, value in kept.items():
            object.__setattr__(self, name, value)
        if not self.meshes or len({frozenset(mesh.ranks) for mesh in self.meshes}) != 1:
            raise StoreError(f"meshes {list(self.meshes)} do not have the same ranks; give some")
        _check_axes(self.meshes)
        _check_counts(self.numbers, self.indices)

    def __hash__(self) -> int:
        numbers = tuple(sorted(self.numbers.items()))
        return hash((self.rows, self.meshes, numbers, self.exact))

    def __str__(self) -> str:
        meshes = "\n".join(f"# {mesh!r}" for mesh in self.meshes)
        numbers = " ".join(f"{name}={n}" for name, n in self.numbers.items())
        return f"{meshes}\n# {numbers or 'no numbers'}\n{rows.show(self.rows)}"

    @property
    def digest(self) -> str:
        """The same for equal values on every rank: 64 hexadecimal digits."""
        # Sorted, since equal mappings may have their entries in any order.
        plain = _list_plain(self)
        text = json.dumps(plain, sort_keys=True)
        return digest(text)

    def to_json(self) -> str:
        """As text that `from_json` reads."""
        value = {
            "format": FORMAT,
            "version": VERSION,
            "digest": self.digest,
            **_list_plain(self),
        }
        return json.dumps(value, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Stored:
        """The value of such text. Raises StoreError for any other, NotationError with a caret in a row that is none."""
        return read_digested(text, FORMAT, VERSION, _read)

    def extended(self, text: str, **numbers: int) -> Stored:
        """With these rows before its own, and these numbers."""
        before = rows.parse(text)
        every = before + self.rows
        together = {**self.numbers, **numbers}
        return Stored(every, self.meshes, self.indices, together, self.exact)


def _check_row(row: object) -> Row:
    return instance(row, Row, "give rows as shardmath.storage.parse reads them", StoreError)


def _check_axes(meshes: tuple[Mesh, ...]) -> None:
    """Raise StoreError where an axis of two meshes puts a rank at two coordinates."""
    found: dict[tuple[str, int], int] = {}
    for mesh in meshes:
        for axis in mesh.shape:
            at = mesh.coordinate([axis]).tolist()
            for rank, coordinate in zip(mesh.ranks, at, strict=True):
                before = found.setdefault((axis, rank), coordinate)
                if before != coordinate:
                    raise StoreError(
                        f"rank {rank} is at {axis}={before} of one mesh and at {axis}={coordinate} "
                        f"of another; give other ranks, or the axis another name"
                    )


def _check_counts(numbers: Mapping[str, int], indices: Mapping[str, Iterable[Spot]]) -> None:
    """Raise StoreError for a number, a chunk or an index's number that counts nothing here."""
    counts: dict[str, object] = {f"number {name!r}": n for name, n in numbers.items()}
    for name, spots in indices.items():
        for i, spot in enumerate(spots):
            counts[f"the chunk of {name}={i}"] = spot.chunk
            counts[f"the local number of {name}={i}"] = spot.number
    for what, given in counts.items():
        count = as_integer(given, what, StoreError)
        if not 0 <= count <= MOST_SIZE:
            raise StoreError(f"{what} is {count}; give a number from 0 to {MOST_SIZE}")


def _list_plain(stored: Stored) -> dict[str, Any]:
    """The value as lists of numbers and text; integers may have been numpy's."""
    indices = {}
    for name, spots in stored.indices.items():
        indices[name] = [_list_spot(spot) for spot in spots]
    numbers = {}
    for name, number in stored.numbers.items():
        numbers[name] = int(number)
    return {
        "rows": [str(row) for row in stored.rows],
        "meshes": [(mesh.axes, mesh.ranks) for mesh in stored.meshes],
        "indices": indices,
        "numbers": numbers,
        "exact": stored.exact,
    }


def _list_spot(spot: Spot) -> tuple[dict[str, int], int, int]:
    coords = {}
    for axis, at in spot.coords.items():
        coords[axis] = int(at)
    return coords, int(spot.chunk), int(spot.number)


def _read(value: Mapping[str, Any]) -> Stored:
    """The value of what JSON had."""
    table = "\n".join(value["rows"])
    meshes = []
    for axes, ranks in value["meshes"]:
        mesh = Mesh(dict(axes), ranks=ranks)
        meshes.append(mesh)
    indices = {}
    for name, spots in value["indices"].items():
        indices[name] = tuple(_read_spot(*spot) for spot in spots)
    numbers = {}
    for name, number in value["numbers"].items():
        numbers[name] = int(number)
    return Stored(
        rows=rows.parse(table),
        meshes=tuple(meshes),
        indices=indices,
        numbers=numbers,
        exact=bool(value["exact"]),
    )


def _read_spot(coords: Mapping[str, int], chunk: int, number: int) -> Spot:
    own = dict(coords)
    return Spot(own, int(chunk), int(number))


def replicates(unknown: str) -> bool:
    """Whether tensors that no row knows are whole on each rank, and not refused.

    Raises StoreError for a word that says neither.
    """
    if known(unknown, UNKNOWN) is None:
        listed = ", ".join(UNKNOWN)
        raise StoreError(f"unknown={unknown!r}; use one of {listed}")
    return unknown == "replicate"


_Numbers: TypeAlias = tuple[int, ...]
_Grouped: TypeAlias = dict[_Numbers, dict[int, str]]
"""Names by all numbers but the stacked one, then by that."""


def _read_shapes(shapes: Shapes) -> Shapes:
    """The shapes as tuples of plain integers, and dtypes by their names, however they were spelled.

    Raises StoreError for what is not {name: (shape, dtype)}, LayoutError for a dtype that is none.
    """
    given = mapping(shapes, "shapes are ", "names to (shape, dtype)", StoreError)
    known: dict[object, Entry] = {}
    read = {}
    for name, entry in given.items():
        # Layers are alike, and each entry is looked at once.
        try:
            shape, dtype = entry
            key = tuple(shape), dtype
            if key not in known:
                known[key] = _read_shape(key[0]), canonical(dtype)
            read[text(name, "the name of a tensor", StoreError)] = known[key]
        except (TypeError, ValueError) as error:
            if isinstance(error, ShardError):
                raise
            what = f"tensor {shown(name)} is {shown(entry)}"
            raise StoreError(f"{what}; give (shape, dtype)") from error
    return read


def _read_shape(given: tuple[object, ...]) -> tuple[int, ...]:
    """The sizes. Raises StoreError for what is no size."""
    sizes = tuple(as_integer(n, f"a size of shape {given}", StoreError) for n in given)
    for n in sizes:
        if not 0 <= n <= MOST_SIZE:
            raise StoreError(f"shape {sizes} has {n}; sizes are from 0 to {MOST_SIZE}")
    return sizes


class Vocabulary:
    """Logical tensors by the template of their names; two sides that share one read the names once."""

    def __init__(self, shapes: Shapes) -> None:
        self.shapes = _read_shapes(shapes)
        self.templates: dict[str, dict[_Numbers, str]] = {}
        self._found: dict[tuple[str, int | None], _Grouped] = {}
        self._ordered: dict[int, tuple[Mapping[int, str], list[str]]] = {}
        for name in shapes:
            template, numbers = split(name)
            by_numbers = self.templates.setdefault(template, {})
            by_numbers[numbers] = name

    def find(self, template: str, stacked: int | None) -> _Grouped:
        """The names of a template, by all numbers but the stacked one, then by that."""
        # Both sides ask for nearly all templates in the same way.
        key = template, stacked
        if key not in self._found:
            self._found[key] = self._group(template, stacked)
        return self._found[key]

    def order(self, names: Mapping[int, str], index: str | None) -> list[str]:
        """The names that `find` has found by number, the `index`, in order.

        Raises StoreError where one is missing, or differs from the others in shape or dtype.
        """
        # Kept by identity, and the names with it, so that nothing else ever has it.
        kept = self._ordered.get(id(names))
        if kept is None:
            ordered = self._check_order(names, index)
            kept = names, ordered
            self._ordered[id(names)] = kept
        return kept[1]

    def _check_order(self, names: Mapping[int, str], index: str | None) -> list[str]:
        numbers = range(len(names))
        absent = set(numbers).difference(names)
        if absent:
            raise StoreError(
                f"number {min(absent)} of index {index!r} is missing, and "
                f"{max(names)} is there; give all of a stack"
            )
        ordered = [names[number] for number in numbers]
        first = self.shapes[ordered[0]]
        for name in ordered:
            if self.shapes[name] != first:
                raise StoreError(
                    f"{ordered[0]!r} is {first} and {name!r} is {self.shapes[name]}; "
                    f"tensors of one index have one shape and dtype"
                )
        return ordered

    def _group(self, template: str, stacked: int | None) -> _Grouped:
        names = self.templates.get(template, {})
        if stacked is None:
            return {numbers: {0: name} for numbers, name in names.items()}
        behind = stacked + 1
        found: _Grouped = {}
        for numbers, name in names.items():
            others = numbers[:stacked] + numbers[behind:]
            by_stacked = found.setdefault(others, {})
            number = numbers[stacked]
            by_stacked[number] = name
        return found
