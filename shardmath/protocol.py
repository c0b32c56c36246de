"""Protocol: what a rank goes through when ranks of a group do something together, as a table, without I/O.

    idle      nobody counts on this rank
    agreeing  its vote is out: others may count on it
    acting    all have agreed: bytes are on their way
    broken    it was left in the middle; the group does nothing more

Whoever drives it says what happens (`Event`), and asks where that leads. An event that has no
business in a state is a mistake of the driver, and an error at once.

>>> protocol = Protocol()
>>> [protocol.note(event).value for event in (Event.VOTE, Event.AGREE, Event.FINISH)]
['agreeing', 'acting', 'idle']
>>> protocol.note(Event.AGREE)
Traceback (most recent call last):
shardmath.ExchangeError: a rank that is idle cannot agree; it has to vote, finish or leave
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from shardmath.base.errors import ExchangeError

__all__ = ["TABLE", "Event", "Protocol", "State"]


class State(Enum):
    """Where a rank stands between two calls of others."""

    IDLE = "idle"
    AGREEING = "agreeing"
    ACTING = "acting"
    BROKEN = "broken"


class Event(Enum):
    """What happens to a rank: what it does, what it hears, or how its call ends."""

    VOTE = "vote"
    AGREE = "agree"
    REFUSE = "refuse"
    FINISH = "finish"
    LEAVE = "leave"


TABLE: dict[State, dict[Event, State]] = {
    State.IDLE: {
        Event.VOTE: State.AGREEING,
        # A call that ends before its vote, well or not, has told nobody anything.
        Event.FINISH: State.IDLE,
        Event.LEAVE: State.IDLE,
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
        Event.LEAVE: State.BROKEN,
    },
    State.BROKEN: {Event.LEAVE: State.BROKEN},
}
"""Where each event leads. What is not here cannot happen."""


@dataclass
class Protocol:
    """One rank's state in one group."""

    state: State = State.IDLE

    @property
    def counted_on(self) -> bool:
        """Whether others may wait for this rank."""
        return self.state in (State.AGREEING, State.ACTING)

    def note(self, event: Event) -> State:
        """The state that the event leads to. Raises ExchangeError for one that cannot happen here."""
        allowed = TABLE[self.state]
        if event not in allowed:
            others = [other.value for other in allowed]
            may = ", ".join(others[:-1]) + " or " * (len(others) > 1) + others[-1]
            what = f"a rank that is {self.state.value} cannot {event.value}"
            raise ExchangeError(f"{what}; it has to {may}")
        self.state = allowed[event]
        return self.state
