"""Table: the transfers of a plan as columns, from which a custom transport posts its descriptors.

1. Row i of a TransferTable is transfer i of what `transfers` yields for the same ranks.
2. Where a row begins in a local tensor is in it twice: by dimension, for local tensors of any strides; and as an offset
   and strides in bytes, for contiguous ones. All rows have as many dimensions as the largest tensor.
3. A transport that reads and writes ranges of bytes cuts boxes with gaps into `ranges`.

>>> from shardmath.layouts.algebra.mesh import Mesh
>>> from shardmath.layouts.layout import Layout
>>> from shardmath.plans.plan import plan
>>> mesh = Mesh(tp=2)
>>> table = plan(Layout((4, 2), mesh, "(tp n) h"), Layout((4, 2), mesh, "n (tp h)")).table(dst=1)
>>> table.src_rank.tolist(), table.src_offset.tolist(), table.dst_offset.tolist(), table.shape.tolist()
([1, 0], [4, 4], [8, 0], [[2, 1], [2, 1]])
>>> for row, *ends in zip(*(column.tolist() for column in table.ranges())):
...     print(row, *ends)
0 4 8 4
0 12 12 4
1 4 0 4
1 12 4 4
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import numpy as np

from shardmath.base.arrays import Bools, Ints, distinct, ranges
from shardmath.base.errors import PlanError
from shardmath.base.public import public
from shardmath.base.text import plural
from shardmath.plans.boxes import OPS, PartBoxes, list_boxes
from shardmath.plans.spelling import list_names, list_rows, list_stretches
from shardmath.plans.stretch_parts import list_parts
from shardmath.plans.transfers import Planned

__all__ = ["ByteRanges", "TransferTable", "make_table", "swap_columns"]


@public
class ByteRanges(NamedTuple):
    """Columns of byte ranges without gaps: `nbytes[i]` bytes of row `row[i]` of a TransferTable, from byte
    `src_offset[i]` of the sender's local tensor to byte `dst_offset[i]` of the receiver's."""

    row: Ints
    src_offset: Ints
    dst_offset: Ints
    nbytes: Ints


class _Source(NamedTuple):
    """What a column is made of: row i has value number `place[i]`. There are fewer values than rows, since tensors of
    equal layouts share them. A table of values has a row for each dimension."""

    values: Ints
    place: Ints


class _Column:
    """A column of a TransferTable, which is made when it is first read, and then kept."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, table: TransferTable, owner: type) -> Ints:
        values, place = table._sources[self._name]
        column = values.take(place, axis=-1).T
        column.flags.writeable = False
        vars(table)[self._name] = column
        return column


@public
@dataclass(frozen=True, eq=False, repr=False)
class TransferTable:
    """Transfers as columns: arrays of integers with a row for each transfer, which cannot be written.

    `tensor`, `src_tensor`, `dst_tensor` and `op` are indices into `names`, `src_names`, `dst_names` and `ops`; names
    are of tensors in the table only. `shape`, `src_start`, `dst_start` and `global_start` have a column for each
    dimension: slices of a Transfer begin at the start, and are as long as the shape. Dimensions that a tensor lacks are
    in front, with start 0 and size 1. `src_offset` and `src_strides` are bytes: where the box begins in the sender's
    local tensor if that is contiguous in row-major order, and that tensor's strides; `dst_offset` and `dst_strides` are
    the receiver's. Other columns are as in Transfer. A column takes time and memory when it is first read.
    """

    names: tuple[str, ...]
    src_names: tuple[str, ...]
    dst_names: tuple[str, ...]
    ops: tuple[str, ...]
    _sources: Mapping[str, _Source]

    tensor = _Column()
    src_rank = _Column()
    dst_rank = _Column()
    op = _Column()
    src_tensor = _Column()
    src_start = _Column()
    src_offset = _Column()
    src_strides = _Column()
    dst_tensor = _Column()
    dst_start = _Column()
    dst_offset = _Column()
    dst_strides = _Column()
    shape = _Column()
    nbytes = _Column()
    global_start = _Column()
    addend = _Column()

    def __len__(self) -> int:
        return len(self._sources["tensor"].place)

    def __repr__(self) -> str:
        return f"<table of {plural(len(self), 'transfer')}>"

    def __reduce__(self) -> tuple[object, ...]:
        # Without columns that were read: numpy would let anyone write unpickled ones.
        return TransferTable, (*(getattr(self, one.name) for one in fields(self)),)

    def __getitem__(self, rows: slice | Ints | Bools) -> TransferTable:
        """The table of some rows, with the same names. Rows are given as numpy takes them: a slice, or an array of
        numbers or of bools. Raises PlanError for a single number."""
        if not isinstance(rows, slice) and not np.ndim(rows):
            raise PlanError(
                f"{rows!r} is neither a slice nor an array of rows; write [i : i + 1] for row i"
            )
        places = {id(source.place): source.place for source in self._sources.values()}
        some = {key: place[rows] for key, place in places.items()}
        sources = {
            name: _Source(source.values, some[id(source.place)])
            for name, source in self._sources.items()
        }
        return replace(self, _sources=sources)

    def ranges(self) -> ByteRanges:
        """Return the transfers as ranges of bytes that have no gaps at either end, the longest possible within each
        transfer. Local tensors are taken to be contiguous, in row-major order."""
        values = {name: source.values for name, source in self._sources.items()}
        box = self._sources["shape"].place
        shape, src_strides, dst_strides = (
            values[n] for n in ("shape", "src_strides", "dst_strides")
        )
        outer = shape.copy()
        run = values["nbytes"] // shape.prod(axis=0)
        is_whole = np.ones(len(run), bool)
        # From the last dimension on, a run becomes longer as long as its neighbors touch it at both ends.
        for d in reversed(range(len(shape))):
            touches = (src_strides[d] == run) & (dst_strides[d] == run)
            is_whole &= touches | (shape[d] == 1)
            outer[d, is_whole] = 1
            run = np.where(is_whole, run * shape[d], run)
        counts = outer.prod(axis=0)[box]
        rest, row = ranges(np.zeros_like(counts), counts)
        of_row = box[row]
        src = values["src_offset"][of_row]
        dst = values["dst_offset"][of_row]
        for d in reversed(range(len(outer))):
            rest, index = np.divmod(rest, outer[d, of_row])
            src += index * src_strides[d, of_row]
            dst += index * dst_strides[d, of_row]
        return ByteRanges(row, src, dst, run[of_row])


