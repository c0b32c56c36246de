"""Agreement: before anything moves, every rank says what it is about to do, and whether it objects.

1. One record of fixed size per rank, all gathered: so it costs the same whatever is wrong, and
   nobody is left waiting.
2. A record is a `Ballot`: what I am about to do (which all must say alike), an objection (empty for
   none), and what ranks tell each other beside that.
3. Any objection, or two ballots that do not say the same, raise the same ExchangeError (`Refused`)
   on every rank.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from shardmath.base.text import show_ranks
from shardmath_torch.groups.agreement.turns import Refused
from shardmath_torch.groups.agreement.wire import Wire

__all__ = ["Ballot", "decode", "encode", "vote"]

RECORD = 1024
"""Bytes per rank; longer texts are cut."""

HEADER = struct.Struct("<II???HHHH")
"""Nonce, peers, the three flags, and the bytes of claim, purpose, objection and what is said, which follow."""

CLAIM, PURPOSE = 300, 200
"""Bytes of a claim and of a purpose; an objection has the rest of the record."""

SHOWN = 8
"""Objections that a message shows in full."""


class Ballot(NamedTuple):
    """What a rank says: `claim`, `purpose` and `records_gradient` all ranks must say alike.

    `claim` is what it is about to do, `purpose` what for. `records_gradient`: its move is one of a
    gradient, which autograd records. `objection` is what speaks against it. `peers` is the most
    ranks that it sends to or receives from, by which the pace is set, and `is_unordered` says that
    at this pace its addends come out of order. `serves_store`: its process serves the group's
    store. `nonce` is drawn by chance, below 2^32. `said` is for whoever calls the vote; of that
    ranks get what the record has room for.
    """

    claim: str
    purpose: str = ""
    records_gradient: bool = False
    objection: str = ""
    peers: int = 0
    is_unordered: bool = False
    serves_store: bool = False
    nonce: int = 0
    said: bytes = b""

    @property
    def intent(self) -> str:
        """What all ranks must say alike, in words.

        >>> Ballot("move 1", "step 3", records_gradient=True).intent
        "move 1, for 'step 3', a gradient to be differentiated"
        """
        purpose = f", for {self.purpose!r}" if self.purpose else ""
        recorded = ", a gradient to be differentiated" if self.records_gradient else ""
        return f"{self.claim}{purpose}{recorded}"


def encode(ballot: Ballot) -> bytes:
    """The ballot as RECORD bytes.

    >>> ballot = Ballot("move 1", objection="no", peers=7, said=b"xyz")
    >>> decode(encode(ballot)) == ballot
    True
    """
    claim = _cut(_to_bytes(ballot.claim), CLAIM)
    purpose = _cut(_to_bytes(ballot.purpose), PURPOSE)
    room = RECORD - HEADER.size - len(claim) - len(purpose)
    objection = _to_bytes(ballot.objection)[:room]
    said = ballot.said[: room - len(objection)]
    header = HEADER.pack(
        ballot.nonce,
        ballot.peers,
        ballot.records_gradient,
        ballot.is_unordered,
        ballot.serves_store,
        len(claim),
        len(purpose),
        len(objection),
        len(said),
    )
    record = header + claim + purpose + objection + said
    return record.ljust(RECORD, b"\0")


def _to_bytes(text: str) -> bytes:
    """The text in UTF-8; a lone surrogate, which has none, as it is escaped."""
    return text.encode(errors="backslashreplace")


def _cut(text: bytes, most: int) -> bytes:
    """At most so many bytes of the text.

    One that is too long ends in a checksum of all of it: what differs beyond the cut still differs.
    """
    if len(text) <= most:
        return text
    mark = f"... {zlib.crc32(text):08x}".encode()
    return text[: most - len(mark)] + mark


def decode(record: bytes) -> Ballot:
    """The ballot that `encode` was given, its texts cut."""
    fields = HEADER.unpack_from(record)
    nonce, peers, records_gradient, is_unordered, serves_store, *lengths, length_said = fields
    texts = []
    start = HEADER.size
    for length in lengths:
        text = record[start : start + length]
        # A letter of several bytes may have been cut in the middle.
        texts.append(text.decode(errors="ignore"))
        start += length
    claim, purpose, objection = texts
    said = record[start : start + length_said]
    return Ballot(
        claim, purpose, records_gradient, objection, peers, is_unordered, serves_store, nonce, said
    )


def vote(
    wire: Wire, ranks: Sequence[int], mine: Ballot, patience: float | None = None
) -> tuple[Ballot, ...]:
    """Everybody's ballots, in the group's order `ranks`; waits `patience` seconds instead of the wire's own.

    Raises Refused on every rank if any rank objects or intends something else, PeerFailure if one
    does not vote.
    """
    records = wire.gather(encode(mine), patience)
    # This rank's own is read back like the others', so that all compare what was cut alike.
    ballots = tuple([decode(record) for record in records])
    objections: dict[int, str] = {}
    intents: dict[int, str] = {}
    for rank, ballot in zip(ranks, ballots, strict=True):
        intents[rank] = ballot.intent
        if ballot.objection:
            objections[rank] = ballot.objection
    if objections:
        raise Refused(_word_objections(objections))
    if len(set(intents.values())) > 1:
        raise Refused(_word_disagreement(intents))
    return ballots


def _word_objections(objections: Mapping[int, str]) -> str:
    """One line for each different objection, naming the ranks that have it."""
    by_text = _group_ranks(objections)
    lines = [f"{show_ranks(sorted(ranks))}: {text}" for text, ranks in by_text.items()]
    shown = lines[:SHOWN]
    if len(lines) > SHOWN:
        shown.append(f"and {len(lines) - SHOWN} more objections")
    return "\n".join([*shown, "nothing was moved"])


def _word_disagreement(intents: Mapping[int, str]) -> str:
    """What ranks intend, one line each, beginning with what most of them do."""
    by_text = _group_ranks(intents)
    by_number = sorted(by_text.items(), key=lambda item: (-len(item[1]), item[1]))
    lines = [f"{show_ranks(sorted(ranks))}: {text}" for text, ranks in by_number[:SHOWN]]
    calls = "make the same calls in the same order, with the same plan and settings, on every rank"
    fix = f"nothing was moved; {calls}"
    if any(" in thread " in text for text in by_text):
        alone = "give each thread a group of its own"
        alike = "or, where threads belong together, one name on all ranks, as by thread= of compile"
        fix += f"; {alone}, {alike}"
    return "\n".join(["ranks disagree on what to do", *lines, fix])


def _group_ranks(texts: Mapping[int, str]) -> dict[str, list[int]]:
    """The ranks that say each text."""
    by_text: dict[str, list[int]] = {}
    for rank, text in texts.items():
        by_text.setdefault(text, []).append(rank)
    return by_text
