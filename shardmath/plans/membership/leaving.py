"""Leaving: the plan from which ranks of the destination have left.

1. Transfers to a rank that leaves are dropped. All other transfers stay exactly as they were, in
   the same order.
2. Ranks leave by whole copies (`staying`), and a rank that is a source cannot leave.
3. `whole` is the plan that no rank has left, so the order of leaving makes no difference:
   without(without(p, a), b) == without(p, a | b). A rank comes back if `without(p.whole, ...)` omits it.
4. All ranks drop the same transfers: they agree by the digest, which is made of the digest of `whole` and the ranks
   that left.

>>> from shardmath.layouts.algebra.mesh import Mesh
>>> from shardmath.layouts.layout import Layout
>>> from shardmath.plans.plan import plan
>>> engines = Layout((4,), Mesh(engine=2, tp=2, ranks=range(2, 6)), "(tp n)")
>>> p = plan(Layout((4,), Mesh(tp=2), "(tp n)"), engines)
>>> rest = without(p, [2, 3])
>>> for t in rest.transfers():
...     print(t)
0 -> 4 copy [0:2] of [0:2] to [0:2], 8 B
1 -> 5 copy [2:4] of [0:2] to [0:2], 8 B
>>> rest.whole is p, rest.left, without(rest, []) is rest
(True, (2, 3), True)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple, TypeAlias

from shardmath.base.arguments import as_integer, listed
from shardmath.base.errors import PlanError
from shardmath.base.text import show_ranks
from shardmath.base.views import to_dict
from shardmath.layouts.holdings import Windows, label
from shardmath.layouts.layout import Layout
from shardmath.plans.demands import Batch, Ranks
from shardmath.plans.membership.lines import drop_receivers
from shardmath.plans.membership.staying import Staying, find_held
from shardmath.plans.plan import Plan, digest_without, list_ranks
from shardmath.plans.reduction import find_reduction
from shardmath.plans.template import Template, make_template
from shardmath.plans.uncovered import first_unheld, holds_all

__all__ = ["without"]


def without(plan: Plan, ranks: Iterable[int], *, window: bool = False) -> Plan:
    """Return `plan` without the destination ranks `ranks`, which have left; other transfers are unchanged. Unless
    `window` is true, the ranks that stay must together hold all that the destination held before.

    `window=True` says that the destination may hold less of the tensors than before, as in `plan`: tensors that no rank
    asks for any longer are then dropped from the plan.

    Raises PlanError for a rank that the destination does not have, or that is a source; if only some ranks of a copy
    leave; if no rank stays; and, without `window`, if the ranks that stay hold less of a tensor than before: the error
    names an element.
    """
    _check_plan(plan)
    whole = plan if plan.whole is None else plan.whole
    leaving = _read_ranks(whole, ranks)
    left = leaving.union(plan.left)
    if left == set(plan.left):
        return plan
    plan_without = _keep(whole, left)
    if not window:
        _check_held(plan, plan_without)
    return plan_without


def _check_plan(plan: object) -> None:
    """Raise PlanError unless `plan` is a Plan."""
    if not isinstance(plan, Plan):
        kind = type(plan).__name__
        what = f"without takes a Plan, not a {kind}"
        raise PlanError(f"{what}; pass the Plan from which it was made")


def _read_ranks(whole: Plan, ranks: Iterable[int]) -> frozenset[int]:
    """The ranks that leave. Raises PlanError unless all are ranks of the destination and none of the source."""
    given = listed(ranks, "the ranks that leave", PlanError)
    leaving = frozenset(as_integer(rank, "a rank that leaves", PlanError) for rank in given)
    strangers = sorted(leaving.difference(whole.dst_ranks))
    if strangers:
        named = show_ranks(strangers, noun=False, joined_from=None, most=16)
        there = show_ranks(whole.dst_ranks, noun=False, joined_from=None, most=16)
        what = f"ranks {named} cannot leave: the destination has ranks {there}"
        raise PlanError(f"{what}; give only ranks of the destination")
    sources = sorted(leaving.intersection(whole.src_ranks))
    if sources:
        raise PlanError(
            f"rank {sources[0]} cannot leave, as a source rank that sends {_name_sent(whole, sources[0])}; "
            f"make a new plan from layouts without it"
        )
    return leaving


def _name_sent(whole: Plan, rank: int) -> str:
    """The first element that a rank sends, in words."""
    first = next(whole.transfers(src=rank), None)
    if first is None:
        return "nothing now, and holds what others send"
    element = tuple(taken.start for taken in first.global_slices)
    name = f"element {element} of tensor {first.tensor!r}" if first.tensor else f"element {element}"
    return f"{name} to rank {first.dst_rank}"


class _Tensors(NamedTuple):
    """The tensors that some rank asks for, and those of them that are not held whole."""

    src: Mapping[str, Windows]
    dst: Mapping[str, Windows]
    alike: tuple[tuple[str, ...], ...]
    in_part: tuple[str, ...]

    @property
    def src_ranks(self) -> Ranks:
        """The ranks in the meshes of the tensors' source layouts, ascending."""
        return list_ranks(self.src[names[0]] for names in self.alike)


