"""Checkpointable: torch's CheckpointableTensor, a plain tensor with attributes for its part of a larger tensor.

1. From torch 2.14 on, `torch.distributed.checkpoint` treats a tensor with four attributes as boxes of a larger tensor:
   `global_shape`, and of each box `global_offsets`, `local_offsets` and `local_sizes`. Code that assumes such a tensor
   to be the same on all ranks loses the other ranks' parts.
2. A rank's boxes are a product of Runs, one per dimension; cells in no box are padding. The Runs of all ranks define a
   layout, so ranks have to exchange them.
3. The attributes belong to one Python object: `detach` and `clone` lose them.

>>> rows = torch.zeros(2, 4)
>>> rows.global_shape, rows.global_offsets = (9, 4), ((7, 0),)
>>> rows.local_offsets, rows.local_sizes = ((0, 0),), ((2, 4),)
>>> read_boxes("w", rows)
LocalRuns(shape=(9, 4), runs=(Runs(((0, 7, 2),), 2), Runs(((0, 0, 4),), 4)))
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardmath.base.arguments import instance
from shardmath.base.errors import LayoutError, ShardError
from shardmath.base.text import show_ranks, shown
from shardmath.layouts.algebra.runs import Runs, identity
from shardmath.layouts.fitting import from_holdings
from shardmath.layouts.layout import Layout
from shardmath_torch.groups import compat
from shardmath_torch.groups.agreement.gather import gather
from shardmath_torch.groups.agreement.naming import attempt
from shardmath_torch.tensors.parts.annotated import (
    Box,
    annotate_alike,
    is_annotated,
    read_annotation,
    show_annotation,
)

__all__ = [
    "LocalRuns",
    "checkpointable",
    "from_boxes",
    "is_checkpointable",
    "is_part",
    "is_same_part",
    "keep_boxes",
    "read_boxes",
    "show_attributes",
]

_Numbers: TypeAlias = tuple[int, ...]

ATTRIBUTES = ("global_shape", "global_offsets", "local_offsets", "local_sizes")


class LocalRuns(NamedTuple):
    """A rank's part of a tensor: the global shape, and per dimension the ranges of indices that the rank holds."""

    shape: _Numbers
    runs: tuple[Runs, ...]


Ask: TypeAlias = Callable[[Mapping[str, Tensor]], Mapping[str, Mapping[int, Any]]]
"""A function that gives every rank's LocalRuns of tensors, by name and rank."""


def is_checkpointable(tensor: object) -> bool:
    """Whether `tensor` is a tensor with the attributes `global_shape`, `global_offsets`, `local_offsets` and
    `local_sizes`, or with types of spmd_types, which tell its part of a global tensor. False for a DTensor.
    """
    if not isinstance(tensor, Tensor) or isinstance(tensor, DTensor):
        return False
    return _has_boxes(tensor) or is_annotated(tensor)


def _has_boxes(tensor: Tensor) -> bool:
    return all(hasattr(tensor, name) for name in ATTRIBUTES)


def keep_boxes(source: Tensor, tensor: Tensor) -> None:
    """Copy to `tensor`, a detached copy of `source`, the attributes or types that tell which part of a global tensor
    `source` holds, such as `global_offsets`. Does nothing if `source` lacks them.
    """
    if _has_boxes(source):
        for name in ATTRIBUTES:
            setattr(tensor, name, getattr(source, name))
    elif is_annotated(source):
        annotate_alike(source, tensor)


def read_boxes(name: str, tensor: Tensor) -> LocalRuns:
    """Return the part of the global tensor that the local `tensor` holds, read from its attributes `global_shape`,
    `global_offsets`, `local_offsets` and `local_sizes`. Errors call the tensor `name`.

    Raises LayoutError if they are invalid.
    """
    try:
        shape, boxes = _list_boxes(tensor)
        runs = _make_runs(shape, tensor.shape, boxes)
    except (ShardError, TypeError, ValueError) as error:
        raise LayoutError(f"tensor {name!r}: {show_attributes(tensor)}: {error}") from error
    n_held = sum(math.prod(n for _, _, n in box) for box in boxes)
    n_product = math.prod(part.size for part in runs)
    if n_held != n_product:
        fix = "set boxes that are all combinations of some ranges of each dimension"
        what = f"the boxes have {n_held} elements, but all combinations of their ranges have {n_product}"
        raise LayoutError(f"tensor {name!r}: {show_attributes(tensor)}: {what}; {fix}")
    return LocalRuns(shape, runs)


