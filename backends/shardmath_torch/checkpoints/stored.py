"""Checkpoints as they are found: which box of which tensor lies at which bytes of which file.

1. Read are ours, those of torch.distributed.checkpoint, and safetensors: Hugging Face's, or torch's shards of them.
2. Ours is a folder with torch's own `.metadata`, the index behind it in the same file (`sealed`). `shardmath.json` is
   a copy of the index: one that says otherwise of the same save is an error, one of another save is older. It counts
   where there is no `.metadata`. Where torch has saved over a checkpoint of ours, its `.metadata` has no index of ours,
   and names none of our files: one that does has been cut.
3. Nothing is read here but indices and headers, and nothing is believed before it is checked: the boxes of a tensor
   have every element once, and files are as long as they should be (`check`).
4. A box in an archive of torch.save may be other than the metadata says: torch writes wrong metadata for uneven
   `_StridedShard`, and loses rows. `check_archives` looks into the archives.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from shardmath.algebra.box import first_gap, first_overlap, tiles
from shardmath.base.dtypes import ITEMSIZE
from shardmath.base.errors import ShardError
from shardmath.base.given import plural
from shardmath.families.hf import Shapes
from shardmath_torch.checkpoints.claims import FILE, INDEX, METADATA, OURS
from shardmath_torch.files import checksums
from shardmath_torch.files.json_text import MOST, MOST_DIMENSIONS, elements, read_json, shown
from shardmath_torch.files.places import (
    CheckpointError,
    Place,
    check_length,
    content_of,
    place,
    sizes_of,
)
from shardmath_torch.files.sealed import Sealed, holds, signed, unseal
from shardmath_torch.files.unpickled import read_metadata
from shardmath_torch.safetensors.hf_sharded import Parts, read_sharded
from shardmath_torch.safetensors.strided import Strided, described
from shardmath_torch.safetensors.weights import open_weights

__all__ = [
    "BLOBS",
    "Checkpoint",
    "Piece",
    "Saved",
    "open_checkpoint",
    "to_json",
]

BLOBS = ("shardmath.blobs",)
"""Where in torch's metadata the stored names of ranks' own bytes are: among the paths of names, so itself no name."""
VERSION = 2


class Piece(NamedTuple):
    """A stored box: where it begins in the tensor, its sizes, and its bytes in a file.

    The bytes are the elements, row-major, with their `sums` (`checksums`) if they have any; or an `archive` of
    torch.save.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: Place
    start: int
    length: int
    archive: bool = False
    sums: str = ""

    @property
    def nonempty(self) -> bool:
        """Whether it has elements."""
        return 0 not in self.sizes

    @property
    def stop(self) -> int:
        """One past its last byte."""
        return self.start + self.length

    def __str__(self) -> str:
        box = ", ".join(f"{at}:{at + n}" for at, n in zip(self.offsets, self.sizes, strict=True))
        return f"[{box}] in {self.file.name}"


