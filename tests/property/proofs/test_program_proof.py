"""Delivery: wrong programs are refused, hundreds of them, and so are rounds in which somebody waits for ever."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmath import Layout, Mesh, PlanError, Program, plan, schedule, verify
from shardmath.plans.demands import Lines
from shardmath.plans.plan import Transfer
from shardmath.programs.program import Message, Round
from shardmath.programs.streams import Bands, streams
from shardmath.proofs.program_proof import Walk, walk
from tests.property.drawn.programs import (
    PROGRAMS,
    Rounds,
    all_rounds,
    carried_out,
    cut_anywhere,
    nodes_of,
    programs,
    under_way,
)


@pytest.fixture(autouse=True)
def _small_tensors_are_cut() -> Iterator[None]:
    with cut_anywhere():
        yield


def refused(prog: Program) -> bool:
    """Whether PlanError comes out; nothing else may."""
    try:
        verify(prog)
    except PlanError:
        return True
    return False


# What is made is proved


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_are_proved_and_right(name: str) -> None:
    verify(PROGRAMS[name])
    assert carried_out(PROGRAMS[name])


@given(programs())
def test_random_programs_are_proved(prog: Program) -> None:
    verify(prog)


def test_a_proof_does_not_depend_on_what_schedule_leaves_whole() -> None:
    """Programs cut anywhere are right where only large boxes may be cut: what counts is rows."""
    with cut_anywhere(1 << 16):
        for name in ("nodes", "relays", "slots and turns"):
            verify(dataclasses.replace(PROGRAMS[name], slots=1, max_inflight_bytes=1 << 20))


# Mutations: one thing anywhere in the tables is another

COUNTS = ("slots", "turns", "max_inflight_bytes", "max_ops_per_group")


def leaves(prog: Program) -> Iterator[tuple[str, Any, Callable[[Any], Program]]]:
    """Every table and count of a program, with how to put something else in its place."""
    for name in COUNTS:
        yield (
            name,
            getattr(prog, name),
            lambda new, name=name: dataclasses.replace(prog, **{name: new}),
        )
    legs, bands, on = prog.legs, prog.legs.bands, prog.legs.lines

    def put(**new: Any) -> Program:
        return dataclasses.replace(prog, legs=dataclasses.replace(legs, **new))

    yield "sharing", legs.sharing, lambda new: put(sharing=new)
    for f in dataclasses.fields(Bands):
        yield (
            f"Bands.{f.name}",
            getattr(bands, f.name),
            lambda new, f=f: put(bands=dataclasses.replace(bands, **{f.name: new})),
        )
    for f in dataclasses.fields(Lines):
        yield (
            f"Lines.{f.name}",
            getattr(on, f.name),
            lambda new, f=f: put(lines=dataclasses.replace(on, **{f.name: new})),
        )


def other(rng: random.Random, value: Any) -> Any:
    """Something of the same kind that is near it; maybe equal."""
    if isinstance(value, np.ndarray):
        return other_array(rng, value)
    if isinstance(value, int):
        return rng.choice((value - 1, value + 1, value // 2, 2 * value, 3))
    i = rng.randrange(len(value)) if value else 0
    if not value or rng.random() < 0.3:
        return (*value, (0, 8)) if rng.random() < 0.5 else (*value[:i], *value[i + 1 :])
    ranks = set(value[i]) ^ {rng.choice((*value[i], *rng.choice(value), 5))}
    return (*value[:i], tuple(sorted(ranks)), *value[i + 1 :])


def other_array(rng: random.Random, array: np.ndarray) -> np.ndarray:
    """One number is another, or two change places, or one is gone or there twice."""
    kind = rng.choice(("nudge", "nudge", "item", "copy", "zero", "minus", "swap", "short", "long"))
    if not array.size:
        return np.zeros(1, array.dtype) if kind == "long" else array
    i, j = rng.randrange(len(array)), rng.randrange(len(array))
    if kind in ("short", "long"):
        return np.delete(array, i) if kind == "short" else np.insert(array, i, array[i])
    new = array.copy()
    if kind == "swap":
        new[i], new[j] = array[j], array[i]
    elif array.dtype == bool:
        new[i] = not array[i]
    else:
        by = rng.choice((-2, -1, 1, 2, 3))
        new[i] = {
            "nudge": array[i] + by,
            "item": array[i] + 8 * by,
            "copy": array[j],
            "zero": 0,
            "minus": -1,
        }[kind]
    return new


def same(a: Any, b: Any) -> bool:
    return bool(np.array_equal(a, b)) if isinstance(a, np.ndarray) else bool(a == b)


TOLD = (
    [
        f"Bands.{x}"
        for x in (
            "first",
            "classes",
            "at",
            "begin",
            "count",
            "place",
            "span",
            "start",
            "cut_first",
            "cuts",
        )
    ]
    + [
        f"Lines.{x}"
        for x in ("sets", "holders", "near", "first", "receivers", "addend", "count", "nbytes")
    ]
    + [f"Lines.{x}" for x in ("row_first", "batch", "unit", "lo", "at", "each")]
    + [*COUNTS, "sharing"]
)
"""What says who does what. Lines' own cuts, and where their blocks begin on them, are for `Plan.transfers`."""


