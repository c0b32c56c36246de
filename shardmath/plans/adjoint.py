"""Adjoint: the transposed plan.

1. Every transfer with its ends swapped: <plan(x), y> = <x, adjoint(plan)(y)> for arbitrary local arrays x and y.
2. Replicate at an end turns into Partial(sum) and back: ranks that all receive an element all
   contribute to it. Axes along which addends pass through stay Partial.
3. The adjoint of the adjoint is the plan itself.
4. Its destination is the plan's source, which need not be whole: `in_part` names such tensors.

>>> from shardmath.layouts.algebra.mesh import Mesh
>>> from shardmath.plans.plan import plan
>>> mesh = Mesh(tp=2)
>>> gather = plan(Layout((4,), mesh, "(tp n)"), Layout((4,), mesh, "n"))
>>> adjoint(gather).src[""][0].text, adjoint(gather).dst[""][0].text
('n {sum: tp}', '(tp n)')
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias, overload

from shardmath.base.digest import digest
from shardmath.base.drawn import html, svg
from shardmath.base.errors import PlanError
from shardmath.base.operations import OPERATIONS
from shardmath.base.public import public
from shardmath.base.views import Unchanging
from shardmath.layouts.algebra.partition import overlapping
from shardmath.layouts.edits import repartialed
from shardmath.layouts.holdings import Windows, count_stored, label
from shardmath.layouts.layout import Layout
from shardmath.plans.flows.topology import Topology
from shardmath.plans.plan import Plan, describe, rule_of
from shardmath.plans.reduction import Reduction, check_arithmetic, find_reduction, identity_of
from shardmath.plans.table import TransferTable, swap_columns
from shardmath.plans.transfers import Transfer
from shardmath.plans.uncovered import find_not_whole

__all__ = ["Flip", "Transposed", "adjoint", "flip_digest", "flip_of", "swap_ends"]


def swap_ends(t: Transfer) -> Transfer:
    """Return the transfer `t` with source and destination swapped. Its operation, such as "sum", and `addend`, its
    place in the order of summation, stay the same."""
    return t._replace(
        src_rank=t.dst_rank,
        dst_rank=t.src_rank,
        src_tensor=t.dst_tensor,
        dst_tensor=t.src_tensor,
        src_slices=t.dst_slices,
        dst_slices=t.src_slices,
    )


Entry: TypeAlias = tuple[str, Mapping[int, int]]
"""An operation, and the addend of each rank."""


@dataclass(frozen=True, slots=True)
class Flip:
    """A callable that turns a transfer of a plan into a transfer of the adjoint (backward) plan: it swaps source and
    destination. The operation becomes "sum" where the adjoint adds values of several ranks, otherwise "copy"; `addend`
    becomes the index of the transfer's value in the order in which these are added, 0 for a copy."""

    entries: Mapping[str, Entry]

    def entry(self, local: str, rank: int) -> tuple[str, int]:
        """Return (operation, addend) for the adjoint's transfers from the tensor `local` on `rank`: "copy" or "sum",
        and the place in the order of summation. The adjoint runs backward, so that `local` is a tensor into which the
        original plan writes."""
        op, addends = self.entries[local]
        return op, addends[rank]

    def __call__(self, t: Transfer) -> Transfer:
        """The adjoint's transfer for one of the plan's."""
        op, addend = self.entry(t.dst_tensor, t.dst_rank)
        return swap_ends(t)._replace(op=op, addend=addend)


