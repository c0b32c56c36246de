"""Gather: one Python object from every rank, as before a plan is made.

1. A gather is a turn of the group, as a move is: a vote whose ballots carry the pickled objects. If
   an object is longer than a ballot's room, pieces follow, each counted as a vote.
2. So bytes of one gather are never taken for another's, and an interrupted rank breaks the group,
   which the others learn at once.
3. A ballot's claim names the thread, so that gathers of two threads are never mixed.
4. `shared` extends this to a call of several steps: an interrupt between two steps breaks the group
   too. One thread of a rank at a time is in such a call.
5. A backend without one of our transports gathers by torch's own collective, without these rules.
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
from shardmath_torch.groups.agreement.transport import TRANSPORTS, join_within
from shardmath_torch.groups.agreement.turns import check_thread, in_thread, turns_of
from shardmath_torch.groups.agreement.wire import PeerFailure
from shardmath_torch.groups.compat import Group

__all__ = ["TOLD", "gather", "in_step", "mark_told", "party_of", "shared", "word_lost"]

LENGTH = struct.Struct("<Q")
"""The pickled object's length, which precedes it: a ballot may have no room for all of it."""

PIECE = 1 << 18
"""Bytes per message. gloo notices an ended connection at once, except in a message of which part has moved."""

TOLD = "the other ranks have been told"
"""The note on an exception that all ranks know of."""

_T = TypeVar("_T")


def gather(mine: _T, group: Group | None, what: str = "make this call") -> list[_T]:
    """Send the object `mine` to all ranks, and return a list of all ranks' objects in the order of the group's ranks.
    `what` names the call in errors, and must be equal on all ranks.

    Waits for other ranks within the group's time limit. Raises ExchangeError if a rank is gone, does not call, or makes
    another call.
    """
    process_group = compat.group_of(group)
    party = party_of(process_group)
    if party is None:
        return _gather_by_torch(mine, process_group, what)
    return party.together(lambda: _gather(party, mine, what), _make_describe(what))


def party_of(group: Group) -> Party | None:
    """Return this rank's connections in the group (`Party`); None if this library has no transport for the group's
    backend."""
    if compat.backend_of(group) not in TRANSPORTS:
        return None
    return join_within(group, compat.time_limit_of(group))


def _make_describe(what: str) -> Describe:
    return lambda failure, rank: f"ranks were to {what}"


def _gather(party: Party, item: _T, what: str) -> list[_T]:
    """Vote with the pickled objects, and return all ranks' objects; if a ballot has no room for one, all are gathered
    again, in pieces."""
    pickled = b""
    objection = ""
    # An error here becomes an objection: the others wait for this rank's vote.
    try:
        check_thread(party.turns, None)
        pickled = pickle.dumps(item)
    except ExchangeError as error:
        objection = message_of(error)
    except Exception as error:
        objection = f"its object cannot be pickled: {word_error(error)}; pass a value that can be"
    content = LENGTH.pack(len(pickled)) + pickled
    mine_ballot = Ballot(what + in_thread(None), objection=objection, said=content)
    # A wait with an explicit time reacts to Ctrl-C: a rank may wait long for a late one.
    ballots = party.vote(mine_ballot, party.patience)
    sizes: list[int] = []
    objects: list[bytes] = []
    for ballot in ballots:
        (size,) = LENGTH.unpack_from(ballot.said)
        sizes.append(size)
        objects.append(ballot.said[LENGTH.size :])
    is_cut = any(len(part) < size for part, size in zip(objects, sizes, strict=True))
    if is_cut:
        objects = _gather_pieces(party, pickled, sizes)
    return [_unpickle(whole) for whole in objects]


