"""Part: everything that one rank does in a plan or a program, as a value; a backend carries it out.

1. A part is made from the plan alone, without processes. Ranks first agree on two facts about
   all of them: the most peers that any rank has, and whether addends have to go one after the
   other because some rank would otherwise receive them out of order.
2. `make_parts` makes the parts of all ranks, as the ranks' votes would decide.
3. Cells of a local tensor that do not belong to it (padding, or another tensor's share of a
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
from shardmath.plans.plan import Plan
from shardmath.plans.programs.cutting import Pace, cut_transfers, most_peers, set_pace
from shardmath.plans.programs.messages import Round, gather_rounds, keeps_fold_order
from shardmath.plans.programs.program import Program
from shardmath.plans.reduction import Reduction
from shardmath.plans.transfers import Transfer

__all__ = [
    "INFLIGHT_BYTES",
    "CellWork",
    "Outline",
    "RankProgram",
    "LocalTensor",
    "layouts_on",
    "make_parts",
    "outline_part",
    "own_boxes",
    "plan_of",
    "stored_on",
]

INFLIGHT_BYTES = 1 << 30
"""Default limit of a rank's staging for a plan."""

Slices = tuple[slice, ...]


class LocalTensor(NamedTuple):
    """A tensor that a rank stores: the name of the whole tensor to which it belongs, and its layout. The layout covers
    the whole tensor or one window (part) of it."""

    tensor: str
    layout: Layout


class CellWork(NamedTuple):
    """Work of a rank on the slices `boxes` of its local tensor named `key`. If the work is in the list
    `RankProgram.fills`, the rank sets these elements to `value`; if in `RankProgram.divisions`, it divides them by
    `value`."""

    key: str
    boxes: tuple[Slices, ...]
    value: complex


@dataclass(frozen=True, slots=True)
class RankProgram:
    """Everything that one rank does when a plan runs, in order: fill tensors, then the rounds, then divide averages.

    `sources` and `destinations` are the tensors that it stores, by local name. `operations` are pairs (tensor,
    operation) that it computes: folds, "fill" and "divide". `keeps_order` says whether the addends of
    each element arrive in their order. `pace` is the pace at which a plan was cut, None for a program.
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
        """The number of steps that the rank does: filling, each round, and dividing."""
        return len(self.rounds) + 2

    def list_torn(self, begun: int | None) -> tuple[str, ...]:
        """Return the local names of destination tensors that are possibly half written when the rank stops after
        `begun` of its steps have begun. If `begun` is None, the rank can have stopped at any step.

        `begun` is more than `steps` when everything is done.
        """
        filled = {work.key for work in self.fills}
        divided = {work.key for work in self.divisions}
        written = [_list_written(posted) for posted in self.rounds]
        steps = [filled, *written, divided]
        if begun is None:
            return tuple(sorted(set().union(*steps)))
        # The last step that has begun may have written a part: it counts as begun and as yet to be done.
        begun_steps, remaining = steps[:begun], steps[max(begun - 1, 0) :]
        return tuple(sorted(set().union(*begun_steps) & set().union(*remaining)))


def _list_written(posted: Round) -> set[str]:
    """Local names of the destinations to which the round writes."""
    return {piece.dst_tensor for m in posted.arriving for piece in m.pieces}


def plan_of(plan: Plan | Transposed | Program) -> Plan | Transposed:
    """Return the plan of a Program, or the given plan itself."""
    return plan.plan if isinstance(plan, Program) else plan


def stored_on(side: Mapping[str, Windows], rank: int) -> dict[str, LocalTensor]:
    """Return the tensors that `rank` stores on `side`, the source or destination of a plan. Keys are local names: a
    tensor's name, or name[i] for its part under layout i if it has several layouts."""
    return {local: LocalTensor(name, layout) for local, name, layout in _list_stored(side, rank)}


def layouts_on(side: Mapping[str, Windows], rank: int) -> dict[str, Layout]:
    """Return the layout of each tensor that `rank` stores on `side`, by local name, as in `stored_on`."""
    return {local: layout for local, _, layout in _list_stored(side, rank)}


def _list_stored(side: Mapping[str, Windows], rank: int) -> Iterator[tuple[str, str, Layout]]:
    """(local name, tensor's name, layout) of each tensor that the rank stores on the side."""
    # Tens of thousands of tensors have few windows, which are looked at once; kept, no other gets the id of one.
    seen: dict[int, tuple[Windows, bool, bool]] = {}
    for tensor, windows in side.items():
        if id(windows) not in seen:
            is_here = any(rank in layout.mesh for layout in windows)
            seen[id(windows)] = windows, is_here, windows.is_single
        _, is_here, is_single = seen[id(windows)]
        if is_here and is_single:
            yield tensor, tensor, windows[0]
        elif is_here:
            for local, layout in windows.locals(tensor, rank):
                yield local, tensor, layout


def own_boxes(runs: tuple[Runs, ...]) -> tuple[Slices, ...]:
    """Return the boxes (tuples of slices) of a local tensor that hold elements and not padding. `runs` tells, for each
    dimension, at which local indices there are elements.

    A scalar has the box ().

    >>> own_boxes((Runs(((0, 0, 2), (2, 9, 1)), 4),))
    ((slice(0, 3, None),),)
    """
    slices = map(_join_slices, runs)
    return tuple(itertools.product(*slices))


