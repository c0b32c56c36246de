"""Groups: the tensors with the same layouts on both sides, which move in the same way.

1. A side is a Layout, a tuple of Layouts (windows of one tensor), or a mapping from name to either;
   both sides have the same names.
2. All windows of both sides hold one tensor, source windows hold no element twice, and their
   Partial axes agree.
3. Tensors are grouped by everything on which their transfers depend, so that a plan of thousands of
   tensors has only as many templates as kinds of tensors.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from shardmath.base.arguments import text
from shardmath.base.arrays import addresses, begins
from shardmath.base.digest import digest, names_digest
from shardmath.base.errors import PlanError
from shardmath.layouts.holdings import (
    LayoutOrWindows,
    Windows,
    holdings_digest,
    label,
    read_windows,
)
from shardmath.layouts.layout import Layout
from shardmath.plans.demands import Batch
from shardmath.plans.flows.topology import Topology
from shardmath.plans.reduction import Reduction, find_reduction
from shardmath.plans.template import Template, make_template
from shardmath.plans.uncovered import check_disjoint, find_meeting, first_unheld, holds_all

__all__ = [
    "NOTHING",
    "Group",
    "Side",
    "check_names",
    "describe_form",
    "digest_groups",
    "find_in_part",
    "group_alike",
    "join_groups",
    "key_by_name",
    "list_windows",
    "make_batches",
    "make_groups",
    "pair_by_name",
]

Side: TypeAlias = (
    LayoutOrWindows
    | Mapping[str, Layout]
    | Mapping[str, tuple[Layout, ...]]
    | Mapping[str, LayoutOrWindows]
)

NOTHING = Reduction()
"""The reduction of tensors without Partial axes."""


Identities: TypeAlias = tuple[int, int]
"""The ids of a source value and of a destination value, which are faster to look up than the values."""


class Group(NamedTuple):
    """Tensors that move in the same way: all have one source layout and one destination layout, which each tensor can
    write differently. Groups with equal `key` also move in the same way, and `join_groups` merges them.

    `src`, `dst` and `rule` belong to the first tensor.
    """

    key: tuple[object, ...]
    names: tuple[str, ...]
    src: Windows
    dst: Windows
    rule: Reduction


def pair_by_name(
    src: Side, dst: Side
) -> tuple[Mapping[str, LayoutOrWindows], Mapping[str, LayoutOrWindows]]:
    """Return both sides as mappings from names to layouts; the tensor of a side that is not a mapping is named "".

    Raises PlanError if only one side is a mapping, or if names differ.
    """
    src_by_name, dst_by_name = key_by_name(src, dst)
    check_names(src_by_name, dst_by_name)
    return src_by_name, dst_by_name


def key_by_name(
    src: Side, dst: Side
) -> tuple[Mapping[str, LayoutOrWindows], Mapping[str, LayoutOrWindows]]:
    """Return `src` and `dst` as mappings from tensor name to layout; a single layout gets the name "". The names in the
    two results are not compared.

    Raises PlanError if only one is a mapping.
    """
    if isinstance(src, Mapping) != isinstance(dst, Mapping):
        source = _show_side(src)
        target = _show_side(dst)
        raise PlanError(
            f"the source is {source}, the destination {target}; give two layouts, or two mappings"
        )
    return _as_mapping(src), _as_mapping(dst)


def _show_side(side: Side) -> str:
    return "a mapping" if isinstance(side, Mapping) else f"{side!r}"


def _as_mapping(side: Side) -> Mapping[str, LayoutOrWindows]:
    """The side as a mapping whose names are plain str."""
    out: Mapping[str, LayoutOrWindows] = side if isinstance(side, Mapping) else {"": side}
    if set(map(type, out)) <= {str}:
        return out
    for name in out:
        if not isinstance(name, str):
            raise PlanError(f"tensor name {name!r} is not a str; use a str as its name")
    return {text(name, "a tensor's name", PlanError): held for name, held in out.items()}


def check_names(src: Mapping[str, object], dst: Mapping[str, object]) -> None:
    """Raise PlanError unless the mappings `src` and `dst` have the same tensor names as keys."""
    if src.keys() == dst.keys():
        return
    unshared = {
        "the source": src.keys() - dst.keys(),
        "the destination": dst.keys() - src.keys(),
    }
    only = []
    for side, names in unshared.items():
        if names:
            more = f" and {len(names) - 8} more" if len(names) > 8 else ""
            only.append(f"only {side} has {sorted(names)[:8]}{more}")
    raise PlanError(f"names of tensors differ: {'; '.join(only)}; give both sides the same names")


def list_windows(names: Collection[str], side: Mapping[str, LayoutOrWindows]) -> dict[str, Windows]:
    """Return the Windows (layouts that together hold a tensor) of each of `names`, by name, in the order of `names`.

    Equal Windows are one object. Raises PlanError if a value is not windows, or if a window has the name of a tensor.
    """
    out = read_windows(side, PlanError, names)
    # Looking at each tensor would be slow for tens of thousands of them: mostly all are single layouts.
    if not set(map(type, side.values())) <= {Layout}:
        _check_local_names(out)
    return out


def _check_local_names(side: Mapping[str, Windows]) -> None:
    """Raise PlanError if a window has the name of a tensor."""
    for name, windows in side.items():
        if windows.is_single:
            continue
        for local in windows.local_names(name):
            if local in side:
                raise PlanError(
                    f"window {local!r} of tensor {name!r} has the name of another tensor; "
                    f"rename that tensor"
                )


def group_alike(src: Mapping[str, Windows], dst: Mapping[str, Windows]) -> list[Group]:
    """Group the tensors with equal windows (layouts) on both sides, in the order in which groups first occur.

    Raises PlanError if the layouts of a tensor do not fit each other.
    """
    return make_groups(_same_windows(src, dst), src, dst)


def make_groups(
    alike: Iterable[Sequence[str]], src: Mapping[str, Windows], dst: Mapping[str, Windows]
) -> list[Group]:
    """Return a Group for each sequence in `alike` of names of tensors that have the same windows on both sides. Raises
    PlanError if the layouts of a tensor do not fit each other."""
    groups = []
    # Forms that were checked for one tensor, and need no reduction: neither depends on ranks' names.
    checked: set[tuple[Layout, Layout]] = set()
    for names in alike:
        name = names[0]
        source = src[name]
        target = dst[name]
        rule = NOTHING
        forms = source[0].form, target[0].form
        single = len(source) == len(target) == 1
        if not (single and forms in checked):
            _check_tensor(name, source, target)
            rule = _agree_on_reduction(name, source, target)
            if single and rule is NOTHING:
                checked.add(forms)
        key = _make_key(source, target)
        groups.append(Group(key, tuple(names), source, target, rule))
    return groups


def _same_windows(src: Mapping[str, Windows], dst: Mapping[str, Windows]) -> list[list[str]]:
    """The names grouped by the same windows objects on both sides, in the order of the groups' first names."""
    names = list(src)
    count = len(names)
    if count == 1:
        return [names]  # most plans of redistributions
    source = addresses(src.values())
    target = addresses(dst.values())
    # A stable sort by both ids: groups are end to end, with ascending names.
    order = np.lexsort((target, source))
    first = begins(source[order], target[order])
    by_group = list(map(names.__getitem__, order.tolist()))
    bounds = [*first.tolist(), count]
    return [by_group[bounds[i] : bounds[i + 1]] for i in np.argsort(order[first]).tolist()]


