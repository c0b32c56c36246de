"""Protocol: what a rank goes through when ranks of a group do something together, as a table, without I/O.

    idle       nobody counts on this rank
    agreeing   its vote is out: others may count on it
    acting     all have agreed: bytes are on their way
    promised   its report is out that all has arrived here: it can no longer call it off alone
    deciding   all have promised: it proposes to commit
    doubting   it was left after its promise: it proposes to abort, and learns what is decided
    committed  it is decided that the new is to be: it has to put it in place
    owing      the same, and it was left: once the new is in place, the group does nothing more
    broken     it was left in the middle; the group does nothing more

Whoever drives it says what happens (`Event`), and asks where that leads. An event that has no
business in a state is a mistake of the driver, and an error at once.

1. What is decided is one record that all ranks reach, written once: a proposal is written where
   nothing is, and what stands there then is the decision (`PROPOSALS`).
2. Only who knows that all have promised proposes to commit, so a rank that has not promised calls
   it off by leaving. One that has asks the record: the others may have gone on without it.
3. Where the record cannot be reached, a rank does not guess: its verdict is LOSE.
4. Whatever it is left by, a rank puts in place what was committed (`PLACING`).

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
    """Where a rank stands between two calls of others."""

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
    """What happens to a rank: what it does, what it hears, or how its call ends."""

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
        # A call that ends before its vote, well or not, has told nobody anything.
        Event.FINISH: State.IDLE,
        Event.LEAVE: State.IDLE,
        # Several moves that end together have all their bytes before.
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
        # Without this rank's promise nobody commits.
        Event.LEAVE: State.BROKEN,
    },
    State.PROMISED: {
        Event.AGREE: State.DECIDING,
        # A promise can carry an objection, of which all hear or nobody can know enough to commit.
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
"""Where each event leads. What is not here cannot happen."""

PROPOSALS: Mapping[State, Event] = {State.DECIDING: Event.COMMIT, State.DOUBTING: Event.ABORT}
"""What a rank in the state proposes; what the record then says, or LOSE, is the next event."""

PLACING = frozenset({State.COMMITTED, State.OWING})
"""Where a rank puts what it has received in place; PLACE is then the next event."""

VERDICTS = frozenset({Event.COMMIT, Event.ABORT, Event.LOSE})
"""What a rank can learn from the record."""


@dataclass
class Protocol:
    """One rank's state in one group; `verdict` is what it learned of its promise, if that came last."""

    state: State = State.IDLE
    verdict: Event | None = None
    table: Table = field(default_factory=lambda: TABLE, repr=False)

    @property
    def counted_on(self) -> bool:
        """Whether others may wait for this rank, or it for what they decide."""
        return self.state not in (State.IDLE, State.BROKEN)

    def note(self, event: Event) -> State:
        """The state that the event leads to. Raises ExchangeError for one that cannot happen here."""
        allowed = self.table[self.state]
        if event not in allowed:
            others = [other.value for other in allowed]
            may = ", ".join(others[:-1]) + " or " * (len(others) > 1) + others[-1]
            what = f"a rank that is {self.state.value} cannot {event.value}"
            raise ExchangeError(f"{what}; it has to {may}")
        if event in (Event.VOTE, Event.PROMISE):
            self.verdict = None
        if event in VERDICTS:
            self.verdict = event
        self.state = allowed[event]
        return self.state
