"""Optimizer state as layouts, beside buffers of plain numpy: every element has a number, padding is -1.

Buffers are filled parameter by parameter and cut at equal shares; the layouts and the Store have to find every number
in them, and plans have to turn them into the buffers of any other rule.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import shardmath as sm
from shardmath import (
    Layout,
    Mesh,
    MeshError,
    ParamLayoutError,
    PlanError,
    Runs,
    Shard,
    StoreError,
    StridedShard,
    buffers,
    testing,
)
from shardmath.buffers import SHARD, Param, PerBufferParamLayout
from shardmath.layouts.edits import window
from shardmath.layouts.store import Store, check, local_tensors, locals_of, views
from shardmath.plans.uncovered import check_disjoint
from shardmath.testing.buffers import RuleCase

NOBODY = -1.0

Array = np.ndarray
Tensors = Mapping[str, Layout | tuple[Layout, ...]]
Flats = dict[int, Array]


# --- the oracle


def numbered(params: Sequence[Param]) -> dict[str, Array]:
    """A number of its own for every element of every parameter."""
    ends = itertools.accumulate((param.numel for param in params), initial=0)
    return {
        p.name: np.arange(lo, lo + p.numel, dtype=float).reshape(p.shape)
        for p, lo in zip(params, ends, strict=False)
    }


def cut(buffer: PerBufferParamLayout, shards: int, values: Mapping[str, Array]) -> list[Array]:
    """The flat array of each shard, by filling the buffer and cutting every bucket into equal shares."""
    whole = np.full(buffer.numel, NOBODY)
    for name, (start, end, _) in buffer.placed:
        whole[start:end] = values[name].ravel()
    shares = [np.split(whole[start:end], shards) for start, end in buffer.bucket_indices]
    return [np.concatenate([np.empty(0), *(share[i] for share in shares)]) for i in range(shards)]


def groups_along(mesh: Mesh, axis: object) -> list[list[int]]:
    """Ranks that differ along the axes alone, in order of their coordinates there."""
    axes = tuple(mesh.shape) if axis is None else (axis,) if isinstance(axis, str) else tuple(axis)
    out: dict[tuple[int, ...], list[int]] = {}
    for rank in mesh.ranks:
        at = mesh.coords(rank)
        out.setdefault(tuple(n for name, n in at.items() if name not in axes), []).append(rank)
    return [
        sorted(group, key=lambda rank: [mesh.coords(rank)[name] for name in axes])
        for group in out.values()
    ]


def flats_of(
    buffer: PerBufferParamLayout, mesh: Mesh, axis: object, values: Mapping[str, Array]
) -> Flats:
    out = {}
    for group in groups_along(mesh, axis):
        out |= dict(zip(group, cut(buffer, len(group), values), strict=True))
    return out


def own(layout: Layout, rank: int) -> tuple[object, object]:
    """Where a local tensor has elements, and which of the whole tensor's they are."""
    index = layout.indices(rank)
    return np.ix_(*(np.flatnonzero(i >= 0) for i in index)), np.ix_(*(i[i >= 0] for i in index))


def names_of(tensors: Tensors) -> dict[str, str]:
    """Local name -> name of the tensor."""
    return {
        local: name
        for name, held in tensors.items()
        for local, _ in local_tensors(name, held if isinstance(held, tuple) else (held,))
    }


def holds(tensors: Tensors, store: Store, flats: Flats, values: Mapping[str, Array]) -> None:
    """Views find the numbers that their layouts say, and between them all numbers, none of them twice."""
    tensor = names_of(tensors)
    for rank, flat in flats.items():
        check(store, tensors, rank)
        seen, found = views(store, tensors, rank, {SHARD: flat}), 0
        for local, layout in locals_of(tensors, rank):
            here, there = own(layout, rank)
            expected = values[tensor[local]][there]
            assert (seen[local][here] == expected).all()
            found += expected.size
        assert found == (flat != NOBODY).sum()


def locals_in(tensors: Tensors, store: Store, flats: Flats) -> dict[int, dict[str, Array]]:
    return {rank: views(store, tensors, rank, {SHARD: flat}) for rank, flat in flats.items()}


