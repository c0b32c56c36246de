"""Places: folders of the file system, and URLs that fsspec serves.

1. A place is a `Path` or a `Remote`, which has the methods of Path that are used here. `file://` is a Path: local files
   are mapped, synced, renamed and locked, and never go through fsspec.
2. A URL is never mistaken for a local folder: a scheme that nothing serves raises before anything is written. An empty
   path is never mistaken for the current directory.
3. Every error of a service is raised as an OSError.
4. Only regular files are read (`opened`): opening a pipe in an untrusted folder could wait forever, and a device has no
   end.
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
from shardmath.base.public import public
from shardmath.base.text import shown, word_error

__all__ = [
    "CheckpointError",
    "Place",
    "Remote",
    "check_length",
    "content_of",
    "length_of",
    "local_folder",
    "make_folder",
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
"""Text that looks like a URL, even if its scheme is malformed."""
MANGLED = re.compile(r"\s*([A-Za-z][A-Za-z0-9+._\-]*):(/[^/]|/?$)")
"""What pathlib makes of a URL: one slash is lost, or both at the end."""
COMMON = ("s3", "gs", "gcs", "az", "abfs", "hdfs", "http", "https", "file")
"""Schemes that are known even if fsspec is not installed."""
LOCAL = re.compile(r"(file|local)://(?!.*::)", re.DOTALL)
"""A folder as a URL. A chain of URLs is not one, whatever it begins with."""


@public
class CheckpointError(ShardError):
    """The error for a checkpoint that cannot be written or read, or that lacks what the caller asks for."""

    code = "SM112"


class _Stat(NamedTuple):
    st_size: int


@dataclass(frozen=True, slots=True)
class Remote:
    """A file or a folder of an fsspec file system, with the methods of pathlib.Path that checkpoints use."""

    fs: Any
    path: str

    @property
    def name(self) -> str:
        """The last part of the path: the file's or folder's own name."""
        return self.path.rsplit("/", 1)[-1]

    @property
    def suffix(self) -> str:
        """The file name's extension, with the dot."""
        return Path(self.name).suffix

    @property
    def parent(self) -> Remote:
        """The folder that the file or folder lies in."""
        return Remote(self.fs, self.path.rpartition("/")[0])

    def __truediv__(self, name: str) -> Remote:
        return Remote(self.fs, f"{self.path.rstrip('/')}/{name}")

    def __str__(self) -> str:
        return str(self.fs.unstrip_protocol(self.path))

    def __lt__(self, other: Remote) -> bool:
        return self.path < other.path

    def open(self, mode: str = "rb", buffering: int = -1) -> BinaryIO:
        """Open the file in `mode`, by default to read it, and return a stream of its bytes. Ignores `buffering`."""
        return cast(BinaryIO, self._call_service(lambda: self.fs.open(self.path, mode)))

    def stat(self) -> _Stat:
        """Return the size of the file in bytes, as `st_size`."""
        info = self._call_service(lambda: self.fs.info(self.path))
        return _Stat(int(info["size"]))

    def is_file(self) -> bool:
        """Whether the path is a file."""
        return bool(self._call_service(lambda: self.fs.isfile(self.path)))

    def is_dir(self) -> bool:
        """Whether the path is a folder. In an object store, a path counts as a folder if an object's path begins with
        it and a slash."""
        return bool(self._call_service(lambda: self.fs.isdir(self.path)))

    def read_bytes(self) -> bytes:
        """Return all bytes of the file."""
        return cast(bytes, self._call_service(lambda: self.fs.cat_file(self.path)))

    def read_part(self, start: int, stop: int) -> bytes:
        """Return the bytes of the file from byte `start` up to byte `stop`, which is not included."""
        part = self._call_service(lambda: self.fs.cat_file(self.path, start=start, end=stop))
        return cast(bytes, part)

    def write_bytes(self, data: bytes) -> None:
        """Replace the file's content by the bytes `data`. If the service writes whole objects, this is one step:
        readers never see a part of `data`."""
        self._call_service(lambda: self.fs.pipe_file(self.path, data))

    def unlink(self, missing_ok: bool = False) -> None:
        """Remove the file. Raises FileNotFoundError if it does not exist, unless `missing_ok`."""
        try:
            self._call_service(lambda: self.fs.rm_file(self.path))
        except FileNotFoundError:
            if not missing_ok:
                raise

    def mkdir(self, parents: bool = True, exist_ok: bool = True) -> None:
        """Make the folder and the folders above it, whatever `parents` says, if the service has folders."""
        self._call_service(lambda: self.fs.makedirs(self.path, exist_ok=exist_ok))

    def iterdir(self) -> Iterator[Remote]:
        """Yield the files and folders in this folder; nothing if it does not exist."""
        for found in self._list():
            yield Remote(self.fs, str(found["name"]).rstrip("/"))

    def glob(self, pattern: str) -> Iterator[Remote]:
        """Return an iterator over the files and folders in this folder whose names match `pattern`, in which only `*`
        is special."""
        # Not fnmatch, in which brackets have a meaning: names may have any characters.
        parts = map(re.escape, pattern.split("*"))
        wanted = re.compile(".*".join(parts), re.DOTALL)
        return (child for child in self.iterdir() if wanted.fullmatch(child.name))

    def sizes(self) -> dict[str, int]:
        """Return a dict from the name of each file in this folder to its size in bytes."""
        sizes = {}
        for info in self._list():
            if info.get("type") == "file":
                name = str(info["name"]).rsplit("/", 1)[-1]
                sizes[name] = int(info["size"])
        return sizes

    def _list(self) -> list[dict[str, Any]]:
        """The service's records of the files and folders in it; none if it does not exist."""
        try:
            return list(self._call_service(lambda: self.fs.ls(self.path, detail=True)))
        except FileNotFoundError:
            return []

    def _call_service(self, act: Callable[[], _T]) -> _T:
        """Call `act`, and return the service's current answer. Raises OSError, whatever the service raises."""
        # Listings that fsspec has cached may be older than other processes' writes.
        self.fs.invalidate_cache()
        try:
            return act()
        except OSError:
            raise
        except Exception as error:
            raise OSError(0, word_error(error), str(self)) from error


