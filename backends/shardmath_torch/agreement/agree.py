"""Agreement: before anything moves, every rank says what it is about to do, and whether it objects.

1. One record of fixed size a rank, all gathered: so it costs the same whatever is wrong, and nobody is left waiting.
2. A record holds a **claim** (what I am about to do: all must be equal), a number, and an objection (empty for none).
3. Any objection, or two claims that differ, raise the same ExchangeError (`Refused`) on every rank.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from shardmath_torch.agreement.turns import Refused
from shardmath_torch.agreement.wire import Wire

__all__ = ["Ballot", "decode", "encode", "vote"]

RECORD = 1024
"""Bytes a rank; longer texts are cut."""

HEADER = struct.Struct("<qHH")
CLAIM = 300
SHOWN = 8
"""Objections that a message shows in full."""


class Ballot(NamedTuple):
    """What a rank says."""

    claim: str
    number: int = 0
    objection: str = ""


def encode(ballot: Ballot) -> bytes:
    """The ballot as RECORD bytes.

    >>> decode(encode(Ballot("move 1", 7, "no")))
    Ballot(claim='move 1', number=7, objection='no')
    """
    claim = _cut(ballot.claim.encode(errors="backslashreplace"))
    objection = ballot.objection.encode(errors="backslashreplace")[
        : RECORD - HEADER.size - len(claim)
    ]
    return (HEADER.pack(ballot.number, len(claim), len(objection)) + claim + objection).ljust(
        RECORD, b"\0"
    )


def _cut(claim: bytes) -> bytes:
    """A claim that is too long ends in a checksum of the whole: what differs beyond the cut still differs."""
    if len(claim) <= CLAIM:
        return claim
    mark = f"... {zlib.crc32(claim):08x}".encode()
    return claim[: CLAIM - len(mark)] + mark


def decode(record: bytes) -> Ballot:
    """The ballot that `encode` was given, its texts cut."""
    number, claim, objection = HEADER.unpack_from(record)
    text = record[HEADER.size :]
    cut = text[:claim], text[claim : claim + objection]
    return Ballot(cut[0].decode(errors="ignore"), number, cut[1].decode(errors="ignore"))


def vote(
    wire: Wire, ranks: Sequence[int], mine: Ballot, patience: float | None = None
) -> tuple[Ballot, ...]:
    """Everybody's ballots, in the group's order `ranks`; waits `patience` seconds instead of the wire's own.

    Raises Refused on every rank if any rank objects or claims something else, PeerFailure if one does not vote.
    """
    records = wire.gather(encode(mine), patience)
    ballots = dict(zip(ranks, map(decode, records), strict=True))
    objections = {rank: b.objection for rank, b in ballots.items() if b.objection}
    if objections:
        raise Refused(_objected(objections))
    if len({b.claim for b in ballots.values()}) > 1:
        raise Refused(_disagreed({rank: b.claim for rank, b in ballots.items()}))
    return tuple(ballots.values())


def _objected(objections: Mapping[int, str]) -> str:
    """One part for each different objection, naming the ranks that have it."""
    by_text: dict[str, list[int]] = {}
    for rank, text in objections.items():
        by_text.setdefault(text, []).append(rank)
    parts = [f"{_ranks(ranks)}: {text}" for text, ranks in by_text.items()]
    more = [f"and {len(parts) - SHOWN} more objections"] if len(parts) > SHOWN else []
    return "\n".join([*parts[:SHOWN], *more, "nothing was moved"])


def _disagreed(claims: Mapping[int, str]) -> str:
    by_text: dict[str, list[int]] = {}
    for rank, text in claims.items():
        by_text.setdefault(text, []).append(rank)
    parts = [
        f"{_ranks(ranks)}: {text}"
        for text, ranks in sorted(by_text.items(), key=lambda x: (-len(x[1]), x[1]))
    ]
    fix = "nothing was moved; make the same calls in the same order, with the same plan and settings, on every rank"
    if any(" in thread " in text for text in by_text):
        fix += '; give each thread a group of its own, or, where threads of other names belong together, thread="..."'
    return "\n".join(["ranks disagree on what to do", *parts[:SHOWN], fix])


def _ranks(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 0-2, 5`.

    >>> _ranks([0, 1, 2, 5])
    'ranks 0-2, 5'
    """
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    shown = ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in spans)
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"
