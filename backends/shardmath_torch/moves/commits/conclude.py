"""Conclude: a rank's way from its promise to its end, as the protocol's table has it.

1. The table says what a rank in each state does next, and this does it: it proposes what
   `PROPOSALS` has, and puts in place where `PLACING` says so. Nothing is decided here.
2. What a rank is left by once it has promised, as Ctrl-C, is raised when all that is done: a move
   that others have committed is in place here, too.
3. The promise is a vote. One that carries an objection is refused as any is, and the group is whole.
"""

from __future__ import annotations

from collections.abc import Callable

from shardmath.plans.protocol import PLACING, PROPOSALS, Event, Protocol, State
from shardmath_torch.groups import compat
from shardmath_torch.groups.agreement.agree import Ballot
from shardmath_torch.groups.agreement.party import Party
from shardmath_torch.groups.agreement.turns import Refused
from shardmath_torch.groups.agreement.wire import PeerFailure
from shardmath_torch.moves.commits.record import Record

__all__ = ["conclude"]

MOST_ERRORS = 8
"""Of one commit, interrupts too; after that something is wrong that no repetition mends."""


def conclude(party: Party, promise: Ballot, place: Callable[[], None]) -> None:
    """Promise, and `place` what has come if all ranks have promised: again, where it was left by an error.

    Raises Refused where a rank objects, PeerFailure where the group is broken, and whatever else it was left by.
    """
    protocol = party.turns.protocol
    left: BaseException | None = None
    errors = 0
    while True:
        try:
            _drive(party, promise, place)
            break
        except Refused:
            raise
        except BaseException as error:
            errors += 1
            if protocol.state in (State.IDLE, State.ACTING) or errors > MOST_ERRORS:
                raise
            left = left or error
            protocol.note(Event.LEAVE)
    if left is not None:
        raise left
    if protocol.state is State.BROKEN:
        raise PeerFailure(None, _word_verdict(protocol))


def _drive(party: Party, promise: Ballot, place: Callable[[], None]) -> None:
    """Do what the table says until it says nothing more."""
    turns = party.turns
    if turns.protocol.state in (State.IDLE, State.ACTING):
        party.vote(promise, event=Event.PROMISE)
    while True:
        state = turns.protocol.state
        if state in PROPOSALS:
            turns.protocol.note(_ask(party, PROPOSALS[state]))
        elif state in PLACING:
            place()
            turns.protocol.note(Event.PLACE)
        else:
            break


def _ask(party: Party, proposal: Event) -> Event:
    """What the group's record says."""
    turns = party.turns
    is_sure = proposal is Event.COMMIT
    # All have promised, hence have read the record before: one of them clears it away.
    former = turns.decided if is_sure and party.rank == party.ranks[0] else None
    record = Record(compat.store_of(party.group), turns.nonce, turns.votes, former)
    # Who is in doubt has waited for a rank already.
    verdict = record.ask(proposal, party.patience if is_sure else party.grace)
    if verdict is not Event.LOSE:
        turns.decided = turns.votes
    return verdict


def _word_verdict(protocol: Protocol) -> str:
    """Why the group is broken where this rank saw nothing break."""
    if protocol.verdict is Event.LOSE:
        return "the group's store, which has what was decided, does not answer"
    return "a rank gave up before all had heard that all is there"
