"""Saving: which rank writes which boxes.

1. To save is to move: the checkpoint is one more rank that needs all of every tensor, and `shardmath.plan` plans who
   sends it what. So every element is written once, replicas share the work evenly, windows and uneven shards need no
   special case, and an element that no rank holds raises before a byte is written.
2. Replicas are assumed equal, bit by bit: any of them may be written, or parts of several.
3. Per-rank bytes are stored once for all ranks that have the same.
4. `SavePlanner` is a planner of torch.distributed.checkpoint; it works with torch's own storage writers, too.
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

from shardmath.base.arguments import mapping
from shardmath.base.digest import digest
from shardmath.layouts.algebra.mesh import Mesh
from shardmath.layouts.holdings import LayoutOrWindows, Windows, read_windows
from shardmath.layouts.layout import Layout
from shardmath.plans.plan import Plan, plan
from shardmath_torch.checkpoints.files.places import CheckpointError
from shardmath_torch.checkpoints.opening import BLOBS
from shardmath_torch.checkpoints.safetensors.archive import find_unused
from shardmath_torch.groups import compat
from shardmath_torch.groups.dtypes import dtype_of
from shardmath_torch.moves.exchange.local import by_key, fits, wanted
from shardmath_torch.moves.exchange.memory import missing_memory, plain

__all__ = [
    "Bytes",
    "Layouts",
    "Paths",
    "SavePlanner",
    "as_tensor",
    "check_apart",
    "check_paths",
    "count_bytes",
    "to_disk",
]

Bytes: TypeAlias = Tensor | bytes | bytearray | io.BytesIO
"""What a rank saves under a layout of None: bytes, or a tensor of uint8."""
Layouts: TypeAlias = Mapping[str, LayoutOrWindows | None]
"""The layout of each tensor on all ranks; None for bytes that differ per rank."""
Paths: TypeAlias = Mapping[str, tuple[str | int, ...]]
"""The keys that lead to each tensor in the nested state dict of torch's own tools, by name; integers are for lists."""

_StoredNames: TypeAlias = dict[str, dict[int, str]]
"""The stored name of every rank's bytes, by name and rank."""


def check_apart(keys: Mapping[str, Iterable[str]], fix: str) -> None:
    """Raise CheckpointError if two tensors have a local tensor of the same name, such as "w[0]" for both a tensor "w"
    with several layouts and a tensor "w[0]". `keys` maps each tensor's name to its local tensors' names; `fix` is the
    error's advice."""
    first: dict[str, str] = {}
    for name, local_keys in keys.items():
        for key in local_keys:
            other = first.setdefault(key, name)
            if other != name:
                what = f"tensors {other!r} and {name!r} both have a local tensor {key!r}"
                why = "as one of them has several layouts"
                raise CheckpointError(f"{what}, {why}; {fix}, or in another call")


def _check_bytes_apart(side: Mapping[str, Windows], blobs: Iterable[str]) -> None:
    """Raise CheckpointError if a window has the name of some per-rank bytes."""
    keys = {name: held.local_names(name) for name, held in side.items() if not held.is_single}
    check_apart({**keys, **{name: [name] for name in blobs}}, "save one under another name")


