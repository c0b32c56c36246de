"""Cutting: what structures store, beside arrays that numpy splits and joins."""

from __future__ import annotations

import itertools
from typing import TypeAlias

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from shardmath import LayoutError
from shardmath.models.storage.cutting import Frame, axes_of, lay_out
from shardmath.models.storage.structure import GroupedDim, Term, Word, parse

Labels: TypeAlias = NDArray[np.int64]

AXES = {"tp": 2, "ep": 4}
NUMBERS = {"groups": 2, "hd": 3}
LENGTHS = {"q": 48, "k": 24, "v": 24}
"""Every cut that is drawn divides these."""


def label() -> dict[str, Labels]:
    """Each component's elements, as positions in all of them laid one after the other."""
    ends = np.cumsum([0, *LENGTHS.values()])
    return {name: np.arange(a, b) for name, a, b in zip(LENGTHS, ends[:-1], ends[1:], strict=True)}


def split(
    words: tuple[Word, ...], arrays: list[Labels], coords: dict[str, int]
) -> list[list[Labels]]:
    """The arrays cut by all words: one list for each way through the numbers' parts."""
    if not words:
        return [arrays]
    first, *rest = words
    if first.name in AXES:
        same = int(first.over or 1)
        parts, chosen = AXES[str(first.name)] // same, [coords[str(first.name)] // same]
    else:
        parts = first.name if isinstance(first.name, int) else NUMBERS[first.name]
        chosen = list(range(parts))
    cut = [np.split(array, parts) for array in arrays]
    ways = []
    for part in chosen:
        ways += split(tuple(rest), [pieces[part] for pieces in cut], coords)
    return ways


def join(term: Term, components: dict[str, Labels], coords: dict[str, int]) -> Labels:
    """What the term stores, by splitting arrays and joining them."""
    names = sorted(components)
    words = term.words if term.group else term.words[: find_leaf(term)]
    joined = []
    for way in split(words, [components[name] for name in names], coords):
        own = dict(zip(names, way, strict=True))
        if term.group:
            joined += [join(inner, own, coords) for inner in term.group]
        else:
            joined.append(own[str(term.words[find_leaf(term)].name)])
    return np.concatenate(joined)


def find_leaf(term: Term) -> int:
    return next(i for i, word in enumerate(term.words) if word.name in LENGTHS)


words = st.sampled_from([Word("tp"), Word("ep", over=2), Word("groups"), Word(2)])
leaves = st.builds(
    lambda left, name: Term((*left, Word(name))),
    st.lists(words, max_size=1),
    st.sampled_from(list(LENGTHS)),
)


@st.composite
def terms(draw: st.DrawFn) -> Term:
    """A group of all components, cut by two words at most before each."""
    inner = []
    for name in draw(st.permutations(list(LENGTHS))):
        left = draw(st.lists(words.filter(lambda word: word.name not in AXES), max_size=1))
        inner.append(Term((*left, Word(name))))
    return Term(tuple(draw(st.lists(words, max_size=2, unique=True))), tuple(inner))


@given(terms())
def test_structures_store_what_numpy_splits_and_joins(term: Term) -> None:
    frame = Frame(AXES, NUMBERS, LENGTHS)
    group = GroupedDim(((term,),))
    assert parse(str(group)) == group
    for at in itertools.product(range(2), range(4)):
        coords = dict(zip(AXES, at, strict=True))
        stored = lay_out(group, frame, coords).indices()
        np.testing.assert_array_equal(stored, join(term, label(), coords))


@given(terms(), st.integers(0, 3))
def test_a_second_stage_cuts_the_sequence(term: Term, at: int) -> None:
    frame = Frame(AXES, NUMBERS, LENGTHS)
    free = Term((Word("ep"), Word("n")))
    coords = {"tp": 0, "ep": at}
    if any(word.name == "ep" for word in term.words):
        return
    stored = lay_out(GroupedDim(((term,), (free,))), frame, coords).indices()
    whole = join(term, label(), coords)
    np.testing.assert_array_equal(stored, np.split(whole, 4)[at])


