"""Adjoint: the transposed plan.

1. Every transfer with its ends swapped: <plan(x), y> = <x, adjoint(plan)(y)> for arbitrary local arrays x and y.
2. Replicate at an end turns into Partial(sum) and back: what all receive, all contribute to. Axes along which addends
   pass through stay Partial.
3. The adjoint of the adjoint is the plan.

>>> from shardmath.mesh import Mesh
>>> from shardmath.plan import plan
>>> mesh = Mesh(tp=2)
>>> gather = plan(Layout((4,), mesh, "(tp n)"), Layout((4,), mesh, "n"))
>>> adjoint(gather).src[""][0].text, adjoint(gather).dst[""][0].text
('n {sum: tp}', '(tp n)')
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from shardmath.digest import digest
from shardmath.errors import PlanError
from shardmath.layout import Layout, repartialed
from shardmath.partition import overlapping
from shardmath.plan import Plan, Transfer
from shardmath.reduction import Reduction, check_arithmetic, identity_of
from shardmath.store import local_name

__all__ = ["Flip", "adjoint", "swapped"]


def adjoint(p: Plan) -> Plan:
    """The transposed plan: <p(x), y> = <x, adjoint(p)(y)> for arbitrary local arrays x and y.

    Raises PlanError where the plan is not linear: a reduction by max, min or product; and where the dtype has no sum.
    """
    if not isinstance(p, Plan):
        raise PlanError(f"{p!r} is not a Plan; pass what plan(src, dst) returns")
    if p.forward is not None:
        return p.forward
    for name, rule in p.rules.items():
        if (rule.folded and rule.op in ("max", "min", "product")) or (rule.chosen and rule.op == "product"):
            what = f"tensor {name!r} is reduced by {rule.op}, which is not linear"
            raise PlanError(f"{what}; only copies, sum and avg have an adjoint")
    src = {name: _dual(windows, p.rules[name], source=False) for name, windows in p.dst.items()}
    dst = {name: _dual(windows, p.rules[name], source=True) for name, windows in p.src.items()}
    rules = {n: replace(rule, fill=identity_of("sum", p.src[n][0].dtype)) for n, rule in p.rules.items()}
    name = digest(("adjoint", p.digest))
    turned = replace(p, src=src, dst=dst, rules=rules, src_ranks=p.dst_ranks, dst_ranks=p.src_ranks)
    return replace(turned, digest=name, forward=p, flip=flip_of(p))


def everybody(layout: Layout, rule: Reduction) -> tuple[str, ...]:
    """The axes of a destination along which all receive the same."""
    through = (name for _, axes in rule.matched for name in axes)
    out = {*rule.chosen, *through, *(name for dim in layout.dims for name in dim.axes)}
    return tuple(name for name in layout.mesh.shape if name not in out)


def _dual(windows: tuple[Layout, ...], rule: Reduction, *, source: bool) -> tuple[Layout, ...]:
    """One side of the adjoint: a side's holdings with Replicate and Partial swapped."""
    through = [name for pair in rule.matched for name in pair[not source]]
    axes = [{*(layout.free_axes if source else everybody(layout, rule)), *through} for layout in windows]
    return tuple(repartialed(layout, names) for layout, names in zip(windows, axes, strict=True))


def swapped(t: Transfer) -> Transfer:
    """The transfer with its ends swapped; operation and addend as they were."""
    ends = t._replace(src_rank=t.dst_rank, dst_rank=t.src_rank, src_tensor=t.dst_tensor, dst_tensor=t.src_tensor)
    return ends._replace(src_slices=t.dst_slices, dst_slices=t.src_slices)


@dataclass(frozen=True, slots=True)
class Flip:
    """The destination replicas of a plan, which are the addends of its adjoint: operation and place by local tensor."""

    entries: Mapping[str, tuple[str, Mapping[int, int]]]

    def entry(self, local: str, rank: int) -> tuple[str, int]:
        """The operation and the addend by which this rank's tensor enters the adjoint."""
        op, place = self.entries[local]
        return op, place[rank]

    def __call__(self, t: Transfer) -> Transfer:
        """The adjoint's transfer for one of the plan's."""
        op, addend = self.entry(t.dst_tensor, t.dst_rank)
        return swapped(t)._replace(op=op, addend=addend)


def flip_of(p: Plan) -> Flip:
    """How the transfers of `p` enter its adjoint: window by window, by ascending rank."""
    entries: dict[str, tuple[str, Mapping[int, int]]] = {}
    for name, windows in p.dst.items():
        op = "sum" if _replicated(windows, p.rules[name]) else "copy"
        if op == "sum":
            check_arithmetic("sum", windows[0].dtype)
        before = 0
        for j, layout in enumerate(windows):
            places = range(before, before + layout.mesh.size) if op == "sum" else [0] * layout.mesh.size
            entries[local_name(name, j, len(windows))] = op, dict(zip(sorted(layout.mesh.ranks), places, strict=True))
            before += layout.mesh.size
    return Flip(entries)


def _replicated(windows: tuple[Layout, ...], rule: Reduction) -> bool:
    """Whether several destination cells may hold one element."""
    axes = (layout.mesh.axis_size(a) for layout in windows for a in everybody(layout, rule))
    overlaps = (overlapping(dim) for layout in windows for dim in layout.dims)
    return len(windows) > 1 or any(n > 1 for n in axes) or any(overlaps)
