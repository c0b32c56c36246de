"""Delivery: wrong programs are refused, hundreds of them, and so are rounds in which somebody waits for ever."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
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
from shardmath.plans.demands import Demands
from shardmath.plans.programs.legs import Bands, Bundle, Mates, Streams
from shardmath.plans.programs.streams import list_streams
from shardmath.plans.programs.tapers import HEAVIEST
from shardmath.proofs.program_proof import prove_program
from tests.property.drawn.programs import (
    PROGRAMS,
    carried_out,
    cut_anywhere,
    nodes_of,
    programs,
    programs_with_mates,
)


@pytest.fixture(autouse=True)
def _small_tensors_are_cut() -> Iterator[None]:
    with cut_anywhere():
        yield


def refused(prog: Program) -> bool:
    """Whether PlanError comes out; nothing else may."""
    try:
        prove_program(prog)
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


@given(programs_with_mates())
def test_random_programs_with_mates_are_proved(prog: Program) -> None:
    verify(prog)
    assert carried_out(prog)


def test_a_proof_does_not_depend_on_what_schedule_leaves_whole() -> None:
    """Programs cut anywhere are right where only large boxes may be cut: what counts is rows."""
    with cut_anywhere(1 << 16):
        for name in ("nodes", "relays", "slots and turns"):
            whole = {"slots": 1, "weights": (), "max_inflight_bytes": 1 << 20}
            prove_program(dataclasses.replace(PROGRAMS[name], **whole))


# Mutations: one thing anywhere in the tables is another

COUNTS = ("slots", "turns", "weights", "max_inflight_bytes", "max_ops_per_group")


def forged(prog: Program, name: str, new: Any) -> Program:
    """The program with another value of a field, which its constructor does not see."""
    made = copy.copy(prog)
    object.__setattr__(made, name, new)
    return made


def leaves(prog: Program) -> Iterator[tuple[str, Any, Callable[[Any], Program]]]:
    """Every table and count of a program, with how to put something else in its place."""
    for name in COUNTS:
        if name != "weights" or prog.weights:
            yield name, getattr(prog, name), functools.partial(forged, prog, name)
    legs, bands, on = prog.legs, prog.legs.bands, prog.legs.lines

    def put(**new: Any) -> Program:
        return dataclasses.replace(prog, legs=dataclasses.replace(legs, **new))

    yield "sharing", legs.sharing, lambda new: put(sharing=new)
    for f in dataclasses.fields(Mates) if legs.mates else ():
        yield (
            f"Mates.{f.name}",
            getattr(legs.mates, f.name),
            lambda new, f=f: put(mates=dataclasses.replace(legs.mates, **{f.name: new})),
        )
    for f in dataclasses.fields(Bands):
        yield (
            f"Bands.{f.name}",
            getattr(bands, f.name),
            lambda new, f=f: put(bands=dataclasses.replace(bands, **{f.name: new})),
        )
    for f in dataclasses.fields(Demands):
        yield (
            f"Demands.{f.name}",
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
    if value and isinstance(value[0], int):
        return (
            *value[:i],
            *rng.choice(((value[i] + 1,), (2 * value[i],), (0,), ())),
            *value[i + 1 :],
        )
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
        f"Demands.{x}"
        for x in ("sets", "holders", "near", "first", "receivers", "addend", "count", "nbytes")
    ]
    + [f"Demands.{x}" for x in ("row_first", "batch", "unit", "lo", "at", "each")]
    + ["Mates.first", "Mates.rank", "Mates.feeder"]
    + [*COUNTS, "sharing"]
)
"""What says who does what. Demands' own cuts, and where their blocks begin on them, are for `Plan.transfers`."""


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
                and (name != "to sum" or "Demands" not in table)
                and (relays or table not in RELAYED)
            ):
                places.setdefault(table, []).append((name, value, rebuild))
    while True:
        table = rng.choice(TOLD)
        name, value, rebuild = rng.choice(places[table])
        new = other(rng, value)
        if not same(value, new):
            yield name, table, rebuild(new)


@pytest.mark.parametrize("most", [100, pytest.param(500, marks=pytest.mark.slow)])
def test_mutated_programs(most: int) -> None:
    """All wrong ones are refused; of those that are still right some are, which cannot be read off the tables alone.

    Whether every table was once the wrong one, or one that does not matter, shows in hundreds of them.
    """
    wrong: Counter[str] = Counter()
    kept: Counter[str] = Counter()
    for name, table, prog in mutants(1):
        no, good = refused(prog), carried_out(prog)
        assert good or no, (name, table)
        if not good or not no:
            (kept if good else wrong)[table] += 1
        if wrong.total() >= most and (most < 500 or len(wrong) == len(TOLD)):
            break
    assert kept.total() >= 0.4 * most
    assert most < 500 or set(kept) >= FREE, kept


