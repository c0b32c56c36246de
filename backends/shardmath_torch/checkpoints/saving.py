"""Saving: which rank writes which boxes.

1. To save is to move: the checkpoint is one more rank that needs every tensor whole, and who sends it what is a plan of
   `shardmath.plan`. So every element is written once, replicas share the work evenly, windows and uneven shards are
   nothing special, and what no rank holds is an error before a byte is written.
2. Replicas are taken to be equal, bit by bit: any of them may be written, or parts of several.
3. Bytes of a rank's own are stored once for all ranks that have the same.
4. `SavePlanner` is what torch.distributed.checkpoint calls a planner; it works with torch's own storage writers, too.
"""

from __future__ import annotations

import io
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.distributed.checkpoint import planner as theirs
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from shardmath.algebra.mesh import Mesh
from shardmath.base.digest import digest
from shardmath.base.given import mapping
from shardmath.layouts.layout import Layout
from shardmath.plans.plan import Plan, plan
from shardmath_torch import compat
from shardmath_torch.checkpoints.stored import BLOBS
from shardmath_torch.dtypes import dtype_of
from shardmath_torch.exchange.local import by_key, fits, wanted
from shardmath_torch.exchange.memory import missing_memory, plain
from shardmath_torch.files.places import CheckpointError
from shardmath_torch.safetensors.archive import unused

__all__ = ["Bytes", "Layouts", "Paths", "SavePlanner", "as_tensor", "check_paths", "to_disk"]

Bytes: TypeAlias = Tensor | bytes | bytearray | io.BytesIO
"""What a rank saves as its own: bytes, or a tensor of uint8."""
Layouts: TypeAlias = Mapping[str, Layout | tuple[Layout, ...] | None]
"""What everybody holds of each tensor; None for bytes that each rank has of its own."""
Paths: TypeAlias = Mapping[str, tuple[str, ...]]
"""Where torch's own tools put tensors in a nested state dict: the keys that lead to each, by name."""


class SavePlanner(theirs.SavePlanner):
    """Which boxes this rank writes of tensors under these layouts. For torch.distributed.checkpoint.save.

    The state dict holds this rank's local tensors, by local buffer key, and its bytes, by name. Raises CheckpointError
    for a Partial tensor, ExchangeError for local tensors that do not fit, PlanError for what nobody holds.
    """

    def __init__(
        self, layouts: Layouts, *, rank: int | None = None, paths: Paths | None = None
    ) -> None:
        self._layouts = {name: one for name, one in layouts.items() if one is not None}
        self._names = frozenset(layouts)
        self._paths = paths or {}
        self._rank = compat.rank_or_0() if rank is None else rank
        self._given: Mapping[str, Any] = {}
        self._blobs: dict[str, Tensor] = {}
        self._sources: dict[MetadataIndex, Tensor] = {}

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Takes the local tensors."""
        self._given = state_dict

    def create_local_plan(self) -> SavePlan:
        """The boxes that this rank writes, and what it tells the others: what it saves, and which bytes it has."""
        moved = to_disk(self._layouts)
        own = self._names - set(self._layouts)
        self._blobs = {
            name: as_tensor(name, data) for name, data in self._given.items() if name in own
        }
        want = wanted(moved, self._rank)[0]
        tensors = by_key(want, {name: t for name, t in self._given.items() if name not in own})
        fits(want, tensors)
        contents = {
            name: (sha256(t.numpy().tobytes()).hexdigest(), len(t))
            for name, t in self._blobs.items()
        }
        said = _Said(
            self._rank, digest((moved.digest, sorted(own), sorted(self._paths.items()))), contents
        )
        return SavePlan(list(self._boxes(moved, tensors)), planner_data=said)

    def _boxes(self, moved: Plan, tensors: Mapping[str, Tensor]) -> Iterator[WriteItem]:
        for t in moved.transfers(src=self._rank):
            box = [s.start for s in t.global_slices], t.shape
            yield self._item(
                t.tensor,
                moved.src[t.tensor][0].shape,
                *box,
                tensors[t.src_tensor].detach()[t.src_slices],
            )
        for name, windows in moved.src.items():
            if 0 in windows[0].shape and self._rank == min(
                r for w in windows for r in w.mesh.ranks
            ):
                empty = torch.empty(windows[0].shape, dtype=dtype_of(windows[0].dtype))
                yield self._item(name, empty.shape, [0] * empty.ndim, empty.shape, empty)

    def _item(
        self,
        name: str,
        shape: Sequence[int],
        offsets: Sequence[int],
        sizes: Sequence[int],
        data: Tensor,
    ) -> WriteItem:
        item = _box(name, shape, offsets, sizes, data.dtype)
        self._sources[item.index] = data
        return item

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Everybody's boxes, equal bytes once, and the metadata. Raises CheckpointError where ranks disagree."""
        said: list[_Said] = [one.planner_data for one in all_plans]
        _check_agreed(said)
        stored = _stored_names(said, self._names)
        plans = [_with_bytes(*each, stored) for each in zip(all_plans, said, strict=True)]
        tensors: dict[str, TensorStorageMetadata] = {}
        for item in (item for one in plans for item in one.items):
            data = item.tensor_data
            assert data is not None, "all items are boxes"
            found = tensors.setdefault(
                item.index.fqn, TensorStorageMetadata(data.properties, data.size, [])
            )
            found.chunks.append(data.chunk)
        # torch's own readers look here for the path of every name, and fail for a name without one
        paths = {name: self._paths.get(name, (name,)) for name in tensors}
        return plans, Metadata(dict(sorted(tensors.items())), planner_data={**paths, BLOBS: stored})

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """The items to write; from now on it is known under which names bytes are stored."""
        for index, name in new_plan.planner_data.items():
            self._sources[index] = self._blobs[name]
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """An item's data: a view of a local tensor."""
        return self._sources[write_item.index]


