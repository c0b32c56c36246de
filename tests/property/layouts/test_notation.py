"""Text to holdings: all texts of a small grammar against a reading by lists, einops, and every error with its caret."""

from __future__ import annotations

import itertools
import math
import pickle
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmath import Layout, Mesh, NotationError, Runs, Shard
from shardmath.layouts.algebra.runs import from_ranges, identity
from shardmath.layouts.notation import pad

MESH = Mesh(a=2, b=3)
SIZES = {"a": 2, "b": 3}
WORDS = ("a", "b", "2", "n")


def chunks(piece: list[int], k: int) -> list[list[int]]:
    step = max(1, -(-len(piece) // k))
    return [piece[i * step : (i + 1) * step] for i in range(k)]


def blocks(piece: list[int], size: int) -> list[list[int]]:
    return [piece[i : i + size] for i in range(0, len(piece), size)]


def size_of(word: str) -> int:
    return math.prod(SIZES.get(name) or int(name) for name in word.rstrip("~").split("*"))


def kept(word: str, parts: list[list[int]], coords: dict[str, int]) -> list[list[int]]:
    """The parts that stay: all of a number, one of axes."""
    if word[0].isdigit():
        return parts
    at = 0
    for name in word.rstrip("~").split("*"):
        at = at * SIZES[name] + coords[name]
    return parts[at : at + 1]


def read_stage(words: list[str], piece: list[int], coords: dict[str, int]) -> list[int]:
    """What the words say, on a list of positions."""
    free = words.index("n") if "n" in words else len(words)
    pieces = [piece]
    for word in words[:free]:
        even = [
            np.array_split(p, size_of(word)) if "~" in word else chunks(p, size_of(word))
            for p in pieces
        ]
        pieces = [list(map(int, part)) for parts in even for part in kept(word, parts, coords)]
    block = math.prod(size_of(word) for word in words[free + 1 :])
    pieces = [part for p in pieces for part in blocks(p, block)] if words[free + 1 :] else pieces
    for word in words[free + 1 :]:
        block //= size_of(word)
        pieces = [part for p in pieces for part in kept(word, blocks(p, block), coords)]
    return [i for p in pieces for i in p]


def read_text(text: str, n: int, coords: dict[str, int]) -> list[int]:
    positions = list(range(n))
    for stage in text.split("|"):
        positions = read_stage(stage.split(), positions, coords)
    return positions


def check(text: str, n: int) -> None:
    layout = Layout((n,), MESH, f"({text})")
    for rank in MESH.ranks:
        assert layout.indices(rank)[0].tolist() == read_text(text, n, MESH.coords(rank))
    assert Layout((n,), MESH, layout.text) is layout


def legal(words: tuple[str, ...]) -> bool:
    axes = [w for w in words if w in "ab"]
    return words.count("n") <= 1 and len(set(axes)) == len(axes)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
def test_every_small_group(count: int) -> None:
    for words in itertools.product(WORDS, repeat=count):
        text = " ".join(words)
        for n in range(13) if count < 5 else (7, 12):
            product = math.prod(size_of(w) for w in words if w != "n")
            if legal(words) and ("n" in words or product == n):
                check(text, n)
            else:
                with pytest.raises(NotationError):
                    Layout((n,), MESH, f"({text})")


@st.composite
def texts(draw: st.DrawFn) -> str:
    """Stages of words with every axis at most once."""
    axes = draw(
        st.sampled_from(
            [("a", "b"), ("b", "a"), ("a*b",), ("b*a",), ("a~", "b"), ("a", "b~"), ("a*b~",)]
        )
    )
    words = [
        *axes[: draw(st.integers(0, 2))],
        *draw(st.lists(st.sampled_from(["1", "2", "3"]), max_size=2)),
    ]
    words = draw(st.permutations(words))
    cut = draw(st.integers(0, len(words)))
    return " | ".join(draw(_with_free(list(part))) for part in (words[:cut], words[cut:]))


@st.composite
def _with_free(draw: st.DrawFn, words: list[str]) -> str:
    last = max((i + 1 for i, w in enumerate(words) if "~" in w), default=0)
    at = draw(st.integers(last, len(words)))
    return " ".join([*words[:at], "n", *words[at:]])


@given(texts(), st.integers(0, 20))
def test_stages_are_read_in_order(text: str, n: int) -> None:
    check(text, n)


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        ("a n", "(a n) -> a n"),
        ("n a", "(n a) -> a n"),
        ("b a n", "(b a n) -> (a b) n"),
        ("a n b", "(a n b) -> (a b) n"),
        ("2 a n", "(x a n) -> a (x n)"),
        ("a 2 n b 3", "(a x n b y) -> (a b) (x n y)"),
        ("n b 2 a", "(n b x a) -> (a b) (n x)"),
        ("3 b n a 2", "(y b n a x) -> (a b) (y n x)"),
        ("b 2 a", "(b x a) -> (a b) x"),
        ("2 n 3", "(x n y) -> (x n y)"),
        ("a | b n", "(a b n) -> (a b) n"),
    ],
)
def test_einops_agrees_on_even_sizes(text: str, pattern: str) -> None:
    """einops refuses anonymous integers, so they are named x and y."""
    einops = pytest.importorskip("einops")
    used = {name: SIZES[name] for name in "ab" if name in pattern}
    unit = math.prod(used.values()) * (2 if "x" in pattern else 1) * (3 if "y" in pattern else 1)
    for n in (unit,) if "n" not in text else (unit, 2 * unit, 5 * unit):
        names = {**used, **{k: v for k, v in (("x", 2), ("y", 3)) if k in pattern}}
        rows = einops.rearrange(np.arange(n), pattern, **names)
        mesh = Mesh(used)
        layout = Layout((n,), mesh, f"({text})" if "|" not in text else "(a n | b n)")
        assert [layout.indices(r)[0].tolist() for r in mesh.ranks] == rows.reshape(
            mesh.size, -1
        ).tolist()


