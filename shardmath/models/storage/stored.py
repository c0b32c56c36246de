"""Stored: how one side stores its tensors, as rows, meshes and numbers.

1. A side has one or more **meshes** over the same ranks; a row lies on the first mesh with all axes that it names.
2. A **declared index**, such as the layer, gives each of its numbers a spot: coordinates, the chunk (virtual stage) of
   the model there, and the local number in that chunk. The numbers of an index without spots are global, and on all
   coordinates.
3. A side is a small value: it compares, pickles, and converts to JSON with its digest, the form in which it is sent.

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
"""The largest dimension; layouts count bytes in 64 bits."""
UNKNOWN = ("refuse", "replicate")
Entry: TypeAlias = tuple[tuple[int, ...], str]
"""Global shape and dtype of a logical tensor."""
Shapes: TypeAlias = Mapping[str, Entry]
"""Global shape and dtype of each logical tensor, by name."""


class Spot(NamedTuple):
    """The location of a layer (or other numbered part) of a model: mesh coordinates, chunk (virtual stage), and its
    number in that chunk."""

    coords: Mapping[str, int]
    chunk: int
    number: int


class Slot(NamedTuple):
    """The place where a rank has a logical (checkpoint) tensor: `cut` holds the indices that select it in the stored
    tensor named `native`. Dimension i of the selected slice is dimension `order[i]` of the logical tensor.

    `function` is applied to the logical tensor before it is stored; "" if none is.
    """

    chunk: int
    native: str
    cut: tuple[int | slice, ...]
    order: tuple[int, ...]
    function: str


class KnownSide(Protocol):
    """A trainer or engine with the tensors that it stores: the layout of each, and where ranks store it."""

    @property
    def layouts(self) -> Mapping[str, Layout]:
        """The layout of each logical tensor, by name."""
        ...

    @property
    def ranks(self) -> Collection[int]:
        """The ranks on which the tensors are stored."""
        ...

    def slots(self, rank: int) -> dict[str, Slot]:
        """The Slot (stored name and slices) of each logical tensor of which `rank` holds a part, by logical name."""
        ...

    def natives(self, rank: int) -> dict[tuple[int, str], tuple[int, ...]]:
        """Return the local shape of each tensor that `rank` stores, by (virtual stage, stored name)."""
        ...

    def row_of(self, native: tuple[int, str], rank: int) -> object:
        """Return a description of how `rank` stores a tensor: a Row (a parsed storage rule) if there is one, and
        otherwise a text such as "w = w : (tp n)". `native` is the pair (virtual stage, stored name) of the tensor.

        Raises StoreError if `rank` lacks it.
        """
        ...

    def visit(self, rank: int) -> Iterator[tuple[str, Slot, tuple[int, ...]]]:
        """Yield (logical name, Slot, shape of the stored tensor) for each logical tensor of which `rank` holds a part.
        The Slot says which slice of which stored tensor is this part."""
        ...

    def find_computed(self, names: Collection[str]) -> tuple[str, Slot] | None:
        """Find a tensor in `names` that is stored as a function of its values, such as neg_exp (-exp), instead of the
        values; return its name and its Slot (place in storage). Returns None if there is no such tensor."""
        ...


@dataclass(frozen=True, slots=True)
class Stored:
    """A declaration of how a trainer or engine stores its tensors: the Rows of a storage table, with meshes, and sizes
    such as the head dimension.

    `indices` has the Spots of each index (such as a layer). With `exact`, axes must divide what they cut; otherwise
    parts are ceil-chunks. Raises StoreError for meshes over different ranks, for no mesh, and for rows that are not
    parsed.
    """

    rows: tuple[Row, ...]
    meshes: tuple[Mesh, ...]
    indices: Mapping[str, tuple[Spot, ...]] = field(default_factory=dict)
    numbers: Mapping[str, int] = field(default_factory=dict)
    exact: bool = True

    def __post_init__(self) -> None:
        # Copies, so that the value does not change with the caller's collections.
        copies = {
            "rows": tuple(map(_check_row, self.rows)),
            "meshes": listed(self.meshes, "meshes", StoreError),
            "indices": dict(self.indices),
            "numbers": dict(self.numbers),
        }
        for name, value in copies.items():
            object.__setattr__(self, name, value)
        if not self.meshes or len({frozenset(mesh.ranks) for mesh in self.meshes}) != 1:
            what = f"meshes of a side must have the same ranks, and are {list(self.meshes)}"
            raise StoreError(f"{what}; give one or more meshes over the same ranks")
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
        """A SHA-256 digest of this declaration of storage, as 64 hexadecimal digits; equal declarations have equal
        digests."""
        # Sorted, since equal mappings may have their entries in any order.
        plain = _list_plain(self)
        text = json.dumps(plain, sort_keys=True)
        return digest(text)

    def to_json(self) -> str:
        """Return the declared storage as JSON text, which `from_json` reads."""
        value = {
            "format": FORMAT,
            "version": VERSION,
            "digest": self.digest,
            **_list_plain(self),
        }
        return json.dumps(value, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Stored:
        """Read the JSON `text` that `to_json` wrote. Raises StoreError for other text, NotationError for a bad row."""
        return read_digested(text, FORMAT, VERSION, _read)

    def extended(self, text: str, **numbers: int) -> Stored:
        """Return a copy of this Stored with the storage rules in `text` added before the present ones, so that the new
        rules win. Keyword arguments are added to its named sizes, such as head_dim=128."""
        all_rows = rows.parse(text) + self.rows
        all_numbers = {**self.numbers, **numbers}
        return Stored(all_rows, self.meshes, self.indices, all_numbers, self.exact)


def _check_row(row: object) -> Row:
    """The row. Raises StoreError for anything else, such as its text."""
    return instance(row, Row, "give rows as shardmath.storage.parse reads them", StoreError)


def _check_axes(meshes: tuple[Mesh, ...]) -> None:
    """Raise StoreError if an axis of two meshes puts a rank at two coordinates."""
    known: dict[tuple[str, int], int] = {}
    for mesh in meshes:
        for axis in mesh.shape:
            coordinates = mesh.coordinate([axis]).tolist()
            for rank, coordinate in zip(mesh.ranks, coordinates, strict=True):
                before = known.setdefault((axis, rank), coordinate)
                if before != coordinate:
                    raise StoreError(
                        f"rank {rank} is at {axis}={before} of one mesh and at {axis}={coordinate} "
                        f"of another; order the ranks of both meshes equally, or rename the axis in one"
                    )


def _check_counts(numbers: Mapping[str, int], indices: Mapping[str, Iterable[Spot]]) -> None:
    """Raise StoreError for a number, a chunk or a local number that is not a count."""
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
    """The value as plain numbers and text for JSON; integers may have been numpy's."""
    indices = {name: list(map(_list_spot, spots)) for name, spots in stored.indices.items()}
    numbers = {name: int(number) for name, number in stored.numbers.items()}
    return {
        "rows": [str(row) for row in stored.rows],
        "meshes": [(mesh.axes, mesh.ranks) for mesh in stored.meshes],
        "indices": indices,
        "numbers": numbers,
        "exact": stored.exact,
    }


