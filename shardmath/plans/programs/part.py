"""Part: all that one rank does of a plan or a program, as a value; a backend binds it to a wire.

1. A part is made of the plan alone, without processes. What ranks have to agree on first is two
   things about all of them: the most peers that any has, and whether some rank's addends would come
   out of order unless one goes after the other.
2. `make_parts` makes those of all ranks, and so does what the ranks' votes do.
3. Cells of a local tensor that are not the tensor's own (padding, or another tensor's share of a
   fused buffer) are in no box.

>>> from shardmath import Layout, Mesh, plan
>>> mesh = Mesh(tp=2)
>>> first, second = make_parts(plan(Layout((4,), mesh, "(tp n)"), Layout((4,), mesh, "n")))
>>> [len(one.sends) for one in first.rounds], first.rounds[0].sends[0].nbytes
([1], 8)
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from shardmath.layouts.algebra.runs import Runs
from shardmath.layouts.holdings import Windows
from shardmath.layouts.layout import Layout
from shardmath.plans.adjoint import Transposed
from shardmath.plans.plan import Movable, Plan, Transfer
from shardmath.plans.programs.cutting import Pace, cut_transfers, most_peers, set_pace
from shardmath.plans.programs.messages import Round, gather_rounds, keeps_fold_order
from shardmath.plans.programs.program import Program

__all__ = [
    "INFLIGHT_BYTES",
    "CellWork",
    "Outline",
    "RankProgram",
    "LocalTensor",
    "make_parts",
    "outline_part",
    "own_boxes",
    "plan_of",
    "stored_on",
]

INFLIGHT_BYTES = 1 << 30
"""Staging that a rank may use for a plan where nothing is said."""

Slices = tuple[slice, ...]


class LocalTensor(NamedTuple):
    """What a rank stores under a local name: of which tensor, and by which layout."""

    tensor: str
    layout: Layout


class CellWork(NamedTuple):
    """Boxes of the local tensor `key` that are all filled with `value`, or all divided by it."""

    key: str
    boxes: tuple[Slices, ...]
    value: complex


@dataclass(frozen=True, slots=True)
class RankProgram:
    """All that one rank does, in order: fill, then the rounds, then divide.

    `sources` and `destinations` are what it stores by local name. `operations` are pairs (tensor,
    operation) that it computes: folds, "fill" and "divide". `keeps_order`: whether the addends of
    each element come in their order. `pace` is that at which a plan was cut.
    """

    plan: Plan | Transposed
    rank: int
    sources: Mapping[str, LocalTensor]
    destinations: Mapping[str, LocalTensor]
    rounds: tuple[Round, ...]
    fills: tuple[CellWork, ...]
    divisions: tuple[CellWork, ...]
    operations: frozenset[tuple[str, str]]
    keeps_order: bool
    pace: Pace | None = None

    @property
    def steps(self) -> int:
        """How many steps there are: filling, the rounds, dividing."""
        return len(self.rounds) + 2

    def list_torn(self, begun: int | None) -> tuple[str, ...]:
        """Local names of destinations that may be neither old nor new once so many steps have begun.

        More than all have when all is done. None: any may be under way, whatever comes in them.
        """
        filled = {work.key for work in self.fills}
        divided = {work.key for work in self.divisions}
        came = [_list_written(one) for one in self.rounds]
        steps = [filled, *came, divided]
        if begun is None:
            return tuple(sorted(set().union(*steps)))
        before, after = steps[:begun], steps[max(begun - 1, 0) :]
        return tuple(sorted(set().union(*before) & set().union(*after)))


def _list_written(one: Round) -> set[str]:
    """Local names of the destinations that the round writes to."""
    return {piece.dst_tensor for m in one.arriving for piece in m.pieces}


def plan_of(plan: Plan | Transposed | Program) -> Plan | Transposed:
    """The plan itself, or that which the program carries out."""
    return plan.plan if isinstance(plan, Program) else plan


def stored_on(side: Mapping[str, Windows], rank: int) -> dict[str, LocalTensor]:
    """What the rank stores of this side of a plan, by local name."""
    found: dict[str, LocalTensor] = {}
    for tensor, windows in side.items():
        for local, layout in windows.locals(tensor, rank):
            found[local] = LocalTensor(tensor, layout)
    return found


def own_boxes(runs: tuple[Runs, ...]) -> tuple[Slices, ...]:
    """The local positions that runs cover, as boxes; () once for a scalar.

    >>> own_boxes((Runs(((0, 0, 2), (2, 9, 1)), 4),))
    ((slice(0, 3, None),),)
    """
    slices = map(_join_slices, runs)
    return tuple(itertools.product(*slices))


def _join_slices(runs: Runs) -> list[slice]:
    """Local positions that segments cover, joined where they touch."""
    joined: list[slice] = []
    for start, _, size in runs.segments:
        end = start + size
        if joined and joined[-1].stop == start:
            start = joined.pop().start
        joined.append(slice(start, end))
    return joined


@dataclass(frozen=True, slots=True)
class Outline:
    """A rank's part before ranks have agreed on its pace.

    `pieces` are all that it sends, keeps and receives. A plan's are still to be cut, and `peers` is
    the most ranks that it sends to, or receives from. A program's are in `rounds`, and set no pace.
    """

    given: Plan | Transposed | Program
    rank: int
    pieces: tuple[Transfer, ...]
    peers: int = 0
    rounds: tuple[Round, ...] = ()

    @property
    def operations(self) -> frozenset[tuple[str, str]]:
        """The pairs (tensor, operation) that the rank computes: folds, "fill" and "divide"."""
        plan = self.given
        found = set()
        held = stored_on(plan.dst, self.rank)
        for tensor, _ in held.values():
            if plan.fill(tensor) is not None:
                found.add((tensor, "fill"))
            if plan.divisor(tensor) != 1:
                found.add((tensor, "divide"))
        for t in self.pieces:
            if t.dst_rank == self.rank and t.op != "copy":
                found.add((t.tensor, t.op))
        return frozenset(found)

    def part(
        self, *, peers: int, max_inflight_bytes: int = INFLIGHT_BYTES, by_addend: bool = False
    ) -> RankProgram:
        """What the rank does.

        `peers` is the largest of any rank. With `by_addend` one addend goes after the other, which
        a plan needs where otherwise some rank's part does not keep their order. The limit is a
        plan's; a program has its own. Raises ExchangeError for one without room for an element.
        """
        rounds = self.rounds
        pace = None
        if not isinstance(self.given, Program):
            pace = set_pace(
                self.given.ranks,
                peers=peers,
                max_inflight_bytes=max_inflight_bytes,
                by_addend=by_addend,
            )
            messages = cut_transfers(self.pieces, pace)
            rounds = gather_rounds(messages, self.rank)
        plan = plan_of(self.given)
        sources = stored_on(plan.src, self.rank)
        destinations = stored_on(plan.dst, self.rank)
        fills = _list_fills(plan, self.rank, destinations)
        divisions = _list_divisions(plan, self.rank, destinations)
        return RankProgram(
            plan=plan,
            rank=self.rank,
            sources=sources,
            destinations=destinations,
            rounds=rounds,
            fills=tuple(fills),
            divisions=tuple(divisions),
            operations=self.operations,
            keeps_order=keeps_fold_order(rounds),
            pace=pace,
        )


def outline_part(plan: Plan | Transposed | Program, rank: int) -> Outline:
    """What the rank does of the plan or program, but for its pace."""
    if isinstance(plan, Program):
        rounds = plan.for_rank(rank)
        pieces = tuple(_list_pieces(rounds))
        return Outline(plan, rank, pieces, rounds=rounds)
    # What stays on the rank is on either of its lists, and is taken from the first.
    transfers = list(plan.transfers(src=rank))
    for t in plan.transfers(dst=rank):
        if t.src_rank != rank:
            transfers.append(t)
    return Outline(plan, rank, tuple(transfers), most_peers(transfers))


def _list_pieces(rounds: Iterable[Round]) -> Iterator[Transfer]:
    """All that is in these rounds."""
    for one in rounds:
        for m in one.messages:
            yield from m.pieces


def make_parts(
    plan: Plan | Transposed | Program, *, max_inflight_bytes: int = INFLIGHT_BYTES
) -> tuple[RankProgram, ...]:
    """The parts of all ranks, as they would agree on them."""
    outlines = [outline_part(plan, rank) for rank in plan.ranks]
    peers = max((one.peers for one in outlines), default=0)
    # One addend after the other takes more rounds, so only where their order asks for it.
    for by_addend in (False, True):
        made = tuple(
            one.part(peers=peers, max_inflight_bytes=max_inflight_bytes, by_addend=by_addend)
            for one in outlines
        )
        if all(one.keeps_order for one in made):
            break
    return made


def _list_fills(plan: Movable, rank: int, stored: Mapping[str, LocalTensor]) -> Iterator[CellWork]:
    """Destinations that are folded into start at the identity of their reduction."""
    for key, (tensor, layout) in stored.items():
        value = plan.fill(tensor)
        if value is not None:
            boxes = own_boxes(layout.runs(rank))
            yield CellWork(key, boxes, value)


def _list_divisions(
    plan: Movable, rank: int, stored: Mapping[str, LocalTensor]
) -> Iterator[CellWork]:
    """Averages are sums until all has arrived, and then divided."""
    for key, (tensor, layout) in stored.items():
        divisor = plan.divisor(tensor)
        if divisor != 1:
            boxes = own_boxes(layout.runs(rank))
            yield CellWork(key, boxes, divisor)
