"""Locks on a folder: one process at a time writes there under names that others would write under, too.

1. A lock is a file of its own, with nothing in it and nothing written to it; it goes when the process does, however
   that ends, and what a dead process left is taken over.
2. A child that a process forks meanwhile has no part in its locks, so that it does not keep them when that process is
   killed.
3. A link at its name is not followed, and what is there and no lock is left alone: both are errors.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from shardmath_torch.checkpoints.files.places import CheckpointError

__all__ = ["close", "is_held", "keep", "locked"]

CAUTIOUS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""No link is followed, no pipe waited for, and no program that this process starts keeps the lock."""

_held: set[int] = set()
"""Handles of this process that have a lock, or are about to."""


def keep(handle: int) -> int:
    """The open handle itself, which children that are forked from now on close."""
    _held.add(handle)
    return handle


def is_held(handle: int) -> bool:
    """Whether it is this process's own: not that of one that this one was forked from."""
    return handle in _held


def close(handle: int) -> None:
    """Closes a handle that was kept, and so ends its lock; in a forked child it is closed already."""
    if is_held(handle):
        # First of all: a child forked from here on may have the open file, which must not keep the lock.
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_UN)
        _held.discard(handle)
        os.close(handle)


def _close_in_child() -> None:
    for handle in _held:
        with contextlib.suppress(OSError):
            os.close(handle)
    _held.clear()


os.register_at_fork(after_in_child=_close_in_child)


@contextlib.contextmanager
def locked(file: Path, what: str) -> Iterator[None]:
    """Nobody else has this lock meanwhile. `what` is done under it, such as "export to out".

    Raises CheckpointError where somebody has it, or it cannot be had; OSError as the system does.
    """
    handle = keep(_open(file))
    try:
        _take(file, handle, what)
        try:
            yield
        finally:
            # One that cannot be removed and stays is taken over by the next.
            with contextlib.suppress(OSError):
                if is_held(handle) and _is_open_as(file, handle):
                    file.unlink()
    finally:
        close(handle)


def _open(file: Path) -> int:
    """The file, made if it is not there. Raises CheckpointError for what is not a lock."""
    if file.is_symlink():
        raise _refuse(file, "is a link")
    try:
        handle = os.open(file, os.O_RDWR | os.O_CREAT | CAUTIOUS, 0o666)
    except PermissionError:
        # Another user's, which may be left over: to lock it, reading is enough.
        handle = os.open(file, os.O_RDONLY | CAUTIOUS)
    found = os.fstat(handle)
    is_plain = stat.S_ISREG(found.st_mode)
    if is_plain and found.st_size == 0 and found.st_nlink <= 1:
        return handle
    os.close(handle)
    why = "has other names, or something in it" if is_plain else "is not a regular file"
    raise _refuse(file, why)


def _refuse(file: Path, why: str) -> CheckpointError:
    """The error of what lies at the lock's name and is not a lock."""
    return CheckpointError(f"{file} {why}, and would be a lock; give another folder, or move it")


def _take(file: Path, handle: int, what: str) -> None:
    """Locks the open file. Raises CheckpointError where somebody else has it, or has just had it."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise CheckpointError(f"another {what} is under way; wait for it to end") from error
    # Whoever had it may have removed it after it was opened here: then a third may lock a new file of that name.
    if not _is_open_as(file, handle):
        raise CheckpointError(f"another {what} has just ended; do it again if yours is newer")


def _is_open_as(file: Path, handle: int) -> bool:
    """Whether the file of that name is the one that the handle has open."""
    try:
        return os.path.samestat(file.lstat(), os.fstat(handle))
    except FileNotFoundError:
        return False