class SavePlanner(theirs.SavePlanner):
    """A save planner for torch.distributed.checkpoint: of the ranks that hold an element under `layouts`, exactly one
    writes it.

    The state dict holds this rank's local tensors, by local buffer key, and its bytes, by name. Raises CheckpointError
    for a Partial tensor, ExchangeError for local tensors that do not fit, PlanError for elements that no rank holds.
    """

    def __init__(
        self, layouts: Layouts, *, rank: int | None = None, paths: Paths | None = None
    ) -> None:
        tensors = {name: layout for name, layout in layouts.items() if layout is not None}
        self._windows = read_windows(tensors, CheckpointError)
        # The others are bytes, stored per rank: none may have the name of a tensor's window.
        _check_bytes_apart(self._windows, [name for name in layouts if name not in tensors])
        self._names = frozenset(layouts)
        self._paths = paths or {}
        self._rank = compat.rank_or_0() if rank is None else rank
        self._state_dict: Mapping[str, Any] = {}
        self._blobs: dict[str, Tensor] = {}
        self._sources: dict[MetadataIndex, Tensor] = {}

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Keep `state_dict`, the values by name that this rank can write: a local tensor for each name with a layout,
        and bytes for each other name."""
        self._state_dict = state_dict

    def create_local_plan(self) -> SavePlan:
        """Return a plan of the boxes (parts of tensors) that this rank writes. Its `planner_data` is a report of this
        rank's tensors, layouts and bytes, which `create_global_plan` compares with other ranks' reports, to check that
        all agree."""
        disk_plan = to_disk(self._windows)
        blob_names = self._names - set(self._windows)
        tensors: dict[str, Tensor] = {}
        self._blobs = {}
        for name, data in self._state_dict.items():
            if name in blob_names:
                self._blobs[name] = as_tensor(name, data)
            else:
                tensors[name] = data
        source, _ = wanted(disk_plan, self._rank)
        local_tensors = by_key(source, tensors)
        fits(source, local_tensors)  # or it raises
        items = list(self._list_boxes(disk_plan, local_tensors))
        items += self._list_empty(disk_plan)
        return SavePlan(items, planner_data=self._make_report(disk_plan, blob_names))

    def _make_report(self, plan: Plan, blob_names: Iterable[str]) -> _RankReport:
        """This rank's report to the others. Contents of bytes differ per rank, so only their names must agree."""
        paths = sorted(self._paths.items())
        agreed = digest((plan.digest, sorted(blob_names), paths))
        contents = {name: _describe_bytes(data) for name, data in self._blobs.items()}
        return _RankReport(self._rank, agreed, contents)

    def _list_boxes(self, plan: Plan, tensors: Mapping[str, Tensor]) -> Iterator[WriteItem]:
        """torch's write item for each box of a tensor that this rank sends to the disk in `plan`."""
        for transfer in plan.transfers(src=self._rank):
            name = transfer.tensor
            window = plan.src[name][0]
            offsets = [cut.start for cut in transfer.global_slices]
            local = tensors[transfer.src_tensor].detach()
            data = local[transfer.src_slices]
            yield self._make_item(name, window.shape, offsets, data)

    def _list_empty(self, plan: Plan) -> Iterator[WriteItem]:
        """torch's items of tensors without elements, which no plan sends: the lowest of their ranks writes them."""
        for name, windows in plan.src.items():
            first = windows[0]
            if 0 not in first.shape:
                continue
            lowest = min(min(window.mesh.ranks) for window in windows)
            if lowest == self._rank:
                dtype = dtype_of(first.dtype)
                empty = torch.empty(first.shape, dtype=dtype, device="cpu")
                origin = [0] * empty.ndim
                yield self._make_item(name, first.shape, origin, empty)

    def _make_item(
        self, name: str, shape: Sequence[int], offsets: Sequence[int], data: Tensor
    ) -> WriteItem:
        """torch's write item for a box of tensor `name`; the planner keeps the box's `data` until they are written."""
        item = _describe_box(name, shape, offsets, data.shape, data.dtype)
        self._sources[item.index] = data
        return item

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Check that ranks agree on what to save; return all ranks' plans, and torch's metadata. If several ranks save
        equal bytes (values without a layout) under a name, only one rank's plan writes them. Raises CheckpointError if
        ranks disagree."""
        reports: list[_RankReport] = [rank_plan.planner_data for rank_plan in all_plans]
        _check_agreed(reports)
        stored = _name_bytes(reports, self._names)
        plans = []
        for rank_plan, report in zip(all_plans, reports, strict=True):
            plans.append(_add_bytes(rank_plan, report, stored))
        tensors = _describe_tensors(plans)
        # torch's own readers look here for the path of every name, and fail for a name without one
        paths = {name: self._paths.get(name, (name,)) for name in tensors}
        metadata = Metadata(dict(sorted(tensors.items())), planner_data={**paths, BLOBS: stored})
        return plans, metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Keep the values to be saved as plain bytes, rather than as tensors with a layout, that this rank writes under
        `new_plan`. `resolve_data` returns them later; the plan is returned unchanged."""
        # The names of the bytes by item, from `_add_bytes`.
        for index, name in new_plan.planner_data.items():
            self._sources[index] = self._blobs[name]
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """Return the tensor that is written for `write_item`: a view of a local tensor, or for a name without a layout,
        this rank's bytes under that name, as uint8."""
        return self._sources[write_item.index]


