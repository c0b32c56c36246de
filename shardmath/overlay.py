"""Overlay: two partitions of a dimension -> atoms -> templates.

1. Source parts are cut into **atoms**,
   global ranges held by one set of parts, the atom's **key**; where parts do not overlap a key is one part.
2. Overlaid with the destination's parts, each (key, part) pair gets rows (source start, destination start, global
   start, size). Because Runs are canonical every row is as long as it can be: there is no merge pass.
3. A **template** is the Kronecker product of its dimensions: a unit is one pair a dimension, its boxes are the products
   of their rows. Units hold for all tensors of these two layouts and all ranks; no loop is over rank pairs.
4. Addends are dimensions too: a pass-through axis is a dimension divided alike on both sides; folded axes are one
   that the source divides and the destination holds whole.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from shardmath.layout import Layout
from shardmath.mesh import Mesh
from shardmath.partition import Ints, Partition, partition, spans
from shardmath.reduction import Reduction
from shardmath.runs import Runs, identity

__all__ = ["Overlay", "Piece", "Template", "expand", "overlay", "ranges", "template", "unit_boxes"]


def _addends(axes: tuple[str, ...], count: int) -> Partition:
    """One addend a coordinate."""
    return Partition(axes, tuple(Runs(((0, i, 1),)) for i in range(count)), np.arange(count))


def ranges(starts: Ints, stops: Ints) -> tuple[Ints, Ints]:
    """All integers of the ranges one after the other, and which range each is of."""
    counts = np.maximum(stops - starts, 0)
    owner = np.repeat(np.arange(len(counts)), counts)
    return np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts - starts, counts), owner


@dataclass(frozen=True, slots=True, eq=False)
class Overlay:
    """Rows of one dimension, grouped by pair of source key and destination part.

    `keys[k]` are the source parts that hold an atom of key k. Pair p is (`pair_key[p]`, `pair_part[p]`) with
    `pair_size[p]` positions in the rows `first[p]..first[p+1]-1`; a row has a global `start`, a `size`, a destination
    start `dst` and, for the m-th part of its key, a source start `src[:, m]`.
    """

    source: Partition
    target: Partition
    keys: tuple[tuple[int, ...], ...]
    pair_key: Ints
    pair_part: Ints
    pair_size: Ints
    first: Ints
    start: Ints
    size: Ints
    dst: Ints
    src: Ints


def overlay(source: Partition, target: Partition) -> Overlay:
    """What of each source key each destination part holds."""
    keys, start, stop, key, local = _atoms(source)
    g, end, lo, part = spans(target.parts)
    atom, span = ranges(np.searchsorted(stop, g, "right"), np.searchsorted(start, end, "left"))
    left = np.maximum(start[atom], g[span])
    size = np.minimum(stop[atom], end[span]) - left
    dst = lo[span] + left - g[span]
    order = np.lexsort((dst, part[span], key[atom]))
    atom, span, left, size, dst = (x[order] for x in (atom, span, left, size, dst))
    src = local[atom] + (left - start[atom])[:, None]
    pair = key[atom] * (len(target.parts) + 1) + part[span]
    first = np.flatnonzero(np.diff(pair, prepend=-1))
    sizes = np.add.reduceat(size, first) if len(first) else size
    return Overlay(
        source,
        target,
        keys,
        key[atom[first]],
        part[span[first]],
        sizes,
        np.append(first, len(pair)),
        left,
        size,
        dst,
        src,
    )


def _atoms(source: Partition) -> tuple[tuple[tuple[int, ...], ...], Ints, Ints, Ints, Ints]:
    """keys; and by atom, in global order: start, stop, key, local start in each part of the key."""
    g, stop, lo, part = spans(source.parts)
    if (stop[:-1] <= g[1:]).all():
        return tuple((p,) for p in range(len(source.parts))), g, stop, part, lo[:, None]
    cuts = np.unique(np.concatenate((g, stop)))
    atom, span = ranges(np.searchsorted(cuts, g), np.searchsorted(cuts, stop))
    order = np.lexsort((part[span], atom))
    return _group_atoms(cuts, atom[order], part[span][order], (lo[span] + cuts[atom] - g[span])[order])


def _group_atoms(
    cuts: Ints, atom: Ints, part: Ints, local: Ints
) -> tuple[tuple[tuple[int, ...], ...], Ints, Ints, Ints, Ints]:
    """Number the sets of parts that hold each atom; `atom` is sorted, and `part` within it."""
    first = np.flatnonzero(np.diff(atom, prepend=-1))
    held = [tuple(x.tolist()) for x in np.split(part, first[1:])]
    number = {key: k for k, key in enumerate(dict.fromkeys(held))}
    width = max(map(len, number))
    starts = np.full((len(first), width), -1, np.int64)
    member = np.arange(len(atom)) - np.repeat(first, np.diff(np.append(first, len(atom))))
    starts[np.repeat(np.arange(len(first)), np.diff(np.append(first, len(atom)))), member] = local
    key = np.array([number[x] for x in held], np.int64)
    return tuple(number), cuts[atom[first]], cuts[atom[first] + 1], key, starts


@dataclass(frozen=True, slots=True, eq=False)
class Template:
    """All units that move tensors of layout `src` to layout `dst`, and which ranks they concern.

    Unit u asks `unit_size[u]` elements of class `unit_class[u]` for every rank that holds destination parts
    `unit_parts[u]`; its pair in dimension d is `unit_pairs[u, d]`. Class c is held by the ranks
    `holders[holder_first[c]:holder_first[c + 1]]`, ascending. `entry_unit` and `entry_rank` say who asks
    for which unit.
    """

    src: Layout
    dst: Layout
    reduction: Reduction
    overlays: tuple[Overlay, ...]
    unit_class: Ints
    unit_size: Ints
    unit_pairs: Ints
    holders: Ints
    holder_first: Ints
    entry_unit: Ints
    entry_rank: Ints

    @property
    def hidden(self) -> int:
        """How many leading dimensions are addends and not the tensor's."""
        return len(self.overlays) - self.src.ndim


