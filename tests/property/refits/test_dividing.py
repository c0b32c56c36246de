"""Portions: one after the other they are the whole refit, and each has whole modules of engines."""

from __future__ import annotations

import pickle
from collections.abc import Mapping

import numpy as np
import pytest

import shardmath as sm
from shardmath.models.refits.grouping import group_by_layer, join_modules
from shardmath.storage import Stored, parse
from shardmath.transforms import Cast

LAYERS = 3
FUSED = """
layers.{l}.qkv.weight = layers.{l}.[q k v].weight : (tp (q + k + v)) h
layers.{l}.qkv.bias = layers.{l}.[q k v].bias : (tp (q + k + v))
... = ...
"""


def list_shapes(dtype: str = "float32") -> dict[str, tuple[tuple[int, ...], str]]:
    """Two layers' heads, and what is before and behind them."""
    shapes: dict[str, tuple[tuple[int, ...], str]] = {"embed.weight": ((6, 4), dtype)}
    for layer in range(LAYERS):
        for name in "qkv":
            shapes[f"layers.{layer}.{name}.weight"] = (8, 4), dtype
            shapes[f"layers.{layer}.{name}.bias"] = (8,), dtype
    shapes["norm.weight"] = (4,), dtype
    return shapes


def trainer(dtype: str = "float32") -> dict[str, sm.Layout]:
    mesh = sm.Mesh(dp=3)
    return {
        name: sm.Layout(shape, mesh, {"dp": sm.Shard(0)}, dtype=dtype)
        for name, (shape, _) in list_shapes().items()
    }


def engine(first: int, tp: int) -> Stored:
    return Stored(parse(FUSED), (sm.Mesh(tp=tp, ranks=range(first, first + tp)),))


ENGINES: dict[str, dict[str, Stored]] = {
    "one": {"a": engine(3, 2)},
    "two alike": {"a": engine(3, 2), "b": engine(5, 2)},
    "two that differ": {"a": engine(3, 2), "b": engine(5, 4)},
}


def give(planned: sm.Refit) -> dict[int, dict[str, np.ndarray]]:
    """What trainers hold of the tensors that move, as wires."""
    random = np.random.default_rng(3)
    shapes = list_shapes()
    whole = {
        name: random.normal(size=shape).astype("float32") for name, (shape, _) in shapes.items()
    }
    given = {}
    for rank in planned.plan.src_ranks:
        own = {
            name: whole[name][np.ix_(*layout.indices(rank))]
            for name, layout in trainer().items()
            if name in planned.moved
        }
        made = planned.transforms
        given[rank] = own if made is None else made.prepare(rank, own)
    return given


def carry(planned: sm.Refit) -> dict[int, dict[str, np.ndarray]]:
    """What every engine's rank has afterwards, by the plan's names."""
    sm.verify(planned.plan)
    arrived: Mapping[int, dict[str, np.ndarray]] = sm.simulate(planned.plan, give(planned))
    made = planned.transforms
    engines = sorted({rank for side in planned.engines.values() for rank in side.ranks})
    return {
        rank: arrived[rank] if made is None else made.finalize(rank, arrived[rank])
        for rank in engines
        if rank in planned.plan.dst_ranks
    }


@pytest.mark.parametrize("cast", [False, True])
@pytest.mark.parametrize("engines", ENGINES)
def test_portions_are_the_whole_refit(engines: str, cast: bool) -> None:
    served = list_shapes("float16") if cast else None
    rules = {"*": Cast("float16")} if cast else None
    whole = sm.refit(trainer(), ENGINES[engines], list_shapes(), served=served, rules=rules)
    portions = sm.divide(whole)
    assert [len(one.moved) for one in portions] == [1, 6, 6, 6, 1]
    together: dict[int, dict[str, np.ndarray]] = {}
    for portion in portions:
        for rank, arrays in carry(portion).items():
            own = together.setdefault(rank, {})
            assert not own.keys() & arrays.keys()
            own |= arrays
    wanted = carry(whole)
    assert together.keys() == wanted.keys()
    for rank, arrays in wanted.items():
        assert together[rank].keys() == arrays.keys()
        for name, array in arrays.items():
            np.testing.assert_array_equal(together[rank][name], array)


