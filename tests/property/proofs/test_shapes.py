"""Shapes: what is said of tensors is said of the same ones, each of its kind, or refused before anything is proved."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

import shardmath as sm
from shardmath.layouts.holdings import Windows

HERE, THERE = sm.Mesh(tp=2), sm.Mesh(tp=3, ranks=range(2, 5))
ROWS, COLUMNS = sm.Layout((4, 6), HERE, "(tp n) h"), sm.Layout((4, 6), THERE, "n (tp h)")
SOME = sm.Layout((4, 6), sm.Mesh(ranks=[2]), "(n)=<0:2> h")

BY_NAME = sm.plan({"v": ROWS, "w": ROWS}, {"v": COLUMNS, "w": COLUMNS})
IN_PART = sm.plan({"v": ROWS}, {"v": SOME}, window=True)


class Changing(Mapping[str, Windows]):
    """New objects, each time that it is asked."""

    def __init__(self, side: Mapping[str, Windows]) -> None:
        self.side = side

    def __getitem__(self, name: str) -> Windows:
        return Windows(list(self.side[name]))

    def __iter__(self) -> Iterator[str]:
        return iter(self.side)

    def __len__(self) -> int:
        return len(self.side)


class Swapped(Windows):
    """Windows that give other names to their tensors."""

    def local_name(self, name: str, window: int) -> str:
        return f"{name}[{len(self) - window - 1}]"


SIDES: dict[str, Callable[[Mapping[str, Windows]], Any]] = {
    "nothing": lambda side: None,
    "a list": list,
    "another mapping": Changing,
    "no tensor": lambda side: {},
    "a tensor more": lambda side: {**side, "z": side["w"]},
    "a tensor less": lambda side: {"w": side["w"]},
    "another order": lambda side: dict(reversed(side.items())),
    "names that are numbers": lambda side: dict(enumerate(side.values())),
    **{
        f"windows: {kind}": lambda side, make=make: {n: make(w) for n, w in side.items()}
        for kind, make in {
            "tuples": tuple,
            "lists": list,
            "layouts": lambda windows: windows[0],
            "none": lambda windows: Windows(),
            "no layouts": lambda windows: Windows("x"),
            "a subclass": Swapped,
            "iterators": iter,
        }.items()
    },
}


def check(tampered: Any, said: str = "make the plan again") -> None:
    """It is refused, whoever proves it."""
    for prove in (
        lambda: sm.verify(tampered),
        lambda: sm.verify(tampered, transfers=list(BY_NAME.transfers())),
    ):
        with pytest.raises(sm.PlanError, match=said):
            prove()


@pytest.mark.parametrize("kind", SIDES)
@pytest.mark.parametrize("side", ["src", "dst"])
def test_sides(side: str, kind: str) -> None:
    check(dataclasses.replace(BY_NAME, **{side: SIDES[kind](getattr(BY_NAME, side))}))


@pytest.mark.parametrize("kind", SIDES)
@pytest.mark.parametrize("side", ["src", "dst"])
def test_sides_of_an_adjoint(side: str, kind: str) -> None:
    transposed = sm.adjoint(BY_NAME)
    check(dataclasses.replace(transposed, **{side: SIDES[kind](getattr(transposed, side))}))


@pytest.mark.parametrize(
    "given",
    [
        {"rules": None},
        {"rules": {}},
        {"rules": {"v": None, "w": None}},
        {"rules": {**BY_NAME.rules, "z": BY_NAME.rules["w"]}},
        {"is_tree": False},
        {"is_tree": "x"},
        {"digest": None},
        {"topology": 5},
    ],
)
def test_what_else_a_plan_says(given: dict[str, Any]) -> None:
    check(dataclasses.replace(BY_NAME, **given))


@pytest.mark.parametrize("forward", [None, 5, "x"])
def test_what_is_transposed(forward: Any) -> None:
    check(dataclasses.replace(sm.adjoint(BY_NAME), forward=forward), "is not a Plan; transpose")


def test_what_is_held_in_part_stays_so_in_another_mapping() -> None:
    changing: Any = Changing(IN_PART.dst)
    with pytest.raises(sm.PlanError):
        sm.verify(dataclasses.replace(IN_PART, dst=changing, in_part=()))


def test_windows_given_are_plain_windows() -> None:
    """A subclass may give other names; its layouts are taken."""
    halves = tuple(sm.window(ROWS, ((a, a + 2), (0, 6))) for a in (0, 2))
    p = sm.plan({"w": Swapped(halves)}, {"w": COLUMNS})
    assert type(p.src["w"]) is Windows
    sm.verify(p)