def locals_from(tensors: Tensors, values: Mapping[str, Array]) -> dict[int, dict[str, Array]]:
    """The local tensors of ranks whose layouts lie in no buffer."""
    tensor = names_of(tensors)
    ranks = {
        r
        for held in tensors.values()
        for x in (held if isinstance(held, tuple) else (held,))
        for r in x.mesh.ranks
    }
    out: dict[int, dict[str, Array]] = {rank: {} for rank in ranks}
    for rank in ranks:
        for local, layout in locals_of(tensors, rank):
            here, there = own(layout, rank)
            out[rank][local] = np.full(layout.local_shape(rank), NOBODY)
            out[rank][local][here] = values[tensor[local]][there]
    return out


def moved(
    src: Tensors, held: dict[int, dict[str, Array]], dst: Tensors
) -> dict[int, dict[str, Array]]:
    p = sm.plan(dict(src), dict(dst))
    sm.verify(p)
    return sm.simulate(p, {rank: held[rank] for rank in p.src_ranks})


def lands(
    out: dict[int, dict[str, Array]], tensors: Tensors, store: Store, expected: Flats
) -> None:
    """Written through the Store into empty flat arrays, what arrived is the buffer laid out anew, padding and all."""
    for rank, flat in expected.items():
        empty = np.full_like(flat, NOBODY)
        there = views(store, tensors, rank, {SHARD: empty})
        for local, layout in locals_of(tensors, rank):
            here, _ = own(layout, rank)
            there[local][here] = out[rank][local][here]
        assert (empty == flat).all()


def arrives(
    out: dict[int, dict[str, Array]], tensors: Tensors, values: Mapping[str, Array]
) -> None:
    """What arrived in tensors that lie in no buffer is what they hold."""
    tensor = names_of(tensors)
    for rank, arrays in out.items():
        for local, layout in locals_of(tensors, rank):
            here, there = own(layout, rank)
            assert (arrays[local][here] == values[tensor[local]][there]).all()


# --- one data-parallel group, and replicas of it


@st.composite
def sharded(draw: st.DrawFn) -> tuple[RuleCase, Mesh]:
    """A rule and parameters, and a mesh of two axes or three whose middle one shards."""
    case = draw(testing.rule_cases(shards=st.integers(1, 5), most=5, longest=33))
    sizes = {
        "a": draw(st.sampled_from([1, 1, 2])),
        "dp": case.shards,
        "b": draw(st.sampled_from([1, 1, 2])),
    }
    first = draw(st.sampled_from([0, 3]))
    ranks = range(first, first + math.prod(sizes.values()))
    return case, Mesh(sizes, ranks=draw(st.one_of(st.just([*ranks]), st.permutations(ranks))))


@given(sharded())
def test_shards_hold_the_elements_that_layouts_say(given_case: tuple[RuleCase, Mesh]) -> None:
    case, mesh = given_case
    buffer, values = case.layout(), numbered(case.params)
    flats = flats_of(buffer, mesh, "dp", values)
    for group in groups_along(mesh, "dp"):
        whole = np.concatenate([np.empty(0), *cut(buffer, 1, values)])
        for shard, rank in enumerate(group):
            ranges = buffers.shard_ranges(buffer, len(group), shard)
            assert (
                np.concatenate([np.empty(0), *(whole[lo:hi] for lo, hi in ranges)]) == flats[rank]
            ).all()
            assert len(flats[rank]) == buffers.shard_numel(buffer, len(group))
    flat = buffers.state_layouts(buffer, mesh, axis="dp")
    assert list(flat) == list(buffer.param_index_map)
    holds(
        flat,
        buffers.state_store(buffer, mesh, axis="dp"),
        flats,
        {name: x.ravel() for name, x in values.items()},
    )
    windows, store = buffers.state_layouts(buffer, mesh, axis="dp", shape="nd")
    assert list(windows) == list(buffer.param_index_map)
    holds(windows, store, flats, values)


@given(
    testing.rule_cases(shards=st.just(6), most=4, longest=33),
    st.sampled_from([None, ("y", "x"), ("x", "y"), ()]),
)
def test_several_axes_shard_together(case: RuleCase, axis: tuple[str, ...] | None) -> None:
    """In the order in which they are named; with no axis, every rank has all of the buffer."""
    values, mesh = numbered(case.params), Mesh(x=2, y=3)
    buffer = case.layout()
    flats = flats_of(buffer, mesh, axis, values)
    flat = buffers.state_layouts(buffer, mesh, axis=axis)
    holds(
        flat,
        buffers.state_store(buffer, mesh, axis=axis),
        flats,
        {name: x.ravel() for name, x in values.items()},
    )
    windows, store = buffers.state_layouts(buffer, mesh, axis=axis, shape="nd")
    holds(windows, store, flats, values)


