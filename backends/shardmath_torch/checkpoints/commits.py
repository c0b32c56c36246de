"""Commits: which saves into a folder are running, which one counts, and which files are leftovers.

1. A save's draft of `.metadata` exists from before its first data file until the save counts or has failed: files of a
   save that has a draft may belong to a running save. Committing a save renames its draft, in one step, and fails if
   the draft is gone: the draft is written through the handle that claimed it, never created again.
2. The writer of a draft holds a lock on it, which ends with the process. A draft without a lock is a dead save's.
3. A dead save's draft is removed first. From then on that save can never count: if it was alive after all, it fails.
   Next the save that counts is found; only then are files of dead saves removed, never files of the save that counts.
4. If nothing can be locked, as in an object store, all drafts are assumed to be running saves': what a crash leaves
   there stays until its draft is removed by hand.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from shardmath_torch.checkpoints.files import locks
from shardmath_torch.checkpoints.files.places import (
    CheckpointError,
    Place,
    Remote,
    length_of,
    opened,
    sync,
    synced,
)
from shardmath_torch.checkpoints.files.sealed import DIGITS, SEAL, save_of
from shardmath_torch.checkpoints.safetensors.hf_folder import has_export

__all__ = [
    "DATA",
    "FILE",
    "INDEX",
    "METADATA",
    "OURS",
    "UNFINISHED",
    "Claim",
    "claim",
    "find_counting",
    "make_count",
    "name_draft",
    "remove_leftovers",
    "withdraw",
]

INDEX, METADATA = "shardmath.json", ".metadata"
OURS, DATA, UNFINISHED = "shardmath-", ".safetensors", ".unfinished"
_DATA = rf"-\d{{5,}}-of-\d{{5,}}(-\d+)?{re.escape(DATA)}({re.escape(UNFINISHED)})?"
_DRAFT = rf"({re.escape(METADATA)}|\.json){re.escape(UNFINISHED)}"
FILE = re.compile(rf"{OURS}(?P<save>[0-9a-f]{{{DIGITS}}})({_DATA}|{_DRAFT})")
"""Names of our files: the save's digits; for data files the rank and file number; `.unfinished` until committed."""


def name_draft(save: str) -> str:
    """Return the name of the file that a running save keeps until its commit renames this file to `.metadata`. The
    argument `save` is the save's identifier."""
    return f"{OURS}{save}{METADATA}{UNFINISHED}"


class Claim(NamedTuple):
    """A running save: its identifier, its draft of `.metadata`, and the file descriptor that locks the draft (None in
    an object store)."""

    save: str
    draft: Place
    handle: int | None

    def release(self) -> None:
        """Remove the draft of `.metadata`, if it is still there, and release the lock on it."""
        try:
            self.draft.unlink(missing_ok=True)
        finally:
            # a draft that stays locked would pass for a running save's
            if self.handle is not None:
                locks.close(self.handle)


def claim(folder: Place, save: str) -> Claim:
    """Begin the save with identifier `save` in `folder`: create its draft of `.metadata`, and lock the draft if the
    file system can; return a Claim. Raises CheckpointError if the folder already has a model written by `export`."""
    if isinstance(folder, Path) and has_export(folder):
        what = (
            f"{folder} has a model by `export`, which no later export could replace next to a save"
        )
        raise CheckpointError(f"{what}; save to another folder, or move the model away")
    draft = folder / name_draft(save)
    if isinstance(draft, Remote):
        draft.write_bytes(b"")
        return Claim(save, draft, None)
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    while True:
        handle = locks.keep(os.open(draft, flags, 0o666))
        with _close_on_error(handle):
            with contextlib.suppress(OSError):
                fcntl.flock(handle, fcntl.LOCK_EX)
            # before it was locked, another save may have taken it for dead and removed it
            if _is_open_as(draft, handle):
                return Claim(save, draft, handle)
            locks.close(handle)


@contextlib.contextmanager
def _close_on_error(handle: int) -> Iterator[None]:
    try:
        yield
    except BaseException:
        locks.close(handle)
        raise


def _is_open_as(file: Path, handle: int) -> bool:
    """Whether the open `handle` is of the file that is now at the path `file`."""
    try:
        return os.path.samestat(file.stat(), os.fstat(handle))
    except FileNotFoundError:
        return False


