"""A checkpoint as a value: which box of which tensor lies at which bytes of which file.

1. A tensor is stored in boxes. A box is a range of bytes of a file, or an archive of torch.save.
2. A `Checkpoint` holds what indices and headers say, without data. It is checked before it is used: the boxes of a
   tensor have every element once, and files are as long as they should be (`Checkpoint.check`).
3. An archive may contradict the metadata: torch writes wrong metadata for uneven `_StridedShard`, and loses rows.
   `Checkpoint.check_archives` reads the archives' headers.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from shardmath.base.text import plural
from shardmath.layouts.algebra.box import Box, first_gap, first_overlap, tiles
from shardmath.layouts.algebra.mesh import Mesh
from shardmath.layouts.layout import Layout
from shardmath.models.systems.hf import Shapes
from shardmath_torch.checkpoints.files.json_text import shown
from shardmath_torch.checkpoints.files.places import CheckpointError, Place, check_length, sizes_of
from shardmath_torch.checkpoints.safetensors.strided import Strided, describe_archives

__all__ = ["Blobs", "Checkpoint", "StoredBox", "StoredTensor", "layout_of_bytes"]

Blobs: TypeAlias = Mapping[str, Mapping[int, str]]
"""Per-rank bytes: the stored name of every rank's, by name and rank."""