def test_einops_agrees_in_two_dimensions() -> None:
    einops = pytest.importorskip("einops")
    mesh = Mesh(dp=2, tp=3)
    whole = np.arange(12 * 6).reshape(12, 6)
    cells = einops.rearrange(whole, "(x dp n) (tp h) -> dp tp (x n) h", dp=2, tp=3, x=2)
    layout = Layout((12, 6), mesh, "(2 dp n) (tp h)")
    for rank in mesh.ranks:
        at = mesh.coords(rank)
        assert (whole[np.ix_(*layout.indices(rank))] == cells[at["dp"], at["tp"]]).all()


FULL = Mesh(pp=2, dp=4, tp=2)


def test_fields_and_stored_hold() -> None:
    layout = Layout((9,), Mesh(tp=2), "(4: tp n + 4: tp n + 2: n)=10")
    assert [str(layout.runs(r)[0]) for r in range(2)] == ["[0:2 4:6 8:9 -1]", "[2:4 6:9 -1]"]
    turned = Layout((9,), Mesh(tp=2), "(tp n)=<5:9 -2 0:5>")
    assert [str(turned.runs(r)[0]) for r in range(2)] == ["[5:9 -2]", "[0:5]"]


def test_same_axis_may_divide_several_fields_of_one_dimension_in_different_ways() -> None:
    layout = Layout((9,), FULL, "(6: tp*dp n + 3: dp n)")
    assert layout.text == "(6: tp*dp n + 3: dp n)"
    assert str(layout.runs(FULL.ranks[3])[0]) == "[5:6 7:8]"


def test_padded() -> None:
    assert pad(3, 3) == identity(3)
    assert pad(3, 5) == from_ranges([(0, 3), 2])
    assert pad(0, 0) == Runs()


