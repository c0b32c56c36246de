"""Binding: rows take tensors, ranks store them, and what does not fit is said in one message."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest

from shardmath import Mesh, ShardError, StoreError, plan, refit, simulate, verify
from shardmath.models.storage import rows
from shardmath.models.storage.binding import Bound, bind
from shardmath.models.storage.filling import fill, gather, view_of
from shardmath.models.storage.stored import Shapes, Spot, Stored, Vocabulary

SHAPES: Shapes = {
    **{f"layers.{layer}.{c}.weight": ((8, 6), "int64") for layer in range(4) for c in "qkv"},
    **{f"layers.{layer}.{c}.bias": ((8,), "int64") for layer in range(4) for c in "qkv"},
    **{
        f"layers.{layer}.experts.{e}.{c}.weight": ((4, 6), "int64")
        for layer in range(1, 4)
        for e in range(6)
        for c in ("gate", "up")
    },
    "embed.weight": ((10, 6), "int64"),
}

TRAINER = """
embed.weight @pp=0            = embed.weight : (tp n=vocab) h
also head.weight @pp=-1       = embed.weight : (tp n=vocab) h
[decoder.{l}. = layers.{l}.]
qkv.*                         = [q k v].*    : (2 (q + k + v) | tp n) h
local.{ep e}.fc1.*            = experts.{e}.[gate up].* : (etp (gate + up)) h
"""

ENGINE = """
embed.weight                  = embed.weight : (tp n=vocab) h
[layers.{l}. = layers.{l}.]
qkv_proj.*                    = [q k v].*    : (tp q 2 + tp/rep k 2 + tp/rep v 2) h
w13                           = experts.{e}.[gate up].weight.T : (ep~ e) h (2 (gate + up))
"""


def trainer() -> Stored:
    """Two stages of two chunks, of which each has a layer."""
    layers = tuple(Spot({"pp": layer % 2}, layer // 2, 0) for layer in range(4))
    meshes = Mesh(pp=2, dp=2, tp=2), Mesh(pp=2, ep=2, etp=2)
    return Stored(rows.parse(TRAINER), meshes, {"l": layers}, {"vocab": 12})


def engine() -> Stored:
    meshes = Mesh(dp=1, tp=4, ranks=range(8, 12)), Mesh(ep=4, ranks=range(8, 12))
    return Stored(rows.parse(ENGINE), meshes, numbers={"vocab": 16, "rep": 2})


def draw() -> dict[str, np.ndarray]:
    random = np.random.default_rng(5)
    return {name: random.integers(1, 1 << 40, shape) for name, (shape, _) in SHAPES.items()}


@pytest.mark.parametrize("side", [trainer(), engine()])
def test_what_ranks_store_is_what_there_was(side: Stored) -> None:
    bound = bind(side, SHAPES)
    arrays = draw()
    ranks = side.meshes[0].ranks
    stored = {rank: fill(bound, arrays, rank) for rank in ranks}
    back = gather(bound, stored, ranks)
    assert back.keys() == arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(back[name], array)


@pytest.mark.parametrize("side", [trainer(), engine()])
def test_stored_tensors_are_those_of_all_slots(side: Stored) -> None:
    bound = bind(side, SHAPES)
    for rank in side.meshes[0].ranks:
        shapes = {(slot.chunk, slot.native): shape for _, slot, shape in bound.visit(rank)}
        assert list(bound.natives(rank).items()) == list(shapes.items())


def stack(arrays: dict[str, np.ndarray], layer: int, experts: range) -> np.ndarray:
    """w13 of an engine rank, by hand: gate and up columns in halves."""
    made = []
    for e in experts:
        gate, up = (arrays[f"layers.{layer}.experts.{e}.{c}.weight"].T for c in ("gate", "up"))
        made.append(np.concatenate([gate[:, :2], up[:, :2], gate[:, 2:], up[:, 2:]], axis=1))
    return np.stack(made)


def test_an_engine_rank_by_hand() -> None:
    arrays = draw()
    stored = fill(bind(engine(), SHAPES), arrays, rank=9)
    q, k, v = (arrays[f"layers.0.{c}.weight"] for c in "qkv")
    np.testing.assert_array_equal(
        stored[0, "layers.0.qkv_proj.weight"], np.concatenate([q[2:4], k[:4], v[:4]])
    )
    np.testing.assert_array_equal(stored[0, "layers.2.w13"], stack(arrays, 2, range(2, 4)))
    assert (0, "layers.0.w13") not in stored


def test_components_in_two_dimensions() -> None:
    """A block diagonal: each component at its own rows and columns, and padding beside it."""
    side = Stored(rows.parse("w = [a b] : (a + b) (tp (a + b))"), (Mesh(tp=2),))
    bound = bind(side, dict.fromkeys("ab", ((2, 2), "int64")))
    arrays = {"a": np.array([[1, 2], [3, 4]]), "b": np.array([[5, 6], [7, 8]])}
    stored = {rank: fill(bound, arrays, rank) for rank in range(2)}
    assert stored[0][0, "w"].tolist() == [[1, 0], [3, 0], [0, 5], [0, 7]]
    back = gather(bound, stored, range(2))
    for name, array in arrays.items():
        np.testing.assert_array_equal(back[name], array)


def test_a_trainer_rank_by_hand() -> None:
    arrays = draw()
    stored = fill(bind(trainer(), SHAPES), arrays, rank=7)  # stage 1: layers 1 and 3
    q, k, v = (np.split(arrays[f"layers.3.{c}.weight"], 2) for c in "qkv")
    whole = np.concatenate([q[0], k[0], v[0], q[1], k[1], v[1]])
    np.testing.assert_array_equal(stored[1, "decoder.0.qkv.weight"], np.split(whole, 2)[1])
    gate, up = (arrays[f"layers.1.experts.4.{c}.weight"] for c in ("gate", "up"))
    np.testing.assert_array_equal(
        stored[0, "decoder.0.local.1.fc1.weight"], np.concatenate([gate[2:], up[2:]])
    )
    np.testing.assert_array_equal(
        stored[1, "head.weight"], np.concatenate([arrays["embed.weight"][6:], np.zeros((2, 6))])
    )
    assert {native for _, native in stored} == {
        "head.weight",
        "decoder.0.qkv.weight",
        "decoder.0.qkv.bias",
        *(f"decoder.0.local.{e}.fc1.weight" for e in range(3)),
    }


def test_both_sides_are_planned_and_proved() -> None:
    vocabulary = Vocabulary(SHAPES)
    src, dst = bind(trainer(), vocabulary), bind(engine(), vocabulary)
    moved = plan(src.layouts, dst.layouts)
    verify(moved)
    arrays = draw()
    given = {rank: local_arrays(src, arrays, rank) for rank in range(8)}
    moved_to = simulate(moved, given)
    for rank in range(8, 12):
        wanted = local_arrays(dst, arrays, rank)
        assert wanted.keys() == moved_to[rank].keys()
        for name, array in wanted.items():
            np.testing.assert_array_equal(moved_to[rank][name], array)


def local_arrays(bound: Bound, arrays: dict[str, np.ndarray], rank: int) -> dict[str, np.ndarray]:
    """What a plan moves: views of what the rank stores, with 0 in cells of other tensors."""
    local = {}
    for name, slot in bound.slots(rank).items():
        only = fill_one(bound, {name: arrays[name]}, rank, name)
        local[name] = view_of(only, slot)
    return local


def fill_one(bound: Bound, arrays: dict[str, np.ndarray], rank: int, name: str) -> np.ndarray:
    """The stored tensor that this one is in, with nothing of the others."""
    others = {other: np.zeros(shape, np.int64) for other, (shape, _) in SHAPES.items()}
    slot = bound.slots(rank)[name]
    return fill(bound, others | arrays, rank)[slot.chunk, slot.native]


def test_a_tied_tensor_is_one_layout_with_copies() -> None:
    bound = bind(trainer(), SHAPES)
    assert bound.layouts["embed.weight"].mesh == Mesh(copy=2, dp=2, tp=2)
    one_stage = Stored(rows.parse("a @pp=0 = w\nalso b @pp=-1 = w"), (Mesh(pp=1, tp=2),))
    assert bind(one_stage, {"w": ((2,), "int8")}).natives(0) == {(0, "a"): (2,)}


@pytest.mark.parametrize(
    ("mesh", "dim", "wanted"),
    [
        (Mesh(pp=3), "n", Mesh(copy=3)),
        (Mesh(pp=3, tp=2), "(tp n)", Mesh(copy=3, tp=2)),
        (Mesh(pp=3, copy=2), "(copy n)", Mesh(copy2=3, copy=2)),
        (Mesh(pp=3, copy=2, tp=2), "(tp n)", Mesh(copy2=3, copy=2, tp=2)),
        (Mesh(pp=3, copy=1, tp=1), "n", Mesh(copy2=3, copy=1, tp=1)),
    ],
)
def test_copies_beside_an_axis_of_this_name(mesh: Mesh, dim: str, wanted: Mesh) -> None:
    """The axis of copies has another name if the tensor's mesh has an axis `copy`."""
    text = f"a @pp=0 = w : {dim}\nalso b @pp=1 = w : {dim}\nalso c @pp=2 = w : {dim}"
    side = Stored(rows.parse(text), (mesh,))
    bound = bind(side, {"w": ((4,), "int64")})
    assert bound.layouts["w"].mesh == wanted
    arrays = {"w": np.arange(4)}
    stored = {rank: fill(bound, arrays, rank) for rank in mesh.ranks}
    for rank in mesh.ranks:
        (held,) = stored[rank].values()
        (cells,) = bound.layouts["w"].indices(rank)
        assert held.tolist() == cells.tolist()
    assert gather(bound, stored, mesh.ranks)["w"].tolist() == [0, 1, 2, 3]