@dataclass(frozen=True, slots=True)
class Saved:
    """A tensor of a checkpoint: its global shape, its type, and the boxes that it is stored in."""

    shape: tuple[int, ...]
    dtype: str
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True, repr=False)
class Checkpoint:
    """What lies in a checkpoint, by name; no data.

    `blobs` are what ranks saved as bytes of their own: of each name, the stored name by rank. `sizes` says how long
    files should be, where that is known. Two that have the same `digest` were read from the same index or headers.
    """

    path: Place
    tensors: Mapping[str, Saved]
    blobs: Mapping[str, Mapping[int, str]]
    sizes: Mapping[Place, int]
    digest: str = ""

    @property
    def shapes(self) -> Shapes:
        """Global shape and dtype of each tensor, by name; of each blob, as bytes of its first rank."""
        hidden = {key for by_rank in self.blobs.values() for key in by_rank.values()} - set(
            self.blobs
        )
        return {
            name: (saved.shape, saved.dtype)
            for name, saved in self.tensors.items()
            if name not in hidden
        }

    def __repr__(self) -> str:
        return f"<checkpoint of {plural(len(self), 'tensor')} at {self.path}>"

    def __len__(self) -> int:
        """How many names there are; bytes of ranks count once a name."""
        return len(self.shapes)

    def __iter__(self) -> Iterator[str]:
        """The names."""
        return iter(self.shapes)

    def __contains__(self, name: object) -> bool:
        """Whether there is a tensor of that name."""
        return name in self.tensors

    def __getitem__(self, name: str) -> Saved:
        """The tensor of that name. Raises CheckpointError where there is none."""
        found = self.tensors.get(name)
        if found is None:
            near = difflib.get_close_matches(name, self.tensors, 3) or sorted(self.tensors)[:3]
            shown = ", ".join(map(repr, near)) or "nothing"
            what = f"{self.path} has no {name!r} among its {plural(self.tensors, 'tensor')}; it has {shown}"
            raise CheckpointError(
                f"{what}: load what is stored under another name with names={{wanted: stored}}"
            )
        return found

    def blob(self, name: str, rank: int) -> str:
        """The stored name of what the rank saved as bytes; where it saved none, of what the lowest rank did."""
        by_rank = self.blobs.get(name) or {rank: name}
        return by_rank[rank if rank in by_rank else min(by_rank)]

    def check(self, names: Iterable[str]) -> None:
        """Raises CheckpointError unless the tensors are all there: each element once, in files that are long enough."""
        ends: dict[Place, int] = {}
        proved: set[tuple[object, ...]] = set()
        for name in names:
            saved = self[name]
            boxes = saved.shape, tuple((piece.offsets, piece.sizes) for piece in saved.pieces)
            if boxes not in proved:
                _check_tiled(self.path, name, saved)
                proved.add(boxes)
            for piece in saved.pieces:
                ends[piece.file] = max(ends.get(piece.file, 0), piece.stop)
        size = sizes_of(ends)
        for file, end in ends.items():
            check_length(file, size, end, self.sizes.get(file))

    def check_archives(self, names: Iterable[str], share: tuple[int, int]) -> dict[Piece, Strided]:
        """What archives hold, each looked into by one of n ranks, this being the i-th: `share` is (i, n).

        Raises CheckpointError where one holds another tensor than the metadata says.
        """
        archives = [
            (name, p) for name in sorted(set(names)) for p in self[name].pieces if p.archive
        ]
        return self.described(archives[share[0] :: share[1]])

    def described(self, archives: Iterable[tuple[str, Piece]]) -> dict[Piece, Strided]:
        """What these archives (tensor, piece) hold. Raises CheckpointError where it is not what the metadata says."""
        by_file: dict[Place, list[tuple[str, Piece]]] = {}
        for name, piece in archives:
            by_file.setdefault(piece.file, []).append((name, piece))
        out: dict[Piece, Strided] = {}
        for file, here in by_file.items():
            found = described(file, [(piece.start, piece.length) for _, piece in here])
            for (name, piece), strided in zip(here, found, strict=True):
                _check_archive(name, self[name], piece, strided)
                out[piece] = strided
        return out


def _check_archive(name: str, saved: Saved, piece: Piece, found: Strided) -> None:
    if (found.shape, found.dtype) != (piece.sizes, saved.dtype):
        what = f"tensor {name!r}: the metadata has {saved.dtype}{list(piece.sizes)} at {piece}"
        stored = f"{found.dtype}{shown(list(found.shape))} is stored there"
        why = "torch writes this for a _StridedShard that does not divide evenly, and elements of the tensor are lost"
        raise CheckpointError(
            f"{what}, but {stored}; {why}: save it again with shardmath_torch.save"
        )


def _check_tiled(path: Place, name: str, saved: Saved) -> None:
    """The boxes are in the tensor, and have each of its elements once."""
    boxes = [
        tuple((at, at + n) for at, n in zip(p.offsets, p.sizes, strict=True))
        for p in saved.pieces
        if p.nonempty
    ]
    outside = next(
        (b for b in boxes if any(hi > n for (_, hi), n in zip(b, saved.shape, strict=True))), None
    )
    held = [[(0, n)] if n else [] for n in saved.shape]
    if outside is None and tiles(held, boxes):
        return
    fix = "elements are lost, or saved twice: save it again with shardmath_torch.save"
    what = f"{path}: tensor {name!r} of shape {list(saved.shape)}"
    if outside is not None:
        raise CheckpointError(f"{what} has a box {outside} outside it; {fix}")
    twice = first_overlap(boxes)
    if twice is not None:
        raise CheckpointError(
            f"{what} has boxes that overlap, {boxes[twice[0]]} and {boxes[twice[1]]}; {fix}"
        )
    raise CheckpointError(f"{what} has no box with element {first_gap(held, boxes)}; {fix}")


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """The checkpoint at `path`: ours, torch.distributed.checkpoint's, or safetensors as in `weights` and `hf_sharded`;
    `path` may be a URL that fsspec serves.

    Reads indices and headers only. Raises CheckpointError or WeightsError, naming the file.
    """
    try:
        return _opened(_absolute(place(path)))
    except ShardError:
        raise
    except (
        LookupError,
        OSError,
        OverflowError,
        RecursionError,
        TypeError,
        ValueError,
        AttributeError,
    ) as error:
        fault = f"{type(error).__name__}: {str(error)[:200]}"
        raise CheckpointError(
            f"{path} is no checkpoint, or a damaged one ({fault}); fetch it again"
        ) from error