FREE = {
    "slots",
    "turns",
    "weights",
    "sharing",
    "Bands.cuts",
    "Bands.at",
    "Bands.place",
    "Demands.near",
}
"""Of which some values say the same, or something that is as right."""


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
    prog = schedule(p, topology=nodes_of(2), fanout="node")
    return dataclasses.replace(prog, slots=1, weights=())


WEIGHTS = f"its weights are not one integer up to {HEAVIEST} per slot, with a sum below {1 << 31}"


@pytest.mark.parametrize(
    ("new", "message"),
    [
        ({"slots": 0}, "counts (0, 1, 2, 1073741824, 2048) are not all positive integers"),
        ({"slots": True}, "counts (True, 1, 2, 1073741824, 2048) are not all positive integers"),
        ({"slots": 4097}, "4097 slots and 1 turns are more than 4096 and 36"),
        (
            {"slots": 2, "weights": (1, 0)},
            WEIGHTS,
        ),
        (
            {"slots": 2, "weights": (HEAVIEST + 1, 1)},
            WEIGHTS,
        ),
        ({"slots": 2048, "weights": (HEAVIEST,) * 2048}, WEIGHTS),
        ({"turns": 37}, "1 slots and 37 turns are more than 4096 and 36"),
        ({"max_inflight_bytes": 63}, "a rank has 64 bytes in flight in a round, 63 are allowed"),
        ({"max_ops_per_group": 1}, "a rank has 3 messages in flight in a round, 1 are allowed"),
    ],
)
def test_counts_and_limits(new: dict[str, Any], message: str, fails) -> None:
    prog = dataclasses.replace(passing_on(), **new)
    fails(lambda: prove_program(prog), PlanError, f"{prog!r}: {message}; schedule it again")