RELAYED = ("Bands.classes", "Bands.begin", "Bands.count")
"""What matters where nodes pass on to nodes."""


def mutants(seed: int) -> Iterator[tuple[str, str, Program]]:
    """(program, table, program with another table) without end.

    Which addend of a Partial destination receives is free to choose, so other lines may be as right: see test_proof.
    """
    rng = random.Random(seed)
    places: dict[str, list[tuple[str, Any, Callable[[Any], Program]]]] = {}
    for name, prog in PROGRAMS.items():
        relays = (prog.legs.bands.classes > 1).any()
        for table, value, rebuild in leaves(prog):
            if (
                table in TOLD
                and (name != "to sum" or "Lines" not in table)
                and (relays or table not in RELAYED)
            ):
                places.setdefault(table, []).append((name, value, rebuild))
    while True:
        table = rng.choice(TOLD)
        name, value, rebuild = rng.choice(places[table])
        new = other(rng, value)
        if not same(value, new):
            yield name, table, rebuild(new)


def test_hundreds_of_mutated_programs() -> None:
    """All wrong ones are refused; of those that are still right some are, which cannot be read off the tables alone."""
    wrong: Counter[str] = Counter()
    kept: Counter[str] = Counter()
    for name, table, prog in mutants(1):
        no, good = refused(prog), carried_out(prog)
        assert good or no, (name, table)
        if not good or not no:
            (kept if good else wrong)[table] += 1
        if wrong.total() >= 500 and len(wrong) == len(TOLD):
            break
    assert kept.total() >= 200
    assert {
        "slots",
        "turns",
        "sharing",
        "Bands.cuts",
        "Bands.at",
        "Bands.place",
        "Lines.near",
    } <= set(kept), kept


@given(programs(), st.data())
def test_random_programs_with_other_bands(prog: Program, data: st.DataObject) -> None:
    _, value, rebuild = data.draw(
        st.sampled_from([leaf for leaf in leaves(prog) if leaf[0].startswith("Bands")])
    )
    mutant = rebuild(other(data.draw(st.randoms(use_true_random=False)), value))
    assert refused(mutant) or carried_out(mutant)


JUNK = (
    None,
    "x",
    2.5,
    (),
    (None,),
    [1],
    {},
    np.zeros(3),
    np.zeros((2, 2), np.int64),
    True,
    -1,
    0,
    1 << 70,
)


@pytest.mark.parametrize("junk", JUNK, ids=repr)
def test_nothing_but_plan_errors_comes_out(junk: Any) -> None:
    for name in ("nodes", "relays", "folded", "tree", "nothing moves"):
        for table, _, rebuild in leaves(PROGRAMS[name]):
            prog = rebuild(junk)
            assert refused(prog) or carried_out(prog), (name, table)


