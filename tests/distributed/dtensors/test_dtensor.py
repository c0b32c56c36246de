"""DTensors: what they really hold, and moves to any other layout; beside what torch itself does, where it is wrong.

The names c02 to c43 are those of cases on which torch 2.13 fails. A test that pins torch's failure tells, by failing,
that torch was mended: then it may go.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from torch.distributed.tensor.placement_types import _StridedShard

import shardmath as sm
from shardmath_torch.tensors.dtensors.placements import placements_of
from tests.distributed.pool import Failure, Pool
from tests.distributed.tasks import dtensors as work
from tests.distributed.tasks.cases import thinned

ALL, FOUR, OTHERS = tuple(range(8)), (0, 1, 2, 3), (4, 5, 6, 7)


def value(layout: sm.Layout, parts: dict[int, Any]) -> Any:
    """The tensor of which the ranks hold these parts: addends are summed, replicas are equal."""
    found: dict[tuple[int, ...], Any] = {}
    waiting = [name for name, _ in layout.partial]
    for rank, local in parts.items():
        full = np.full(layout.shape, np.nan)
        full[np.ix_(*layout.indices(rank))] = local
        coords = layout.mesh.coords(rank)
        held = found.setdefault(
            tuple(coords[name] for name in waiting), np.full(layout.shape, np.nan)
        )
        there = ~np.isnan(held) & ~np.isnan(full)
        assert (held[there] == full[there]).all(), f"replicas differ on rank {rank}"
        np.copyto(held, full, where=~np.isnan(full))
    return sum(found.values())


def check(pool: Pool, moves: Sequence[work.Move]) -> None:
    """All ranks of the target together hold the tensor, and say in what layout."""
    got = pool.run(work.redistributed, moves, timeout=90)
    for i, move in enumerate(moves):
        dst = move.layouts[1]
        assert (
            value(dst, {rank: got[rank][i][0] for rank in move.dst_ranks}) == numbers(move.shape)
        ).all(), move
        assert all(sm.equivalent(got[rank][i][1], dst) for rank in move.dst_ranks), move


def numbers(shape: tuple[int, ...]) -> Any:
    return np.arange(math.prod(shape)).reshape(shape)


# What torch gets wrong or refuses

FAILURES: dict[str, work.Move] = {
    "c10, another mesh, the same placements": work.Move(
        FOUR, (4,), "S0", OTHERS, (4,), "S0", (9, 3)
    ),
    "c11, another mesh, other placements": work.Move(
        FOUR, (4,), "S0", OTHERS, (2, 2), "S1 S0", (9, 3)
    ),
    "c23, even, to what is no order": work.Move(
        FOUR, (2, 2), "SS0,2 S0", FOUR, (2, 2), "SS0,4 S0", (16,), None
    ),
    "c24, even, two dimensions": work.Move(
        FOUR, (2, 2), "SS0,2 SS0,3", FOUR, (2, 2), "S0 S1", (8, 8)
    ),
    "c26, even, to replicas": work.Move(FOUR, (2, 2), "SS0,4 S0", FOUR, (2, 2), "R R", (16,)),
    "c32, uneven, three axes": work.Move(
        ALL, (2, 2, 2), "SS0,4 S0 S0", ALL, (2, 2, 2), "R R R", (13,), "placement"
    ),
    "c39, uneven, as distributed": work.Move(
        ALL, (4, 2), "SS0,2 S0", ALL, (4, 2), "R R", (9,), "placement"
    ),
    "c39, uneven, as FSDP2 stores it": work.Move(
        ALL, (4, 2), "SS0,2 S0", ALL, (4, 2), "R R", (9,), "order"
    ),
    "fuzz, 8 x 16, to another dimension": work.Move(
        FOUR, (2, 2), "SS0,3 S0", FOUR, (2, 2), "SS1,3 S1", (8, 16), None
    ),
    "a shard to addends": work.Move(FOUR, (4,), "S0", FOUR, (4,), "Psum", (9, 3)),
    "addends of one axis to those of another": work.Move(
        ALL, (4, 2), "Psum S0", ALL, (4, 2), "S0 Psum", (9, 3), None
    ),
    "c42, uneven, not the first dimension": work.Move(
        ALL, (4, 2), "S1 S0", ALL, (8,), "S1", (4, 9), None
    ),
}


@pytest.mark.parametrize("name", FAILURES)
def test_what_torch_gets_wrong(pool: Pool, name: str) -> None:
    check(pool, [FAILURES[name]])


SILENT = ("c10", "c23", "c24", "c32")
"""Wrong without an error."""


@pytest.mark.parametrize(
    "name", [name for name in FAILURES if name.split(",")[0] in (*SILENT, "c11", "c26")]
)
def test_torch_still_gets_it_wrong(pool: Pool, name: str) -> None:
    """If this fails, torch was mended; take the case out."""
    got = pool.attempt(work.by_torch, FAILURES[name])
    assert not all(x is True for x in got)
    if name.split(",")[0] in SILENT:
        assert not any(isinstance(x, Failure) for x in got)


@pytest.mark.parametrize("case", ["c02", "c09", "c27", "c29", "c42"])
def test_torch_still_says_something_else_than_is_stored(pool: Pool, case: str) -> None:
    """Sizes and offsets, state dicts handed out, a refusal. If this fails, torch was mended; take the case out."""
    assert not all(x is True for x in pool.attempt(work.torch_says, case))


@pytest.mark.slow
@pytest.mark.parametrize("case", ["c28", "c39", "fuzz"])
def test_torch_still_ends_or_waits_for_ever(case: str) -> None:
    """In processes of their own, since some do not come back. If this fails, torch was mended."""
    alone = Pool(8)
    try:
        assert not all(x is True for x in alone.attempt(work.torch_says, case, timeout=30))
    finally:
        alone.close()


# Any placements, any meshes

TEXTS = [
    "S0 R",
    "R S1",
    "S0 S1",
    "S1 S0",
    "S0 S0",
    "SS0,2 S0",
    "SS0,3 S1",
    "Psum R",
    "R Psum",
    "Psum S0",
    "S1 Psum",
]
MESHES = [
    (ALL, (4, 2)),
    (ALL, (2, 4)),
    (FOUR, (2, 2)),
    (OTHERS, (2, 2)),
    ((5, 2, 7, 0), (2, 2)),
    ((3, 4), (2, 1)),
]


@pytest.mark.parametrize(("turn", "shape"), list(enumerate([(9, 7), (8, 4), (3, 1), (0, 5)])))
def test_everything_to_everything(pool: Pool, turn: int, shape: tuple[int, ...]) -> None:
    """Same, overlapping and disjoint meshes; uneven and empty shards; addends."""
    ends = [(*MESHES[i % len(MESHES)], text) for i, text in enumerate(TEXTS * 2)]
    moves = [
        work.Move(*a, *b, shape, "placement") for i, a in enumerate(ends) for b in ends[i % 5 :: 5]
    ]
    check(pool, thinned(moves, turn))


@pytest.mark.parametrize(
    ("text", "shape"), [("SS0,2 R", (5,)), ("SS0,2 S1", (5, 3)), ("S0 SS0,2", (13, 2))]
)
@pytest.mark.parametrize("dtype", ["float32", "int64", "bfloat16"])
def test_c12_c29_a_tensor_that_one_rank_has(
    pool: Pool, text: str, shape: tuple[int, ...], dtype: str
) -> None:
    """The state dict of a whole model, handed out; torch's distribute_tensor asserts that strided shards divide."""
    there = work.layout(range(8), (4, 2), text, shape)
    for rank, (held, kind, same) in enumerate(pool.run(work.from_one_rank, text, shape, dtype)):
        assert (
            held == work.part(there, rank, work.whole(shape)).tolist()
            and kind == f"torch.{dtype}"
            and same
        )


