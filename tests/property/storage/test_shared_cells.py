"""Two logical tensors in the same cells of a rank: refused where rows are bound, for whichever side."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shardmath import Mesh, ShardError, StoreError, refit
from shardmath.models.storage import binding, rows
from shardmath.models.storage.binding import Bound, bind
from shardmath.models.storage.filling import view_of
from shardmath.models.storage.stored import Shapes, Spot, Stored

SHAPES: Shapes = {
    **{f"layers.{i}.{c}.weight": ((4, 2), "int8") for i in range(2) for c in "ab"},
    **{f"layers.{i}.experts.{e}.w": ((4, 2), "int8") for i in range(2) for e in range(3)},
    **{f"experts.{e}.w": ((4, 2), "int8") for e in range(3)},
    **dict.fromkeys(("head", "tail"), ((4, 2), "int8")),
}
MESHES = Mesh(pp=2, tp=2), Mesh(pp=2, ep=2)
EVERYWHERE = {"l": tuple(Spot({}, 0, number) for number in range(2))}
STAGES = {"l": tuple(Spot({"pp": number}, 0, 0) for number in range(2))}
SAME_NUMBER = {"l": (Spot({"pp": 0}, 0, 0),) * 2}
CHUNKS = {"l": tuple(Spot({"pp": 0}, number, 0) for number in range(2))}


def side(text: str, spots: dict[str, tuple[Spot, ...]] | None = None) -> Stored:
    return Stored(rows.parse(text), MESHES, spots or {})


@pytest.mark.parametrize(
    ("text", "spots", "message"),
    [
        # An index forgotten in the stored name gave every layer of an engine the first one.
        (
            "layers.0.* = layers.{l}.a.* : (tp n) h",
            None,
            "rank 0 stores 'layers.0.a.weight' and 'layers.1.a.weight' in the same cells of "
            "'layers.0.weight'; write an index that differs into the stored name, or give them two chunks\n"
            "in the row layers.0.* = layers.{l}.a.* : (tp n) h",
        ),
        (
            "x = head\nx = tail",
            None,
            "rank 0 stores 'head' and 'tail' in the same cells of 'x'; "
            "write two stored names, or store both by one row\nin the rows x = head\nand x = tail",
        ),
        (
            "w{ep~ e} = experts.{e}.w\nw1 = tail",
            None,
            "rank 0 stores 'experts.1.w' and 'tail' in the same cells of 'w1'; "
            "write two stored names, or store both by one row\n"
            "in the rows w{ep~ e} = experts.{e}.w\nand w1 = tail",
        ),
        # Bound before, and a KeyError when a rank asked.
        (
            "w{e} = experts.{e}.w : e n h",
            None,
            "index 'e' of 'w{e} = experts.{e}.w : e n h' is a dimension, and in the stored name; "
            "write it in only one of the two\n"
            "in the row w{e} = experts.{e}.w : e n h",
        ),
        # Two stages are not each other's, and two layers of one stage are.
        (
            "{l}.x = layers.{l}.a.weight",
            SAME_NUMBER,
            "rank 0 stores 'layers.0.a.weight' and 'layers.1.a.weight' in the same cells of "
            "'0.x'; write an index that differs into the stored name, or give them two chunks\n"
            "in the row {l}.x = layers.{l}.a.weight",
        ),
    ],
)
def test_what_is_refused(
    text: str, spots: dict[str, tuple[Spot, ...]] | None, message: str
) -> None:
    with pytest.raises(StoreError) as caught:
        bind(side(text, spots), SHAPES, unused=["*"])
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("text", "spots"),
    [
        ("x = layers.{l}.a.weight", STAGES),
        ("x = layers.{l}.a.weight", CHUNKS),
        ("x @pp=0 = head\nx @pp=1 = tail", None),
        ("x @pp=0 = tail\nalso x @pp=1 = tail", None),
        ("w{ep~ e} = experts.{e}.w\nw2 = tail", None),
        ("{l}.w{ep~ e} = layers.{l}.experts.{e}.w", EVERYWHERE),
        ("w = layers.{l}.experts.{e}.w : (ep~ e) n h", STAGES),
    ],
)
def test_what_is_legal(text: str, spots: dict[str, tuple[Spot, ...]] | None) -> None:
    """Stages, chunks, copies on other ranks, and a name that only ranks have which hold fewer experts."""
    bind(side(text, spots), SHAPES, unused=["*"])


@pytest.mark.parametrize("which", ["trainer", "engine"])
def test_both_sides_of_a_refit_are_checked(which: str) -> None:
    """Only prepare() refused it before, of an engine; a trainer's layers were moved as one."""
    shapes = {f"layers.{i}.weight": ((2, 2), "float32") for i in range(2)}
    good, bad = (
        Stored(rows.parse(f"{native} = layers.{{l}}.weight"), (Mesh(),))
        for native in ("layers.{l}.weight", "layers.0.weight")
    )
    sides = (bad, good) if which == "trainer" else (good, bad)
    with pytest.raises(StoreError, match=f"{which}: rank 0 stores 'layers.0.weight' and 'layers.1"):
        refit(*sides, shapes)


