"""Digest: a fingerprint of a value's repr, the same on every rank, machine and Python.

>>> digest((1, "tp"))[:16]
'e4a9d0500096bc8c'
"""

from __future__ import annotations

__all__ = ["digest"]


def digest(value: object) -> str:
    """SHA-256 of the repr of a value made of tuples, numbers, text and Runs, as 64 hexadecimal digits."""
    from hashlib import sha256  # OpenSSL takes 5 ms to load, and `import shardmath` should not

    return sha256(repr(value).encode()).hexdigest()