def test_each_portion_has_whole_stored_tensors() -> None:
    whole = sm.refit(trainer(), ENGINES["two that differ"], list_shapes())
    for name, side in whole.engines.items():
        for rank in side.ranks:
            stored: dict[tuple[int, str], tuple[int, ...]] = {}
            for portion in sm.divide(whole):
                natives = portion.engines[name].natives(rank)
                assert not stored.keys() & natives.keys()
                stored |= natives
                assert portion.slots(rank, name).keys() <= whole.slots(rank, name).keys()
            assert stored == side.natives(rank)


def test_groups_of_ones_own_are_joined_where_a_module_has_both() -> None:
    whole = sm.refit(trainer(), engine(3, 2), list_shapes())
    alone = sm.divide(whole, [[name] for name in list_shapes()])
    assert [len(one.moved) for one in alone] == [1, 6, 6, 6, 1]
    apart = sm.divide(sm.refit(trainer(), trainer(), list_shapes()), [[n] for n in list_shapes()])
    # Ranks that store each tensor alone have a weight and a bias in a module.
    assert sorted({len(one.moved) for one in apart}) == [1, 2]


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        ([["embed.weight"]], "no group of groups= has 'layers.0.k.bias', which moves; add it"),
        ([[*list_shapes(), "embed.weight"]], "groups= has 'embed.weight' in two groups; name"),
        ([[*list_shapes()], ["head"]], "groups= has 'head' which does not move; name each"),
    ],
)
def test_groups_that_are_no_division(groups: list[list[str]], said: str) -> None:
    whole = sm.refit(trainer(), engine(3, 2), list_shapes())
    with pytest.raises(sm.PlanError, match=said):
        sm.divide(whole, groups)


def test_what_is_no_whole_refit() -> None:
    whole = sm.refit(trainer(), ENGINES["two alike"], list_shapes())
    with pytest.raises(sm.PlanError, match=r"engines have left the refit .*; divide its \.whole"):
        sm.divide(whole.without("b"))
    with pytest.raises(sm.PlanError, match=r"is not a Refit; pass the result of sm\.refit"):
        sm.divide(whole.plan)  # type: ignore[arg-type]


def test_layers_are_the_outermost_numbers() -> None:
    names = ["a", "h.1.e.0.w", "h.1.e.1.w", "h.0.w", "v.0.w", "b.w", "c.w", "b.b"]
    assert group_by_layer(names) == [
        ["a"],
        names[1:3],
        ["h.0.w"],
        ["v.0.w"],
        ["b.w", "b.b"],
        ["c.w"],
    ]
    assert group_by_layer(["h.².w", "h.٣.w", "h.3.w"]) == [["h.².w"], ["h.٣.w"], ["h.3.w"]]
    assert join_modules([["x"], ["y"]], []) == [["x"], ["y"]]


def test_a_portion_tells_each_rank_its_own() -> None:
    """Whoever was asked for before, and in whatever order."""
    planned = sm.refit(trainer(), ENGINES["two that differ"], list_shapes())
    for portion in sm.divide(planned):
        for side in (portion.trainer, *portion.engines.values()):
            ranks = sorted(side.ranks)
            wanted = {}
            for rank in ranks:
                wanted[rank] = {
                    name: slot
                    for name, slot in side.side.slots(rank).items()  # type: ignore[attr-defined]
                    if name in side.names  # type: ignore[attr-defined]
                }
            for rank in (*ranks, *reversed(ranks)):
                assert side.slots(rank) == wanted[rank]
                assert len(side.natives(rank)) == len({s.native for s in wanted[rank].values()})


def test_a_pickle_of_a_portion_is_the_same_before_and_after_use() -> None:
    """A portion keeps what it has found for a rank, which is no part of it."""
    portion, *_ = sm.divide(sm.refit(trainer(), ENGINES["one"], list_shapes()))
    side = portion.engines["a"]
    unused = pickle.dumps(side)
    slots = side.slots(3)
    assert pickle.dumps(side) == unused
    again = pickle.loads(unused)
    assert again == side and again.slots(3) == slots and again.slots(4) == side.slots(4)
