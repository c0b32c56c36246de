"""Where a refit leaves what arrived: `rank<r>.safetensors` of each destination rank, in a folder.

1. A folder in which one of these names is a file of the model, by whatever link, is refused before anything starts.
2. Ranks write under names of their own until every byte has been compared. Until then, and where it fails, what lay
   there lies there still.
3. Then all files of an earlier refit are removed, also those of other ranks, and then what has arrived is renamed. Cut
   off in between, some files are missing, and never is there something of two refits.
4. From the first check to the last name the folder is locked: a second refit to it is an error while one is under way.
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
from shardmath_torch.checkpoints.files.places import Place, sync
from shardmath_torch.checkpoints.safetensors.weights import Weights

__all__ = ["check_out", "finish", "leave", "reserved", "shard_file", "undo"]

UNFINISHED, LOCK = ".unfinished", ".shardmath-refit.lock"
NAME = re.compile(rf"rank\d+\.safetensors({re.escape(UNFINISHED)})?")
"""What is ours in the folder: written, or removed."""


def shard_file(folder: Path, rank: int) -> Path:
    """Where `rank` leaves what arrived."""
    return folder / f"rank{rank}.safetensors"


def _draft(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.safetensors{UNFINISHED}"


def _list_ours(folder: Path) -> list[Path]:
    """Files that have such a name as a refit gives."""
    return [file for file in folder.iterdir() if NAME.fullmatch(file.name)]


@contextlib.contextmanager
def reserved(folder: Path) -> Iterator[None]:
    """Makes the folder. Nobody else refits to it meanwhile; raises ShardError where somebody does."""
    with contextlib.ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(folder / LOCK, f"refit to {folder}"))
        except OSError as error:
            raise _unwritable(folder, error) from error
        yield


def _unwritable(folder: Path, error: OSError) -> ShardError:
    what = f"--out {folder}: {error.strerror or error}"
    return ShardError(f"{what}; give a folder that can be written")


def check_out(folder: Path, weights: Weights) -> None:
    """Raises ShardError where the folder cannot be read, or where a file of the model would be replaced there."""
    inputs = {weights.path, *(entry.file for entry in weights.entries.values())}
    try:
        for file in _list_ours(folder):
            _check_replaceable(folder, file, inputs)
    except OSError as error:
        raise _unwritable(folder, error) from error


def _check_replaceable(folder: Path, file: Path, inputs: Iterable[Place]) -> None:
    """Raises ShardError for what a refit cannot remove, and for a file of the model, by whatever link."""
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


def leave(folder: Path, rank: int, tensors: dict[str, torch.Tensor]) -> None:
    """Writes what arrived at `rank`, not yet under its name. On disk when this returns.

    Raises ShardError where it cannot be written.
    """
    file = _draft(folder, rank)
    try:
        # It may be a link, to somebody's file: what is there is removed, never written to.
        file.unlink(missing_ok=True)
        save_file(tensors, file)
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
    except (OSError, SafetensorError) as error:
        what = f"--out {folder}: {file.name} cannot be written: {error}"
        raise ShardError(f"{what}; give a folder that can be, with room") from error


def finish(folder: Path, ranks: Sequence[int]) -> None:
    """Removes what other refits left, and gives what the ranks wrote its names. Raises ShardError where it cannot."""
    fix = "what has arrived there is not whole: refit again"
    try:
        _replace(folder, ranks)
    except OSError as error:
        raise ShardError(f"--out {folder}: {error}; {fix}") from error
    except BaseException as error:
        error.add_note(f"--out {folder}: {fix}")
        raise


def _replace(folder: Path, ranks: Sequence[int]) -> None:
    drafts = {_draft(folder, rank) for rank in ranks}
    for file in _list_ours(folder):
        if file not in drafts:
            file.unlink()
    # On disk before the first new name is.
    sync(folder)
    for rank in ranks:
        os.replace(_draft(folder, rank), shard_file(folder, rank))


def undo(folder: Path, ranks: Iterable[int]) -> None:
    """Removes what the ranks have written, where the refit failed."""
    for rank in ranks:
        with contextlib.suppress(OSError):
            _draft(folder, rank).unlink(missing_ok=True)