def _check_tensor(name: str, src: Windows, dst: Windows) -> None:
    """Check that all windows of both sides hold one tensor, and that source windows are disjoint."""
    first = src[0]
    for layout in (*src, *dst):
        if (layout.shape, layout.dtype) == (first.shape, first.dtype):
            continue
        cast = ""
        if layout.shape == first.shape:
            rule = f"{{{name!r}: transforms.Cast({layout.dtype!r})}}"
            cast = f"; to cast it on the way, plan what transformed(src, dst, {rule}) gives"
        raise PlanError(
            f"{label(name)} is {describe_form(first)} at the source, but {describe_form(layout)} "
            f"{'in another source window' if layout in src else 'at the destination'}; "
            f"give both sides and all windows one shape and dtype{cast}"
        )
    if len(src) > 1:
        check_disjoint(name, src)


def describe_form(layout: Layout) -> str:
    """Return the dtype and shape of a layout's tensor as text, such as "float32[4, 5]"."""
    return f"{layout.dtype}{list(layout.shape)}"


def _agree_on_reduction(name: str, src: Windows, dst: Windows) -> Reduction:
    """The reduction of a tensor. Raises PlanError unless all its windows ask for the same one."""
    if not _any_partial(src, dst):
        return NOTHING
    first = find_reduction(src[0], dst[0])
    for b in dst:
        expected = find_reduction(src[0], b)
        for a in src:
            rule = find_reduction(a, b)
            # Destination windows may name their axes differently, so only rules of the same window compare by axes.
            same_axes = _axes_of_destination(rule) == _axes_of_destination(expected)
            if same_axes and _folding(rule) == _folding(first):
                continue
            raise PlanError(
                f"{label(name)}: windows {a} and {src[0]} to {b} and {dst[0]} are Partial "
                f"in different ways; give all windows of a side the same Partial axes"
            )
    return first


