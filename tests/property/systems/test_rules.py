"""Rules: text to sides and back, which rule takes which tensor, and errors that point at their cause."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shardmath import Layout, Mesh, NotationError
from shardmath.layouts.styles import KINDS
from shardmath.models.systems.rules import DEFAULTS, Rule, Side, parse

SHAPES = {
    "embed_tokens.weight": ((10, 6), "bfloat16"),
    "layers.0.q_proj.weight": ((8, 6), "bfloat16"),
    "layers.0.q_proj.bias": ((8,), "bfloat16"),
    "layers.0.o_proj.weight": ((6, 8), "bfloat16"),
    "layers.0.o_proj.bias": ((6,), "bfloat16"),
    "layers.0.norm.weight": ((6,), "float32"),
    "scale": ((), "float32"),
}
FSDP_TP = "dp=2 tp=2: column (tp dp n) ...; row (dp n) (tp h); vocab (tp dp n) h; * (dp n) ..."


def texts(side: Side) -> dict[str, str]:
    return {name: layout.text for name, layout in side.layouts(SHAPES).items()}


def fails(text: str) -> NotationError:
    with pytest.raises(NotationError) as caught:
        parse(text).layouts(SHAPES)
    return caught.value


# Values


def test_fsdp_over_tensor_parallel() -> None:
    assert texts(parse(FSDP_TP)) == {
        "embed_tokens.weight": "(tp dp n) h",
        "layers.0.q_proj.weight": "(tp dp n) h",
        "layers.0.q_proj.bias": "(tp dp n)",
        "layers.0.o_proj.weight": "(dp n) (tp h)",
        "layers.0.o_proj.bias": "(dp n)",
        "layers.0.norm.weight": "(dp n)",
        "scale": "",
    }


def test_layouts_are_the_notation_s_own() -> None:
    layout = parse(FSDP_TP).layouts(SHAPES)["layers.0.q_proj.weight"]
    assert layout is Layout((8, 6), Mesh(dp=2, tp=2), "(tp dp n) h", dtype="bfloat16")


@pytest.mark.parametrize(
    ("text", "ranks"),
    [
        ("tp=4: * ...", range(7, 11)),
        ("tp=4 ranks=4:8: * ...", range(4, 8)),
        ("ranks=0,2,4,6 tp=4: * ...", (0, 2, 4, 6)),
        ("dp=2 ranks=3 , tp=2".replace(" ,", ","), None),
        ("dp=2 tp=2 ranks=6:8,0:2:* ...", (6, 7, 0, 1)),
        ("ranks=5: * ...", (5,)),
        ("  tp = 2  ranks = 9,3  :  * ...  ", (9, 3)),
    ],
)
def test_ranks(text: str, ranks: tuple[int, ...] | None) -> None:
    if ranks is None:
        with pytest.raises(NotationError):
            parse(text)
    else:
        assert parse(text, first_rank=7).mesh.ranks == tuple(ranks)


def test_first_match_wins_and_no_match_replicates() -> None:
    side = parse("tp=2: layers.0.q_proj.weight h (tp n); column (tp n) ...")
    found = texts(side)
    assert (found["layers.0.q_proj.weight"], found["layers.0.q_proj.bias"]) == (
        "n (tp h)",
        "(tp n)",
    )
    assert found["layers.0.norm.weight"] == "n"
    assert side.matches(SHAPES)["layers.0.norm.weight"] is None


def test_character_classes_in_globs() -> None:
    assert texts(parse("tp=2: *.[qo]_proj.bias (tp n)"))["layers.0.o_proj.bias"] == "(tp n)"


@pytest.mark.parametrize(
    ("text", "column", "row", "rest"),
    [
        ("tp=2", "(tp n) h", "n (tp h)", "n"),
        ("dp=2", "(dp n) h", "(dp n) h", "(dp n)"),
        ("dp=2 tp=2", "(tp dp n) h", "(dp n) (tp h)", "(dp n)"),
        ("tp=2 replica=2 dp=1", "(tp dp n) h", "(dp n) (tp h)", "(dp n)"),
        ("replica=4", "n h", "n h", "n"),
    ],
)
def test_a_mesh_alone(text: str, column: str, row: str, rest: str) -> None:
    found = texts(parse(text))
    names = ("layers.0.q_proj.weight", "layers.0.o_proj.weight", "layers.0.norm.weight")
    expected = tuple(
        Layout(SHAPES[n][0], parse(text).mesh, t).text
        for n, t in zip(names, (column, row, rest), strict=True)
    )
    assert tuple(found[name] for name in names) == expected


def test_defaults_may_be_idle() -> None:
    assert parse("dp=2 tp=2").layouts({"scale": ((), "float32")})["scale"].text == ""


def test_defaults_say_every_combination() -> None:
    assert set(DEFAULTS) == {(), ("tp",), ("dp",), ("dp", "tp")}


# str and parse are inverse

axes = st.dictionaries(
    st.from_regex(r"[a-zA-Zé_]\w{0,4}", fullmatch=True).filter(
        lambda a: a.isidentifier() and a != "ranks"
    ),
    st.integers(1, 4),
    max_size=3,
)
patterns = st.sampled_from([*KINDS, "*", "*.q_proj.weight", "a[bc]?", "x:y"])
layouts = st.sampled_from(
    ["...", "(tp n) ...", "h (tp n)", "(8: tp n + 2: n) h {sum: dp}", "  (tp   n) "]
)


@st.composite
def sides(draw: st.DrawFn) -> Side:
    sizes = draw(axes)
    total = len(Mesh(sizes).ranks)
    ranks = draw(
        st.lists(st.integers(0, 99), min_size=total, max_size=total, unique=True)
        | st.just(list(range(total)))
    )
    rules = draw(st.lists(st.builds(Rule, patterns, layouts), max_size=4, unique=True))
    return Side(Mesh(sizes, ranks=ranks), tuple(rules))


@given(sides(), st.integers(0, 9))
@example(Side(Mesh(), ()), 3)
def test_parse_of_str(side: Side, first: int) -> None:
    assert parse(str(side), first_rank=first) == side


def test_rules_are_canonical() -> None:
    assert parse("tp=2:*   (tp  n)   ... ;x  ...") == Side(
        Mesh(tp=2), (Rule("*", "(tp n) ..."), Rule("x", "..."))
    )


@given(st.text("dptranksn=:;,.*() 0123456789", max_size=40))
def test_any_text_is_a_side_or_an_error_with_a_caret_inside(text: str) -> None:
    side, error = attempt(text)
    if error:
        assert error.text == text
        assert 0 <= error.position <= len(text)
    else:
        assert side == parse(str(side))


def attempt(text: str) -> tuple[Side | None, NotationError | None]:
    try:
        return parse(text), None
    except NotationError as error:
        return None, error


# Errors: what is wrong, the character it is about, the fix


@pytest.mark.parametrize(
    ("text", "at", "what"),
    [
        ("", "", "expected a mesh axis, found none"),
        ("tp", "tp", "'tp' is not axis=size"),
        ("tp=", "", "'tp' needs a size, found the end of the text"),
        ("tp=x: * ...", "x: *", "'tp' needs a size, found 'x:'"),
        ("tp=0: * ...", "tp=0", "size 0"),
        ("tp=2:4 dp=2: * ...", "2:4 dp", "'tp' needs a size, found '2:4'"),
        ("tp=2,dp=2: * ...", ",dp", "',dp=2:' is not axis=size"),
        ("tp=2 tp=4: * ...", "tp=4", "'tp' appears twice"),
        ("tp=2 ranks=0:2 ranks=2:4: * ...", "ranks=2", "'ranks' appears twice"),
        ("tp=4 ranks=0:3: * ...", "ranks", "ranks= has 3 ranks, but the mesh tp=4 has 4"),
        ("tp=2 ranks=1,1: * ...", "ranks", "rank 1 appears twice"),
        ("tp=2 ranks=0,5:3: * ...", "5:3", "ranks 5:3 is an empty range"),
        ("tp=2:", "", "expected a rule, found none"),
        ("tp=2: * ...;", "", "expected a rule, found none"),
        ("tp=2: ; * ...", "; *", "expected a rule, found none"),
        ("tp=2: column", "", "rule 'column' has no layout"),
        ("tp=2: * ...; * ...", "* ...", "appears twice"),
    ],
)
def test_text_that_is_no_side(text: str, at: str, what: str) -> None:
    error = fails(text)
    assert what in error.what
    assert error.text == text
    assert error.position == (text.rindex(at) if at else len(text))
    assert error.fix


@pytest.mark.parametrize(
    ("text", "at", "parts"),
    [
        (
            "tp=2: colunm (tp n) ...",
            "colunm",
            ["'colunm' matches no tensor of 7", "did you mean 'column'?"],
        ),
        (
            "tp=2: column (tp n) ...; *.qproj.* ...",
            "*.qproj",
            ["'*.qproj.*' matches no tensor", "a glob on the whole name"],
        ),
        ("tp=2: *.weight ...; row h (tp n)", "row", ["'row' is idle", "move it before"]),
        (
            "tp=2: row (tp n) (tp h)",
            "(tp h",
            ["rule 'row (tp n) (tp h)'", "'layers.0.o_proj.weight'", "(6, 8)", "two dimensions"],
        ),
        (
            "tp=2: column (tp n) h",
            "h",
            ["'layers.0.q_proj.bias' of shape (8,)", "layers.0.q_proj.bias ..."],
        ),
        (
            "tp=2: column (tp dp n) ...",
            "n)",
            ["'dp' and 'n' are both free names: neither", "mesh axis (tp)"],
        ),
        ("tp=2: vocab ...; * (tp n", "", ["expected ')'"]),
        ("ep=2 tp=2", "ep", ["axis 'ep' has no default", "write rules after ':'"]),
    ],
)
def test_rules_that_do_not_fit(text: str, at: str, parts: list[str]) -> None:
    error = fails(text)
    assert error.text is not None
    assert error.position == (error.text.rindex(at) if at else len(error.text))
    for part in parts:
        assert part in str(error)


def test_a_tensor_that_no_rule_matches_is_no_fault_of_a_rule() -> None:
    """The name may be one that no rule can have."""
    shapes = {"q_proj.weight": ((8, 6), "float32"), "x norm;": ((8,), "float33")}
    with pytest.raises(NotationError) as raised:
        parse("tp=2: column (tp n) ...").layouts(shapes)
    assert str(raised.value) == (
        "tensor 'x norm;' of shape (8,): unknown dtype 'float33'; did you mean 'float32'?"
    )


def test_the_caret_stands_under_the_character() -> None:
    assert str(fails("tp=2: colunm (tp n) ...")).splitlines()[1:3] == [
        "    tp=2 ranks=0:2: colunm (tp n) ...",
        "                    ^",
    ]


def test_an_idle_star_is_no_mistake() -> None:
    assert parse("tp=2: column ...; row ...; vocab ...; replicate ...; * ...").layouts(SHAPES)


@pytest.mark.parametrize(
    "rule", [("", "..."), ("a b", "..."), ("a", " "), ("a;b", "..."), ("a", "n; m")]
)
def test_rules_that_text_cannot_say(rule: tuple[str, str]) -> None:
    with pytest.raises(NotationError, match="not a pattern"):
        Rule(*rule)


def test_an_axis_called_ranks() -> None:
    with pytest.raises(NotationError, match="give the axis another name"):
        Side(Mesh(ranks=None, **{"tp": 2}).merge(["tp"], "ranks"))


@pytest.mark.parametrize(
    "mesh",
    [
        f"tp={'9' * 5000}",
        "tp=99999999999",
        "tp=9999999 dp=9999999",
        f"tp=2 ranks={'9' * 5000}",
        "tp=2 ranks=0:99999999999",
        "tp=2 ranks=" + ",".join(["0:16000000"] * 9),
        f"tp=2 ranks=3:{'9' * 5000}",
    ],
    ids=range(7),
)
def test_meshes_that_would_take_all_memory(mesh: str) -> None:
    """Numbers of any length are errors with a caret, before anything is made of them."""
    assert str(2**24) in str(fails(f"{mesh}: * (tp n) ..."))


def test_numbers_with_leading_zeros() -> None:
    assert parse(f"tp={'0' * 5000}2").mesh == Mesh(tp=2)