Place: TypeAlias = Path | Remote
"""A local or remote file or folder."""


def place(path: str | os.PathLike[str] | Remote) -> Place:
    """Return `path` as a Path, or as a Remote if it is the URL of a service, such as "s3://...". Raises CheckpointError
    for a value of another type, for an empty path, and for a URL that no installed fsspec file system can open."""
    if isinstance(path, Remote):
        return path
    text: object = os.fspath(path) if isinstance(path, str | os.PathLike) else path
    if not isinstance(text, str):
        what = f"the path is {shown(text)}, of type {type(text).__name__}"
        raise CheckpointError(f"{what}; give a str or a Path of a folder, or its URL as a str")
    if not LOCAL.sub("", text).strip():
        what = f"the path is {text!r}, which names no folder"
        raise CheckpointError(f"{what}; give the path of one, or '.' for the current folder")
    url = SCHEME.match(text)
    if url is not None:
        return _place_of_url(text, url.group(1))
    _check_not_url(text)
    return Path(text)


def _check_not_url(text: str) -> None:
    """Raise CheckpointError for a path that looks like a malformed URL."""
    if ODD.match(text):
        scheme, _, _ = text.partition("://")
        rule = "a letter, and then letters, digits, +, - and ."
        what = f"{text!r} is a URL whose scheme is {scheme!r}, not {rule}"
        fix = f"give a scheme such as s3, or ./{text} for a folder of that name"
        raise CheckpointError(f"{what}; {fix}")
    mangled = MANGLED.match(text)
    if mangled is not None and _is_known(mangled.group(1)):
        scheme = mangled.group(1)
        what = f"{text!r} is a URL without :// after {scheme!r}, as a Path removes a slash"
        fix = f"give the URL as a str, with both slashes, or ./{text} for a folder of that name"
        raise CheckpointError(f"{what}; {fix}")


def local_folder(path: str | os.PathLike[str]) -> Path:
    """Return `path` as the Path of a local folder. Raises CheckpointError if it is the URL of a service."""
    found = place(path)
    if isinstance(found, Remote):
        what = f"{found} is a URL, but this is written only to a folder of the local file system"
        raise CheckpointError(f"{what}; give such a folder, and copy the files to the URL")
    return found


def _is_known(scheme: str) -> bool:
    """Whether fsspec knows the scheme, even if what serves it is not installed."""
    try:
        from fsspec.registry import available_protocols
    except ImportError:
        return scheme in COMMON
    return scheme in available_protocols()


def _place_of_url(url: str, scheme: str) -> Place:
    """The place that a URL names. Raises CheckpointError for one that nothing installed serves."""
    try:
        from fsspec.core import url_to_fs
        from fsspec.implementations.local import LocalFileSystem
    except ImportError as error:
        what = f"{url} is a URL, which needs fsspec, and that is not installed"
        raise CheckpointError(f"{what}; pip install 'shardmath[remote]'") from error
    try:
        fs, path = url_to_fs(url)
    except (ImportError, ValueError) as error:
        why = f"{scheme}:// is served by nothing that is installed: {error}"
        fix = "install what serves it, or give a folder or a URL of another scheme"
        raise CheckpointError(f"{url} cannot be reached, {why}; {fix}") from error
    except Exception as error:  # services raise errors of any kind
        what = f"{url} cannot be reached: {word_error(error)}"
        raise CheckpointError(f"{what}; correct the URL, or get access to it") from error
    if LOCAL.match(url):
        return Path(path)
    if isinstance(fs, LocalFileSystem):
        what = f"{url} does not name a local folder, but fsspec takes it for {path!r}"
        fix = "give file:///an/absolute/path, or a URL of the service without ::"
        raise CheckpointError(f"{what}; {fix}")
    return Remote(fs, path.rstrip("/"))


