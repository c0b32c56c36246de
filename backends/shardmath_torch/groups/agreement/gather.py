"""What every rank says, gathered as Python objects, before anything is planned.

1. A gather is a turn of the group, as a move is: a vote on what ranks are about to do, which carries
   what is said where that is short; of longer things, pieces follow, each counted as a vote.
2. So bytes of one gather are never taken for another's, and whoever is interrupted in one breaks the
   group, of which the others hear at once.
3. What a rank says names its thread, so that two threads' gathers are never taken for each other's.
4. `shared` does the same for a call of several steps that is left between two of them. One thread
   of a rank at a time is in such a call.
5. A backend without a transport of ours gathers as torch does, without all that.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist

from shardmath.base.errors import ExchangeError, ShardError
from shardmath.base.text import message_of, word_error
from shardmath_torch.groups import compat
from shardmath_torch.groups.agreement.agree import Ballot
from shardmath_torch.groups.agreement.party import Describe, Party
from shardmath_torch.groups.agreement.transport import TRANSPORTS, join
from shardmath_torch.groups.agreement.turns import check_thread, in_thread, turns_of
from shardmath_torch.groups.agreement.wire import PeerFailure
from shardmath_torch.groups.compat import Group

__all__ = ["TOLD", "gather", "in_step", "mark_told", "party_of", "shared", "word_lost"]

GRACE_S = 5.0
"""At most, for finding out who failed: of the group's time limit, a fifth and a little, for telling the caller."""

LENGTH = struct.Struct("<Q")
"""Before what is said: its length, since a ballot may have no room for all of it."""

PIECE = 1 << 18
"""Bytes that go at once. gloo notices at once that a connection ended, but for a message of which part has moved."""

TOLD = "the other ranks have been told"
"""A note on an exception that this rank goes on with, and of which all ranks have heard."""

_T = TypeVar("_T")


def gather(mine: _T, group: Group | None, what: str = "make this call") -> list[_T]:
    """What the ranks say, in the group's order. Waits as long as the group's own time limit.

    `what` they are about to do all say alike. Raises ExchangeError where a rank is gone, does not
    call, or calls for something else.
    """
    found = compat.group_of(group)
    party = party_of(found)
    if party is None:
        return _gather_by_torch(mine, found, what)
    return party.together(lambda: _gather(party, mine, what), _describe(what))


def party_of(group: Group) -> Party | None:
    """This rank in the group; None where no transport of ours serves it."""
    if compat.backend_of(group) not in TRANSPORTS:
        return None
    limit = compat.time_limit_of(group)
    grace = min(GRACE_S, limit / 5)
    return join(group, limit - 1.2 * grace, grace)


def _describe(what: str) -> Describe:
    return lambda failure, rank: f"ranks were to {what}"


def _gather(party: Party, mine: _T, what: str) -> list[_T]:
    """Vote, and then tell what the ballots have no room for."""
    said = b""
    objection = ""
    # What fails here is an objection: the others wait for this rank's vote.
    try:
        check_thread(party.turns, None)
        said = pickle.dumps(mine)
    except ExchangeError as error:
        objection = message_of(error)
    except Exception as error:
        objection = f"what it says cannot be pickled: {word_error(error)}"
    told = LENGTH.pack(len(said)) + said
    # With a time of its own a wait hears Ctrl-C: here a rank may wait for one that is late.
    ballots = party.vote(
        Ballot(what + in_thread(None), objection=objection, said=told), party.patience
    )
    sizes: list[int] = []
    texts: list[bytes] = []
    for ballot in ballots:
        sizes += LENGTH.unpack_from(ballot.said)
        texts.append(ballot.said[LENGTH.size :])
    if any(len(text) < size for text, size in zip(texts, sizes, strict=True)):
        texts = _gather_pieces(party, said, sizes)
    return [_decode(text) for text in texts]


def _gather_pieces(party: Party, said: bytes, sizes: list[int]) -> list[bytes]:
    """All that each rank says, of these sizes."""
    most = max(sizes)
    texts = [bytearray() for _ in sizes]
    for start in range(0, most, PIECE):
        stop = min(start + PIECE, most)
        piece = said[start:stop].ljust(stop - start, b"\0")
        pieces = party.gather(piece)
        for text, piece in zip(texts, pieces, strict=True):
            text += piece
    return [bytes(text[:size]) for text, size in zip(texts, sizes, strict=True)]


def _decode(text: bytes) -> Any:
    """What a rank said. Raises ExchangeError where this one cannot tell, as with another version of everything."""
    try:
        return pickle.loads(text)
    except Exception as error:
        what = f"what a rank says cannot be read here: {word_error(error)}"
        raise ExchangeError(f"{what}; run one version of everything") from error


def _gather_by_torch(mine: _T, group: Group, what: str) -> list[_T]:
    """What the ranks say. Raises ExchangeError."""
    said: list[Any] = [mine] * dist.get_world_size(group)
    try:
        dist.all_gather_object(said, mine, group=group)
    except Exception as error:
        raise word_lost(error, group, what) from error
    return said


# Several steps


@contextmanager
def shared(group: Group | None) -> Iterator[None]:
    """A call of several steps, one thread's at a time.

    Left after the first step by what the others have not heard of, it breaks the group. They have
    heard of our errors, and of what was marked by `mark_told`. Raises ExchangeError where another thread is
    in such a call as long as the group's own time limit.
    """
    compat.check_registered(group, "save, load or export")
    if compat.is_alone():
        yield
        return
    found = compat.group_of(group)
    party = party_of(found)
    patience = float("inf") if party is None else party.patience
    with turns_of(found).call(patience), _leaving(party):
        yield


@contextmanager
def _leaving(party: Party | None) -> Iterator[None]:
    """Break the group where the call is left by what the others have not heard of."""
    begun = 0 if party is None else party.turns.votes
    try:
        yield
    except ShardError:
        raise
    except BaseException as error:
        is_told = party is not None and party.turns.told is error
        if party is not None and not is_told and _is_counted_on(party, begun):
            party.leave(error)
        raise


def mark_told(error: BaseException, group: Group | None) -> None:
    """All ranks have heard of what this one goes on with, in this call: raised again in another, it is news."""
    if TOLD not in getattr(error, "__notes__", ()):
        error.add_note(TOLD)
    if not compat.is_alone():
        turns_of(compat.group_of(group)).told = error


@contextmanager
def in_step(group: Group | None) -> Iterator[None]:
    """What this rank does by itself in a call of several steps. Raises ExchangeError inside of another."""
    if compat.is_alone():
        yield
        return
    with turns_of(compat.group_of(group)).step():
        yield


def _is_counted_on(party: Party, begun: int) -> bool:
    """Whether others may wait for this rank, which had voted `begun` times before the call."""
    return party.turns.votes > begun and not party.turns.broken


def word_lost(error: Exception, group: Group | None, what: str) -> ExchangeError:
    """What to raise where a collective of torch's own broke, and the group with it; asks who failed first."""
    party = party_of(compat.group_of(group))
    if party is None:
        lost = f"a rank is gone, or did not {what}: {message_of(error)}"
        return ExchangeError(f"{lost}; see which ended first, and start the ranks again")
    return party.break_by(PeerFailure(None, message_of(error)), _describe(what))