def test_c12_torch_still_asserts(pool: Pool) -> None:
    """If this fails, torch was mended."""
    got = pool.attempt(work.by_torchs_distribute, "SS0,2 R", (5,))
    assert all(isinstance(x, Failure) and x.kind == "AssertionError" for x in got)


def test_c13_whole_numbers_stay_whole_numbers(pool: Pool) -> None:
    """As addends; torch makes them float32. If that fails, torch was mended."""
    for ours, theirs, total in pool.run(work.to_addends):
        assert ours == "torch.int64" and total == [0, 1, 2, 3, 4] and theirs == "torch.float32"


def test_c28_shards_of_given_sizes(pool: Pool) -> None:
    """DTensor.from_local takes the first rank's size for all; here they are a layout."""
    there = work.layout(range(8), (8,), "S0", (21, 2))
    for rank, ((kind, said), held, text) in enumerate(pool.run(work.from_ragged)):
        assert kind == "PlacementError" and "DTensor cannot express dimension 0" in said
        assert held == work.part(there, rank, work.whole((21, 2))).tolist() and text == "(dim0 n) h"


@pytest.mark.parametrize("how", ["DTensor", "plain"])
def test_backward_across_meshes(pool: Pool, how: str) -> None:
    """A rank of the source alone takes part in the backward as the others do."""
    assert pool.run(work.across_meshes, how)[:4] == [(True, True)] * 4