@pytest.mark.parametrize("number", [-(1 << 63), 1 << 32, (1 << 63) - 1])
def test_numbers_far_away(number: int) -> None:
    for name in ("nodes", "relays", "folded"):
        for table, value, rebuild in leaves(PROGRAMS[name]):
            for at in range(
                value.size if isinstance(value, np.ndarray) and value.dtype == np.int64 else 0
            ):
                new = value.copy()
                new[at] = number
                prog = rebuild(new)
                assert refused(prog) or carried_out(prog), (name, table, at)
            if isinstance(value, int):
                assert refused(rebuild(number)) or carried_out(rebuild(number)), (name, table)


# What is said of wrong programs


def passing_on() -> Program:
    """Rank 0 sends half of 64 bytes to each of ranks 2 and 3, and they exchange them."""
    p = plan(
        *(
            {"w": Layout((8,), mesh, "n", dtype="float64")}
            for mesh in (Mesh(), Mesh(x=2, ranks=(2, 3)))
        )
    )
    return dataclasses.replace(schedule(p, topology=nodes_of(2), fanout="node"), slots=1)


@pytest.mark.parametrize(
    ("new", "message"),
    [
        ({"slots": 0}, "counts (0, 1, 2, 1073741824, 2048) are not all positive integers"),
        ({"slots": True}, "counts (True, 1, 2, 1073741824, 2048) are not all positive integers"),
        ({"slots": 4097}, "4097 slots and 1 turns are more than 4096 and 36"),
        ({"turns": 37}, "1 slots and 37 turns are more than 4096 and 36"),
        ({"max_inflight_bytes": 63}, "a rank has 64 bytes under way in a round, 63 are allowed"),
        ({"max_ops_per_group": 1}, "a rank has 3 messages under way in a round, 1 are allowed"),
    ],
)
def test_counts_and_limits(new: dict[str, int], message: str, fails) -> None:
    prog = dataclasses.replace(passing_on(), **new)
    fails(lambda: verify(prog), PlanError, f"{prog!r}: {message}; schedule it anew")


def test_the_widest_counts_and_limits() -> None:
    verify(
        dataclasses.replace(
            passing_on(), slots=4096, turns=36, max_inflight_bytes=64, max_ops_per_group=3
        )
    )


A, B = (
    "bytes 0:32 of block 0, tensor 'w', from rank 0 to 2",
    "bytes 32:64 of block 0, tensor 'w', from rank 0 to 3",
)
C, D = (
    "bytes 0:32 of block 0, tensor 'w', from rank 2 to 3",
    "bytes 32:64 of block 0, tensor 'w', from rank 3 to 2",
)
LATE = "are passed on by a rank that does not have them yet"


