"""Weights: a rank's local tensors from safetensors files, by slices.

1. A checkpoint is one file, a folder with `model.safetensors`, or a folder with `model.safetensors.index.json` and the
   files that it names.
2. Only headers are read to know names, shapes and types. A header is proved against its file's size before anything
   else is read, so a cut or damaged file is an error of ours that names the file, never a wrong tensor.
3. A rank reads the boxes of its runs and nothing else; local cells that are not the tensor's own are zero.
4. Names that share one stored tensor (tied embeddings) are given by `tied`.

    8 bytes      length n of the header, little endian
    n bytes      JSON: name -> {"dtype", "shape", "data_offsets": [begin, end]}, and "__metadata__"
    the rest     the tensors, back to back                          (github.com/huggingface/safetensors, Format)
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, TypeAlias, TypeGuard

import torch
from safetensors import SafetensorError, safe_open

from shardmath import Layout, ShardError
from shardmath.base.dtypes import itemsize
from shardmath.base.given import plural
from shardmath.families.hf import Shapes
from shardmath_torch.dtypes import dtype_of, flat
from shardmath_torch.files.json_text import MOST, elements, read_json, shown
from shardmath_torch.files.places import Place, length_of, opened, place

__all__ = [
    "DTYPES",
    "Entry",
    "Progress",
    "Weights",
    "WeightsError",
    "boxes",
    "check",
    "load",
    "open_weights",
    "read_header",
    "room",
    "tied",
    "assemble",
    "zeros",
]

DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "U16": "uint16",
    "U32": "uint32",
    "U64": "uint64",
    "I8": "int8",
    "I16": "int16",
    "I32": "int32",
    "I64": "int64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
}
"""shardmath's name of each safetensors type. Not F4 and F6: several elements share a byte."""

FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
PART = re.compile(r"(.*)-\d{5,}-of-(\d{5,9})\.safetensors", re.DOTALL)
"""A file of a model in several."""
HEADER_LIMIT = 100_000_000
"""Bytes; the limit of the safetensors library."""

Slices: TypeAlias = tuple[slice, ...]
Progress: TypeAlias = Callable[[int], None]
"""Called with the bytes just done."""


class WeightsError(ShardError):
    """A checkpoint that is missing, cut short or damaged, or that does not hold what is asked of it."""


@dataclass(frozen=True, slots=True)
class Entry:
    """Where one tensor lies: `key` in `file`, from byte `start` on, with its global shape and dtype."""

    file: Place
    key: str
    shape: tuple[int, ...]
    dtype: str
    start: int

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * itemsize(self.dtype)


@dataclass(frozen=True, slots=True)
class Weights:
    """The tensors of a checkpoint by name, as its headers describe them; no data."""

    path: Place
    entries: Mapping[str, Entry]

    @property
    def shapes(self) -> Shapes:
        """Global shape and dtype of each tensor, by name."""
        return {name: (entry.shape, entry.dtype) for name, entry in self.entries.items()}

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.nbytes for entry in self.entries.values())


def open_weights(path: str | Place) -> Weights:
    """The checkpoint at `path`: a safetensors file, an index, or a folder that holds either.

    Reads and checks headers only. Raises WeightsError with the file, what is wrong with it and the fix.
    """
    path = place(path)
    path = path.absolute() if isinstance(path, Path) else path
    try:
        return _opened(path)
    except OSError as error:
        what = f"{shown(str(error.filename or path))} cannot be read: {error.strerror}"
        raise WeightsError(f"{what}; check the file, its name and its permissions") from error


def _opened(path: Place) -> Weights:
    if path.is_dir():
        path = _in_folder(path)
    if not path.is_file():
        there = isinstance(path, Path) and path.exists()
        fault = "is no regular file" if there else "does not exist"
        raise WeightsError(
            f"{path} {fault}; give a safetensors file, or a folder of safetensors or of a checkpoint"
        )
    return Weights(path, _read_index(path) if path.suffix == ".json" else read_header(path)[0])