def to_disk(side: Mapping[str, Windows]) -> Plan:
    """Return a plan that sends every tensor, whole, to one more rank, which stands for the disk. `side` maps tensor
    names to their layouts; CheckpointError is raised if a tensor is Partial."""
    ranks = [0]
    for name, windows in side.items():
        for layout in windows:
            if layout.addend_axes:
                what = (
                    f"tensor {name!r} is Partial in {layout}, but a checkpoint holds whole values"
                )
                raise CheckpointError(f"{what}; move it to a layout without Partial first")
            ranks.append(max(layout.mesh.ranks))
    disk = Mesh(ranks=[1 + max(ranks)])
    stored: dict[str, Layout] = {}
    for name, windows in side.items():
        first = windows[0]
        stored[name] = Layout(first.shape, disk, (), dtype=first.dtype)
    return plan(side, stored)


def _describe_box(
    name: str,
    shape: Sequence[int],
    offsets: Sequence[int],
    sizes: Sequence[int],
    dtype: torch.dtype,
) -> WriteItem:
    """torch's write item for a box of a tensor `name` of that shape."""
    chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
    properties = TensorProperties(dtype)
    data = TensorWriteData(chunk, properties, torch.Size(shape))
    index = MetadataIndex(name, offsets)
    return WriteItem(index, WriteItemType.SHARD, tensor_data=data)


def count_bytes(items: Iterable[WriteItem]) -> int:
    """Return the total size in bytes of the boxes that `items` write."""
    boxes = [item.tensor_data for item in items if item.tensor_data is not None]
    return sum(box.chunk.sizes.numel() * box.properties.dtype.itemsize for box in boxes)


def _describe_tensors(plans: Iterable[SavePlan]) -> dict[str, TensorStorageMetadata]:
    """The metadata of the tensors that the plans write, by name."""
    tensors: dict[str, TensorStorageMetadata] = {}
    for rank_plan in plans:
        for item in rank_plan.items:
            name = item.index.fqn
            data = item.tensor_data
            assert data is not None, "all items are boxes"
            if name not in tensors:
                tensors[name] = TensorStorageMetadata(data.properties, data.size, [])
            tensors[name].chunks.append(data.chunk)
    return tensors


# Per-rank bytes


def as_tensor(name: str, data: object) -> Tensor:
    """Convert `data`, bytes that a rank saves, to a 1-d tensor of uint8. Raises CheckpointError, with `name`, if
    they are not bytes."""
    if isinstance(data, Tensor) and data.dtype == torch.uint8 and data.ndim == 1:
        tensor = plain(data)
        fault = missing_memory(tensor)
        if fault:
            raise CheckpointError(f"{name!r} {fault}; give a plain tensor with its own memory")
        return tensor.detach().cpu().contiguous()
    if isinstance(data, io.BytesIO):
        data = data.getvalue()
    if isinstance(data, bytes | bytearray | memoryview):
        # frombuffer refuses a buffer of no bytes
        if len(data) == 0:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        return torch.frombuffer(bytearray(data), dtype=torch.uint8)
    what = f"a {type(data).__name__}"
    if isinstance(data, Tensor):
        what = f"a tensor of {data.dtype}{list(data.shape)}"
    fix = "give it a layout, or give bytes, a BytesIO or a 1-d tensor of uint8"
    raise CheckpointError(f"{name!r} has the layout None, for bytes, but is {what}; {fix}")


class _Content(NamedTuple):
    """A digest of the bytes that a rank saves under a name, and their number."""

    digest: str
    length: int


class _RankReport(NamedTuple):
    """A rank's report to the others: a digest of what it saves, and the contents of its bytes by name."""

    rank: int
    digest: str
    contents: Mapping[str, _Content]


def _describe_bytes(data: Tensor) -> _Content:
    content = data.numpy().tobytes()
    return _Content(sha256(content).hexdigest(), len(content))


def _check_agreed(reports: Sequence[_RankReport]) -> None:
    """Raise CheckpointError unless all ranks reported the same tensors, layouts and paths to save."""
    first = reports[0]
    other = next((report for report in reports if report.digest != first.digest), None)
    if other is not None:
        what = f"ranks {first.rank} and {other.rank} save different tensors, layouts or paths"
        digests = f"of digests {first.digest[:12]} and {other.digest[:12]}"
        fix = (
            "give the same layouts= and paths= on all ranks, "
            "and mesh= to state_of if ranks have DTensors on different meshes"
        )
        raise CheckpointError(f"{what}, {digests}; {fix}")