def test_copies_of_redundant_experts() -> None:
    """Two numbers in four slots of four ranks, on each of two stages."""
    rule = "e.{e}.w : (ep e%slots) n"
    side = Stored(
        rows.parse(f"x @pp=0 = {rule}\nalso y @pp=1 = {rule}"),
        (Mesh(pp=2, ep=4),),
        {},
        {"slots": 4},
    )
    bound = bind(side, {f"e.{e}.w": ((2,), "int8") for e in range(2)})
    assert bound.layouts["e.0.w"].mesh == Mesh(copy2=2, copy=2, ranks=[0, 2, 4, 6])
    assert bound.layouts["e.1.w"].mesh == Mesh(copy2=2, copy=2, ranks=[1, 3, 5, 7])


def test_experts_that_several_ranks_have() -> None:
    side = Stored(rows.parse("w13 = {e}.w : (ep e 1 | n) h"), (Mesh(ep=2),))
    bound = bind(side, {f"{e}.w": ((2,), "int8") for e in range(4)})
    assert bound.layouts["3.w"].mesh.ranks == (1,)
    assert bound.natives(1) == {(0, "w13"): (2, 2)}


@pytest.mark.parametrize(
    ("text", "shapes", "message"),
    [
        (
            "a = b",
            {"c": (2,), "d": (2,)},
            "no row stores c, d; add rows for them, or leave them out",
        ),
        (
            "a = [b c] : (tp (b + c))",
            {"b": (3,), "c": (4,)},
            "'b' has 3 positions or blocks, which do not divide into 2 equal "
            "parts for 'tp'; choose sizes that divide, or write 'tp~' for parts that differ by one, "
            "counted in each component by itself (so queries may lie apart from their keys)\n"
            "in the row a = [b c] : (tp (b + c))",
        ),
        (
            "a = [b c] : (tp b)",
            {"b": (2,), "c": (2,)},
            "component 'c' is in no dimension of 'a = [b c] : (tp b)'; "
            "write it in one, such as (b + c)\n"
            "in the row a = [b c] : (tp b)",
        ),
        (
            "a = b : (tp n)",
            {"b": (2, 2)},
            "'a = b : (tp n)' has 1 dimension, its tensor 2; write one word per dimension, "
            "or '...' for those left out\nin the row a = b : (tp n)",
        ),
        (
            "a = {e}.b : e n",
            {"0.b": (2,), "2.b": (2,)},
            "number 1 of index 'e' is missing, and number 2 exists; "
            "give the shapes of all numbers from 0 on\n"
            "in the row a = {e}.b : e n",
        ),
        (
            "a = {e}.b : e n",
            {"0.b": (2,), "1.b": (3,)},
            "'0.b' is ((2,), 'int8') and '1.b' is ((3,), 'int8'); "
            "give tensors of index 'e' one shape and dtype\nin the row a = {e}.b : e n",
        ),
        (
            "a@tp=0 = b : (tp n)",
            {"b": (4,)},
            "'a @tp=0 = b : (tp n)' divides by axis 'tp', and is at only one coordinate of this axis; "
            "leave the axis out of its structure, or out of its place or index\nin the row a @tp=0 = b : (tp n)",
        ),
        (
            "a@tp=0 = {e}.b : (tp e) n",
            {"0.b": (2,), "1.b": (2,)},
            "'a @tp=0 = {e}.b : (tp e) n' divides by axis 'tp', and is at only one coordinate of this axis; "
            "leave the axis out of its structure, or out of its place or index\nin the row a @tp=0 = {e}.b : (tp e) n",
        ),
        # Number 1 is everywhere, and passed for all numbers: a KeyError of 'tp' when a rank asked for 0.
        (
            "a = {e}.b : (tp e%4) (tp n)",
            {f"{e}.b": (2,) for e in range(3)},
            "'a = {e}.b : (tp e%4) (tp n)' divides by axis 'tp', and is at only one coordinate of this axis; "
            "leave the axis out of its structure, or out of its place or index\nin the row a = {e}.b : (tp e%4) (tp n)",
        ),
        # A KeyError of the index.
        (
            "a = {e}.b ? c.{e} : e n",
            {"0.b": (2,), "1.b": (2,)},
            "the condition of 'a = {e}.b ? /c.{e} : e n' has the index 'e', along which the row "
            "stacks tensors; write the condition without this index\n"
            "in the row a = {e}.b ? /c.{e} : e n",
        ),
        (
            "a = [b c] : (b) (tp c)",
            {"b": (2, 2), "c": (2, 2)},
            "a dimension of 'a = [b c] : (b) (tp c)' names other components, but not 'b'; "
            "write all components there, or none of them\n"
            "in the row a = [b c] : (b) (tp c)",
        ),
        (
            "a = {e}.b : e e n",
            {"0.b": (2,), "1.b": (2,)},
            "index 'e' is in two dimensions of 'a = {e}.b : e e n', and tensors are stacked along "
            "one; write the index in one of them\nin the row a = {e}.b : e e n",
        ),
    ],
)
def test_what_does_not_fit(text: str, shapes: dict[str, tuple[int, ...]], message: str) -> None:
    side = Stored(rows.parse(text), (Mesh(tp=2),))
    with pytest.raises(ShardError) as caught:
        bind(side, {name: (shape, "int8") for name, shape in shapes.items()})
    assert str(caught.value) == message
    assert isinstance(caught.value, StoreError)