@pytest.mark.parametrize(
    ("column", "numbers", "message"),
    [
        ("lo", (0, 32, 0, 32), None),
        ("lo", (-8, 32, 0, 32), f"{A.replace('0:32', '-8:32')} are no bytes of it"),
        ("lo", (0, 64, 0, 32), f"{B.replace('32:', '64:')} are no bytes of it"),
        ("hi", (32, 72, 32, 64), f"{B.replace('64', '72')} are no bytes of it"),
        ("lo", (0, 32, 0, 33), f"{D.replace('32:', '33:')} begin or end inside a row"),
        ("hi", (28, 64, 32, 64), f"{A.replace('32', '28')} begin or end inside a row"),
        (
            "receiver",
            (2, 0, 3, 2),
            f"{B.replace('to 3', 'to 0')} go to a rank that does not ask for them",
        ),
        (
            "receiver",
            (2, 4, 3, 2),
            f"{B.replace('to 3', 'to 4')} go to a rank that does not ask for them",
        ),
        ("receiver", (2, 2, 3, 2), f"{D} come twice"),
        ("lo", (0, 24, 0, 32), f"{B.replace('32:', '24:')} come twice"),
        ("lo", (8, 32, 0, 32), "rank 2 never receives byte 0 of block 0, tensor 'w'"),
        ("lo", (0, 32, 0, 40), "rank 2 never receives byte 32 of block 0, tensor 'w'"),
        ("lo", (0, 40, 0, 32), "rank 3 never receives byte 32 of block 0, tensor 'w'"),
        ("hi", (32, 56, 32, 64), "rank 3 never receives byte 56 of block 0, tensor 'w'"),
        (
            "sender",
            (0, 3, 2, 3),
            f"{B.replace('rank 0', 'rank 3')} leave a rank that does not hold them",
        ),
        ("sender", (0, 0, 0, 3), f"{C.replace('rank 2', 'rank 0')} {LATE}"),
        ("sender", (0, 0, 3, 3), f"{C.replace('rank 2', 'rank 3')} {LATE}"),
        ("leg", (2, 1, 2, 2), f"{A} {LATE}"),
        ("leg", (1, 1, 2, 1), f"{D} leave a rank that does not hold them"),
        ("root", (0, 1, 1, 1), f"{C} {LATE}"),
        ("root", (0, 0, 0, 0), None),
        ("root", (0, 1, 0, 0), f"{D} {LATE}"),
    ],
)
def test_streams(column: str, numbers: tuple[int, ...], message: str | None, fails) -> None:
    """Two streams of the first leg and what is passed on of them, with another column."""
    prog = passing_on()
    made = streams(prog.legs, 0)
    rows = (
        made.sender.tolist(),
        made.receiver.tolist(),
        made.lo.tolist(),
        made.hi.tolist(),
        made.root.tolist(),
    )
    assert list(zip(*rows, strict=True)) == [
        (0, 2, 0, 32, 0),
        (0, 3, 32, 64, 1),
        (2, 3, 0, 32, 0),
        (3, 2, 32, 64, 1),
    ]
    other = made._replace(**{column: np.array(numbers)})
    with mock.patch("shardmath.proofs.program_proof.streams", return_value=other):
        if message is None:
            verify(prog)
        else:
            fails(lambda: verify(prog), PlanError, f"{prog!r}: {message}; schedule it anew")


def test_what_is_passed_on_comes_as_a_whole(fails) -> None:
    """In two, or a part of it, it would be cut elsewhere than it was when it came."""
    prog = passing_on()
    made = streams(prog.legs, 0)
    columns = {name: np.insert(column, 3, column[2]) for name, column in made._asdict().items()}
    columns["hi"][2] = columns["lo"][3] = 16
    with mock.patch(
        "shardmath.proofs.program_proof.streams", return_value=made._replace(**columns)
    ):
        fails(
            lambda: verify(prog),
            PlanError,
            f"{prog!r}: {C.replace('32', '16')} {LATE}; schedule it anew",
        )


def test_a_part_is_not_passed_on_by_itself(fails) -> None:
    """The first half of a stream comes from the holder instead."""
    prog = passing_on()
    made = streams(prog.legs, 0)
    columns = {name: np.insert(column, 2, column[0]) for name, column in made._asdict().items()}
    columns["receiver"][2], columns["hi"][2], columns["lo"][3] = 3, 16, 16
    with mock.patch(
        "shardmath.proofs.program_proof.streams", return_value=made._replace(**columns)
    ):
        fails(
            lambda: verify(prog),
            PlanError,
            f"{prog!r}: {C.replace('0:', '16:')} {LATE}; schedule it anew",
        )


