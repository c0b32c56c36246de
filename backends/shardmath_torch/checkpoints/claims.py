"""Which saves into a folder are going on, and what those that ended have left there.

1. A save's draft of `.metadata` is there from before its first data file until it counts or has failed: while there is
   a draft, its files belong to a save that may be going on. To make a save count takes its draft away, in one step,
   and needs that it is there: it is written through the handle that claimed it, never made anew.
2. Whoever writes the draft holds a lock on it, which ends with the process. A draft without a lock is a dead save's.
3. A dead save's draft is removed first. From then on it can never count, even if it was not dead and only seemed so;
   it would fail. Then is read which save counts, and only then are files removed, never those of that one.
4. Where nothing can be locked, as in an object store, all drafts are taken for those of saves that are going on: what
   a crash leaves there stays until its draft is removed by hand.
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

from shardmath_torch.files.places import (
    CheckpointError,
    Place,
    Remote,
    length_of,
    opened,
    sync,
    synced,
)
from shardmath_torch.files.sealed import DIGITS, SEAL, save_of

__all__ = [
    "DATA",
    "FILE",
    "INDEX",
    "METADATA",
    "OURS",
    "UNFINISHED",
    "Claim",
    "claim",
    "collect",
    "count",
    "counted",
    "withdraw",
]

INDEX, METADATA = "shardmath.json", ".metadata"
OURS, DATA, UNFINISHED = "shardmath-", ".safetensors", ".unfinished"
_DATA = rf"-\d{{5,}}-of-\d{{5,}}(-\d+)?{re.escape(DATA)}({re.escape(UNFINISHED)})?"
_DRAFT = rf"({re.escape(METADATA)}|\.json){re.escape(UNFINISHED)}"
FILE = re.compile(rf"{OURS}(?P<save>[0-9a-f]{{{DIGITS}}})({_DATA}|{_DRAFT})")
"""How our files are called: by the save, and for data the rank's number, and the file's; and until all are written."""


def draft_of(save: str) -> str:
    """What a save's draft of `.metadata` is called."""
    return f"{OURS}{save}{METADATA}{UNFINISHED}"


class Claim(NamedTuple):
    """A save that is going on: its digits, its draft, and the handle that holds the lock, None in a service."""

    save: str
    draft: Place
    handle: int | None

    def release(self) -> None:
        """The lock is over, and the draft with it if it is still there."""
        self.draft.unlink(missing_ok=True)
        if self.handle is not None:
            os.close(self.handle)


def claim(folder: Place, save: str) -> Claim:
    """Begins a save."""
    draft = folder / draft_of(save)
    if isinstance(draft, Remote):
        draft.write_bytes(b"")
        return Claim(save, draft, None)
    while True:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        handle = os.open(draft, flags, 0o666)
        with _closed_on_error(handle):
            with contextlib.suppress(OSError):
                fcntl.flock(handle, fcntl.LOCK_EX)
            # before it was locked, it may have been taken for a dead save's and removed
            if _is(draft, handle):
                return Claim(save, draft, handle)
            os.close(handle)


@contextlib.contextmanager
def _closed_on_error(handle: int) -> Iterator[None]:
    try:
        yield
    except BaseException:
        os.close(handle)
        raise


def _is(file: Path, handle: int) -> bool:
    """Whether the file of that name is the one that the handle has open."""
    try:
        return os.path.samestat(file.stat(), os.fstat(handle))
    except FileNotFoundError:
        return False


def count(held: Claim, text: bytes) -> None:
    """Makes the save the one that counts: its draft, with this text, replaces `.metadata`.

    Raises CheckpointError for a draft that another has removed, and changes nothing then.
    """
    file = held.draft.parent / METADATA
    if isinstance(held.draft, Remote) or isinstance(file, Remote):
        if not held.draft.is_file():
            raise _taken_for_dead(held.draft)
        file.write_bytes(text)
        return
    assert held.handle is not None, "a draft of the file system is held open"
    # by its name, a draft that has been removed would be made anew, and count without data
    with open(held.handle, "wb", closefd=False) as stream:
        stream.truncate()
        stream.write(text)
        synced(stream)
    if not _is(held.draft, held.handle):
        raise _taken_for_dead(held.draft)
    try:
        os.replace(held.draft, file)
    except FileNotFoundError as error:
        raise _taken_for_dead(held.draft) from error
    sync(file.parent)


def _taken_for_dead(draft: Place) -> CheckpointError:
    what = (
        f"{draft} is gone: another save, whom its lock did not reach, has taken this one for dead"
    )
    fix = "save again, and from one machine at a time"
    return CheckpointError(
        f"{what}; this save does not count, what others saved there is as it was; {fix}"
    )


def collect(folder: Place, share: tuple[int, int] = (0, 1)) -> None:
    """Removes what saves have left that neither count nor are going on: of (i, n), the i-th of n shares of it."""
    files = _ours(folder)
    saves = {save for _, save in files}
    with contextlib.ExitStack() as locks:
        dead = {save for save in saves if _dead(folder / draft_of(save), locks)}
        counts = counted(folder)
        for file, save in files:
            if save in dead and save != counts and _in_share(file.name, share):
                _remove(file)
        sync(folder)


def _ours(folder: Place) -> list[tuple[Place, str]]:
    """Our files in the folder, each with the save's digits."""
    named = ((file, FILE.fullmatch(file.name)) for file in folder.glob(f"{OURS}*"))
    return [(file, match["save"]) for file, match in named if match]


def _dead(draft: Place, locks: contextlib.ExitStack) -> bool:
    """Whether a save has ended, or ends by this: its draft is removed, under a lock that others may share."""
    if isinstance(draft, Remote):
        return not draft.is_file()
    try:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        handle = os.open(draft, flags)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    locks.callback(os.close, handle)
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    _remove(draft)
    return True


def counted(folder: Place) -> str | None:
    """The digits of the save that counts; None if that is none of ours."""
    file = folder / METADATA
    try:
        size = length_of(file)
        with opened(file) as stream:
            stream.seek(max(0, size - SEAL))
            return save_of(stream.read())
    except FileNotFoundError:
        return None


def _in_share(name: str, share: tuple[int, int]) -> bool:
    """By its name alone: every rank lists the folder for itself, and others remove files meanwhile."""
    return zlib.crc32(name.encode()) % share[1] == share[0]


def _remove(file: Place) -> None:
    """A file of ours; a folder that is called like one is not."""
    with contextlib.suppress(IsADirectoryError):
        file.unlink(missing_ok=True)


def withdraw(held: Claim) -> None:
    """Ends a save that has failed: removes its files, if it does not count. What cannot be removed stays."""
    folder = held.draft.parent
    with contextlib.suppress(OSError):
        held.release()
        if counted(folder) != held.save:
            for file in (file for file, save in _ours(folder) if save == held.save):
                _remove(file)
