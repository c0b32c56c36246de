"""Listing: a table of all formats, their data and scales, and where tensors may be cut.

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

__all__ = ["FORMATS", "FormatRow", "listing", "show_listing"]

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


class FormatRow(NamedTuple):
    """A line in the table of formats that `listing` returns: for one format and a matrix of M rows and K columns, the
    dtypes of data and scales, the shape of the scales, the size of a block, and where the matrix can be cut.

    Parts can be quantized separately if they begin at multiples of `row_cuts` and `column_cuts`, and end there or at
    the end of a dimension.
    """

    name: str
    data: str
    scale: str
    scale_shape: str
    granularity: str
    row_cuts: str
    column_cuts: str


def listing() -> tuple[FormatRow, ...]:
    """Return the table of quantized formats as a tuple, one FormatRow per format."""
    return tuple(map(_make_row, FORMATS))


def _make_row(format: Format) -> FormatRow:
    data, scale, *_ = format.parts
    rows, columns = format.blocks.per_dimension(2)
    counts = _write_count("M", rows), _write_count("K", columns)
    sizes = ("all" if size is None else str(size) for size in (rows, columns))
    return FormatRow(
        format.name,
        data.kind,
        scale.kind,
        " x ".join(counts),
        " x ".join(sizes),
        row_cuts=_write_cuts(rows),
        column_cuts=_write_cuts(columns),
    )


def _write_count(length: str, block: int | None) -> str:
    """The number of blocks along a dimension."""
    if block is None:
        return "1"
    return length if block == 1 else f"{length}/{block}"


def _write_cuts(block: int | None) -> str:
    """The multiples at which a dimension may be cut; if it has one scale, ranks need its amax."""
    if block is None:
        return "any, with amax"
    return "any" if block == 1 else str(block)


def show_listing() -> str:
    """Return the table of quantized formats as text, one line per format."""
    head = "format", "data", "scales", "shape", "block", "cuts of M", "cuts of K"
    return make_table(head, listing())