def _name_bytes(reports: Iterable[_RankReport], names: Iterable[str]) -> _StoredNames:
    """The stored name of every rank's bytes: ranks with equal bytes share one, and none of `names` is taken twice."""
    by_content: dict[tuple[str, str], str] = {}
    stored: _StoredNames = {}
    taken = set(names)
    for report in sorted(reports, key=lambda report: report.rank):
        for name, content in report.contents.items():
            key = name, content.digest
            if key not in by_content:
                # what the first rank has is stored under the name itself
                is_first = name not in stored
                chosen = name if is_first else find_unused(f"{name}@{report.rank}", taken)
                taken.add(chosen)
                by_content[key] = chosen
            stored.setdefault(name, {})[report.rank] = by_content[key]
    return stored


def _add_bytes(rank_plan: SavePlan, report: _RankReport, stored: _StoredNames) -> SavePlan:
    """The rank's plan, plus the bytes that no lower rank has; its planner data give the name of each item of bytes."""
    items = list(rank_plan.items)
    names: dict[MetadataIndex, str] = {}
    for name, content in report.contents.items():
        by_rank = stored[name]
        stored_name = by_rank[report.rank]
        first = min(rank for rank, other in by_rank.items() if other == stored_name)
        if report.rank == first:
            size = (content.length,)
            item = _describe_box(stored_name, size, (0,), size, torch.uint8)
            items.append(item)
            names[item.index] = name
    return replace(rank_plan, items=items, planner_data=names)


# Paths for torch's tools


def check_paths(paths: Paths, names: Container[str]) -> None:
    """Check `paths`, which maps some of `names` to their keys in a nested state dict, such as "a.0" to ("a", 0). Raises
    CheckpointError if a path does not match its name, or if two paths cannot be in one nested dict.

    Keys are str for a dict and int for a list. Two paths contradict each other if one begins with the other, or if they
    need a dict and a list in the same place.
    """
    given = mapping(paths, "paths is ", "names to tuples of keys", CheckpointError)
    for name, path in given.items():
        _check_path(name, path, names)
    ends = set(given.values())
    for path in ends:
        for n in range(1, len(path)):
            if path[:n] in ends:
                what = (
                    f"the path {path!r} leads through {path[:n]!r}, which is another tensor's path"
                )
                raise CheckpointError(f"{what}; split one of the two names at other dots")
    _check_containers(ends)


def _check_containers(paths: Iterable[tuple[str | int, ...]]) -> None:
    """Raise CheckpointError if one path has a list where another has a dict."""
    first: dict[tuple[str | int, ...], tuple[str | int, ...]] = {}
    for path in paths:
        for n in range(len(path)):
            # The next keys of all paths that begin alike are the keys of one container.
            other = first.setdefault(path[:n], path)
            if type(other[n]) is not type(path[n]):
                what = f"the paths {other!r} and {path!r} have a list and a dict at {path[:n]!r}"
                fix = "give both an int there, for a list, or both a str, for a dict"
                raise CheckpointError(f"{what}; {fix}")


def _check_path(name: str, path: object, names: Container[str]) -> None:
    """Raise CheckpointError for a path that does not spell the name of a saved tensor."""
    if name not in names:
        what = f"paths= has {name!r}, but layouts= has not"
        raise CheckpointError(f"{what}; remove it from paths=, or add it to layouts=")
    keys = path if isinstance(path, tuple) else ()
    if not keys or type(keys[0]) is not str or not all(map(_is_key, keys)):
        what = f"the path of {name!r} is {path!r}, not a tuple of str and integers from 0 on, a str first"
        raise CheckpointError(f"{what}; give one such as {(name,)!r}")
    joined = ".".join(map(str, keys))
    if joined != name:
        what = f"the path of {name!r} is {path!r}, which joined with dots is {joined!r}"
        raise CheckpointError(f"{what}; give the name, split at some of its dots")


def _is_key(key: object) -> bool:
    """Whether `key` is a key of a dict, or an index into a list."""
    return type(key) is str or (type(key) is int and key >= 0)
