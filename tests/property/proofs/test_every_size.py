"""Laws for all sizes: what is decided by some lengths, against isl, which decides for all, and against single sizes."""

from __future__ import annotations

import itertools
import math
import time
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shardmath as sm
from shardmath.layouts.algebra.cuts import BalancedChunks, Chunks
from shardmath.layouts.algebra.dimension import Dimension, Field, cells, divide_lengths
from shardmath.layouts.algebra.runs import from_ranges
from shardmath.layouts.algebra.stages import Digit, canonical_stages, list_coordinates
from shardmath.layouts.layout import intern
from shardmath.proofs.sizes.prove import prove, prove_equivalent
from shardmath.proofs.sizes.settling import grow
from tests.property.drawn.parametric import held, smallest_difference


@st.composite
def counted_stages(draw: st.DrawFn, most_parts: int = 24):
    """Canonical stages of `Chunks` and `BalancedChunks`, with at most so many parts in all."""
    names = iter("abcdefgh")
    stages = []
    product = 1
    for _ in range(draw(st.integers(1, 3))):
        digits = []
        for _ in range(draw(st.integers(1, 2))):
            parts = draw(st.integers(1, 4))
            if product * parts > most_parts:
                continue
            product *= parts
            cut = draw(st.sampled_from([Chunks, BalancedChunks]))(parts)
            is_local = draw(st.booleans())
            digits.append(Digit(cut) if is_local else Digit(cut, (next(names),), (parts,)))
        stages.append(tuple(digits))
    return canonical_stages(stages)


def at(stages, n: int) -> Dimension:
    return Dimension(n, (Field(n, stages),))


def layout_of(stages, n: int = 5) -> sm.Layout:
    dim = at(stages, n)
    return intern((n,), "float32", sm.Mesh(dim.axes), (dim,), ())


def as_numbers(stages, n: int) -> tuple[tuple[int, ...], np.ndarray]:
    """How many segments each part has, and all their numbers."""
    parts = cells(at(stages, n))
    numbers = [number for runs in parts for segment in runs.segments for number in segment]
    return tuple(len(runs.segments) for runs in parts), np.array(numbers)


@given(counted_stages(), st.integers(0, 400))
def test_arrays_are_what_ranks_hold(stages, n: int) -> None:
    starts, sizes = divide_lengths(stages, np.array([n, n + 1]))
    for row, length in enumerate((n, n + 1)):
        dim = at(stages, length)
        for number, coords in enumerate(list_coordinates(dim.axes)):
            pieces = zip(starts[row, number].tolist(), sizes[row, number].tolist(), strict=True)
            ranges = [(start, start + size) for start, size in pieces]
            assert from_ranges(ranges) == dim.fields[0].runs(coords)


@given(counted_stages(), st.data())
def test_borders_are_linear_once_they_have_settled(stages, data: st.DataObject) -> None:
    growth = grow(stages)
    first = growth.settled + data.draw(st.integers(0, 2 * growth.period))
    rows = [as_numbers(stages, first + number * growth.period) for number in range(4)]
    counts = {count for count, _ in rows}
    assert len(counts) == 1
    assert not np.diff([numbers for _, numbers in rows], 2, axis=0).any()


def test_fewer_lengths_would_not_decide() -> None:
    """For ceil-chunks of one axis the bound is exact: one length below it a part is still empty."""
    for parts in range(2, 12):
        stages = ((Digit(Chunks(parts), ("tp",), (parts,)),),)
        growth = grow(stages)
        assert growth == (parts, parts * (parts - 1))
        before = as_numbers(stages, growth.settled - parts + 1)[0]
        assert before != as_numbers(stages, growth.settled + 1)[0]