@st.composite
def two_rules(draw: st.DrawFn) -> tuple[RuleCase, RuleCase]:
    """Two rules for the same parameters."""
    params = tuple(draw(testing.params(longest=33, empty=False, scalars=False, alike=True)))
    one, other = (draw(testing.rule_cases(shards=st.integers(1, 5), most=0)) for _ in range(2))
    return replace(one, params=params), replace(other, params=params)


@given(two_rules(), st.booleans())
def test_from_one_rule_to_another(cases: tuple[RuleCase, RuleCase], flat: bool) -> None:
    values = numbered(cases[0].params)
    sides = []
    for case, first in zip(cases, (0, 2), strict=True):
        mesh, buffer = Mesh(dp=case.shards, ranks=range(first, first + case.shards)), case.layout()
        flats = flats_of(buffer, mesh, None, values)
        if flat:
            sides.append(
                (buffers.state_layouts(buffer, mesh), buffers.state_store(buffer, mesh), flats)
            )
        else:
            sides.append((*buffers.state_layouts(buffer, mesh, shape="nd"), flats))
    (src, store, flats), (dst, there, expected) = sides
    lands(moved(src, locals_in(src, store, flats), dst), dst, there, expected)


@given(testing.rule_cases(shards=st.integers(1, 4), most=3, longest=8), st.data())
def test_to_any_layout_and_back(case: RuleCase, data: st.DataObject) -> None:
    """From flat arrays to tensors of any layout, and from there into the flat arrays."""
    values, mesh = numbered(case.params), Mesh(dp=case.shards)
    flats = flats_of(case.layout(), mesh, None, values)
    windows, store = buffers.state_layouts(case.layout(), mesh, shape="nd")
    tensors = {
        param.name: data.draw(
            testing.layouts(
                param.shape, data.draw(testing.meshes()), dtype="float32", overlap=False
            )
        )
        for param in case.params
    }
    arrives(moved(windows, locals_in(windows, store, flats), tensors), tensors, values)
    lands(moved(tensors, locals_from(tensors, values), windows), windows, store, flats)


EIGHT = Mesh(dp=4, tp=2)


@pytest.mark.parametrize(
    "spec",
    [
        (sm.Replicate(), Shard(0)),
        (sm.Replicate(), Shard(1)),
        (Shard(0), sm.Replicate()),
        (Shard(0), Shard(1)),
        (StridedShard(0, split_factor=2), Shard(0)),
        (Shard(1), Shard(0)),
    ],
    ids=str,
)
@pytest.mark.parametrize("shape", [(7, 5), (64, 6), (3, 4, 5), (1, 9)])
def test_flat_to_tensor_parallel_and_fsdp(spec: tuple, shape: tuple[int, ...]) -> None:
    params = [Param("v", (9,)), Param("w", shape), Param("s", ())]
    values = numbered(params)
    buffer = buffers.distributed_optimizer(params, data_parallel_world_size=8)
    flats = flats_of(buffer, EIGHT, None, values)
    windows, store = buffers.state_layouts(buffer, EIGHT, shape="nd")
    tensors = {
        "v": Layout((9,), EIGHT, (Shard(0), sm.Replicate())),
        "w": Layout(shape, EIGHT, spec),
        "s": Layout((), EIGHT, ""),
    }
    arrives(moved(windows, locals_in(windows, store, flats), tensors), tensors, values)
    lands(moved(tensors, locals_from(tensors, values), windows), windows, store, flats)


def test_windows_of_a_matrix() -> None:
    """Elements 0..7 and 8..14 of (3, 5): rows and the odd ends of rows."""
    buffer = PerBufferParamLayout({"w": (0, 15, 0)}, [(0, 16)], [15], shapes=[(3, 5)])
    windows, store = buffers.state_layouts(buffer, Mesh(dp=2, ranks=(5, 7)), shape="nd")
    held = [(x.mesh.ranks, [str(runs) for runs in x.runs(x.mesh.ranks[0])]) for x in windows["w"]]
    assert held == [
        ((5,), ["[0:1]", "[0:5]"]),
        ((5,), ["[1:2]", "[0:3]"]),
        ((7,), ["[1:2]", "[3:5]"]),
        ((7,), ["[2:3]", "[0:5]"]),
    ]
    assert [(key, view.offset) for key, view in store.entries] == [
        (("w[0]", 5), 0),
        (("w[1]", 5), 5),
        (("w[2]", 7), 0),
        (("w[3]", 7), 2),
    ]