def opened(file: Place, buffering: int = -1) -> BinaryIO:
    """Open `file` to read its bytes, and return the stream. Raises OSError if a local file is a pipe, device or folder;
    for a pipe, this does not wait for a writer."""
    if isinstance(file, Remote):
        return file.open("rb")
    # By an opener, not os.open and then fdopen: if Ctrl-C came between the two, nothing would close the handle.
    return open(file, "rb", buffering, opener=_open_regular)


def _open_regular(file: str, flags: int) -> int:
    """Return a handle of the file, open for reading. Raises OSError unless it is a regular file."""
    # O_NONBLOCK: opening a pipe would wait for a writer. The open handle is checked, as the name could be swapped.
    handle = os.open(file, flags | os.O_NONBLOCK)
    try:
        _check_regular(Path(file), os.fstat(handle))
    except BaseException:
        os.close(handle)
        raise
    return handle


def content_of(file: Place) -> bytes:
    """Read the whole `file`, and return its bytes. Raises OSError if it cannot be read, or is local and not a regular
    file."""
    if isinstance(file, Remote):
        return file.read_bytes()
    with opened(file) as stream:
        return stream.read()


def length_of(file: Place) -> int:
    """Return the size of `file` in bytes. Raises OSError if it does not exist, or is local and not a regular file."""
    if isinstance(file, Remote):
        return file.stat().st_size
    found = file.stat()
    _check_regular(file, found)
    return found.st_size


def _check_regular(file: Path, found: os.stat_result) -> None:
    """Raise OSError for a folder, a pipe, a device or a socket."""
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file", str(file))


def sizes_of(files: Iterable[Place]) -> Callable[[Place], int]:
    """Return a function that takes one of `files` and returns its size in bytes; it raises OSError for a file that does
    not exist.

    Remote folders are listed once, since asking for each file takes a round trip.
    """
    folders = {file.parent for file in files if isinstance(file, Remote)}
    listed = {folder: folder.sizes() for folder in folders}

    def size(file: Place) -> int:
        if isinstance(file, Path):
            return length_of(file)
        listed_size = listed[file.parent].get(file.name)
        # A file that is not listed raises in `stat`, unless the service's listings are incomplete.
        return file.stat().st_size if listed_size is None else listed_size

    return size


def check_length(
    file: Place, size_of: Callable[[Place], int], end: int, expected: int | None
) -> None:
    """Raise CheckpointError if `file` cannot be read, is shorter than `end` bytes, or has another length than
    `expected` (None: any length). `end` is the position after the last byte to be read; `size_of` returns a file's
    size."""
    try:
        size = size_of(file)
    except OSError as error:
        what = f"{file}, a file of the checkpoint, cannot be read: {error.strerror or error}"
        raise CheckpointError(f"{what}; fetch it again, or make it readable") from error
    if expected is not None and size != expected:
        fault = f"but was saved with {expected}"
    elif size < end:
        fault = f"but tensors in it lie up to byte {end}"
    else:
        return
    what = f"{file} has {size} bytes, {fault}"
    raise CheckpointError(f"{what}; it or the index is damaged: fetch the checkpoint again")


def make_folder(folder: Place) -> None:
    """Make `folder`, and the folders above it, unless they exist. Raises OSError if that fails; if a file or a link to
    nothing has the name of one, the error says so."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        if isinstance(folder, Remote):
            raise
        # The system says only that the name exists.
        taken = Path(error.filename)
        why = f"{taken} is not a folder"
        if taken.is_symlink() and not taken.exists():
            why = f"{taken} is a link to {os.readlink(taken)}, which does not exist"
        raise FileExistsError(error.errno, why, error.filename) from error


def put(file: Place, draft: Place, text: bytes) -> None:
    """Replace the content of `file` by `text` in one step: write and flush the file `draft`, whose name no other writer
    uses, and rename it to `file`. A remote file is written directly, without a draft."""
    if isinstance(file, Remote):
        file.write_bytes(text)
        return
    draft.unlink(missing_ok=True)  # it may be a link to another file
    with draft.open("xb") as stream:
        stream.write(text)
        synced(stream)
    os.replace(cast(Path, draft), file)
    sync(file.parent)


def synced(stream: BinaryIO) -> None:
    """Force everything that was written to `stream`, an open file, to disk. For a remote file, only the stream's buffer
    is flushed: the file is stored when the stream is closed."""
    stream.flush()
    try:
        handle = stream.fileno()
    except (OSError, AttributeError):
        return
    os.fsync(handle)


def sync(folder: Place) -> None:
    """Flush the directory entries of `folder` to disk (by fsync), so that new and renamed files are still there after a
    crash. Nothing is done for a remote folder."""
    if isinstance(folder, Remote):
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