def test_sums_are_not_passed_on(fails) -> None:
    """What is received for a second addend is on top of the first."""
    p = plan(
        *(
            Layout((8,), m, text)
            for m, text in ((Mesh(a=2), "n {sum: a}"), (Mesh(x=2, ranks=(2, 3)), "n"))
        )
    )
    prog = schedule(p, topology=nodes_of(2), fanout="node")
    second = next(
        line
        for line in range(len(prog.legs.lines.holders))
        if prog.legs.lines.sets[prog.legs.lines.holders[line]] == (1,)
    )
    made = streams(prog.legs, second)
    assert (
        made.receiver.tolist(),
        made.leg.tolist(),
        prog.legs.lines.addend[made.block].tolist(),
    ) == (
        [2, 3],
        [1, 1],
        [1, 1],
    )
    wrong = made._replace(sender=np.array([1, 2]), leg=np.array([1, 2]), root=np.array([0, 0]))
    block = int(made.block[0])
    where = f"bytes 0:32 of block {block}, tensor '', from rank 2 to 3"
    with mock.patch(
        "shardmath.proofs.program_proof.streams",
        side_effect=lambda legs, n: wrong if n == second else streams(legs, n),
    ):
        what = "are passed on where another addend is already"
        fails(lambda: verify(prog), PlanError, f"{prog!r}: {where} {what}; schedule it anew")


def test_tables_that_cannot_be_read(fails) -> None:
    prog = passing_on()
    bands = prog.legs.bands
    short = dataclasses.replace(bands, first=bands.first[:1])
    for broken, what in (
        (None, "the program's tables cannot be read: .*"),
        (short, ".* are not of one length"),
    ):
        wrong = dataclasses.replace(prog, legs=dataclasses.replace(prog.legs, bands=broken))
        with pytest.raises(PlanError, match=rf"^{what}; schedule it anew$"):
            verify(wrong)
    narrow = dataclasses.replace(bands, at=bands.at.astype(np.int32))
    wrong = dataclasses.replace(prog, legs=dataclasses.replace(prog.legs, bands=narrow))
    fails(
        lambda: verify(wrong),
        PlanError,
        f"{prog!r}: Bands.at is not of 64-bit integers; schedule it anew",
    )


# Walks


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


def test_nobody_walks() -> None:
    assert walk({}) == Walk(0, 0, 0, 0) == walk({3: []})


@pytest.mark.parametrize("name", ["nodes", "in between", "few messages"])
def test_a_message_less(name: str) -> None:
    """Without any one end of any message nobody gets through."""
    rounds = all_rounds(PROGRAMS[name])
    for rank, mine in rounds.items():
        for i, one in enumerate(mine):
            for k, m in enumerate(one.messages):
                less = Round(one.step, (*one.messages[:k], *one.messages[k + 1 :]))
                if m.direction != "keep":
                    with pytest.raises(PlanError):
                        walk({**rounds, rank: (*mine[:i], less, *mine[i + 1 :])})
        if mine:
            with pytest.raises(PlanError):
                walk({other: rounds[other] for other in rounds if other != rank})


def piece(sender: int, receiver: int, lo: int, hi: int) -> Transfer:
    at = (slice(lo, hi),)
    return Transfer("w", sender, receiver, "copy", "w", at, "w", at, (hi - lo,), hi - lo, at)


def send(sender: int, receiver: int, lo: int = 0, hi: int = 8, leg: int = 1) -> Message:
    return Message(receiver, "send", hi - lo, (piece(sender, receiver, lo, hi),), leg)


def receive(sender: int, receiver: int, lo: int = 0, hi: int = 8, leg: int = 1) -> Message:
    return Message(sender, "receive", hi - lo, (piece(sender, receiver, lo, hi),), leg)