def test_parameters_that_are_cut_alike_are_the_same_layout() -> None:
    params = [Param(f"w{i}", (8, 8)) for i in range(6)]
    buffer = buffers.distributed_optimizer(params, data_parallel_world_size=3)
    assert buffer.bucket_indices == ((0, 384),)
    flat = buffers.state_layouts(buffer, Mesh(dp=3))
    assert [flat[f"w{i}"] is flat["w5"] for i in range(6)] == [False] * 4 + [True] * 2
    windows, _ = buffers.state_layouts(buffer, Mesh(dp=3), shape="nd")
    assert windows["w4"] is windows["w5"] and windows["w0"] != windows["w5"]


def test_scalars_and_parameters_without_elements() -> None:
    params = [Param("s", ()), Param("e", (0, 3)), Param("one", (1, 1, 1)), Param("none", (2, 0))]
    values, mesh = numbered(params), Mesh(dp=3)
    for rule in (buffers.distributed_optimizer, buffers.layer_wise, buffers.zero):
        buffer = rule(params, data_parallel_world_size=3)
        windows, store = buffers.state_layouts(buffer, mesh, shape="nd")
        holds(windows, store, flats_of(buffer, mesh, None, values), values)
        flat = buffers.state_layouts(buffer, mesh)
        assert {name: layout.shape for name, layout in flat.items()} == {
            "s": (1,),
            "e": (0,),
            "one": (1,),
            "none": (0,),
        }
        assert all(len(windows[name]) == 1 for name in windows)


def test_dtype() -> None:
    buffer = buffers.zero([Param("w", (3, 4))], data_parallel_world_size=2)
    assert buffers.state_layouts(buffer, Mesh(dp=2))["w"].dtype == "float32"
    assert buffers.state_layouts(buffer, Mesh(dp=2), dtype="bfloat16")["w"].dtype == "bfloat16"
    windows, _ = buffers.state_layouts(buffer, Mesh(dp=2), shape="nd", dtype="int8")
    assert {layout.dtype for layout in windows["w"]} == {"int8"}


@given(sharded(), st.data())
def test_views_of_some_ranks(given_case: tuple[RuleCase, Mesh], data: st.DataObject) -> None:
    """With `ranks`, the Store is what of the whole one is theirs."""
    case, mesh = given_case
    some = data.draw(st.lists(st.sampled_from(mesh.ranks), min_size=1))
    buffer = case.layout()
    stores = [
        (
            buffers.state_store(buffer, mesh, axis="dp", ranks=ranks),
            buffers.state_layouts(buffer, mesh, axis="dp", shape="nd", ranks=ranks),
        )
        for ranks in (None, some)
    ]
    (flat, (windows, nd)), (flat_some, (windows_some, nd_some)) = stores
    assert windows == windows_some
    for whole, part in ((flat, flat_some), (nd, nd_some)):
        assert part.entries == tuple(entry for entry in whole.entries if entry[0][1] in some)


# --- parameters that are divided themselves


def model_flats(
    params: Sequence[Param],
    layouts: Mapping[str, Layout],
    mesh: Mesh,
    axis: object,
    rule: Callable,
    **options: object,
) -> tuple[Flats, dict[str, Array]]:
    """Each group lays out what it has, and cuts it; and the numbers."""
    values, out = numbered(params), {}
    for group in groups_along(mesh, axis):
        first = group[0]
        has = [p for p in params if first in layouts[p.name].mesh]
        local = [Param(p.name, layouts[p.name].local_shape(first)) for p in has]
        parts = {p.name: np.full(p.shape, NOBODY) for p in local}
        for param in local:
            here, there = own(layouts[param.name], first)
            parts[param.name][here] = values[param.name][there]
        buffer = rule(local, data_parallel_world_size=len(group), **options)
        out |= dict(zip(group, cut(buffer, len(group), parts), strict=True))
    return out, values


def model_state(params, layouts, mesh, axis, rule, **options):
    """Windows and Store, found to be right, and the flat arrays."""
    flats, values = model_flats(params, layouts, mesh, axis, rule, **options)
    windows, store = buffers.model_parallel_state(
        params, layouts, mesh=mesh, axis=axis, rule=rule, **options
    )
    assert list(windows) == [param.name for param in params]
    holds(windows, store, flats, values)
    return windows, store, flats, values


