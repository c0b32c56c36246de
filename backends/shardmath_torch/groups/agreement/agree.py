"""Agreement: a vote before anything moves, in which every rank states its intent and its objections.

1. One record of fixed size per rank, all gathered: a vote costs the same if something is wrong, and
   leaves no rank waiting.
2. A record is a `Ballot`: the rank's intent, which must be equal on all ranks, an objection ("" for
   none), and further values that ranks exchange.
3. Any objection, or two different intents, raise the same ExchangeError (`Refused`) on every rank.
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
"""Bytes per rank; longer texts are truncated."""

HEADER = struct.Struct("<II???HHHH")
"""Nonce, peers, the three flags, and the lengths in bytes of claim, purpose, objection and `said`, which follow."""

CLAIM, PURPOSE = 300, 200
"""Most bytes of a claim and of a purpose; an objection has the rest of the record."""

SHOWN = 8
"""Most objections that a message shows."""


class Ballot(NamedTuple):
    """A rank's vote on the operation that the group's ranks are about to do together, with an objection if this rank
    cannot take part. All ranks must name the same operation (`claim`) and the same reason for it (`purpose`).

    - `claim`: the operation that the rank is about to do.
    - `purpose`: what the operation is for, in the caller's words.
    - `records_gradient`: autograd records the move, which is a gradient's.
    - `objection`: why the rank cannot take part; "" if it can.
    - `peers`: the most ranks that it sends to or receives from, which sets the pace.
    - `is_unordered`: at this pace its partial values arrive out of order.
    - `serves_store`: its process serves the group's store.
    - `nonce`: a random number below 2^32, part of this group's keys in the store: an earlier group's differ.
    - `said`: bytes for the vote's caller, truncated to the room that the record has.
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
        """The operation that the rank votes on and the operation's purpose, in words, which must be equal on all ranks.

        >>> Ballot("move 1", "step 3", records_gradient=True).intent
        "move 1, for 'step 3', a gradient to be differentiated"
        """
        purpose = f", for {self.purpose!r}" if self.purpose else ""
        recorded = ", a gradient to be differentiated" if self.records_gradient else ""
        return f"{self.claim}{purpose}{recorded}"


def encode(ballot: Ballot) -> bytes:
    """Return the vote `ballot` as a record of RECORD bytes, to send to the other ranks; texts that are too long are
    truncated.

    >>> ballot = Ballot("move 1", objection="no", peers=7, said=b"xyz")
    >>> decode(encode(ballot)) == ballot
    True
    """
    claim = _truncate(_to_bytes(ballot.claim), CLAIM)
    purpose = _truncate(_to_bytes(ballot.purpose), PURPOSE)
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
    """The text in UTF-8; a lone surrogate, which UTF-8 cannot encode, as its escape."""
    return text.encode(errors="backslashreplace")


def _truncate(text: bytes, most: int) -> bytes:
    """Truncate the text to `most` bytes.

    A truncated text ends in a checksum of the whole: texts that differ only after the cut stay different.
    """
    if len(text) <= most:
        return text
    mark = f"... {zlib.crc32(text):08x}".encode()
    return text[: most - len(mark)] + mark


def decode(record: bytes) -> Ballot:
    """Return the vote that `encode` wrote as `record`; texts that `encode` truncated stay so."""
    fields = HEADER.unpack_from(record)
    nonce, peers, records_gradient, is_unordered, serves_store, *lengths, length_said = fields
    texts = []
    start = HEADER.size
    for length in lengths:
        text = record[start : start + length]
        # A character of several bytes may have been cut in the middle.
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
    """Send this rank's vote `mine` to all ranks, and return all ranks' votes in the order of `ranks`; waits at most
    `patience` seconds (None: the connections' default).

    Raises Refused on every rank if any rank objects or intends something else, PeerFailure if one
    does not vote.
    """
    records = wire.gather(encode(mine), patience)
    # This rank's own ballot is decoded too, so that all ranks compare equally truncated texts.
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
    """One line per different objection, with its ranks."""
    by_text = _group_ranks(objections)
    lines = [f"{show_ranks(sorted(ranks))}: {text}" for text, ranks in by_text.items()]
    if len(lines) > SHOWN:
        lines[SHOWN:] = [f"and {len(lines) - SHOWN} more objections"]
    return "\n".join([*lines, "nothing was moved"])


def _word_disagreement(intents: Mapping[int, str]) -> str:
    """One line per different intent, with its ranks, the most frequent first."""
    by_text = _group_ranks(intents)
    # Of equally frequent texts, the one of the lowest rank comes first.
    most_frequent_first = sorted(by_text.items(), key=lambda item: (-len(item[1]), item[1]))
    shown_first = most_frequent_first[:SHOWN]
    lines = [f"{show_ranks(sorted(ranks))}: {text}" for text, ranks in shown_first]
    calls = "make the same calls in the same order, with the same plan and settings, on every rank"
    fix = f"nothing was moved; {calls}"
    # Claims of other threads than the main one end so (`turns.in_thread`).
    if any(" in thread " in text for text in by_text):
        groups = "give each thread its own group"
        names = (
            "or give threads that belong together one name on all ranks, as by thread= of compile"
        )
        fix += f"; {groups}, {names}"
    return "\n".join(["ranks disagree on what to do", *lines, fix])


def _group_ranks(texts: Mapping[int, str]) -> dict[str, list[int]]:
    """The ranks that gave each text; texts are in the order in which they first occur."""
    by_text: dict[str, list[int]] = {}
    for rank, text in texts.items():
        by_text.setdefault(text, []).append(rank)
    return by_text
