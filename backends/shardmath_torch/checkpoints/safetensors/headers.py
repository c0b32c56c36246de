"""Headers: the tensors that a safetensors file lists, checked against the file's size.

    8 bytes      length n of the header, little endian
    n bytes      JSON: name -> {"dtype", "shape", "data_offsets": [begin, end]}, and "__metadata__"
    the rest     the tensors, back to back                          (github.com/huggingface/safetensors, Format)

1. A header is checked before anything else is read: each tensor has as many bytes as its shape and dtype take, and all
   lie back to back up to the file's end. So a cut or damaged file raises a WeightsError that names the file, and never
   gives a wrong tensor.
2. Numbers are bounded before they are multiplied, and errors show a file's content cut short (`json_text`).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeGuard

from shardmath import ShardError
from shardmath.base.dtypes import itemsize
from shardmath.base.public import public
from shardmath_torch.checkpoints.files.json_text import MOST, count_elements, read_json, shown
from shardmath_torch.checkpoints.files.places import Place, length_of, opened

__all__ = [
    "DTYPES",
    "NAMES",
    "PREFIX",
    "RESERVED",
    "HeaderEntry",
    "WeightsError",
    "damaged",
    "make_entry",
    "read_bytes",
    "read_header",
    "read_object",
]

DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "U16": "uint16",
    "U32": "uint32",
    "U64": "uint64",
    "I8": "int8",
    "I16": "int16",
    "I32": "int32",
    "I64": "int64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
}
"""shardmath's name of each safetensors type. Not F4 and F6: several elements share a byte."""
NAMES = {ours: theirs for theirs, ours in DTYPES.items()}
"""The safetensors type of each of shardmath's names."""

RESERVED = "__metadata__"
"""The key of a header that is not a tensor."""
PREFIX = 8
"""The size in bytes of the header's length, with which a file begins."""
HEADER_LIMIT = 100_000_000
"""The most bytes of a header, as in the safetensors library."""


@public
class WeightsError(ShardError):
    """The error for safetensors that are missing, cut short or damaged, or that lack what the caller asks for."""

    code = "SM113"


@dataclass(frozen=True, slots=True)
class HeaderEntry:
    """A tensor in a safetensors file: the file, its key there, its shape and dtype, and the byte of the file at which
    it begins."""

    file: Place
    key: str
    shape: tuple[int, ...]
    dtype: str
    start: int

    @property
    def nbytes(self) -> int:
        """The size of the whole tensor in bytes."""
        return math.prod(self.shape) * itemsize(self.dtype)


def read_header(file: Place) -> tuple[dict[str, HeaderEntry], dict[str, object]]:
    """Read the header of a safetensors `file`; return the entries of its tensors, by name, and its metadata.

    Raises WeightsError for a file that is damaged, cut short, or not a safetensors file.
    """
    with _raise_as_weights_error(file):
        size = length_of(file)
    length = _read_length(file, size)
    data_start = PREFIX + length
    header = read_object(read_bytes(file, PREFIX, length), file, "the header")
    metadata = header.pop(RESERVED, None)
    entries = {name: _read_entry(file, name, value, data_start) for name, value in header.items()}
    _check_back_to_back(file, size, data_start, entries)
    return entries, metadata if isinstance(metadata, dict) else {}


def make_entry(dtype: str, shape: Sequence[int], begin: int, end: int) -> dict[str, object]:
    """Return the entry of a safetensors header, as a dict for JSON, for a tensor of safetensors type `dtype`; its data
    are bytes `begin` to `end` - 1 after the header."""
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


@contextlib.contextmanager
def _raise_as_weights_error(file: Place) -> Iterator[None]:
    """Raise OSErrors as WeightsErrors that name the file."""
    try:
        yield
    except OSError as error:
        what = f"{file} cannot be read: {error.strerror or error}"
        raise WeightsError(f"{what}; make it readable, or fetch it again") from error


def read_bytes(file: Place, start: int = 0, count: int = -1) -> bytes:
    """Return up to `count` bytes of `file` from byte `start` on, or all bytes up to the file's end if `count` is -1.
    Raises WeightsError if the file cannot be read."""
    with _raise_as_weights_error(file), opened(file) as stream:
        stream.seek(start)
        return stream.read(count)