def _absolute(path: Place) -> Place:
    """The same place wherever the process goes later."""
    return path.absolute() if isinstance(path, Path) else path


def _opened(path: Place) -> Checkpoint:
    metadata = _text(path / METADATA) if (path / METADATA).is_file() else None
    copy = _text(path / INDEX) if (path / INDEX).is_file() else None
    if metadata is not None:
        sealed = unseal(metadata, path / METADATA)
        if sealed is None:
            said = read_metadata(metadata, path / METADATA)
            _check_spread(path / METADATA, said, len(metadata))
            found = _torchs(path, said, _digest(metadata))
            _check_torchs(path / METADATA, found)
            return found
        index = _index(path / METADATA, sealed.json.encode())
        _check_copy(path / INDEX, copy, sealed)
        return _ours(path, index, _digest(metadata))
    if copy is not None:
        index = _index(path / INDEX, copy)
        if not holds(copy.decode()):
            raise CheckpointError(
                f"{path / INDEX} is damaged: its checksum does not hold; fetch it again"
            )
        return _ours(path, index, _digest(copy))
    return _weights(path)


def _check_torchs(file: Place, found: Checkpoint) -> None:
    """Raises CheckpointError for metadata without marks of ours that speak of our data: they are cut.

    torch never writes files that are called like ours, even where its storage is used with our planners.
    """
    files = dict.fromkeys(p.file for saved in found.tensors.values() for p in saved.pieces)
    ours = next((each for each in files if FILE.fullmatch(each.name)), None)
    if ours is not None:
        what = f"{file} is damaged: it names {ours.name}, and ends before the checksums that belong to it"
        raise CheckpointError(
            f"{what}; fetch it again, or remove it to load by the index beside it"
        )


def _check_copy(file: Place, copy: bytes | None, sealed: Sealed) -> None:
    """Raises CheckpointError where the copy of the index is one of the same save, and says something else."""
    if copy is None or copy == sealed.json.encode():
        return
    try:
        save = _index(file, copy)["save"]
    except CheckpointError:
        return  # nothing that could be taken for an index
    if save == sealed.save:
        raise CheckpointError(
            f"{file} and {METADATA} differ, one is damaged; fetch them again, or remove the damaged one"
        )


