"""Bugs once found, one test each, with what they did."""

import time
from dataclasses import replace
from decimal import Decimal

import numpy as np
import pytest

import shardmath as sm
from shardmath.layouts.algebra.runs import from_ranges
from shardmath.layouts.edits import sliced, window


def _transfers(p: sm.Plan) -> list[sm.Transfer]:
    return list(p.transfers())


def test_a_tensor_of_no_elements_leaves_the_others_alone() -> None:
    """Its template has no classes, which shifted the cuts of every later line."""
    src, dst = sm.Mesh(x=2), sm.Mesh(x=2, ranks=(2, 3))
    sides = [
        {"w": sm.Layout((4,), m, "(x n)"), "e": sm.Layout((0,), m, "(x n)")} for m in (src, dst)
    ]
    p = sm.plan(*sides)
    sm.verify(p)
    assert len(_transfers(p)) == 2


def test_replicas_choose_the_same_addend() -> None:
    """Each group of replicas chose by itself, so replicas of one addend differed and the sum was wrong afterwards."""
    mesh = sm.Mesh(a=4, b=2)
    one, many = sm.Layout((), sm.Mesh(), ""), sm.Layout((), mesh, "{sum: b}")
    there = sm.simulate(sm.plan(one, many), {0: np.array(7.0)})
    back = sm.simulate(sm.plan(many, one), there)
    assert back[0] == 7.0
    assert {(float(there[r]), float(there[r + 1])) for r in range(0, 8, 2)} == {(7.0, 0.0)}


def test_adjoints_of_one_digest_fold_in_one_order() -> None:
    """Replicas were numbered in mesh order, which the digest does not contain."""
    src = sm.Layout((4,), sm.Mesh(tp=1), "n")
    there = [sm.Layout((4,), sm.Mesh(tp=3, ranks=ranks), "n") for ranks in ((0, 1, 2), (2, 1, 0))]
    back = [sm.adjoint(sm.plan(src, dst)) for dst in there]
    assert back[0].digest == back[1].digest
    assert _transfers(back[0]) == _transfers(back[1])


def test_partial_axes_pass_through_however_they_are_flattened() -> None:
    """{avg: x y} to {avg: xy} was an all-reduce."""
    a = sm.Layout((4,), sm.Mesh(x=2, y=2), "n {avg: x y}")
    b = sm.Layout((4,), sm.Mesh(xy=4), "n {avg: xy}")
    assert sm.equivalent(a, b)
    assert not any(sm.plan(a, b).sent_bytes().values())
    assert sm.plan(a, b).digest == sm.plan(a, a).digest


def test_an_addend_axis_of_one_rank_is_no_meaning() -> None:
    """`{sum: pp}` with pp=1 had another digest than nothing."""
    mesh = sm.Mesh(tp=2, pp=1)
    plain, partial = sm.Layout((4,), mesh, "(tp n)"), sm.Layout((4,), mesh, "(tp n) {sum: pp}")
    assert sm.plan(plain, plain).digest == sm.plan(partial, plain).digest


def test_a_window_and_a_tensor_of_one_name_are_refused() -> None:
    """Half of w was lost."""
    mesh = sm.Mesh()
    full = sm.Layout((4,), mesh, "n")
    halves = tuple(sm.Layout((4,), mesh, f"(n)=<{span}>") for span in ("0:2", "2:4"))
    with pytest.raises(
        sm.PlanError, match="'w\\[0\\]' of tensor 'w' has the name of another tensor"
    ):
        sm.plan({"w": full, "w[0]": full}, {"w": halves, "w[0]": full})


def test_what_is_executed_beside_transfers_is_proved_too() -> None:
    """A divisor of 1 doubled an average, and passed."""
    mesh = sm.Mesh(tp=2)
    p = sm.plan(sm.Layout((4,), mesh, "n {avg: tp}"), sm.Layout((4,), mesh, "n"))
    for changed in ({"divisor": 1}, {"fill": 5.0}):
        with pytest.raises(sm.PlanError, match="its layouts need"):
            sm.verify(replace(p, rules={"": replace(p.rules[""], **changed)}))


def test_a_scalar_s_average_is_an_array() -> None:
    """It was a numpy scalar, which cannot be written to."""
    mesh = sm.Mesh(tp=2)
    average = sm.plan(sm.Layout((), mesh, "{avg: tp}"), sm.Layout((), mesh, ""))
    out = sm.simulate(average, {r: np.array(3.0 * r) for r in (0, 1)})
    assert isinstance(out[0], np.ndarray) and out[0] == 1.5


