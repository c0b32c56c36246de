"""Hugging Face names: the layer and the expert in a tensor's name.

1. Layers are numbered, `model.layers.3.`, and so are the experts of a layer, `mlp.experts.17.`.
2. Experts are **numbered**, `mlp.experts.17.up_proj.weight` (I, H), or **grouped**,
   `mlp.experts.up_proj.weight` (E, I, H): then dimension 0 is the expert. Shared experts are neither.
3. A stack is a buffer (E, ...) of experts; a numbered expert is a **cell** of it, a tensor (1, ...).

>>> numbers("model.layers.3.mlp.experts.17.up_proj.weight"), numbers("model.layers.3.norm.weight")
((3, 17), (3, None))
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeAlias

from shardmath.base.errors import LayoutError, ShardError
from shardmath.base.memo import memo
from shardmath.layouts.algebra.mesh import Mesh
from shardmath.layouts.layout import Layout

__all__ = [
    "Entry",
    "TensorPlace",
    "Shapes",
    "cell",
    "expert_counts",
    "grouped",
    "layouts",
    "numbers",
]

Entry: TypeAlias = tuple[tuple[int, ...], str]
Shapes: TypeAlias = Mapping[str, Entry]
"""The type of `shapes` arguments: a mapping from the name of each tensor of a model to (global shape, dtype)."""

LAYER = re.compile(r"(?:^|\.)(?:layers?|h|blocks?)\.(\d+)\.")
EXPERT = re.compile(r"(^|\.)experts\.(\d+)\.")


@memo(1 << 17)
def numbers(name: str) -> tuple[int | None, int | None]:
    """Return the layer number and the expert number in the tensor name `name`, each None if it is not there."""
    layer = LAYER.search(name)
    expert = EXPERT.search(name) if "experts." in name else None
    layer_number = int(layer[1]) if layer else None
    expert_number = int(expert[2]) if expert else None
    return layer_number, expert_number


def cell(expert: int, experts: int) -> str:
    """Return the layout text of the expert dimension, of size `experts`, on a rank that holds only number `expert`. For
    expert 2 of 8 it is <-2 0:1 -5>: the rank lacks 2 experts, holds the next one, and lacks 5.

    >>> cell(0, 1), cell(2, 8)
    ('<0:1>', '<-2 0:1 -5>')
    """
    words = ["0:1"]
    after = experts - 1 - expert
    if expert:
        words.insert(0, f"-{expert}")
    if after > 0:
        words.append(f"-{after}")
    return f"<{' '.join(words)}>"


def expert_counts(shapes: Shapes) -> Counter[int | None]:
    """Count the experts in each layer of `shapes`, by layer number (None without one): one more than the largest expert
    number there."""
    counts: Counter[int | None] = Counter()
    for name in shapes:
        layer, expert = numbers(name)
        if expert is not None:
            counts[layer] = max(counts[layer], expert + 1)
    return counts


_Member: TypeAlias = tuple[int | None, Entry]
"""(expert's number, None for a tensor without one; shape and dtype)."""


def grouped(shapes: Shapes) -> dict[str, Entry]:
    """Return `shapes` with the numbered experts of each layer stacked: one entry of shape (E, ...) per projection. Its
    name is an expert's name without the number: layers.0.experts.7.up becomes layers.0.experts.up.

    Other entries are unchanged; a stack has the first expert's position.
    Raises LayoutError if the experts of a group differ, or are not numbered 0 to E - 1.
    """
    members: dict[str, list[_Member]] = {}
    for name, entry in shapes.items():
        group = EXPERT.sub(r"\1experts.", name)
        _, expert = numbers(name)
        members.setdefault(group, []).append((expert, entry))
    return {group: _group(group, listed) for group, listed in members.items()}


def _group(group: str, members: list[_Member]) -> Entry:
    """The shape and dtype of a group of experts; a tensor without a number is a group by itself, and unchanged."""
    (expert, (shape, dtype)), *_ = members
    if expert is None:
        return shape, dtype
    count = len(members)
    kinds = sorted({entry for _, entry in members})
    numbered = {number for number, _ in members}
    if len(kinds) > 1 or numbered != set(range(count)):
        shown = " and ".join(f"{dtype}{list(shape)}" for shape, dtype in kinds)
        lowest, highest = min(members)[0], max(members)[0]
        raise LayoutError(
            f"{count} experts numbered {lowest} to {highest} of {group!r}, each {shown}; "
            f"give experts of one shape and dtype, numbered from 0 without gaps"
        )
    return (count, *shape), dtype


class TensorPlace(NamedTuple):
    """A tensor's Layout without the dtype: its mesh, its layout text, and its shape."""

    mesh: Mesh
    text: str
    shape: tuple[int, ...]


def layouts(
    shapes: Shapes, place: Callable[[str, tuple[int, ...]], TensorPlace]
) -> dict[str, Layout]:
    """Return the Layout of every tensor in `shapes`, by name, from the TensorPlace that `place(name, shape)` returns.

    Raises LayoutError, naming the tensor, for a place that does not fit.
    """
    made: dict[tuple[TensorPlace, str], Layout] = {}
    by_name: dict[str, Layout] = {}
    for name, (shape, dtype) in shapes.items():
        placed = place(name, shape)
        layout = made.get((placed, dtype))
        if layout is None:
            layout = made[placed, dtype] = _make_layout(name, placed, dtype)
        by_name[name] = layout
    return by_name


def _make_layout(name: str, place: TensorPlace, dtype: str) -> Layout:
    """The layout at this place. Raises LayoutError, naming the tensor."""
    try:
        return Layout(place.shape, place.mesh, place.text, dtype=dtype)
    except ShardError as error:
        raise LayoutError(f"tensor {name!r} of shape {place.shape}: {error}") from error
