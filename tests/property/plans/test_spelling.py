"""Transfers in columns are those that are spelled stretch by stretch."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmath import Layout, Mesh, MeshError, Plan, Program, Table, Transfer, from_ranges, plan
from shardmath.plans.demands import Demands
from shardmath.plans.programs.program import list_slices
from shardmath.plans.programs.streams import list_streams
from shardmath.plans.spelling import spell_parts
from shardmath.plans.stretch_parts import Stretches, list_parts
from shardmath.plans.stretches import Stretch, list_kept, list_received, list_sent
from tests.property.drawn.programs import PROGRAMS, cut_anywhere, plans, programs
from tests.property.drawn.spelled import spell_transfers


@pytest.fixture(autouse=True)
def _small_tensors_are_cut() -> Iterator[None]:
    with cut_anywhere():
        yield


def spelled(
    p: Plan, on: Demands, stretches: list[Stretch], relayed: list[bool]
) -> list[list[Transfer]]:
    """The transfers of each stretch, of all at once."""
    rows = np.array(stretches, np.int64).reshape(-1, 5)
    columns = Stretches(*rows.T)
    parts = list_parts(on, columns)
    transfers, by_part = spell_parts(p, on, columns, parts, np.array(relayed, bool))
    found = list(transfers)
    out: list[list[Transfer]] = [[] for _ in stretches]
    assert len(found) == by_part.first[-1]
    for part, transfer in zip(by_part.owners().tolist(), found, strict=True):
        out[parts.stretch[part]].append(transfer)
    return out


def one_by_one(
    p: Plan, on: Demands, stretches: list[Stretch], relayed: list[bool]
) -> list[list[Transfer]]:
    return [
        list(spell_transfers(p, on, stretch, relayed=again))
        for stretch, again in zip(stretches, relayed, strict=True)
    ]


def are_alike(p: Plan, on: Demands, stretches: list[Stretch], relayed: list[bool]) -> None:
    """Equal, and of the same types: a numpy integer is equal to its number."""
    found, expected = (spell(p, on, stretches, relayed) for spell in (spelled, one_by_one))
    assert found == expected
    assert repr(found) == repr(expected)


@given(plans())
def test_of_a_plan(p: Plan) -> None:
    """What every rank keeps, sends and receives, as the plan has cut it."""
    stretches = [
        stretch
        for rank in p.ranks
        for listed in (list_kept, list_sent, list_received)
        for stretch in listed(p.lines, rank)
    ]
    are_alike(p, p.lines, stretches, [False] * len(stretches))


def slices_of(prog: Program) -> tuple[list[Stretch], list[bool]]:
    """All that goes from tensors of a rank to those of another, and whether it is relayed."""
    stretches, relayed = [], []
    for line in range(len(prog.legs.lines.holders)):
        of = list_streams(prog.legs, line)
        cut = list_slices(prog, of)
        columns = (
            of.block,
            np.where(of.leg == 5, of.beyond, of.sender),
            np.where(of.leg == 4, of.beyond, of.receiver),
        )
        ends = (column[cut.stream].tolist() for column in columns)
        stretches += map(Stretch, *ends, cut.lo.tolist(), cut.hi.tolist())
        relayed += np.isin(of.leg[cut.stream], (2, 3)).tolist()
    return stretches, relayed


@given(programs())
def test_of_a_program(prog: Program) -> None:
    """What is relayed leaves the destination's side of its sender, and is no longer added to anything."""
    are_alike(prog.plan, prog.legs.lines, *slices_of(prog))


@pytest.mark.parametrize("name", PROGRAMS)
def test_of_programs_of_all_kinds(name: str) -> None:
    prog = PROGRAMS[name]
    are_alike(prog.plan, prog.legs.lines, *slices_of(prog))


FEW, MANY = Mesh(x=2), Mesh(y=3, ranks=(1, 2, 3))
SIZES = {"a": 5, "b": 7, "c": 5, "d": 5, "e": 7, "f": 1}


def whole(mesh: Mesh) -> dict[str, Layout]:
    return {name: Layout((n,), mesh, "n", dtype="int8") for name, n in SIZES.items()}


MIXED = plan(whole(FEW), whole(MANY)).lines
"""Blocks of several rows, rows of several tensors, which may be cut anywhere."""


@st.composite
def stretches(draw: st.DrawFn) -> Stretch:
    block = draw(st.integers(0, len(MIXED.nbytes) - 1))
    nbytes = int(MIXED.nbytes[block])
    lo = draw(st.integers(0, nbytes - 1))
    return Stretch(block, 0, 3, lo, draw(st.integers(lo + 1, nbytes)))


@given(st.lists(stretches(), max_size=6))
def test_of_any_bytes(some: list[Stretch]) -> None:
    """The end of a tensor, whole ones, the beginning of one; the end of a row, whole rows, the beginning of one."""
    p = plan(whole(FEW), whole(MANY))
    assert max(np.diff(p.lines.row_first)) > 1 and max(len(batch.names) for batch in p.batches) > 2
    are_alike(p, p.lines, some, [False] * len(some))


def test_relays_where_shards_overlap() -> None:
    """A relay's position is in the destination's mesh, which has fewer ranks than the source's here."""
    parts = tuple(from_ranges([(0, n)]) for n in (6, 2, 4, 3))
    src = Layout((6, 2), Mesh(a=8, ranks=range(1, 9)), "n h")
    p = plan(src, Layout((6, 2), Mesh(x=4, ranks=range(5, 9)), {"x": Table(0, parts)}))
    some, relayed = [], []
    for block, nbytes in enumerate(p.lines.nbytes.tolist()):
        first, *others = p.lines.asked_by(block)
        for sender, receiver in ((8, first), *((first, other) for other in others)):
            some.append(Stretch(block, sender, receiver, 0, nbytes))
            relayed.append(sender == first)
    assert 0 < sum(relayed) < len(relayed)
    are_alike(p, p.lines, some, relayed)


def test_strangers(fails) -> None:
    """A rank that does not hold its side has no place there."""
    p = plan(whole(FEW), whole(MANY))
    for sender, receiver, mesh in ((7, 3, FEW), (0, 7, MANY)):
        one = Stretch(0, sender, receiver, 0, 1)
        what = f"rank 7 is not in {mesh}; use one of its ranks, {', '.join(map(str, mesh.ranks))}"
        fails(lambda one=one: spelled(p, p.lines, [one], [False]), MeshError, what)