def read_object(text: bytes, file: Place, what: str) -> dict[str, object]:
    """Parse `text`, bytes of `file`, as a JSON object, and return it as a dict. Raises WeightsError if `text` is not
    one; `what`, such as "the header", says in the message which part of the file it is."""
    try:
        found = read_json(text)
    except (ValueError, RecursionError) as error:
        raise damaged(file, f"{what} is not JSON ({error})") from error
    if not isinstance(found, dict):
        raise damaged(file, f"{what} is a JSON {type(found).__name__}, not an object")
    return found


def damaged(file: Place, what: str) -> WeightsError:
    """Return a WeightsError that says that `file` is damaged or not a safetensors file, with the fault `what`."""
    return WeightsError(f"{file} is damaged or not a safetensors file: {what}; fetch it again")


def _cut_short(file: Place, size: int, expected: int) -> WeightsError:
    """The error for a file that is shorter than its header says."""
    counts = f"{size} bytes present, but {expected} expected by its header"
    return WeightsError(f"{file} is cut short: {counts}, {expected - size} missing; fetch it again")


def _read_length(file: Place, size: int) -> int:
    """The length of the header of a file. Raises WeightsError if it is longer than the format or the file allows."""
    prefix = read_bytes(file, 0, PREFIX)
    if len(prefix) < PREFIX:
        what = f"{size} bytes present, but a header's length alone takes {PREFIX}"
        raise WeightsError(f"{file} is cut short: {what}; fetch it again")
    length = int.from_bytes(prefix, "little")
    if length > HEADER_LIMIT:
        what = f"it announces a header of {length} bytes, but the format allows {HEADER_LIMIT}"
        raise damaged(file, what)
    if PREFIX + length > size:
        raise _cut_short(file, size, PREFIX + length)
    return length


def _read_entry(file: Place, name: str, value: object, data: int) -> HeaderEntry:
    """The tensor that one entry of a header describes, checked; the data begin at byte `data` of the file."""
    fields = value if isinstance(value, dict) else {}
    dtype, shape, offsets = (fields.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or not _is_sizes(shape) or not _is_span(offsets):
        what = f"the header's entry of {shown(name)} is {shown(value)}"
        raise damaged(file, f"{what}, not a dtype, a shape and two data_offsets")
    if dtype not in DTYPES:
        unquoted = shown(dtype)[1:-1]
        what = f"{file} holds {shown(name)} as {unquoted}, a type that cannot be read"
        raise WeightsError(f"{what}; store it as one of {', '.join(DTYPES)}")
    begin, end = offsets
    entry = HeaderEntry(file, name, tuple(shape), DTYPES[dtype], data + begin)
    try:
        nbytes = count_elements(shape) * itemsize(entry.dtype)
    except ValueError as error:
        raise damaged(file, f"{shown(name)}: {error}") from error
    if end - begin != nbytes:
        what = f"{shown(name)} is {dtype}{shown(shape)}, {nbytes} bytes"
        raise damaged(file, f"{what}, but its data_offsets {begin}:{end} hold {end - begin}")
    return entry


def _is_sizes(value: object) -> TypeGuard[list[int]]:
    """Whether the value is a list of sizes that a file can have; bools are not sizes."""
    return isinstance(value, list) and all(type(n) is int and 0 <= n <= MOST for n in value)


def _is_span(value: object) -> TypeGuard[list[int]]:
    """Whether the value is a list of a begin and an end."""
    return _is_sizes(value) and len(value) == 2


def _check_back_to_back(
    file: Place, size: int, data: int, entries: Mapping[str, HeaderEntry]
) -> None:
    """Raise WeightsError unless the tensors lie back to back from byte `data` of the file to its end."""
    spans = [(entry.start, entry.nbytes, name) for name, entry in entries.items()]
    end = data
    for start, nbytes, name in sorted(spans):
        if start != end:
            begins = f"{shown(name)} begins at byte {start - data} of the data"
            raise damaged(file, f"{begins}, but the tensor before it ends at {end - data}")
        end += nbytes
    if end > size:
        raise _cut_short(file, size, end)
    if end < size:
        what = f"{size} bytes present, but {end} expected by its header, {size - end} too many"
        raise damaged(file, what)