@pytest.mark.parametrize("given", ["*b", 3])
def test_globs_are_not_a_text(given: Any) -> None:
    """The * of a text fitted every name, so that no row had to store anything."""
    side = Stored(rows.parse("a = a"), (Mesh(),))
    shapes = dict.fromkeys("abc", ((2,), "int8"))
    with pytest.raises(StoreError, match=r"globs of names are .*; give a tuple"):
        bind(side, shapes, unused=given)
    with pytest.raises(StoreError, match="no row stores c; add rows"):
        bind(side, shapes, unused=["*b"])
    planned = refit(side, {"e": side}, {"a": shapes["a"]})
    with pytest.raises(StoreError, match="globs of names are"):
        planned.check(0, {(0, "a"): (2,), (0, "c"): (2,)}, own=given)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"rows": "a = a"}, "'a' is not a Row; give rows as shardmath.storage.parse reads"),
        ({"rows": ["a = a"]}, "'a = a' is not a Row; give rows as shardmath.storage.parse reads"),
        ({"meshes": Mesh()}, "meshes are Mesh(); give a tuple"),
    ],
)
def test_what_a_side_is_not_made_of(given: dict[str, Any], said: str) -> None:
    named: dict[str, Any] = {"rows": (), "meshes": (Mesh(),), **given}
    with pytest.raises(StoreError) as caught:
        Stored(**named)
    assert str(caught.value).startswith(said)


