"""The proof of parts: it accepts those that are right, and no others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardmath as sm
from shardmath.plans.programs.messages import Message, Round
from shardmath.plans.programs.part import RankProgram, make_parts
from shardmath.proofs.part_proof import prove_parts
from tests.property.drawn.programs import plans, programs

LIMITS = (64, 1000, 1 << 30)


@given(plans(), st.sampled_from(LIMITS))
def test_parts_of_plans_are_right(plan: sm.Plan, limit: int) -> None:
    prove_parts(make_parts(plan, max_inflight_bytes=limit))


@given(programs())
def test_parts_of_programs_are_right(program: sm.Program) -> None:
    prove_parts(make_parts(program), relays=True)


def example() -> tuple[RankProgram, ...]:
    """Rows to columns between two ranks, in several rounds."""
    mesh, shape = sm.Mesh(tp=2), (8, 6)
    a, b = sm.Layout(shape, mesh, "(tp n) h"), sm.Layout(shape, mesh, "n (tp h)")
    return make_parts(sm.plan(a, b), max_inflight_bytes=64)


def changed(one: RankProgram, change: Callable[[Message], Message]) -> RankProgram:
    """The part with its first message sent changed."""
    first, *rest = one.rounds
    sent = (change(first.sends[0]), *first.sends[1:])
    return replace(one, rounds=(first._replace(sends=sent), *rest))


def without(one: RankProgram, number: int) -> RankProgram:
    return replace(one, rounds=(*one.rounds[:number], *one.rounds[number + 1 :]))


def narrowed(message: Message) -> Message:
    return message._replace(nbytes=message.nbytes - 4)


def moved(message: Message) -> Message:
    return message._replace(starts=tuple(start + 4 for start in message.starts))


def shifted(one: RankProgram) -> RankProgram:
    """Every piece is read one row further on."""

    def each(message: Message) -> Message:
        pieces = tuple(
            t._replace(src_slices=(slice(t.src_slices[0].start, t.src_slices[0].stop), slice(0, 3)))
            for t in message.pieces
        )
        return message._replace(pieces=pieces)

    def all_of(r: Round) -> Round:
        return Round(*(tuple(map(each, posted)) for posted in r))

    return replace(one, rounds=tuple(map(all_of, one.rounds)))


WRONG: dict[str, tuple[Callable[[tuple[RankProgram, ...]], tuple[RankProgram, ...]], str]] = {
    "a send that nobody receives": (
        lambda ps: (ps[0], replace(ps[1], rounds=())),
        "which receives nothing",
    ),
    "a rank that is missing": (lambda ps: ps[:1], "which receives nothing"),
    "a round left out by both": (
        lambda ps: tuple(without(one, 0) for one in ps),
        "pieces have 24 B, but the plan's transfers",
    ),
    "rounds in another order": (
        lambda ps: (replace(ps[0], rounds=ps[0].rounds[::-1]), ps[1]),
        "has a round of the steps",
    ),
    "a message that is longer than its pieces": (
        lambda ps: (changed(ps[0], narrowed), ps[1]),
        "has pieces up to byte",
    ),
    "a piece at another place": (lambda ps: (changed(ps[0], moved), ps[1]), "of its message"),
    "pieces read elsewhere": (
        lambda ps: tuple(map(shifted, ps)),
        (
            r"no piece brings local "
            r"element \(0, 0\); "
            r"make the parts of all "
            r"ranks of one plan or "
            r"program"
        ),
    ),
    "addends out of order": (
        lambda ps: (replace(ps[0], keeps_order=False), ps[1]),
        "folds addends out of order",
    ),
}


def test_the_example_is_right() -> None:
    assert len(example()[0].rounds) == 2
    prove_parts(example())


@pytest.mark.parametrize("kind", WRONG)
def test_what_is_wrong_is_found(kind: str) -> None:
    spoil, why = WRONG[kind]
    with pytest.raises(sm.PlanError, match=why):
        prove_parts(spoil(example()))