@settings(deadline=None, max_examples=60)
@given(counted_stages(8), st.data())
def test_isl_finds_the_same_smallest_difference(stages, data: st.DataObject) -> None:
    axes = at(stages, 0).axes
    # Another division by the same axes, or isl would compare what no two layouts have.
    digits = [Digit(Chunks(size), (name,), (size,)) for name, size in axes.items()]
    order = data.draw(st.permutations(digits))
    cut = data.draw(st.sampled_from([Chunks, BalancedChunks]))
    other = canonical_stages([[Digit(cut(d.cut.parts), d.axes, d.sizes) for d in order]])
    verdict = prove_equivalent(layout_of(stages), layout_of_axes(other, axes))
    found = [
        smallest_difference(held(stages, coords), held(other, coords))
        for coords in list_coordinates(axes)
    ]
    smallest = min((n for n in found if n is not None), default=None)
    assert verdict.proved == (smallest is None)
    if verdict.counterexample is not None:
        assert verdict.counterexample.size == smallest
        event_rank = verdict.counterexample.rank
        assert event_rank is not None and found[event_rank] == smallest


def layout_of_axes(stages, axes) -> sm.Layout:
    return intern((5,), "float32", sm.Mesh(axes), (at(stages, 5),), ())


@settings(deadline=None, max_examples=40)
@given(counted_stages(8))
def test_isl_proves_what_one_layout_holds(stages) -> None:
    """Ranks hold every element once: isl says it of its own maps, `prove` of the code that runs."""
    everything = "[n] -> { [g] : 0 <= g < n }"
    maps = [held(stages, coords) for coords in list_coordinates(at(stages, 0).axes)]
    union = maps[0].range()
    for one, other in itertools.combinations(maps, 2):
        assert (one.range() & other.range()).is_empty()
    for one in maps:
        assert one.is_single_valued() and one.is_injective()
        union |= one.range()
    assert union.is_equal(type(union).read_from_str(union.get_ctx(), everything))
    assert prove(layout_of(stages)).proved


DTENSOR = {
    (4, 2): 9,
    (3, 2): 7,
    (8, 2): 17,
    (4, 4): 19,
    (8, 4): 33,
    (8, 8): 69,
    (16, 8): 129,
    (2, 2): None,
    (2, 4): None,
}
"""The smallest number of rows at which a rank of FSDP2 over tensor parallel stores other rows than DTensor says."""


@pytest.mark.parametrize(("sizes", "smallest"), DTENSOR.items())
def test_where_dtensor_and_fsdp2_differ(sizes: tuple[int, int], smallest: int | None) -> None:
    mesh = sm.Mesh(dp=sizes[0], tp=sizes[1])
    spec = (sm.StridedShard(0, split_factor=sizes[1]), sm.Shard(0))
    says = sm.Layout((8,), mesh, spec)
    stores = sm.Layout((8,), mesh, spec, reading="order")
    verdict = sm.prove_equivalent(says, stores)
    found = verdict.counterexample
    assert (None if found is None else found.size) == smallest
    by_size = (
        n
        for n in range(200)
        if not sm.equivalent(
            sm.Layout((n,), mesh, spec), sm.Layout((n,), mesh, spec, reading="order")
        )
    )
    assert next(by_size, None) == smallest


NESTS = ["(tp dp n)", "(tp~ dp~ n)", "(2 dp n | tp n)", "(dp n tp 2)", "(n tp)", "(dp~ tp n)"]


@pytest.mark.parametrize("spec", NESTS)
@pytest.mark.parametrize("sizes", [(2, 2), (4, 2), (3, 2)])
def test_plans_of_all_deciding_lengths_are_proved(spec: str, sizes: tuple[int, int]) -> None:
    """`verify` of each size finds what `prove` says of all."""
    mesh, other = sm.Mesh(dp=sizes[0], tp=sizes[1]), sm.Mesh(tp=3, ranks=range(10, 13))
    verdict = sm.prove(sm.Layout((8,), mesh, spec), sm.Layout((8,), other, "(tp n)"))
    assert verdict.proved
    for n in range(verdict.dims[0].lengths):
        src, dst = sm.Layout((n,), mesh, spec), sm.Layout((n,), other, "(tp n)")
        for plan in (sm.plan(src, dst), sm.plan(dst, src)):
            sm.verify(plan)