DEEP = Mesh(dp=2, tp=2)
MORE = "add a name for each, or '...' for the rest"
ONE_USE = "leave it out of one: an axis divides a dimension or is Partial, not both"
ADD_FREE = "add a free name, or make the length"


@pytest.mark.parametrize(
    ("shape", "text", "at", "what", "fix"),
    [
        (
            (8,),
            "(n ?)",
            "?",
            "unexpected character '?'",
            "use names, integers and ( ) [ ] { } < > + : | = =< ~ * @ - ...",
        ),
        (
            (8,),
            "n  .",
            ".",
            "unexpected character '.'",
            "use names, integers and ( ) [ ] { } < > + : | = =< ~ * @ - ...",
        ),
        ((8,), "n w", "w", "text has more dimensions than the shape (8,)", "write 1 dimension"),
        ((), "n", "n", "text has more dimensions than the shape ()", "write 0 dimensions"),
        (
            (8, 2),
            "n ",
            "$",
            "text has 1 dimension, but the shape (8, 2) has 2",
            MORE,
        ),
        (
            (8, 2),
            "",
            "$",
            "text has 0 dimensions, but the shape (8, 2) has 2",
            MORE,
        ),
        (
            (8, 2),
            "{sum: tp}",
            "{",
            "text has 0 dimensions, but the shape (8, 2) has 2",
            MORE,
        ),
        ((8, 2), "... n ...", "...$", "'...' is written twice", "write ... once"),
        (
            (8,),
            "n {sum: tp} w",
            "w",
            "unexpected 'w' after a dimension",
            "write a name or (a group) per dimension, then {sum: axes} for Partial axes",
        ),
        (
            (8,),
            "n }",
            "}",
            "unexpected '}' after a dimension",
            "write a name or (a group) per dimension, then {sum: axes} for Partial axes",
        ),
        (
            (8,),
            "tp",
            "tp",
            "mesh axis 'tp' stands alone",
            "write (tp n) to divide, or leave it out to replicate",
        ),
        (
            (8, 2),
            "n n",
            "n$",
            "free name 'n' is used in two dimensions",
            "give each dimension its own name",
        ),
        (
            (8, 2),
            "(tp n) n",
            "n$",
            "free name 'n' is used in two dimensions",
            "give each dimension its own name",
        ),
        (
            (8, 2),
            "n (tp n)",
            "n)",
            "free name 'n' is used in two dimensions",
            "give each dimension its own name",
        ),
        ((8,), "()", "(", "empty group", "write a free name for an undivided dimension"),
        (
            (8,),
            "(tp n | )",
            "tp",
            "empty part of a group",
            "write a free name if nothing divides it",
        ),
        (
            (8,),
            "( | tp n)",
            "|",
            "empty part of a group",
            "write a free name if nothing divides it",
        ),
        (
            (8,),
            "(4: + 4: n)",
            "+",
            "empty part of a group",
            "write a free name if nothing divides it",
        ),
        (
            (8,),
            "((tp n))",
            "(tp",
            "empty part of a group",
            "write a free name if nothing divides it",
        ),
        ((8,), "(tp n", "$", "expected ')', found the end of the text", "close the group"),
        ((8,), "(tp n ~)", "~", "expected ')', found '~'", "close the group"),
        (
            (8,),
            "(n n)",
            "n)",
            "'n' and 'n' are both free names: neither is a mesh axis",
            "replace one of the two names by a mesh axis (dp, tp) or an integer",
        ),
        (
            (8,),
            "(ep n)",
            "n)",
            "'ep' and 'n' are both free names: neither is a mesh axis",
            "replace one of the two names by a mesh axis (dp, tp) or an integer",
        ),
        (
            (8,),
            "(tp n | tp m)",
            "tp m",
            "mesh axis 'tp' is used twice in one field",
            "write it once",
        ),
        (
            (8,),
            "(tp n dp*tp)",
            "dp",
            "mesh axis 'tp' is used twice in one field",
            "write it once",
        ),
        (
            (8,),
            "(tp*tp n)",
            "tp*",
            "mesh axis 'tp' is used twice in one field",
            "write it once",
        ),
        (
            (8, 2),
            "(tp n) (tp m)",
            "(tp m",
            "mesh axis 'tp' is used in two dimensions",
            "leave it out of one dimension",
        ),
        ((8,), "(tp* n)", "n)", "unknown mesh axis 'n'", "use one of the mesh axes (dp, tp)"),
        ((8,), "(tp*4 n)", "4", "expected a mesh axis, found '4'", "write a mesh axis"),
        (
            (8,),
            "(tp@ 4)",
            "4",
            "expected the name of a rule, found '4'",
            "write the name of a rule",
        ),
        ((8,), "(tp@x n)", "x", "unknown placement '@x'", "add 'x' to rules=, which has none"),
        ((8,), "(0 n)", "0", "a number of pieces is 0", "write 1 or more"),
        ((8,), "([] tp n)", "[", "empty list of sizes", "write one size or more"),
        ((8,), "([3 n)", "n)", "expected ']', found 'n'", "sizes are integers between [ and ]"),
        (
            (8,),
            "(tp[1 2 5] n)",
            "tp",
            "3 sizes for 2 coordinates of tp",
            "give one size per coordinate",
        ),
        (
            (8,),
            "(dp tp[4 3] n)",
            "(",
            "dimension 0 of shape (8,): sizes [4, 3] add up to 7, but divide 4 positions",
            "give sizes that add up to 4",
        ),
        (
            (8,),
            "([5] tp n)",
            "[",
            "sizes [5] add up to 5, but divide 8 positions",
            "write sizes that add up to 8",
        ),
        (
            (8,),
            "(4: [1 2] n + 4: n)",
            "[",
            "sizes [1, 2] add up to 3, but divide 4 positions",
            "write sizes that add up to 4",
        ),
        (
            (8,),
            "(dp 3)",
            "dp",
            "a group without a free name must divide exactly 6, but divides 8",
            f"{ADD_FREE} 6",
        ),
        (
            (9,),
            "(tp n | dp 2)",
            "dp",
            "a group without a free name must divide exactly 4, but divides 5",
            f"{ADD_FREE} 4",
        ),
        (
            (8,),
            "(tp~ 4)",
            "tp",
            "a group with ~, sizes or a placement has no free name",
            "add one, as in (tp~ n)",
        ),
        (
            (8,),
            "(4 [1 1])",
            "[",
            "a group with ~, sizes or a placement has no free name",
            "add one, as in (tp~ n)",
        ),
        (
            (8,),
            "(n tp~)",
            "tp",
            "~, sizes or a placement is right of the free name",
            "write it left of the free name, as in (tp~ n)",
        ),
        (
            (8,),
            "(n [4 4])",
            "[",
            "~, sizes or a placement is right of the free name",
            "write it left of the free name, as in (tp~ n)",
        ),
        (
            (8,),
            "(n + 4: m)",
            "n",
            "a field has no size",
            "give every field its size, as in (8: tp n + 2: n)",
        ),
        (
            (8,),
            "(4: n + tp m)",
            "tp",
            "a field has no size",
            "give every field its size, as in (8: tp n + 2: n)",
        ),
        (
            (8,),
            "(4: n + 3: m)",
            "(",
            (
                "dimension 0 of shape (8,): fields of sizes [4, 3] add up to 7, but 8 "
                "positions are stored"
            ),
            "make them add up to 8",
        ),
        (
            (8,),
            "n (9: n)"[2:],
            "(",
            (
                "dimension 0 of shape (8,): fields of sizes [9] add up to 9, but 8 positions "
                "are stored"
            ),
            "make them add up to 8",
        ),
        ((8,), "(n)=", "$", "expected an integer, found the end of the text", "write a number"),
        (
            (8,),
            "(n)=<4 >",
            ">",
            "expected ':', found '>'",
            "a stored range is start:stop, a hole -n",
        ),
        (
            (8,),
            "(n)=<0:4 -",
            "$",
            "expected an integer, found the end of the text",
            "write a number",
        ),
        (
            (8,),
            "(n) =3",
            "=",
            ("dimension 0 of shape (8,): stored size 3 is less than the 8 positions of the tensor"),
            "pad to 8 or more",
        ),
        (
            (8,),
            "(n)=<5:3>",
            "=<",
            "dimension 0 of shape (8,): 5:3 is not a range",
            "give 0 <= start <= stop",
        ),
        (
            (8,),
            "(n)=<0:3 2:4>",
            "=<",
            "dimension 0 of shape (8,): global ranges 0:3 and 2:4 share position 2",
            "give each global position once",
        ),
        (
            (8,),
            "(n)=<0:9>",
            "=<",
            "dimension 0 of shape (8,): stored positions [0:9] reach 8, but there are only 8",
            "store only positions below 8",
        ),
        (
            (8,),
            "n {mul: tp}",
            "mul",
            "unknown reduction 'mul'",
            "use one of sum, avg, product, max, min",
        ),
        ((8,), "n {3: tp}", "3", "expected a reduction, found '3'", "write a reduction"),
        ((8,), "n {sum tp}", "tp", "expected ':', found 'tp'", "write {sum: axes}"),
        ((8,), "n {sum: ep}", "ep", "unknown mesh axis 'ep'", "use one of the mesh axes (dp, tp)"),
        (
            (8,),
            "n {sum: ",
            "$",
            "expected a mesh axis, found the end of the text",
            "write a mesh axis",
        ),
        ((8,), "n {sum: tp tp}", "tp}", "mesh axis 'tp' is used already", ONE_USE),
        ((8,), "(tp n) {max: tp}", "tp}", "mesh axis 'tp' is used already", ONE_USE),
    ],
)
def test_errors_point_at_their_place(
    shape: tuple[int, ...], text: str, at: str, what: str, fix: str
) -> None:
    """`at` is what stands at the caret; `$` is the end of the text."""
    with pytest.raises(NotationError) as caught:
        Layout(shape, DEEP, text)
    error = caught.value
    column = len(text) - len(at.rstrip("$")) if at.endswith("$") else text.index(at)
    assert (error.what, error.text, error.position, error.fix) == (what, text, column, fix)
    assert str(error) == f"{what}\n    {text}\n    {' ' * column}^\n{fix}"


