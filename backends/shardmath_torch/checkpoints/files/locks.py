"""Locks on a folder: one process at a time writes there under names that other processes would use, too.

1. A lock is a separate empty file, to which nothing is written. It is released when the process ends, however that
   happens, and a file that a dead process left is taken over.
2. Children that a process forks do not inherit its locks, so they do not keep them when that process is killed.
3. A link at the lock's name is not followed, and any other file there is left as it is: both raise.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from shardmath_torch.checkpoints.files.places import CheckpointError

__all__ = ["close", "keep", "locked"]

CAUTIOUS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""Flags: follow no link, wait for no pipe, and let no program that this process starts inherit the lock."""

_held: set[int] = set()
"""Open handles of this process that hold a lock, or are about to."""


def keep(handle: int) -> int:
    """Register the file descriptor `handle`, and return `handle`; child processes forked from now on close it."""
    _held.add(handle)
    return handle


def _is_held(handle: int) -> bool:
    """Whether this process itself, not one that it was forked from, registered `handle` with `keep`."""
    return handle in _held


def close(handle: int) -> None:
    """Close the file descriptor `handle`, which releases its lock. Does nothing in a forked child, which has closed
    it."""
    if _is_held(handle):
        # Unlock first: a child forked from here on inherits the open file, which must not keep the lock.
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
    """Hold a lock on `file` during the `with` block; creates the file if it is missing, and removes it at the end.
    `what` names the work in messages, such as "export to out".

    Raises CheckpointError if another process holds the lock, or the file cannot be one; OSError as the system does.
    """
    handle = keep(_open(file))
    try:
        _lock_handle(file, handle, what)
        try:
            yield
        finally:
            # Not in a child forked in the block. A file that cannot be removed is taken over by the next process.
            with contextlib.suppress(OSError):
                if _is_held(handle) and _is_open_as(file, handle):
                    file.unlink()
    finally:
        close(handle)


def _open(file: Path) -> int:
    """Open the lock file, or create it. Raises CheckpointError for a file that is not a lock."""
    if file.is_symlink():
        raise _not_a_lock(file, "is a link")
    try:
        handle = os.open(file, os.O_RDWR | os.O_CREAT | CAUTIOUS, 0o666)
    except PermissionError:
        # Another user's lock file, perhaps a leftover: a handle for reading is enough to lock it.
        handle = os.open(file, os.O_RDONLY | CAUTIOUS)
    status = os.fstat(handle)
    is_plain = stat.S_ISREG(status.st_mode)
    if is_plain and status.st_size == 0 and status.st_nlink <= 1:
        return handle
    os.close(handle)
    why = "has content or other hard links" if is_plain else "is not a regular file"
    raise _not_a_lock(file, why)


def _not_a_lock(file: Path, why: str) -> CheckpointError:
    """The error for a file at the lock's name that is not a lock."""
    what = f"{file} {why}, but an empty lock file of that name is needed"
    return CheckpointError(f"{what}; move it away, or give another folder")


def _lock_handle(file: Path, handle: int, what: str) -> None:
    """Lock the open file. Raises CheckpointError if another process holds it, or has just released it."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        running = f"another {what} is running and holds the lock {file}"
        raise CheckpointError(f"{running}; wait for it to end, and call again") from error
    # The last holder may have removed the file after it was opened here; then a third may lock a new file of that name.
    if not _is_open_as(file, handle):
        ended = f"another {what} has just ended and removed the lock {file}"
        raise CheckpointError(f"{ended}; call again to replace its result by yours")


def _is_open_as(file: Path, handle: int) -> bool:
    """Whether the open `handle` is of the file that is now at the path `file`."""
    try:
        return os.path.samestat(file.lstat(), os.fstat(handle))
    except FileNotFoundError:
        return False