def _join_slices(runs: Runs) -> list[slice]:
    """The local positions that segments cover, as slices; adjacent segments are one slice."""
    joined: list[slice] = []
    for start, _, size in runs.segments:
        end = start + size
        if joined and joined[-1].stop == start:
            start = joined.pop().start
        joined.append(slice(start, end))
    return joined


@dataclass(frozen=True, slots=True)
class Outline:
    """All transfers that one rank sends, keeps and receives and, for a program, the rounds of messages that carry them.

    A plan's `pieces` are not cut yet, and `peers` is the most ranks to which the rank sends, or from which it receives.
    A program's pieces are already in `rounds`.
    """

    given: Plan | Transposed | Program
    rank: int
    pieces: tuple[Transfer, ...]
    peers: int = 0
    rounds: tuple[Round, ...] = ()

    @property
    def operations(self) -> frozenset[tuple[str, str]]:
        """The pairs (tensor name, operation) that the rank computes: reductions, "fill" and "divide"."""
        computed = set()
        for one in _list_reduced(plan_of(self.given), self.rank):
            if one.rule.fill is not None:
                computed.add((one.tensor, "fill"))
            if one.rule.divisor != 1:
                computed.add((one.tensor, "divide"))
        for t in self.pieces:
            if t.dst_rank == self.rank and t.op != "copy":
                computed.add((t.tensor, t.op))
        return frozenset(computed)

    def part(
        self, *, peers: int, max_inflight_bytes: int = INFLIGHT_BYTES, by_addend: bool = False
    ) -> RankProgram:
        """Make this rank's program: the messages that it sends and receives, in order. Transfers are cut into messages
        so that no rank has more than `max_inflight_bytes` in flight; `peers` is the largest number of peers that any
        rank has.

        With `by_addend`, partial values of a sum are sent one after the other. A plan needs it if
        otherwise some rank's part does not keep the order of addends. The limit applies to a plan; a program has its
        own. Raises ExchangeError if the limit has no room for a message.
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
        reduced = _list_reduced(plan, self.rank)
        fills = _list_fills(reduced, self.rank)
        divisions = _list_divisions(reduced, self.rank)
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
    """List the transfers of `rank` in the plan or program as an Outline, from which its RankProgram is made."""
    if isinstance(plan, Program):
        rounds = plan.for_rank(rank)
        pieces = tuple(_list_pieces(rounds))
        return Outline(plan, rank, pieces, rounds=rounds)
    # Transfers that stay on the rank are in both of its lists, and are taken from the first.
    transfers = list(plan.transfers(src=rank))
    for t in plan.transfers(dst=rank):
        if t.src_rank != rank:
            transfers.append(t)
    return Outline(plan, rank, tuple(transfers), most_peers(transfers))


def _list_pieces(rounds: Iterable[Round]) -> Iterator[Transfer]:
    """All pieces of these rounds."""
    for posted in rounds:
        for m in posted.messages:
            yield from m.pieces


def make_parts(
    plan: Plan | Transposed | Program, *, max_inflight_bytes: int = INFLIGHT_BYTES
) -> tuple[RankProgram, ...]:
    """Make the RankProgram of every rank, by ascending rank, for a plan or program. For a plan, messages are cut so
    that no rank has more than `max_inflight_bytes` in flight."""
    outlines = [outline_part(plan, rank) for rank in plan.ranks]
    peers = max((outline.peers for outline in outlines), default=0)
    # One addend after the other takes more rounds, so it is done only if the order requires it.
    for by_addend in (False, True):
        parts = tuple(
            outline.part(peers=peers, max_inflight_bytes=max_inflight_bytes, by_addend=by_addend)
            for outline in outlines
        )
        if all(part.keeps_order for part in parts):
            break
    return parts


class _Reduced(NamedTuple):
    """A destination tensor of a rank, named `key` there, that is filled or divided by the reduction `rule`."""

    key: str
    tensor: str
    layout: Layout
    rule: Reduction


def _list_reduced(plan: Plan | Transposed, rank: int) -> list[_Reduced]:
    """The rank's destination tensors that are filled or divided: few plans have any."""
    found = []
    for tensor, windows in plan.dst.items():
        rule = plan.rules[tensor]
        if rule.fill is not None or rule.divisor != 1:
            for key, layout in windows.locals(tensor, rank):
                found.append(_Reduced(key, tensor, layout, rule))
    return found


def _list_fills(reduced: Iterable[_Reduced], rank: int) -> Iterator[CellWork]:
    """The fills: destinations of a fold start at the identity of their reduction."""
    for one in reduced:
        if one.rule.fill is not None:
            yield CellWork(one.key, own_boxes(one.layout.runs(rank)), one.rule.fill)


def _list_divisions(reduced: Iterable[_Reduced], rank: int) -> Iterator[CellWork]:
    """The divisions: averages are sums until everything has arrived, and then divided."""
    for one in reduced:
        if one.rule.divisor != 1:
            yield CellWork(one.key, own_boxes(one.layout.runs(rank)), one.rule.divisor)