def template(src: Layout, dst: Layout, reduced: Reduction) -> Template:
    """The template of two layouts of one shape."""
    overlays = tuple(itertools.starmap(overlay, _dimensions(src, dst, reduced)))
    units, parts, size, pairs = _units(overlays)
    classes, unit_class = np.unique(units, return_inverse=True)
    held, rank = _holders(overlays, src.mesh, classes)
    entry_unit, entry_rank = _entries(overlays, dst.mesh, parts)
    first = np.searchsorted(held, np.arange(len(classes) + 1))
    return Template(
        src, dst, reduced, overlays, unit_class.reshape(-1), size, pairs, rank, first, entry_unit, entry_rank
    )


def _dimensions(src: Layout, dst: Layout, reduced: Reduction) -> Iterable[tuple[Partition, Partition]]:
    """Folded addends first, then those that pass through, then the tensor's dimensions."""
    if reduced.folded:
        yield (
            _addends(reduced.folded, reduced.addends),
            Partition((), (identity(reduced.addends),), np.zeros(1, np.int64)),
        )
    for a, b in reduced.matched:
        n = math.prod(map(src.mesh.axis_size, a))
        yield _addends(a, n), _addends(b, n)
    for s, d in zip(src.dims, dst.dims, strict=True):
        yield partition(s), partition(d)


def _units(overlays: Sequence[Overlay]) -> tuple[Ints, Ints, Ints, Ints]:
    """Class code, destination code, elements and pair of each dimension, by unit."""
    units = parts = np.zeros(1, np.int64)
    size = np.ones(1, np.int64)
    pairs = np.zeros((1, 0), np.int64)
    for over in overlays:
        count = len(over.pair_key)
        units = (units[:, None] * len(over.keys) + over.pair_key).ravel()
        parts = (parts[:, None] * len(over.target.parts) + over.pair_part).ravel()
        size = (size[:, None] * over.pair_size).ravel()
        column = np.tile(np.arange(count), len(pairs))[:, None]
        pairs = np.hstack((np.repeat(pairs, count, axis=0), column))
    return units, parts, size, pairs


def _holders(overlays: Sequence[Overlay], mesh: Mesh, classes: Ints) -> tuple[Ints, Ints]:
    """(class, rank) of all ranks that hold a class, sorted."""
    rank = np.arange(mesh.size)
    code = np.zeros(mesh.size, np.int64)
    for over in overlays:
        part, key = _part_keys(over)
        own = over.source.by_rank(mesh)[rank]
        row, owner = ranges(np.searchsorted(part, own, "left"), np.searchsorted(part, own, "right"))
        rank, code = rank[owner], code[owner] * len(over.keys) + key[row]
    at = np.searchsorted(classes, code)
    used = at < len(classes)
    used[used] = classes[at[used]] == code[used]
    rank, at = np.array(mesh.ranks, np.int64)[rank[used]], at[used]
    order = np.lexsort((rank, at))
    return at[order], rank[order]