def make_table(plan: Planned, src: int | None, dst: int | None) -> TransferTable:
    """Return all transfers, or only those from rank `src`, to rank `dst`, or, given both, from `src` to `dst`, as a
    TransferTable."""
    given = list_stretches(plan, src, dst)
    parts = list_parts(plan.lines, given)
    relayed = np.zeros(len(given.block), bool)
    boxes, kind = list_boxes(plan.lines, plan.batches, given, parts, relayed)
    src_strides = _find_strides(boxes, boxes.src_shape)
    dst_strides = _find_strides(boxes, boxes.dst_shape)
    by_box = {
        "op": boxes.op,
        "addend": boxes.addend,
        "shape": boxes.size,
        "nbytes": boxes.nbytes,
        "global_start": boxes.tensor,
        "src_start": boxes.src,
        "src_offset": (boxes.src * src_strides).sum(axis=0),
        "src_strides": src_strides,
        "dst_start": boxes.dst,
        "dst_offset": (boxes.dst * dst_strides).sum(axis=0),
        "dst_strides": dst_strides,
    }
    by_part = {
        "src_rank": given.sender[parts.stretch],
        "dst_rank": given.receiver[parts.stretch],
    }
    names = list_names(plan, plan.lines.batch[parts.row], relayed[parts.stretch])
    rows = list_rows(parts, names.first, boxes, kind)
    is_used = np.zeros(len(names.names), bool)
    is_used[rows.name] = True
    tensors = _number(names.names, is_used)
    # Most tensors are one window on both sides, whose local name is the tensor's.
    sent, received = (
        tensors if column == names.names else _number(column, is_used)
        for column in (names.sent, names.received)
    )
    by_name = {"tensor": tensors.place, "src_tensor": sent.place, "dst_tensor": received.place}
    sources: dict[str, _Source] = {}
    for columns, place in ((by_box, rows.box), (by_part, rows.part), (by_name, rows.name)):
        sources |= {name: _Source(values, place) for name, values in columns.items()}
    return TransferTable(tensors.names, sent.names, received.names, OPS, sources)


def _find_strides(boxes: PartBoxes, shape: Ints) -> Ints:
    """By dimension and box, the strides in bytes of a contiguous local tensor of this shape."""
    itemsize = boxes.nbytes // boxes.size.prod(axis=0)
    strides: Ints = np.ones_like(shape) * itemsize
    strides[:-1] *= shape[:0:-1].cumprod(axis=0)[::-1]
    return strides


class _Numbered(NamedTuple):
    """Distinct names, and the place among them of each of some names; any place for a name that is not used."""

    names: tuple[str, ...]
    place: Ints


def _number(names: Sequence[str], is_used: Bools) -> _Numbered:
    """Number the names that are used, in the order in which they first come."""
    used = list(itertools.compress(names, is_used.tolist()))
    each_once = dict.fromkeys(used)
    if len(each_once) == len(names):
        return _Numbered(tuple(used), np.arange(len(used)))
    number = dict(zip(each_once, itertools.count(), strict=False))
    place = np.zeros(len(names), np.int64)
    place[is_used] = np.fromiter(map(number.__getitem__, used), np.int64)
    return _Numbered(tuple(number), place)


def swap_columns(
    table: TransferTable, find_entry: Callable[[str, int], tuple[str, int]]
) -> TransferTable:
    """Return the table with source and destination swapped. `find_entry(name, rank)` gives the operation and the addend
    of what is sent from the local tensor `name` on `rank`."""
    radix = 1 + int(table.dst_rank.max(initial=0))
    pairs, pair = distinct(table.dst_tensor * radix + table.dst_rank)
    tensors, ranks = (column.tolist() for column in np.divmod(pairs, radix))
    entries = [find_entry(table.dst_names[i], rank) for i, rank in zip(tensors, ranks, strict=True)]
    numbered = [(OPS.index(op), addend) for op, addend in entries]
    op, addend = np.array(numbered, np.int64).reshape(-1, 2).T
    other = {"src": "dst", "dst": "src"}
    sources = {}
    for name, source in table._sources.items():
        way, _, rest = name.partition("_")
        sources[f"{other[way]}_{rest}" if way in other else name] = source
    sources |= {"op": _Source(op, pair), "addend": _Source(addend, pair)}
    return replace(table, src_names=table.dst_names, dst_names=table.src_names, _sources=sources)
