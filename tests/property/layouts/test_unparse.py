"""Unparse: the printed form, and reading it back."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from shardmath import BlockCyclic, Layout, Mesh, Runs, Shard
from shardmath.layouts.notation import parse
from shardmath.layouts.unparse import rule_names, unparse

FULL = Mesh(pp=2, dp=4, tp=2)


@pytest.mark.parametrize(
    ("shape", "text", "printed"),
    [
        ((9, 4), "(tp dp n) h {sum: pp}", "(tp dp n) h {sum: pp}"),
        ((9, 4), "(tp dp rows)columns{sum:pp}", "(tp dp n) h {sum: pp}"),
        ((9, 4), "x y", "n h"),
        ((9, 4), "(x) (y)", "n h"),
        ((9, 4), "...", "n h"),
        ((9, 4), "(tp n) ...", "(tp n) h"),
        ((9, 4), "... (tp n)", "n (tp h)"),
        ((9, 4), "... {sum: dp}", "n h {sum: dp}"),
        ((9, 4), "... h {sum: dp} {sum: tp}", "n h {sum: dp tp}"),
        ((9, 4, 3), "(tp n) ... (dp k)", "(tp n) h (dp w)"),
        ((9, 4), "n ... h", "n h"),
        ((1, 2, 3, 4, 5), "... (tp k)", "n h w d (tp n4)"),
        ((9,), "(1 tp n)", "(tp n)"),
        ((9,), "(tp 3 n)", "(tp n)"),
        ((9,), "(tp n | dp m)", "(tp dp n)"),
        ((9,), "(2 tp n | dp m)", "(2 tp n | dp n)"),
        ((9,), "(tp n 1)", "(tp n)"),
        ((9,), "(n 4)", "n"),
        ((9,), "(n tp 1)", "(n tp)"),
        ((12,), "(n tp 3 2)", "(n tp 6)"),
        ((12,), "(n 2 tp 3)", "(n tp 3)"),
        ((12,), "(2 tp 3)", "(2 tp n)"),
        ((12,), "(3 n 2 tp)", "(3 n tp)"),
        ((12,), "(3 n dp 2 tp)", "(3 n dp 2 tp)"),
        ((9,), "(dp*tp n)", "(dp*tp n)"),
        ((9,), "(tp~ n)", "(tp~ n)"),
        ((9,), "(tp[7 2] n)", "(tp[7 2] n)"),
        ((9,), "([4 4 1] tp n)", "([4 4 1] tp n)"),
        ((9,), "(n)=16", "(n)=16"),
        ((9,), "(n)=9", "n"),
        ((9,), "(tp n)=16", "(tp n)=16"),
        ((9,), "(tp n)=<0:9 -7>", "(tp n)=16"),
        ((9,), "(n)=<0:9>", "n"),
        ((9,), "(n)=<4:9 -2 0:4>", "(n)=<4:9 -2 0:4>"),
        ((9,), "(tp n)=<-3 2:6>", "(tp n)=<-3 2:6>"),
        ((9,), "(n)=<>", "(n)=<>"),
        ((0,), "(n)=<>", "n"),
        ((9,), "(5: tp n + 4: dp n)", "(5: tp n + 4: dp n)"),
        ((9,), "(5: tp n + 4: tp n)=<0:9>", "(5: tp n + 4: tp n)"),
        ((9,), "(9: tp n)", "(tp n)"),
        ((9,), "(5: n + 4: tp m)", "(5: n + 4: tp n)"),
        ((9,), "n {sum: dp pp}", "n {sum: pp dp}"),
        ((9,), "n {sum: dp} {sum: pp}", "n {sum: pp dp}"),
        ((9,), "n {sum:}", "n"),
        ((), "", ""),
        ((), "...", ""),
        ((), "{avg: tp}", "{avg: tp}"),
        ((8,), "(tp dp)", "(tp dp n)"),
        ((9,), "n1_x", "n"),
    ],
)
def test_printed_form(shape: tuple[int, ...], text: str, printed: str) -> None:
    layout = Layout(shape, FULL, text)
    assert layout.text == printed
    assert Layout(shape, FULL, printed) is layout


def test_names_that_are_axes_are_not_printed_as_free_names() -> None:
    mesh = Mesh({"n": 2, "n_": 2, "h": 2})
    layout = Layout((4, 4), mesh, (Shard(0), Shard(1), Shard(1)))
    assert layout.text == "(n n__) (n_ h h_)"
    assert Layout((4, 4), mesh, layout.text) is layout


def test_parse_and_unparse_are_inverse() -> None:
    dims, partial = parse("(tp dp n) h {sum: pp}", (9, 4), FULL.shape, {})
    assert partial == (("pp", "sum"),)
    assert unparse(dims, partial, FULL.shape) == "(tp dp n) h {sum: pp}"
    assert (
        unparse((), (("dp", "sum"), ("tp", "max"), ("pp", "sum")), FULL.shape)
        == "{sum: dp pp} {max: tp}"
    )


@dataclass(frozen=True)
class Deal:
    """Block-cyclic by its own class."""

    dim: int
    block: int

    def split(self, n: int, parts: int) -> tuple[Runs, ...]:
        return BlockCyclic(0, self.block).split(n, parts)


def test_rules_are_named_after_their_class() -> None:
    tables = [Deal(0, k) for k in (3, 4)]
    mesh = Mesh(a=2, b=2, c=2)
    layout = Layout((4, 4), mesh, "(a@x b@y n) (c@x h)", rules={"x": tables[1], "y": tables[0]})
    assert layout.text == "(a@deal b@deal2 n) (c@deal h)"
    assert rule_names(layout.dims) == {tables[1]: "deal", tables[0]: "deal2"}
    assert Layout((4, 4), mesh, layout.text, rules=layout.rules) is layout