def _list_spot(spot: Spot) -> tuple[dict[str, int], int, int]:
    """A spot as plain integers for JSON."""
    coords = {axis: int(coordinate) for axis, coordinate in spot.coords.items()}
    return coords, int(spot.chunk), int(spot.number)


def _read(value: Mapping[str, Any]) -> Stored:
    """The side that `_list_plain` wrote as this value."""
    table = "\n".join(value["rows"])
    indices = {}
    for name, spots in value["indices"].items():
        indices[name] = tuple(_read_spot(*spot) for spot in spots)
    numbers = {name: int(number) for name, number in value["numbers"].items()}
    return Stored(
        rows=rows.parse(table),
        meshes=tuple(Mesh(dict(axes), ranks=ranks) for axes, ranks in value["meshes"]),
        indices=indices,
        numbers=numbers,
        exact=bool(value["exact"]),
    )


def _read_spot(coords: Mapping[str, int], chunk: int, number: int) -> Spot:
    return Spot(dict(coords), int(chunk), int(number))


def replicates(unknown: str) -> bool:
    """Return True if `unknown` is "replicate": tensors without a storage rule are whole on each rank. Return False if
    it is "refuse": such tensors are an error.

    Raises StoreError for another word.
    """
    if known(unknown, UNKNOWN) is None:
        listed = ", ".join(UNKNOWN)
        raise StoreError(f"unknown={unknown!r} is not an option; use one of {listed}")
    return unknown == "replicate"


_Numbers: TypeAlias = tuple[int, ...]
_Grouped: TypeAlias = dict[_Numbers, dict[int, str]]
"""Names by all numbers except the stacked one, then by the stacked number."""


