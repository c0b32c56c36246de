"""Refits: what the trainer stores arrives as the engine stores it, and what does not fit is one error."""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np
import pytest
from numpy.typing import NDArray

import shardmath as sm
from shardmath.models.recordings import recorded
from shardmath.models.recordings.pieces import Piece
from shardmath.models.refits.coverage import count_cells
from shardmath.models.storage.binding import Bound
from shardmath.models.storage.filling import view_of
from shardmath.models.systems.megatron import megatron
from shardmath.models.systems.megatron_shapes import logical_shapes
from shardmath.storage import Spot, Stored, fill, parse
from tests.refits.tables import CONFIG, ENGINE

Array = NDArray[np.int64]


def shapes(**more: object) -> dict[str, tuple[tuple[int, ...], str]]:
    return dict(logical_shapes(CONFIG | more, vocab=10, dtype="int64"))


def trainer(ranks: range = range(4), **more: object) -> Stored:
    return megatron(CONFIG | more, ranks=ranks, tp=2, pp=2, ep=1, etp=2, vocab=10, vocab_multiple=1)


def engine(ranks: range = range(4, 8), **numbers: int) -> Stored:
    own = {"hd": 2, "rep": 2, "vocab": 12} | numbers
    return Stored(parse(ENGINE), (sm.Mesh(tp=len(ranks), ranks=ranks),), numbers=own)


def draw(of: Mapping[str, tuple[tuple[int, ...], str]]) -> dict[str, Array]:
    random = np.random.default_rng(7)
    return {name: random.integers(1, 1 << 40, shape) for name, (shape, _) in of.items()}


def take(bound: Bound, stored: Mapping[tuple[int, str], Array], rank: int) -> dict[str, Array]:
    slots = bound.slots(rank)
    return {name: view_of(stored[slot.chunk, slot.native], slot) for name, slot in slots.items()}


def carry(moved: sm.Refit, arrays: dict[str, Array]) -> dict[int, dict[str, Array]]:
    """What the plan gives every engine rank of what trainer ranks store."""
    given = {
        rank: take(moved.trainer, fill(moved.trainer, arrays, rank), rank)
        for rank in moved.plan.src_ranks
    }
    return sm.simulate(moved.plan, given)  # type: ignore[return-value]


def test_refits_say_what_they_are() -> None:
    mesh = sm.Mesh(tp=2, ranks=(2, 3))
    side = Stored(parse("w = w : (tp n)"), (mesh,))
    moved = sm.refit(Stored(parse("... = ..."), (sm.Mesh(dp=2),)), side, {"w": ((4,), "int8")})
    assert repr(moved) == f"<refit of 1 tensor to engine: {moved.plan!r}>"


def check_arrived(moved: sm.Refit, arrays: dict[str, Array], name: str) -> None:
    """Everything that the engine's ranks hold has arrived; cells of other tensors are theirs."""
    arrived = carry(moved, arrays)
    bound = moved.engines[name]
    for rank in bound.ranks:
        wanted = take(bound, fill(bound, arrays, rank), rank)
        slots = moved.slots(rank, name)
        for local, (tensor, array) in zip(slots, wanted.items(), strict=True):
            held = np.ix_(*(own >= 0 for own in bound.layouts[tensor].indices(rank)))
            np.testing.assert_array_equal(arrived[rank][local][held], array[held])


def test_what_is_stored_arrives() -> None:
    moved = sm.refit(trainer(), engine(), shapes())
    sm.verify(moved.plan)
    check_arrived(moved, draw(shapes()), "engine")


def test_the_way_back() -> None:
    moved = sm.refit(engine(), trainer(), shapes())
    check_arrived(moved, draw(shapes()), "engine")


@pytest.mark.parametrize("ranks", [range(4), range(2, 6), range(4, 8)])
def test_colocated_overlapping_and_disjoint_ranks(ranks: range) -> None:
    check_arrived(sm.refit(trainer(), engine(ranks), shapes()), draw(shapes()), "engine")


def test_several_engines_are_one_plan() -> None:
    engines = {"prefill": engine(range(4, 6), rep=1), "decode": engine(range(6, 10))}
    moved = sm.refit(trainer(), engines, shapes())
    sm.verify(moved.plan)
    for name in engines:
        check_arrived(moved, draw(shapes()), name)
    assert "model.norm.weight[1]" in moved.slots(7, "decode")


def test_engines_that_store_alike_are_one_window() -> None:
    engines = {"a": engine(range(4, 8)), "b": engine(range(8, 12)), "c": engine(range(4, 6), rep=1)}
    moved = sm.refit(trainer(), engines, shapes())
    sm.verify(moved.plan)
    for name in engines:
        check_arrived(moved, draw(shapes()), name)
    windows = moved.plan.dst["model.norm.weight"]
    assert [set(layout.mesh.ranks) for layout in windows] == [set(range(4, 12)), {4, 5}]
    assert "model.norm.weight[0]" in moved.slots(9, "b")


