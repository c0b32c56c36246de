"""torch's `.metadata` with our index behind it, and one checksum over both.

1. One file says what a checkpoint is, for torch and for us, so to replace it is to replace the checkpoint at once.
2. torch's readers stop where the pickle does. What follows is ours, and ends in a seal of a fixed length.
3. A file that bears either mark of ours and not the seal that belongs to it is damaged. torch's own bear neither.

    the pickle        torch's Metadata
    BEGIN             a mark
    the index         JSON, as in `shardmath.json`
    8 bytes           length of the index, little-endian
    12 bytes          the save's digits
    32 bytes          SHA-256 of all before
    END               a mark

4. `shardmath.json` is a copy of the index, for people and for other programs. It ends in a checksum of its own.
"""

from __future__ import annotations

from hashlib import sha256
from typing import NamedTuple

from shardmath_torch.checkpoints.files.places import CheckpointError

__all__ = ["SEAL", "Sealed", "holds", "save_of", "seal", "sign", "unseal"]

BEGIN, END = b"\0shardmath index\0", b"\0shardmath sealed\0"
DIGITS = 12
"""Of a save."""
_LENGTH, _SUM = 8, 32
SEAL = _LENGTH + DIGITS + _SUM + len(END)
"""Bytes."""
_SIGNED = ',"sum":"'


class Sealed(NamedTuple):
    """What lies in a sealed file."""

    pickled: bytes
    json: str
    save: str


def seal(content: Sealed) -> bytes:
    """The bytes of the file."""
    index = content.json.encode()
    length = len(index).to_bytes(_LENGTH, "little")
    body = content.pickled + BEGIN + index + length + content.save.encode()
    return body + sha256(body).digest() + END


def unseal(text: bytes, where: object) -> Sealed | None:
    """What lies in the file; None for one that is not ours. Raises CheckpointError for one that is damaged.

    >>> unseal(seal(Sealed(b"pickle", "{}", "0123456789ab")), "x")
    Sealed(pickled=b'pickle', json='{}', save='0123456789ab')
    >>> unseal(b"pickle", "x")
    """
    if not text.endswith(END) and BEGIN not in text:
        return None
    body, found = _cut(text.removesuffix(END), _SUM)
    if not text.endswith(END) or sha256(body).digest() != found:
        raise _damaged(where, "its checksum does not hold")
    try:
        return _read_body(body)
    except ValueError as error:
        raise _damaged(where, f"its checksum holds, but {error}") from error


def _damaged(where: object, what: str) -> CheckpointError:
    """The error of a file that bears our marks, and of which `what` is wrong."""
    fix = "fetch it again, or remove it to load by the index beside it"
    return CheckpointError(f"{where} is damaged: {what}; {fix}")


def _read_body(body: bytes) -> Sealed:
    """What lies before the checksum. Raises ValueError for what `seal` does not write: anybody can make a checksum."""
    body, save = _cut(body, DIGITS)
    body, length = _cut(body, _LENGTH)
    body, index = _cut(body, int.from_bytes(length, "little"))
    if not body.endswith(BEGIN):
        raise ValueError("no index begins where its length says")
    return Sealed(body.removesuffix(BEGIN), index.decode(), save.decode())


def _cut(text: bytes, length: int) -> tuple[bytes, bytes]:
    """The text without its last bytes, and these."""
    at = max(0, len(text) - length)
    return text[:at], text[at:]


def save_of(tail: bytes) -> str | None:
    """The save's digits, from the last SEAL bytes of a file or more; None where it is not ours."""
    if not tail.endswith(END) or len(tail) < SEAL:
        return None
    at = len(tail) - SEAL + _LENGTH
    return tail[at : at + DIGITS].decode("ascii", "replace")


def sign(text: str) -> str:
    """A JSON object in text, with a checksum of all before as its last member.

    >>> holds(sign('{"a":1}')), holds(sign('{"a":1}').replace("1", "3"))
    (True, False)
    """
    return _end_with_sum(text.removesuffix("}") + _SIGNED)


def holds(text: str) -> bool:
    """Whether the checksum of such a text holds."""
    begun, mark, _ = text.rpartition(_SIGNED)
    return bool(mark) and text == _end_with_sum(begun + mark)


def _end_with_sum(begun: str) -> str:
    """The text with its checksum behind it, and the object closed."""
    checksum = sha256(begun.encode()).hexdigest()
    return begun + checksum + '"}'