def test_all_faults_are_in_one_message() -> None:
    side = Stored(rows.parse("a = b : (tp n)\nc = d : (tp n)"), (Mesh(tp=2),))
    with pytest.raises(StoreError) as caught:
        bind(side, {"b": ((3,), "int8"), "d": ((5,), "int8")})
    assert str(caught.value).count("in the row") == 2


def test_meshes_have_the_same_ranks() -> None:
    with pytest.raises(StoreError, match="must have the same ranks, and are"):
        Stored((), (Mesh(tp=2), Mesh(ep=4)))


def test_a_side_is_a_value() -> None:
    numbers = {"vocab": 12}
    one = Stored(rows.parse("a = b : (tp n=vocab)"), (Mesh(tp=2),), numbers=numbers)
    other = pickle.loads(pickle.dumps(one))
    assert (one, hash(one)) == (other, hash(other))
    numbers["vocab"] = 99
    assert one.numbers == {"vocab": 12}
    assert one.extended("c = d").rows[1:] == one.rows


@pytest.mark.parametrize(
    "text",
    [
        "k_only = k\nqkv = [q k v] : (q + k + v) h",
        "kv = [k v] : (k + v) h\nqkv = [q k v] : (q + k + v) h",
    ],
)
def test_a_row_may_not_take_a_part_of_what_is_taken(text: str) -> None:
    """Else one of two stored tensors would hold it, and the other never be written."""
    side = Stored(rows.parse(text), (Mesh(),))
    with pytest.raises(StoreError, match="a row before stores 'k', but not 'q', which this row"):
        bind(side, dict.fromkeys("qkv", ((1, 2), "float32")))