def test_local_tensors_of_parts_of_a_mesh(pool: Pool) -> None:
    """Whose groups nobody has made yet: all ranks make all of them."""
    assert pool.run(work.local_parts_of_a_mesh) == [(True, True)] * 8


@pytest.mark.parametrize("after", ["R R", "S0 R", "S1 S0"])
@pytest.mark.parametrize("op", ["sum", "avg", "max", "min", "product"])
def test_c14_to_c17_reductions(pool: Pool, op: str, after: str) -> None:
    """On which torch is right; whole numbers, so that the order of folding does not matter."""
    for ours, theirs in pool.run(work.reduced, op, after):
        assert ours == theirs


@pytest.mark.parametrize(
    ("axes", "src", "dst"),
    [
        (("tp",), "S0", "R"),
        (("dp",), "S0", "S1"),
        (("dp", "tp"), "S0 S1", "S1 S0"),
        (("replica", "tp"), "S0 S0", "S1 R"),
    ],
)
def test_parts_of_a_mesh_at_the_same_time(
    pool: Pool, axes: tuple[str, ...], src: str, dst: str
) -> None:
    """Each in a group of its own, which nobody else is asked to make."""
    assert pool.run(work.on_submeshes, axes, src, dst) == [(True, True)] * 8


# What a DTensor really holds


@pytest.mark.parametrize("rows", [7, 8, 9, 13])
@pytest.mark.parametrize("mesh", [(4, 2), (2, 4), (2, 2, 2)])
def test_c02_what_fsdp2_over_tensor_parallel_stores(
    pool: Pool, mesh: tuple[int, ...], rows: int
) -> None:
    """In the order reading, also where sizes make the two differ."""
    for text, _, held, wanted in pool.run(work.layouts_of_fsdp2, mesh, rows, 4, 0):
        assert text == "(tp dp n) h" and held == wanted


@pytest.mark.parametrize("shape", [(9,), (13,), (8, 5)])
@pytest.mark.parametrize("placements", ["SS0,2 S0", "S0 S0", "SS0,4 S0", "S0 R"])
def test_what_distribute_tensor_stores(pool: Pool, placements: str, shape: tuple[int, ...]) -> None:
    """In the placement reading."""
    for held, wanted in pool.run(work.distributed, (4, 2), placements, shape):
        assert held == wanted


def test_c09_a_view_is_no_order(pool: Pool) -> None:
    """A flattened Shard(1) is strided chunks, which torch marks as such."""
    for text, held, wanted in pool.run(work.viewed):
        assert text == "(4 dim0 n)" and held == wanted