def test_sizes_beyond_64_bits_are_refused() -> None:
    """Loads wrapped to 0 or below."""
    with pytest.raises(sm.LayoutError, match="more than 72057594037927936 bytes"):
        sm.Layout((2**33, 2**33), sm.Mesh(tp=2), "(tp n) h")
    with pytest.raises(sm.MeshError, match="too large"):
        sm.Mesh(ranks=[2**70])


def test_local_sizes_after_an_axis_are_not_the_axis_s() -> None:
    """`tp [4 4]` was read as `tp[4 4]`."""
    layout = sm.Layout((16,), sm.Mesh(tp=2, dp=2), {"tp": sm.Shard(0), "dp": sm.Packed(0, (4, 4))})
    assert layout.text == "(tp [4 4] dp n)"
    assert sm.Layout((16,), layout.mesh, layout.text) is layout


@pytest.mark.parametrize("text", ["(3000000 tp n)", "(200 200 200 tp n)", "(4000000000 tp n)"])
def test_more_pieces_than_positions_cost_nothing(text: str) -> None:
    """Every empty piece was written down."""
    layout = sm.Layout((4,), sm.Mesh(tp=2), text)
    assert layout.runs(0) == (sm.Runs([(0, 0, 4)]),) and layout.runs(1) == (sm.Runs([], 0),)


def test_integers_are_integers() -> None:
    """Floats, text and truth values were cut to integers without a word."""
    wrong = [
        lambda: sm.Mesh(tp=2, ranks=[0.5, 1.7]),
        lambda: sm.Mesh(tp=2, ranks="01"),
        lambda: sm.Mesh(dp=True),
        lambda: sm.Packed(0, (1.7, 2.3)),
        lambda: sm.Packed(0, "44"),
        lambda: sm.Shard("a"),
        lambda: sm.StridedShard(0, 2.5),
        lambda: sm.BlockCyclic(0, 1.5),
        lambda: sm.Runs([(0.7, 0.2, 1.9)]),
        lambda: sm.Runs([(-1, -1, 3)]),
        lambda: sm.Runs([(0, 0)]),
        lambda: from_ranges([(0.5, 2.5)]),
        lambda: sm.Layout((True,), sm.Mesh(), "n"),
        lambda: sm.Layout(4.5, sm.Mesh(), "n"),
        lambda: sm.Layout((4,), sm.Mesh(), "n").runs([0]),
        lambda: sm.Layout((4,), sm.Mesh(tp=2), sm.Shard(0)),
        lambda: sm.Layout((4,), sm.Mesh(tp=2), {5: sm.Shard(0)}),
        lambda: sm.Layout((4,), sm.Mesh(tp=2), {(): sm.Shard(0)}),
        lambda: sm.Layout((8, 4), sm.Mesh(tp=2), (sm.Shard(0),), stored={0: 8, -2: 9}),
        lambda: sm.Layout((8,), sm.Mesh(tp=2), (sm.Shard(0),), stored={0: 8.7}),
        lambda: sm.Layout((4,), sm.Mesh(tp=2), "(" + "9" * 5000 + " n)"),
        lambda: sm.plan({1: sm.Layout((4,), sm.Mesh(), "n")}, {1: sm.Layout((4,), sm.Mesh(), "n")}),
    ]
    for make in wrong:
        with pytest.raises(sm.ShardError):
            make()


def test_a_rule_that_fails_is_named() -> None:
    """The exception of a user's split came out bare."""

    class Broken:
        dim = 0

        def split(self, n: int, parts: int) -> tuple[sm.Runs, ...]:
            raise KeyError("oops")

    with pytest.raises(
        sm.PlacementError, match=r"split\(4, 2\) raised KeyError\('oops'\); make it return 2 Runs"
    ):
        sm.Layout((4,), sm.Mesh(tp=2), (Broken(),))


A, B = sm.Layout((8,), sm.Mesh(tp=2), "(tp n)"), sm.Layout((8,), sm.Mesh(dp=2, ranks=(2, 3)), "n")