@pytest.mark.parametrize(
    "dims", ["(" + "2 " * 20 + "n)", "(1000000 n)", "(100 (100 (100 (100 n))))", "(n^0)"]
)
@pytest.mark.parametrize("exact", [True, False])
def test_numbers_that_divide_nothing_are_refused_at_once(dims: str, exact: bool) -> None:
    """Without a limit the first took twice as long for each two more, of no positions at all."""
    side = Stored(rows.parse(f"a = q : {dims}"), (Mesh(),), exact=exact)
    with pytest.raises(StoreError, match=r"cuts 0 positions into|to multiples of 0"):
        bind(side, {"q": ((0,), "int8")})


def test_shapes_as_json_has_them() -> None:
    side = Stored(rows.parse("a = q : (tp n)"), (Mesh(tp=2),))
    assert bind(side, {"q": ([4], "torch.bfloat16")}).layouts["q"].dtype == "bfloat16"  # type: ignore[dict-item]


@pytest.mark.parametrize("text", ["tp n", "tp", "n tp"])
def test_an_axis_without_parentheses_is_no_dimension(text: str) -> None:
    """Every rank would store the whole."""
    side = Stored(rows.parse(f"x = a : {text}"), (Mesh(tp=2),))
    with pytest.raises(ShardError, match=r"dimension 'tp' of .* is a mesh axis; write \(tp n\)"):
        bind(side, {"a": ((4,) * len(text.split()), "float32")})


