"""Unparse: dimensions as canonical text, which `notation.parse` reads back to the same value.

Names are not part of a layout: the free names are n h w d n4 n5 ..., and custom placements are
named after their classes.

>>> from shardmath.layouts.notation import parse
>>> dims, partial = parse("(2: tp x + 6: y)=<0:4 -4> z", (4, 9), {"tp": 2}, {})
>>> unparse(dims, partial, {"tp": 2})
'(2: tp n + 6: n)=8 h'
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

from shardmath.layouts.algebra.cuts import (
    BalancedChunks,
    Chunks,
    FixedBlock,
    Sizes,
    Splits,
    UserCut,
)
from shardmath.layouts.algebra.dimension import Dimension, Field
from shardmath.layouts.algebra.runs import identity, spanning
from shardmath.layouts.algebra.stages import Digit, Stage
from shardmath.layouts.notation import Partials
from shardmath.layouts.reader import Axes

__all__ = ["free_name", "rule_names", "unparse"]

NAMES = ("n", "h", "w", "d")


def free_name(d: int) -> str:
    """Return the name of dimension `d` in canonical layout text: "n", "h", "w", "d" for 0 to 3, then "n4", "n5", ...

    If a mesh axis has this name, `unparse` appends `_`.
    """
    return NAMES[d] if d < len(NAMES) else f"n{d}"


def unparse(dims: tuple[Dimension, ...], partial: Partials, axes: Axes) -> str:
    """Return dimensions and Partial axes as canonical layout text, which `parse` reads back; dimensions get names that
    no mesh axis in `axes` has."""
    named = rule_names(dims)
    words = []
    for d, dim in enumerate(dims):
        name = free_name(d)
        while name in axes:
            name += "_"
        words.append(_dim_text(dim, name, named))
    by_op: dict[str, list[str]] = {}
    for axis, op in partial:
        by_op.setdefault(op, []).append(axis)
    words += [f"{{{op}: {' '.join(waiting)}}}" for op, waiting in by_op.items()]
    return " ".join(words)


def rule_names(dims: tuple[Dimension, ...]) -> dict[Splits, str]:
    """Return a dict from each custom placement in `dims` to its name: the lower-case class name, numbered if taken."""
    name_of: dict[Splits, str] = {}
    taken: set[str] = set()
    for digit in _digits(dims):
        cut = digit.cut
        if not isinstance(cut, UserCut) or cut.by in name_of:
            continue
        kind = type(cut.by)
        base = name = kind.__name__.lower()
        numbers = itertools.count(2)
        while name in taken:
            name = f"{base}{next(numbers)}"
        name_of[cut.by] = name
        taken.add(name)
    return name_of


def _digits(dims: tuple[Dimension, ...]) -> Iterator[Digit]:
    """All digits of the dimensions, in the order of the text."""
    for dim in dims:
        for field in dim.fields:
            for stage in field.stages:
                yield from stage


def _dim_text(dim: Dimension, name: str, named: Mapping[Splits, str]) -> str:
    """A word, or a group and the stored positions after it."""
    if dim.stored is None and dim.fields == (Field(dim.size),):
        return name
    fields = []
    for field in dim.fields:
        size = f"{field.size}: " if len(dim.fields) > 1 else ""
        fields.append(size + _field_text(field, name, named))
    return f"({' + '.join(fields)}){_stored_text(dim)}"


def _stored_text(dim: Dimension) -> str:
    """`=8` if the dimension is padded only at its end, else all ranges and holes."""
    if dim.stored is None:
        return ""
    stored = dim.stored
    if stored.segments == identity(dim.size).segments:
        return f"={len(stored)}"
    return f"=<{spanning(stored)}>"


def _field_text(field: Field, name: str, named: Mapping[Splits, str]) -> str:
    stages = [" ".join(_stage_words(stage, name, named)) for stage in field.stages]
    return " | ".join(stages) or name


def _stage_words(stage: Stage, name: str, named: Mapping[Splits, str]) -> Iterator[str]:
    """The stage's words: cuts, then the free name, then blocks and the size of the smallest."""
    block = 0  # the size of the last block, 0 before the first
    for digit in stage:
        cut = digit.cut
        if not isinstance(cut, FixedBlock):
            yield _word(digit, named)
        elif not block:
            # The free name counts the largest blocks, which are always local.
            block = cut.size
            yield name
        else:
            # A word right of the free name stands for the number of these blocks in one block of the digit before.
            yield "*".join(digit.axes) or str(block // cut.size)
            block = cut.size
    if not block:
        yield name
    elif block > 1:
        yield str(block)


def _word(digit: Digit, named: Mapping[Splits, str]) -> str:
    """The word of a digit left of the free name."""
    cut, axes = digit.cut, "*".join(digit.axes)
    match cut:
        case Sizes(sizes):
            return f"{axes}[{' '.join(map(str, sizes))}]"
        case BalancedChunks():
            return f"{axes}~"
        case UserCut(by, _):
            return f"{axes}@{named[by]}"
        case Chunks(parts):
            return axes or str(parts)
    raise AssertionError(digit)
