"""Recordings: pieces say the same as the element numbers they were found in, and sides what rows would say."""

from __future__ import annotations

import json
from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray

import shardmath as sm
from shardmath.models.recordings.boxes import align
from shardmath.models.recordings.numbers import find_pieces
from shardmath.models.recordings.pieces import Piece, overlap
from shardmath.models.recordings.recorded import Native
from shardmath.models.storage.filling import view_of
from shardmath.storage import Stored, bind, fill, parse

Ids = NDArray[np.int64]


def pieces_of(numbers: Ids, tensor: str = "q") -> tuple[Piece, ...]:
    """The pieces of a stored tensor in which -1 is no element."""
    flat = numbers.ravel()
    cells = np.flatnonzero(flat >= 0)
    return tuple(find_pieces(tensor, cells, flat[cells]))


def expand(pieces: tuple[Piece, ...], shape: tuple[int, ...]) -> Ids:
    """The element in each cell, one by one."""
    found = np.full(shape, -1).ravel()
    for piece in pieces:
        found[piece.cells] = piece.elements
    return found.reshape(shape)


@st.composite
def stored(draw: st.DrawFn) -> tuple[tuple[int, ...], Ids]:
    """A logical shape, and what some positions of each dimension store of it, transposed, among other cells."""
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    numbers = np.arange(np.prod(shape)).reshape(shape)
    for dim, n in enumerate(shape):
        kept = draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=n, unique=True))
        numbers = numbers.take(kept, axis=dim)
    numbers = numbers.transpose(draw(st.permutations(range(len(shape)))))
    wider = [n + draw(st.integers(0, 2)) for n in numbers.shape]
    cells = np.full(wider, -1)
    cells[tuple(map(slice, numbers.shape))] = numbers
    return shape, cells


@given(st.permutations(range(24)), st.integers(0, 23))
@example([*range(0, 24, 2), *range(1, 24, 2)], 0)
def test_pieces_are_the_numbers_they_were_found_in(numbers: list[int], holes: int) -> None:
    cells = np.array(numbers) - holes
    assert np.array_equal(expand(pieces_of(cells), cells.shape), np.maximum(cells, -1))


@given(stored())
def test_boxes_are_the_piece_along_both_shapes(case: tuple[tuple[int, ...], Ids]) -> None:
    shape, cells = case
    found = {}
    for piece in pieces_of(cells):
        for box in align(piece, cells.shape, shape):
            steps = np.array([[*box.cell, *box.element]])
            for atom in box.atoms:
                step = np.zeros(steps.shape[1], np.int64)
                step[atom.dim] = atom.step
                step[cells.ndim + atom.of] = atom.stride
                steps = (steps[:, None] + np.arange(atom.number)[:, None] * step).reshape(
                    -1, len(step)
                )
            for at in steps.tolist():
                found[tuple(at[: cells.ndim])] = np.ravel_multi_index(at[cells.ndim :], shape)
    assert found == {at: n for at, n in np.ndenumerate(cells) if n >= 0}


@given(st.lists(st.lists(st.integers(0, 12), min_size=1, max_size=4, unique=True), max_size=3))
def test_what_overlaps(listed: list[list[int]]) -> None:
    pieces = [
        piece for own in listed for piece in find_pieces("q", np.array(sorted(own)), np.array(own))
    ]
    cells = [cell for own in listed for cell in own]
    assert (overlap(pieces, 1) is None) == (len(set(cells)) == len(cells))
    assert (overlap(pieces, 2) is None) == (len(set(cells)) == len(cells))


def record(
    shapes: Mapping[str, tuple[tuple[int, ...], str]], **natives: Ids
) -> sm.storage.Recorded:
    """A rank that stores these numbers, which count through all tensors."""
    start = 0
    starts = {}
    for name, (shape, _) in shapes.items():
        starts[name] = start
        start += int(np.prod(shape))
    own = []
    for native, numbers in natives.items():
        pieces: tuple[Piece, ...] = ()
        for name, (shape, _) in shapes.items():
            local = numbers - starts[name]
            pieces += pieces_of(np.where((local >= 0) & (local < np.prod(shape)), local, -1), name)
        own.append(Native(native, numbers.shape, "int64", pieces, "numbers", ""))
    tensors = tuple((name, *entry) for name, entry in shapes.items())
    return sm.storage.Recorded(tensors, tuple(own))  # type: ignore[arg-type]


