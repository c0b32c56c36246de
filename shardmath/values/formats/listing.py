"""Listing: every format, what it makes of a tensor, and where tensors may be cut for it.

>>> print(show_listing().splitlines()[1].strip())
MXFP8 e4m3 rceil rowwise    float8_e4m3fn  float8_e8m0fnu        M x K/32     1 x 32          any                32
"""

from __future__ import annotations

from typing import NamedTuple

from shardmath.base.text import make_table
from shardmath.values.formats.format import Format
from shardmath.values.formats.fp8 import FP8, FP8Blocks
from shardmath.values.formats.mxfp8 import MXFP8
from shardmath.values.formats.nvfp4 import NVFP4

__all__ = ["FORMATS", "Row", "listing", "show_listing"]

FORMATS: tuple[Format, ...] = (
    MXFP8(),
    MXFP8(axis=-2),
    MXFP8(rounding="floor"),
    MXFP8("e5m2"),
    FP8Blocks(),
    FP8Blocks(power_of_two=True),
    FP8Blocks((1, 128)),
    FP8("tensor"),
    FP8("channel"),
    NVFP4(),
    NVFP4(two_d=True),
)
"""One of each kind."""


class Row(NamedTuple):
    """A format of a matrix of M rows and K columns.

    `cuts` says for rows and for columns at multiples of what a part begins that is quantised alone; the end of a
    dimension is a cut, too.
    """

    name: str
    data: str
    scale: str
    scale_shape: str
    granularity: str
    row_cuts: str
    column_cuts: str


def listing() -> tuple[Row, ...]:
    """The table of formats."""
    return tuple(map(_describe, FORMATS))


def _describe(one: Format) -> Row:
    data, scale, *_ = one.parts
    rows, columns = one.blocks.per_dimension(2)
    counts = _count("M", rows), _count("K", columns)
    sizes = _write(rows), _write(columns)
    return Row(
        one.name,
        data.kind,
        scale.kind,
        " x ".join(counts),
        " x ".join(sizes),
        row_cuts=_cut(rows),
        column_cuts=_cut(columns),
    )


def _write(block: int | None) -> str:
    """The positions of a block."""
    return "all" if block is None else str(block)


def _count(size: str, block: int | None) -> str:
    """How many blocks a dimension has."""
    if block is None:
        return "1"
    return size if block == 1 else f"{size}/{block}"


def _cut(block: int | None) -> str:
    """Where a dimension may be cut; one scale for all of it needs an amax of all ranks."""
    if block is None:
        return "any, with amax"
    return "any" if block == 1 else str(block)


def show_listing() -> str:
    """The table for people."""
    head = "format", "data", "scales", "shape", "block", "cuts of M", "cuts of K"
    return make_table(head, listing())
