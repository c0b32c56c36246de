"""Annotated: a plain tensor whose types, by Meta's package spmd_types, say which part of a larger tensor it is.

1. `spmd_types.assert_type` gives a tensor a type for each mesh axis: R or I, the same on all ranks of the axis; V,
   different; P, an addend. A PartitionSpec says which axes divide each dimension, the slowest first.
2. An axis divides a dimension into equal parts. The axes of the types together count all ranks, from rank 0.
3. The package is not imported here: while nothing has imported it, no tensor is annotated.

>>> is_annotated(Tensor(2))
False
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import torch.distributed as dist
from torch import Tensor

from shardmath_torch.groups import compat

__all__ = ["annotate_alike", "is_annotated", "read_annotation", "show_annotation"]

Box: TypeAlias = tuple[tuple[int, int, int], ...]
"""A box: per dimension, the first local and the first global position, and the size."""


def is_annotated(tensor: Tensor) -> bool:
    """Whether the types that spmd_types has given `tensor` say that ranks hold different parts of it, or addends."""
    spmd: Any = sys.modules.get("spmd_types")
    if spmd is None:
        return False
    return any(kind in (spmd.V, spmd.P) for kind in spmd.get_local_type(tensor).values())


def annotate_alike(source: Tensor, tensor: Tensor) -> None:
    """Give `tensor`, a detached copy of the annotated tensor `source`, the same types."""
    spmd: Any = sys.modules["spmd_types"]
    types = dict(spmd.get_local_type(source))
    spmd.assert_type(tensor, types, partition_spec=spmd.get_partition_spec(source))


def show_annotation(tensor: Tensor) -> str:
    """Return the shape and the types of an annotated `tensor` as text for an error."""
    spmd: Any = sys.modules["spmd_types"]
    types = spmd.get_local_type(tensor)
    return f"{list(tensor.shape)} with the types {types} and {spmd.get_partition_spec(tensor)}"


def read_annotation(tensor: Tensor) -> tuple[tuple[int, ...], Box]:
    """Return the shape of the whole tensor, and the box of it that this rank's annotated `tensor` is.

    Raises ValueError if the types do not say it: for addends, for a V without a dimension, and if axes are missing.
    """
    spmd: Any = sys.modules["spmd_types"]
    types = spmd.get_local_type(tensor)
    axes_by_dim = _list_axes(tensor, spmd)
    _check_divided(types, axes_by_dim, spmd)
    _check_cover(types)
    rank = compat.rank_or_0()
    shape, box = [], []
    for size, axes in zip(tensor.shape, axes_by_dim, strict=True):
        part, parts = 0, 1
        for axis in axes:
            part = part * axis.size() + _find_coordinate(axis, rank)
            parts *= axis.size()
        shape.append(size * parts)
        box.append((0, size * part, size))
    return tuple(shape), tuple(box)


def _list_axes(tensor: Tensor, spmd: Any) -> list[tuple[Any, ...]]:
    """The axes that divide each dimension, the slowest first."""
    spec = spmd.normalize_partition_spec(spmd.get_partition_spec(tensor) or spmd.PartitionSpec())
    entries = [*spec, *[None] * (tensor.ndim - len(spec))]
    return [each if isinstance(each, tuple) else (each,) if each else () for each in entries]


def _check_divided(
    types: Mapping[Any, Any], axes_by_dim: Iterable[tuple[Any, ...]], spmd: Any
) -> None:
    """Raise ValueError for an axis with addends, and for one with different tensors that divides no dimension."""
    divided = {axis for axes in axes_by_dim for axis in axes}
    for axis, kind in types.items():
        if kind is spmd.P:
            raise ValueError(f"its type on {axis} is P, an addend; reduce it first")
        if kind is spmd.V and axis not in divided:
            raise ValueError(f"its type on {axis} is V, without a dimension; assert S(dim) instead")


def _check_cover(axes: Iterable[Any]) -> None:
    """Raise ValueError unless the axes together count the ranks of the default group, each once."""
    steps = sorted((step, n) for axis in axes for n, step in axis.layout.sizes_and_strides)
    count = 1
    for step, n in steps:
        if step != count:
            break
        count *= n
    world = dist.get_world_size() if dist.is_initialized() else 1
    if count != world:
        listed = ", ".join(map(str, axes))
        fix = "assert a type for every axis of the mesh, R where the tensor is the same"
        raise ValueError(f"its axes {listed} do not count all {world} ranks; {fix}")


def _find_coordinate(axis: Any, rank: int) -> int:
    """The rank's place on the axis, in the order of its ranks."""
    first = sum(rank // step % n * step for n, step in axis.layout.sizes_and_strides)
    ranks: list[int] = sorted(axis.layout.all_ranks_from_zero())
    return ranks.index(first)
