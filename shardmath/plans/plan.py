"""Plan: who sends which piece of which tensor to whom, as a value.

1. `plan(src, dst)` takes two Layouts, or two mappings name -> Layout with the same names. A tuple of
   Layouts of one shape stands for a tensor that is held as several windows.
2. A Layout as a destination must ask for every element of the tensor, unless the caller says that
   it is a window (`window=True`); a tuple of Layouts need not. `Plan.in_part` names the tensors that
   the destination does not ask for whole.
3. A plan is templates, lines and cuts; `transfers` expands only the transfers that it is asked for.
   Both ends of a pair list the same transfers in the same order.
4. Copies that stay on a rank are transfers too; loads leave them out.
5. The digest and the transfers depend on what ranks hold, not on how layouts are spelled: ranks that
   agree on the digest have the same plan.
6. Functions that only read which tensors both sides hold take any `Movable`: a plan, its transpose
   (`adjoint`), or a program of it.

>>> from shardmath.layouts.algebra.mesh import Mesh
>>> from shardmath.layouts.layout import Layout
>>> mesh = Mesh(tp=2)
>>> p = plan(Layout((4, 2), mesh, "(tp n) h"), Layout((4, 2), mesh, "n (tp h)"))
>>> for t in p.transfers(src=0):
...     print(t)
0 -> 0 copy [0:2, 0:1] of [0:2, 0:1] to [0:2, 0:1], 8 B
0 -> 1 copy [0:2, 1:2] of [0:2, 1:2] to [0:2, 0:1], 8 B
"""

from __future__ import annotations

import itertools
import os
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from shardmath.base.arguments import as_integer
from shardmath.base.digest import digest
from shardmath.base.drawn import html, page, svg
from shardmath.base.errors import PlanError
from shardmath.base.memo import add_cache
from shardmath.base.public import public
from shardmath.base.text import plural, shown
from shardmath.base.views import Unchanging
from shardmath.layouts.holdings import Windows, count_stored
from shardmath.plans.balance import balance
from shardmath.plans.demands import Batch, Demands, Ranks, gather_lines
from shardmath.plans.flows.topology import Topology, checked
from shardmath.plans.groups import (
    Side,
    digest_groups,
    find_in_part,
    group_alike,
    join_groups,
    make_batches,
    pair_by_name,
)
from shardmath.plans.reduction import Reduction
from shardmath.plans.spelling import list_transfers
from shardmath.plans.stretches import (
    sum_received,
    sum_sent,
)
from shardmath.plans.table import TransferTable, make_table
from shardmath.plans.tensors import (
    Ends,
    Tensors,
    list_given,
    name_plainly,
    read_tensors,
    reread_tensors,
)
from shardmath.plans.transfers import Transfer
from shardmath.plans.uncovered import check_covered

__all__ = [
    "Movable",
    "Plan",
    "Side",
    "Transfer",
    "describe",
    "digest_of",
    "digest_without",
    "list_ranks",
    "pair_by_name",
    "plan",
    "rule_of",
]


class Movable(Protocol):
    """A move of tensors from source layouts to destination layouts: a Plan, its adjoint, or a Program made from a Plan.

    `src` and `dst` are each tensor's windows, by name ("" for two Layouts), names ascending;
    `is_tree` says whether there are names; `in_part` are the tensors, ascending, that the destination
    does not hold whole. Movables with equal digests move the same elements of the same names.
    """

    @property
    def src(self) -> Mapping[str, Windows]: ...
    @property
    def dst(self) -> Mapping[str, Windows]: ...
    @property
    def is_tree(self) -> bool: ...
    @property
    def in_part(self) -> tuple[str, ...]: ...
    @property
    def src_ranks(self) -> tuple[int, ...]: ...
    @property
    def dst_ranks(self) -> tuple[int, ...]: ...
    @property
    def ranks(self) -> tuple[int, ...]: ...
    @property
    def digest(self) -> str: ...
    def fill(self, name: str) -> complex | None: ...
    def divisor(self, name: str) -> int: ...


def describe(what: str, plan: Movable) -> str:
    """Return a one-line repr of a plan or its adjoint: its kind (`what`), tensors, ranks and digest."""
    tensors = plural(plan.src, "tensor")
    part = f", {len(plan.in_part)} of them in part" if plan.in_part else ""
    ranks = f"{len(plan.src_ranks)} -> {plural(plan.dst_ranks, 'rank')}"
    return f"<{what} of {tensors}{part}, {ranks}, {plan.digest[:12]}>"


def rule_of(rules: Mapping[str, Reduction], name: str) -> Reduction:
    """Return the Reduction of the tensor `name`. Raises PlanError for a tensor that the plan does not have."""
    rule = rules.get(name) if isinstance(name, str) else None
    if rule is None:
        some = ", ".join(map(repr, list(rules)[:8]))
        more = f" and {len(rules) - 8} more" if len(rules) > 8 else ""
        what = f"the plan has no tensor {shown(name)}"
        raise PlanError(f"{what}; give one of its tensors: {some}{more}")
    return rule


