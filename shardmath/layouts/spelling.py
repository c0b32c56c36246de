"""Spelling: the three ways to write how a tensor is divided, read as dimensions and Partial axes.

1. Text is `notation`; the other two give placements, each on one mesh axis or several flattened ones.
2. A tuple has one placement per mesh axis, applied left to right, as DTensor's.
3. A mapping goes from axis, or tuple of axes, to placement, and is applied in its order.
4. The reading `"placement"` applies the splits as written. The reading `"order"` decodes the order of
   splits that the strides of StridedShard stand for, as FSDP2 stores them.

>>> from shardmath.layouts.placement import Shard
>>> mesh = Mesh(dp=4, tp=2)
>>> text = from_text("(tp dp n) h", (9, 4), mesh, None, None)
>>> text == from_placements({"tp": Shard(0), "dp": Shard(0)}, (9, 4), mesh, "placement", {})
True
"""

from __future__ import annotations

import itertools
import math
import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, SupportsIndex, TypeAlias, cast

from shardmath.base.arguments import as_integer, mapping, text
from shardmath.base.errors import LayoutError, NotationError, PlacementError
from shardmath.base.memo import memo
from shardmath.base.text import count_ranks, plural, shown
from shardmath.layouts.algebra.cuts import Chunks, OverlapError
from shardmath.layouts.algebra.dimension import Dimension, divided
from shardmath.layouts.algebra.mesh import Mesh
from shardmath.layouts.algebra.runs import Runs
from shardmath.layouts.algebra.stages import Digit, Stage
from shardmath.layouts.notation import Partials, pad, parse
from shardmath.layouts.placement import (
    Partial,
    Placement,
    Replicate,
    Shard,
    Spec,
    StridedShard,
    check_protocol,
    stage_of,
)
from shardmath.layouts.reader import Rules
from shardmath.layouts.unparse import free_name

__all__ = ["AxisSpec", "Reading", "Stored", "from_placements", "from_text"]

Reading: TypeAlias = Literal["placement", "order"]
AxisSpec: TypeAlias = (
    str
    | Sequence[Spec]
    | Mapping[str, Spec]
    | Mapping[tuple[str, ...], Spec]
    | Mapping[str | tuple[str, ...], Spec]
)
"""The three spellings: text, one placement per mesh axis, or axis -> placement."""

Stored: TypeAlias = Mapping[int, int | Runs]
"""By dimension: a padded length, or the Runs from stored to logical positions."""

_Read: TypeAlias = tuple[tuple[Dimension, ...], Partials]
"""The dimensions and the Partial axes."""
_Axis: TypeAlias = tuple[str, int]
_Axes: TypeAlias = tuple[str, ...]
_Pairs: TypeAlias = list[tuple[_Axes, Spec]]
"""(axes, placement), in the order in which they are applied."""


def from_text(
    spec: str,
    shape: tuple[int, ...],
    mesh: Mesh,
    stored: Stored | None,
    rules: Rules | None,
) -> _Read:
    """Parse the layout text `spec` and return the tensor's dimensions and its Partial axes. `rules` maps each name
    written as @name to a placement; `stored` (padded lengths) must be empty or None, because the text itself describes
    padding.

    Raises LayoutError, PlacementError or NotationError. It is a LayoutError if `stored` (padded lengths) has entries:
    such padding belongs in the text, as in (n)=8.
    """
    if stored is not None and len(_check_stored(stored)):
        raise LayoutError(
            f"stored={shown(stored)} cannot be combined with a text, {spec!r}; "
            f"leave it out and write (n)=8 or (n)=<0:4 -4> in the text"
        )
    _check_notation(spec, mesh)
    named = {} if rules is None else mapping(rules, "rules=", "name to placement", LayoutError)
    # Only results without placements are cached.
    if not named:
        return _parse(text(spec, "spec", LayoutError), shape, mesh.axes)
    for placement in named.values():
        check_protocol(placement)
    return parse(spec, shape, mesh.shape, named)