class StoredBox(NamedTuple):
    """The location of a box (a range in each dimension) of a tensor in a checkpoint: the box's offsets and sizes in the
    tensor, and the file and byte range from which to read it.

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
    def has_elements(self) -> bool:
        """Whether the box has elements: none of its sizes is 0."""
        return 0 not in self.sizes

    @property
    def ranges(self) -> Box:
        """The box as one (begin, end) pair of positions in the tensor per dimension."""
        stops = [start + n for start, n in zip(self.offsets, self.sizes, strict=True)]
        return tuple(zip(self.offsets, stops, strict=True))

    @property
    def stop(self) -> int:
        """The position in the file after the box's last byte."""
        return self.start + self.length

    def __str__(self) -> str:
        ranges = [f"{start}:{stop}" for start, stop in self.ranges]
        return f"[{', '.join(ranges)}] in {self.file.name}"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a checkpoint: its global shape, its dtype, and the boxes that it is stored in."""

    shape: tuple[int, ...]
    dtype: str
    pieces: tuple[StoredBox, ...]


@dataclass(frozen=True, slots=True, repr=False)
class Checkpoint:
    """The tensors of a checkpoint by name: shapes, dtypes, and the files and bytes that hold them, without data.

    `sizes` says how long files should be, if that is known. Checkpoints with the same `digest` were read from the same
    index or headers.
    """

    path: Place
    tensors: Mapping[str, StoredTensor]
    blobs: Blobs
    sizes: Mapping[Place, int]
    digest: str = ""

    @property
    def shapes(self) -> Shapes:
        """The global shape and dtype of each tensor by name. Values saved as bytes count as 1-d uint8 tensors; bytes
        that several ranks saved under one name appear once, under that name."""
        hidden: set[str] = set()
        for stored_names in self.blobs.values():
            hidden.update(stored_names.values())
        # One rank's bytes are stored under the name itself, which is shown.
        hidden -= set(self.blobs)
        return {
            name: (tensor.shape, tensor.dtype)
            for name, tensor in self.tensors.items()
            if name not in hidden
        }

    def __repr__(self) -> str:
        return f"<checkpoint of {plural(len(self), 'tensor')} at {self.path}>"

    def __len__(self) -> int:
        """The number of names; per-rank bytes count once per name."""
        return len(self.shapes)

    def __iter__(self) -> Iterator[str]:
        """The names of the tensors, and of bytes that ranks saved."""
        return iter(self.shapes)

    def __contains__(self, name: object) -> bool:
        """Whether there is a tensor of that name."""
        return name in self.tensors

    def __getitem__(self, name: str) -> StoredTensor:
        """The tensor of that name. Raises CheckpointError if there is none."""
        found = self.tensors.get(name)
        if found is not None:
            return found
        near = difflib.get_close_matches(name, self.tensors, 3) or sorted(self.tensors)[:3]
        has = ", ".join(map(repr, near)) or "nothing"
        what = f"{self.path} has no {name!r} among its {plural(self.tensors, 'tensor')}"
        fix = "load a tensor by its stored name with names={wanted: stored}"
        raise CheckpointError(f"{what}; it has {has}: {fix}")

    def find_blob(self, name: str, rank: int) -> str:
        """Return the checkpoint's name for the bytes that `rank` saved as `name`, or for the bytes of the lowest rank
        that saved some if `rank` saved none. Returns `name` itself if ranks did not save it separately."""
        by_rank = self.blobs.get(name)
        if not by_rank:
            return name
        owner = rank if rank in by_rank else min(by_rank)
        return by_rank[owner]

    def check(self, names: Iterable[str]) -> None:
        """Raise CheckpointError if an element of the tensors `names` is not stored exactly once, or if a file that
        stores them does not have its recorded length. A file without a recorded length only has to be long enough."""
        ends: dict[Place, int] = {}
        # tensors of a model are often divided alike: one proof serves all with the same shape and boxes
        proved: set[tuple[object, ...]] = set()
        for name in names:
            tensor = self[name]
            boxes = tuple((box.offsets, box.sizes) for box in tensor.pieces)
            division = tensor.shape, boxes
            if division not in proved:
                _check_tiled(self.path, name, tensor)
                proved.add(division)
            for box in tensor.pieces:
                ends[box.file] = max(ends.get(box.file, 0), box.stop)
        size_of = sizes_of(ends)
        for file, end in ends.items():
            check_length(file, size_of, end, self.sizes.get(file))

    def check_archives(
        self, names: Iterable[str], share: tuple[int, int]
    ) -> dict[StoredBox, Strided]:
        """Check that the stored parts of tensors `names` that are torch.save archives agree with the metadata, and
        return the offset, shape and strides of each part's elements in its file. With `share` (i, n), only parts i, i +
        n, i + 2n, ... are checked.

        Raises CheckpointError if an archive has another dtype or shape than the metadata says.
        """
        archives: list[tuple[str, StoredBox]] = []
        for name in sorted(set(names)):
            tensor = self[name]
            archives += [(name, box) for box in tensor.pieces if box.archive]
        index, count = share
        checked = archives[index::count]
        return self.describe(checked)

    def describe(self, archives: Iterable[tuple[str, StoredBox]]) -> dict[StoredBox, Strided]:
        """Return a dict from each box (part of a tensor that torch.save stored as an archive) in `archives` to the
        offset, shape and strides of its elements in its file. `archives` has a pair (tensor's name, box) for each.

        Raises CheckpointError if an archive is damaged, overlaps another, or contradicts the metadata.
        """
        by_file: dict[Place, list[tuple[str, StoredBox]]] = {}
        for name, box in archives:
            by_file.setdefault(box.file, []).append((name, box))
        by_box: dict[StoredBox, Strided] = {}
        for file, stored in by_file.items():
            spans = [(box.start, box.length) for _, box in stored]
            described = describe_archives(file, spans)
            for (name, box), strided in zip(stored, described, strict=True):
                _check_archive(name, self[name], box, strided)
                by_box[box] = strided
        return by_box


def layout_of_bytes(checkpoint: Checkpoint, name: str, rank: int) -> Layout:
    """Return a layout in which `rank` alone holds the bytes saved as `name`. Raises CheckpointError if `checkpoint` has
    nothing with this name, or has a tensor with this name that is not 1-d uint8."""
    tensor = checkpoint[name]
    if (tensor.dtype, len(tensor.shape)) != ("uint8", 1):
        found = f"{tensor.dtype}{list(tensor.shape)}"
        what = f"{name!r} has the layout None, for bytes, but is stored as a tensor, {found}"
        raise CheckpointError(f"{what}; give it a layout of this shape and dtype")
    mesh = Mesh(ranks=[rank])
    return Layout(tensor.shape, mesh, (), dtype=tensor.dtype)


def _check_archive(name: str, tensor: StoredTensor, box: StoredBox, found: Strided) -> None:
    """Raise CheckpointError for an archive of another shape or dtype than the metadata says."""
    if (found.shape, found.dtype) == (box.sizes, tensor.dtype):
        return
    what = f"tensor {name!r}: the metadata has {tensor.dtype}{list(box.sizes)} at {box}"
    stored = f"{found.dtype}{shown(list(found.shape))} is stored there"
    why = "torch writes this for a _StridedShard that does not divide evenly"
    fix = "elements of the tensor are lost: save it again with shardmath_torch.save"
    raise CheckpointError(f"{what}, but {stored}; {why}, and {fix}")


def _check_tiled(path: Place, name: str, tensor: StoredTensor) -> None:
    """Raise CheckpointError unless the boxes lie in the tensor, and have each of its elements once."""
    boxes = [box.ranges for box in tensor.pieces if box.has_elements]
    outside = _find_outside(boxes, tensor.shape)
    # The ranges of positions of each dimension: no range if its size is 0.
    elements = [[(0, n)] if n else [] for n in tensor.shape]
    if outside is None and tiles(elements, boxes):
        return
    fix = "elements are lost, or saved twice: save it again with shardmath_torch.save"
    what = f"{path}: tensor {name!r} of shape {list(tensor.shape)}"
    if outside is not None:
        raise CheckpointError(f"{what} has a box {outside} outside it; {fix}")
    overlap = first_overlap(boxes)
    if overlap is not None:
        one, other = (boxes[i] for i in overlap)
        raise CheckpointError(f"{what} has boxes that overlap, {one} and {other}; {fix}")
    raise CheckpointError(f"{what} has no box with element {first_gap(elements, boxes)}; {fix}")


def _find_outside(boxes: Sequence[Box], shape: tuple[int, ...]) -> Box | None:
    """The first box that ends outside the shape; offsets are never negative."""
    for box in boxes:
        for (_, stop), n in zip(box, shape, strict=True):
            if stop > n:
                return box
    return None
