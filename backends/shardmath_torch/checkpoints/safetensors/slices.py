"""Slices: a rank's local tensors, read from safetensors files, and compared with them.

1. A rank reads only the boxes of its runs; holes in local tensors are zero.
2. Layouts are compared with the headers before a byte is read (`fits`).
3. A file is opened once, however many of its tensors are read.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Protocol, TypeAlias

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from shardmath import Layout
from shardmath.base.text import plural
from shardmath_torch.checkpoints.safetensors.headers import WeightsError, damaged
from shardmath_torch.checkpoints.safetensors.weights import Weights
from shardmath_torch.groups.dtypes import dtype_of, view_bytes
from shardmath_torch.moves.observing.bars import Progress, Tally

__all__ = [
    "Slices",
    "assemble",
    "check",
    "fits",
    "list_boxes",
    "load",
    "make_room",
    "make_zeros",
]

Slices: TypeAlias = tuple[slice, ...]


def list_boxes(layout: Layout, rank: int) -> Iterator[tuple[Slices, Slices]]:
    """Yield each box of elements that `rank` holds, as slices of its local tensor and of the global tensor."""
    # Of each dimension, (local start, global start, length) of positions that follow each other on both sides.
    by_dim = [runs.segments for runs in layout.runs(rank)]
    # One at a time: `layout.boxes` makes all boxes at once, and a strided layout may have millions.
    for segments in itertools.product(*by_dim):
        local = tuple(slice(start, start + n) for start, _, n in segments)
        glob = tuple(slice(start, start + n) for _, start, n in segments)
        yield local, glob


class _StoredSlices(Protocol):
    """A tensor in an open file; indexing reads the slice."""

    def __getitem__(self, index: Slices) -> torch.Tensor: ...


def _open_tensors(
    weights: Weights, layouts: Mapping[str, Layout]
) -> Iterator[tuple[str, Layout, _StoredSlices]]:
    """Every name with its layout and its stored tensor, to be sliced; each file is opened once."""
    fits(weights, layouts)
    names = sorted(layouts, key=lambda name: str(weights.entries[name].file))
    for file, group in itertools.groupby(names, key=lambda name: weights.entries[name].file):
        try:
            with safe_open(file, framework="pt") as stored:
                for name in group:
                    key = weights.entries[name].key
                    yield name, layouts[name], stored.get_slice(key)
        except (SafetensorError, OSError) as error:
            raise damaged(file, str(error)) from error


def fits(weights: Weights, layouts: Mapping[str, Layout]) -> None:
    """Raise WeightsError unless each tensor in `layouts` is in `weights` with the same shape and dtype, and its layout
    is not Partial."""
    for name, layout in layouts.items():
        _check_fit(weights, name, layout)


def _check_fit(weights: Weights, name: str, layout: Layout) -> None:
    """Raise WeightsError unless the checkpoint has the tensor, and it fits the layout."""
    entry = weights.entries.get(name)
    if entry is None:
        count = plural(weights.entries, "tensor")
        what = f"{weights.path} has no {name!r} among its {count}"
        raise WeightsError(f"{what}; leave it out, or tie it to one of them with tied()")
    if (layout.shape, layout.dtype) != (entry.shape, entry.dtype):
        found = f"{entry.dtype}{list(entry.shape)}"
        what = f"{name!r} is {found} in {entry.file}, but its layout is {layout}"
        raise WeightsError(f"{what}; give the layout the shape and dtype in `weights.shapes`")
    if layout.addend_axes:
        what = f"{name!r} is Partial in {layout}, but a file holds whole values"
        raise WeightsError(f"{what}; give a layout without Partial")


def load(
    weights: Weights, layouts: Mapping[str, Layout], rank: int, *, progress: Progress | None = None
) -> dict[str, torch.Tensor]:
    """Read the local tensors that `rank` has by `layouts` from the safetensors checkpoint `weights`, and return them by
    name, on the CPU. `progress` is called with the bytes done so far and the total.

    They have the shape `layout.local_shape(rank)`; positions without an element are zero.

    Raises WeightsError if the checkpoint lacks a name or has it with another shape or dtype. The bytes given to
    `progress` are bytes of local tensors.
    """
    out = {}
    tally = _begin_tally(layouts, rank, progress)
    for name, layout, stored in _open_tensors(weights, layouts):
        out[name] = make_room(layout, rank)
        for local, glob in list_boxes(layout, rank):
            out[name][local] = stored[glob]
        tally.add(out[name].nbytes)
    # Tensors were read file by file.
    return {name: out[name] for name in layouts}


def _begin_tally(layouts: Mapping[str, Layout], rank: int, progress: Progress | None) -> Tally:
    """Begin a tally of the bytes of all local tensors, including positions without an element."""
    tally = Tally(progress)
    total = 0
    for layout in layouts.values():
        total += math.prod(layout.local_shape(rank)) * layout.itemsize
    tally.begin(total)
    return tally


def make_room(layout: Layout, rank: int) -> torch.Tensor:
    """Allocate a local tensor of `rank`, for elements to be copied into it. If some positions are holes (without an
    element of the global tensor), the whole local tensor is zero; otherwise it is uninitialized."""
    if layout.holes(rank):
        return make_zeros(layout, rank)
    return torch.empty(layout.local_shape(rank), dtype=dtype_of(layout.dtype), device="cpu")


def make_zeros(layout: Layout, rank: int) -> torch.Tensor:
    """Return a new local tensor of `rank` whose bytes are all zero."""
    shape = layout.local_shape(rank)
    # As bytes, since float8_e8m0fnu has no number 0.
    cells = torch.zeros(math.prod(shape) * layout.itemsize, dtype=torch.uint8, device="cpu")
    return cells.view(dtype_of(layout.dtype)).view(shape)


def check(
    weights: Weights,
    layouts: Mapping[str, Layout],
    rank: int,
    tensors: Mapping[str, torch.Tensor],
    *,
    progress: Progress | None = None,
) -> int:
    """Compare each local tensor of `rank` in `tensors` with the part of the checkpoint `weights` that the tensor's
    layout gives to `rank`, and return the number of bytes compared. Raises WeightsError at the first difference.

    The error has the tensor, the rank and the global index. Positions without an element are not compared. Raises
    WeightsError, too, if the checkpoint lacks a name, has it with another shape or dtype, or is damaged.

    `progress` is called with the bytes done so far and the total; these are bytes of local tensors.
    """
    total = 0
    tally = _begin_tally(layouts, rank, progress)
    for name, layout, stored in _open_tensors(weights, layouts):
        for local, glob in list_boxes(layout, rank):
            total += _compare(name, rank, glob, tensors[name][local], stored[glob])
        tally.add(tensors[name].nbytes)
    return total


def _compare(
    name: str, rank: int, glob: Slices, arrived: torch.Tensor, stored: torch.Tensor
) -> int:
    """Compare one box, and return its number of bytes. Raises WeightsError if they differ."""
    ours = view_bytes(arrived)
    theirs = view_bytes(stored)
    if torch.equal(ours, theirs):
        return ours.numel()
    first = int((ours != theirs).nonzero()[0]) // stored.itemsize
    local_index = np.unravel_index(first, stored.shape)
    index = [part.start + int(i) for part, i in zip(glob, local_index, strict=True)]
    actual = arrived.reshape(-1)[first].item()
    expected = stored.reshape(-1)[first].item()
    what = f"{name!r} differs from the file on rank {rank} at {index}"
    raise WeightsError(f"{what}: {actual} arrived, the file has {expected}; report this as a bug")


def assemble(layout: Layout, shards: Mapping[int, torch.Tensor]) -> torch.Tensor:
    """Return the global tensor with this `layout`, put together from `shards`, a mapping from rank to local tensor.
    Elements that no rank holds are uninitialized."""
    whole = torch.empty(layout.shape, dtype=dtype_of(layout.dtype), device="cpu")
    for rank in layout.mesh.ranks:
        for local, glob in list_boxes(layout, rank):
            whole[glob] = shards[rank][local]
    return whole
