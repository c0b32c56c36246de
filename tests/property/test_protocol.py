"""The protocol: its table is whole, what breaks a group leaves it broken, and what ranks commit is one thing.

The last is found out by walking through every order in which ranks, wire and store can act (`drawn.crowd`).
"""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmath import ExchangeError
from shardmath.plans.protocol import PLACING, PROPOSALS, TABLE, VERDICTS, Event, Protocol, State
from tests.property.drawn.crowd import (
    ACKNOWLEDGED,
    BLOCK,
    LEFT_OUT,
    ONE_MOVE,
    TWO_MOVES,
    Crowd,
    Script,
    explore,
    write_always,
)


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
    """At once, or once it has learned and done what was decided; nobody else does, and no event leads back."""
    for state in State:
        left = Protocol(state)
        counted = left.counted_on
        left.note(Event.LEAVE)
        if left.state in PROPOSALS:
            left.note(Event.COMMIT)
        if left.state in PLACING:
            left.note(Event.PLACE)
        assert (left.state is State.BROKEN) == (counted or state is State.BROKEN)
    assert set(TABLE[State.BROKEN].values()) == {State.BROKEN}


def test_whoever_proposes_takes_any_answer() -> None:
    for state in PROPOSALS:
        assert set(TABLE[state]) >= VERDICTS
    for state in PLACING:
        assert Event.PLACE in TABLE[state]


def test_every_state_is_reached() -> None:
    reached = {State.IDLE}
    for _ in State:
        reached |= set(itertools.chain.from_iterable(TABLE[s].values() for s in reached))
    assert reached == set(State) == set(TABLE)


@pytest.mark.parametrize(
    "scripts",
    [
        (ONE_MOVE,) * 2,
        (ACKNOWLEDGED,) * 2,
        (TWO_MOVES,) * 2,
        (BLOCK,) * 2,
        (BLOCK, LEFT_OUT),
        # The first has said goodbye after its move.
        (ONE_MOVE, TWO_MOVES),
        (ONE_MOVE,) * 3,
        pytest.param((ACKNOWLEDGED,) * 3, marks=pytest.mark.slow),
        pytest.param((BLOCK, BLOCK, LEFT_OUT), marks=pytest.mark.slow),
        pytest.param((BLOCK,) * 3, marks=pytest.mark.slow),
        pytest.param((TWO_MOVES,) * 3, marks=[pytest.mark.slow, pytest.mark.timeout(900)]),
        pytest.param((ONE_MOVE,) * 4, marks=[pytest.mark.slow, pytest.mark.timeout(1800)]),
    ],
)
def test_all_survivors_end_with_one_version(scripts: tuple[Script, ...]) -> None:
    """In whatever order anything happens: none is torn, none waits for ever, and none is told what is not so."""
    found = explore(scripts)
    assert not found.wrong, found
    assert found.worlds > 500


_Change = tuple[State, Event, State | None]
FAULTS: dict[str, tuple[tuple[_Change, ...], str]] = {
    "calls it off alone": (
        ((State.PROMISED, Event.LEAVE, State.BROKEN),),
        "survivors have ended with different versions",
    ),
    "asks no record": (
        ((State.PROMISED, Event.AGREE, State.COMMITTED),),
        "survivors have ended with different versions",
    ),
    "guesses that all is well": (
        ((State.DECIDING, Event.LOSE, State.COMMITTED),),
        "a rank cannot tell what is decided, and puts the new in place",
    ),
    "leaves the copy half done": (
        ((State.COMMITTED, Event.LEAVE, State.BROKEN),),
        "survivors have ended with different versions",
    ),
    "forgets what it owes": (
        ((State.DOUBTING, Event.COMMIT, State.BROKEN),),
        "survivors have ended with different versions",
    ),
    "needs no promise of others": (
        ((State.ACTING, Event.PROMISE, State.DECIDING),),
        "survivors have ended with different versions",
    ),
    "never gives up": (
        ((State.PROMISED, Event.LEAVE, None),),
        "waits for ever",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_table_with_a_fault_is_found_out(fault: str) -> None:
    """Otherwise the walk above would prove nothing."""
    changes, wrong = FAULTS[fault]
    table = {state: dict(row) for state, row in TABLE.items()}
    for state, event, then in changes:
        if then is None:
            del table[state][event]
        else:
            table[state][event] = then
    found = explore((ONE_MOVE,) * 2, Crowd(table))
    assert wrong in found.wrong, found
    assert found.steps


def test_a_record_that_is_written_twice_is_found_out() -> None:
    """It tells one rank to commit, and another to abort."""
    found = explore((ONE_MOVE,) * 2, Crowd(write=write_always))
    assert found.wrong == "one rank was told to commit, another to abort"
