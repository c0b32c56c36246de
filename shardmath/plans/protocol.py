"""Protocol: the states of a rank while ranks of a group do something together, as a table, without I/O.

    idle       no other rank depends on this rank
    agreeing   it has sent its vote: others may wait for it
    acting     all have agreed: bytes are in flight
    promised   it has reported that everything has arrived here: it can no longer abort by itself
    deciding   all have promised: it proposes to commit
    doubting   its call ended after its promise: it proposes to abort, and reads the decision
    committed  the decision is to commit: it has to put the new values in place
    owing      as committed, but its call has ended: once the values are in place, the group is broken
    broken     its call ended in the middle; the group does nothing more

The driver reports what happens (`Event`) and gets the next state. An event that cannot happen in a
state is a mistake of the driver, and raises ExchangeError at once.

1. The decision is one record that all ranks can reach, written once: a proposal is written if the
   record is empty, and the record's content is the decision (`PROPOSALS`).
2. Only a rank that knows that all have promised proposes to commit, so a rank that has not promised
   aborts by leaving. A rank that has promised reads the record: the others may have committed.
3. If the record cannot be reached, a rank does not guess: its verdict is LOSE.
4. However its call ends, a rank puts in place what was committed (`PLACING`).

>>> protocol = Protocol()
>>> [protocol.note(event).value for event in (Event.VOTE, Event.AGREE, Event.FINISH)]
['agreeing', 'acting', 'idle']
>>> [protocol.note(event).value for event in (Event.PROMISE, Event.LEAVE, Event.COMMIT, Event.PLACE)]
['promised', 'doubting', 'owing', 'broken']
>>> Protocol().note(Event.AGREE)
Traceback (most recent call last):
shardmath.ExchangeError: a rank that is idle cannot agree; it has to vote, finish, leave or promise
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

from shardmath.base.errors import ExchangeError

__all__ = ["PLACING", "PROPOSALS", "TABLE", "VERDICTS", "Event", "Protocol", "State", "Table"]


class State(Enum):
    """The state of one rank while the ranks of a group decide together whether to carry out a move, such as idle, or
    broken after a failure."""

    IDLE = "idle"
    AGREEING = "agreeing"
    ACTING = "acting"
    PROMISED = "promised"
    DECIDING = "deciding"
    DOUBTING = "doubting"
    COMMITTED = "committed"
    OWING = "owing"
    BROKEN = "broken"


class Event(Enum):
    """An event that changes the State of a rank during a move: a step of this rank, a message from other ranks, or the
    end of the function call with which this rank takes part."""

    VOTE = "vote"
    AGREE = "agree"
    REFUSE = "refuse"
    FINISH = "finish"
    LEAVE = "leave"
    PROMISE = "promise"
    COMMIT = "commit"
    ABORT = "abort"
    LOSE = "lose the record"
    PLACE = "place"


Table: TypeAlias = Mapping[State, Mapping[Event, State]]

TABLE: Table = {
    State.IDLE: {
        Event.VOTE: State.AGREEING,
        # A call that ends before its vote, well or not, has sent nothing to other ranks.
        Event.FINISH: State.IDLE,
        Event.LEAVE: State.IDLE,
        # Several moves that end together promise when the bytes of all have arrived.
        Event.PROMISE: State.PROMISED,
    },
    State.AGREEING: {
        Event.AGREE: State.ACTING,
        Event.REFUSE: State.IDLE,
        Event.LEAVE: State.BROKEN,
    },
    State.ACTING: {
        # A receipt is one more vote; so are the votes of a compile.
        Event.VOTE: State.AGREEING,
        Event.FINISH: State.IDLE,
        Event.PROMISE: State.PROMISED,
        # Without this rank's promise no rank commits.
        Event.LEAVE: State.BROKEN,
    },
    State.PROMISED: {
        Event.AGREE: State.DECIDING,
        # A promise can carry an objection. Either all ranks receive it, or no rank knows that all promised.
        Event.REFUSE: State.IDLE,
        Event.LEAVE: State.DOUBTING,
    },
    State.DECIDING: {
        Event.COMMIT: State.COMMITTED,
        Event.ABORT: State.BROKEN,
        Event.LOSE: State.BROKEN,
        Event.LEAVE: State.DOUBTING,
    },
    State.DOUBTING: {
        Event.COMMIT: State.OWING,
        Event.ABORT: State.BROKEN,
        Event.LOSE: State.BROKEN,
        Event.LEAVE: State.DOUBTING,
    },
    State.COMMITTED: {
        Event.PLACE: State.ACTING,
        Event.LEAVE: State.OWING,
    },
    State.OWING: {
        Event.PLACE: State.BROKEN,
        Event.LEAVE: State.OWING,
    },
    State.BROKEN: {Event.LEAVE: State.BROKEN},
}
"""By state and event, the next state. Events that are not listed cannot happen."""

PROPOSALS: Mapping[State, Event] = {State.DECIDING: Event.COMMIT, State.DOUBTING: Event.ABORT}
"""By state, the proposal of the rank; the record's content, or LOSE, is then the next event."""

PLACING = frozenset({State.COMMITTED, State.OWING})
"""The states in which a rank puts the received values in place; PLACE is then the next event."""

VERDICTS = frozenset({Event.COMMIT, Event.ABORT, Event.LOSE})
"""What a rank can learn from the record."""


@dataclass
class Protocol:
    """The state of one rank while its group decides together whether to commit or abort a move. The decision is written
    once to a record that all ranks read; `verdict` is what this rank last read: commit, abort, or that the record
    cannot be reached."""

    state: State = State.IDLE
    verdict: Event | None = None
    table: Table = field(default_factory=lambda: TABLE, repr=False)

    @property
    def counted_on(self) -> bool:
        """Whether this rank takes part in a joint decision that is not finished, so that it might be waiting for other
        ranks, and they for it."""
        return self.state not in (State.IDLE, State.BROKEN)

    def note(self, event: Event) -> State:
        """Move to the state that `event` leads to, and return it. Raises ExchangeError if it cannot happen now."""
        allowed = self.table[self.state]
        if event not in allowed:
            verbs = [possible.value for possible in allowed]
            choices = ", ".join(verbs[:-1]) + " or " * (len(verbs) > 1) + verbs[-1]
            what = f"a rank that is {self.state.value} cannot {event.value}"
            raise ExchangeError(f"{what}; it has to {choices}")
        if event in (Event.VOTE, Event.PROMISE):
            self.verdict = None
        if event in VERDICTS:
            self.verdict = event
        self.state = allowed[event]
        return self.state