def is_part(tensor: Tensor) -> bool:
    """Whether the attributes of `tensor` say that it is a part of a global tensor, padded or reordered, or are invalid.
    False without attributes, or if they say that it is whole.
    """
    if not is_checkpointable(tensor):
        return False
    try:
        said = read_boxes("a tensor", tensor)
    except LayoutError:
        return True
    whole = LocalRuns(tuple(tensor.shape), tuple(map(identity, tensor.shape)))
    # Without elements there are no boxes, however many rows there are.
    is_empty = said.shape == whole.shape and not tensor.numel()
    return said != whole and not is_empty


def is_same_part(tensor: Tensor, other: Tensor) -> bool:
    """Whether `tensor`, of the shape of `other`, has no attributes, or is by the attributes of both the same part of a
    global tensor. Without attributes `other` is whole.
    """
    if not is_checkpointable(tensor):
        return True
    if not is_checkpointable(other):
        return not is_part(tensor)
    try:
        return read_boxes("a tensor", tensor) == read_boxes("another", other)
    except LayoutError:
        return False


def _list_boxes(tensor: Any) -> tuple[_Numbers, list[Box]]:
    """The global shape, and the boxes that have elements. Raises ValueError for lists of different lengths."""
    if not _has_boxes(tensor):
        shape, box = read_annotation(tensor)
        return shape, [box] if tensor.numel() else []
    shape = tuple(map(operator.index, tensor.global_shape))
    sides = zip(tensor.local_offsets, tensor.global_offsets, tensor.local_sizes, strict=True)
    boxes = []
    for local_offsets, global_offsets, sizes in sides:
        if not len(local_offsets) == len(global_offsets) == len(sizes) == len(shape) == tensor.ndim:
            offsets = f"local {tuple(local_offsets)}, global {tuple(global_offsets)}, sizes {tuple(sizes)}"
            ndims = (
                f"but global_shape has {len(shape)} dimensions and the local tensor {tensor.ndim}"
            )
            raise ValueError(f"a box has {offsets}, {ndims}; set one number per dimension in each")
        box = tuple(zip(local_offsets, global_offsets, sizes, strict=True))
        if all(n for _, _, n in box):
            boxes.append(box)
    return shape, boxes


def _make_runs(shape: _Numbers, local_shape: _Numbers, boxes: Sequence[Box]) -> tuple[Runs, ...]:
    """Per dimension, the Runs of the boxes in it. Raises RunsError for boxes that overlap or are outside."""
    if not boxes and not shape:
        lists = "global_offsets, local_offsets and local_sizes"
        raise ValueError(
            f"global_shape is (), but there is no box, so no rank would hold the scalar; "
            f"set {lists} to one () each: ((),)"
        )
    runs_by_dimension = []
    for d, (n, size) in enumerate(zip(shape, local_shape, strict=True)):
        segments = {box[d] for box in boxes}
        if not boxes and d and n == size:
            # An empty first dimension already makes the part empty; the others may be whole.
            segments = {(0, 0, n)}
        runs = Runs(segments, size)
        if runs.extent > n:
            raise ValueError(
                f"the boxes end at {runs.extent} in dimension {d}, whose length is {n}; set "
                f"global_offsets and local_sizes inside it"
            )
        runs_by_dimension.append(runs)
    return tuple(runs_by_dimension)


def show_attributes(tensor: Any) -> str:
    """Return the shape of `tensor`, and its attributes or types, as text for an error."""
    if not _has_boxes(tensor):
        return show_annotation(tensor)
    attributes = [f"{name}={shown(getattr(tensor, name))}" for name in ATTRIBUTES]
    return f"{list(tensor.shape)} with {', '.join(attributes)}"


# Boxes -> Layout


def from_boxes(tensors: Mapping[str, Tensor], ask: Ask | None = None) -> dict[str, Layout]:
    """Return the layouts, by name, of the tensors with attributes that say which slices of the global tensor this rank
    holds (`global_shape`, `global_offsets`, `local_offsets`, `local_sizes`). If `ask` is given, ranks do not
    communicate: `ask(tensors)` returns the slices that all ranks hold, as a dict by tensor name, then rank.

    Collective over the default group, unless `ask` gives what all ranks have. Either every rank has
    the attributes of a tensor, or none. Raises LayoutError, on all ranks, if a rank has invalid
    attributes, or lacks the attributes of a tensor, if global shapes differ between ranks, and if the
    parts together are not one layout.
    """
    parts = {name: tensor for name, tensor in tensors.items() if is_checkpointable(tensor)}
    if not parts:
        return {}
    gather_boxes = ask or _gather_boxes
    boxes = gather_boxes(parts)
    return {name: _find_layout(name, tensor, boxes[name]) for name, tensor in parts.items()}


