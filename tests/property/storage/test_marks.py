"""Marks of a structure, and any rest of a name, against loops."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmath import Mesh, NotationError, StoreError
from shardmath.models.storage import rows
from shardmath.models.storage.binding import bind
from shardmath.models.storage.filling import fill
from shardmath.models.storage.stored import Spot, Stored
from shardmath.models.storage.structure import parse


@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 6))
def test_each_part_is_padded_to_whole_tiles(parts: int, each: int, tile: int) -> None:
    """`a^tile` pads what a rank keeps, `a=n` what all keep together."""
    side = Stored(
        rows.parse("w = [a b].w : (tp (a^tile + b^tile))"),
        (Mesh(tp=parts),),
        numbers={"tile": tile},
    )
    n = parts * each
    arrays = {"a.w": np.arange(1, n + 1), "b.w": -np.arange(1, n + 1)}
    bound = bind(side, dict.fromkeys(arrays, ((n,), "int64")))
    padding = -each % tile
    for rank in range(parts):
        own = list(range(rank * each + 1, rank * each + each + 1))
        expected = own + [0] * padding + [-x for x in own] + [0] * padding
        assert fill(bound, arrays, rank)[0, "w"].tolist() == expected


@given(st.integers(1, 9), st.integers(0, 4), st.integers(1, 4))
def test_slots_begin_anew_behind_the_end(count: int, more: int, ranks: int) -> None:
    """`e%slots` stores copies of the first tensors behind the last; each rank has at most one copy of each."""
    slots = count + more
    held = np.array_split(np.arange(slots) % count, ranks)
    side = Stored(
        rows.parse("w = {e}.w : (ep~ e%slots) n"), (Mesh(ep=ranks),), numbers={"slots": slots}
    )
    arrays = {f"{e}.w": np.full(2, e + 1) for e in range(count)}
    shapes = dict.fromkeys(arrays, ((2,), "int64"))
    twice = [rank for rank, own in enumerate(held) if len(set(own)) < len(own)]
    if twice:
        at = twice[0]
        number = min(e for e in held[at] if list(held[at]).count(e) > 1)
        what = f"rank {at}: '(ep~ e%slots)' stores number {number} of 'e' twice at ep={at}"
        if slots > count * ranks:
            what = f"rank 0: '%slots' asks for {slots} slots, and {count} positions per coordinate"
        with pytest.raises(StoreError, match=re.escape(what)) as caught:
            bind(side, shapes)
        assert str(caught.value).endswith("\nin the row w = {e}.w : (ep~ e%slots) n")
        return
    bound = bind(side, shapes)
    for rank, own in enumerate(held):
        stored = fill(bound, arrays, rank)
        expected = [[e + 1, e + 1] for e in own]
        assert stored.get((0, "w"), np.zeros((0, 2))).tolist() == expected


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("(dp n + n)", "'(dp n + n)' stores number 0 twice at dp=0"),
        ("(dp dp n)", "no rank stores position 1 of the 4 positions; cut by each axis once"),
        ("(n^big + n)", "is 1180591620717411303424; give a number from 0 to"),
        (
            "(n%many)",
            "slots, and 4 positions per coordinate are 8; write at most 8 after %",
        ),
        ("n", "'@dp=2' is not on axis 'dp' of size 2; use 0 to 1, or -1 for the last"),
    ],
)
def test_structures_that_no_ranks_store(text: str, what: str) -> None:
    """Two of them were bound: half of a tensor was stored by nobody, and `@dp=2` was `@dp=0`."""
    place = "@dp=2" if text == "n" else ""
    numbers = {"big": 1 << 70} if "big" in text else {"many": 1 << 50}

    def bind_row() -> None:
        side = Stored(rows.parse(f"w{place} = a : {text}"), (Mesh(dp=2),), numbers=numbers)
        bind(side, {"a": ((4,), "int64")})

    with pytest.raises(StoreError, match=re.escape(what)):
        bind_row()


def test_dots_stand_once_in_a_structure() -> None:
    """A second `...` took the place of no dimension, and ended in a KeyError."""
    with pytest.raises(NotationError, match=r"'...' twice(.|\n)*for all remaining dimensions"):
        rows.parse("w = a : ... n ...")


def test_any_rest_of_a_name() -> None:
    """Names that no row before takes, in the layers that a rank has; numbers in them stay."""
    table = """
    a.{l}.own = b.{l}.own : (tp n)
    a.{l}.... = b.{l}....
    ...       = ...
    """
    spots = tuple(Spot({"pp": stage}, 0, stage) for stage in range(2))
    side = Stored(rows.parse(table), (Mesh(pp=2, tp=2),), indices={"l": spots})
    shapes = dict.fromkeys(
        ("b.0.own", "b.1.own", "b.1.x.7.y", "b.0.z", "other.5"), ((4,), "float32")
    )
    natives = bind(side, shapes).natives(2)
    assert natives == {
        (0, "a.1.own"): (2,),
        (0, "a.1.x.7.y"): (4,),
        (0, "other.5"): (4,),
    }
    assert rows.parse(rows.show(side.rows)) == side.rows


def test_without_a_rest_nothing_unknown_is_stored() -> None:
    side = Stored(rows.parse("a.... = b...."), (Mesh(tp=2),))
    with pytest.raises(StoreError, match="no row stores c; add rows for them, or leave them out"):
        bind(side, {"c": ((4,), "float32")})


def test_a_rest_is_in_both_names() -> None:
    with pytest.raises(NotationError, match=r"only one of a\.\.\.\. and b\.\{l\} ends in \.\.\."):
        rows.parse("a.... = b.{l}")


@pytest.mark.parametrize("text", ["(tp (a^128 + b^tile))", "(ep~ e%slots)", "(tp/rep~ n=64)"])
def test_marks_are_written_as_they_are_read(text: str) -> None:
    assert str(parse(text)) == text