def test_c27_an_order_of_plain_shards(pool: Pool) -> None:
    """Shards of one dimension applied right to left."""
    for text, held, wanted in pool.run(work.ordered, 9):
        assert text == "(dim1 dim0 n)" and held == wanted


def test_shapes_that_fit_no_reading(pool: Pool) -> None:
    for kind, said in pool.run(work.misfit):
        assert (
            kind == "LayoutError" and "make the DTensor with the shape and the placements" in said
        )


def test_layouts_of_a_module(pool: Pool) -> None:
    """FSDP2 over tensor parallel, uneven; a part that is shared; a part that only FSDP2 divides."""
    for before, found, right in pool.run(work.layouts_of_module, (4, 2)):
        assert (
            before["up.weight"] == "(tp n) h"
            and before["down.weight"] == "n (tp h)"
            and before["norm.bias"] == "n"
        )
        assert found == {
            "up.weight": "float32[9, 6] (tp dp n) h on dp=4 tp=2",
            "up.bias": "float32[9] (tp dp n) on dp=4 tp=2",
            "down.weight": "float32[6, 9] (dp n) (tp h) on dp=4 tp=2",
            "down.bias": "float32[6] (dp n) on dp=4 tp=2",
            "norm.weight": "float32[6] (dp n) on dp=4 tp=2",
            "norm.bias": "float32[6] (dp n) on dp=4 tp=2",
            "tied.weight": "float32[9, 6] (tp dp n) h on dp=4 tp=2",
            "tied.bias": "float32[9] (tp dp n) on dp=4 tp=2",
        }
        assert all(right.values()), right


def test_layouts_of_a_module_under_hybrid_sharding(pool: Pool) -> None:
    for _, found, right in pool.run(work.layouts_of_module, (2, 2, 2)):
        assert found["up.weight"] == "float32[9, 6] (tp dp n) h on replica=2 dp=2 tp=2"
        assert found["norm.bias"] == "float32[6] (dp n) on replica=2 dp=2 tp=2" and all(
            right.values()
        ), right


def test_layouts_of_a_plain_module(pool: Pool) -> None:
    assert pool.run(work.plain_module) == [{"weight": ("n h", 8), "bias": ("n", 8)}] * 8


# Layout -> DTensor

MESH = sm.Mesh(dp=4, tp=2)
ROUND_TRIPS = {
    "(dp n) h": True,
    "n (tp h)": True,
    "(tp dp n) h": True,
    "(dp tp n) h": True,
    "(2 dp n) (tp h)": True,
    "(3 dp n | tp n) h": True,
    "n h {sum: tp}": True,
    "(dp n) h {max: tp}": True,
    "(dp*tp n) h": False,
    "(dp~ n) h": False,
    "(dp[1 2 3 3] n) h": False,
    "(n dp 1) h": False,
    "(dp n)=12 h": False,
    "([4 5] tp n) h": False,
}


@pytest.mark.parametrize(("text", "factor"), [("(n tp)", 4), ("(n tp 2)", 2), ("(4 tp n)", 4)])
def test_even_blocks_dealt_round_robin_have_placements(text: str, factor: int) -> None:
    """A strided shard cuts blocks of equal lengths, too."""
    layout = sm.Layout((8,), sm.Mesh(tp=2), text)
    assert placements_of(layout) == (_StridedShard(0, split_factor=factor),)


@pytest.mark.parametrize("text", ROUND_TRIPS)
def test_layouts_as_dtensors(pool: Pool, text: str) -> None:
    """Those that placements can say come back as they were; the others are refused, and say why."""
    for found in pool.run(work.round_trip, sm.Layout((9, 5), MESH, text)):
        if ROUND_TRIPS[text]:
            same, values = found
            assert same and values
        else:
            assert found[0] == "PlacementError" and "DTensor cannot express dimension 0" in found[1]


# Gradients


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("src", "dst"), [("S0 S1", "S1 S0"), ("R S0", "S1 R"), ("Psum S0", "R R"), ("R R", "S0 R")]
)
def test_gradients_are_those_of_dtensor(pool: Pool, src: str, dst: str, dtype: str) -> None:
    """Values and placements, where torch is right."""
    for ours, theirs in pool.run(work.gradients, src, dst, (8, 6), dtype):
        assert ours == theirs