def _gather_pieces(party: Party, pickled: bytes, sizes: list[int]) -> list[bytes]:
    """Gather each rank's pickled object, whose sizes are known, piece by piece."""
    longest = max(sizes)
    objects = [bytearray() for _ in sizes]
    for start in range(0, longest, PIECE):
        stop = min(start + PIECE, longest)
        # Pieces are of one size on all ranks; shorter objects are padded.
        padded_piece = pickled[start:stop].ljust(stop - start, b"\0")
        for gathered, piece in zip(objects, party.gather(padded_piece), strict=True):
            gathered += piece
    return [bytes(padded[:size]) for padded, size in zip(objects, sizes, strict=True)]


def _unpickle(pickled: bytes) -> Any:
    """Raises ExchangeError if a rank's object cannot be read here, as with other versions of packages."""
    try:
        return pickle.loads(pickled)
    except Exception as error:
        what = f"a rank's object cannot be read here: {word_error(error)}"
        fix = "run the same versions of Python and all packages on all ranks"
        raise ExchangeError(f"{what}; {fix}") from error


def _gather_by_torch(mine: _T, group: Group, what: str) -> list[_T]:
    """Gather by torch's own collective. Raises ExchangeError."""
    gathered: list[Any] = [mine] * dist.get_world_size(group)
    try:
        dist.all_gather_object(gathered, mine, group=group)
    except Exception as error:
        raise word_lost(error, group, what) from error
    return gathered


# Several steps


@contextmanager
def shared(group: Group | None) -> Iterator[None]:
    """Reserve the group for this thread during the `with` block, in which one call, such as a save, does several
    collective steps. Such calls of other threads of this process wait until the block ends.

    An exception after the first step breaks the group, unless all ranks know of it: they know of ShardErrors, and of
    exceptions marked by `mark_told`. Raises ExchangeError if another thread's call lasts longer than the group's time
    limit.
    """
    compat.check_registered(group, "save, load or export")
    if compat.is_alone():
        yield
        return
    process_group = compat.group_of(group)
    party = party_of(process_group)
    patience = float("inf") if party is None else party.patience
    with turns_of(process_group).call(patience), _breaking_on_error(party):
        yield


@contextmanager
def _breaking_on_error(party: Party | None) -> Iterator[None]:
    """Break the group if the call raises an exception that the others do not know of."""
    votes_before = 0 if party is None else party.turns.votes
    try:
        yield
    except ShardError:
        raise
    except BaseException as error:
        is_told = party is not None and party.turns.told is error
        if party is not None and not is_told and _is_relied_on(party, votes_before):
            party.leave(error)
        raise


def mark_told(error: BaseException, group: Group | None) -> None:
    """Mark `error` as known to all ranks, so that the group stays usable after the current call raises it. An error
    that the other ranks do not know of makes the group unusable, since they might wait for this rank."""
    if TOLD not in getattr(error, "__notes__", ()):
        error.add_note(TOLD)
    if not compat.is_alone():
        turns_of(compat.group_of(group)).told = error


@contextmanager
def in_step(group: Group | None) -> Iterator[None]:
    """Mark the `with` block as this rank's local part of a collective call on `group`, while the other ranks wait. In
    the block, ExchangeError is raised if this thread begins an operation on the group, or enters another such block."""
    if compat.is_alone():
        yield
        return
    with turns_of(compat.group_of(group)).step():
        yield


def _is_relied_on(party: Party, votes_before: int) -> bool:
    """Whether others may wait for this rank, which had `votes_before` votes before the call."""
    return party.turns.votes > votes_before and not party.turns.broken


def word_lost(error: Exception, group: Group | None, what: str) -> ExchangeError:
    """Return the error to raise after a torch collective failed with `error`, and mark the group as broken if this
    library has connections for it. `what` is a verb for the failed action, such as "save" in "ranks were to save"."""
    party = party_of(compat.group_of(group))
    if party is None:
        lost = f"a rank is gone, or did not {what}: {message_of(error)}"
        return ExchangeError(f"{lost}; start all ranks again, and make this call on each")
    return party.break_by(PeerFailure(None, message_of(error)), _make_describe(what))