@given(
    st.sampled_from([(4,), (2, 2), (4, 1)]),
    st.permutations([*range(4), -1, -1]),
    st.sampled_from([(6,), (2, 3), (3, 2), (1, 2, 3)]),
)
# A row that goes on in the next stored row, and elements that are dealt between two of them.
@example((4,), [-1, 0, 1, 2, 3, -1], (2, 3))
@example((4,), [0, -1, 2, -1, 1, -1], (2, 3))
def test_what_is_bound_is_what_was_recorded(
    shape: tuple[int, ...], numbers: list[int], stored_shape: tuple[int, ...]
) -> None:
    """Wherever elements lie: they are there in what is bound, or that is an error."""
    shapes = {"q": (shape, "int64")}
    cells = np.array(numbers).reshape(stored_shape)
    try:
        bound = sm.storage.RecordedSide({3: record(shapes, w=cells)}).bind(shapes)
    except sm.StoreError:
        return
    logical = {"q": np.arange(4).reshape(shape)}
    found = fill(bound, logical, 3, empty=-1)[0, "w"]
    assert np.array_equal(found.reshape(stored_shape), cells)


@given(stored())
# Rows and columns taken by number, transposed: which dimension is which is not said by their order.
@example(((2, 1, 2), np.array([[[2, 0], [3, 1]]])))
def test_a_part_of_each_dimension_is_a_view(case: tuple[tuple[int, ...], Ids]) -> None:
    shape, cells = case
    shapes = {"q": (shape, "int64")}
    bound = sm.storage.RecordedSide({3: record(shapes, w=cells)}).bind(shapes)
    numbers = np.arange(np.prod(shape)).reshape(shape)
    assert np.array_equal(
        fill(bound, {"q": numbers}, 3, empty=-1)[0, "w"].reshape(cells.shape), cells
    )
    slot = bound.slots(3)["q"]
    view = view_of(cells.reshape(bound.natives(3)[0, "w"]), slot)
    assert view.shape == bound.layouts["q"].local_shape(3)


ROWS = """
qkv.*     = [q k v].*                     : (tp (q + k + v)) h
gate_up.* = [gate up].*                   : h (tp half (gate + up))
w13       = experts.{e}.[gate up].T       : e h (tp (gate + up))
raw.*     = [a b].*                       : (2 (a + b) | tp n) h
embed     = embed                         : (tp n=vocab) h
norm      = norm
"""

SHAPES = {
    **{f"{x}.weight": ((8, 4), "int64") for x in ("q", "k", "v", "a", "b")},
    **{f"experts.{e}.{x}": ((8, 4), "int64") for e in range(3) for x in ("gate", "up")},
    "embed": ((10, 4), "int64"),
    "norm": ((4,), "int64"),
}


def test_a_side_of_recorded_ranks_is_what_rows_say() -> None:
    declared = bind(
        Stored(parse(ROWS), (sm.Mesh(dp=2, tp=4),), numbers={"half": 2, "vocab": 12}), SHAPES
    )
    sizes = np.cumsum([0] + [np.prod(shape) for shape, _ in SHAPES.values()])
    arrays = {
        name: np.arange(start, start + np.prod(shape)).reshape(shape)
        for (name, (shape, _)), start in zip(SHAPES.items(), sizes[:-1], strict=True)
    }
    ranks = {}
    for rank in declared.ranks:
        natives = {name: ids for (_, name), ids in fill(declared, arrays, rank, empty=-1).items()}
        ranks[rank] = record(SHAPES, **natives)
    assert len(set(ranks.values())) == 4
    seen = sm.storage.RecordedSide(ranks).bind(SHAPES)
    for rank in declared.ranks:
        assert declared.natives(rank) == seen.natives(rank)
        for native, ids in fill(declared, arrays, rank, empty=-1).items():
            np.testing.assert_array_equal(fill(seen, arrays, rank, empty=-1)[native], ids)
    moved = sm.refit(sm.storage.RecordedSide(ranks), sm.storage.RecordedSide(ranks), SHAPES)
    assert not any(moved.plan.received_bytes().values())
    assert "recorded: int64[6, 4] by numbers: q.weight, k.weight, v.weight" in moved.explain(
        "qkv.weight", rank=1
    )


def test_what_is_explained_of_another_chunk_has_its_name() -> None:
    shapes = {"norm": ((4,), "int64")}
    recorded = record(shapes, norm=np.arange(4))
    native = recorded.natives[0]._replace(chunk=1)
    virtual = sm.storage.Recorded(recorded.tensors, (native,))
    trainer = {"norm": sm.Layout((4,), sm.Mesh(), "n", dtype="int64")}
    moved = sm.refit(trainer, sm.storage.RecordedSide({1: virtual}), shapes)
    text = moved.explain("norm", rank=1)
    assert text.startswith("norm of chunk 1 (4,) on rank 1, from the row\n")


