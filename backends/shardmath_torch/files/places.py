"""Where bytes lie: a folder of the file system, or a URL that fsspec serves.

1. A place is a `Path` or a `Remote`, which has those of Path's methods that are used here. `file://` is a Path: files
   of the system are mapped, synced, renamed and locked as such, and never go through fsspec.
2. A URL is never taken for a local folder: a scheme that nobody serves is an error before anything is written. Nor is
   what names nothing taken for the current directory.
3. What goes wrong is an OSError, whatever the service calls it.
4. Only regular files are read (`opened`): a pipe in a folder of a stranger's would be waited for, a device has no end.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeAlias, TypeVar, cast

from shardmath.base.errors import ShardError
from shardmath.base.given import shown
from shardmath.base.public import public

__all__ = [
    "CheckpointError",
    "Place",
    "Remote",
    "check_length",
    "content_of",
    "length_of",
    "local_folder",
    "opened",
    "place",
    "put",
    "sizes_of",
    "sync",
    "synced",
]

_T = TypeVar("_T")

SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+._\-]*)(://|::)")
ODD = re.compile(r"[^/]*://")
"""What looks like a URL, whatever its scheme is."""
LOST = re.compile(r"\s*([A-Za-z][A-Za-z0-9+._\-]*):(/[^/]|/?$)")
"""What pathlib makes of a URL: one slash is gone, or both at the end."""
LOCAL = re.compile(r"(file|local)://(?!.*::)", re.DOTALL)
"""A folder as a URL. A chain of URLs is none, whatever it begins with."""


@public
class CheckpointError(ShardError):
    """A checkpoint that cannot be written or read, or that does not hold what is asked of it."""


class _Stat(NamedTuple):
    st_size: int


@dataclass(frozen=True, slots=True)
class Remote:
    """A file or a folder of a file system of fsspec."""

    fs: Any
    path: str

    @property
    def name(self) -> str:
        """Its last part."""
        return self.path.rsplit("/", 1)[-1]

    @property
    def suffix(self) -> str:
        """The ending of its name, with the dot."""
        return Path(self.name).suffix

    @property
    def parent(self) -> Remote:
        """The folder that it lies in."""
        return Remote(self.fs, self.path.rpartition("/")[0])

    def __truediv__(self, name: str) -> Remote:
        return Remote(self.fs, f"{self.path.rstrip('/')}/{name}")

    def __str__(self) -> str:
        return str(self.fs.unstrip_protocol(self.path))

    def __lt__(self, other: Remote) -> bool:
        return self.path < other.path

    def open(self, mode: str = "rb", buffering: int = -1) -> BinaryIO:
        """A stream of its bytes."""
        return cast(BinaryIO, self._asked(lambda: self.fs.open(self.path, mode)))

    def stat(self) -> _Stat:
        """How long it is, in bytes."""
        return _Stat(int(self._asked(lambda: self.fs.info(self.path))["size"]))

    def is_file(self) -> bool:
        """Whether it is a file."""
        return bool(self._asked(lambda: self.fs.isfile(self.path)))

    def is_dir(self) -> bool:
        """Whether it is a folder, or something lies below it."""
        return bool(self._asked(lambda: self.fs.isdir(self.path)))

    def read_bytes(self) -> bytes:
        """All of it."""
        return cast(bytes, self._asked(lambda: self.fs.cat_file(self.path)))

    def read_part(self, start: int, stop: int) -> bytes:
        """Its bytes from `start` to `stop`."""
        return cast(bytes, self._asked(lambda: self.fs.cat_file(self.path, start=start, end=stop)))

    def write_bytes(self, data: bytes) -> None:
        """This in its place; at once, where the service writes objects at once."""
        self._asked(lambda: self.fs.pipe_file(self.path, data))

    def unlink(self, missing_ok: bool = False) -> None:
        """Removes it."""
        try:
            self._asked(lambda: self.fs.rm_file(self.path))
        except FileNotFoundError:
            if not missing_ok:
                raise

    def mkdir(self, parents: bool = True, exist_ok: bool = True) -> None:
        """Makes the folder, for services that have folders."""
        self._asked(lambda: self.fs.makedirs(self.path, exist_ok=exist_ok))

    def iterdir(self) -> Iterator[Remote]:
        """What lies in it; nothing if it is not there."""
        for found in self._listed():
            yield Remote(self.fs, str(found["name"]).rstrip("/"))

    def glob(self, pattern: str) -> Iterator[Remote]:
        """What lies in it under such a name; `*` alone has a meaning."""
        wanted = re.compile(".*".join(map(re.escape, pattern.split("*"))), re.DOTALL)
        return (one for one in self.iterdir() if wanted.fullmatch(one.name))

    def sizes(self) -> dict[str, int]:
        """The sizes of the files in it, by name."""
        files = (found for found in self._listed() if found.get("type") == "file")
        return {str(found["name"]).rsplit("/", 1)[-1]: int(found["size"]) for found in files}

    def _listed(self) -> list[dict[str, Any]]:
        try:
            return list(self._asked(lambda: self.fs.ls(self.path, detail=True)))
        except FileNotFoundError:
            return []

    def _asked(self, act: Callable[[], _T]) -> _T:
        """What the service says now: lists that fsspec has kept may be older than what others wrote."""
        self.fs.invalidate_cache()
        try:
            return act()
        except OSError:
            raise
        except Exception as error:
            raise OSError(0, f"{type(error).__name__}: {error}", str(self)) from error


Place: TypeAlias = Path | Remote
"""A file or folder, wherever."""


def place(path: str | os.PathLike[str] | Remote) -> Place:
    """The place that a path or a URL names. Raises CheckpointError for a URL that nothing here serves, or no text."""
    if isinstance(path, Remote):
        return path
    text: object = os.fspath(path) if isinstance(path, str | os.PathLike) else path
    if not isinstance(text, str):
        raise CheckpointError(
            f"the path is {shown(text)}; give text, or a Path, of a folder or a URL of one"
        )
    if not LOCAL.sub("", text).strip():
        raise CheckpointError(
            f"the path is {text!r}, which names no folder; give one, or . for the current one"
        )
    url = SCHEME.match(text)
    if url is not None:
        return _served(text, url.group(1))
    if ODD.match(text):
        what = f"{text!r} is a URL of no scheme: what is before :// does not begin with a letter, or has odd signs"
        raise CheckpointError(f"{what}; mend the URL, or give ./{text} for a folder of that name")
    lost = LOST.match(text)
    if lost is not None and _known(lost.group(1)):
        what = f"{text!r} is a URL that has lost a slash, as it does in a Path"
        raise CheckpointError(
            f"{what}; give the URL as text, or ./{text} for a folder of that name"
        )
    return Path(text)


def local_folder(path: str | os.PathLike[str]) -> Path:
    """The folder that a path names. Raises CheckpointError for a URL of anything but the file system."""
    found = place(path)
    if isinstance(found, Remote):
        raise CheckpointError(
            f"{found} is a URL; this is written to folders only: write it there, and copy the files"
        )
    return found


def _known(scheme: str) -> bool:
    """Whether fsspec has heard of the scheme, installed or not."""
    try:
        from fsspec.registry import available_protocols
    except ImportError:
        return scheme in ("s3", "gs", "gcs", "az", "abfs", "hdfs", "http", "https", "file")
    return scheme in available_protocols()


def _served(url: str, scheme: str) -> Place:
    try:
        from fsspec.core import url_to_fs
        from fsspec.implementations.local import LocalFileSystem
    except ImportError as error:
        raise CheckpointError(
            f"{url} is a URL, which needs fsspec; pip install 'shardmath[remote]'"
        ) from error
    try:
        fs, path = url_to_fs(url)
    except (ImportError, ValueError) as error:
        what = (
            f"{url} cannot be reached, {scheme}:// is served by nothing that is installed: {error}"
        )
        raise CheckpointError(
            f"{what}; give a folder, or a URL of a scheme that fsspec serves"
        ) from error
    except Exception as error:
        raise CheckpointError(
            f"{url} cannot be reached: {type(error).__name__}: {error}"
        ) from error
    if LOCAL.match(url):
        return Path(path)
    if isinstance(fs, LocalFileSystem):
        what = f"{url} is taken for the local folder {path!r} by fsspec, which is not what it says"
        raise CheckpointError(
            f"{what}; give file:///an/absolute/path, or a URL of the service alone"
        )
    return Remote(fs, path.rstrip("/"))


def opened(file: Place, buffering: int = -1) -> BinaryIO:
    """A stream of the file's bytes. Raises OSError for what is no regular file, also where to open it would wait."""
    if isinstance(file, Remote):
        return file.open("rb")
    handle = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _check_regular(file, os.fstat(handle))
        return open(handle, "rb", buffering)
    except BaseException:
        os.close(handle)
        raise