@pytest.mark.parametrize(
    ("src", "dst", "given"),
    [
        ("Psum S0", "Psum S1", "Psum S1"),
        ("Psum S0", "Psum S1", "R S1"),
        ("Psum R", "Psum S0", "Psum R"),
        ("Psum Psum", "Psum R", "Psum R"),
        ("Psum Psum", "R Psum", "Psum Psum"),
        ("Psum R", "S0 R", "Psum R"),
        ("R Psum", "R Psum", "S0 Psum"),
        ("Pavg S0", "Pavg S1", "Pavg S1"),
        ("S0 R", "S0 S1", "R Psum"),
    ],
)
def test_gradients_that_arrive_as_addends_are_those_of_dtensor(
    pool: Pool, src: str, dst: str, given: str
) -> None:
    """They stay so along axes where the input is Partial, and are reduced along the others."""
    for ours, theirs, value in pool.run(work.gradients_given, src, dst, given):
        assert ours == theirs
        assert ours[2] == value


def test_a_gradient_is_differentiated(pool: Pool) -> None:
    """As by torch's own redistribute: (3 x^2)^2 has the derivative 36 x^3."""
    wanted = [36.0 * x**3 for x in range(1, 9)]
    assert pool.run(work.gradient_of_a_gradient)[:4] == [[wanted, wanted]] * 4


def test_ranks_that_record_a_gradient_and_ranks_that_do_not() -> None:
    """A second derivative would lack terms, without a word, or wait; so the first is an error on all."""
    workers = Pool(2)
    try:
        answers = workers.run(work.gradient_that_one_rank_does_not_record)
    finally:
        workers.close()
    for said in answers:
        assert "ranks disagree" in str(said)
        assert "to be differentiated" in str(said)


@pytest.fixture(scope="module")
def two() -> Iterator[Callable[..., list[Any]]]:
    """Runs a task on two workers; others after one that left its group broken."""
    made: list[Pool] = []

    def run(task: Callable[..., Any], *args: Any, breaks: bool = False) -> list[Any]:
        workers = made.pop() if made else Pool(2)
        try:
            return workers.run(task, *args)
        finally:
            if workers.broken or breaks:
                workers.close()
            else:
                made.append(workers)

    yield run
    for workers in made:
        workers.close()


@pytest.mark.parametrize("way", ["one is used", "one needs a gradient", "copies"])
def test_gradients_of_two_tensors_are_never_mixed(two: Any, way: str) -> None:
    """Ranks that differentiate different moves disagree, also where the gradient's own move is a copy."""
    for said in two(work.gradients_of_two_moves, way, breaks=True):
        assert "ranks disagree" in str(said) and "the gradient of move " in str(said)


def test_a_copy_more_on_one_rank(two: Any) -> None:
    """Which copy a gradient belongs to is counted from the last move that ranks agreed on."""
    for x, y in two(work.gradients_in_step_again):
        assert y == [1.0, 1.0, 2.0, 2.0] and sum(x) == 2.0


@pytest.mark.parametrize("target", ["one", "both"])
@pytest.mark.parametrize(
    ("shape", "given"),
    [((), (0,)), ((), ()), ((3,), (0,)), ((2, 3), (0,)), ((2, 3), (2, 0)), ((2, 3), (2, 3))],
)
def test_ranks_outside_a_mesh(two: Any, shape: Any, given: Any, target: str) -> None:
    """They get an empty tensor, or of a scalar a zero, and a zero gradient of what they passed for nothing."""
    first, second = two(work.gradient_outside, shape, given, target)
    right = np.arange(1.0, 1 + int(np.prod(shape))).reshape(shape)
    assert first[0] == right.tolist()
    nothing = [] if shape else 0.0
    assert second[0] == (right.tolist() if target == "both" else nothing)
    assert first[1] == first[2] == np.zeros(given).tolist() and first[3] == given
    assert second[1] == (2 * right).tolist() and second[3] == shape
    assert second[2] == (2 * np.ones(shape)).tolist()