def test_padding_is_cut_too() -> None:
    frame = Frame({"tp": 4}, {"vocab": 12}, {"": 10})
    group = parse("(tp n=vocab)")
    assert [str(lay_out(group, frame, {"tp": at})) for at in range(4)] == [
        "[0:3]",
        "[3:6]",
        "[6:9]",
        "[9:10 -2]",
    ]


def test_round_robin_and_balanced() -> None:
    frame = Frame({"ep": 3}, {}, {"e": 8})
    dealt = [str(lay_out(parse("(e ep)"), frame, {"ep": at})) for at in range(3)]
    assert dealt == ["[0:1 3:4 6:7]", "[1:2 4:5 7:8]", "[2:3 5:6]"]
    balanced = [str(lay_out(parse("(ep~ e)"), frame, {"ep": at})) for at in range(3)]
    assert balanced == ["[0:3]", "[3:6]", "[6:8]"]


def test_ceil_chunks_where_nothing_has_to_divide() -> None:
    frame = Frame({"dp": 4}, {}, {"": 9}, exact=False)
    chunks = [str(lay_out(parse("(dp n)"), frame, {"dp": at})) for at in range(4)]
    assert chunks == ["[0:3]", "[3:6]", "[6:9]", "[]"]


def test_axes_are_in_the_order_of_the_mesh() -> None:
    frame = Frame({"dp": 2, "tp": 2}, {}, {"n": 8})
    assert axes_of(parse("(tp dp n)"), frame) == ("dp", "tp")


AT_COMPONENT = (
    "=, ^ and % say how a component is stored, and {} is not one; write the mark at the component"
)
NEIGHBORS = "/ says which neighbors along an axis keep the same, and 4 is not a mesh axis; leave the mark out"
CUTTING = "/ and ~ say how an axis or a number cuts, and q is cut; leave the mark out"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "(tp q)",
            "'q' has 7 positions or blocks, which do not divide into 2 equal "
            "parts for 'tp'; choose sizes that divide, or write 'tp~' for parts that differ by one, "
            "counted in each component by itself (so queries may lie apart from their keys)",
        ),
        (
            "(q hd)",
            "7 positions of 'q' do not divide evenly into blocks of 3; "
            "write numbers after 'q' whose product divides 7",
        ),
        (
            "(up q)",
            "'up q' must have one component, and has up and q; "
            "write one of components: q; mesh axes: tp; numbers: hd, rep",
        ),
        (
            "(q tp tp)",
            "axes tp and tp are both right of one component and deal out its blocks; "
            "write only one of them there, and the other left of the component",
        ),
        ("(tp=8 q)", f"'tp=8' in 'tp=8 q': {AT_COMPONENT.format('tp')}"),
        ("(tp^8 q)", f"'tp^8' in 'tp^8 q': {AT_COMPONENT.format('tp')}"),
        ("(2=8 q)", f"'2=8' in '2=8 q': {AT_COMPONENT.format('2')}"),
        ("(q tp=2)", f"'tp=2' in 'q tp=2': {AT_COMPONENT.format('tp')}"),
        ("(tp=8 (q))", f"'tp=8' in 'tp=8 (q)': {AT_COMPONENT.format('tp')}"),
        ("(4/2 q)", f"'4/2' in '4/2 q': {NEIGHBORS}"),
        ("(tp q/2)", f"'q/2' in 'tp q/2': {CUTTING}"),
        ("(tp q~)", f"'q~' in 'tp q~': {CUTTING}"),
        ("(tp/rep q)", "'tp/rep': 5 does not divide tp=2; write a divisor of 2 after /"),
        ("(q=hd)", "'q=hd': 7 positions do not fit into 3; write 7 or more after ="),
        (
            "(q=many)",
            "unknown number 'many'; the numbers of this side are: hd, rep; "
            "write one of them or an integer, or pass it where the side is made, as many= or in numbers=",
        ),
    ],
)
def test_what_does_not_fit(text: str, message: str) -> None:
    frame = Frame({"tp": 2}, {"hd": 3, "rep": 5}, {"q": 7})
    with pytest.raises(LayoutError) as caught:
        lay_out(parse(text), frame, {"tp": 0})
    assert str(caught.value) == message
