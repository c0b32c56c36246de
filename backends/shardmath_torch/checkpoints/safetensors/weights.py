"""Weights: the tensors of a checkpoint of safetensors by name, read from headers only.

1. A checkpoint is one file, a folder with `model.safetensors`, or a folder with `model.safetensors.index.json` and the
   files that it names.
2. Names, shapes and dtypes come from headers only. Each header is checked against its file's size (`headers`).
3. An index names files in its own folder, never paths.
4. Names that share one stored tensor (tied embeddings) are given by `tied`.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from shardmath.base.text import plural
from shardmath.models.systems.hf import Shapes
from shardmath_torch.checkpoints.files.json_text import shown
from shardmath_torch.checkpoints.files.places import Place, place
from shardmath_torch.checkpoints.safetensors.headers import (
    HeaderEntry,
    WeightsError,
    read_bytes,
    read_header,
    read_object,
)

__all__ = ["FILE", "INDEX", "Weights", "open_weights", "tied"]

FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
PART = re.compile(r"(.*)-\d{5,}-of-(\d{5,9})\.safetensors", re.DOTALL)
"""The name of one file of a model in several files."""
MOST_SHOWN, MOST_FOUND = 3, 6
"""How many names an error shows: of missing files, and of other files in the folder."""


@dataclass(frozen=True, slots=True)
class Weights:
    """The shapes, dtypes and places of tensors in safetensors files, by name, from headers only."""

    path: Place
    entries: Mapping[str, HeaderEntry]

    @property
    def shapes(self) -> Shapes:
        """The global shape and dtype of each tensor, by name."""
        return {name: (entry.shape, entry.dtype) for name, entry in self.entries.items()}

    @property
    def nbytes(self) -> int:
        """The size of all tensors in bytes."""
        return sum(entry.nbytes for entry in self.entries.values())


def open_weights(path: str | Place) -> Weights:
    """Return the shapes, dtypes and places of the tensors in safetensors at `path`: a file, an index of files, or a
    folder that holds either.

    Reads and checks headers only. Raises WeightsError with the file, what is wrong with it and the fix.
    """
    source = place(path)
    if isinstance(source, Path):
        source = source.absolute()
    try:
        return _open_place(source)
    except OSError as error:
        what = f"{shown(str(error.filename or source))} cannot be read: {error.strerror or error}"
        raise WeightsError(f"{what}; make it readable, or give another path") from error


def _open_place(path: Place) -> Weights:
    """The checkpoint at that place. Raises WeightsError as `open_weights`, OSError for a path that cannot be read."""
    file = _choose_file(path) if path.is_dir() else path
    if not file.is_file():
        is_there = isinstance(file, Path) and file.exists()
        fault = "is not a regular file" if is_there else "does not exist"
        fix = "give a safetensors file, or a folder of safetensors or of a checkpoint"
        raise WeightsError(f"{file} {fault}; {fix}")
    if file.suffix == ".json":
        return Weights(file, _read_index(file))
    entries, _ = read_header(file)
    return Weights(file, entries)


def _choose_file(folder: Place) -> Place:
    """The file or index of a folder, chosen as transformers does: one file before an index."""
    for name in (FILE, INDEX):
        if (folder / name).is_file():
            return folder / name
    others = sorted(file.name for file in folder.glob("*.safetensors"))
    missing = _list_missing_parts(others)
    if missing:
        there = ", ".join(others[:MOST_SHOWN])
        what = f"{folder} has {there}, but neither {', '.join(missing)} nor {INDEX}"
        fix = "fetch the missing files, or export it again"
        raise WeightsError(f"{what}, so a part of the model is missing; {fix}")
    if len(others) == 1:
        return folder / others[0]
    found = others or sorted(file.name for file in folder.iterdir())[:MOST_FOUND]
    what = f"{folder} has neither {FILE} nor {INDEX}, but {', '.join(found) or 'nothing'}"
    raise WeightsError(f"{what}; give a folder with either, or the path of one file")


def _list_missing_parts(names: Iterable[str]) -> list[str]:
    """The first few missing files, if these names include one of a model in several files."""
    present = set(names)
    for name in sorted(present):
        part = PART.fullmatch(name)
        if part is not None:
            # A name may say that there are 999,999,999 files: count only until a few are missing.
            stems = (f"{part[1]}-{i:05d}-of-{part[2]}" for i in range(1, int(part[2]) + 1))
            files = (f"{stem}.safetensors" for stem in stems)
            missing = (file for file in files if file not in present)
            return list(itertools.islice(missing, MOST_SHOWN))
    return []


def _read_index(index: Place) -> dict[str, HeaderEntry]:
    """Every tensor that an index names, with its entry in the header of its file."""
    files = _read_weight_map(index)
    names = sorted(set(files.values()))
    _check_present(index, names)
    headers = {}
    for name in names:
        headers[name], _ = read_header(index.parent / name)
    entries = {}
    for tensor, name in files.items():
        if tensor not in headers[name]:
            holders = [other for other in names if tensor in headers[other]]
            holder = holders[0] if holders else "no file of the index"
            what = f"{index} says that {name} holds {shown(tensor)}, but {holder} does"
            raise WeightsError(f"{what}; correct its weight_map, or fetch the files again")
        entries[tensor] = headers[name][tensor]
    return entries


def _check_present(index: Place, names: list[str]) -> None:
    """Raise WeightsError if a file that the index names is not in the index's folder."""
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing:
        first = [shown(name)[1:-1] for name in missing[:MOST_SHOWN]]
        if len(missing) > MOST_SHOWN:
            first.append("...")
        what = f"of which {len(missing)} cannot be found ({', '.join(first)})"
        raise WeightsError(f"{index} names {plural(names, 'file')}, {what}; fetch these again")


def _read_weight_map(index: Place) -> dict[str, str]:
    """The file name of each tensor in the index. Raises WeightsError for an index without, or with paths."""
    files = read_object(read_bytes(index), index, "the index").get("weight_map")
    if not isinstance(files, dict) or not files:
        what = f"{index} has the weight_map {shown(files)}, not a mapping of some names to files"
        raise WeightsError(f"{what}; fetch it again")
    for tensor, file in files.items():
        if not isinstance(file, str) or Path(file).name != file or "\0" in file:
            what = f"{index} puts {shown(tensor)} in {shown(file)}"
            raise WeightsError(f"{what}, not the name of a file in its folder; fetch it again")
    return files


def tied(weights: Weights, names: Mapping[str, str]) -> Weights:
    """Return `weights` with more names for some tensors: `names` maps each new name to a present one.

    Tied embeddings have `{"lm_head.weight": "model.embed_tokens.weight"}`.

    Raises WeightsError if the tensor is missing, or the new name is taken.
    """
    entries = dict(weights.entries)
    for name, stored in names.items():
        fault = ""
        if name in weights.entries:
            fault = f"has {name!r} already"
        elif stored not in weights.entries:
            fault = f"has no {stored!r}"
        if fault:
            fix = "tie a new name to a tensor of the checkpoint"
            what = f"{name!r} cannot be tied to {stored!r}: {weights.path} {fault}"
            raise WeightsError(f"{what}; {fix}")
        entries[name] = weights.entries[stored]
    return replace(weights, entries=entries)