def test_activations_that_one_rank_needs(two: Any) -> None:
    """Activation checkpointing makes a move again on all ranks, or on none."""
    assert two(work.checkpointed) == [[3.0, 12.0, 27.0], [48.0, 75.0, 108.0]]


def test_no_gradient(two: Any) -> None:
    assert two(work.no_gradient) == [[[0.0] * 4] * 2] * 2


def test_a_partial_gradient(pool: Pool) -> None:
    """With grad="partial" a replicated input has addends, which sum to the gradient."""
    for placements, total, wanted in pool.run(work.partial_gradient):
        assert placements == "(Partial(sum), Shard(dim=0))" and total == wanted


def test_nothing_of_the_graph_without_grad(pool: Pool) -> None:
    for needs, values in pool.run(work.without_grad):
        assert not needs and values


def test_targets_that_dtensor_cannot_say(pool: Pool) -> None:
    """They come as local tensors, and go on from there with layout=."""
    for held, wanted, back in pool.run(work.through_a_packed_layout):
        assert held == wanted and back


WRONG: list[tuple[str, str, str]] = [
    ("shape", "LayoutError", "pass a target of the tensor's shape and dtype"),
    ("dtype", "LayoutError", "pass a target of the tensor's shape and dtype"),
    (
        "nothing",
        "LayoutError",
        "tensor= is NoneType, which is not a tensor; pass a torch.Tensor, torch.empty(0) on",
    ),
    (
        "no device mesh",
        "LayoutError",
        "pass torch's DeviceMesh, or a sm.Layout on that mesh as target",
    ),
    ("plain", "LayoutError", "and its layout is not given; pass layout=, or pass a DTensor"),
    ("grad", "LayoutError", "grad='half' is unknown; pass 'replicate' or 'partial'"),
    ("readings", "LayoutError", "pass reading='placement' or reading='order', or a sm.Layout"),
    ("mask", "PlacementError", "has no counterpart in shardmath"),
    ("local", "ExchangeError", "has shape (1, 4), the plan's layout stores"),
    ("mesh", "LayoutError", "without a mesh, and the tensor is not a DTensor; pass device_mesh="),
    ("freed", "ExchangeError", "reaches 144 bytes into a storage of 0, which was freed"),
]


@pytest.mark.parametrize(("what", "kind", "said"), WRONG)
def test_bad_input(pool: Pool, what: str, kind: str, said: str) -> None:
    """An error on every rank, before anything is sent."""
    for found in pool.run(work.wrong, what):
        assert found[0] == kind and said in found[1], found


def test_fsdp1(pool: Pool) -> None:
    """Its parameters are plain tensors: each rank's shard would be taken for the whole parameter."""
    for found in pool.run(work.under_fsdp1):
        for kind, said in found:
            assert kind == "LayoutError" and "is under FSDP1" in said, said
            assert "fully_shard" in said
    for kind, said in pool.run(work.scalar_under_fsdp1):
        assert kind == "LayoutError" and "is under FSDP1" in said, said


def test_state_under_fsdp1(pool: Pool) -> None:
    """Inside a unit, a rank's part of a parameter would be saved as the whole parameter."""
    for found in pool.run(work.state_under_fsdp1):
        for kind, said in found:
            assert kind == "CheckpointError" and "is under FSDP1" in said, said


@pytest.mark.parametrize("original", [True, False])
def test_whole_under_fsdp1(pool: Pool, original: bool) -> None:
    """Its parameters are whole on every rank inside `summon_full_params`, and always without sharding."""
    for inside, unsharded in pool.run(work.whole_under_fsdp1, original):
        assert set(inside.values()) == {(16, 16), (16,)}
        assert set(unsharded.values()) == ({(16, 16), (16,)} if original else {(272,)})
