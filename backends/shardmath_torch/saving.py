"""Saving: which rank writes which boxes, and how they get onto the disk.

1. To save is to move: the checkpoint is one more rank that needs every tensor whole, and who sends it what is a plan of
   `shardmath.plan`. So every element is written once, replicas share the work evenly, windows and uneven shards are
   nothing special, and what no rank holds is an error before a byte is written.
2. `SavePlanner` and `Writer` are what torch.distributed.checkpoint calls planner and storage writer; each works with
   torch's own counterpart.
3. A file holds a tensor once, by its name, which is how torch's HuggingFaceStorageReader finds it: the second box of a
   tensor on a rank goes into the rank's second file.
4. A save is there at once or not at all. Data files have names of their own and an ending that no reader looks for
   until all ranks have written theirs; then they are renamed, then `.metadata` is replaced, then the index. What the
   former save left is removed last (`Writer.clear`).
"""

from __future__ import annotations

import io
import os
import pickle
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.distributed.checkpoint import planner as theirs
from torch.distributed.checkpoint import storage
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.futures import Future

from shardmath.layout import Layout
from shardmath.mesh import Mesh
from shardmath.plan import Plan, plan
from shardmath_torch import archive, compat
from shardmath_torch.archive import CheckpointError
from shardmath_torch.dtypes import dtype_of
from shardmath_torch.local import by_key, fits, wanted
from shardmath_torch.stored import BLOBS, INDEX, METADATA, Checkpoint, Piece, Saved, to_json

__all__ = ["Bytes", "Layouts", "SavePlanner", "Writer", "to_disk"]

Bytes: TypeAlias = Tensor | bytes | bytearray | io.BytesIO
"""What a rank saves as its own: bytes, or a tensor of uint8."""
Layouts: TypeAlias = Mapping[str, Layout | tuple[Layout, ...] | None]
"""What everybody holds of each tensor; None for bytes that each rank has of its own."""


class _Source(NamedTuple):
    """Where an item's data lies: a box of a local tensor."""

    key: str
    at: tuple[slice, ...]


class SavePlanner(theirs.SavePlanner):
    """Which boxes this rank writes of tensors under these layouts. For torch.distributed.checkpoint.save.

    The state dict holds this rank's local tensors, by local buffer key. Raises CheckpointError for a Partial tensor,
    ExchangeError for local tensors that do not fit, PlanError for what nobody holds.
    """

    def __init__(self, layouts: Layouts, *, rank: int | None = None) -> None:
        self._layouts = {name: one for name, one in layouts.items() if one is not None}
        self._blobs = [name for name, one in layouts.items() if one is None]
        self._rank = compat.rank_or_0() if rank is None else rank
        self._tensors: dict[str, Tensor] = {}
        self._sources: dict[MetadataIndex, _Source] = {}

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Takes the local tensors."""
        self._given = state_dict

    def create_local_plan(self) -> SavePlan:
        """The items that this rank writes, and a fingerprint of what all ranks have to agree on."""
        moved = to_disk(self._layouts)
        blobs = {name: _tensor(name, self._given[name]) for name in self._blobs if name in self._given}
        given = {name: t for name, t in self._given.items() if name not in self._blobs}
        want = wanted(moved, self._rank)[0]
        tensors = by_key(want, given)
        fits(want, tensors)
        self._tensors = {**tensors, **blobs}
        items = [*self._boxes(moved), *self._own(blobs)]
        said = {
            "rank": self._rank,
            "digest": moved.digest,
            "blobs": {name: sha256(t.numpy().tobytes()).hexdigest() for name, t in blobs.items()},
        }
        return SavePlan(items, planner_data=said)

    def _boxes(self, moved: Plan) -> Iterator[WriteItem]:
        for t in moved.transfers(src=self._rank):
            layout = moved.src[t.tensor][0]
            offsets, sizes = [s.start for s in t.global_slices], t.shape
            yield self._item(t.tensor, layout.shape, offsets, sizes, _Source(t.src_tensor, t.src_slices))
        for name, windows in moved.src.items():
            if 0 in windows[0].shape and self._rank == min(r for w in windows for r in w.mesh.ranks):
                yield self._empty(name, windows[0])

    def _empty(self, name: str, layout: Layout) -> WriteItem:
        key = f"empty {name}"
        self._tensors[key] = torch.empty(layout.shape, dtype=dtype_of(layout.dtype))
        return self._item(name, layout.shape, [0] * layout.ndim, layout.shape, _Source(key, ()))

    def _own(self, blobs: Mapping[str, Tensor]) -> Iterator[WriteItem]:
        for name, data in blobs.items():
            source = _Source(name, ())
            self._sources[MetadataIndex(name, (0,))] = source
            yield self._item(_by_rank(name, self._rank), data.shape, (0,), data.shape, source)

    def _item(
        self, name: str, shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int], source: _Source
    ) -> WriteItem:
        index = MetadataIndex(name, offsets)
        self._sources[index] = source
        data = TensorWriteData(
            ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)),
            TensorProperties(self._tensors[source.key].dtype),
            torch.Size(shape),
        )
        return WriteItem(index, WriteItemType.SHARD, tensor_data=data)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Everybody's items, each blob kept once, and the metadata. Raises CheckpointError where ranks disagree."""
        _check_agreed([p.planner_data for p in all_plans])
        kept, blobs = _blobs([p.planner_data for p in all_plans])
        plans = [replace(p, items=list(_renamed(p.items, p.planner_data["rank"], kept, blobs))) for p in all_plans]
        tensors: dict[str, TensorStorageMetadata] = {}
        for item in (item for p in plans for item in p.items):
            data = item.tensor_data
            assert data is not None, "all items are boxes"
            found = tensors.setdefault(item.index.fqn, TensorStorageMetadata(data.properties, data.size, []))
            found.chunks.append(data.chunk)
        return plans, Metadata(dict(sorted(tensors.items())), planner_data={BLOBS: blobs})

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """The items to write."""
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """An item's data: a view of a local tensor."""
        source = self._sources[write_item.index]
        return self._tensors[source.key].detach()[source.at]