def test_the_widest_counts_and_limits() -> None:
    prove_program(
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
LATE = "are relayed by a rank that does not have them yet"


@contextlib.contextmanager
def having_streams(prog: Program, line: int, other: Streams) -> Iterator[None]:
    """The proof reads these as the streams of a line, and each line by itself."""
    lines = range(len(prog.legs.lines.holders))
    found = {one: list_streams(prog.legs, one) for one in lines} | {line: other}
    bundles = [
        Bundle(np.array([one]), streams, np.array([0, len(streams.block)]))
        for one, streams in found.items()
    ]
    with mock.patch("shardmath.proofs.program_proof.list_bundles", return_value=bundles):
        yield


@pytest.mark.parametrize(
    ("column", "numbers", "message"),
    [
        ("lo", (0, 32, 0, 32), None),
        ("lo", (-8, 32, 0, 32), f"{A.replace('0:32', '-8:32')} are not inside it"),
        ("lo", (0, 64, 0, 32), f"{B.replace('32:', '64:')} are not inside it"),
        ("hi", (32, 72, 32, 64), f"{B.replace('64', '72')} are not inside it"),
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
        ("root", (0, 0, 0, 0), f"{A} have the root of other bytes"),
        ("root", (0, 1, 0, 0), f"{D} {LATE}"),
    ],
)
def test_streams(column: str, numbers: tuple[int, ...], message: str | None, fails) -> None:
    """Two streams of the first leg and what is relayed of them, with another column."""
    prog = passing_on()
    made = list_streams(prog.legs, 0)
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
    with having_streams(prog, 0, other):
        if message is None:
            prove_program(prog)
        else:
            fails(lambda: prove_program(prog), PlanError, f"{prog!r}: {message}; schedule it again")


def test_what_is_relayed_comes_as_a_whole(fails) -> None:
    """In two, or a part of it, it would be cut elsewhere than it was when it came."""
    prog = passing_on()
    made = list_streams(prog.legs, 0)
    columns = {name: np.insert(column, 3, column[2]) for name, column in made._asdict().items()}
    columns["hi"][2] = columns["lo"][3] = 16
    with having_streams(prog, 0, made._replace(**columns)):
        fails(
            lambda: prove_program(prog),
            PlanError,
            f"{prog!r}: {C.replace('32', '16')} {LATE}; schedule it again",
        )


def test_a_part_is_not_relayed_by_itself(fails) -> None:
    """The first half of a stream comes from the holder instead."""
    prog = passing_on()
    made = list_streams(prog.legs, 0)
    columns = {name: np.insert(column, 2, column[0]) for name, column in made._asdict().items()}
    columns["receiver"][2], columns["hi"][2], columns["lo"][3] = 3, 16, 16
    with having_streams(prog, 0, made._replace(**columns)):
        fails(
            lambda: prove_program(prog),
            PlanError,
            f"{prog!r}: {C.replace('0:', '16:')} {LATE}; schedule it again",
        )


def test_sums_are_not_relayed(fails) -> None:
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
    made = list_streams(prog.legs, second)
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
    where = f"bytes 0:32 of block {block}, the tensor, from rank 2 to 3"
    with having_streams(prog, second, wrong):
        what = "are relayed where another addend is already"
        fails(
            lambda: prove_program(prog), PlanError, f"{prog!r}: {where} {what}; schedule it again"
        )


def test_tables_that_cannot_be_read(fails) -> None:
    prog = passing_on()
    bands = prog.legs.bands
    short = dataclasses.replace(bands, first=bands.first[:1])
    for broken, what in (
        (None, "Legs.bands: NoneType, not Bands; make the plan again"),
        (dataclasses.replace(bands, at=None), "Bands.at: NoneType, not ndarray; make .*"),
        (short, ".* are not of one length; schedule it again"),
    ):
        wrong = dataclasses.replace(prog, legs=dataclasses.replace(prog.legs, bands=broken))
        with pytest.raises(PlanError, match=rf"^{what}$"):
            prove_program(wrong)
    narrow = dataclasses.replace(bands, at=bands.at.astype(np.int32))
    wrong = dataclasses.replace(prog, legs=dataclasses.replace(prog.legs, bands=narrow))
    fails(
        lambda: prove_program(wrong),
        PlanError,
        f"{prog!r}: Bands.at is not of 64-bit integers; schedule it again",
    )


def test_a_fault_of_ours_is_not_a_wrong_program() -> None:
    """It used to come out as tables that cannot be read."""
    with (
        mock.patch("shardmath.proofs.program_proof._check_once", side_effect=KeyError("ours")),
        pytest.raises(KeyError, match="ours"),
    ):
        prove_program(passing_on())


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
                prove_program(dataclasses.replace(passing_on(), legs=one))
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


# Mates


OTHER = "a mate sends other bytes than it is handed, or to another rank"


@pytest.mark.parametrize(
    ("leg", "column", "message"),
    [
        (4, "beyond", OTHER),
        (5, "beyond", OTHER),
        (4, "receiver", OTHER),
        (4, "root", OTHER),
        (4, "sender", "are handed on by a rank that does not hold them"),
    ],
)
def test_streams_of_mates(leg: int, column: str, message: str) -> None:
    """One number of a stream to a mate, or from it, is another."""
    prog = PROGRAMS["mates"]
    line = next(
        i for i in range(len(prog.legs.lines.holders)) if 5 in list_streams(prog.legs, i).leg
    )
    made = list_streams(prog.legs, line)
    new = getattr(made, column).copy()
    new[np.flatnonzero(made.leg == leg)[0]] += 1
    with (
        having_streams(prog, line, made._replace(**{column: new})),
        pytest.raises(PlanError, match=message),
    ):
        prove_program(prog)


def test_bytes_from_a_mate_have_a_root_of_their_own() -> None:
    """All streams of one root are cut as one of them is."""
    prog = PROGRAMS["mates"]
    line = next(
        i for i in range(len(prog.legs.lines.holders)) if 5 in list_streams(prog.legs, i).leg
    )
    made = list_streams(prog.legs, line)
    held, handed = (made.root[made.leg == leg][0] for leg in (1, 5))
    new = np.where(made.root == handed, held, made.root)
    with (
        having_streams(prog, line, made._replace(root=new)),
        pytest.raises(PlanError, match="have the root of other bytes"),
    ):
        prove_program(prog)


def test_a_mate_that_is_handed_nothing() -> None:
    """Nor may it be handed anything that it does not send."""
    prog = PROGRAMS["mates"]
    line = next(
        i for i in range(len(prog.legs.lines.holders)) if 5 in list_streams(prog.legs, i).leg
    )
    made = list_streams(prog.legs, line)
    handing = np.flatnonzero(made.leg == 4)
    for rows in (handing[:1], handing):
        fewer = Streams(*(np.delete(column, rows) for column in made))
        with having_streams(prog, line, fewer), pytest.raises(PlanError, match=OTHER):
            prove_program(prog)


@pytest.mark.parametrize(
    ("new", "message"),
    [
        ({"rank": np.array([99])}, "mates are not ranks of the program"),
        ({"feeder": np.array([-1])}, "mates are not ranks of the program"),
        ({"feeder": np.zeros(0, np.int64)}, "tables of mates are not of one length"),
        ({"first": np.zeros(0, np.int64)}, "tables of mates are not of one length"),
        ({"rank": np.zeros(1)}, "mates are not of 64-bit integers"),
    ],
)
def test_tables_of_mates(new: dict[str, np.ndarray], message: str) -> None:
    prog = PROGRAMS["mates"]
    mates = prog.legs.mates
    assert mates is not None
    wrong = {}
    for name, column in new.items():
        plain = getattr(mates, name)
        wrong[name] = np.resize(column, len(plain)) if len(column) else column
    legs = dataclasses.replace(prog.legs, mates=dataclasses.replace(mates, **wrong))
    with pytest.raises(PlanError, match=message):
        prove_program(dataclasses.replace(prog, legs=legs))


def test_mates_have_one_turn() -> None:
    """What they are handed would else stay while other messages are in flight, which no limit counts."""
    prog = dataclasses.replace(PROGRAMS["mates"], turns=2)
    with pytest.raises(PlanError, match="mates would keep bytes for several turns"):
        prove_program(prog)