@public
@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False, repr=False)
class Plan(Unchanging):
    """All transfers that take tensors from their source layouts to their destination layouts; made by `plan`.

    `src` and `dst` map each tensor's name to its windows, in ascending order of names; a plan of two Layouts has the
    one name "". `rules` says how each tensor's Partial axes are reduced. These mappings cannot be changed.
    `in_part` lists the tensors that the destination does not hold whole. `alike` are groups of tensors that share
    their windows. `left` are ranks that have left the destination of the plan `whole` (`without`). Two plans are
    equal if they move the same elements of tensors of the same names, between the same ranks.
    """

    src: Mapping[str, Windows]
    dst: Mapping[str, Windows]
    rules: Mapping[str, Reduction]
    batches: tuple[Batch, ...]
    lines: Demands
    digest: str
    is_tree: bool
    src_ranks: tuple[int, ...]
    dst_ranks: tuple[int, ...]
    topology: Topology | None = None
    in_part: tuple[str, ...] = ()
    alike: tuple[tuple[str, ...], ...] = ()
    whole: Plan | None = None
    left: Ranks = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return describe("plan", self)

    def svg(self, *, topology: Topology | None = None, tensor: str | None = None) -> str:
        """Draw the plan as an SVG document: a tensor's layouts before and after the move, and the bytes that each rank
        sends to each other rank. `tensor` is the first by default; `topology` adds gaps between nodes and a color for
        bytes that cross them.

        `topology` is the plan's own if not given. Raises PlanError if `topology` is not a Topology, or if the plan does
        not have the tensor.
        """
        return svg(self, topology=topology, tensor=tensor)

    def html(self, path: str | os.PathLike[str], *, topology: Topology | None = None) -> None:
        """Write a page about the plan to the file `path`, for any browser: its proof, picture, cost and transfers,
        which light up and can be filtered by rank. `topology` is the plan's own if not given.

        The page needs no server and no network. Raises PlanError if the plan cannot be proved.
        """
        text = page(self, topology=topology)
        Path(path).write_text(text, encoding="utf-8")

    def _repr_html_(self) -> str:
        return html(self)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of source and destination together, ascending, each once."""
        return tuple(sorted({*self.src_ranks, *self.dst_ranks}))

    def fill(self, name: str) -> complex | None:
        """Return the value that fills the tensor `name` at its destination before bytes arrive; None for no fill.

        Raises PlanError for a tensor that the plan does not have.
        """
        return rule_of(self.rules, name).fill

    def divisor(self, name: str) -> int:
        """Return the final divisor of the tensor `name`: the number of addends (partial values) of an average, or 1.

        Raises PlanError for a tensor that the plan does not have.
        """
        return rule_of(self.rules, name).divisor

    def transfers(self, src: int | None = None, dst: int | None = None) -> Iterator[Transfer]:
        """Yield all transfers, or only those from rank `src`, to rank `dst`, or, given both, from `src` to `dst`."""
        return list_transfers(self, _as_rank(src), _as_rank(dst))

    def table(self, src: int | None = None, dst: int | None = None) -> TransferTable:
        """Return what `transfers` yields for the same arguments, in the same order, as a TransferTable: numpy columns,
        from which a custom transport posts its descriptors."""
        return make_table(self, _as_rank(src), _as_rank(dst))

    def sent_bytes(self) -> dict[int, int]:
        """Return a dict from each rank of the source or the destination to the number of bytes that it sends to other
        ranks."""
        return dict.fromkeys(self.ranks, 0) | sum_sent(self.lines)

    def received_bytes(self) -> dict[int, int]:
        """Return a dict from each rank of the source or the destination to the number of bytes that it receives from
        other ranks."""
        return dict.fromkeys(self.ranks, 0) | sum_received(self.lines)

    def shadow_bytes(self) -> dict[int, int]:
        """Return, for each rank, how many bytes of memory a move with commit="all" needs for copies of its destination
        tensors. Such a move receives into these copies, so that either all ranks get the new values or no rank does."""
        return dict.fromkeys(self.ranks, 0) | count_stored(self.dst)


def _as_rank(rank: int | None) -> int | None:
    return None if rank is None else as_integer(rank, "a rank", PlanError)


def plan(src: Side, dst: Side, *, topology: Topology | None = None, window: bool = False) -> Plan:
    """Return a Plan: the transfers that bring each rank of the layout `dst` its elements from ranks of the layout
    `src`; both can be dicts of layouts by name. With `topology`, senders on the receiver's node are preferred; with
    `window`, the destination can omit elements.

    With a topology, elements that a rank of the receiver's own node holds come from that node.
    `window=True` says that the destination may hold only parts of the tensors; a tuple of Layouts always
    may. Otherwise the destination must hold every element.

    Raises PlanError if names, shapes or dtypes differ, if source windows overlap, if the destination
    needs an element that no source rank holds, or if a destination that is not a window lacks an
    element.
    """
    if topology is not None:
        checked(topology)
    if not isinstance(window, bool):
        raise PlanError(
            f"window={window!r} is not a bool; "
            f"give True if the destination may hold less than the tensors, or False"
        )
    asked = _Asked((list_given(src), list_given(dst)), (topology, window))
    known = _last.get(asked)
    if known is None:
        given = name_plainly(asked.sides[0]), name_plainly(asked.sides[1])
        asked = asked._replace(sides=given)
        tensors = _last.read(asked) or read_tensors(src, dst)
        known = _make_plan(tensors, asked, is_tree=isinstance(src, Mapping))
        _last.keep(asked, known)
    return known


class _Asked(NamedTuple):
    """The arguments of `plan`: of each side the names and what they stand for, as it was then."""

    sides: Ends
    options: tuple[Topology | None, bool]


class _Last:
    """The last plan and what it was made of, as long as a caller keeps the plan: trainers plan the same move again.

    Layouts are compared as objects, which are interned, and names in the order of the mappings. So comparing tens of
    thousands of tensors takes a hundredth of planning them, and calls nothing of the caller's.
    """

    def __init__(self) -> None:
        self._made: tuple[_Asked, weakref.ref[Plan]] | None = None

    def get(self, now: _Asked) -> Plan | None:
        """Return the last plan if it was made of the same arguments and still exists, else None."""
        # Read once: another thread may plan meanwhile.
        last = self._made
        if last is None or last[0].options != now.options:
            return None
        asked, made = last
        for old, new in zip(asked.sides, now.sides, strict=True):
            if old.names != new.names or not np.array_equal(old.ids, new.ids):
                return None
        return made()

    def read(self, now: _Asked) -> Tensors | None:
        """Return the tensors of a move, read from the last plan as far as they are the same; None if that is gone, or
        if too much differs."""
        last = self._made
        made = None if last is None else last[1]()
        if last is None or made is None:
            return None
        return reread_tensors(made, last[0].sides, now.sides)

    def keep(self, asked: _Asked, made: Plan) -> None:
        """Make `made` the last plan."""
        self._made = asked, weakref.ref(made, self._forget)

    def empty(self) -> None:
        """Forget the last plan."""
        self._made = None

    def _forget(self, plan: weakref.ref[Plan]) -> None:
        made = self._made
        if made is not None and made[1] is plan:
            self._made = None


_last = _Last()
add_cache(_last)


def _make_plan(tensors: Tensors, asked: _Asked, is_tree: bool) -> Plan:
    """The plan of these tensors, made from its arguments, which were checked. `is_tree`: sides are mappings."""
    topology, window = asked.options
    dst = asked.sides[1]
    alike = tensors.alike
    groups = join_groups(alike)
    batches = make_batches(groups)
    check_covered(batches)
    given = zip(dst.names if is_tree else [""], dst.held, strict=True)
    return Plan(
        src=tensors.src,
        dst=tensors.dst,
        rules=tensors.rules,
        batches=batches,
        lines=balance(gather_lines(batches, topology), batches, topology),
        digest=digest_groups(groups, is_tree, topology),
        is_tree=is_tree,
        src_ranks=list_ranks(group.src for group in groups),
        dst_ranks=list_ranks(group.dst for group in groups),
        topology=topology,
        in_part=find_in_part(alike, given, window),
        alike=tuple(tuple(group.names) for group in alike),
    )


def digest_of(plan: Plan) -> str:
    """Return the digest of `plan`, with which ranks tell plans apart. It is computed from the names and layouts of the
    tensors at source and destination, and from the topology if `plan` was made for one."""
    if plan.whole is not None:
        return digest_without(digest_of(plan.whole), plan.left)
    alike = group_alike(plan.src, plan.dst)
    return digest_groups(join_groups(alike), plan.is_tree, plan.topology)


def digest_without(whole: str, left: Ranks) -> str:
    """Compute the digest of a plan from which the ranks in `left` have been removed. `whole` is the digest of the plan
    with all ranks."""
    return digest(("without", whole, left))


def list_ranks(sides: Iterable[Windows]) -> tuple[int, ...]:
    """Return the ranks in the meshes of all layouts in `sides`, ascending, each once."""
    layouts = itertools.chain.from_iterable(sides)
    meshes = {layout.mesh for layout in layouts}
    ranks = {rank for mesh in meshes for rank in mesh.ranks}
    return tuple(sorted(ranks))