def _any_partial(src: Sequence[Layout], dst: Sequence[Layout]) -> bool:
    return any(layout.partial for layout in (*src, *dst))


def _axes_of_destination(rule: Reduction) -> tuple[object, ...]:
    """The destination's axes in a reduction."""
    return rule.chosen, [axes for _, axes in rule.matched]


def _folding(rule: Reduction) -> tuple[object, ...]:
    """The parameters by which a reduction folds addends."""
    return rule.op, rule.addends, rule.fill


def _make_key(src: Windows, dst: Windows) -> tuple[object, ...]:
    """A key of all that a tensor's transfers depend on except its name; the same for all spellings of its layouts."""
    first = src[0]
    src_digests = tuple(map(holdings_digest, src))
    dst_digests = tuple(map(holdings_digest, dst))
    rules: list[tuple[object, ...]] = []
    if first.partial or dst[0].partial:
        for a, b in itertools.product(src, dst):
            rule = find_reduction(a, b)
            rules.append(rule.by_ranks(a, b))
    reductions = tuple(rules) if any(rules) else ()
    key = first.shape, first.dtype, src_digests, dst_digests, reductions
    # After some windows have left, the others' numbers in their names are not their places.
    numbers = src.numbers, dst.numbers
    return (*key, numbers) if any(numbers) else key


def digest_groups(groups: Iterable[Group], is_tree: bool, topology: Topology | None) -> str:
    """Return a digest of everything that decides the transfers of a plan: names and layouts in `groups`, whether
    tensors have names (`is_tree`), and `topology`."""
    names: list[str] = []
    keys = []
    for group in groups:
        names += group.names
        keys.append((len(group.names), group.key))
    key = names_digest(names), keys
    if topology is None:
        return digest((is_tree, key))
    return digest((is_tree, key, topology))


def find_in_part(
    groups: Iterable[Group], given: Iterable[tuple[str, object]], window: bool
) -> tuple[str, ...]:
    """Return the names, ascending, of tensors of which the destination holds only some elements. `given` are the names
    and destinations as the caller gave them. Raises PlanError for such a tensor unless `window` is True, or the caller
    gave a tuple of layouts."""
    in_part: list[str] = []
    found = [group for group in groups if not holds_all(group.dst)]
    # Most moves have no such tensor, and so need no dict.
    held = dict(given) if found and not window else {}
    for group in found:
        name = group.names[0]
        if not window and not isinstance(held[name], tuple):
            raise PlanError(
                f"{label(name)}: no rank of the destination holds element {first_unheld(group.dst)} "
                f"under {group.dst[0]}; give it to a rank, or call plan(..., window=True) if elements "
                f"may be left out"
            )
        in_part += group.names
    return tuple(sorted(in_part))


def join_groups(groups: Iterable[Group]) -> list[Group]:
    """Merge groups with equal keys into one with the names of all; list the groups by first name, ascending."""
    by_key: dict[tuple[object, ...], list[Group]] = {}
    for group in groups:
        alike = by_key.setdefault(group.key, [])
        alike.append(group)
    joined = list(map(_join_alike, by_key.values()))
    joined.sort(key=lambda group: group.names[0])
    return joined


def _join_alike(alike: list[Group]) -> Group:
    """Groups of one key as one group."""
    if len(alike) == 1:
        return alike[0]
    names = itertools.chain.from_iterable(group.names for group in alike)
    return alike[0]._replace(names=tuple(sorted(names)))


def make_batches(groups: Iterable[Group]) -> tuple[Batch, ...]:
    """Make Batches for moving the tensors of each group. One Batch is for one source layout and one destination layout
    of the group, whose bounding boxes overlap.

    A destination layout that overlaps no source layout is paired with the first one.
    """
    batches = []
    # Templates without Partial axes, which are found faster by the ids of their forms.
    known: dict[Identities, Template] = {}
    for group in groups:
        for i, j in find_meeting(group.src, group.dst):
            a = group.src[i]
            b = group.dst[j]
            if group.rule is NOTHING:
                forms = id(a.form), id(b.form)
                if forms not in known:
                    known[forms] = make_template(a, b, NOTHING)
                t = known[forms]
            else:
                t = make_template(a, b, find_reduction(a, b))
            batch = Batch(t, group.names, a.mesh, b.mesh, i, j)
            batches.append(batch)
    return tuple(batches)
