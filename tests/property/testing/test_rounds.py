"""Rounds: those in which somebody waits endlessly are found, and so are messages of which one end is missing."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmath import Plan, PlanError, Program
from shardmath.plans.programs.messages import Message, Round, make_message
from shardmath.plans.programs.part import make_parts
from shardmath.plans.transfers import Transfer
from shardmath.testing.rounds import Rounds, Walk, walk
from tests.property.drawn.programs import (
    PROGRAMS,
    all_rounds,
    cut_anywhere,
    plans,
    programs,
    under_way,
)


@pytest.fixture(autouse=True)
def _small_tensors_are_cut() -> Iterator[None]:
    with cut_anywhere():
        yield


def figures(rounds: Rounds) -> Walk:
    """What a walk is to find."""
    steps = {one.step for mine in rounds.values() for one in mine}
    nbytes, count = under_way(rounds)
    return Walk(len(steps), max(map(len, rounds.values()), default=0), count, nbytes)


@pytest.mark.parametrize("name", PROGRAMS)
def test_ranks_walk_their_rounds(name: str) -> None:
    rounds = all_rounds(PROGRAMS[name])
    assert walk(rounds) == figures(rounds)


@given(programs())
def test_ranks_of_random_programs_walk_their_rounds(prog: Program) -> None:
    rounds = all_rounds(prog)
    assert walk(rounds) == figures(rounds)
    assert walk(dict(reversed(rounds.items()))) == figures(rounds)


@given(plans(), st.sampled_from([64, 1000, 1 << 30]))
def test_ranks_of_plans_walk_their_rounds(p: Plan, limit: int) -> None:
    """A plan is a program that relays nothing."""
    rounds = {one.rank: one.rounds for one in make_parts(p, max_inflight_bytes=limit)}
    found = walk(rounds)
    assert found == figures(rounds) and found.staged <= limit
    assert all(m.leg == 1 for mine in rounds.values() for one in mine for m in one.messages)


def test_nobody_walks() -> None:
    assert walk({}) == Walk(0, 0, 0, 0) == walk({3: []})


@pytest.mark.parametrize("name", ["nodes", "in between", "few messages"])
def test_a_message_less(name: str) -> None:
    """Without any one end of any message nobody gets through."""
    rounds = all_rounds(PROGRAMS[name])
    for rank, mine in rounds.items():
        for i, one in enumerate(mine):
            for m in (*one.sends, *one.receives):
                less = Round(*(tuple(x for x in posted if x is not m) for posted in one))
                with pytest.raises(PlanError):
                    walk({**rounds, rank: (*mine[:i], less, *mine[i + 1 :])})
        if mine:
            with pytest.raises(PlanError):
                walk({other: rounds[other] for other in rounds if other != rank})


def piece(sender: int, receiver: int, lo: int, hi: int) -> Transfer:
    at = (slice(lo, hi),)
    return Transfer("w", sender, receiver, "copy", "w", at, "w", at, (hi - lo,), hi - lo, at)


Post = tuple[str, Message]


def message(sender: int, receiver: int, lo: int = 0, hi: int = 8, leg: int = 1) -> Message:
    some = [piece(sender, receiver, lo, hi)]
    return make_message((0, 0, 0), sender, receiver, leg, some)


def send(sender: int, receiver: int, lo: int = 0, hi: int = 8, leg: int = 1) -> Post:
    return "sends", message(sender, receiver, lo, hi, leg)


def receive(sender: int, receiver: int, lo: int = 0, hi: int = 8, leg: int = 1) -> Post:
    return "receives", message(sender, receiver, lo, hi, leg)


def at(slot: int, *some: Post) -> Round:
    """A round of what is posted, whatever it is."""
    posted: dict[str, list[Message]] = {"sends": [], "receives": [], "keeps": []}
    for way, m in some:
        posted[way].append(m._replace(step=(0, slot, 0)))
    return Round(*map(tuple, posted.values()))


SAME = "give both ends the same messages"
FIRST = "rank 0 sends 8 B in step (0, 0, 0), leg 1 to rank 1, which"


@pytest.mark.parametrize(
    ("rounds", "message"),
    [
        ({0: [at(0, send(0, 1))], 1: []}, f"{FIRST} does not receive them; {SAME}"),
        ({0: [at(0, send(0, 1))]}, f"{FIRST} does not receive them; {SAME}"),
        (
            {0: [], 1: [at(2, receive(0, 1))]},
            f"rank 1 receives 8 B in step (0, 2, 0), leg 1 from rank 0, which does not send them; {SAME}",
        ),
        (
            {0: [at(0, send(0, 1), send(0, 1, 8, 16))], 1: [at(0, receive(0, 1))]},
            f"{FIRST} does not receive them; {SAME}",
        ),
        (
            {0: [at(0, send(0, 1))], 1: [at(0, receive(0, 1, 0, 4))]},
            f"{FIRST} receives 4 B in step (0, 0, 0), leg 1; {SAME} in the same order",
        ),
        (
            {0: [at(0, send(0, 1))], 1: [at(1, receive(0, 1))]},
            f"{FIRST} receives 8 B in step (0, 1, 0), leg 1; {SAME} in the same order",
        ),
        (
            {0: [at(0, send(0, 1))], 1: [at(0, receive(0, 1, leg=2))]},
            f"{FIRST} receives 8 B in step (0, 0, 0), leg 2; {SAME} in the same order",
        ),
        (
            {0: [at(0, send(0, 1))], 1: [at(0, receive(0, 1, 8, 16))]},
            f"rank 0 sends 8 B in step (0, 0, 0), leg 1 to rank 1: the piece {piece(0, 1, 0, 8)}, which is received as "
            f"{piece(0, 1, 8, 16)}; give both ends the same pieces in the same order",
        ),
        (
            {
                0: [at(0, send(0, 1)), at(1, send(0, 1, 8, 16))],
                1: [at(1, receive(0, 1, 8, 16)), at(0, receive(0, 1))],
            },
            f"{FIRST} receives 8 B in step (0, 1, 0), leg 1; {SAME} in the same order",
        ),
        (
            {
                0: [at(0, send(0, 1)), at(1, receive(1, 0))],
                1: [at(1, send(1, 0)), at(0, receive(0, 1))],
            },
            "rank 0 waits in step (0, 0, 0) for rank 1, rank 1 waits in step (0, 1, 0) for rank 0: "
            "no rank can continue; give all ranks one order of steps",
        ),
        (
            {
                0: [at(0, send(0, 1)), at(2, receive(2, 0))],
                1: [at(1, send(1, 2)), at(0, receive(0, 1))],
                2: [at(2, send(2, 0)), at(1, receive(1, 2))],
                3: [at(3, ("keeps", message(3, 3)))],
            },
            "rank 0 waits in step (0, 0, 0) for rank 1, rank 1 waits in step (0, 1, 0) for rank 2, "
            "rank 2 waits in step (0, 2, 0) for rank 0: no rank can continue; give all ranks one order of steps",
        ),
        (
            {
                0: [at(0, send(0, 1), receive(1, 0)), at(0, send(0, 2))],
                1: [at(0, send(1, 0), receive(2, 1)), at(0, receive(0, 1))],
                2: [at(0, receive(0, 2)), at(0, send(2, 1))],
            },
            "rank 0 waits in step (0, 0, 0) for rank 1, rank 1 waits in step (0, 0, 0) for rank 2, "
            "rank 2 waits in step (0, 0, 0) for rank 0: no rank can continue; give all ranks one order of steps",
        ),
        (
            {0: [at(0, send(0, 0))]},
            f"rank 0, step (0, 0, 0): the rank sends {message(0, 0)}, which goes from rank 0 to "
            "rank 0; list it at these two ranks",
        ),
        (
            {0: [at(0, receive(0, 1))]},
            f"rank 0, step (0, 0, 0): the rank receives {message(0, 1)}, which goes from rank 0 to "
            "rank 1; list it at these two ranks",
        ),
        (
            {0: [at(0, ("keeps", message(0, 1)))]},
            f"rank 0, step (0, 0, 0): the rank keeps {message(0, 1)}, which goes from rank 0 to "
            "rank 1; list it at these two ranks",
        ),
        (
            {0: [Round((message(0, 1), message(0, 2)._replace(step=(0, 1, 0))), (), ())]},
            f"rank 0 posts {message(0, 2)} of step (0, 1, 0) in step (0, 0, 0); "
            "give each step a separate round",
        ),
        (
            {0: [at(0, ("sends", message(0, 1)._replace(nbytes=9)))]},
            "rank 0, step (0, 0, 0): the message 9 B from rank 0 to rank 1 in 1 piece, leg 1 has 9 B from (0,) on, "
            "its pieces 8 B from (0,) on; make it with make_message",
        ),
        (
            {0: [at(0, ("sends", message(1, 0)._replace(src_rank=0, dst_rank=1)))]},
            f"rank 0, step (0, 0, 0): the message {message(0, 1)} has the piece {piece(1, 0, 0, 8)}; "
            "give the message only pieces from rank 0 to rank 1",
        ),
    ],
)
def test_rounds_that_do_not_fit(rounds: Rounds, message: str, fails) -> None:
    fails(lambda: walk(rounds), PlanError, message)


def test_a_rank_may_be_behind_others() -> None:
    """Rounds of one step at both ends, though not in one order, get through where nobody waits in a circle."""
    rounds = {
        0: [at(1, send(0, 1)), at(0, send(0, 2))],
        1: [at(1, receive(0, 1)), at(2, receive(2, 1))],
        2: [at(0, receive(0, 2)), at(2, send(2, 1))],
    }
    assert walk(rounds) == Walk(3, 2, 1, 8)


@given(
    st.lists(st.permutations(range(4)), max_size=8, unique_by=lambda x: tuple(x[:2])),
    st.randoms(use_true_random=False),
)
def test_walk_finds_who_waits_for_ever(pairs: list[list[int]], rng: random.Random) -> None:
    """Messages in rounds in any order: a walk ends where ranks that post and wait do."""
    rounds: dict[int, list[Round]] = {rank: [] for rank in range(4)}
    for rank in rounds:
        mine = [send(a, b) if a == rank else receive(a, b) for a, b, *_ in pairs if rank in (a, b)]
        rng.shuffle(mine)
        while mine:
            n = rng.choice((1, 1, 2, 3))
            rounds[rank].append(at(0, *mine[:n]))
            mine = mine[n:]
    if gets_through(rounds):
        assert walk(rounds) == figures(rounds)
    else:
        with pytest.raises(PlanError, match="no rank can continue"):
            walk(rounds)


def gets_through(rounds: Rounds) -> bool:
    """Post a round, wait until all of its messages are posted at both ends, go on."""
    left = {rank: list(mine) for rank, mine in rounds.items()}
    posted: set[tuple[int, int, int]] = set()
    moved = True
    while moved:
        moved = False
        for rank, mine in left.items():
            for m in mine[0].messages if mine else ():
                posted.add((rank, m.src_rank, m.dst_rank))
        for mine in left.values():
            if mine and all(
                {(m.src_rank, *m[1:3]), (m.dst_rank, *m[1:3])} <= posted for m in mine[0].messages
            ):
                mine.pop(0)
                moved = True
    return not any(left.values())
