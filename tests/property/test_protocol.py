"""The protocol: its table is whole, and a group that was left in the middle stays broken."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmath import ExchangeError
from shardmath.protocol import TABLE, Event, Protocol, State


@given(st.lists(st.sampled_from(Event), max_size=12))
def test_events_lead_where_the_table_says(events: list[Event]) -> None:
    protocol = Protocol()
    for event in events:
        before = protocol.state
        if event in TABLE[before]:
            assert protocol.note(event) is TABLE[before][event]
        else:
            with pytest.raises(ExchangeError, match=f"is {before.value} cannot {event.value}"):
                protocol.note(event)
            assert protocol.state is before


def test_whoever_is_counted_on_breaks_the_group_by_leaving() -> None:
    """And nobody else does; from there no event leads back."""
    for state in State:
        left = Protocol(state)
        counted = left.counted_on
        assert (left.note(Event.LEAVE) is State.BROKEN) == (counted or state is State.BROKEN)
    assert set(TABLE[State.BROKEN].values()) == {State.BROKEN}


def test_every_state_is_reached() -> None:
    reached = {State.IDLE}
    for _ in State:
        reached |= set(itertools.chain.from_iterable(TABLE[s].values() for s in reached))
    assert reached == set(State) == set(TABLE)