def _gather_boxes(tensors: Mapping[str, Tensor]) -> dict[str, dict[int, LocalRuns]]:
    """The LocalRuns of all ranks of the default group, by name and rank."""
    # A rank with invalid attributes reports that to the others, which wait for it.
    own_boxes, why = attempt(partial(_read_all, tensors))
    answers = [(own_boxes or {}, why)]
    if dist.is_initialized():
        answers = gather(answers[0], None, "find out how checkpointable tensors lie")
    faults = [f"rank {rank}: {why}" for rank, (_, why) in enumerate(answers) if why]
    if faults:
        raise LayoutError("; ".join(faults))
    by_rank = [boxes for boxes, _ in answers]
    return {name: _pick(name, by_rank) for name in tensors}


def _read_all(tensors: Mapping[str, Tensor]) -> dict[str, LocalRuns]:
    return {name: read_boxes(name, tensor) for name, tensor in tensors.items()}


def _pick(name: str, by_rank: Sequence[Mapping[str, LocalRuns]]) -> dict[int, LocalRuns]:
    """The boxes of one tensor by rank. Raises LayoutError if a rank has none."""
    without = [rank for rank, boxes in enumerate(by_rank) if name not in boxes]
    if without:
        what = f"tensor {name!r} describes its part on this rank, and not on {show_ranks(without)}"
        raise LayoutError(f"{what}; set {', '.join(ATTRIBUTES)} on all ranks")
    return {rank: boxes[name] for rank, boxes in enumerate(by_rank)}


def _find_layout(name: str, tensor: Tensor, boxes: Mapping[int, LocalRuns]) -> Layout:
    """The layout under which every rank has its boxes."""
    shapes = {each.shape: rank for rank, each in boxes.items()}
    if len(shapes) > 1:
        listed = ", ".join(f"{shape} on rank {rank}" for shape, rank in shapes.items())
        same = "set the same global_shape on all ranks"
        fix = same if _has_boxes(tensor) else "divide it into equal parts"
        raise LayoutError(f"tensor {name!r}: global_shape is {listed}; {fix}")
    (shape,) = shapes
    runs = {rank: each.runs for rank, each in boxes.items()}
    layout = from_holdings(shape, runs, dtype=str(tensor.dtype).removeprefix("torch."))
    if not isinstance(layout, Layout):
        what = (
            f"tensor {name!r} of shape {shape}: no single layout describes the boxes of all ranks, "
            f"which need {len(layout)}"
        )
        raise LayoutError(f"{what}; save it by smt.save, with the layouts of sm.from_holdings")
    return layout


# Layout -> boxes


def checkpointable(local: Tensor, layout: Layout) -> Tensor:
    """Mark `local` as this rank's part of a tensor with the layout `layout`, for save and load of
    torch.distributed.checkpoint, and return it.

    Sets the attributes of torch's CheckpointableTensor, which `save_state`, `layout_of` and `export` read too. The
    tensor has the layout's local shape on this rank. Raises LayoutError for another shape, for a Partial layout, and
    with torch before 2.14, which would save the tensor as if it were whole.
    """
    _check_sayable(layout)
    rank = compat.rank_or_0()
    boxes: list[Box] = []
    if rank in layout.mesh:
        expected = layout.local_shape(rank)
        if tuple(local.shape) != expected:
            what = f"rank {rank} passes a tensor of shape {tuple(local.shape)}, but its part of {layout}"
            raise LayoutError(f"{what} has {expected}; pass this rank's local tensor")
        boxes += itertools.product(*(runs.segments for runs in layout.runs(rank)))
    # Any, since Tensor does not declare these attributes.
    marked: Any = local
    marked.global_shape = layout.shape
    # The fields of a segment, in the order of Box.
    marked.local_offsets, marked.global_offsets, marked.local_sizes = (
        tuple(tuple(segment[field] for segment in box) for box in boxes) for field in range(3)
    )
    return local


def _check_sayable(layout: Layout) -> None:
    """Raise LayoutError for a layout that the attributes cannot express, or if this torch ignores them."""
    instance(layout, Layout, "pass a shardmath.Layout", LayoutError)
    if layout.addend_axes:
        raise LayoutError(
            f"{layout} holds partial sums, but a checkpoint needs whole values; reduce the tensor "
            f"first, such as by smt.redistribute to a layout without Partial"
        )
    if not hasattr(dcp, "CheckpointableTensor"):
        what = f"torch {torch.__version__} has no CheckpointableTensor"
        raise LayoutError(f"{what}; install torch 2.14 or later, or save by smt.save instead")