@pytest.mark.parametrize("beside", [False, True])
def test_an_engine_holds_tensors_whole(beside: bool) -> None:
    """One that is too small, as where its loader cuts off the rest, is refused even where another engine is not."""
    piece = Piece("w", 0, 0, ((6, 1, 1),))
    native = recorded.Native("w", (6,), "int8", (piece,), "views", "")
    small = sm.storage.RecordedSide({4: sm.storage.Recorded((("w", (8,), "int8"),), (native,))})
    engines: dict[str, Stored | sm.storage.RecordedSide] = {"small": small}
    if beside:
        engines["large"] = Stored(parse("w = w"), (sm.Mesh(dp=2, ranks=(5, 6)),))
    held = Stored(parse("... = ..."), (sm.Mesh(dp=2),))
    with pytest.raises(
        sm.PlanError, match=r"small does not store element \(6,\) of 'w', which is of shape \(8,\)"
    ):
        sm.refit(held, engines, {"w": ((8,), "int8")})


@pytest.mark.parametrize("first", ["main", "draft"])
def test_engines_that_store_different_tensors(first: str) -> None:
    """What one of them leaves unused arrives at the other, whichever is named first."""
    mesh = sm.Mesh(tp=2, ranks=(2, 3))
    sides = {
        "main": Stored(parse("w = w : (tp n)"), (mesh,)),
        "draft": Stored(parse("w = w\nmtp.w = mtp.w"), (sm.Mesh(dp=2, ranks=(4, 5)),)),
    }
    engines = {name: sides[name] for name in sorted(sides, key=lambda name: name != first)}
    named = {"w": ((4,), "int8"), "mtp.w": ((2,), "int8")}
    held = Stored(parse("... = ..."), (sm.Mesh(dp=2),))
    moved = sm.refit(held, engines, named, unused=["mtp.*"])
    sm.verify(moved.plan)
    for name in engines:
        check_arrived(moved, draw(named), name)
    assert "mtp.w" in moved.slots(5, "draft")


def test_all_that_does_not_fit_is_one_error() -> None:
    with pytest.raises(sm.StoreError) as caught:
        sm.refit(trainer(), engine(hd=3, vocab=9), shapes())
    message = str(caught.value)
    assert message.startswith("engine: 'n=vocab': 10 positions do not fit into 9")
    for part in ("model.embed_tokens", "lm_head", "blocks of 3"):
        assert part in message


def test_heads_that_are_cut() -> None:
    """Without `hd` four ranks would divide 12 rows of three heads, and nobody would notice."""
    side = Stored(parse("q = q : (tp n hd)"), (sm.Mesh(tp=4),), numbers={"hd": 4})
    with pytest.raises(
        sm.StoreError,
        match="'n' has 3 positions or blocks, which do not divide into 4 equal parts for 'tp'",
    ):
        sm.refit(side, side, {"q": ((12,), "int8")})


def test_a_trainer_that_stores_functions_of_tensors() -> None:
    """Nothing gives back what a function was made of, unless no engine needs it."""
    shapes = dict.fromkeys(("q.0", "q.1", "k"), ((4,), "float32"))
    whole = Stored(parse("q.{l} = q.{l}\nk = k"), (sm.Mesh(),))
    spots = {"l": (Spot({}, 0, 0), Spot({}, 1, 0))}
    made = Stored(parse("A.{l} = neg_exp(q.{l}) : (tp n)\nk = k"), (sm.Mesh(tp=2),), indices=spots)
    what = "trainer: 'A.0' stores neg_exp(...), from which q.0 cannot be computed; give the trainer a row"
    with pytest.raises(sm.StoreError, match=re.escape(what)):
        sm.refit(made, whole, shapes)
    part = {"k": sm.Layout((4,), sm.Mesh(), "n", dtype="float32")}
    later = {"q.1": part["k"]}
    with pytest.raises(
        sm.StoreError, match=r"'A\.0' of chunk 1 stores .* from which q\.1 cannot be"
    ):
        sm.refit(made, later, shapes, unused=["k", "q.0"])
    moved = sm.refit(made, part, shapes, unused=["q.*"])
    assert list(moved.plan.src) == ["k"]
    sm.refit(whole, made, shapes)


def test_a_recorded_trainer_that_stores_a_function() -> None:
    shapes = dict.fromkeys("qk", ((4,), "float32"))
    piece = {name: (Piece(name, 0, 0, ((4, 1, 1),)),) for name in "qk"}
    natives = (
        recorded.Native("A", (4,), "float32", piece["q"], "views", "neg_exp", 1),
        recorded.Native("k", (4,), "float32", piece["k"], "views", ""),
    )
    tensors = tuple((name, *entry) for name, entry in shapes.items())
    side = sm.storage.RecordedSide({0: sm.storage.Recorded(tensors, natives)})
    whole = Stored(parse("q = q\nk = k"), (sm.Mesh(),))
    with pytest.raises(sm.StoreError, match="trainer: 'A' of chunk 1 stores neg_exp"):
        sm.refit(side, whole, shapes)
    part = {"k": sm.Layout((4,), sm.Mesh(), "n", dtype="float32")}
    assert list(sm.refit(side, part, shapes, unused=["q"]).plan.src) == ["k"]
    sm.refit(whole, side, shapes)


