"""Cells, beside sets of their numbers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shardmath.models.recordings.pieces import Piece
from shardmath_vllm.cells import Cells


@st.composite
def written(draw: st.DrawFn) -> tuple[Cells, set[tuple[str, int]]]:
    """Cells of two tensors of 24 in disjoint pieces, which are strided, transposed or one number; and their numbers."""
    pieces = {}
    numbers = set()
    for name in "ab":
        rows = draw(st.sampled_from([1, 2, 4, 6, 24]))
        columns = 24 // rows
        chosen = draw(st.lists(st.integers(0, columns - 1), unique=True))
        pieces[name] = [Piece("t", at, 0, ((rows, columns, 1),)) for at in chosen]
        if len(chosen) == columns and draw(st.booleans()):
            pieces[name] = [Piece("t", 0, 0, ((columns, 1, rows), (rows, columns, 1)))]
        numbers |= {(name, int(cell)) for piece in pieces[name] for cell in piece.cells}
    return Cells.of(pieces), numbers


def count(cells: Cells) -> set[tuple[str, int]]:
    """The numbers that the text of these cells names."""
    spans = eval(repr(cells), {"Cells": dict})
    return {
        (name, cell)
        for name, of in spans.items()
        for begin, end in of
        for cell in range(begin, end)
    }


@given(written(), written())
def test_cells_are_sets(a: tuple[Cells, set[object]], b: tuple[Cells, set[object]]) -> None:
    (here, some), (there, others) = a, b
    assert count(here) == some
    assert count(here | there) == some | others
    assert count(here - there) == some - others
    assert (here == there) == (some == others)
    assert bool(here) == bool(some)


def test_a_large_tensor_is_two_borders() -> None:
    """Also where its elements come in another order: a set of its cells would be 2 ** 30 numbers."""
    transposed = Piece("t", 0, 0, ((2**15, 1, 2**15), (2**15, 2**15, 1)))
    assert repr(Cells.of({"w": [transposed]})) == f"Cells({{'w': ((0, {2**30}),)}})"
