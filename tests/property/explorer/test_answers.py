"""What the page is told: always an answer, never an error; the form that stored copies have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardmath as sm
from shardmath.display.explorer.answer import SCHEMA, answers, plan_answer
from shardmath.display.explorer.code import write_script, write_test
from shardmath.display.explorer.facts import MOST_RANKS, MOST_TRANSFERS, plan_facts
from shardmath.display.explorer.question import FIELDS, LONGEST, read
from shardmath.display.explorer.reading import read_aloud
from shardmath.testing import layouts, pairs

STORED = Path(__file__).parent / "answer.json"

ASKED = {
    "shape": "9,4",
    "dtype": "bfloat16",
    "src_mesh": "dp=4 tp=2",
    "src": "(tp dp n) h",
    "dst_mesh": "tp=2 ranks=8:10",
    "dst": "n (tp h)",
    "node": "8",
}


def last(texts: dict[str, str]) -> Any:
    """The whole answer, as the page gets it."""
    *_, answer = answers(texts)
    return json.loads(json.dumps(answer))


def test_the_answer_s_form_is_the_stored_one() -> None:
    """A change of it is one of the schema: write the copy anew, and count SCHEMA up if a key is gone or differs."""
    answer = last(ASKED)
    # Pictures and times change with drawing and machines.
    answer["picture"] = answer["picture"][:4]
    assert answer["schema"] == SCHEMA
    assert answer == json.loads(STORED.read_text())


WORDS = st.sampled_from(
    [
        "tp",
        "dp",
        "n",
        "h",
        "(",
        ")",
        "[",
        "]",
        "|",
        "+",
        ":",
        "2",
        "4",
        "9",
        "=",
        ",",
        "{sum:",
        "tp}",
        "*",
        "~",
        "...",
    ]
)
TYPED = st.one_of(st.text(max_size=12), st.lists(WORDS, max_size=12).map(" ".join))


@given(st.dictionaries(st.sampled_from([*FIELDS, "other"]), TYPED))
def test_whatever_is_typed_is_answered(texts: dict[str, str]) -> None:
    given_texts = {"shape": "9,4", "src_mesh": "tp=2", "dst_mesh": "dp=2 tp=2"} | texts
    answer = last(given_texts)
    assert answer["done"] is True and answer["schema"] == SCHEMA
    assert set(answer["faults"]) <= set(FIELDS)
    # A side that can be read is shown, even if the other cannot.
    for side in ("src", "dst"):
        faulty = answer["faults"].keys() & {"shape", "dtype", f"{side}_mesh", side}
        assert (answer[side] is None) == bool(faulty)


@pytest.mark.parametrize(
    ("texts", "field", "why"),
    [
        ({"src": "(tp dp n h"}, "src", "expected ')'"),
        ({"src_mesh": "dp=4 tp"}, "src_mesh", "is not axis=size"),
        ({"shape": "9,x"}, "shape", "write sizes with commas"),
        ({"shape": "9,-4"}, "shape", "write sizes from 0"),
        ({"shape": ",".join("2" * 9)}, "shape", "write at most 8"),
        ({"dtype": "int7"}, "dtype", "unknown dtype 'int7'"),
        ({"node": "0"}, "node", "0"),
        ({"node": "two"}, "node", "is not a number"),
        ({"rank": "-1"}, "rank", "is not a number"),
        ({"dst_mesh": "tp=100000"}, "dst_mesh", "100,000 ranks"),
        ({"dst": "n" * (LONGEST + 1)}, "dst", "write at most"),
    ],
)
def test_what_cannot_be_read_is_said_at_its_field(
    texts: dict[str, str], field: str, why: str
) -> None:
    faults = last(ASKED | texts)["faults"]
    assert list(faults) == [field] and why in faults[field]


def test_two_layouts_without_a_plan() -> None:
    """Here the source does not hold what is wanted: the pictures of both, and why."""
    answer = last(ASKED | {"src": "(n)=<0:4> h", "src_mesh": "tp=2"})
    assert "plan" not in answer and "4" in answer["refused"]
    assert answer["src"]["picture"].startswith("<svg") and answer["dst"]["picture"].startswith(
        "<svg"
    )


def test_a_destination_that_holds_a_part() -> None:
    answer = last(ASKED | {"dst": "(n)=<0:4> h", "dst_mesh": "tp=2"})
    assert "element (4, 0) is not held there" in answer["plan"]["proof"]
    assert "window=True" in answer["code"]["python"]


def test_transfers_of_one_rank() -> None:
    every = last(ASKED)["plan"]["transfers"]
    for rank in range(10):
        some = last(ASKED | {"rank": str(rank)})["plan"]["transfers"]
        assert some == [each for each in every if rank in (each["src"], each["dst"])]


def test_many_ranks_and_transfers_are_listed_in_part() -> None:
    meshes = {"src_mesh": "a=256", "dst_mesh": "a=256"}
    wide = {"shape": "4096,64", "src": "(a n) h", "dst": "(n a 1) h"} | meshes
    answer = last(wide)
    assert len(answer["src"]["ranks"]) == MOST_RANKS and answer["src"]["more"] == 256 - MOST_RANKS
    assert len(answer["plan"]["transfers"]) == MOST_TRANSFERS and not answer["plan"]["all"]
    of_one = last(wide | {"rank": "200"})
    assert of_one["src"]["ranks"][-1]["rank"] == 200
    assert of_one["plan"]["all"] and len(of_one["plan"]["transfers"]) == 16 + 16


@given(pairs())
def test_code_makes_the_same_plan(pair: tuple[sm.Layout, sm.Layout]) -> None:
    src, dst = pair
    if src.rules or dst.rules:
        return
    planned = sm.plan(src, dst, window=True)
    window = bool(planned.in_part)
    made: dict[str, Any] = {"print": lambda *lines, sep=" ": None}
    exec(write_script(src, dst, None, window=window), made)
    assert made["plan"].digest == planned.digest
    tested: dict[str, Any] = {}
    exec(write_test(planned, None, window=window), tested)
    tested["test_every_element_arrives"]()


def test_a_test_fails_if_the_layout_changes() -> None:
    src = sm.Layout((9, 4), sm.Mesh(tp=2), "(tp n) h")
    text = write_test(sm.plan(src, src), None, window=False)
    made: dict[str, Any] = {}
    exec(text.replace("(9, 4)", "(11, 4)"), made)
    with pytest.raises(AssertionError):
        made["test_every_element_arrives"]()


@given(layouts())
def test_every_layout_is_read_aloud(layout: sm.Layout) -> None:
    """Each dimension and each axis that divides one is named."""
    sentences = read_aloud(layout)
    for d, dim in enumerate(layout.dims):
        assert sentences[d].startswith(f"Dimension {d}: ")
        if len(dim.fields) <= 6:
            assert all(axis in sentences[d] for axis in dim.axes)


READ = {
    "(2 dp n | tp n) h": (
        "Dimension 0: 9 positions are cut into 2 chunks, and every rank gets a share of each; each of these is cut "
        "into 4 chunks, one per rank along dp; then what each rank has counts as one piece, which is cut into 2 "
        "chunks, one per rank along tp."
    ),
    "(tp n)=12 h": (
        "Dimension 0: 12 positions stored, 3 of them padding; 12 positions are cut into 2 chunks, one per rank "
        "along tp."
    ),
    "(4: tp n + 5: dp n) h": (
        "Dimension 0: of positions 0:4, 4 positions are cut into 2 chunks, one per rank along tp; of positions 4:9, 5 "
        "positions are cut into 4 chunks, one per rank along dp."
    ),
    "n (h tp 2)": "Dimension 0: every rank has all 9 positions.",
    "(tp~ n) h": (
        "Dimension 0: 9 positions are cut into 2 chunks whose sizes differ by at most 1, one per rank along tp."
    ),
    "([1 8] tp n) h": (
        "Dimension 0: 9 positions are cut into parts of 1 + 8, and every rank gets a share of each; each of these is "
        "cut into 2 chunks, one per rank along tp."
    ),
}


@pytest.mark.parametrize("text", READ)
def test_sentences(text: str) -> None:
    assert read_aloud(sm.Layout((9, 8), sm.Mesh(dp=4, tp=2), text))[0] == READ[text]


def test_a_row_that_no_schedule_can_send() -> None:
    """The plan is shown all the same."""
    sides = {"src_mesh": "tp=2", "src": "(tp n) h", "dst_mesh": "tp=2 ranks=2:4"}
    answer = last(ASKED | sides | {"shape": "4,2000000000"})
    assert answer["done"] and answer["plan"]["bytes"] == 16_000_000_000
    assert "no schedule: max_inflight_bytes=" in answer["cost"]["advice"]


def test_components_that_ranks_lack_are_named() -> None:
    """Four ranks of two key heads: K and V are divided as Q is, and two ranks get none."""
    fused = sm.Layout((12, 4), sm.Mesh(tp=4), "([8 2 2] tp n) h")
    assert read_aloud(fused)[2:] == [
        "Ranks 2-3 hold nothing of positions 8:10 of dimension 0.",
        "Ranks 2-3 hold nothing of positions 10:12 of dimension 0.",
    ]
    assert len(read_aloud(sm.Layout((12, 4), sm.Mesh(tp=2), "([8 2 2] tp n) h"))) == 2


def test_a_plan_of_several_tensors_has_an_answer() -> None:
    layout = sm.Layout((8, 4), sm.Mesh(tp=2), "(tp n) h")
    other = sm.Layout((8, 4), sm.Mesh(tp=2), "n (tp h)")
    planned = sm.plan({"a<b": layout, "c": layout}, {"a<b": other, "c": layout})
    answer = json.loads(json.dumps(plan_answer(planned, sm.Topology(ranks_per_node=1))))
    assert {each["tensor"] for each in answer["plan"]["transfers"]} == {"a<b", "c"}
    assert answer["cost"]["crossing"] == 64 and answer["plan"]["bytes"] == 64
    assert plan_facts(planned)["proof"].startswith("the destination holds every element")


def test_the_question_of_nothing() -> None:
    asked = read({})
    assert asked.src is None and asked.dst is None and set(asked.faults) == {"src_mesh", "dst_mesh"}