def _keep(whole: Plan, left: frozenset[int]) -> Plan:
    """The plan without the ranks that left."""
    staying = Staying(left)
    tensors = _keep_tensors(whole, staying)
    batches = _keep_batches(whole, staying)
    ascending = tuple(sorted(left))
    kept_plan = replace(
        whole,
        dst=tensors.dst,
        batches=tuple(batches.values()),
        lines=drop_receivers(whole.lines, left, list(batches)),
        digest=digest_without(whole.digest, ascending),
        dst_ranks=tuple(sorted(set(whole.dst_ranks) - left)),
        in_part=tensors.in_part,
        alike=tensors.alike,
        whole=whole,
        left=ascending,
    )
    if tensors.src is whole.src:
        return kept_plan
    rules = {name: whole.rules[name] for name in tensors.src}
    return replace(kept_plan, src=tensors.src, rules=rules, src_ranks=tensors.src_ranks)


def _keep_tensors(whole: Plan, staying: Staying) -> _Tensors:
    """The tensors that a rank that stays asks for. Raises PlanError if there are none."""
    # Of tens of thousands of tensors few differ: changing those in a copy is faster than building a new dict.
    dst = to_dict(whole.dst)
    alike = []
    incomplete: list[str] = []
    for names in whole.alike:
        name = names[0]
        kept_side = staying.keep(name, whole.dst[name])
        dst.update(dict.fromkeys(names, kept_side.windows))
        if not kept_side.windows:
            continue
        alike.append(names)
        if not holds_all(kept_side.windows):
            incomplete += names
    if not alike:
        raise PlanError("all ranks of the destination leave; keep at least one of them")
    src = whole.src
    if len(alike) < len(whole.alike):
        dst = {name: windows for name, windows in dst.items() if windows}
        src = {name: src[name] for name in dst}
    return _Tensors(src, dst, tuple(alike), tuple(sorted(incomplete)))


_Known: TypeAlias = dict[tuple[Template, Layout], Template]
"""By the template of a batch and its destination window without the ranks that left, the new template."""


def _keep_batches(whole: Plan, staying: Staying) -> dict[int, Batch]:
    """The batches whose destination windows stay, without the ranks that left; by number."""
    templates: _Known = {}
    batches = {}
    for number, batch in enumerate(whole.batches):
        kept_batch = _keep_batch(whole, batch, staying, templates)
        if kept_batch is not None:
            batches[number] = kept_batch
    return batches


def _keep_batch(whole: Plan, batch: Batch, staying: Staying, templates: _Known) -> Batch | None:
    """A batch without the ranks that left; None if its destination window is gone."""
    name = batch.names[0]
    old_windows = whole.dst[name]
    new_windows, new_places = staying.keep(name, old_windows)
    target = new_places.get(batch.target)
    if target is None:
        return None
    window = new_windows[target]
    template = batch.template
    if window is not old_windows[batch.target]:
        key = template, window
        if key not in templates:
            source = whole.src[name][batch.source]
            _check_rule(name, batch, source, window)
            templates[key] = make_template(source, window, template.reduction)
        template = templates[key]
    return Batch(template, batch.names, batch.src, window.mesh, batch.source, target)


def _check_rule(name: str, batch: Batch, source: Layout, target: Layout) -> None:
    """Raise PlanError if the reduction changes: with fewer ranks, both sides may have the same addends."""
    if not (source.partial or target.partial):
        return
    rule = find_reduction(source, target)
    if rule != batch.template.reduction:
        raise PlanError(
            f"{label(name)}: the plan reduces addends, and without the ranks that leave, {source} and {target} "
            f"have the same addends, so that nothing would be reduced; make a new plan from layouts of the ranks "
            f"that stay"
        )


def _check_held(before: Plan, after: Plan) -> None:
    """Raise PlanError if the ranks that stay hold less of a tensor than the destination did before."""
    fix = "let fewer ranks leave, or call without(..., window=True) if elements may be left out"
    if len(after.dst) < len(before.dst):
        name = next(name for name in before.dst if name not in after.dst)
        layout = before.dst[name][0]
        _, element = find_held(layout, layout.mesh.ranks)
        raise PlanError(f"{label(name)}: all ranks that hold {element} of {layout} leave; {fix}")
    newly_in_part = set(after.in_part).difference(before.in_part)
    if newly_in_part:
        name = min(newly_in_part)
        windows = after.dst[name]
        raise PlanError(
            f"{label(name)}: none of the ranks that stay holds element {first_unheld(windows)} "
            f"under {windows[0]}; {fix}"
        )
