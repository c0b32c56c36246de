"""Parts: what all ranks do, walked in one process, gives what the plan or program means."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardmath as sm
from shardmath.layouts.store import local_name
from shardmath.plans.programs.messages import Message, Step
from shardmath.plans.programs.part import RankProgram, make_parts, outline_part, own_boxes
from shardmath.proofs.simulate import FOLD
from tests.property.drawn.programs import Arrays, plans, programs, results, shards_of

LIMITS = (64, 1000, 1 << 30)


def blank(plan: sm.Plan) -> Arrays:
    """Destinations of zeros."""
    out: Arrays = {rank: {} for rank in plan.dst_ranks}
    for name, windows in plan.dst.items():
        for i, layout in enumerate(windows):
            key = local_name(name, i, len(windows))
            for rank in layout.mesh.ranks:
                out[rank][key] = np.zeros(layout.local_shape(rank))
    return out


def steps(made: Sequence[RankProgram]) -> list[Step]:
    """All steps, in order."""
    return sorted({each.step for one in made for each in one.rounds})


def arriving(made: Sequence[RankProgram], step: Step) -> list[Message]:
    """What arrives in a step on any rank, or stays there."""
    rounds = (each for one in made for each in one.rounds if each.step == step)
    return [m for each in rounds for m in each.arriving]


def walk(made: Sequence[RankProgram], src: Arrays) -> Arrays:
    """Everything that the parts say, and nothing else."""
    out = blank(made[0].plan)
    for one in made:
        for work in one.fills:
            for box in work.boxes:
                out[one.rank][work.key][box] = work.value.real
    for step in steps(made):
        pieces = [(t, m.relayed) for m in arriving(made, step) for t in m.pieces]
        read = [
            (t, (out if relayed else src)[t.src_rank][t.src_tensor][t.src_slices].copy())
            for t, relayed in pieces
        ]
        for t, piece in sorted(read, key=lambda one: one[0].addend):
            there = out[t.dst_rank][t.dst_tensor]
            there[t.dst_slices] = FOLD[t.op](there[t.dst_slices], piece)
    for one in made:
        for work in one.divisions:
            for box in work.boxes:
                out[one.rank][work.key][box] /= work.value.real
    return out


def walked(given: sm.Plan | sm.Program, limit: int = 1 << 30) -> dict[tuple[int, str], Any]:
    """Bit for bit what the parts bring."""
    plan = given.plan if isinstance(given, sm.Program) else given
    made = make_parts(given, max_inflight_bytes=limit)
    out = walk(made, shards_of(plan)) if made else {}
    return {
        (rank, key): (array.shape, array.dtype, array.tobytes())
        for rank, named in out.items()
        for key, array in named.items()
    }


@given(plans(), st.sampled_from(LIMITS))
def test_parts_of_a_plan_do_what_it_means(plan: sm.Plan, limit: int) -> None:
    assert walked(plan, limit) == results(plan)


@given(programs())
def test_parts_of_a_program_do_what_it_means(program: sm.Program) -> None:
    assert walked(program) == results(program)


@given(plans())
def test_an_outline_knows_what_the_part_computes(plan: sm.Plan) -> None:
    """Before ranks have agreed on anything."""
    for one in make_parts(plan):
        brought = {
            (t.tensor, t.op)
            for each in one.rounds
            for m in each.arriving
            for t in m.pieces
            if t.op != "copy"
        }
        begun = {(one.destinations[work.key].tensor, "fill") for work in one.fills}
        ended = {(one.destinations[work.key].tensor, "divide") for work in one.divisions}
        assert one.operations == outline_part(plan, one.rank).operations == brought | begun | ended


def one_by_one(one: RankProgram, src: Arrays, out: Arrays) -> Iterator[int]:
    """Everything that one rank's part of a plan does, into `out`; gives how many steps have begun, after each write."""
    mine = out[one.rank]
    yield 0
    for work in one.fills:
        for box in work.boxes:
            mine[work.key][box] = work.value.real
            yield 1
    for begun, each in enumerate(one.rounds, start=2):
        for t in (t for m in each.arriving for t in m.pieces):
            into = mine[t.dst_tensor]
            piece = src[t.src_rank][t.src_tensor][t.src_slices]
            into[t.dst_slices] = FOLD[t.op](into[t.dst_slices], piece)
            yield begun
    for work in one.divisions:
        for box in work.boxes:
            mine[work.key][box] /= work.value.real
            yield one.steps
    yield one.steps + 1


@given(plans(), st.sampled_from(LIMITS))
def test_what_is_not_called_torn_is_old_or_new(plan: sm.Plan, limit: int) -> None:
    """Wherever a rank is left; and once all is done nothing is."""
    src = shards_of(plan)
    for one in make_parts(plan, max_inflight_bytes=limit):
        if one.rank not in plan.dst_ranks:
            continue
        old, new, now = blank(plan), blank(plan), blank(plan)
        for _ in one_by_one(one, src, new):
            pass
        for begun in one_by_one(one, src, now):
            torn = one.list_torn(begun)
            for key, array in now[one.rank].items():
                like = (array.tobytes() == held[one.rank][key].tobytes() for held in (old, new))
                assert key in torn or any(like)
        assert not one.list_torn(one.steps + 1)
        assert set(one.list_torn(None)) >= set(torn)


def test_a_limit_without_room() -> None:
    mesh = sm.Mesh(tp=2)
    plan = sm.plan(sm.Layout((4,), mesh, "(tp n)"), sm.Layout((4,), mesh, "n"))
    with pytest.raises(sm.ExchangeError, match="max_inflight_bytes=8 has no room"):
        make_parts(plan, max_inflight_bytes=8)


def test_holes_are_in_no_box() -> None:
    """Runs that touch are one box."""
    assert own_boxes(()) == ((),)
    assert own_boxes((sm.Runs(((0, 0, 2), (2, 9, 1), (5, 3, 1)), 6),)) == (
        (slice(0, 3),),
        (slice(5, 6),),
    )