def to_disk(layouts: Mapping[str, Layout | tuple[Layout, ...]]) -> Plan:
    """The plan that takes every tensor whole to one more rank, the disk."""
    windows = {name: one if isinstance(one, tuple) else (one,) for name, one in layouts.items()}
    for name, layout in ((name, layout) for name, each in windows.items() for layout in each):
        if layout.partial:
            what = f"tensor {name!r} is Partial in {layout}, a checkpoint holds whole values"
            raise CheckpointError(f"{what}; move it to a layout without Partial first")
    disk = Mesh(ranks=[1 + max((layout.mesh.ranks[-1] for each in windows.values() for layout in each), default=0)])
    whole = {name: Layout(each[0].shape, disk, (), dtype=each[0].dtype) for name, each in windows.items()}
    return plan(layouts, whole)


def _tensor(name: str, data: object) -> Tensor:
    """A rank's own bytes as a tensor."""
    if isinstance(data, Tensor) and data.dtype == torch.uint8 and data.ndim == 1:
        return data.detach().cpu().contiguous()
    if isinstance(data, io.BytesIO):
        data = data.getvalue()
    if isinstance(data, bytes | bytearray):
        return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    what = f"{data.dtype}{list(data.shape)}" if isinstance(data, Tensor) else type(data).__name__
    raise CheckpointError(f"{name!r} is {what} and has no layout; give it one, or bytes, or a 1-d tensor of uint8")


def _by_rank(name: str, rank: int) -> str:
    return f"{name}@{rank}"


def _check_agreed(said: Sequence[Mapping[str, Any]]) -> None:
    first = said[0]
    other = next((one for one in said if one["digest"] != first["digest"]), None)
    if other is not None:
        what = f"ranks {first['rank']} and {other['rank']} save different tensors or layouts"
        digests = f"{first['digest'][:12]} and {other['digest'][:12]}"
        raise CheckpointError(f"{what}, {digests}; pass everybody's layouts, the same on all ranks")


def _blobs(said: Iterable[Mapping[str, Any]]) -> tuple[set[tuple[str, int]], dict[str, dict[int, str]]]:
    """Which (name, rank) are written, and the stored name of every rank's bytes: ranks that have the same share one."""
    first: dict[tuple[str, str], str] = {}
    kept: set[tuple[str, int]] = set()
    names: dict[str, dict[int, str]] = {}
    for one in sorted(said, key=lambda one: int(one["rank"])):
        for name, content in one["blobs"].items():
            if (name, content) not in first:
                first[name, content] = name if name not in names else _by_rank(name, one["rank"])
                kept.add((name, one["rank"]))
            names.setdefault(name, {})[one["rank"]] = first[name, content]
    return kept, names


def _renamed(
    items: Iterable[WriteItem], rank: int, kept: set[tuple[str, int]], blobs: Mapping[str, Mapping[int, str]]
) -> Iterator[WriteItem]:
    """The items of a rank, those of its bytes under their stored names, or left out."""
    own = {_by_rank(name, rank): name for name in blobs}
    for item in items:
        name = own.get(item.index.fqn)
        if name is None:
            yield item
        elif (name, rank) in kept:
            yield replace(item, index=MetadataIndex(blobs[name][rank], item.index.offset))


# Files

DATA, UNFINISHED = ".safetensors", ".unfinished"
OURS = "shardmath-"
"""How names of our data files begin; then comes the save's own name."""
DIGITS = 12


