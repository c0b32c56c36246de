"""Rows: tables are read, printed and read back, and carets stand under what is wrong."""

from __future__ import annotations

import itertools

import pytest

from shardmath import NotationError
from shardmath.models.storage import rows
from shardmath.models.systems.megatron_rows import EXPERTS, SPECS, table


@pytest.mark.parametrize(("spec", "experts"), list(itertools.product(SPECS, EXPERTS)))
def test_tables_are_printed_and_read_back(spec: str, experts: str) -> None:
    read = rows.parse(table(spec, experts))
    assert rows.parse(rows.show(read)) == read


def test_every_part_of_a_row() -> None:
    text = "also a.{l}.w @pp=-1 = neg_exp(b.{l}.w).mT ? /c.{l}.w ! /d.w : (tp n=vocab | dp n) ... h"
    (row,) = rows.parse(text)
    assert row.also
    assert row.function == "neg_exp"
    assert row.place == rows.AxisPlace("pp", -1)
    assert (
        str(row)
        == "also a.{l}.w @pp=-1 = neg_exp(b.{l}.w).mT ? /c.{l}.w ! /d.w : (tp n=vocab | dp n) ... h"
    )


def test_heads_that_follow_each_other_share_rows() -> None:
    read = rows.parse(
        """
        [a. = x.]
        [b. = y.] @pp=-1
        w = v ? u   # a condition is below the head too
        [ = ]
        t = s
        """
    )
    assert [str(row) for row in read] == [
        "a.w = x.v ? /x.u",
        "b.w @pp=-1 = y.v ? /y.u",
        "t = s",
    ]


@pytest.mark.parametrize(
    ("text", "position", "what"),
    [
        ("a.w", 3, "expected '=', found the end of the line"),
        ("a.w = ", 5, "expected the logical name, found the end of the line"),
        ("a.w = b.w (tp n)", 10, "expected ':', found '(tp n)'"),
        ("a.w = b.w : (tp", 15, "expected ')', found the end of the text"),
        ("a.w = b.w : (tp ? n)", 16, "unexpected character '?'"),
        ("a.w = b.w : (| n)", 13, "expected a component, found '|'"),
        ("a.* = b.w", 0, "only one of a.* and b.w has a *"),
        ("[a b].w = c.w", 0, "a choice [...] in the stored name [a b].w, which is one tensor"),
        ("a.w = b.w : " + "(" * 3000 + "n", 78, "more than 64 nested groups"),
        ("a.0.w = b.0.w", 10, "the logical name b.0.w has the number 0"),
        ("a.... = b.0....", 10, "the logical name b.0.... has the number 0"),
        ("a.{l}.w = b.w", 2, "index {l} is not in the logical name b.w"),
        # A KeyError of 'tp l' in binding.
        (
            "a{ep e}{tp l} = b.{l}.{e}",
            7,
            "the stored name spreads two indices over axes, {ep e} and {tp l}",
        ),
        ("w = [q k] : (q + k + q) h", 21, "component 'q' is twice in a dimension"),
        ("w = [q k] : h (tp (q + k + k))", 27, "component 'k' is twice in a dimension"),
        ("w = [q k q] : (q + k) h", 15, "component 'q' is twice in the logical name [q k q]"),
        ("[a. = b.] @pp=0 w", 16, "unexpected 'w' after [NATIVE = LOGICAL]"),
        ("[a. = b.", 8, "expected ']', found the end of the line"),
        ("a.w = f(b.w : h", 12, "expected ')', found ': h'"),
    ],
)
def test_carets(text: str, position: int, what: str) -> None:
    with pytest.raises(NotationError) as caught:
        rows.parse(text)
    assert (caught.value.what, caught.value.position) == (what, position)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a.{l} = q.{l} ? /x.{m}", "the condition x.{m} has the index {m}, which q.{l} lacks"),
        ("a.* = q.* ? b.*", "the condition b.* has a *"),
    ],
)
def test_a_condition_is_one_tensor(text: str, said: str) -> None:
    with pytest.raises(NotationError) as caught:
        rows.parse(text)
    assert str(caught.value).startswith(said)


def test_an_index_stands_once_in_a_logical_name() -> None:
    """Its last number would win: `y.0.1` be stored as `x.1`."""
    with pytest.raises(
        NotationError, match=r"index 'l' is twice in the logical name y\.\{l\}\.\{l\}"
    ):
        rows.parse("x.{l} = y.{l}.{l}")