def test_numbers_beside_each_other_may_read_alike() -> None:
    """x111 was layer 1's expert 11, and layer 11's expert 1."""
    shapes = {f"{layer}.{e}.w": ((2,), "int8") for layer, e in [(1, 11), (11, 1)]}
    with pytest.raises(StoreError, match="in the same cells of 'x111'"):
        bind(side("x{l}{e} = {l}.{e}.w"), shapes)
    bind(side("x{l}_{e} = {l}.{e}.w"), shapes)


NATIVES = ["x", "0.x", "{l}.x", "1.x.*", "{l}.x.*", "x{ep~ e}", "{l}.x{ep e}", "x1", "..."]
LOGICALS = [
    "layers.{l}.a.weight",
    "layers.{l}.[a b].weight",
    "layers.{l}.b.*",
    "experts.{e}.w",
    "layers.{l}.experts.{e}.w",
    "head",
    "...",
]
DIMS = ["", ": (tp n) h", ": (tp (a + b)) h", ": e n h", ": (ep~ e) n h", ": (tp n=6) h"]
PLACES = ["", "@pp=0", "@pp=-1"]
ROWS = st.builds(
    "{} {} = {} {}".format,
    st.sampled_from(NATIVES),
    st.sampled_from(PLACES),
    st.sampled_from(LOGICALS),
    st.sampled_from(DIMS),
)
SPOTS = st.sampled_from([{}, EVERYWHERE, STAGES, SAME_NUMBER, CHUNKS])


@given(st.lists(ROWS, min_size=1, max_size=3), SPOTS)
@example(["x{ep~ e} = experts.{e}.w", "x1 = head"], {})
def test_refused_is_what_shares_cells(texts: list[str], spots: dict[str, tuple[Spot, ...]]) -> None:
    """Against an oracle that counts, on every rank, how many tensors each cell has."""
    try:
        table = side("\n".join(texts), spots)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(binding, "_list_shared", lambda bound: ())
            unchecked = bind(table, SHAPES, unused=["*"])
    except ShardError:
        return
    if any(map(share_cells, itertools.repeat(unchecked), unchecked.ranks)):
        with pytest.raises(StoreError, match="in the same cells of"):
            bind(table, SHAPES, unused=["*"])
    else:
        assert bind(table, SHAPES, unused=["*"]) == unchecked


def share_cells(bound: Bound, rank: int) -> bool:
    """Whether any cell of the rank is two tensors', or two tensors say that a stored one has two shapes."""
    counts: dict[tuple[int, str], np.ndarray] = {}
    for name, slot, shape in bound.visit(rank):
        cells = counts.setdefault((slot.chunk, slot.native), np.zeros(shape, int))
        if cells.shape != shape:
            return True
        held = bound.layouts[name].indices(rank)
        view_of(cells, slot)[np.ix_(*(own >= 0 for own in held))] += 1
    return any((cells > 1).any() for cells in counts.values())
