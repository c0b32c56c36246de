"""Locks on a folder: one process at a time writes there under names that others would write under, too.

1. A lock is a file of its own, with nothing in it and nothing written to it; it goes when the process does, however
   that ends, and what a dead process left is taken over.
2. A link at its name is not followed, and what is there and no lock is left alone: both are errors.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from shardmath_torch.files.places import CheckpointError

__all__ = ["locked"]


@contextlib.contextmanager
def locked(file: Path, what: str) -> Iterator[None]:
    """Nobody else has this lock meanwhile. `what` is done under it, such as "export to out".

    Raises CheckpointError where somebody has it, or it cannot be had; OSError as the system does.
    """
    handle = _opened(file)
    try:
        _take(file, handle, what)
        try:
            yield
        finally:
            with contextlib.suppress(OSError):  # one that stays is taken over
                if _is(file, handle):
                    file.unlink()
    finally:
        os.close(handle)


def _opened(file: Path) -> int:
    """The file, made if it is not there. Raises CheckpointError for what is no lock."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    if file.is_symlink():
        raise _no_lock(file, "is a link")
    try:
        handle = os.open(file, flags, 0o666)
    except PermissionError:  # another user's, which may be left over: to lock it, reading is enough
        handle = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    found = os.fstat(handle)
    plain = stat.S_ISREG(found.st_mode)
    if plain and found.st_size == 0 and found.st_nlink <= 1:
        return handle
    os.close(handle)
    raise _no_lock(file, "has other names, or something in it" if plain else "is no regular file")


def _no_lock(file: Path, why: str) -> CheckpointError:
    return CheckpointError(f"{file} {why}, and would be a lock; give another folder, or move it")


def _take(file: Path, handle: int, what: str) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise CheckpointError(f"another {what} is under way; wait for it to end") from error
    if not _is(file, handle):  # it was removed by whoever had it, after it was opened here
        raise CheckpointError(f"another {what} has just ended; do it again if yours is newer")


def _is(file: Path, handle: int) -> bool:
    """Whether the file of that name is the one that the handle has open."""
    try:
        return os.path.samestat(file.lstat(), os.fstat(handle))
    except FileNotFoundError:
        return False
