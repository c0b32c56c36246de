"""Conclude: a rank's steps from its promise to the end, by the protocol's table.

1. The table tells what a rank in each state does next: propose an event of `PROPOSALS`, or put the
   moves in place in a state of `PLACING`. Nothing is decided here.
2. An exception after the promise, as Ctrl-C, is raised once all steps are done: a move that others
   have committed is in place here, too.
3. The promise is a vote. An objection refuses it like any vote, and the group stays whole.
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
"""Most errors of one commit, interrupts included; after that, further repetition cannot help."""


def conclude(party: Party, promise: Ballot, place: Callable[[], None]) -> None:
    """Send this rank's vote `promise`, which says that all its bytes have arrived; once all ranks have sent theirs,
    call `place` to put the bytes in place. `party` is this rank as a member of the process group.

    An error after the vote has begun, such as Ctrl-C, is raised only after ranks have decided whether to commit. The
    steps are tried again after such an error, a few times. Raises Refused if a rank objects, PeerFailure if the group
    is broken, and else the first error.
    """
    protocol = party.turns.protocol
    first_error: BaseException | None = None
    errors = 0
    while True:
        try:
            _drive(party, promise, place)
            break
        except Refused:
            raise
        except BaseException as error:
            errors += 1
            # Nothing is left to decide or do: this rank has not promised, or has put all in place.
            is_done = protocol.state in (State.IDLE, State.ACTING)
            # A process that was forked from this rank, as in a signal handler, proposes nothing: the rank does.
            if is_done or errors > MOST_ERRORS or compat.is_inherited(party.group):
                raise
            first_error = first_error or error
            # In the state that follows, `_drive` proposes to abort, or puts in place what was committed.
            protocol.note(Event.LEAVE)
    if first_error is not None:
        raise first_error
    if protocol.state is State.BROKEN:
        raise PeerFailure(None, _word_verdict(protocol))


def _drive(party: Party, promise: Ballot, place: Callable[[], None]) -> None:
    """Do the table's steps until there are none."""
    turns = party.turns
    # When the steps are tried again, the promise has been sent.
    if turns.protocol.state in (State.IDLE, State.ACTING):
        party.vote(promise, event=Event.PROMISE)
    while True:
        state = turns.protocol.state
        if state in PROPOSALS:
            turns.protocol.note(_propose(party, PROPOSALS[state]))
        elif state in PLACING:
            place()
            turns.protocol.note(Event.PLACE)
        else:
            break


def _propose(party: Party, proposal: Event) -> Event:
    """Propose to the group's record, and return the decision."""
    turns = party.turns
    is_sure = proposal is Event.COMMIT
    # All have promised, hence have read the previous record: one of them removes it.
    record_to_remove = turns.decided if is_sure and party.rank == party.ranks[0] else None
    record = Record(compat.store_of(party.group), turns.nonce, turns.votes, record_to_remove)
    # A rank in doubt has waited for another rank already, and so waits less.
    verdict = record.ask(proposal, party.patience if is_sure else party.grace)
    # LOSE: the store does not answer, so nothing is known to be decided.
    if verdict is not Event.LOSE:
        turns.decided = turns.votes
    return verdict


def _word_verdict(protocol: Protocol) -> str:
    """Why the group is broken if nothing failed on this rank."""
    if protocol.verdict is Event.LOSE:
        return "the process group's store, which has the ranks' decision, does not answer"
    return "a rank failed before every rank knew that all bytes had arrived"