def to_disk(layouts: Mapping[str, Layout | tuple[Layout, ...]]) -> Plan:
    """The plan that takes every tensor whole to one more rank, the disk."""
    windows = {name: one if isinstance(one, tuple) else (one,) for name, one in layouts.items()}
    for name, layout in ((name, layout) for name, each in windows.items() for layout in each):
        if layout.partial:
            what = f"tensor {name!r} is Partial in {layout}, a checkpoint holds whole values"
            raise CheckpointError(f"{what}; move it to a layout without Partial first")
    disk = Mesh(
        ranks=[
            1
            + max(
                (max(layout.mesh.ranks) for each in windows.values() for layout in each), default=0
            )
        ]
    )
    whole = {
        name: Layout(each[0].shape, disk, (), dtype=each[0].dtype) for name, each in windows.items()
    }
    return plan(layouts, whole)


def as_tensor(name: str, data: object) -> Tensor:
    """Bytes of a rank's own as a tensor of uint8. Raises CheckpointError for what is none."""
    if isinstance(data, Tensor) and data.dtype == torch.uint8 and data.ndim == 1:
        lacks = missing_memory(plain(data))
        if lacks:
            raise CheckpointError(f"{name!r} {lacks}; save it while its memory is there")
        return plain(data).detach().cpu().contiguous()
    if isinstance(data, io.BytesIO):
        data = data.getvalue()
    if isinstance(data, bytes | bytearray | memoryview):
        return (
            torch.frombuffer(bytearray(data), dtype=torch.uint8)
            if len(data)
            else torch.empty(0, dtype=torch.uint8)
        )
    what = f"{data.dtype}{list(data.shape)}" if isinstance(data, Tensor) else type(data).__name__
    raise CheckpointError(
        f"{name!r} is {what} and has no layout; give it one, or bytes, or a 1-d tensor of uint8"
    )


def check_paths(paths: Paths, names: Container[str]) -> None:
    """Raises CheckpointError for a path that is not its name, cut at dots, and for one that leads through another."""
    for name, path in mapping(
        paths, "paths is ", "names to tuples of keys", CheckpointError
    ).items():
        if name not in names:
            raise CheckpointError(
                f"paths has {name!r}, which is not saved; give paths of names that have a layout"
            )
        if not isinstance(path, tuple) or not path or not all(isinstance(key, str) for key in path):
            raise CheckpointError(
                f"the path of {name!r} is {path!r}; give a tuple of keys, such as {(name,)!r}"
            )
        if ".".join(path) != name:
            what = f"the path of {name!r} is {path!r}, which joined with dots is {'.'.join(path)!r}"
            raise CheckpointError(f"{what}; give the name, cut at some of its dots")
    ends = set(paths.values())
    for path in ends:
        through = next((path[:n] for n in range(1, len(path)) if path[:n] in ends), None)
        if through is not None:
            what = f"the path {path!r} leads through {through!r}, which is a tensor"
            raise CheckpointError(f"{what}; cut one of the two names at other dots")


class _Said(NamedTuple):
    """What a rank tells the others: what it saves, and of its own bytes the content and length by name."""

    rank: int
    digest: str
    contents: Mapping[str, tuple[str, int]]


def _check_agreed(said: Sequence[_Said]) -> None:
    first = said[0]
    other = next((one for one in said if one.digest != first.digest), None)
    if other is not None:
        what = f"ranks {first.rank} and {other.rank} save different tensors or layouts"
        digests = f"{first.digest[:12]} and {other.digest[:12]}"
        raise CheckpointError(f"{what}, {digests}; pass everybody's layouts, the same on all ranks")


def _stored_names(said: Iterable[_Said], names: Iterable[str]) -> dict[str, dict[int, str]]:
    """The stored name of every rank's bytes, by name and rank: ranks that have the same share one; none of `names`."""
    first: dict[tuple[str, str], str] = {}
    out: dict[str, dict[int, str]] = {}
    taken = set(names)
    for one in sorted(said, key=lambda one: one.rank):
        for name, (content, _) in one.contents.items():
            if (name, content) not in first:
                first[name, content] = unused(f"{name}@{one.rank}", taken) if name in out else name
                taken.add(first[name, content])
            out.setdefault(name, {})[one.rank] = first[name, content]
    return out


def _with_bytes(plan: SavePlan, said: _Said, stored: Mapping[str, Mapping[int, str]]) -> SavePlan:
    """The plan of a rank with those of its bytes that it is the first to have; which is which as its planner data."""
    items, names = list(plan.items), {}
    for name, (_, length) in said.contents.items():
        key = stored[name][said.rank]
        if said.rank == min(rank for rank, other in stored[name].items() if other == key):
            items.append(_box(key, (length,), (0,), (length,), torch.uint8))
            names[items[-1].index] = name
    return replace(plan, items=items, planner_data=names)


def _box(
    name: str,
    shape: Sequence[int],
    offsets: Sequence[int],
    sizes: Sequence[int],
    dtype: torch.dtype,
) -> WriteItem:
    chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
    data = TensorWriteData(chunk, TensorProperties(dtype), torch.Size(shape))
    return WriteItem(MetadataIndex(name, offsets), WriteItemType.SHARD, tensor_data=data)
