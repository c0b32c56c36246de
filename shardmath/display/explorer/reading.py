"""Reading: a layout in sentences, for people who do not know the notation yet.

>>> from shardmath.layouts.algebra.mesh import Mesh
>>> print(*read_aloud(Layout((9, 4), Mesh(dp=4, tp=2), "(tp n) h")), sep="\\n")
Dimension 0: 9 positions are cut into 2 chunks, one per rank along tp.
Dimension 1: every rank has all 4 positions.
Ranks along dp hold the same: there are 4 replicas.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from shardmath.base.text import plural, show_ranks
from shardmath.layouts.algebra.cuts import (
    BalancedChunks,
    Chunks,
    FixedBlock,
    Sizes,
    UserCut,
)
from shardmath.layouts.algebra.dimension import Dimension
from shardmath.layouts.algebra.runs import Runs
from shardmath.layouts.algebra.stages import Digit, Stage
from shardmath.layouts.layout import Layout

__all__ = ["read_aloud"]

MOST_FIELDS = 12
"""Fields of a dimension that are read."""

MOST_SIZES = 16
"""Sizes of parts that are read."""

MOST_RANKS = 256
"""Ranks up to which components that a rank lacks are looked for."""


def read_aloud(layout: Layout) -> list[str]:
    """Return sentences that say how `layout` divides each dimension, and what ranks along the other axes hold."""
    sentences = [f"Dimension {d}: {_read(dim)}." for d, dim in enumerate(layout.dims)]
    sentences += _warn_of_missing(layout)
    for axis, op in layout.partial:
        held = "holds an addend of the tensor" if op == "sum" else f"holds a value for {op}"
        sentences.append(f"Each rank along {axis} {held}: {op} over {axis} gives the tensor.")
    copies = math.prod(map(layout.mesh.axis_size, layout.free_axes))
    if copies > 1:
        axes = " and ".join(layout.free_axes)
        sentences.append(f"Ranks along {axes} hold the same: there are {copies:,} replicas.")
    return sentences


def _warn_of_missing(layout: Layout) -> Iterator[str]:
    """A sentence for each component of a fused dimension, such as K in QKV, of which some ranks hold nothing."""
    if layout.mesh.size > MOST_RANKS:
        return
    for d, dim in enumerate(layout.dims):
        for start, stop in _list_components(dim):
            held = {rank: _holds(layout.runs(rank)[d], start, stop) for rank in layout.mesh.ranks}
            without = [rank for rank, holds in held.items() if not holds]
            if without and len(without) < len(held):
                nothing = "holds nothing" if len(without) == 1 else "hold nothing"
                ranks = show_ranks(without).capitalize()
                yield f"{ranks} {nothing} of positions {start}:{stop} of dimension {d}."


def _list_components(dim: Dimension) -> list[tuple[int, int]]:
    """The components of which each rank gets a share, if the dimension is first cut into parts of given sizes."""
    if dim.stored is not None or len(dim.fields) != 1:
        return []
    for stage in dim.fields[0].stages[:1]:
        cut = stage[0].cut
        if isinstance(cut, Sizes) and not stage[0].axes:
            ends = list(itertools.accumulate(cut.sizes, initial=0))
            return [(start, stop) for start, stop in itertools.pairwise(ends) if start < stop]
    return []


def _holds(runs: Runs, start: int, stop: int) -> bool:
    """Whether a rank holds any of the positions."""
    return any(first < stop and start < first + size for _, first, size in runs.segments)


def _read(dim: Dimension) -> str:
    """How one dimension is stored and divided."""
    if dim.stored is None and not dim.axes:
        return f"every rank has all {plural(dim.size, 'position')}"
    clauses = [_read_fields(dim)]
    if dim.stored is not None:
        clauses.insert(0, _read_stored(dim.size, dim.stored))
    return "; ".join(clauses)


def _read_stored(size: int, stored: Runs) -> str:
    """How many positions are stored, and how many of them are padding."""
    holes = len(stored) - stored.size
    text = f"{plural(len(stored), 'position')} stored, {holes:,} of them padding"
    return (
        text if stored.size == size else f"{text}, and {size - stored.size:,} of {size:,} left out"
    )


def _read_fields(dim: Dimension) -> str:
    """How each field (range of stored positions) is divided."""
    if len(dim.fields) == 1:
        (field,) = dim.fields
        return _read_stages(field.size, field.stages)
    clauses = []
    start = 0
    for field in dim.fields[:MOST_FIELDS]:
        stop = start + field.size
        clauses.append(f"of positions {start}:{stop}, {_read_stages(field.size, field.stages)}")
        start = stop
    more = len(dim.fields) - MOST_FIELDS
    if more > 0:
        clauses.append(f"and so on for {plural(more, 'more field')}")
    return "; ".join(clauses)


def _read_stages(size: int, stages: tuple[Stage, ...]) -> str:
    """How a number of positions is divided, stage after stage."""
    if not stages:
        return f"every rank has all {size:,}"
    texts = []
    for number, stage in enumerate(stages):
        what = f"{plural(size, 'position')} {'is' if size == 1 else 'are'}"
        if number:
            # The end of a stage forgets the borders between the pieces that a rank has.
            what = "then what each rank has counts as one piece, which is"
        texts.append("; ".join(_read_digits(stage, what)))
    return "; ".join(texts)


def _read_digits(stage: Stage, what: str) -> Iterator[str]:
    """A clause for each cut of a stage; the first one cuts `what`."""
    for digit in stage:
        yield f"{what} cut into {_read_cut(digit)}, {_read_keeper(digit)}"
        what = "each of these is"


def _read_cut(digit: Digit) -> str:
    """The parts into which a digit cuts a piece."""
    match digit.cut:
        case Chunks(parts):
            return plural(parts, "chunk")
        case BalancedChunks(parts):
            return f"{plural(parts, 'chunk')} whose sizes differ by at most 1"
        case Sizes(sizes):
            more = f" and {len(sizes) - MOST_SIZES} more" if len(sizes) > MOST_SIZES else ""
            return f"parts of {' + '.join(map(str, sizes[:MOST_SIZES]))}{more}"
        case FixedBlock(size):
            return f"blocks of {size:,}"
        case UserCut(by):
            return f"the parts of {type(by).__name__}"
    raise AssertionError(digit.cut)


def _read_keeper(digit: Digit) -> str:
    """Who keeps the parts of a digit."""
    if not digit.axes:
        return "and every rank gets a share of each"
    return f"one per rank along {' and '.join(digit.axes)}"