class Writer(storage.StorageWriter):
    """A folder of safetensors files, torch's `.metadata` and an index. For torch.distributed.checkpoint.save.

    Raises CheckpointError where the folder cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path, self._save = Path(path), OURS

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Another folder, if given."""
        self._path = self._path if checkpoint_id is None else Path(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing is needed."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Makes the folder."""
        with _writing(self._path):
            self._path.mkdir(parents=True, exist_ok=True)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """One name for all files of this save, and each rank's number in it."""
        save = uuid.uuid4().hex[:DIGITS]
        names = [f"{OURS}{save}-{i:05d}-of-{len(plans):05d}" for i in range(len(plans))]
        return [replace(plan, storage_data=name) for plan, name in zip(plans, names, strict=True)]

    def write_data(self, plan: SavePlan, planner: theirs.SavePlanner) -> Future[list[storage.WriteResult]]:
        """Writes this rank's files, all of them unfinished."""
        self._save = plan.storage_data[: len(OURS) + DIGITS]
        out: list[storage.WriteResult] = []
        for i, items in enumerate(_files(plan.items)):
            name = plan.storage_data + (f"-{i}" if i else "") + DATA
            with _writing(self._path / name):
                out += _written(self._path / (name + UNFINISHED), name, items, planner)
        done: Future[list[storage.WriteResult]] = Future()
        done.set_result(out)
        return done

    def finish(self, metadata: Metadata, results: list[list[storage.WriteResult]]) -> None:
        """Makes the save the one that is found."""
        wrote = [result for each in results for result in each]
        with _writing(self._path):
            for name in sorted({one.storage_data.file for one in wrote}):
                os.replace(self._path / (name + UNFINISHED), self._path / name)
            index = _index(self._path, metadata, wrote)
            text = pickle.dumps(replace(metadata, storage_data={one.index: one.storage_data.info for one in wrote}))
            _replace(self._path / METADATA, text)
            _replace(self._path / INDEX, to_json(index, text).encode())

    def clear(self, share: tuple[int, int] = (0, 1)) -> None:
        """Removes data files that earlier saves of ours left, finished or not: every n-th, from the i-th on, of (i, n).

        For every rank, after a save.
        """
        with _writing(self._path):
            files = [file for file in self._path.glob(f"{OURS}*") if not file.name.startswith(self._save)]
            for file in sorted(files)[share[0] :: share[1]]:
                if file.name.endswith((DATA, DATA + UNFINISHED)):
                    file.unlink(missing_ok=True)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it is a path."""
        return "://" not in os.fspath(checkpoint_id)

    def storage_meta(self) -> StorageMeta:
        """What torch asks for."""
        return StorageMeta()


class _Place(NamedTuple):
    """Where an item went; `info` as torch has it."""

    file: str
    start: int
    info: Any


class _writing:
    """Errors of the system as ours, naming the path."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError):
            what = f"{error.filename or self._path} cannot be written: {error.strerror or error}"
            raise CheckpointError(f"{what}; what was saved there before is as it was") from error


def _files(items: Iterable[WriteItem]) -> list[list[WriteItem]]:
    """The items, file by file: each name once a file."""
    out: list[list[WriteItem]] = []
    seen: Counter[str] = Counter()
    for item in items:
        at = seen[item.index.fqn]
        if at == len(out):
            out.append([])
        out[at].append(item)
        seen[item.index.fqn] += 1
    return out


def _written(
    file: Path, name: str, items: Sequence[WriteItem], planner: theirs.SavePlanner
) -> Iterator[storage.WriteResult]:
    tensors = {item.index.fqn: (tuple(item.index.offset or ()), _plain(planner.resolve_data(item))) for item in items}
    places = archive.write(file, tensors)
    for item in items:
        at = places[item.index.fqn]
        info = compat.StorageInfo(name, at.archive, at.length)
        yield storage.WriteResult(item.index, tensors[item.index.fqn][1].nbytes, _Place(name, at.start, info))


def _plain(data: object) -> Tensor:
    """A tensor on the CPU, contiguous and alone in its storage."""
    assert isinstance(data, Tensor), "items are tensors"
    here = data.detach().cpu().contiguous()
    return here if here.untyped_storage().nbytes() == here.nbytes else here.clone()


def _index(path: Path, metadata: Metadata, wrote: Iterable[storage.WriteResult]) -> Checkpoint:
    places: dict[str, dict[tuple[int, ...], _Place]] = {}
    for one in wrote:
        places.setdefault(one.index.fqn, {})[tuple(one.index.offset or ())] = one.storage_data
    tensors = {
        name: _saved(path, md, places[name])
        for name, md in metadata.state_dict_metadata.items()
        if isinstance(md, TensorStorageMetadata)
    }
    files = sorted({piece.file for saved in tensors.values() for piece in saved.pieces})
    return Checkpoint(path, tensors, metadata.planner_data[BLOBS], {file: file.stat().st_size for file in files})


def _saved(path: Path, md: TensorStorageMetadata, places: Mapping[tuple[int, ...], _Place]) -> Saved:
    pieces = []
    for chunk in md.chunks:
        place, sizes = places[tuple(chunk.offsets)], tuple(chunk.sizes)
        length = md.properties.dtype.itemsize * chunk.sizes.numel()
        pieces.append(Piece(tuple(chunk.offsets), sizes, path / place.file, place.start, length))
    return Saved(tuple(md.size), str(md.properties.dtype).removeprefix("torch."), tuple(pieces))


def _replace(file: Path, text: bytes) -> None:
    """The file with this text, at once, on disk when this returns."""
    draft = file.with_name(file.name + UNFINISHED)
    with draft.open("wb") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(draft, file)
    _sync(file.parent)


def _sync(folder: Path) -> None:
    """The folder's names are on disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