COPIED: Shapes = {"e": ((2, 4), "float32"), "f": ((2, 4), "float32")}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "e @pp=0 = e\nf @pp=0 = f\nalso c @dp=0 = e",
            "rank 0 stores 'e' by a row before .*, and rank 2 does not",
        ),
        (
            "e @pp=0 = e\nf @pp=1 = f\nalso c @pp=1 = [e f] : (e + f) h",
            "store 'f' by a row before, but not 'e'; write a separate row for each of the two",
        ),
    ],
)
def test_copies_that_some_ranks_have_already(text: str, said: str) -> None:
    """Were left out on all ranks, or planned for ranks that store nothing of them."""
    side = Stored(rows.parse(text), (Mesh(pp=2, dp=2),))
    with pytest.raises(StoreError, match=said):
        bind(side, COPIED)


def test_a_copy_that_is_the_tensor_itself() -> None:
    """Where one stage is first and last."""
    side = Stored(rows.parse("e @pp=0 = e\nf = f\nalso c @pp=-1 = e"), (Mesh(pp=1, dp=2),))
    assert [sorted(bind(side, COPIED).natives(rank)) for rank in range(2)] == [
        [(0, "e"), (0, "f")]
    ] * 2


@pytest.mark.parametrize(
    ("text", "tensors", "said"),
    [
        (
            "w.{l} @pp=1 = w.{l}",
            ["w.0", "w.1"],
            "'w.{l} @pp=1 = w.{l}' is at pp=0 and, by @pp=1, at pp=1; make the two",
        ),
        (
            "w.{l}.{m} = w.{l}.{m}",
            ["w.0.1"],
            "'w.{l}.{m} = w.{l}.{m}' is at pp=0 and, by index 'm', at pp=1; make the two",
        ),
        (
            "w.{c}.{d} = w.{c}.{d}",
            ["w.1.0"],
            "'w.{c}.{d} = w.{c}.{d}' is in chunk 1 and, by index 'd', in chunk 2; make the two",
        ),
        (
            "w.{c}.{d} = w.{c}.{d}",
            ["w.0.0"],
            "'w.{c}.{d} = w.{c}.{d}' is in chunk 0 and, by index 'd', in chunk 2; make the two",
        ),
        (
            "w.{c} @pp=-1 = w.{c}",
            ["w.1"],
            "'w.{c} @pp=-1 = w.{c}' is in chunk 1 and, by @pp=-1, in chunk 2; make the two",
        ),
        (
            "w.{c} @pp=-1 = w.{c}",
            ["w.0"],
            "'w.{c} @pp=-1 = w.{c}' is in chunk 0 and, by @pp=-1, in chunk 2; make the two",
        ),
    ],
)
def test_a_tensor_is_in_one_place(text: str, tensors: list[str], said: str) -> None:
    """Of two places that were declared, the later one was taken."""
    stages = Spot({"pp": 0}, 0, 0), Spot({"pp": 1}, 0, 0)
    chunks = Spot({}, 0, 0), Spot({}, 1, 0)
    indices = {"l": stages, "m": stages, "c": chunks, "d": (Spot({}, 2, 0),)}
    side = Stored(rows.parse(text), (Mesh(pp=2),), indices)
    with pytest.raises(StoreError) as caught:
        bind(side, dict.fromkeys(tensors, ((1,), "int8")))
    assert said in str(caught.value)


@pytest.mark.parametrize("text", ["w.{l} @tp=-1 = w.{l}", "w.{l} @pp=-1 = w.{l}", "w.{l} = w.{l}"])
def test_the_last_coordinate_of_an_axis_is_in_the_stage_of_the_layer(text: str) -> None:
    layers = tuple(Spot({"pp": layer % 2}, layer // 2, 0) for layer in range(4))
    side = Stored(rows.parse(f"{text}\nnorm @tp=-1 = norm"), (Mesh(pp=2, tp=2),), {"l": layers})
    chosen = "w.3" if "@pp" in text else "w.1"
    slots = bind(side, dict.fromkeys([chosen, "norm"], ((1,), "int8"))).slots(3)
    assert (slots[chosen].chunk, slots["norm"].chunk) == (int(chosen == "w.3"), 0)