def test_tensors_that_no_engine_needs() -> None:
    with_mtp = shapes(mtp_num_layers=1)
    side = trainer(mtp_num_layers=1)
    with pytest.raises(sm.StoreError, match="engine: no row stores mtp"):
        sm.refit(side, engine(), with_mtp)
    moved = sm.refit(side, engine(), with_mtp, unused=["mtp.*"])
    assert not any(name.startswith("mtp") for name in moved.plan.src)
    check_arrived(moved, draw(with_mtp), "engine")


def test_the_destination_s_own_list_is_counted() -> None:
    moved = sm.refit(trainer(), engine(), shapes())
    has = dict(moved.engines["engine"].natives(5))
    has[0, "model.layers.0.self_attn.k_scale"] = (1,)
    moved.check(5, has, "engine", own=["*.k_scale"])
    # The trainer has no rank 5, so the engine need not be named.
    moved.check(5, has, own=["*.k_scale"])
    has[0, "model.norm.weight"] = (9,)
    del has[0, "lm_head.weight"]
    with pytest.raises(sm.StoreError) as caught:
        moved.check(5, has, "engine")
    assert str(caught.value) == (
        "rank 5:\n"
        "the side stores 'lm_head.weight' as (3, 8), and the rank has no such tensor; "
        "pass it too, or correct the row\n"
        "the side stores 'model.norm.weight' as (8,), the rank has (9,); "
        "pass a tensor of shape (8,), or correct the row\n"
        "the rank has 'model.layers.0.self_attn.k_scale', which no row of the side stores; "
        "add a row for it, or name it in own="
    )


def test_cells_are_held_or_padding() -> None:
    bound = sm.refit(trainer(), engine(), shapes()).engines["engine"]
    padding = [stored - held for stored, held in (count_cells(bound, rank) for rank in range(4, 8))]
    assert padding == [0, 0, 0, 2 * 2 * 8]  # two rows of each vocabulary on the last rank


def test_a_user_s_own_fused_projection_is_one_row() -> None:
    own = engine().extended(
        "model.layers.{l}.self_attn.Wqkv.weight = "
        "model.layers.{l}.self_attn.[q k v]_proj.weight : (q + k + v | tp n) h"
    )
    moved = sm.refit(trainer(), own, shapes())
    check_arrived(moved, draw(shapes()), "engine")
    row = "= model.layers.{l}.self_attn.[q k v]_proj.weight : (q + k + v | tp n) h"
    assert row in moved.explain("model.layers.1.self_attn.Wqkv.weight", rank=6)


def test_what_is_explained_is_stored() -> None:
    moved = sm.refit(trainer(), engine(), shapes())
    text = moved.explain("decoder.layers.0.self_attention.linear_qkv.weight", rank=1)
    assert "(groups (q + k + v) | tp n) h" in text
    with pytest.raises(sm.StoreError, match="rank 4 stores no 'decoder"):
        moved.explain("decoder.final_layernorm.weight", rank=4)


def test_tensors_that_are_stored_each_alone() -> None:
    """As a module under FSDP2 over tensor parallelism: layouts by name."""
    mesh = sm.Mesh(dp=2, tp=2)
    of = shapes()
    alone = {}
    for name, (shape, dtype) in of.items():
        text = "(tp dp n) ..." if len(shape) > 1 else "(dp n)"
        alone[name] = sm.Layout(shape, mesh, text, dtype=dtype)
    moved = sm.refit(alone, engine(), of)
    sm.verify(moved.plan)
    check_arrived(moved, draw(of), "engine")
    back = sm.refit(engine(), alone, of)
    assert back.slots(3, "engine")["model.norm.weight"].native == "model.norm.weight"
    assert "model.norm.weight = model.norm.weight" in back.explain("model.norm.weight", rank=1)


def test_layouts_that_do_not_fit() -> None:
    of = shapes()
    alone = {
        name: sm.Layout(shape, sm.Mesh(), "...", dtype="float32") for name, (shape, _) in of.items()
    }
    del alone["lm_head.weight"]
    with pytest.raises(sm.StoreError) as caught:
        sm.refit(alone, engine(), of)
    message = str(caught.value)
    assert message.startswith(
        "trainer: 'model.embed_tokens.weight' is int64[10, 8], and its layout is float32[10, 8]"
    )
    assert "no layout is given for 'lm_head.weight'; add one" in message


def test_sides_that_are_none() -> None:
    with pytest.raises(sm.PlanError, match="engines= is None"):
        sm.refit(trainer(), None, shapes())  # type: ignore[arg-type]
    with pytest.raises(sm.StoreError, match="trainer: None does not say how tensors are stored"):
        sm.refit(None, engine(), shapes())  # type: ignore[arg-type]
