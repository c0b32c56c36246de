"""Spellings: a layout as DTensor and as JAX write it, or why they cannot.

>>> from shardmath.layouts.algebra.mesh import Mesh
>>> layout = Layout((8, 4), Mesh(dp=2, tp=2), "(tp*dp n) h")
>>> print(*spell(layout), sep="\\n")
Spelling(system='DTensor', text='(_StridedShard(0, split_factor=2), Shard(0))', note='')
Spelling(system='JAX', text="P(('tp', 'dp'), None)", note='')
"""

from __future__ import annotations

from typing import NamedTuple

from shardmath.base.errors import PlacementError
from shardmath.layouts.layout import Layout
from shardmath.layouts.per_axis import count_candidates, find_axes, find_placements
from shardmath.layouts.placement import Partial, Shard, Spec, StridedShard

__all__ = ["Spelling", "spell"]

MOST_AXES = 4
"""Mesh axes of a dimension up to which spellings are looked for: their number grows with all orders of the axes."""

MOST_CANDIDATES = 1000
"""Placements that are tried of a dimension: each takes about a millisecond."""


class Spelling(NamedTuple):
    """A layout in the words of another system: its `text`, "" if it has none, and a `note`."""

    system: str
    text: str
    note: str


def spell(layout: Layout) -> tuple[Spelling, ...]:
    """Return the layout as DTensor's placements, and as JAX's PartitionSpec."""
    if max((len(dim.axes) for dim in layout.dims), default=0) > MOST_AXES:
        why = f"not looked for: a dimension has more than {MOST_AXES} mesh axes"
        return Spelling("DTensor", "", why), Spelling("JAX", "", why)
    if count_candidates(layout) > MOST_CANDIDATES:
        why = f"not looked for: more than {MOST_CANDIDATES:,} placements would have to be tried"
        return Spelling("DTensor", "", why), _spell_jax(layout)
    return _spell_dtensor(layout), _spell_jax(layout)


def _spell_dtensor(layout: Layout) -> Spelling:
    """One placement per mesh axis."""
    try:
        placements, readings = find_placements(layout)
    except PlacementError as error:
        # The layout stands above the note.
        return Spelling("DTensor", "", str(error).replace(f"of {layout}", "so"))
    texts = ", ".join(map(_write_placement, placements))
    text = f"({texts},)" if len(placements) == 1 else f"({texts})"
    note = ""
    if readings == {"order"}:
        note = "read in FSDP2's order of splits"
    elif readings == {"placement"}:
        note = "read from left to right"
    return Spelling("DTensor", text, note)


def _write_placement(placement: Spec) -> str:
    """The placement as torch writes it."""
    match placement:
        case StridedShard(dim, factor):
            return f"_StridedShard({dim}, split_factor={factor})"
        case Shard(dim):
            return f"Shard({dim})"
        case Partial(op):
            return "Partial()" if op == "sum" else f"Partial({op!r})"
    return "Replicate()"


def _spell_jax(layout: Layout) -> Spelling:
    """The mesh axes of each dimension."""
    try:
        entries = [_write_axes(axes) for axes in find_axes(layout)]
    except PlacementError as error:
        # The layout stands above the note.
        return Spelling("JAX", "", str(error).replace(f" of {layout}", ""))
    if layout.partial:
        summed = ", ".join(repr(axis) for axis, _ in layout.partial)
        entries.append(f"unreduced={{{summed}}}")
    return Spelling("JAX", f"P({', '.join(entries)})", "")


def _write_axes(axes: tuple[str, ...]) -> str:
    """The axes of a dimension, as in a PartitionSpec."""
    if not axes:
        return "None"
    return repr(axes[0]) if len(axes) == 1 else repr(axes)