def test_sixteen_by_sixteen() -> None:
    mesh = sm.Mesh(dp=16, tp=16)
    for spec in ("(tp dp n)", "(tp~ dp~ n)", "(2 dp n | tp n)", "(dp n tp 2)"):
        assert sm.prove(sm.Layout((8,), mesh, spec)).proved
    wrong = sm.prove_equivalent(
        sm.Layout((8,), mesh, "(16 dp n | tp n)"), sm.Layout((8,), mesh, "(tp dp n)")
    )
    assert str(wrong) == (
        "false at n = 265: rank 144 holds [264:265] under the first layout, and nothing under the second"
    )


# Custom placements


@dataclass(frozen=True)
class Deal:
    """Every element to the next part, as long as there are whole rounds; the rest to the last part."""

    loses_from: float = math.inf
    declared: int | None = None
    refuses_from: float = math.inf
    holes_from: float = math.inf
    overlaps: bool = False

    dim: int = 0

    def split(self, n: int, parts: int) -> tuple[sm.Runs, ...]:
        if n >= self.refuses_from:
            raise ValueError("too long")
        whole = n // parts
        ranges = [(part * whole, part * whole + whole) for part in range(parts)]
        if n < self.loses_from:
            ranges[-1] = ranges[-1][0], n
        if self.overlaps:
            ranges[0] = 0, n
        out = [from_ranges([one]) for one in ranges]
        if n >= self.holes_from:
            out[0] = sm.Runs(out[0].segments, len(out[0]) + 3)
        return tuple(out)

    def period(self, parts: int) -> int:
        return self.declared or parts


@dataclass(frozen=True)
class Silent:
    dim: int = 0

    def split(self, n: int, parts: int) -> tuple[sm.Runs, ...]:
        return Deal().split(n, parts)


def custom(by, parts: int = 4) -> sm.Layout:
    return sm.Layout((0,), sm.Mesh(tp=parts), {"tp": by})


def test_a_declared_period_is_believed_if_it_is_kept() -> None:
    verdict = sm.prove(custom(Deal()))
    assert verdict.proved and str(verdict) == (
        "proved for every n: ranks hold each element once, up to copies; 20 lengths of n decide; if ranges of "
        f"{Deal()!r} move linearly with its period of 4, as they do from n = 4 to 19"
    )
    for declared, why in (
        (3, "has 0 ranges at n = 3, and 1 at n = 6, although it declares a period of 3"),
        (6, "do not move linearly with its period of 6"),
    ):
        verdict = sm.prove(custom(Deal(declared=declared)))
        assert not verdict and verdict.counterexample is None
        assert str(verdict).endswith(why)


def test_without_a_period_a_placement_is_tested() -> None:
    verdict = sm.prove(custom(Silent()))
    assert not verdict.proved and verdict.counterexample is None
    assert str(verdict) == (
        "not proved, but tested for n < 256: ranks hold each element once, up to copies; "
        "Silent(dim=0) declares no period(parts)"
    )


def test_a_placement_that_loses_elements_is_found() -> None:
    assert str(sm.prove(custom(Deal(loses_from=30, declared=16)))) == (
        "false at n = 30: no rank holds element 28"
    )


@pytest.mark.parametrize("n", [1, 13, 17])
def test_what_breaks_in_the_periods_that_are_seen_is_found(n: int) -> None:
    for broken in (Deal(loses_from=n), Deal(refuses_from=n)):
        found = sm.prove(custom(broken)).counterexample
        assert found is not None and n <= found.size <= n + 1


def test_holes_count_as_a_difference() -> None:
    verdict = sm.prove_equivalent(custom(Deal(holes_from=13)), custom(Deal()))
    assert verdict.counterexample is not None and verdict.counterexample.size == 13
    verdict = sm.prove(custom(Deal(holes_from=13)))
    assert "do not move linearly" in str(verdict)