def _read_shapes(shapes: Shapes) -> Shapes:
    """The shapes as tuples of plain integers, with canonical names of dtypes.

    Raises StoreError for anything except {name: (shape, dtype)}, LayoutError for an unknown dtype.
    """
    given = mapping(shapes, "shapes are ", "names to (shape, dtype)", StoreError)
    known: dict[object, Entry] = {}
    entries = {}
    for name, entry in given.items():
        # Layers have equal entries, each of which is checked once.
        try:
            shape, dtype = entry
            key = tuple(shape), dtype
            if key not in known:
                known[key] = _read_shape(key[0]), canonical(dtype)
            entries[text(name, "the name of a tensor", StoreError)] = known[key]
        except (TypeError, ValueError) as error:
            if isinstance(error, ShardError):
                raise  # a ValueError that already says what is wrong
            what = f"tensor {shown(name)} is {shown(entry)}"
            raise StoreError(f"{what}; give (shape, dtype)") from error
    return entries


def _read_shape(given: tuple[object, ...]) -> tuple[int, ...]:
    """The shape as integers. Raises StoreError for anything that is not a size."""
    sizes = tuple(as_integer(n, f"a size of shape {given}", StoreError) for n in given)
    for n in sizes:
        if not 0 <= n <= MOST_SIZE:
            raise StoreError(f"shape {sizes} has {n}; give sizes from 0 to {MOST_SIZE}")
    return sizes


class Vocabulary:
    """Logical (checkpoint) tensors, with shapes and dtypes, grouped by template: the name with {} for each number
    between dots (layers.3.fc1 has layers.{}.fc1).

    Several sides (trainers or engines) share one Vocabulary, and so its groups.
    """

    def __init__(self, shapes: Shapes) -> None:
        self.shapes = _read_shapes(shapes)
        self.templates: dict[str, dict[_Numbers, str]] = {}
        # The results of `find` by its arguments, and of `order` by the id of the names, which are kept with them.
        self._grouped: dict[tuple[str, int | None], _Grouped] = {}
        self._ordered: dict[int, tuple[Mapping[int, str], list[str]]] = {}
        for name in shapes:
            template, numbers = split(name)
            if template.count("{}") != len(numbers):
                what = f"the name of a tensor is {name!r}, and {{}} stands for a number"
                raise StoreError(f"{what}; rename the tensor")
            by_numbers = self.templates.setdefault(template, {})
            by_numbers[numbers] = name

    def find(self, template: str, stacked: int | None) -> _Grouped:
        """Return the tensor names that become `template` when `{}` replaces each integer in them, as nested dicts. The
        inner key is the integer at index `stacked` in a name, such as the expert's; the outer key is the tuple of the
        name's other integers.

        If `stacked` is None, the others are all numbers of a name, and the inner number is 0.
        """
        # Both sides stack nearly all templates in the same way.
        key = template, stacked
        if key not in self._grouped:
            self._grouped[key] = self._group(template, stacked)
        return self._grouped[key]

    def order(self, names: Mapping[int, str], index: str | None) -> list[str]:
        """List the tensor names in `names` (number -> name) by ascending number. Raises StoreError if a number is
        missing or tensors differ in shape or dtype; its message uses `index`, such as "e", as the name of the
        numbers."""
        # By identity; the names are kept too, so that nothing else gets their id.
        if id(names) not in self._ordered:
            self._ordered[id(names)] = names, self._check_order(names, index)
        _, ordered = self._ordered[id(names)]
        return ordered

    def _check_order(self, names: Mapping[int, str], index: str | None) -> list[str]:
        """The names in order. Raises StoreError as `order` does."""
        numbers = range(len(names))
        absent = set(numbers).difference(names)
        if absent:
            raise StoreError(
                f"number {min(absent)} of index {index!r} is missing, and number {max(names)} exists; "
                f"give the shapes of all numbers from 0 on"
            )
        ordered = [names[number] for number in numbers]
        first = self.shapes[ordered[0]]
        for name in ordered:
            if self.shapes[name] != first:
                raise StoreError(
                    f"{ordered[0]!r} is {first} and {name!r} is {self.shapes[name]}; "
                    f"give tensors of index {index!r} one shape and dtype"
                )
        return ordered

    def _group(self, template: str, stacked: int | None) -> _Grouped:
        """Group the names of a template as `find` returns them; `stacked` is a position among their numbers."""
        names = self.templates.get(template, {})
        if stacked is None:
            return {numbers: {0: name} for numbers, name in names.items()}
        grouped: _Grouped = {}
        for numbers, name in names.items():
            others = numbers[:stacked] + numbers[stacked + 1 :]
            grouped.setdefault(others, {})[numbers[stacked]] = name
        return grouped