def content_of(file: Place) -> bytes:
    """All of the file, of one version of it. Raises OSError for what is no regular file."""
    if isinstance(file, Remote):
        return file.read_bytes()
    with opened(file) as stream:
        return stream.read()


def length_of(file: Place) -> int:
    """How long the file is, in bytes. Raises OSError for what is no regular file."""
    if isinstance(file, Remote):
        return file.stat().st_size
    found = file.stat()
    _check_regular(file, found)
    return found.st_size


def _check_regular(file: Path, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file", str(file))


def sizes_of(files: Iterable[Place]) -> Callable[[Place], int]:
    """How long these files are: a function, which raises OSError for one that is not there.

    Folders of a service are listed once, since to ask for each file takes a message and its answer.
    """
    folders = {file.parent for file in files if isinstance(file, Remote)}
    listed = {folder: folder.sizes() for folder in folders}

    def size(file: Place) -> int:
        if isinstance(file, Path):
            return length_of(file)
        found = listed[file.parent].get(file.name)
        return file.stat().st_size if found is None else found

    return size


def check_length(
    file: Place, size_of: Callable[[Place], int], end: int, expected: int | None
) -> None:
    """Raises CheckpointError for a file that is not as long as expected, or ends before byte `end`."""
    try:
        size = size_of(file)
    except OSError as error:
        raise CheckpointError(
            f"{file} cannot be read: {error.strerror}; it belongs to the checkpoint"
        ) from error
    if size < end or (expected is not None and size != expected):
        told = (
            f"it was saved with {expected}"
            if expected not in (None, size)
            else f"tensors lie up to byte {end}"
        )
        raise CheckpointError(
            f"{file} has {size} bytes, {told}; it or the index is damaged: fetch it again"
        )


def put(file: Place, draft: Place, text: bytes) -> None:
    """The file with this text, at once, on disk when this returns. `draft` is a name that nobody else uses."""
    if isinstance(file, Remote):
        file.write_bytes(text)
        return
    draft.unlink(missing_ok=True)  # it may be a link, to somebody's file
    with draft.open("xb") as stream:
        stream.write(text)
        synced(stream)
    os.replace(cast(Path, draft), file)
    sync(file.parent)


def synced(stream: BinaryIO) -> None:
    """What was written is on disk, if the stream is a file of the system; a service keeps it when it is closed."""
    stream.flush()
    try:
        handle = stream.fileno()
    except (OSError, AttributeError):
        return
    os.fsync(handle)


def sync(folder: Place) -> None:
    """The names in a folder are on disk."""
    if isinstance(folder, Remote):
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
