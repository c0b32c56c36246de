"""Loading: which bytes of a checkpoint are a rank's.

1. Every rank finds out by itself: its boxes, of any layout, against the boxes that are stored. No rank plans for
   others, and nothing is sent.
2. Numbers of 8 and 4 bits are bytes, and may be wanted as uint8 where they are stored as what they are, and the other
   way round: formats compute with uint8, and files differ. The bytes are taken as they are, never converted.
3. `LoadPlanner` is what torch.distributed.checkpoint calls a planner; it works with torch's own storage readers, too,
   for tensors.
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
    """Whether elements of one type are taken for those of the other as they are: equal types, or few bits and uint8.

    >>> has_same_bytes("uint8", "float8_e8m0fnu"), has_same_bytes("float8_e5m2", "float8_e4m3fn")
    (True, False)
    """
    if dtype == other:
        return True
    few = other if dtype == "uint8" else dtype
    return "uint8" in (dtype, other) and few.startswith(("float8", "float4"))


def local_layouts(side: Mapping[str, Windows], rank: int) -> Iterator[tuple[str, str, Layout]]:
    """(name, local buffer key, layout) of all that the rank holds."""
    for name, windows in side.items():
        for key, layout in windows.locals(name, rank):
            yield name, key, layout


class LoadPlanner(theirs.LoadPlanner):
    """Which stored boxes this rank reads for tensors under these layouts. For torch.distributed.checkpoint.load.

    The state dict holds this rank's local tensors, by local buffer key; they are filled in place. `names` says under
    which name a tensor is stored, where that differs. Raises CheckpointError where the checkpoint has a tensor with
    another shape or type, or lacks it.
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
        """Zeros for all that this rank loads, by local buffer key."""
        held = local_layouts(self._windows, self._rank)
        return {key: make_room(layout, self._rank) for _, key, layout in held}

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Takes the local tensors, and what is stored."""
        assert metadata is not None, "a checkpoint has metadata"
        self._tensors = state_dict
        self._metadata = metadata.state_dict_metadata

    def create_local_plan(self) -> LoadPlan:
        """The stored boxes that have anything of this rank's, and what of them."""
        items: list[ReadItem] = []
        tables: dict[str, _Table] = {}
        for name, key, layout in local_layouts(self._windows, self._rank):
            stored_name = self._names.get(name, name)
            stored = self._find_stored(stored_name)
            _check_alike(name, layout, stored)
            # one for all windows of a tensor, and all tensors that are loaded from it
            if stored_name not in tables:
                tables[stored_name] = _make_table(stored_name, stored)
            items += _list_reads(key, layout, self._rank, tables[stored_name])
        return LoadPlan(items)

    def _find_stored(self, name: str) -> TensorStorageMetadata:
        """What the metadata say of a tensor. Raises CheckpointError where it is not there."""
        found = self._metadata.get(name)
        if not isinstance(found, TensorStorageMetadata):
            count = len(self._metadata)
            raise CheckpointError(f"the checkpoint has no tensor {name!r} among its {count} names")
        return found

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """The same: ranks need not know of each other."""
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """The same."""
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Never asked for."""
        name = read_item.dest_index.fqn
        raise CheckpointError(f"{name!r} is not a tensor; load it with the layout None")

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """The cells that an item goes to."""
        local = self._tensors[read_item.dest_index.fqn].detach()
        stored = self._find_stored(read_item.storage_index.fqn)
        # As what is stored: whoever copies into the cells would convert.
        if local.dtype != stored.properties.dtype:
            local = local.view(stored.properties.dtype)
        box = zip(read_item.dest_offsets, read_item.lengths, strict=True)
        cells = tuple(slice(at, at + n) for at, n in box)
        return local[cells]

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Nothing is left to do: it is the cells themselves."""


def _check_alike(name: str, layout: Layout, stored: TensorStorageMetadata) -> None:
    """Raises CheckpointError for a layout that is not of what is stored, or has addends."""
    shape = tuple(stored.size)
    dtype = str(stored.properties.dtype).removeprefix("torch.")
    if layout.shape != shape or not has_same_bytes(layout.dtype, dtype):
        here = f"{dtype}{shown(list(shape))}"
        what = f"tensor {name!r} is stored as {here}, its layout says {layout}"
        raise CheckpointError(f"{what}; make the layout from `open_checkpoint(path).shapes`")
    if layout.partial:
        what = f"tensor {name!r} is Partial in {layout}, a checkpoint holds whole values"
        raise CheckpointError(f"{what}; load it divided or replicated, and move it then")


class _Table(NamedTuple):
    """The stored boxes of a tensor that have elements: a row for each, where it begins and where it ends."""

    name: str
    starts: NDArray[np.int64]
    stops: NDArray[np.int64]


def _make_table(name: str, stored: TensorStorageMetadata) -> _Table:
    """A tensor may be in thousands of boxes: each box of a rank is held against all of them at once."""
    rows = []
    for chunk in stored.chunks:
        if 0 not in chunk.sizes:
            rows.append((chunk.offsets, chunk.sizes))
    ndim = len(stored.size)
    table = np.array(rows, np.int64).reshape(len(rows), 2, ndim)
    return _Table(name, table[:, 0], table.sum(axis=1))


def _list_reads(key: str, layout: Layout, rank: int, table: _Table) -> Iterator[ReadItem]:
    """What of the stored boxes the rank holds under the layout."""
    for local, held in list_boxes(layout, rank):
        for origin, into, within, lengths in _meet(local, held, table):
            yield ReadItem(
                LoadItemType.TENSOR,
                dest_index=MetadataIndex(key, into),
                dest_offsets=torch.Size(into),
                storage_index=MetadataIndex(table.name, origin),
                storage_offsets=torch.Size(within),
                lengths=torch.Size(lengths),
            )


def _meet(local: Slices, held: Slices, table: _Table) -> Iterator[tuple[list[int], ...]]:
    """What the stored boxes have of a box that is held, which lies in the local tensor at `local`.

    Of each: where the stored box begins, where the part begins in the local tensor and in the stored box, its sizes.
    """
    start = np.array([cut.start for cut in held], np.int64)
    stop = np.array([cut.stop for cut in held], np.int64)
    local_start = np.array([cut.start for cut in local], np.int64)
    first = np.maximum(table.starts, start)
    last = np.minimum(table.stops, stop)
    meets = (first < last).all(axis=1)
    origins = table.starts[meets]
    first = first[meets]
    last = last[meets]
    into = first - start + local_start
    columns = origins, into, first - origins, last - first
    return zip(*(column.tolist() for column in columns), strict=True)