def there_and_back(params, layouts, mesh, axis, rule, **options) -> None:
    """To one flat buffer of ZeRO, to whole tensors, and back."""
    windows, store, flats, values = model_state(params, layouts, mesh, axis, rule, **options)
    held = locals_in(windows, store, flats)
    whole = {param.name: Layout(param.shape, Mesh(ranks=[3]), {}) for param in params}
    arrives(moved(windows, held, whole), whole, values)
    lands(moved(whole, locals_from(whole, values), windows), windows, store, flats)
    three = Mesh(dp=3)
    one = buffers.zero(params, data_parallel_world_size=3)
    flat, there = buffers.state_layouts(one, three, shape="nd")
    expected = flats_of(one, three, None, values)
    lands(moved(windows, held, flat), flat, there, expected)
    lands(moved(flat, locals_in(flat, there, expected), windows), windows, store, flats)


RULES = [buffers.distributed_optimizer, buffers.layer_wise, buffers.zero]

MODEL = [
    Param("embed", (10, 4)),
    Param("norm", (50,)),
    Param("qkv", (9, 4)),
    Param("bias", (9,)),
    Param("scale", ()),
    Param("out", (4, 7)),
    Param("final", (130,)),
]
TEXT = {
    "embed": "(tp n)=12 h",
    "norm": "n",
    "qkv": "(tp n) h",
    "bias": "(tp n)",
    "scale": "",
    "out": "n (tp h)",
    "final": "n",
}


def laid(mesh: Mesh, text: Mapping[str, str] = TEXT) -> dict[str, Layout]:
    return {
        param.name: Layout(param.shape, mesh, text[param.name])
        for param in MODEL
        if param.name in text
    }


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
@pytest.mark.parametrize(
    ("mesh", "axis"),
    [
        (Mesh(dp=2, tp=2), "dp"),
        (Mesh(tp=2, dp=3), "dp"),
        (Mesh(tp=4, dp=2, ranks=[5, 3, 0, 1, 2, 6, 7, 4]), "dp"),
        (Mesh(dp=2, tp=2, cp=2), ("dp", "cp")),
        (Mesh(dp=2, tp=2, cp=2), ("cp", "dp")),
        (Mesh(tp=2, dp=2, cp=2), "dp"),
        (Mesh(tp=3, dp=1), "dp"),
    ],
    ids=str,
)
def test_tensor_parallel_models(rule: Callable, mesh: Mesh, axis: object) -> None:
    """Uneven shards, so that replicated norms lie and are cut elsewhere in each group's buffer; a padded vocabulary."""
    there_and_back(MODEL, laid(mesh), mesh, axis, rule)


@pytest.mark.parametrize("size", [1, 40, 200])
def test_tensor_parallel_models_in_buckets(size: int) -> None:
    mesh = Mesh(dp=2, tp=2)
    there_and_back(MODEL, laid(mesh), mesh, "dp", buffers.distributed_optimizer, bucket_size=size)


def contiguous(params: Sequence[Param], *, data_parallel_world_size: int) -> PerBufferParamLayout:
    return buffers.flat_parameter(
        params, data_parallel_world_size=data_parallel_world_size, use_orig_params=False
    )


def test_replicas_in_buffers_that_are_cut_elsewhere_are_pieces() -> None:
    """2 elements lie before it in one buffer, 1 in the other, and both are cut after 5."""
    mesh = Mesh(tp=2, dp=2)
    params = [Param("w", (3,)), Param("norm", (8,))]
    layouts = {"w": Layout((3,), mesh, "(tp n)"), "norm": Layout((8,), mesh, "n")}
    windows, store, _, _ = model_state(params, layouts, mesh, "dp", contiguous)
    held = [(x.mesh.ranks, str(x.runs(x.mesh.ranks[0])[0])) for x in windows["norm"]]
    assert held == [((0, 2), "[0:3]"), ((1, 2), "[3:4]"), ((1, 3), "[4:8]")]
    assert {key: view.offset for key, view in store.entries if key[0].startswith("norm")} == {
        ("norm[0]", 0): 2,
        ("norm[0]", 2): 1,
        ("norm[1]", 1): 0,
        ("norm[1]", 2): 4,
        ("norm[2]", 1): 1,
        ("norm[2]", 3): 0,
    }