def test_on_one_rank_two_free_names_are_not_answered_with_a_mesh_axis() -> None:
    with pytest.raises(NotationError, match=r"replace one of the two names by an integer$"):
        Layout((8,), Mesh(), "(n m)")


def test_rules_that_are_there_are_listed() -> None:
    with pytest.raises(NotationError, match=r"rules=, which has p, q"):
        Layout((8,), DEEP, "(tp@x n)", rules={"p": Shard(0), "q": Shard(0)})


def test_a_rule_right_of_the_free_name_is_pointed_at() -> None:
    for text, at in (("(n tp@p)", 3), ("(tp@p 4)", 1)):
        with pytest.raises(NotationError) as caught:
            Layout((8,), DEEP, text, rules={"p": Shard(0)})
        assert caught.value.position == at


def test_errors_travel_between_processes() -> None:
    with pytest.raises(NotationError) as caught:
        Layout((8,), DEEP, "(n ?)")
    again = pickle.loads(pickle.dumps(caught.value))
    assert type(again) is NotationError and str(again) == str(caught.value) and again.position == 3
    assert str(NotationError("no text at all")) == "no text at all"
    assert str(NotationError("no text", fix="write one")) == "no text\nwrite one"
    assert re.fullmatch(r"bad\n    abc\n      \^", str(NotationError("bad", "abc", 2)))