def make_count(held: Claim, text: bytes) -> None:
    """Commit the save `held`: replace the folder's `.metadata` by a file with the content `text`, atomically (in an
    object store, only if the service writes whole objects).

    Raises CheckpointError, and changes nothing, if another process has removed the draft.
    """
    file = held.draft.parent / METADATA
    if isinstance(held.draft, Remote) or isinstance(file, Remote):
        if not held.draft.is_file():
            raise _taken_for_dead(held.draft)
        file.write_bytes(text)
        return
    assert held.handle is not None, "a draft of the file system is held open"
    # opened by name, a removed draft would be created again, and count without data
    with open(held.handle, "wb", closefd=False) as stream:
        stream.truncate()
        stream.write(text)
        synced(stream)
    if not _is_open_as(held.draft, held.handle):
        raise _taken_for_dead(held.draft)
    try:
        os.replace(held.draft, file)
    except FileNotFoundError as error:
        raise _taken_for_dead(held.draft) from error
    sync(file.parent)


def _taken_for_dead(draft: Place) -> CheckpointError:
    """The error for a running save whose draft of `.metadata` another process has removed."""
    what = (
        f"{draft}, which a running save needs, is gone: another rank failed and removed it, "
        "or another save, on a machine that does not see its lock"
    )
    state = "what was saved there before is as it was"
    fix = "save again, from one machine at a time"
    return CheckpointError(f"{what}; {state}: {fix}")


def remove_leftovers(folder: Place, share: tuple[int, int] = (0, 1)) -> None:
    """Remove the files that dead saves (crashed, failed or replaced) have left in `folder`. With `share` (i, n), this
    rank removes only files whose names' hash is i modulo n, so that n ranks share the work.

    Every rank removes drafts of `.metadata`.

    In an object store, the files of a save that still has a draft stay.
    """
    files = _list_ours(folder)
    saves = {save for _, save in files}
    # Locks are held until all is removed. A running save whose draft was removed before the save had locked it waits
    # in `claim` for this lock, and then creates the draft again; created earlier, it would be removed as a leftover.
    with contextlib.ExitStack() as handles:
        dead = {save for save in saves if _remove_if_dead(folder / name_draft(save), handles)}
        # read after the drafts of the dead are removed: from then on none of them can come to count
        dead.discard(find_counting(folder) or "")
        for file, save in files:
            if save in dead and _is_in_share(file.name, share):
                _remove(file)
        sync(folder)


def _list_ours(folder: Place) -> list[tuple[Place, str]]:
    """The files in the folder that saves wrote, each with the identifier of its save."""
    ours: list[tuple[Place, str]] = []
    for file in folder.glob(f"{OURS}*"):
        match = FILE.fullmatch(file.name)
        if match:
            ours.append((file, match["save"]))
    return ours


def _remove_if_dead(draft: Place, handles: contextlib.ExitStack) -> bool:
    """Remove a save's draft unless a running process has locked it. Returns whether the save has ended.

    It is removed under a shared lock, which ends as `handles` closes.
    """
    if isinstance(draft, Remote):
        return not draft.is_file()
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        handle = locks.keep(os.open(draft, flags))
    except FileNotFoundError:
        return True
    except OSError:  # unreadable or a link: not known to be dead
        return False
    handles.callback(locks.close, handle)
    try:
        # Shared: ranks that remove leftovers at the same time do not take each other for the draft's writer.
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    _remove(draft)
    return True


def find_counting(folder: Place) -> str | None:
    """Return the identifier of the save that wrote the folder's `.metadata`; None if that file is missing, or `save`
    did not write it."""
    file = folder / METADATA
    try:
        size = length_of(file)
        with opened(file) as stream:
            # The seal, the last SEAL bytes of a file by `save`, has the identifier.
            stream.seek(max(0, size - SEAL))
            return save_of(stream.read())
    except FileNotFoundError:
        return None


def _is_in_share(name: str, share: tuple[int, int]) -> bool:
    """Whether this rank removes the file, by the file's name only: ranks list the folder while others remove files."""
    number, count = share
    return zlib.crc32(name.encode()) % count == number


def _remove(file: Place) -> None:
    """Remove a file, if it is there; a folder of that name stays."""
    with contextlib.suppress(IsADirectoryError):
        file.unlink(missing_ok=True)


def withdraw(held: Claim) -> None:
    """Abandon the failed save `held` and remove its files; if the save has already become the folder's current one, its
    files are kept. If a removal fails, the remaining files are kept, and no error is raised.
    """
    folder = held.draft.parent
    with contextlib.suppress(OSError):
        held.release()
        if find_counting(folder) == held.save:
            return
        for file, save in _list_ours(folder):
            if save == held.save:
                _remove(file)