@dataclass(frozen=True)
class Swap:
    """Linear from the second period on; ranges tile in the second and the third period, in another order, and overlap
    after these."""

    dim: int = 0

    def split(self, n: int, parts: int) -> tuple[sm.Runs, ...]:
        k = n // 24
        if k == 0:
            return (from_ranges([(0, n)]), *[sm.Runs()] * 3)
        ranges = [(0, 4 * k), (6 * k - 2, 6 * k), (2 * k + 4, 2 * k + 6), (4 * k + 4, n)]
        return tuple(from_ranges([one]) for one in ranges)

    def period(self, parts: int) -> int:
        return 24


def test_ranges_that_change_places_prove_nothing() -> None:
    verdict = sm.prove(custom(Swap()))
    assert not verdict.proved
    assert verdict.counterexample is not None and verdict.counterexample.size == 72


@dataclass(frozen=True)
class Late:
    """Linear from the second period on, in which the first part is still empty."""

    dim: int = 0

    def split(self, n: int, parts: int) -> tuple[sm.Runs, ...]:
        begin = max(0, n // 10 - 1)
        return from_ranges([(0, begin)]), from_ranges([(begin, n)])

    def period(self, parts: int) -> int:
        return 10


def test_a_part_that_is_empty_in_some_periods_is_named() -> None:
    verdict = sm.prove(custom(Late(), parts=2))
    assert not verdict.proved and verdict.counterexample is None
    why = "has 0 ranges at n = 10, and 1 at n = 20, although it declares a period of 10"
    assert str(verdict).endswith(f"; part 0 of Late(dim=0) {why}")


@dataclass(frozen=True)
class Meet:
    """Linear from the second period on: two ranges with a gap, which closes after five periods, and then they overlap.

    At 2,400 positions they are no parts any more.
    """

    dim: int = 0

    def split(self, n: int, parts: int) -> tuple[sm.Runs, ...]:
        if n < 400:
            return from_ranges([(0, n)]), sm.Runs()
        return from_ranges([(0, 99 * (n // 400))]), from_ranges([(399, n)])

    def period(self, parts: int) -> int:
        return 400


@dataclass(frozen=True)
class Meet2(Meet):
    pass


def test_gaps_that_close_prove_nothing() -> None:
    halves = sm.Layout((8,), sm.Mesh(tp=2), "(tp n)")
    meeting = sm.Layout((0,), sm.Mesh(tp=2), {"tp": Meet()})
    again = sm.Layout((0,), sm.Mesh(tp=2), {"tp": Meet2()})
    with pytest.raises(sm.PlacementError):
        sm.Layout((2400,), sm.Mesh(tp=2), {"tp": Meet()})
    moved = sm.prove(halves, meeting)
    assert not moved.proved
    assert str(moved).endswith("the destination does not hold all elements at n = 400")
    assert not sm.prove_equivalent(meeting, again).proved
    assert not sm.prove_equivalent(meeting, meeting).proved
    assert sm.prove(meeting).counterexample == ("n", 400, "no rank holds element 99", None)


def test_reasons_are_those_of_the_dimensions_that_were_tested() -> None:
    mesh = sm.Mesh(tp=4, dp=4)
    layout = sm.Layout((0, 0), mesh, {"tp": Deal(dim=0), "dp": Silent(dim=1)})
    assert str(sm.prove(layout)).startswith(
        "not proved, but tested for h < 256: ranks hold each element once, up to copies; "
        "Silent(dim=1) declares no period(parts); if ranges of Deal("
    )


@pytest.mark.parametrize("spec", ["(tp dp n)", "(dp~ tp n)", "(2 dp n | tp n)", "(3 tp~ n | dp n)"])
@pytest.mark.parametrize("sizes", [(2, 2), (4, 2), (3, 4)])
def test_one_rank_and_all_ranks_are_cut_alike(spec: str, sizes: tuple[int, int]) -> None:
    """`Field.runs` and `divide_lengths` at all deciding lengths: by the theorem, they are equal at all lengths."""
    stages = sm.Layout((8,), sm.Mesh(dp=sizes[0], tp=sizes[1]), spec).dims[0].fields[0].stages
    lengths = np.arange(grow(stages).deciding)
    starts, counts = divide_lengths(stages, lengths)
    for n in lengths.tolist():
        dim = at(stages, n)
        for number, coords in enumerate(list_coordinates(dim.axes)):
            pieces = zip(starts[n, number].tolist(), counts[n, number].tolist(), strict=True)
            ranges = [(start, start + size) for start, size in pieces]
            assert from_ranges(ranges) == dim.fields[0].runs(coords)


def test_every_declaration_is_named() -> None:
    one, other = Deal(declared=4), Deal(declared=8)
    for verdict in (
        sm.prove(custom(one), custom(other)),
        sm.prove_equivalent(custom(one), custom(other)),
    ):
        assert verdict.proved and repr(one) in str(verdict) and repr(other) in str(verdict)
    mixed = sm.prove_equivalent(custom(one), custom(Silent()))
    assert str(mixed).endswith("same order; Silent(dim=0) declares no period(parts)")


def test_the_least_that_was_tested_is_said() -> None:
    wide = sm.Layout((8,), sm.Mesh(tp=32, dp=16), "(tp dp n)")
    verdict = sm.prove(custom(Silent()), wide)
    assert "tested for n < 256" in str(verdict) and "declares no period" in str(verdict)


def test_the_smallest_counterexample_of_both_sides() -> None:
    late, early = Deal(loses_from=39, declared=8), Deal(loses_from=25, declared=8)
    found = sm.prove(custom(early), custom(late)).counterexample
    assert found is not None and found.size == 25
    # A destination may hold less, but if the source loses elements, trying proves nothing.
    assert sm.prove(custom(late), custom(early)).counterexample is None
    rounds = custom(Deal(loses_from=0))
    verdict = sm.prove(rounds, rounds)
    assert not verdict.proved and verdict.counterexample is None
    assert str(verdict).endswith("the source does not hold all elements at n = 1")


def test_placements_that_overlap_hold_elements_at_least_once() -> None:
    verdict = sm.prove(custom(Deal(overlaps=True)))
    assert not verdict.proved and "hold each element at least once" in str(verdict)
    assert "may overlap" in str(verdict)


def test_a_period_that_raises() -> None:
    @dataclass(frozen=True)
    class Raises(Silent):
        def period(self, parts: int) -> int:
            raise RuntimeError("no")

    with pytest.raises(sm.PlacementError, match=r"period\(4\) of .* raised RuntimeError\('no'\)"):
        sm.prove(custom(Raises()))


def test_what_no_plan_can_do_is_an_error() -> None:
    mesh = sm.Mesh(tp=2)
    whole = sm.Layout((4,), mesh, "n")
    with pytest.raises(sm.PlanError, match="float32, and the destination int8"):
        sm.prove(whole, sm.Layout((4,), mesh, "n", dtype="int8"))
    with pytest.raises(sm.PlanError):
        sm.prove(sm.Layout((4,), mesh, "n {sum: tp}"), sm.Layout((4,), mesh, "n {max: tp}"))


@pytest.mark.parametrize(
    ("axes", "spec"),
    [
        ({"dp": 2, "tp": 2}, "(256 dp n | tp n)"),
        ({"a": 4, "b": 4, "c": 4}, "(4 a n | 4 b n | 4 c n)"),
        ({"tp": 2}, "(4096 tp n)"),
        ({"tp": 8}, "(n tp 65536)"),
        ({"dp": 1024}, "(dp n)"),
    ],
)
def test_many_parts_are_proved_soon(axes: dict[str, int], spec: str) -> None:
    """By the definition of the cuts, if too many lengths would decide."""
    layout = sm.Layout((8,), sm.Mesh(axes), spec)
    start = time.process_time()
    assert sm.prove(layout).proved
    assert sm.prove_equivalent(layout, layout).proved
    assert time.process_time() - start < 30
    assert "by the definition of its cuts; the code was run for n <" in str(
        sm.prove(sm.Layout((8,), sm.Mesh(dp=1024), "(dp n)"))
    )


def test_the_verdict_names_the_lengths_of_the_stage_that_ran_in_part() -> None:
    """The first stage runs at all 8,322 lengths that decide about it."""
    mesh = sm.Mesh(tp=64, dp=64, pp=64)
    first, second, both = (
        str(sm.prove(sm.Layout((65536,), mesh, text)))
        for text in ("(2 tp n)", "(dp pp n)", "(2 tp n | dp pp n)")
    )
    assert first.endswith("8322 lengths of n decide")
    assert both == second and "the code was run for n < " in second


@dataclass(frozen=True)
class Odd:
    """Refuses odd lengths."""

    dim: int = 0

    def split(self, n: int, parts: int) -> tuple[sm.Runs, ...]:
        if n % 2:
            raise ValueError("odd")
        return Deal().split(n, parts)


def test_a_length_that_a_placement_refuses_is_a_counterexample() -> None:
    found = sm.prove(custom(Odd())).counterexample
    assert found is not None and found.size == 1 and "ValueError('odd')" in found.text


# One size, windows, ranks, words


def test_dimensions_with_one_size() -> None:
    mesh = sm.Mesh(tp=2)
    fused = sm.Layout((12, 4), mesh, "([8 2 2] tp n) h")
    assert str(sm.prove(fused)) == (
        "proved for every h and n = 12: ranks hold each element once, up to copies"
    )
    window = sm.Layout((12, 4), mesh, "(n)=<0:4> h")
    assert str(sm.prove(window)) == "false at n = 12: no rank holds element 4"
    assert sm.prove(fused, window).proved
    assert str(sm.prove(window, fused)) == (
        "false at n = 12: no rank of the source holds element 4"
    )
    with pytest.raises(sm.LayoutError, match="can only be 12 in one layout and 14 in the other"):
        sm.prove(fused, sm.Layout((14, 4), mesh, "([8 2 4] tp n) h"))
    with pytest.raises(sm.LayoutError, match="1 dimension and 2 dimensions"):
        sm.prove(sm.Layout((4,), mesh, "n"), window)


def test_differences_that_no_size_changes() -> None:
    mesh = sm.Mesh(tp=2)
    one = sm.Layout((4,), mesh, "(tp n)")
    assert not sm.prove_equivalent(one, sm.Layout((4,), mesh, "(tp n)", dtype="int8"))
    elsewhere = sm.Layout((4,), sm.Mesh(tp=2, ranks=[1, 2]), "(tp n)")
    assert str(sm.prove_equivalent(one, elsewhere)) == (
        "false at every size: rank 0 is in only one of the meshes"
    )
    sums = (sm.Layout((4,), mesh, "n {sum: tp}"), sm.Layout((4,), mesh, "n"))
    assert str(sm.prove_equivalent(*sums)) == (
        "false at every size: rank 0 holds addend 0 of a sum under the first layout, "
        "and whole values under the second"
    )


def test_other_ranks_in_another_order_are_compared_by_rank() -> None:
    one = sm.Layout((4,), sm.Mesh(tp=2, ranks=[5, 3]), "(tp n)")
    other = sm.Layout((4,), sm.Mesh(tp=2, ranks=[3, 5]), "(tp n)")
    assert str(sm.prove_equivalent(one, other)) == (
        "false at n = 1: rank 3 holds nothing under the first layout, and [0:1] under the second"
    )


def test_blocks_are_proved_if_they_divide_the_same_pieces() -> None:
    mesh = sm.Mesh(dp=2, tp=2)
    one, other = (sm.Layout((8,), mesh, text) for text in ("(dp n tp 2)", "(dp~ n tp 2)"))
    assert sm.prove_equivalent(one, one).proved
    verdict = sm.prove_equivalent(one, other)
    assert not verdict.proved and verdict.counterexample is None
    coarse = sm.Layout((8,), mesh, "(dp n tp 4)")
    found = sm.prove_equivalent(one, coarse).counterexample
    assert found is not None and found.size == 5


@pytest.mark.parametrize(
    ("text", "whole"), [("(n tp 4)", "n"), ("(tp~ n pp 4)", "n"), ("(pp dp n tp 2)", "(dp n)")]
)
def test_blocks_on_axes_of_one_rank_divide_nothing(text: str, whole: str) -> None:
    mesh = sm.Mesh(tp=1, pp=1, dp=2)
    one, other = (sm.Layout((8,), mesh, spec) for spec in (text, whole))
    assert sm.prove_equivalent(one, other).proved
    assert sm.prove_equivalent(other, one).proved


def test_blocks_of_pieces_on_other_ranks_differ() -> None:
    mesh = sm.Mesh(a=2, b=2)
    swapped = sm.Mesh(a=2, b=2, ranks=[2, 3, 0, 1])
    one, other = (sm.Layout((8,), m, "(a n b 2)") for m in (mesh, swapped))
    found = sm.prove_equivalent(one, other).counterexample
    assert found is not None and found.size == 1


@given(
    st.sampled_from([(2, 2), (4, 2), (3, 2), (2, 3)]), st.sampled_from([4, 8, 32]), st.booleans()
)
def test_legal_sizes_are_those_at_which_no_block_is_cut(sizes, block: int, fsdp: bool) -> None:
    mesh = sm.Mesh(dp=sizes[0], tp=sizes[1])
    spec = "(tp dp n) k" if fsdp else "(tp~ n) k"
    form = sm.formats.FP8Blocks(block=(block, block))
    legal, every = form.legal_sizes(sm.Layout((8, 8), mesh, spec))
    assert str(every) == "every n"
    for n in range(3 * legal.period + legal.settled):
        try:
            form.scale_layout(sm.Layout((n, 8), mesh, spec, dtype="bfloat16"))
        except sm.errors.FormatError:
            assert n not in legal
        else:
            assert n in legal


def test_numbers_that_share_a_byte_are_not_cut() -> None:
    form = sm.formats.NVFP4()
    legal = form.legal_sizes(sm.Layout((8, 32), sm.Mesh(tp=2), "(tp n) k"))
    assert [str(one) for one in legal] == ["every n", "every n with n mod 2 = 0"]
    divided = sm.Layout((8, 32), sm.Mesh(tp=2), "n (tp k)")
    _, legal_k = form.legal_sizes(divided)
    for n in range(200):
        try:
            form.layouts(sm.Layout((8, n), sm.Mesh(tp=2), "n (tp k)", dtype="bfloat16"))
        except sm.errors.FormatError:
            assert n not in legal_k
        else:
            assert n in legal_k
    fused = sm.Layout((8, 32), sm.Mesh(tp=2), "([4 4] tp n) k")
    with pytest.raises(sm.errors.FormatError, match=r"dimension 0 of .* not all sizes can be"):
        sm.formats.FP8Blocks().legal_sizes(fused)


def test_a_fixed_size_without_blocks_is_the_only_one() -> None:
    layout = sm.Layout((160, 32), sm.Mesh(tp=2), "([96 32 32] tp n) k")
    rows, _ = sm.formats.NVFP4().legal_sizes(layout)
    assert str(rows) == "n = 160" and 160 in rows
    assert 159 not in rows and 161 not in rows


def test_sizes_of_custom_placements_are_not_decided() -> None:
    layout = sm.Layout((256, 256), sm.Mesh(tp=4), {"tp": Deal()})
    with pytest.raises(sm.errors.FormatError, match="decided: a custom placement divides it; try"):
        sm.formats.FP8Blocks().legal_sizes(layout)


@pytest.mark.parametrize("text", ["(n)=<0:4> k", "(4: n + 256: tp n) k", "(128: n + 128: tp n) k"])
def test_sizes_of_windows_and_fields_are_not_decided(text: str) -> None:
    n = 260 if "4:" in text and "+" in text else 256
    layout = sm.Layout((n, 256), sm.Mesh(tp=2), text)
    with pytest.raises(sm.errors.FormatError, match="not all sizes can be decided"):
        sm.formats.FP8Blocks().legal_sizes(layout)