def _part_keys(over: Overlay) -> tuple[Ints, Ints]:
    """(part, key) of all keys that a source part is in, sorted."""
    if all(len(key) == 1 for key in over.keys):
        return np.arange(len(over.keys)), np.arange(len(over.keys))
    pairs = sorted((p, k) for k, key in enumerate(over.keys) for p in key)
    part, key = np.array(pairs, np.int64).reshape(-1, 2).T
    return part, key


def _entries(overlays: Sequence[Overlay], mesh: Mesh, parts: Ints) -> tuple[Ints, Ints]:
    """(unit, rank) of all ranks that hold the destination parts of a unit."""
    code = np.zeros(mesh.size, np.int64)
    for over in overlays:
        code = code * len(over.target.parts) + over.target.by_rank(mesh)
    order = np.lexsort((np.array(mesh.ranks), code))
    there = code[order]
    at, unit = ranges(np.searchsorted(there, parts, "left"), np.searchsorted(there, parts, "right"))
    return unit, np.array(mesh.ranks, np.int64)[order][at]


class Piece(NamedTuple):
    """One box of a unit as its source and its destination see it; `addend` is its place in the fold."""

    src: tuple[slice, ...]
    dst: tuple[slice, ...]
    whole: tuple[slice, ...]
    shape: tuple[int, ...]
    addend: int


@functools.lru_cache(maxsize=1024)
def unit_boxes(t: Template, unit: int) -> tuple[Ints, Ints]:
    """The rows of every box of the unit, box by box and row-major, and their sizes: two arrays (boxes, dimensions)."""
    rows = [
        np.arange(over.first[p], over.first[p + 1])
        for over, p in zip(t.overlays, t.unit_pairs[unit].tolist(), strict=True)
    ]
    if not rows:
        return np.zeros((1, 0), np.int64), np.ones((1, 0), np.int64)
    table = np.stack([x.ravel() for x in np.meshgrid(*rows, indexing="ij")], axis=1)
    return table, np.stack([over.size[table[:, d]] for d, over in enumerate(t.overlays)], axis=1)


def expand(t: Template, unit: int, sender: int, lo: int, hi: int) -> list[Piece]:
    """The pieces of elements lo..hi-1 of the unit, when rank `sender` of the source sends them.

    lo and hi are where `snap` may cut: at boxes, or at rows of one.
    """
    table, sizes = unit_boxes(t, unit)
    columns = [
        _column(over, over.pair_key[p], sender, t.src.mesh)
        for over, p in zip(t.overlays, t.unit_pairs[unit], strict=True)
    ]
    ends = np.cumsum(sizes.prod(axis=1))
    out = []
    for b in range(int(np.searchsorted(ends, lo, "right")), int(np.searchsorted(ends, hi, "left")) + 1):
        begin = int(ends[b - 1]) if b else 0
        out.append(
            _piece(t, table[b].tolist(), columns, sizes[b].tolist(), max(lo - begin, 0), min(hi, int(ends[b])) - begin)
        )
    return out


def _column(over: Overlay, key: int, sender: int, mesh: Mesh) -> int:
    """Which part of the key the sender holds."""
    members = over.keys[key]
    if len(members) == 1:
        return 0
    return members.index(int(over.source.by_rank(mesh)[mesh.position(sender)]))


def _piece(t: Template, rows: list[int], columns: list[int], sizes: list[int], lo: int, hi: int) -> Piece:
    """Elements lo..hi-1 of one box, whole rows of it."""
    offset = [0] * len(sizes)
    if hi - lo < math.prod(sizes):
        d = next(i for i, n in enumerate(sizes) if n > 1)
        row = math.prod(sizes[d + 1 :])
        offset[d], sizes = lo // row, [*sizes[:d], (hi - lo) // row, *sizes[d + 1 :]]
    src: list[slice] = []
    dst: list[slice] = []
    whole: list[slice] = []
    for over, r, c, o, n in zip(t.overlays, rows, columns, offset, sizes, strict=True):
        for out, at in ((src, over.src[r, c]), (dst, over.dst[r]), (whole, over.start[r])):
            out.append(slice(int(at) + o, int(at) + o + n))
    k = t.hidden
    addend = whole[0].start if t.reduction.folded else 0
    return Piece(tuple(src[k:]), tuple(dst[k:]), tuple(whole[k:]), tuple(sizes[k:]), addend)