def test_a_padded_vocabulary_leaves_padding_alone() -> None:
    mesh = Mesh(dp=2, tp=2)
    params, layouts = [Param("embed", (10, 4))], {"embed": Layout((10, 4), mesh, "(tp n)=16 h")}
    _, _, flats, _ = model_state(params, layouts, mesh, "dp", buffers.zero)
    assert [(flats[rank] != NOBODY).sum() for rank in mesh.ranks] == [16, 8, 16, 0]


def test_pipeline_stages() -> None:
    """Layouts on the ranks of a stage; a tied embedding on those of two."""
    mesh = Mesh(pp=3, dp=2, tp=2)
    stages = [mesh.select(pp=i) for i in range(3)]
    tied = Mesh(ends=2, dp=2, tp=2, ranks=[*stages[0].ranks, *stages[2].ranks])
    params = [Param("embed", (10, 4), shared_embedding=True), *MODEL[1:]]
    homes = dict(
        zip(
            TEXT,
            [tied, stages[0], stages[1], stages[1], stages[2], stages[2], stages[0]],
            strict=True,
        )
    )
    layouts = {p.name: Layout(p.shape, homes[p.name], TEXT[p.name]) for p in params}
    there_and_back(params, layouts, mesh, "dp", buffers.zero)


@st.composite
def divided(draw: st.DrawFn) -> tuple[list[Param], dict[str, Layout], Mesh]:
    """Parameters with layouts in which ranks along dp hold the same."""
    mesh = Mesh(
        dict(
            draw(
                st.permutations(
                    [
                        ("dp", draw(st.integers(1, 3))),
                        ("tp", draw(st.integers(1, 3))),
                        ("x", draw(st.integers(1, 2))),
                    ]
                )
            )
        )
    )
    shapes = draw(st.lists(st.lists(st.integers(0, 7), max_size=3).map(tuple), max_size=4))
    params = [Param(f"w{i}", shape) for i, shape in enumerate(shapes)]
    layouts = {}
    for param in params:
        spec = {}
        for axis in ("tp", "x"):
            dims = [
                d for d in range(len(param.shape)) if not any(x.dim == d for x in spec.values())
            ]
            if dims and draw(st.booleans()):
                dim = draw(st.sampled_from(dims))
                spec[axis] = draw(
                    testing.placements(dim, param.shape[dim], mesh.axis_size(axis), overlap=False)
                )
        layouts[param.name] = Layout(param.shape, mesh, spec)
    return params, layouts, mesh


@given(divided(), st.sampled_from(RULES))
def test_any_model(model: tuple, rule: Callable) -> None:
    params, layouts, mesh = model
    windows, store, flats, values = model_state(params, layouts, mesh, "dp", rule)
    one = buffers.zero(params, data_parallel_world_size=2)
    flat, there = buffers.state_layouts(one, Mesh(dp=2), shape="nd")
    expected = flats_of(one, Mesh(dp=2), None, values)
    lands(moved(windows, locals_in(windows, store, flats), flat), flat, there, expected)
    lands(moved(flat, locals_in(flat, there, expected), windows), windows, store, flats)


@given(divided(), st.data())
def test_views_of_some_ranks_of_a_model(model: tuple, data: st.DataObject) -> None:
    params, layouts, mesh = model
    some = data.draw(st.lists(st.sampled_from(mesh.ranks), min_size=1))
    (windows, whole), (again, part) = (
        buffers.model_parallel_state(
            params, layouts, mesh=mesh, axis="dp", rule=buffers.zero, ranks=ranks
        )
        for ranks in (None, some)
    )
    assert windows == again
    assert part.entries == tuple(entry for entry in whole.entries if entry[0][1] in some)


def test_state_of_a_model_that_nothing_divides_is_the_buffer_s() -> None:
    mesh = Mesh(dp=4)
    params = [Param("w", (9, 7)), Param("b", (9,))]
    layouts = {param.name: Layout(param.shape, mesh, {}) for param in params}
    buffer = buffers.distributed_optimizer(params, data_parallel_world_size=4)
    windows, store = buffers.state_layouts(buffer, mesh, shape="nd")
    model = buffers.model_parallel_state(
        params, layouts, mesh=mesh, axis="dp", rule=buffers.distributed_optimizer
    )
    assert model == (windows, store)


# --- source windows hold different elements


