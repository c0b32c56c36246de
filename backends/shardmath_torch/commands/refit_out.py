"""Output of a refit: `rank<r>.safetensors` of each destination rank, in a folder.

1. A folder in which one of these names is a file of the model, by any link, raises before anything starts.
2. Ranks write drafts until every byte has been compared. Until then, and if the refit fails, files of an earlier refit
   stay.
3. Then all files of an earlier refit are removed, even of other ranks, and then the drafts are renamed. If that is
   interrupted, some files are missing, but files of two refits are never mixed.
4. From the first check to the last rename the folder is locked: a second refit to it raises while one is running.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from shardmath import ShardError
from shardmath_torch.checkpoints.files.locks import locked
from shardmath_torch.checkpoints.files.places import Place, make_folder, sync
from shardmath_torch.checkpoints.safetensors.weights import Weights

__all__ = ["check_out", "finish", "reserved", "shard_file", "undo", "write_draft"]

UNFINISHED, LOCK = ".unfinished", ".shardmath-refit.lock"
NAME = re.compile(rf"rank\d+\.safetensors({re.escape(UNFINISHED)})?")
"""The names of files that refits write or remove."""


def shard_file(folder: Path, rank: int) -> Path:
    """Return the path in `folder` of the file for the weights that arrived at `rank`."""
    return folder / f"rank{rank}.safetensors"


def _draft(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.safetensors{UNFINISHED}"


def _list_ours(folder: Path) -> list[Path]:
    """The files in the folder with names that refits use."""
    return [file for file in folder.iterdir() if NAME.fullmatch(file.name)]


@contextlib.contextmanager
def reserved(folder: Path) -> Iterator[None]:
    """Make the folder, and lock it during the `with` block. Raises ShardError if the folder cannot be made or locked,
    for example because another refit (move of weights) to it is running."""
    with contextlib.ExitStack() as stack:
        try:
            make_folder(folder)
            stack.enter_context(locked(folder / LOCK, f"refit to {folder}"))
        except OSError as error:
            raise _unwritable(folder, error) from error
        yield


def _unwritable(folder: Path, error: OSError) -> ShardError:
    what = f"--out {folder}: {error.strerror or error}"
    return ShardError(f"{what}; give a folder that can be written")


def check_out(folder: Path, weights: Weights) -> None:
    """Raise ShardError if `folder` cannot be read, or if a refit (move of weights) would write its output over one of
    two things: a file of the model `weights`, or an entry that is not a file, such as a folder."""
    inputs = {weights.path, *(entry.file for entry in weights.entries.values())}
    try:
        for file in _list_ours(folder):
            _check_replaceable(folder, file, inputs)
    except OSError as error:
        raise _unwritable(folder, error) from error


def _check_replaceable(folder: Path, file: Path, inputs: Iterable[Place]) -> None:
    """Raise ShardError for anything but a file or link, and for a file of the model, by any link."""
    what = f"--out {folder}: {file.name} is"
    if not file.is_symlink() and not file.is_file():
        kind = "a folder" if file.is_dir() else "not a regular file"
        fix = "give another folder, or move it away"
        raise ShardError(f"{what} {kind}, where a refit writes; {fix}")
    if not file.exists():  # a link that leads nowhere
        return
    for given in inputs:
        if isinstance(given, Path) and os.path.samefile(given, file):
            why = "a file of the model, and would be replaced or removed"
            raise ShardError(f"{what} {given}, {why}; give another folder")


def write_draft(folder: Path, rank: int, tensors: dict[str, torch.Tensor]) -> None:
    """Write the tensors that arrived at `rank` to a file in `folder` with a temporary name; `finish` later gives it the
    final name. Raises ShardError if the file cannot be written."""
    file = _draft(folder, rank)
    try:
        # Removed, never written to: it may be a link to another file.
        file.unlink(missing_ok=True)
        save_file(tensors, file)
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
    except (OSError, SafetensorError) as error:
        what = f"--out {folder}: {file.name} cannot be written: {error}"
        raise ShardError(f"{what}; give a folder that can be written, with room") from error


def finish(folder: Path, ranks: Sequence[int]) -> None:
    """Replace the files of earlier refits in `folder` by the drafts (files under temporary names) of `ranks`. Raises
    ShardError if that fails."""
    fix = "some files of this refit are missing there: run it again"
    try:
        _replace(folder, ranks)
    except OSError as error:
        what = f"--out {folder}: its files cannot be replaced: {error}"
        raise ShardError(f"{what}; give a folder that can be written; {fix}") from error
    except BaseException as error:
        error.add_note(f"--out {folder}: {fix}")
        raise


def _replace(folder: Path, ranks: Sequence[int]) -> None:
    drafts = {_draft(folder, rank) for rank in ranks}
    for file in _list_ours(folder):
        if file not in drafts:
            file.unlink()
    # Removals are on disk before the first rename.
    sync(folder)
    for rank in ranks:
        os.replace(_draft(folder, rank), shard_file(folder, rank))


def undo(folder: Path, ranks: Iterable[int]) -> None:
    """Remove the unfinished files of `ranks` from `folder`, after a failed refit."""
    for rank in ranks:
        with contextlib.suppress(OSError):
            _draft(folder, rank).unlink(missing_ok=True)