PLACEMENTS = re.compile(r"\b_?(?:Shard|StridedShard|Replicate|Partial)\s*\(\s*(?:[-\d)'\"]|dim\b)")
"""Placements as they print, and as people write them into a text by mistake."""


def _check_notation(spec: str, mesh: Mesh) -> None:
    """Raise NotationError if the text is placements: text gives dimensions, one after the other."""
    match = PLACEMENTS.search(spec)
    if match is None:
        return
    axis = next(iter(mesh.shape), "tp")
    fix = f"write ({axis} n) h for Shard(0) on {axis}, n h for Replicate(), n h {{sum: {axis}}} for Partial()"
    what = "expected dimensions, found a placement"
    raise NotationError(what, spec, match.start(), f"{fix}, or pass the placements instead of text")


@memo()
def _parse(spec: str, shape: tuple[int, ...], axes: tuple[_Axis, ...]) -> _Read:
    """`parse` of text that names no placements, with its results cached."""
    return parse(spec, shape, dict(axes), {})


def from_placements(
    spec: AxisSpec, shape: tuple[int, ...], mesh: Mesh, reading: Reading, stored: Stored
) -> _Read:
    """Return how the placements `spec` divide each dimension of a tensor, and the Partial axes; `stored` maps each
    padded dimension to its padded length or its stored positions. With the `reading` "placement", mesh axes divide a
    dimension in the order of `spec`; with "order", in the order that StridedShard's split factors give.

    `stored` maps a dimension to its padded length, or to Runs that give each stored position's index in the tensor.

    Raises LayoutError or PlacementError.
    """
    pairs = _pair(spec, mesh)
    _check_once(pairs)
    by_dim, ops = _group_by_dimension(pairs, shape)
    stored_runs = _read_stored(stored, shape)
    decode = _decode_order if reading == "order" else _apply
    dims = []
    for d, dim_pairs in enumerate(by_dim):
        stages = decode(dim_pairs, mesh)
        try:
            dim = _make_dimension(d, shape, stages, stored_runs[d])
        except OverlapError as error:
            what = error.word(_word_parts(error, dim_pairs, mesh))
            raise PlacementError(f"dimension {d} of shape {shape}: {what}") from None
        dims.append(dim)
    partial = tuple((name, ops[name]) for name in mesh.shape if name in ops)
    return tuple(dims), partial


def _group_by_dimension(
    pairs: _Pairs, shape: tuple[int, ...]
) -> tuple[list[_Pairs], dict[str, str]]:
    """The pairs that divide each dimension, and by axis the operation that Partial waits for."""
    by_dim: list[_Pairs] = [[] for _ in shape]
    ops: dict[str, str] = {}
    for axes, placement in pairs:
        if isinstance(placement, Partial):
            ops.update(dict.fromkeys(axes, placement.op))
        elif not isinstance(placement, Replicate):
            d = _dimension_of(placement, shape)
            by_dim[d].append((axes, placement))
    return by_dim, ops


def _make_dimension(
    d: int, shape: tuple[int, ...], stages: list[Stage], stored: Runs | None
) -> Dimension:
    """Dimension d divided by these stages. Raises PlacementError, naming the dimension."""
    size = shape[d] if stored is None else len(stored)
    try:
        return Dimension(shape[d], (divided(size, stages),), stored)
    except OverlapError:
        raise  # the caller names the ranks
    except PlacementError as error:
        raise PlacementError(f"dimension {d} of shape {shape}: {error}") from None


def _word_parts(error: OverlapError, pairs: _Pairs, mesh: Mesh) -> str:
    """The parts that overlap, in words, each with the ranks that hold it."""
    axes = next(axes for axes, placement in pairs if placement == error.by)
    groups = mesh.groups(axes)
    texts = []
    for part in error.parts:
        ranks = [group[part] for group in groups]
        texts.append(f"part {part} of {count_ranks(ranks)}")
    return " and ".join(texts)


