"""Common: the bytes that the ranks of a source and of a destination have in common.

1. The elements of a tensor that two ranks have in common are a product over dimensions of the number
   of positions that their parts share, from one small table per dimension; windows and tensors add up.
2. Ranks that hold the same parts are one class, and classes are compared: no loop is over pairs of
   ranks.

>>> from shardmath.layouts.algebra.mesh import Mesh
>>> mesh = Mesh(tp=2)
>>> pair = Layout((4,), mesh, "(tp n)"), Layout((4,), mesh, "n")
>>> count_common({pair: 1}, np.array([0, 1])).tolist()
[[8, 8], [8, 8]]
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import NamedTuple, TypeAlias

import numpy as np

from shardmath.base.arrays import Ints
from shardmath.layouts.algebra.overlay import overlap_table
from shardmath.layouts.algebra.partition import partition
from shardmath.layouts.layout import Layout

__all__ = ["Pair", "count_common"]

Pair: TypeAlias = tuple[Layout, Layout]
"""A source and a destination window of one tensor."""


def count_common(pairs: Mapping[Pair, int], ranks: Ints) -> Ints:
    """Return an array whose entry (i, j) is the number of bytes, over all tensors, that `ranks[i]` at the source and
    `ranks[j]` at the destination both hold. `pairs` maps (source layout, destination layout) to the number of tensors
    that have these layouts."""
    common = np.zeros((len(ranks), len(ranks)), np.int64)
    for bytes_by_class in _compare(pairs, ranks):
        _add(common, bytes_by_class)
    return common


class _Classes(NamedTuple):
    """Ranks of a layout: their places among the destination's ranks, their classes, and the parts of
    each class.

    A class is a part of every dimension. Classes are numbered by their first ranks, which says
    nothing of parts.
    """

    place: Ints
    number: Ints
    parts: Ints


class _Shared(NamedTuple):
    """Source ranks, destination ranks and the bytes that their classes have in common: (source
    classes, destination classes)."""

    rows: _Classes
    columns: _Classes
    table: Ints

    @property
    def key(self) -> tuple[bytes, ...]:
        """A dict key, equal for objects whose `table`, the bytes that source and destination ranks have in common, can
        be added entry by entry. Keys are equal if the same ranks are replicas of each other, at the source and at the
        destination."""
        columns = *self.rows[:2], *self.columns[:2]  # place and number of both
        return tuple(column.tobytes() for column in columns)


def _compare(pairs: Mapping[Pair, int], ranks: Ints) -> Iterable[_Shared]:
    """What the windows of each pair have in common; pairs of equal classes are added up."""
    layouts = set(itertools.chain.from_iterable(pairs))
    place = _place_ranks(layouts, ranks)
    classes = {layout: _classify(layout, place) for layout in layouts}
    out: dict[tuple[bytes, ...], _Shared] = {}
    for (a, b), count in pairs.items():
        rows = classes[a]
        columns = classes[b]
        if not len(rows.place):
            continue
        elements = _count_elements(a, b, rows.parts, columns.parts)
        bytes_per_element = count * a.itemsize
        table = elements * bytes_per_element
        # With a class per rank on one side, the tables of more pairs have equal keys.
        shared = _widen(_Shared(rows, columns, table))
        key = shared.key
        earlier = out.get(key)
        if earlier is not None:
            sum_table = earlier.table + shared.table
            shared = shared._replace(table=sum_table)
        out[key] = shared
    return out.values()


def _place_ranks(layouts: Iterable[Layout], ranks: Ints) -> Ints:
    """The place of each rank of the layouts among these, -1 for others."""
    last = int(ranks.max(initial=-1))
    for layout in layouts:
        last = max(last, *layout.mesh.ranks)
    place = np.full(last + 1, -1)
    place[ranks] = np.arange(len(ranks))
    return place


def _widen(shared: _Shared) -> _Shared:
    """The table with one class per rank on the side of more classes, so that more tables can be added up.

    No table is larger than the number of ranks times the fewer classes.
    """
    rows, columns, table = shared
    if table.shape[0] < table.shape[1]:
        table = table.take(columns.number, axis=1)
        class_per_rank = _set_apart(columns)
        return _Shared(rows, class_per_rank, table)
    table = table.take(rows.number, axis=0)
    class_per_rank = _set_apart(rows)
    return _Shared(class_per_rank, columns, table)


def _set_apart(classes: _Classes) -> _Classes:
    """The ranks with one class for each rank."""
    return classes._replace(number=np.arange(len(classes.place)))


def _add(common: Ints, shared: _Shared) -> None:
    """Add what classes of ranks have in common to `common`, a table by the places of source and destination ranks."""
    rows, columns, table = shared
    block = table.take(rows.number, axis=0)
    block = block.take(columns.number, axis=1)
    row_span = _span(rows.place)
    column_span = _span(columns.place)
    into = common[row_span, column_span]
    # Ranks at neighboring places are a view, which is five times as fast.
    if block.shape == into.shape:
        into += block
    else:
        common[np.ix_(rows.place, columns.place)] += block


def _span(place: Ints) -> slice:
    """From the first of ascending places to the last."""
    return slice(int(place[0]), int(place[-1]) + 1)


def _classify(layout: Layout, place: Ints) -> _Classes:
    """The layout's ranks that the destination has, by place; `place[rank]` is a rank's place among the destination's
    ranks, -1 for others."""
    ranks = np.array(layout.mesh.ranks, np.int64)
    place_of_position = place[ranks]
    is_absent = place_of_position < 0
    absent = int(is_absent.sum())
    # Positions in the mesh, by place; absent ranks, at -1, come first and are left out.
    order = np.argsort(place_of_position)[absent:]
    parts = _list_parts(layout, order)
    code = _encode_parts(layout, parts)
    _, first, number = np.unique(code, return_index=True, return_inverse=True)

    # np.unique numbers classes by their codes; the second argsort inverts the order by first ranks.
    by_first = np.argsort(first)
    renumbered = np.argsort(by_first)[number]
    first_members = first[by_first]
    return _Classes(place_of_position[order], renumbered, parts[first_members])


def _list_parts(layout: Layout, positions: Ints) -> Ints:
    """The parts that these positions of the layout's mesh hold, as an array (positions, dimensions)."""
    shape = len(positions), layout.ndim
    parts = np.zeros(shape, np.int64)
    for d, dim in enumerate(layout.dims):
        divided = partition(dim)
        if len(divided.parts) > 1:
            part_by_position = divided.by_rank(layout.mesh)
            parts[:, d] = part_by_position[positions]
    return parts


def _encode_parts(layout: Layout, parts: Ints) -> Ints:
    """One number for all parts of a position, of mixed radix: each dimension has one digit."""
    code = np.zeros(len(parts), np.int64)
    for dim, digit in zip(layout.dims, parts.T, strict=True):
        radix = len(partition(dim).parts)
        code = code * radix + digit
    return code


def _count_elements(a: Layout, b: Layout, rows: Ints, columns: Ints) -> Ints:
    """Elements that classes of `a` and classes of `b`, given by their parts, have in common."""
    count = np.ones((len(rows), len(columns)), np.int64)
    for d in range(a.ndim):
        a_partition = partition(a.dims[d])
        b_partition = partition(b.dims[d])
        table = overlap_table(a_partition, b_partition)
        row = rows[:, d, None]
        column = columns[:, d]
        count *= table[row, column]
    return count