@pytest.mark.timeout(30)
def test_many_experts_of_many_layers_are_bound_at_once() -> None:
    """As many tensors as a model of 30B has: a look at all of them for each would take an hour."""
    layers, experts = 48, 256
    tensors = tuple((f"{n}.{e}", (4, 6), "int8") for n in range(layers) for e in range(experts))
    natives = []
    for n in range(layers):
        pieces = tuple(Piece(f"{n}.{e}", 24 * e, 0, ((24, 1, 1),)) for e in range(experts))
        natives.append(Native(f"w{n}", (experts, 4, 6), "int8", pieces, "views", ""))
    side = sm.storage.RecordedSide({0: sm.storage.Recorded(tensors, tuple(natives))})
    bound = side.bind({name: (shape, dtype) for name, shape, dtype in tensors})
    assert bound.slots(0)["47.255"].cut == (255, slice(0, 4, 1), slice(0, 6, 1))


Q = {"q": ((4, 6), "int64")}


@pytest.mark.parametrize(
    ("cells", "what"),
    [
        (
            np.array([[0, 1], [6, 8]]),
            "its elements here are not all combinations of some positions",
        ),
        (np.array([0, 7]), "not all combinations"),
        (np.arange(24), "lie along one dimension of the stored tensor"),
        (np.arange(24).reshape(2, 2, 6), "its dimension 0 lies along several dimensions of"),
        (np.array([[0, 1, 6], [6, 7, 12]]) + np.array([[0], [1]]), "not all combinations"),
    ],
)
def test_what_is_no_view_is_told(cells: Ids, what: str) -> None:
    side = sm.storage.RecordedSide({5: record(Q, w=cells)})
    with pytest.raises(sm.StoreError, match=f"rank 5: 'q' .* is not a view of 'w' .*: .*{what}"):
        side.bind(Q)


def test_all_that_does_not_fit_is_one_error() -> None:
    whole = np.arange(24).reshape(4, 6)
    side = sm.storage.RecordedSide({0: record(Q, w=whole, again=whole), 1: record(Q, w=whole)})
    with pytest.raises(sm.StoreError, match=r"rank 0: 'q' was recorded in two .*, 'w' and 'again'"):
        side.bind(Q)
    side = sm.storage.RecordedSide({0: record(Q, w=whole)})
    with pytest.raises(
        sm.StoreError, match=r"'q' was recorded as .*int64.* and is given as .*int8"
    ):
        side.bind({"q": ((4, 6), "int8")})
    stored_apart = Stored(parse("q = q"), (sm.Mesh(),))
    with pytest.raises(sm.StoreError, match="engine: no recorded rank stores k; load them"):
        sm.refit(Stored(parse("q = q\nk = k"), (sm.Mesh(),)), side, {**Q, "k": ((4, 6), "int64")})
    more = {**Q, "k": ((4, 6), "int64")}
    with pytest.raises(sm.StoreError, match="trainer: no recorded rank stores k"):
        sm.refit(side, stored_apart, more, unused=["k"])
    with pytest.raises(sm.StoreError, match=r"ranks=\{\} has no rank"):
        sm.storage.RecordedSide({})
    with pytest.raises(sm.StoreError, match=r"ranks= is .*; give a mapping from rank to Recorded"):
        sm.storage.RecordedSide([record(Q, w=whole)])  # type: ignore[arg-type]
    with pytest.raises(sm.StoreError, match="ranks= has 'x' for rank 0, and not a Recorded"):
        sm.storage.RecordedSide({0: "x"})  # type: ignore[dict-item]
    with pytest.raises(
        sm.StoreError, match="storage of rank 7 is not recorded; pass one of the ranks"
    ):
        side.bind(Q).slots(7)


FOUR = (("q", (4,), "int8"),)
OUTSIDE = {
    "'w' has .*, which reaches from 2 to 5 in 'w' of 4": Piece("q", 2, 0, ((4, 1, 1),)),
    "reaches from -1 to 2 in 'w'": Piece("q", 2, 0, ((4, -1, 1),)),
    "reaches from 2 to 5 in 'q' of 4": Piece("q", 0, 2, ((4, 1, 1),)),
    "reaches from -1 to -1 in 'q' of 4": Piece("q", 0, -1, ()),
    "of a tensor that tensors= does not have; add 'k' to tensors=": Piece("k", 0, 0, ()),
}


@pytest.mark.parametrize("what", OUTSIDE)
def test_pieces_that_reach_outside(what: str) -> None:
    native = Native("w", (4,), "int8", (OUTSIDE[what],), "views", "")
    with pytest.raises(sm.StoreError, match=what):
        sm.storage.Recorded(FOUR, (native,))


