"""Loading: which bytes of a checkpoint a rank needs.

1. Every rank plans for itself, by intersecting its boxes, under any layout, with the stored boxes. Nothing is sent.
2. FP8 and FP4 numbers may be loaded as uint8, and uint8 as FP8 or FP4: formats compute with uint8, and files differ.
   The bytes are copied, never converted.
3. `LoadPlanner` is a planner of torch.distributed.checkpoint; it works with torch's own storage readers, too, for
   tensors.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.checkpoint import planner as theirs
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from shardmath.layouts.holdings import LayoutOrWindows, Windows, read_windows
from shardmath.layouts.layout import Layout
from shardmath_torch.checkpoints.files.json_text import shown
from shardmath_torch.checkpoints.files.places import CheckpointError
from shardmath_torch.checkpoints.safetensors.slices import Slices, list_boxes, make_room
from shardmath_torch.checkpoints.saving import check_apart
from shardmath_torch.groups import compat

__all__ = ["LoadPlanner", "has_same_bytes", "local_layouts"]


def has_same_bytes(dtype: str, other: str) -> bool:
    """Whether one dtype can be loaded as the other without conversion: equal dtypes, or uint8 and one of FP8 or FP4.

    >>> has_same_bytes("uint8", "float8_e8m0fnu"), has_same_bytes("float8_e5m2", "float8_e4m3fn")
    (True, False)
    """
    if dtype == other:
        return True
    narrow = other if dtype == "uint8" else dtype
    return "uint8" in (dtype, other) and narrow.startswith(("float8", "float4"))


def local_layouts(side: Mapping[str, Windows], rank: int) -> Iterator[tuple[str, str, Layout]]:
    """Yield (tensor name, local tensor's name, layout) for each layout in `side` whose mesh has `rank`. `side` maps
    tensor names to tuples of layouts; for each layout of a tensor, a rank has a separate local tensor."""
    for name, windows in side.items():
        for key, layout in windows.locals(name, rank):
            yield name, key, layout


class LoadPlanner(theirs.LoadPlanner):
    """A load planner for torch.distributed.checkpoint: it reads only what this rank holds under `layouts`.

    The state dict holds this rank's local tensors, by local buffer key; they are filled in place. `names` gives the
    stored name of a tensor, if it differs. Raises CheckpointError if the checkpoint lacks a tensor, or has it with
    another shape or dtype.
    """

    def __init__(
        self,
        layouts: Mapping[str, LayoutOrWindows],
        *,
        names: Mapping[str, str] | None = None,
        rank: int | None = None,
    ) -> None:
        self._windows = read_windows(layouts, CheckpointError)
        keys = {name: windows.local_names(name) for name, windows in self._windows.items()}
        check_apart(keys, "load one under another name, with names={wanted: stored}")
        self._names = names or {}
        self._rank = compat.rank_or_0() if rank is None else rank
        self._tensors: dict[str, Tensor] = {}
        self._metadata: Mapping[str, object] = {}

    def make_room(self) -> dict[str, Tensor]:
        """Allocate this rank's local tensors, to be filled by reading, and return them by local name."""
        held = local_layouts(self._windows, self._rank)
        return {key: make_room(layout, self._rank) for _, key, layout in held}

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Keep `state_dict`, this rank's local tensors to fill, and the checkpoint's `metadata` for the next steps."""
        assert metadata is not None, "a checkpoint has metadata"
        self._tensors = state_dict
        self._metadata = metadata.state_dict_metadata

    def create_local_plan(self) -> LoadPlan:
        """Return a plan of the reads that fill this rank's local tensors. Each read copies the overlap of a stored box
        (a slice per dimension of the global tensor) with a box that this rank holds."""
        items: list[ReadItem] = []
        tables: dict[str, _BoxTable] = {}
        for name, key, layout in local_layouts(self._windows, self._rank):
            stored_name = self._names.get(name, name)
            stored = self._find_stored(stored_name)
            _check_alike(name, layout, stored)
            # one table serves all windows of a tensor, and all tensors that are loaded from it
            if stored_name not in tables:
                tables[stored_name] = _make_box_table(stored_name, stored)
            items += _list_reads(key, layout, self._rank, tables[stored_name])
        return LoadPlan(items)

    def _find_stored(self, name: str) -> TensorStorageMetadata:
        """The metadata of a stored tensor. Raises CheckpointError if it is not there."""
        found = self._metadata.get(name)
        if not isinstance(found, TensorStorageMetadata):
            has = shown(list(self._metadata)[:4])
            what = f"the checkpoint has no tensor {name!r} among its {len(self._metadata)} names"
            raise CheckpointError(f"{what}, such as {has}; give one with names={{wanted: stored}}")
        return found

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans of all ranks, unchanged, as no rank's reads depend on another rank."""
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """Return this rank's plan, `central_plan`, unchanged."""
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Raise CheckpointError: this planner loads tensors only, not pickled objects."""
        name = read_item.dest_index.fqn
        what = f"{name!r} is stored as a pickled object, but this planner loads only tensors"
        fix = "load its bytes with shardmath_torch.load and the layout None"
        raise CheckpointError(f"{what}; {fix}")

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """Return the slice of this rank's local tensor into which the content of `read_item` is read, as a view in the
        stored dtype."""
        local = self._tensors[read_item.dest_index.fqn].detach()
        stored = self._find_stored(read_item.storage_index.fqn)
        # in the stored dtype, or copying into the cells would convert
        if local.dtype != stored.properties.dtype:
            local = local.view(stored.properties.dtype)
        box = zip(read_item.dest_offsets, read_item.lengths, strict=True)
        cells = tuple(slice(start, start + length) for start, length in box)
        return local[cells]

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Do nothing, as `tensor` is a view of the local tensor, which reading has filled."""


def _check_alike(name: str, layout: Layout, stored: TensorStorageMetadata) -> None:
    """Raise CheckpointError for a layout of another shape or dtype than is stored, or with Partial."""
    shape = tuple(stored.size)
    dtype = str(stored.properties.dtype).removeprefix("torch.")
    if layout.shape != shape or not has_same_bytes(layout.dtype, dtype):
        what = (
            f"tensor {name!r} is stored as {dtype}{shown(list(shape))}, but its layout is {layout}"
        )
        fix = "give the layout the shape and dtype in `open_checkpoint(path).shapes`"
        raise CheckpointError(f"{what}; {fix}")
    if layout.addend_axes:
        what = f"tensor {name!r} is Partial in {layout}, but a checkpoint holds whole values"
        raise CheckpointError(f"{what}; load it under a layout without Partial, and then move it")


class _BoxTable(NamedTuple):
    """The stored boxes of a tensor as arrays: a row per box, with its starts and stops by dimension. Without empty
    boxes."""

    name: str
    starts: NDArray[np.int64]
    stops: NDArray[np.int64]


def _make_box_table(name: str, stored: TensorStorageMetadata) -> _BoxTable:
    """A table of the stored boxes: a tensor may have thousands, and numpy intersects a rank's box with all at once."""
    rows = []
    for chunk in stored.chunks:
        if 0 not in chunk.sizes:
            rows.append((chunk.offsets, chunk.sizes))
    ndim = len(stored.size)
    table = np.array(rows, np.int64).reshape(len(rows), 2, ndim)
    # The starts are the offsets, and the stops are offsets + sizes.
    return _BoxTable(name, table[:, 0], table.sum(axis=1))


def _list_reads(key: str, layout: Layout, rank: int, table: _BoxTable) -> Iterator[ReadItem]:
    """A read for each intersection of a stored box with a box that the rank holds under the layout."""
    for local, held in list_boxes(layout, rank):
        for origin, into, within, lengths in _intersect(local, held, table):
            yield ReadItem(
                LoadItemType.TENSOR,
                dest_index=MetadataIndex(key, into),
                dest_offsets=torch.Size(into),
                storage_index=MetadataIndex(table.name, origin),
                storage_offsets=torch.Size(within),
                lengths=torch.Size(lengths),
            )


def _intersect(local: Slices, held: Slices, table: _BoxTable) -> Iterator[tuple[list[int], ...]]:
    """The intersections of the stored boxes with the box `held`, which lies at `local` in the local tensor.

    Of each: offsets of the stored box in the tensor, of the intersection in the local tensor and in the stored box, and
    the intersection's sizes.
    """
    start = np.array([cut.start for cut in held], np.int64)
    stop = np.array([cut.stop for cut in held], np.int64)
    local_start = np.array([cut.start for cut in local], np.int64)
    low = np.maximum(table.starts, start)
    high = np.minimum(table.stops, stop)
    meets = (low < high).all(axis=1)
    origins = table.starts[meets]
    low = low[meets]
    high = high[meets]
    local_offsets = low - start + local_start
    columns = origins, local_offsets, low - origins, high - low
    return zip(*(column.tolist() for column in columns), strict=True)