@given(testing.layouts(), st.data())
@example(Layout((), Mesh(), ""), None)
def test_many_source_windows_are_compared(layout: Layout, data: st.DataObject | None) -> None:
    """Hulls are compared first, for all pairs at once: whoever holds something twice is still named."""
    boxes = (
        [()] * 2
        if data is None
        else data.draw(st.lists(testing.boxes(layout.shape), min_size=1, max_size=6))
    )
    windows = tuple(window(layout, box) for box in boxes)
    held = [
        [{i for r in w.mesh.ranks for i in index if i >= 0} for index in _dims(w)] for w in windows
    ]
    clash = [
        (i, j)
        for j in range(len(windows))
        for i in range(j)
        if all(a & b for a, b in zip(held[i], held[j], strict=True))
    ]
    if not clash:
        check_disjoint("w", windows)
        return
    i, j = clash[0]
    at = tuple(min(a & b) for a, b in zip(held[i], held[j], strict=True))
    with pytest.raises(PlanError) as caught:
        check_disjoint("w", windows)
    assert f"source windows {i} and {j} both hold element {at};" in str(caught.value)


def _dims(layout: Layout) -> list[list[int]]:
    """What any rank holds, dimension by dimension."""
    return [
        [i for rank in layout.mesh.ranks for i in layout.indices(rank)[d].tolist()]
        for d in range(layout.ndim)
    ]


def test_hulls_that_meet_are_looked_into() -> None:
    """Even and odd positions lie between each other, and share none."""
    line = Mesh()
    even, odd = (
        Layout((8,), line, {}, stored={0: Runs([(k, 2 * k + first, 1) for k in range(4)])})
        for first in (0, 1)
    )
    check_disjoint("w", (even, odd))
    with pytest.raises(PlanError, match=r"source windows 0 and 2 both hold element \(4,\)"):
        check_disjoint("w", (even, odd, window(Layout((8,), line, "n"), ((4, 5),))))
    nothing = Layout((8,), line, {}, stored={0: Runs([], 0)})
    check_disjoint("w", (even, nothing, odd, nothing))


# --- bad input


BUFFER = buffers.distributed_optimizer([Param("w", (3, 4))], data_parallel_world_size=2)
DP = Mesh(dp=2, tp=2)
W, WHOLE = Param("w", (4, 4)), Layout((4, 4), DP, {})


def model(*params: Param, axis: object = "dp", rule: Callable = buffers.zero, **layouts: Layout):
    return lambda: buffers.model_parallel_state(params, layouts, mesh=DP, axis=axis, rule=rule)


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (
            lambda: buffers.state_layouts(BUFFER, Mesh(dp=2), shape="2d"),
            ParamLayoutError,
            "shape='2d' is not an option; use 'flat', or 'nd' for the parameters' shapes",
        ),
        (
            lambda: buffers.state_layouts(
                PerBufferParamLayout({"w": (0, 4, 0)}, [(0, 4)], [4]), DP, shape="nd"
            ),
            ParamLayoutError,
            "the buffer's layout has no shapes; make it with PerBufferParamLayout(..., shapes=), or use shape='flat'",
        ),
        (
            lambda: buffers.state_layouts(buffers.data_parallel([Param("w", (3, 5))]), Mesh(dp=2)),
            ParamLayoutError,
            "the buffer is laid out whole for every rank, and 2 ranks share it; "
            "pass axis=(), or lay it out with data_parallel_world_size=2",
        ),
        (
            lambda: buffers.state_layouts(BUFFER, Mesh(dp=3), shape="nd"),
            ParamLayoutError,
            "the buffer is laid out for 2 ranks, 3 share it; lay it out with data_parallel_world_size=3",
        ),
        (
            lambda: buffers.state_store(BUFFER, Mesh(dp=3)),
            ParamLayoutError,
            "the buffer is laid out for 2 ranks, 3 share it; lay it out with data_parallel_world_size=3",
        ),
        (
            lambda: buffers.state_layouts(
                buffers.layer_wise([W], data_parallel_world_size=4), Mesh(dp=2)
            ),
            ParamLayoutError,
            "the buffer is laid out for 4 ranks, 2 share it; lay it out with data_parallel_world_size=2",
        ),
        (
            lambda: buffers.state_layouts(BUFFER, Mesh(dp=2), axis="tp"),
            MeshError,
            "axis 'tp' is not in Mesh(dp=2); use one of its axes, dp",
        ),
        (
            model(W),
            ParamLayoutError,
            "no layouts for ['w'], 1 of 1 parameters; give one for each parameter",
        ),
        (
            model(W, W, w=WHOLE),
            ParamLayoutError,
            "parameter 'w' is given twice; give it once, even if it is tied",
        ),
        (
            model(Param("w", (4, 5)), w=WHOLE),
            ParamLayoutError,
            "parameter 'w' has shape (4, 5), its layout (4, 4); give a layout of shape (4, 5)",
        ),
        (
            model(W, w=Layout((4, 4), DP, "n h {sum: tp}")),
            ParamLayoutError,
            f"parameter 'w' is {Layout((4, 4), DP, 'n h {sum: tp}')}: addends have no optimizer state; give "
            "its layout after the reduction, without Partial",
        ),
        (
            model(W, w=Layout((4, 4), Mesh(ranks=[9]), {})),
            ParamLayoutError,
            "parameter 'w': no rank of the mesh has a part of it; give the mesh of the ranks that hold it",
        ),
    ],
)
def test_errors(make: Callable, kind: type, message: str, fails) -> None:
    fails(make, kind, message)