def test_more_bytes_than_64_bits_count_are_refused() -> None:
    src = sm.Layout((1 << 27, 1 << 27), sm.Mesh(tp=2), "(tp n) h")
    dst = sm.Layout((1 << 27, 1 << 27), sm.Mesh(tp=4, dp=2, ranks=range(8, 16)), "n (tp h)")
    with pytest.raises(sm.PlanError, match="plan fewer tensors"):
        sm.plan({f"t{i}": src for i in range(300)}, {f"t{i}": dst for i in range(300)})


def test_numpy_limits_are_integers() -> None:
    p = sm.plan(A, B)
    prog = sm.schedule(p, max_inflight_bytes=np.int64(1000), max_ops_per_group=np.int64(5))
    assert prog.digest == sm.schedule(p, max_inflight_bytes=1000, max_ops_per_group=5).digest
    sm.verify(prog)


@pytest.mark.parametrize("wrong", [8, 0, "x", False])
def test_what_is_no_topology(wrong: object) -> None:
    for make in (
        lambda: sm.plan(A, B, topology=wrong),
        lambda: sm.schedule(sm.plan(A, B), topology=wrong),
    ):
        with pytest.raises(sm.PlanError, match="is not a Topology"):
            make()


def test_the_empty_program_is_proved() -> None:
    sm.verify(sm.schedule(sm.plan({}, {})))


def test_what_is_no_rank_and_no_plan() -> None:
    p = sm.plan(A, B)
    for ask in (
        lambda: p.transfers(src="x"),
        lambda: p.transfers(dst=1.5),
        lambda: sm.schedule(p).for_rank("x"),
    ):
        with pytest.raises(sm.PlanError, match="a rank"):
            ask()
    with pytest.raises(sm.PlanError, match="is not a Plan"):
        sm.simulate(None, {})
    for rates in ({"intra_bytes_per_s": 10**400}, {"ranks_per_node": 1 << 70}):
        with pytest.raises(sm.PlanError):
            sm.Topology(**rates)


def test_a_window_of_what_stores_nothing() -> None:
    """Empty Runs are Runs, not the identity."""
    nothing = sm.Layout((2,), sm.Mesh(), {}, stored={0: sm.Runs([], 0)})
    assert (
        window(nothing, ((0, 1),)).local_shape(0)
        == sliced(nothing, ((0, 1),)).local_shape(0)
        == (0,)
    )


def test_many_stages_cost_as_many() -> None:
    """Every stage asked anew for the lengths at all stages before it."""
    begin = time.process_time()
    axes = [f"a{i}" for i in range(40)]
    layout = sm.Layout(
        (4,), sm.Mesh(dict.fromkeys(axes, 1)), {a: sm.Packed(0, (2, 2)) for a in axes}
    )
    assert layout.local_shape(0) == (4,) and time.process_time() - begin < 2


@pytest.mark.parametrize(
    "wrong", [np.array("abc"), np.bool_(True), np.complex128(1 + 2j), Decimal("sNaN")]
)
def test_what_is_no_number_of_a_topology(wrong: object) -> None:
    with pytest.raises(sm.PlanError, match="latency_s is"):
        sm.Topology(latency_s=wrong)


@pytest.mark.parametrize("nbytes", [8192, 12288, 13312, 15360, 20480, 22528, 1 << 20])
def test_limits_between_multiples_of_a_row(nbytes: int) -> None:
    """17 rows of 8 KiB: slots of 2 rows do not get smaller until there are 17 of them."""
    src, dst = (sm.Layout((17, 1024), sm.Mesh(ranks=[r]), "n h", dtype="float64") for r in (0, 1))
    prog = sm.schedule(sm.plan(src, dst), max_inflight_bytes=nbytes)
    assert max(m.nbytes for one in prog.for_rank(0) for m in one.messages) <= nbytes


def test_more_pieces_than_memory_holds_are_refused() -> None:
    """All were listed, until the process was killed; the error names how many there are."""
    dealt = sm.Layout((10**12,), sm.Mesh(tp=2), "(n tp)", dtype="int8")
    with pytest.raises(sm.PlacementError, match="is cut into 500000000000 pieces"):
        dealt.runs(0)
    mesh = sm.Mesh(x=2, y=2)
    specs = [{x: sm.BlockCyclic(0, 1), y: sm.BlockCyclic(1, 1)} for x, y in ("xy", "yx")]
    p = sm.plan(*(sm.Layout((9000, 9000), mesh, spec) for spec in specs))
    with pytest.raises(
        sm.PlanError, match=r"one rank would send another 20250000 boxes .* larger blocks"
    ):
        list(p.transfers(src=0))