@public
@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Transposed(Unchanging):
    """The adjoint of a plan, made by `adjoint`: the transfers of the plan `forward` with their ends swapped.

    `src` and `dst` are the transposed layouts of the plan's `dst` and `src`, `rules` their reductions;
    `flip` reverses the plan's transfers. Everything else is as in a Plan.
    """

    forward: Plan
    src: Mapping[str, Windows]
    dst: Mapping[str, Windows]
    rules: Mapping[str, Reduction]
    flip: Flip
    in_part: tuple[str, ...]
    digest: str

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Transposed) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return describe("adjoint plan", self)

    def svg(self, *, topology: Topology | None = None, tensor: str | None = None) -> str:
        """Draw the adjoint as an SVG document: a tensor's layouts before and after the move, and the bytes that each
        rank sends to each other rank. `tensor` is the first by default; `topology` adds gaps between nodes and a color
        for bytes that cross them."""
        return svg(self, topology=topology, tensor=tensor)

    def _repr_html_(self) -> str:
        return html(self)

    @property
    def is_tree(self) -> bool:
        """True for a plan between mappings from names to layouts, False for a plan of one tensor without a name."""
        return self.forward.is_tree

    @property
    def topology(self) -> Topology | None:
        """The topology for which the plan was made; None if none was given."""
        return self.forward.topology

    @property
    def src_ranks(self) -> tuple[int, ...]:
        """The ranks of the adjoint's source side, ascending."""
        return self.forward.dst_ranks

    @property
    def dst_ranks(self) -> tuple[int, ...]:
        """The ranks of the adjoint's destination side, ascending."""
        return self.forward.src_ranks

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of source and destination together, ascending, each once."""
        return self.forward.ranks

    def fill(self, name: str) -> complex | None:
        """Return the value that fills the tensor `name` at its destination before bytes arrive; None for no fill.

        Raises PlanError for a tensor that the plan does not have.
        """
        return rule_of(self.rules, name).fill

    def divisor(self, name: str) -> int:
        """Return the divisor that is applied to the reduced tensor `name`: the number of its partial values for an
        average, otherwise 1."""
        return rule_of(self.rules, name).divisor

    def transfers(self, src: int | None = None, dst: int | None = None) -> Iterator[Transfer]:
        """Yield the transfers. If `src` is given, only those from that rank are yielded; if `dst` is given, only those
        to that rank."""
        return map(self.flip, self.forward.transfers(src=dst, dst=src))

    def table(self, src: int | None = None, dst: int | None = None) -> TransferTable:
        """Return what `transfers` yields for the same arguments, in the same order, as a TransferTable: numpy columns,
        from which a custom transport posts its descriptors."""
        return swap_columns(self.forward.table(src=dst, dst=src), self.flip.entry)

    def sent_bytes(self) -> dict[int, int]:
        """Return, by rank, the number of bytes that each rank of both sides sends to other ranks."""
        return self.forward.received_bytes()

    def received_bytes(self) -> dict[int, int]:
        """Return, by rank, the number of bytes that each rank of both sides receives from other ranks."""
        return self.forward.sent_bytes()

    def shadow_bytes(self) -> dict[int, int]:
        """Return, by rank, the extra memory in bytes for a move with `commit="all"`. Such a move receives into copies
        of the destination tensors, so that all ranks or none get the new values."""
        return dict.fromkeys(self.ranks, 0) | count_stored(self.dst)


@overload
def adjoint(plan: Plan) -> Transposed: ...
@overload
def adjoint(plan: Transposed) -> Plan: ...
def adjoint(plan: Plan | Transposed) -> Plan | Transposed:
    """Return the adjoint of `plan`, which moves gradients backward: <plan(x), y> = <x, adjoint(plan)(y)> for all x and
    y, the local arrays of all ranks.

    The adjoint of a transposed plan is the plan itself. Raises PlanError if the plan is not
    linear (it reduces by max, min or product), if the dtype has no sum, or if addends of one
    source window pass through to one destination window and are reduced for another.
    """
    if isinstance(plan, Transposed):
        return plan.forward
    if not isinstance(plan, Plan):
        raise PlanError(f"{plan!r} is not a Plan; pass what plan(src, dst) returns")
    duals = _make_duals(plan)
    src = {name: dual.src for name, dual in duals.items()}
    dst = {name: dual.dst for name, dual in duals.items()}
    rules = {name: dual.rule for name, dual in duals.items()}
    return Transposed(
        forward=plan,
        src=src,
        dst=dst,
        rules=rules,
        flip=flip_of(plan),
        in_part=find_not_whole(dst),
        digest=flip_digest(plan.digest),
    )


def flip_digest(forward: str) -> str:
    """Compute the digest of a plan's adjoint from `forward`, the digest of the plan."""
    return digest(("adjoint", forward))


_Identities: TypeAlias = tuple[int, int]
"""The ids of two objects of a tensor, which tensors of the same windows share."""


class _Dual(NamedTuple):
    """A tensor's transposed sides, and their reduction."""

    src: Windows
    dst: Windows
    rule: Reduction


def _make_duals(plan: Plan) -> dict[str, _Dual]:
    """The duals by name; tensors of the same windows share one."""
    known: dict[_Identities, _Dual] = {}
    duals = {}
    for name, src in plan.src.items():
        dst = plan.dst[name]
        key = id(src), id(dst)
        if key not in known:
            known[key] = _make_dual(name, src, dst)
        duals[name] = known[key]
    return duals