def _in_folder(folder: Place) -> Place:
    """The file or index of a folder, chosen as transformers does: one file before an index."""
    for name in (FILE, INDEX):
        if (folder / name).is_file():
            return folder / name
    others = sorted(file.name for file in folder.glob("*.safetensors"))
    lost = _lost(others)
    if lost:
        what = f"{folder} has {', '.join(others[:3])}, but neither {', '.join(lost)} nor {INDEX}"
        raise WeightsError(f"{what}: a part of a model; fetch the rest, or export it again")
    if len(others) == 1:
        return folder / others[0]
    found = (
        ", ".join(others)
        or ", ".join(sorted(file.name for file in folder.iterdir())[:6])
        or "nothing"
    )
    raise WeightsError(
        f"{folder} has neither {FILE} nor {INDEX}, but {found}; give a folder with either, or one file"
    )


def _lost(names: list[str]) -> list[str]:
    """The first few files that are not there of a model in several, of which these are some."""
    found = next(filter(None, map(PART.fullmatch, names)), None)
    if found is None:
        return []
    every = (f"{found[1]}-{i + 1:05d}-of-{found[2]}.safetensors" for i in range(int(found[2])))
    return list(itertools.islice((name for name in every if name not in names), 3))


def _read_index(index: Place) -> dict[str, Entry]:
    places = _weight_map(index)
    names = sorted(set(places.values()))
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing:
        shown = ", ".join(missing[:3] + ["..."] * (len(missing) > 3))
        lost = f"of which {len(missing)} cannot be found ({shown})"
        raise WeightsError(f"{index} names {plural(names, 'file')}, {lost}; fetch them again")
    headers = {name: read_header(index.parent / name)[0] for name in names}
    for name, file in places.items():
        if name not in headers[file]:
            where = next(
                (other for other in names if name in headers[other]), "no file of the index"
            )
            raise WeightsError(
                f"{index} says that {file} holds {name!r}, but {where} does; repair the index"
            )
    return {name: headers[file][name] for name, file in places.items()}


def _weight_map(index: Place) -> dict[str, str]:
    places = _object(_bytes(index), index, "the index").get("weight_map")
    if not isinstance(places, dict) or not places:
        raise WeightsError(f"{index} has no weight_map of names to files; fetch it again")
    for name, file in places.items():
        if not isinstance(file, str) or Path(file).name != file or "\0" in file:
            what = f"{index} puts {shown(name)} in {shown(file)}"
            raise WeightsError(f"{what}; a file of an index is a name in the index's folder")
    return places


def _bytes(file: Place, start: int = 0, count: int = -1) -> bytes:
    try:
        with opened(file) as stream:
            stream.seek(start)
            return stream.read(count)
    except OSError as error:
        raise WeightsError(
            f"{file} cannot be read: {error.strerror}; check the file and its permissions"
        ) from error


def _object(text: bytes, file: Place, what: str) -> dict[str, object]:
    """The JSON object in `text`, no key twice."""
    try:
        found = read_json(text)
    except (ValueError, RecursionError) as error:
        raise _damaged(file, f"{what} is not JSON ({error})") from error
    if not isinstance(found, dict):
        raise _damaged(file, f"{what} is a JSON {type(found).__name__}, not an object")
    return found


def _damaged(file: Place, what: str) -> WeightsError:
    return WeightsError(f"{file} is damaged or not a safetensors file: {what}; fetch it again")


def read_header(file: Place) -> tuple[dict[str, Entry], dict[str, object]]:
    """Every tensor of the file, by name, after its header is proved against the file's size; and the metadata there.

    Raises WeightsError for a file that is damaged, cut short, or no safetensors file.
    """
    prefix, size = _bytes(file, 0, 8), length_of(file)
    if len(prefix) < 8:
        raise WeightsError(
            f"{file} is cut short: {size} bytes present, a header's length alone takes 8; fetch it again"
        )
    length = int.from_bytes(prefix, "little")
    if length > HEADER_LIMIT:
        raise _damaged(
            file, f"it announces a header of {length} bytes, the format allows {HEADER_LIMIT}"
        )
    if 8 + length > size:
        raise _short(file, size, 8 + length, "header")
    header = _object(_bytes(file, 8, length), file, "the header")
    metadata = header.pop("__metadata__", None)
    spans = {name: _span(file, name, value, 8 + length) for name, value in header.items()}
    _check_spans(file, size, 8 + length, {name: span for name, (_, span) in spans.items()})
    return {name: entry for name, (entry, _) in spans.items()}, metadata if isinstance(
        metadata, dict
    ) else {}