def at(slot: int, *some: Message) -> Round:
    return Round((0, slot, 0), some)


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
            "rank 0 waits in step (0, 0, 0) for rank 1, rank 1 waits in step (0, 1, 0) for rank 0: nobody goes on; "
            "give all ranks one order of steps",
        ),
        (
            {
                0: [at(0, send(0, 1)), at(2, receive(2, 0))],
                1: [at(1, send(1, 2)), at(0, receive(0, 1))],
                2: [at(2, send(2, 0)), at(1, receive(1, 2))],
                3: [at(3, Message(3, "keep", 0, (), 1))],
            },
            "rank 0 waits in step (0, 0, 0) for rank 1, rank 1 waits in step (0, 1, 0) for rank 2, "
            "rank 2 waits in step (0, 2, 0) for rank 0: nobody goes on; give all ranks one order of steps",
        ),
        (
            {
                0: [at(0, send(0, 1), receive(1, 0)), at(0, send(0, 2))],
                1: [at(0, send(1, 0), receive(2, 1)), at(0, receive(0, 1))],
                2: [at(0, receive(0, 2)), at(0, send(2, 1))],
            },
            "rank 0 waits in step (0, 0, 0) for rank 1, rank 1 waits in step (0, 0, 0) for rank 2, "
            "rank 2 waits in step (0, 0, 0) for rank 0: nobody goes on; give all ranks one order of steps",
        ),
        (
            {0: [at(0, send(0, 1)._replace(direction="give"))]},
            "rank 0, step (0, 0, 0): the message to or from rank 1 goes 'give'; "
            "it is to 'send' or 'receive', or to 'keep' what stays",
        ),
        (
            {0: [at(0, send(0, 0))]},
            "rank 0, step (0, 0, 0): the message to or from rank 0 goes 'send'; "
            "it is to 'send' or 'receive', or to 'keep' what stays",
        ),
        (
            {0: [at(0, send(0, 1)._replace(direction="keep"))]},
            "rank 0, step (0, 0, 0): the message to or from rank 1 goes 'keep'; "
            "it is to 'send' or 'receive', or to 'keep' what stays",
        ),
        (
            {
                0: [at(0, send(0, 1)._replace(nbytes=9))],
                1: [at(0, receive(0, 1)._replace(nbytes=9))],
            },
            "rank 0, step (0, 0, 0): the message to or from rank 1 has 9 B, its pieces 8 B; count them anew",
        ),
        (
            {0: [at(0, send(1, 0)._replace(peer=1))]},
            f"rank 0, step (0, 0, 0): the message to or from rank 1 has the piece {piece(1, 0, 0, 8)}; "
            "put it where it goes from rank 0 to 1",
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
        with pytest.raises(PlanError, match="nobody goes on"):
            walk(rounds)


def gets_through(rounds: Rounds) -> bool:
    """Post a round, wait until all of its messages are posted at both ends, go on."""
    left = {rank: list(mine) for rank, mine in rounds.items()}
    posted: set[tuple[int, int, str]] = set()
    moved = True
    while moved:
        moved = False
        for rank, mine in left.items():
            for m in mine[0].messages if mine else ():
                posted.add((rank, m.peer, m.direction))
        for rank, mine in left.items():
            ends = {"send": "receive", "receive": "send"}
            if mine and all((m.peer, rank, ends[m.direction]) in posted for m in mine[0].messages):
                mine.pop(0)
                moved = True
    return not any(left.values())


def with_far_numbers(table: object) -> Iterator[object]:
    """The table with one number far away, in each column at its beginning and its end."""
    for field in dataclasses.fields(table):
        column = getattr(table, field.name)
        if isinstance(column, np.ndarray) and column.dtype == np.int64 and column.size:
            for at in (0, -1):
                far = column.copy()
                far.ravel()[at] = 1 << 26
                yield dataclasses.replace(table, **{field.name: far})


def test_a_wrong_number_takes_no_memory() -> None:
    """`bands.first[-1]` was never compared with how many bands there are: 3 GiB were asked for, and then refused."""
    legs = passing_on().legs
    wrong = [dataclasses.replace(legs, bands=bands) for bands in with_far_numbers(legs.bands)]
    wrong += [dataclasses.replace(legs, lines=on) for on in with_far_numbers(legs.lines)]
    tracemalloc.start()
    try:
        for one in wrong:
            with contextlib.suppress(PlanError):
                verify(dataclasses.replace(passing_on(), legs=one))
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()