def _make_dual(name: str, src: Windows, dst: Windows) -> _Dual:
    """The dual of a tensor: each window is transposed by its own reductions, which name its mesh's axes."""
    by_source = []
    for a in src:
        rules = [find_reduction(a, b) for b in dst]
        _check_linear(name, rules)
        _check_through(name, a, dst, rules)
        by_source.append(rules[0])  # addends of `a` pass through alike in all of them
    # `plan` checks that all source windows reduce along the same axes of `b`, so the first stands for all.
    by_destination = [find_reduction(src[0], b) for b in dst]
    sent = dst.named_alike(map(_make_source, dst, by_destination))
    received = src.named_alike(map(_make_destination, src, by_source))
    fill = identity_of("sum", src[0].dtype)
    rule = replace(by_source[0], fill=fill)
    return _Dual(sent, received, rule)


def _make_source(b: Layout, rule: Reduction) -> Layout:
    """A destination window as a source of the adjoint: Partial along axes on which all receive the same, and along
    those on which addends pass through."""
    passing = _find_passing(rule, side=1)
    return repartialed(b, passing.union(everybody(b, rule)))


def _make_destination(a: Layout, rule: Reduction) -> Layout:
    """A source window as a destination of the adjoint: Partial along its free axes, so that any one rank receives."""
    passing_source_axes = _find_passing(rule, 0)
    return repartialed(a, passing_source_axes.union(a.free_axes))


def _find_passing(rule: Reduction, side: int) -> set[str]:
    """The axes of the source (0) or of the destination (1) along which addends pass through."""
    return {axis for pair in rule.matched for axis in pair[side]}


def _check_linear(name: str, rules: Iterable[Reduction]) -> None:
    """Raise PlanError if a reduction is by max, min or product."""
    for rule in rules:
        if rule.op is None or not (rule.folded or rule.chosen):
            continue
        if not OPERATIONS[rule.op].linear:
            raise PlanError(
                f"{label(name)} is reduced by {rule.op}, which is not linear and has no adjoint; "
                f"plan layouts that are Partial by sum or avg, or not Partial"
            )


def _check_through(name: str, a: Layout, dst: Sequence[Layout], rules: Sequence[Reduction]) -> None:
    """Raise PlanError unless addends of `a` pass through along the same axes to all of `dst`.

    In the adjoint `a` is one layout, with the same Partial axes for all of its elements.
    """
    passing = _find_passing(rules[0], side=0)
    for b, rule in zip(dst, rules, strict=True):
        if _find_passing(rule, side=0) != passing:
            raise PlanError(
                f"{label(name)}: different addends of {a} pass through to {dst[0]} and to {b}, and no "
                f"layout is Partial in both ways; make one plan per destination window, and its adjoint"
            )


def everybody(layout: Layout, rule: Reduction) -> tuple[str, ...]:
    """Return the axes of a destination `layout` along which all ranks receive the same values, given the Reduction
    `rule` of the move."""
    differ = _find_passing(rule, 1).union(rule.chosen)
    for dim in layout.dims:
        differ.update(dim.axes)
    return tuple(name for name in layout.mesh.shape if name not in differ)


def flip_of(plan: Plan) -> Flip:
    """Return the Flip, a callable that turns transfers of `plan` into transfers of its adjoint (backward) plan. In the
    adjoint, the replicas of each destination tensor of `plan` are partial values to be summed."""
    known: dict[_Identities, list[Entry]] = {}
    entries: dict[str, Entry] = {}
    for name, windows in plan.dst.items():
        rule = plan.rules[name]
        key = id(windows), id(rule)
        if key not in known:
            known[key] = _list_entries(windows, rule)
        names = windows.local_names(name)
        entries |= zip(names, known[key], strict=True)
    return Flip(entries)


def _list_entries(windows: Windows, rule: Reduction) -> list[Entry]:
    """The entry of each window: its operation, and the addend of each rank. If ranks are added up, each rank of each
    window is one addend."""
    adds = len(windows) > 1 or _is_replicated(windows[0], rule)
    if not adds:
        ranks = sorted(windows[0].mesh.ranks)
        return [("copy", dict.fromkeys(ranks, 0))]
    check_arithmetic("sum", windows[0].dtype)
    entries: list[Entry] = []
    count = 0
    for layout in windows:
        ranks = sorted(layout.mesh.ranks)
        addends = {rank: i for i, rank in enumerate(ranks, count)}
        entries.append(("sum", addends))
        count += len(ranks)
    return entries


def _is_replicated(layout: Layout, rule: Reduction) -> bool:
    """Whether several destination cells may hold one element."""
    equal_axes = everybody(layout, rule)  # along these, all ranks receive the same
    if any(layout.mesh.axis_size(axis) > 1 for axis in equal_axes):
        return True
    return any(map(overlapping, layout.dims))