@pytest.mark.parametrize("count", [0, -2])
def test_pieces_of_nothing(count: int) -> None:
    native = Native("w", (4,), "int8", (Piece("q", 1, 1, ((count, 1, 1),)),), "views", "")
    with pytest.raises(sm.StoreError, match=r"'w' has .* fills no cell"):
        sm.storage.Recorded(FOUR, (native,))


def test_stored_tensors_of_one_name() -> None:
    """In other chunks they are others."""
    halves = [Native("w", (2,), "int8", (Piece("q", 0, i, ((2, 1, 1),)),), "", "") for i in (0, 2)]
    with pytest.raises(sm.StoreError, match="natives= has the stored tensor 'w' twice"):
        sm.storage.Recorded(FOUR, tuple(halves))
    sm.storage.Recorded(FOUR, (halves[0], halves[1]._replace(chunk=1)))


def test_very_many_cells() -> None:
    """Told without a look at each."""
    n = 10**12
    many = (("q", (3 * n,), "int8"),)
    native = Native("w", (2 * n,), "int8", (Piece("q", 0, 0, ((n, 2, 3),)),), "views", "")
    side = sm.storage.RecordedSide({0: sm.storage.Recorded(many, (native,))})
    with pytest.raises(
        sm.StoreError, match=r"'q' .* is not a view of 'w' .*: one of its dimensions is in"
    ):
        side.bind({"q": ((3 * n,), "int8")})
    twice = native._replace(pieces=(Piece("q", 0, 0, ((n, 0, 3),)),), shape=(2,))
    with pytest.raises(sm.StoreError, match="pieces write 1000000000000 cells of 'w', which has 2"):
        sm.storage.Recorded(many, (twice,))


def test_parts_that_some_ranks_share() -> None:
    """Two heads over three ranks are no mesh of a dimension and copies, and one layout all the same."""
    whole = np.arange(24).reshape(4, 6)
    parts = [whole[:2], whole[:2], whole[2:]]
    side = sm.storage.RecordedSide({rank: record(Q, w=part) for rank, part in enumerate(parts)})
    layout = side.bind(Q).layouts["q"]
    assert [layout.runs(rank)[0].extent for rank in range(3)] == [2, 2, 4]


def test_an_axis_of_one_that_is_stored_or_not() -> None:
    """A convolution's (C, 1, k) is (C, k) in some versions of an engine."""
    shapes = {"c": ((4, 1, 3), "int64")}
    side = sm.storage.RecordedSide({0: record(shapes, conv=np.arange(12).reshape(4, 3))})
    bound = side.bind(shapes)
    assert bound.natives(0) == {(0, "conv"): (4, 3, 1)}
    moved = sm.refit(side, Stored(parse("c = c"), (sm.Mesh(),)), shapes)
    moved.check(0, {(0, "conv"): (4, 3)})


def test_text_that_was_changed_is_refused() -> None:
    recorded = record(Q, w=np.arange(24).reshape(4, 6))
    text = recorded.to_json()
    assert sm.storage.Recorded.from_json(text) == recorded
    changed = json.loads(text)
    changed["natives"][0][0] = "v"
    outside, endless = json.loads(text), json.loads(text)
    outside["natives"][0][3][0][2] = 1
    endless["natives"][0][3][0][2] = float("inf")
    for broken, what in (
        (json.dumps(changed), "has digest"),
        (
            text.replace('"version":1', '"version":2'),
            "^the text has format '.*' in version 2, this shardmath reads .* in version 1; write",
        ),
        (
            json.dumps({key: json.loads(text)[key] for key in ("format", "version")}),
            "not recorded storage",
        ),
        (text.replace("[4,6]", "[-4,-6]"), r"'q' has shape \(-4, -6\); give sizes of 0 or more"),
        ("{}", "the text is not recorded storage"),
        ("[", "the text is not recorded storage"),
        ("[" * 100_000, "the text is not recorded storage"),
        (json.dumps(endless), "the text is not recorded storage"),
        (json.dumps(outside), "reaches from 1 to 24 in 'q' of 24"),
    ):
        with pytest.raises(sm.StoreError, match=what):
            sm.storage.Recorded.from_json(broken)


def test_what_is_filled_has_the_type_of_its_own_pieces() -> None:
    """float64, which would hold all of these types, loses the number."""
    native = Native("x", (2,), "int64", (Piece("a", 0, 0, ()),), "views", "")
    found = sm.storage.Recorded((("a", (1,), "int64"), ("b", (1,), "float32")), (native,))
    large = np.array([2**60 + 1])
    filled = found.fill({"a": large, "b": np.zeros(1, np.float32)})
    assert filled["x"].tolist() == [2**60 + 1, 0]