def _digest(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()


def _text(file: Place) -> bytes:
    try:
        return content_of(file)
    except OSError as error:
        raise CheckpointError(
            f"{file} cannot be read: {error.strerror}; check its permissions"
        ) from error


# Ours


def to_json(checkpoint: Checkpoint, save: str) -> str:
    """The index of a checkpoint of ours."""
    number = {file: i for i, file in enumerate(checkpoint.sizes)}
    tensors = {
        name: [
            saved.dtype,
            saved.shape,
            [[number[p.file], p.start, p.offsets, p.sizes, p.sums] for p in saved.pieces],
        ]
        for name, saved in checkpoint.tensors.items()
    }
    out = {
        "shardmath": VERSION,
        "save": save,
        "files": [[file.name, size] for file, size in checkpoint.sizes.items()],
        "tensors": tensors,
        "blobs": checkpoint.blobs,
    }
    return signed(json.dumps(out, separators=(",", ":")))


def _index(file: Place, text: bytes) -> dict[str, Any]:
    """The index. Raises CheckpointError for what is none, or one of another version."""
    try:
        found: Any = read_json(text)
        version, _ = found["shardmath"], found["files"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"{file} is no index of shardmath ({error}); fetch it again"
        ) from error
    if version != VERSION:
        what = f"{file} has version {shown(version)}, this shardmath reads {VERSION}"
        raise CheckpointError(f"{what}; use a newer shardmath")
    return dict(found)


def _ours(path: Place, index: dict[str, Any], digest: str) -> Checkpoint:
    sizes = [(_inside(path, name), _count(size)) for name, size in index["files"]]
    files = [file for file, _ in sizes]
    tensors = {name: _saved(files, *entry) for name, entry in index["tensors"].items()}
    return Checkpoint(path, tensors, _blobs(index["blobs"], tensors), dict(sizes), digest)


def _blobs(found: Any, tensors: Mapping[str, Saved]) -> dict[str, dict[int, str]]:
    """The stored names of ranks' bytes, every one of them there."""
    out = {
        _name(name): {_rank(rank): _name(key) for rank, key in by_rank.items()}
        for name, by_rank in found.items()
    }
    missing = [key for by_rank in out.values() for key in by_rank.values() if key not in tensors]
    if missing or not all(out.values()):
        what = f"bytes of ranks are said to be under {shown(missing[:3])}"
        raise CheckpointError(f"{what}, where nothing is; fetch it again")
    return out


def _saved(files: list[Place], dtype: str, shape: list[int], pieces: list[Any]) -> Saved:
    each, sizes = ITEMSIZE[dtype], _counts(shape)
    return Saved(sizes, dtype, tuple(_piece(files, each, len(sizes), *piece) for piece in pieces))


def _piece(
    files: list[Place],
    each: int,
    ndim: int,
    file: int,
    start: int,
    offsets: list[int],
    sizes: list[int],
    sums: str,
) -> Piece:
    at, box = _counts(offsets), _counts(sizes)
    if len(at) != ndim or len(box) != ndim:
        raise ValueError(f"a box {at} {box} in {ndim} dimensions")
    length = elements(box) * each
    if type(sums) is not str or len(sums) != checksums.count(length) * checksums.DIGITS:
        raise ValueError(f"{length} bytes do not have the checksums {shown(sums)}")
    return Piece(at, box, files[_count(file)], _count(start), length, sums=sums)


def _count(n: object) -> int:
    if type(n) is not int or not 0 <= n <= MOST:
        raise ValueError(f"{shown(n)} is no count")
    return n


def _counts(sizes: Any) -> tuple[int, ...]:
    """A shape, or where a box begins."""
    if not isinstance(sizes, list | tuple) or len(sizes) > MOST_DIMENSIONS:
        raise ValueError(f"{shown(sizes)} are no sizes of up to {MOST_DIMENSIONS} dimensions")
    return tuple(map(_count, sizes))


def _name(name: object) -> str:
    if not isinstance(name, str):
        raise ValueError(f"{shown(name)} is no name")
    return name


def _rank(rank: object) -> int:
    """A rank, which is text where it is a key of JSON."""
    return _count(int(rank) if isinstance(rank, str) else rank)


def _inside(folder: Place, name: object) -> Place:
    """A file of the folder, or of a folder in it."""
    if (
        not isinstance(name, str)
        or not name
        or "\0" in name
        or Path(name).is_absolute()
        or ".." in Path(name).parts
    ):
        raise CheckpointError(
            f"{folder} names a data file {shown(name)}; a checkpoint's files lie in its folder"
        )
    return folder / name


# torch.distributed.checkpoint


_Places: TypeAlias = Mapping[tuple[str, tuple[int, ...] | None], Any]
"""torch's storage info by name and, for a box, where it begins."""


class _Files:
    """Files of a folder by the names that torch's storage info has for them, each made once: names may be long."""

    def __init__(self, folder: Place) -> None:
        self._folder = folder
        self._found: dict[object, Place] = {}

    def of(self, name: str, info: Any) -> Place:
        """The file of a box of the tensor."""
        if getattr(info, "transform_descriptors", None):
            what = f"{shown(name)} is stored through {shown(info.transform_descriptors)}"
            why = "extensions of torch that are not read here; save it without them"
            raise CheckpointError(f"{self._folder}: {what}, {why}")
        path = info.relative_path
        if not isinstance(path, str) or path not in self._found:
            self._found[path] = _inside(self._folder, path)
        return self._found[path]


def _check_spread(file: Place, metadata: Metadata, most: int) -> None:
    """Raises CheckpointError for more boxes than the file has bytes: lists that a pickle has once, many names share."""
    parts = metadata.state_dict_metadata.values()
    boxes = sum(len(part.chunks) for part in parts if isinstance(part, TensorStorageMetadata))
    count = boxes + sum(map(len, _blobs_of(metadata).values()))
    if count > most:
        what = f"{file} has {count} boxes in {most} bytes, lists that many names share"
        raise CheckpointError(f"{what}, which torch never writes; save again")


def _torchs(path: Place, metadata: Metadata, digest: str) -> Checkpoint:
    if not isinstance(metadata.storage_data, dict):
        raise CheckpointError(
            f"{path / METADATA} does not say where data lies; save again with FileSystemWriter"
        )
    places = {
        (index.fqn, None if index.offset is None else _counts(index.offset)): info
        for index, info in metadata.storage_data.items()
    }
    files = _Files(path)
    tensors = {
        name: _of_torch(files, name, md, places)
        for name, md in metadata.state_dict_metadata.items()
    }
    return Checkpoint(path, tensors, _blobs(_blobs_of(metadata), tensors), {}, digest)


def _blobs_of(metadata: Metadata) -> dict[Any, Any]:
    """What `.metadata` says of ranks' own bytes, under the key that we write, or wrote before paths lay beside it."""
    extra = metadata.planner_data if isinstance(metadata.planner_data, dict) else {}
    found = (extra.get(key) for key in (BLOBS, BLOBS[0]))
    return next((each for each in found if isinstance(each, dict)), {})


def _of_torch(files: _Files, name: str, md: object, places: _Places) -> Saved:
    if not isinstance(md, TensorStorageMetadata):
        info = places[name, None]
        length = _count(info.length)
        return Saved(
            (length,),
            "uint8",
            (Piece((0,), (length,), files.of(name, info), _count(info.offset), length),),
        )
    shape, dtype = _counts(md.size), str(md.properties.dtype).removeprefix("torch.")
    return Saved(shape, dtype, tuple(_chunks(files, name, md, places)))


def _chunks(
    files: _Files, name: str, md: TensorStorageMetadata, places: _Places
) -> Iterator[Piece]:
    """The boxes; of an empty one and another that begin at one place, torch keeps a single archive: the other's."""
    chunks = [(_counts(chunk.offsets), _counts(chunk.sizes)) for chunk in md.chunks]
    full = {at for at, sizes in chunks if 0 not in sizes}
    for at, sizes in chunks:
        if not len(at) == len(sizes) == len(md.size):
            raise ValueError(f"{name!r} has a box {at} {sizes} in {len(md.size)} dimensions")
        if 0 not in sizes or at not in full:
            info = places[name, at]
            yield Piece(
                at,
                sizes,
                files.of(name, info),
                _count(info.offset),
                _count(info.length),
                archive=True,
            )


# Hugging Face


def _weights(path: Place) -> Checkpoint:
    ours = path.is_dir() and any(FILE.fullmatch(file.name) for file in path.glob(f"{OURS}*"))
    if ours and not any(True for _ in path.glob("model.safetensors*")):
        raise CheckpointError(
            f"{path} has data of a save that did not end, and no index; save again, or give another"
        )
    sharded = read_sharded(path)
    if sharded is None:
        entries = open_weights(path).entries
        sharded = {
            name: Parts(e.shape, e.dtype, (((0,) * len(e.shape), e),))
            for name, e in entries.items()
        }
    tensors = {name: _in_boxes(parts) for name, parts in sharded.items()}
    said = [
        (name, saved.shape, saved.dtype, *map(_said, saved.pieces))
        for name, saved in sorted(tensors.items())
    ]
    return Checkpoint(path, tensors, {}, {}, _digest(repr(said).encode()))


def _in_boxes(parts: Parts) -> Saved:
    pieces = (Piece(at, e.shape, e.file, e.start, e.nbytes) for at, e in parts.boxes)
    return Saved(parts.shape, parts.dtype, tuple(pieces))


def _said(piece: Piece) -> tuple[object, ...]:
    return piece.offsets, piece.sizes, piece.file.name, piece.start