def _pair(spec: AxisSpec, mesh: Mesh) -> _Pairs:
    """Each placement with its axes. Raises LayoutError for axes that the mesh does not have."""
    if isinstance(spec, Mapping):
        pairs = [(_key_axes(key), placement) for key, placement in spec.items()]
    else:
        pairs = _pair_in_order(cast(Sequence[Spec], spec), mesh)
    sizes = mesh.shape
    for axes, placement in pairs:
        for name in axes:
            if name not in sizes:
                axes_text = " ".join(f"{axis}={n}" for axis, n in mesh.axes)
                fix = f"use one of its axes, {', '.join(sizes)}" if sizes else "give it one"
                raise LayoutError(
                    f"{placement} on axis {name!r}: mesh {axes_text} has no such axis; {fix}"
                )
    return pairs


def _pair_in_order(spec: Sequence[Spec], mesh: Mesh) -> _Pairs:
    """The placements with the mesh axes, one each. Raises LayoutError for too few or too many."""
    if any(map(_is_axes, spec)):
        raise LayoutError(_explain_axes(spec))
    names = tuple(mesh.shape)
    if len(spec) != len(names):
        count = plural(spec, "placement")
        axes = plural(names, "mesh axis", "mesh axes")
        listed = ", ".join(names) or "none"
        raise LayoutError(
            f"{count} {tuple(spec)} for {axes} ({listed}); "
            f"give one placement per axis, or a mapping from axis to placement"
        )
    return [((name,), placement) for name, placement in zip(names, spec, strict=True)]


def _key_axes(key: object) -> tuple[str, ...]:
    """The mesh axes that a key of a mapping names."""
    axes = (key,) if isinstance(key, str) else key
    if not _is_axes(axes):
        raise LayoutError(
            f"{shown(key)} is not a mesh axis; give axis names, or tuples of axis names, as keys"
        )
    names = cast(Iterable[object], axes)
    return tuple(text(name, "a mesh axis", LayoutError) for name in names)


def _is_axes(entry: object) -> bool:
    """Whether the entry is the name of an axis, or a tuple of names."""
    if isinstance(entry, str):
        return True
    if not isinstance(entry, tuple) or not entry:
        return False
    return all(isinstance(name, str) for name in cast(Iterable[object], entry))


def _explain_axes(spec: Sequence[object]) -> str:
    """The error for mesh axes listed by dimension, as in JAX's PartitionSpec, with the text to write instead."""
    words = []
    for d, entry in enumerate(spec):
        axes = (entry,) if isinstance(entry, str) else entry
        if isinstance(axes, tuple) and axes:
            words.append(f"({' '.join(map(str, axes))} {free_name(d)})")
        else:
            words.append(free_name(d))
    return (
        f"spec {shown(tuple(spec))} names mesh axes by dimension, as JAX's PartitionSpec; "
        f"a tuple has one placement per mesh axis: write the text {' '.join(words)!r}"
    )


def _check_once(pairs: _Pairs) -> None:
    """Raise LayoutError if an axis is named twice."""
    placement_on: dict[str, Spec] = {}
    for axes, placement in pairs:
        for name in axes:
            if name in placement_on:
                raise LayoutError(
                    f"mesh axis {name!r} is used twice, by {placement_on[name]} and {placement}; "
                    f"give each axis one placement"
                )
            placement_on[name] = placement


def _dimension_of(placement: Placement, shape: tuple[int, ...]) -> int:
    """The dimension that the placement divides, counted from the front."""
    dim = getattr(placement, "dim", None)
    if isinstance(dim, bool) or not isinstance(dim, SupportsIndex):
        raise PlacementError(
            f"{placement!r} is not a placement; use one such as shardmath.Shard(0), "
            f"or an object with `dim` and `split(n, parts) -> tuple of Runs`"
        )
    d = as_integer(dim, f"the dimension of {shown(placement)}", PlacementError)
    ndim = len(shape)
    if not -ndim <= d < ndim:
        fix = f"use a dimension from {-ndim} to {ndim - 1}" if ndim else "use Replicate()"
        count = plural(shape, "dimension")
        raise LayoutError(
            f"{placement} divides dimension {d}, but shape {shape} has {count}; {fix}"
        )
    return d % ndim