@pytest.mark.parametrize(
    "layout", [Layout((4, 4), DP, "(dp n) h"), Layout((4, 4), Mesh(ranks=[0]), {})], ids=str
)
def test_ranks_along_the_axis_hold_the_same(layout: Layout) -> None:
    with pytest.raises(ParamLayoutError) as caught:
        model(W, w=layout)()
    assert f" is {layout}; ranks 0, 2 share a buffer, and hold different parts; " in str(
        caught.value
    )


def test_an_axis_named_twice_is_refused() -> None:
    with pytest.raises(MeshError):
        buffers.state_layouts(BUFFER, DP, axis=("dp", "dp"))


def test_a_shard_that_is_too_short_is_refused() -> None:
    """A checkpoint whose padding disagrees has flat arrays of another length."""
    mesh = Mesh(dp=2)
    flat, store = buffers.state_layouts(BUFFER, mesh), buffers.state_store(BUFFER, mesh)
    short = np.zeros(buffers.shard_numel(BUFFER, 2) // 8)
    with pytest.raises(
        StoreError,
        match=(
            r"ends at element 12 of buffer 'shard', which "
            r"has shape \(8,\)"
        ),
    ):
        views(store, flat, 0, {SHARD: short})


def test_what_nobody_holds_is_held_by_nobody() -> None:
    """Empty runs of a tensor that has elements: a layout that has none of them, not the whole."""
    nothing = Layout((4, 4), Mesh(dp=2), {}, stored={0: Runs([], 0)})
    windows, _ = buffers.model_parallel_state(
        [Param("w", (4, 4))],
        {"w": nothing},
        mesh=Mesh(dp=2),
        axis="dp",
        rule=buffers.distributed_optimizer,
    )
    assert [window.local_shape(0) for window in windows["w"]] == [(0, 4)]
    with pytest.raises(PlanError, match="ce rank holds it"):
        sm.plan({"w": windows["w"]}, {"w": Layout((4, 4), Mesh(), "n h")})


def test_a_parameter_with_the_name_of_a_window() -> None:
    """Its view would take the window's place in the Store; where there is one window it has no number."""
    params = [Param("w", (20, 10)), Param("w[0]", (3,))]
    layout = buffers.distributed_optimizer(params, data_parallel_world_size=2)
    with pytest.raises(
        ParamLayoutError, match=r"'w\[0\]' has the name of a window of parameter 'w'; rename one"
    ):
        buffers.state_layouts(layout, Mesh(dp=2), shape="nd")
    whole = buffers.distributed_optimizer(params, data_parallel_world_size=1)
    assert list(buffers.state_layouts(whole, Mesh(dp=1), shape="nd")[0]) == ["w[0]", "w"]


def test_ranks_outside_the_mesh_have_no_views() -> None:
    layout, mesh = (
        buffers.distributed_optimizer([Param("w", (20, 10))], data_parallel_world_size=2),
        Mesh(dp=2),
    )
    assert not buffers.state_store(layout, mesh, ranks=[99]).entries
    assert not buffers.state_store(layout, mesh, ranks=[]).entries
    assert not buffers.state_layouts(layout, mesh, shape="nd", ranks=[99])[1].entries
    assert len(buffers.state_store(layout, mesh).entries) == 2


def test_a_shard_is_an_integer() -> None:
    layout = buffers.distributed_optimizer([Param("w", (20, 10))], data_parallel_world_size=2)
    with pytest.raises(ParamLayoutError, match=r"the shard is 1.0; give an integer"):
        buffers.shard_ranges(layout, 2, 1.0)  # type: ignore[arg-type]