def _short(file: Place, size: int, expected: int, what: str) -> WeightsError:
    lack = f"{size} bytes present, {expected} expected by its {what}, {expected - size} missing"
    return WeightsError(f"{file} is cut short: {lack}; fetch it again")


def _span(file: Place, name: str, value: object, data: int) -> tuple[Entry, tuple[int, int]]:
    """The tensor and its [begin, end) in the data, as one header entry says; the data begin at byte `data`."""
    fields = value if isinstance(value, dict) else {}
    dtype, shape, offsets = (fields.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or not _sizes(shape) or not _sizes(offsets) or len(offsets) != 2:
        what = f"the header's entry of {shown(name)} is {shown(value)}, not a dtype, a shape and two data_offsets"
        raise _damaged(file, what)
    if dtype not in DTYPES:
        what = f"{file} holds {shown(name)} as {shown(dtype)[1:-1]}, which cannot be sliced"
        raise WeightsError(f"{what}; types are {', '.join(DTYPES)}")
    begin, end = offsets
    entry = Entry(file, name, tuple(shape), DTYPES[dtype], data + begin)
    try:
        nbytes = elements(shape) * itemsize(entry.dtype)
    except ValueError as error:
        raise _damaged(file, f"the shape of {shown(name)}, {error}") from error
    if end - begin != nbytes:
        what = f"{shown(name)} is {dtype}{shown(shape)}, {nbytes} bytes"
        raise _damaged(file, f"{what}, its data_offsets {begin}:{end} hold {end - begin}")
    return entry, (begin, end)


def _sizes(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(n) is int and 0 <= n <= MOST for n in value)


def _check_spans(file: Place, size: int, start: int, spans: Mapping[str, tuple[int, int]]) -> None:
    """The tensors lie back to back and end where the file does."""
    at = 0
    for name, (begin, end) in sorted(spans.items(), key=lambda item: item[1]):
        if begin != at:
            raise _damaged(
                file,
                f"{name!r} begins at byte {begin} of the data, the tensor before it ends at {at}",
            )
        at = end
    if start + at > size:
        raise _short(file, size, start + at, "header")
    if start + at < size:
        raise _damaged(
            file,
            f"{size} bytes present, {start + at} expected by its header, {size - start - at} too many",
        )


def tied(weights: Weights, names: Mapping[str, str]) -> Weights:
    """The checkpoint with more names for tensors it has: `{"lm_head.weight": "model.embed_tokens.weight"}`.

    Raises WeightsError where the tensor is not there, or the new name is.
    """
    for name, stored in names.items():
        if stored not in weights.entries or name in weights.entries:
            fault = f"has {name!r} already" if name in weights.entries else f"has no {stored!r}"
            raise WeightsError(
                f"{weights.path} {fault}; tie a new name to a tensor of the checkpoint"
            )
    return replace(
        weights,
        entries={**weights.entries, **{name: weights.entries[at] for name, at in names.items()}},
    )


def boxes(layout: Layout, rank: int) -> Iterator[tuple[Slices, Slices]]:
    """What `rank` holds as boxes: where each lies in the local tensor, and where in the whole one."""
    for segments in itertools.product(*(runs.segments for runs in layout.runs(rank))):
        yield (
            tuple(slice(local, local + n) for local, _, n in segments),
            tuple(slice(start, start + n) for _, start, n in segments),
        )


class _Slice(Protocol):
    def __getitem__(self, index: Slices) -> torch.Tensor: ...


def _open(weights: Weights, layouts: Mapping[str, Layout]) -> Iterator[tuple[str, Layout, _Slice]]:
    """Every name with its layout and the stored tensor, to be sliced; a file is opened once."""
    fits(weights, layouts)
    names = sorted(layouts, key=lambda name: str(weights.entries[name].file))
    for file, group in itertools.groupby(names, key=lambda name: weights.entries[name].file):
        try:
            with safe_open(file, framework="pt") as stored:
                for name in group:
                    yield name, layouts[name], stored.get_slice(weights.entries[name].key)
        except (SafetensorError, OSError) as error:
            raise _damaged(file, str(error)) from error


def fits(weights: Weights, layouts: Mapping[str, Layout]) -> None:
    """Raises WeightsError where the checkpoint lacks a name, has it with another shape or dtype, or it is Partial."""
    for name, layout in layouts.items():
        _fits(weights, name, layout)


def _fits(weights: Weights, name: str, layout: Layout) -> None:
    entry = weights.entries.get(name)
    if entry is None:
        raise WeightsError(
            f"{weights.path} has no {name!r} among its {plural(weights.entries, 'tensor')}; drop it or tie it"
        )
    if (layout.shape, layout.dtype) != (entry.shape, entry.dtype):
        found = f"{entry.dtype}{list(entry.shape)}"
        raise WeightsError(
            f"{name!r} is {found} in {entry.file}, its layout says {layout}; make the layout from `shapes`"
        )
    if layout.partial:
        raise WeightsError(
            f"{name!r} is Partial in {layout}, a file holds whole values; divide or replicate it"
        )


def load(
    weights: Weights, layouts: Mapping[str, Layout], rank: int, *, progress: Progress | None = None
) -> dict[str, torch.Tensor]:
    """This rank's local tensors, by name, on the CPU: shape `layout.local_shape(rank)`, holes zero.

    Raises WeightsError where the checkpoint lacks a name or has it with another shape or dtype.
    """
    out = {}
    for name, layout, stored in _open(weights, layouts):
        out[name] = room(layout, rank)
        for local, glob in boxes(layout, rank):
            out[name][local] = stored[glob]
        if progress:
            progress(out[name].nbytes)
    return {name: out[name] for name in layouts}


def room(layout: Layout, rank: int) -> torch.Tensor:
    """A local tensor of `rank` to be filled: what will not be, holes, is zero."""
    if layout.holes(rank):
        return zeros(layout, rank)
    return torch.empty(layout.local_shape(rank), dtype=dtype_of(layout.dtype))


def zeros(layout: Layout, rank: int) -> torch.Tensor:
    """An empty local tensor of `rank`: bytes of zero, for every type (float8_e8m0fnu has no number 0)."""
    shape = layout.local_shape(rank)
    return (
        torch.zeros(math.prod(shape) * layout.itemsize, dtype=torch.uint8)
        .view(dtype_of(layout.dtype))
        .view(shape)
    )


def check(
    weights: Weights,
    layouts: Mapping[str, Layout],
    rank: int,
    tensors: Mapping[str, torch.Tensor],
    *,
    progress: Progress | None = None,
) -> int:
    """Compare the local tensors of `rank` with the checkpoint, byte by byte; the number of bytes compared.

    Raises WeightsError with the tensor, the rank and the first global index that differs.
    """
    total = 0
    for name, layout, stored in _open(weights, layouts):
        done = 0
        for local, glob in boxes(layout, rank):
            done += _same(name, rank, glob, tensors[name][local], stored[glob])
        if progress:
            progress(done)
        total += done
    return total


def _same(name: str, rank: int, glob: Slices, arrived: torch.Tensor, stored: torch.Tensor) -> int:
    """Bytes of the box, which are equal on both sides."""
    ours, theirs = _raw(arrived), _raw(stored)
    if not torch.equal(ours, theirs):
        at = int((ours != theirs).nonzero()[0]) // stored.itemsize
        index = [
            part.start + int(i) for part, i in zip(glob, _unravel(at, stored.shape), strict=True)
        ]
        values = f"{arrived.reshape(-1)[at].item()} arrived, the file has {stored.reshape(-1)[at].item()}"
        raise WeightsError(
            f"{name!r} differs from the file on rank {rank} at {index}: {values}; report this as a bug"
        )
    return ours.numel()


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    return flat(tensor.detach().contiguous()).view(torch.uint8)


def _unravel(at: int, shape: tuple[int, ...]) -> list[int]:
    return [at // math.prod(shape[d + 1 :]) % n for d, n in enumerate(shape)]


def assemble(layout: Layout, shards: Mapping[int, torch.Tensor]) -> torch.Tensor:
    """The whole tensor from the local tensors of all ranks of its layout, by rank."""
    out = torch.empty(layout.shape, dtype=dtype_of(layout.dtype))
    for rank in layout.mesh.ranks:
        for local, glob in boxes(layout, rank):
            out[glob] = shards[rank][local]
    return out