def _check_stored(stored: object) -> Mapping[object, object]:
    return mapping(stored, "stored=", "dimension to a length or Runs", LayoutError)


def _read_stored(stored: Stored, shape: tuple[int, ...]) -> list[Runs | None]:
    """For each dimension the Runs from stored to logical positions; None if all positions are stored."""
    ndim = len(shape)
    stored_runs: list[Runs | None] = [None] * ndim
    for key, value in _check_stored(stored).items():
        d = as_integer(key, "a dimension of stored=", LayoutError)
        if not -ndim <= d < ndim:
            raise LayoutError(
                f"stored= names dimension {d}, but shape {shape} has {plural(shape, 'dimension')}; "
                f"use a dimension from {-ndim} to {ndim - 1}"
            )
        if stored_runs[d] is not None:
            raise LayoutError(
                f"stored= names dimension {d % ndim} of shape {shape} twice; name it once"
            )
        if isinstance(value, Runs):
            stored_runs[d] = value
        else:
            size = as_integer(value, f"the stored size of dimension {d}", LayoutError)
            stored_runs[d] = pad(shape[d], size)
    return stored_runs


def _sizes(axes: _Axes, mesh: Mesh) -> tuple[int, ...]:
    return tuple(map(mesh.axis_size, axes))


def _apply(pairs: _Pairs, mesh: Mesh) -> list[Stage]:
    """The reading "placement": a stage per placement."""
    stages = []
    for axes, placement in pairs:
        stages.append(stage_of(cast(Placement, placement), axes, _sizes(axes, mesh)))
    return stages


def _decode_order(pairs: _Pairs, mesh: Mesh) -> list[Stage]:
    """The reading "order": all Shard and StridedShard of a dimension as one stage, in the order of splits.

    Right to left, each is inserted where the product of the sizes of the mesh axes before it is its split factor
    (torch 2.13 `_StridedShard` decoding). Raises PlacementError if there is no such position.
    """
    # Without a StridedShard, both readings are the same. A subclass may split otherwise, so its type counts.
    if not any(type(placement) is StridedShard for _, placement in pairs):
        return _apply(pairs, mesh)
    order: list[_Axes] = []
    for axes, placement in reversed(pairs):
        if type(placement) is StridedShard:
            factor = placement.split_factor
        elif type(placement) is Shard:
            factor = 1
        else:
            raise PlacementError(
                f"reading='order' is for Shard and StridedShard, but {placement} divides the same "
                f"dimension; use reading='placement'"
            )
        order.insert(_find_position(order, factor, placement, mesh), axes)
    digits = []
    for axes in order:
        sizes = _sizes(axes, mesh)
        # As many chunks as the axes, flattened, have ranks.
        digits.append(Digit(Chunks(math.prod(sizes)), axes, sizes))
    return [tuple(digits)]


def _find_position(order: list[_Axes], factor: int, placement: Spec, mesh: Mesh) -> int:
    """The number of axes of the order that stand before a split into `factor` pieces."""
    parts = [math.prod(_sizes(axes, mesh)) for axes in order]
    product = 1
    # 1 stands for no axis: a split may also come after all axes.
    for position, n in enumerate([*parts, 1]):
        if product == factor:
            return position
        product *= n
    sizes = [f"{'*'.join(axes)}={n}" for axes, n in zip(order, parts, strict=True)]
    named = f"the placements after it split its dimension over {' '.join(sizes)}"
    possible = sorted({1, *itertools.accumulate(parts, operator.mul)})
    raise PlacementError(
        f"reading='order': no order of splits gives {placement}: "
        f"{named if sizes else 'no placement after it splits its dimension'}, "
        f"so its split_factor can only be {' or '.join(map(str, possible))}; "
        f"use reading='placement', which applies the splits as written"
    )
