"""Sealed: torch's `.metadata` with shardmath's index at its end, and one checksum over both.

1. One file defines a checkpoint, for torch and for shardmath: replacing the file replaces the checkpoint in one step.
2. torch's readers stop where the pickle ends. The index follows, and ends in a seal of a fixed length.
3. A file that has either mark, and not the seal that belongs to it, is damaged. torch's own files have neither.

    the pickle        torch's Metadata
    BEGIN             a mark
    the index         JSON, as in `shardmath.json`
    8 bytes           length of the index, little-endian
    12 bytes          the save's digits
    32 bytes          SHA-256 of all before
    END               a mark

4. `shardmath.json` is a copy of the index, for people and for other programs. It ends in its own checksum.
"""

from __future__ import annotations

from hashlib import sha256
from typing import NamedTuple

from shardmath_torch.checkpoints.files.places import CheckpointError

__all__ = ["SEAL", "Sealed", "holds", "save_of", "seal", "sign", "unseal"]

BEGIN, END = b"\0shardmath index\0", b"\0shardmath sealed\0"
DIGITS = 12
"""How many digits identify a save."""
_LENGTH, _SUM = 8, 32
SEAL = _LENGTH + DIGITS + _SUM + len(END)
"""The length of the seal in bytes."""
_SIGNED = ',"sum":"'


class Sealed(NamedTuple):
    """The content of a `.metadata` file by `save`: torch's pickled metadata, the index of files and tensors as JSON,
    and the save's identifier."""

    pickled: bytes
    json: str
    save: str


def seal(content: Sealed) -> bytes:
    """Return the bytes of a `.metadata` file with this `content`. They end in a checksum of all bytes before it, and a
    constant (END) that tells readers that there is a checksum."""
    index = content.json.encode()
    length = len(index).to_bytes(_LENGTH, "little")
    body = content.pickled + BEGIN + index + length + content.save.encode()
    return body + sha256(body).digest() + END


def unseal(text: bytes, where: object) -> Sealed | None:
    """Return the parts of a `.metadata` file with the bytes `text`; None if `save` did not write it. Raises
    CheckpointError, naming the file `where`, if it is damaged.

    >>> unseal(seal(Sealed(b"pickle", "{}", "0123456789ab")), "x")
    Sealed(pickled=b'pickle', json='{}', save='0123456789ab')
    >>> unseal(b"pickle", "x")
    """
    if not text.endswith(END) and BEGIN not in text:
        return None
    body, checksum = _split_end(text.removesuffix(END), _SUM)
    if not text.endswith(END) or sha256(body).digest() != checksum:
        raise _damaged(where, "its content does not have the SHA-256 checksum at its end")
    try:
        return _read_body(body)
    except ValueError as error:
        raise _damaged(where, f"its checksum is right, but {error}") from error


def _damaged(where: object, what: str) -> CheckpointError:
    """The error for a `.metadata` file by `save` at the path `where` with the fault `what`."""
    fix = "fetch it again, remove it to load by shardmath.json, or save again"
    return CheckpointError(f"{where} is damaged: {what}; {fix}")


def _read_body(body: bytes) -> Sealed:
    """The parts of a `.metadata` file before its checksum. Raises ValueError if `seal` did not write it. Anyone can
    make a checksum."""
    body, save = _split_end(body, DIGITS)
    body, length = _split_end(body, _LENGTH)
    body, index = _split_end(body, int.from_bytes(length, "little"))
    if not body.endswith(BEGIN):
        raise ValueError(f"no index of {len(index)} bytes is there")
    return Sealed(body.removesuffix(BEGIN), index.decode(), save.decode())


def _split_end(text: bytes, length: int) -> tuple[bytes, bytes]:
    """The bytes `text` without the last `length` bytes, and these."""
    end = max(0, len(text) - length)
    return text[:end], text[end:]


def save_of(tail: bytes) -> str | None:
    """Return the identifier of the save that wrote a `.metadata` file; None if shardmath's `save` did not write it.
    `tail` is the end of the file: at least as many bytes as the constant `SEAL` says."""
    if not tail.endswith(END) or len(tail) < SEAL:
        return None
    # The digits follow the length of the index, with which the seal begins.
    start = len(tail) - SEAL + _LENGTH
    return tail[start : start + DIGITS].decode("ascii", "replace")


def sign(text: str) -> str:
    """Return the JSON object `text` with a last member added: a checksum of the text before it.

    >>> holds(sign('{"a":1}')), holds(sign('{"a":1}').replace("1", "3"))
    (True, False)
    """
    return _end_with_sum(text.removesuffix("}") + _SIGNED)


def holds(text: str) -> bool:
    """Whether the JSON text `text` ends in the right checksum, as `sign` adds it."""
    beginning, mark, _ = text.rpartition(_SIGNED)
    return bool(mark) and text == _end_with_sum(beginning + mark)


def _end_with_sum(beginning: str) -> str:
    """The beginning of a JSON object, with its checksum appended as the last value, and closed."""
    checksum = sha256(beginning.encode()).hexdigest()
    return beginning + checksum + '"}'
