"""Plan: who sends which piece of which tensor to whom, as a value.

1. `plan(src, dst)` takes two Layouts, or two mappings name -> Layout with the same names. A tuple of Layouts of one
   shape stands for a tensor that is held as several windows.
2. A Layout as a destination asks for every element of the tensor. One that does not is an error, unless the caller
   says that it is a window; a tuple of Layouts says so itself. `Plan.in_part` names the tensors that are not asked
   for whole.
3. A plan is templates, lines and cuts; `transfers` expands what it is asked for and nothing else. Both ends of a pair
   list the same transfers in the same order.
4. Copies that stay on a rank are transfers too; loads leave them out.
5. The digest and the transfers depend on what ranks hold, not on how it is spelled: ranks that agree on the digest
   have the same plan.

>>> from shardmath.algebra.mesh import Mesh
>>> mesh = Mesh(tp=2)
>>> p = plan(Layout((4, 2), mesh, "(tp n) h"), Layout((4, 2), mesh, "n (tp h)"))
>>> for t in p.transfers(src=0):
...     print(t)
0 -> 0 copy [0:2, 0:1] of [0:2, 0:1] to [0:2, 0:1], 8 B
0 -> 1 copy [0:2, 1:2] of [0:2, 1:2] to [0:2, 0:1], 8 B
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from shardmath.base.digest import digest, names_digest
from shardmath.base.drawn import html, svg
from shardmath.base.errors import PlanError
from shardmath.base.given import plural, shown, text
from shardmath.base.integers import whole
from shardmath.base.public import public
from shardmath.flows.topology import Topology, checked
from shardmath.layouts.layout import Layout, holdings_digest
from shardmath.layouts.store import local_name, local_tensors
from shardmath.plans.balance import (
    Stretch,
    balanced,
    kept,
    received,
    received_loads,
    row_at,
    sent,
    sent_loads,
)
from shardmath.plans.cover import check_covered, check_disjoint, first_unheld, holds_all, meeting
from shardmath.plans.demands import Batch, Lines, lines
from shardmath.plans.reduction import Reduction, reduction
from shardmath.plans.template import Piece, Template, expand, template

__all__ = ["Plan", "Side", "Transfer", "Windows", "local_name", "named", "plan"]

Windows: TypeAlias = Layout | tuple[Layout, ...]
"""How a side holds one tensor: a layout, or several windows of one shape."""
Side: TypeAlias = (
    Windows | Mapping[str, Layout] | Mapping[str, tuple[Layout, ...]] | Mapping[str, Windows]
)


@public
class Transfer(NamedTuple):
    """One box of one tensor that goes from a rank to a rank (or stays, where both are the same).

    It prints as `sender -> receiver op [global box] of [box in the sender's tensor] to [box in the receiver's], bytes`.
    Both sides list `shape` elements row-major. `op` is "copy", or the operation by which the piece enters what is
    there; pieces for one element enter in order of `addend`.
    """

    tensor: str
    src_rank: int
    dst_rank: int
    op: str
    src_tensor: str
    src_slices: tuple[slice, ...]
    dst_tensor: str
    dst_slices: tuple[slice, ...]
    shape: tuple[int, ...]
    nbytes: int
    global_slices: tuple[slice, ...]
    addend: int = 0

    def __str__(self) -> str:
        name = f"{self.tensor}: " if self.tensor else ""
        whole, src, dst = (
            _spans(s) for s in (self.global_slices, self.src_slices, self.dst_slices)
        )
        return f"{name}{self.src_rank} -> {self.dst_rank} {self.op} {whole} of {src} to {dst}, {self.nbytes} B"


def _spans(slices: tuple[slice, ...]) -> str:
    return f"[{', '.join(f'{s.start}:{s.stop}' for s in slices)}]"


@public
@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Plan:
    """What `plan` returns. Equal plans do the same for the same names.

    `src` and `dst` are each tensor's windows, by name ("" for two Layouts), names ascending; `rules` what their Partial
    axes ask for; `in_part` the tensors, ascending, of which no rank of the destination holds some element. An adjoint
    has the plan that it transposes as `forward`, and lists its transfers through `flip`.
    """

    src: Mapping[str, tuple[Layout, ...]]
    dst: Mapping[str, tuple[Layout, ...]]
    rules: Mapping[str, Reduction]
    batches: tuple[Batch, ...]
    lines: Lines
    digest: str
    is_tree: bool
    src_ranks: tuple[int, ...]
    dst_ranks: tuple[int, ...]
    topology: Topology | None = None
    forward: Plan | None = None
    flip: Callable[[Transfer], Transfer] | None = None
    in_part: tuple[str, ...] = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        what = "adjoint plan" if self.forward else "plan"
        ranks = f"{len(self.src_ranks)} -> {plural(self.dst_ranks, 'rank')}"
        part = f", {len(self.in_part)} of them in part" if self.in_part else ""
        return f"<{what} of {plural(self.src, 'tensor')}{part}, {ranks}, {self.digest[:12]}>"

    def svg(self, *, topology: Topology | None = None, tensor: str | None = None) -> str:
        """A picture as an SVG document: a tensor before and after, and bytes by sender and receiver.

        `topology` marks nodes (default: the plan's own), `tensor` is the one drawn (default: the first). Raises
        PlanError for what is not a topology, and for a tensor that the plan does not have.
        """
        return svg(self, topology=topology, tensor=tensor)

    def _repr_html_(self) -> str:
        return html(self)

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks of either side, ascending."""
        return tuple(sorted({*self.src_ranks, *self.dst_ranks}))

    def fill(self, name: str) -> complex | None:
        """What the destination's own cells of the tensor hold before anything arrives; None: nothing is needed.

        Raises PlanError for a tensor that the plan does not have.
        """
        return self._rule(name).fill

    def divisor(self, name: str) -> int:
        """By what the tensor's destination cells are divided when all has arrived: the addends of an avg, else 1."""
        return self._rule(name).divisor

    def _rule(self, name: str) -> Reduction:
        rule = self.rules.get(name) if isinstance(name, str) else None
        if rule is None:
            raise PlanError(
                f"the plan has no tensor {shown(name)}; it has {', '.join(map(repr, list(self.src)[:8]))}"
            )
        return rule

    def transfers(self, src: int | None = None, dst: int | None = None) -> Iterator[Transfer]:
        """The transfers, all or those of one sender, of one receiver, or of a pair; none for a rank without any."""
        src, dst = (
            rank if rank is None else whole(rank, "a rank", PlanError) for rank in (src, dst)
        )
        if self.forward is None or self.flip is None:
            return _transfers(self, src, dst)
        return map(self.flip, _transfers(self.forward, dst, src))

    def sent_bytes(self) -> dict[int, int]:
        """Bytes that each rank of either side sends to other ranks."""
        return self._loads(sent=self.forward is None)

    def received_bytes(self) -> dict[int, int]:
        """Bytes that each rank of either side receives from other ranks."""
        return self._loads(sent=self.forward is not None)

    def _loads(self, *, sent: bool) -> dict[int, int]:
        return dict.fromkeys(self.ranks, 0) | (sent_loads if sent else received_loads)(self.lines)


def _ranks(sides: Iterable[tuple[Layout, ...]]) -> tuple[int, ...]:
    meshes = {layout.mesh for windows in sides for layout in windows}
    return tuple(sorted({rank for mesh in meshes for rank in mesh.ranks}))


def plan(src: Side, dst: Side, *, topology: Topology | None = None, window: bool = False) -> Plan:
    """The plan that gives every rank of `dst` what it holds there, from the ranks of `src`.

    With a topology, what a rank of the receiver's own node holds comes from there. `window=True` says that the
    destination may hold less than the tensors, as a tuple of Layouts says of its tensor; otherwise it is to hold all.

    Raises PlanError where names, shapes or dtypes differ, where source windows overlap, where the destination needs an
    element that no source rank holds, or where no rank of a destination that is no window holds an element.
    """
    if topology is not None:
        checked(topology)
    if not isinstance(window, bool):
        raise PlanError(
            f"window={window!r}; give True where the destination may hold less than the tensors, or False"
        )
    here, there = named(src, dst)
    names = sorted(here)
    source, target = _side(names, here), _side(names, there)
    alike = _alike(source, target)
    rules = dict.fromkeys(names, NOTHING)
    for group in alike:
        if group.rule is not NOTHING:
            rules |= dict.fromkeys(group.names, group.rule)
    groups = _joined(alike)
    batches = _batches(groups)
    check_covered(batches)
    in_part = _in_part(alike, there, window)
    cut = balanced(lines(batches, topology), batches, topology)
    every = names_digest(list(itertools.chain.from_iterable(group.names for group in groups)))
    key = every, [(len(group.names), group.key) for group in groups]
    tree = isinstance(src, Mapping)
    name = digest((tree, key) if topology is None else (tree, key, topology))
    ranks = _ranks(group.src for group in groups), _ranks(group.dst for group in groups)
    return Plan(source, target, rules, batches, cut, name, tree, *ranks, topology, in_part=in_part)


def named(src: Side, dst: Side) -> tuple[Mapping[str, Windows], Mapping[str, Windows]]:
    """Both sides by name, "" for what has none. Raises PlanError where one alone is a mapping, or names differ."""
    if isinstance(src, Mapping) != isinstance(dst, Mapping):
        words = ("a mapping" if isinstance(side, Mapping) else f"{side!r}" for side in (src, dst))
        raise PlanError(
            "the source is {}, the destination {}; give two layouts, or two mappings".format(*words)
        )
    here, there = _by_name(src), _by_name(dst)
    _check_names(here, there)
    return here, there


def _by_name(side: Side) -> Mapping[str, Windows]:
    out: Mapping[str, Windows] = side if isinstance(side, Mapping) else {"": side}
    if set(map(type, out)) <= {str}:
        return out
    for name in out:
        if not isinstance(name, str):
            raise PlanError(f"tensor name {name!r} is not text; name tensors by str")
    return {text(name, "a tensor's name", PlanError): held for name, held in out.items()}


def _side(names: list[str], named: Mapping[str, Windows]) -> dict[str, tuple[Layout, ...]]:
    """Each tensor's windows, in the order of the names; tensors held alike have the same tuple."""
    held = list(map(named.__getitem__, names))
    windows = {
        key: _windows(names, held, one)
        for key, one in dict(zip(map(id, held), held, strict=True)).items()
    }
    out = dict(zip(names, map(windows.__getitem__, map(id, held)), strict=True))
    if any(len(one) > 1 for one in windows.values()):
        _check_local_names(out)
    return out


def _windows(names: list[str], sides: list[Windows], held: object) -> tuple[Layout, ...]:
    out = held if isinstance(held, tuple) else (held,)
    if not out or not all(isinstance(layout, Layout) for layout in out):
        name = next(name for name, one in zip(names, sides, strict=True) if one is held)
        raise PlanError(f"tensor {name!r} is {held!r}; give a Layout or a tuple of Layouts")
    return out


def _check_names(src: Mapping[str, Windows], dst: Mapping[str, Windows]) -> None:
    if src.keys() != dst.keys():
        only = [
            f"{side} alone has {sorted(names)[:8]}"
            for side, names in (
                ("the source", src.keys() - dst.keys()),
                ("the destination", dst.keys() - src.keys()),
            )
            if names
        ]
        raise PlanError(f"names differ: {'; '.join(only)}; give both sides the same names")


def _check_local_names(side: Mapping[str, tuple[Layout, ...]]) -> None:
    """A window's name is no tensor's."""
    for name, windows in side.items():
        for local, _ in local_tensors(name, windows) if len(windows) > 1 else ():
            if local in side:
                raise PlanError(
                    f"window {local!r} of tensor {name!r} has the name of another tensor; rename one"
                )


class _Group(NamedTuple):
    """Tensors that are held alike on both sides: `key` is all that their transfers depend on.

    `src`, `dst` and `rule` are spelled as the first of them is.
    """

    key: tuple[object, ...]
    names: tuple[str, ...]
    src: tuple[Layout, ...]
    dst: tuple[Layout, ...]
    rule: Reduction


def _alike(src: dict[str, tuple[Layout, ...]], dst: dict[str, tuple[Layout, ...]]) -> list[_Group]:
    """All tensors by their windows themselves, in order of their first names."""
    same: dict[tuple[int, int], list[str]] = {}
    for name, pair in zip(
        src, zip(map(id, src.values()), map(id, dst.values()), strict=True), strict=True
    ):
        try:
            same[pair].append(name)
        except KeyError:
            same[pair] = [name]
    out = []
    plain: set[tuple[Layout, Layout]] = set()
    for names in same.values():
        a, b = src[names[0]], dst[names[0]]
        forms = a[0].form, b[0].form
        single = len(a) == len(b) == 1
        rule = NOTHING
        if not (single and forms in plain):
            _check_tensor(names[0], a, b)
            rule = _rule(names[0], a, b)
            if rule is NOTHING and single:
                plain.add(forms)
        out.append(_Group(_key(a, b), tuple(names), a, b, rule))
    return out


def _in_part(
    alike: Iterable[_Group], given: Mapping[str, Windows], window: bool
) -> tuple[str, ...]:
    """The tensors that the destination does not hold whole. Raises PlanError for one that is to."""
    out: list[str] = []
    for group in alike:
        if not holds_all(group.dst):
            if not (window or isinstance(given[group.names[0]], tuple)):
                what = (
                    f"tensor {group.names[0]!r}: no rank asks for element {first_unheld(group.dst)}"
                )
                fix = "cover it at the destination, or say that this is a window: plan(..., window=True)"
                raise PlanError(f"{what} under {group.dst[0]}; {fix}")
            out += group.names
    return tuple(sorted(out))


def _joined(alike: Iterable[_Group]) -> list[_Group]:
    """Groups that differ in how their layouts are spelled are one, in order of their first names."""
    by_key: dict[tuple[object, ...], list[_Group]] = {}
    for group in alike:
        by_key.setdefault(group.key, []).append(group)
    whole = (_one(groups) for groups in by_key.values())
    return sorted(whole, key=lambda group: group.names[0])


def _one(groups: list[_Group]) -> _Group:
    if len(groups) == 1:
        return groups[0]
    names = itertools.chain.from_iterable(group.names for group in groups)
    return groups[0]._replace(names=tuple(sorted(names)))


def _check_tensor(name: str, src: tuple[Layout, ...], dst: tuple[Layout, ...]) -> None:
    """All windows of both sides hold one tensor, and those of the source hold nothing twice."""
    first = src[0]
    for layout in (*src, *dst):
        if (layout.shape, layout.dtype) != (first.shape, first.dtype):
            here, there = (f"{x.dtype}{list(x.shape)}" for x in (first, layout))
            what = f"tensor {name!r}: {here} here, {there} there"
            raise PlanError(
                f"{what}; both sides and all windows hold one tensor of one shape and dtype"
            )
    if len(src) > 1:
        check_disjoint(name, src)


NOTHING = Reduction()
"""Where nothing is Partial."""


def _rule(name: str, src: tuple[Layout, ...], dst: tuple[Layout, ...]) -> Reduction:
    """What the Partial axes of a tensor's windows ask for, in which all windows have to agree."""
    if not any(layout.partial for layout in (*src, *dst)):
        return NOTHING
    first = reduction(src[0], dst[0])
    for b in dst:
        there = _asks(reduction(src[0], b))
        for a in src:
            rule = reduction(a, b)
            if _asks(rule) != there or (rule.op, rule.addends, rule.fill) != (
                first.op,
                first.addends,
                first.fill,
            ):
                what = f"tensor {name!r}: windows {a} and {src[0]} to {b} and {dst[0]} are Partial in different ways"
                raise PlanError(f"{what}; give all windows of a side the same Partial axes")
    return first


def _asks(rule: Reduction) -> tuple[object, ...]:
    """What a rule says of the destination alone."""
    return rule.chosen, [axes for _, axes in rule.matched]


def _key(src: tuple[Layout, ...], dst: tuple[Layout, ...]) -> tuple[object, ...]:
    """All that the transfers of a tensor depend on, but for its name; the same for every spelling of its layouts."""
    first = src[0]
    if len(src) == len(dst) == 1 and not (first.partial or dst[0].partial):
        return first.shape, first.dtype, (holdings_digest(first),), (holdings_digest(dst[0]),), ()
    sides = tuple(map(holdings_digest, src)), tuple(map(holdings_digest, dst))
    rules = (
        tuple(reduction(a, b).by_ranks(a, b) for a in src for b in dst)
        if first.partial or dst[0].partial
        else ()
    )
    return first.shape, first.dtype, *sides, rules if any(rules) else ()


def _batches(groups: list[_Group]) -> tuple[Batch, ...]:
    """The windows of each group that may have anything in common, pair by pair."""
    out = []
    known: dict[tuple[int, int], Template] = {}
    for group in groups:
        for i, j in meeting(group.src, group.dst):
            a, b = group.src[i], group.dst[j]
            forms = id(a.form), id(b.form)
            t = known.get(forms) if group.rule is NOTHING else template(a, b, reduction(a, b))
            if t is None:
                t = known[forms] = template(a, b, NOTHING)
            out.append(Batch(t, group.names, a.mesh, b.mesh, i, j))
    return tuple(out)


def _transfers(p: Plan, src: int | None, dst: int | None) -> Iterator[Transfer]:
    if src is None and dst is None:
        return (t for rank in p.src_ranks for t in _transfers(p, rank, None))
    if src is None:
        return _received(p, int(dst or 0))
    return (t for t in _sent(p, src) if dst is None or t.dst_rank == dst)


def _sent(p: Plan, rank: int) -> Iterator[Transfer]:
    for stretch in itertools.chain(kept(p.lines, rank), sent(p.lines, rank)):
        yield from spelled(p, p.lines, stretch)


def _received(p: Plan, rank: int) -> Iterator[Transfer]:
    for stretch in itertools.chain(kept(p.lines, rank), received(p.lines, rank)):
        yield from spelled(p, p.lines, stretch)


def spelled(p: Plan, on: Lines, stretch: Stretch, *, relayed: bool = False) -> Iterator[Transfer]:
    """The transfers of a stretch of the plan's lines, tensor by tensor.

    Where `relayed`, the sender is a rank of the destination and sends what it has received, folded in already.
    """
    block, sender, receiver, lo, hi = stretch
    for row in range(row_at(on, block, lo), int(on.row_first[block + 1])):
        start = int(on.at[row])
        if start >= hi:
            break
        batch = p.batches[int(on.batch[row])]
        each, item, begin, unit = (
            int(on.each[row]),
            batch.template.src.itemsize,
            int(on.lo[row]),
            int(on.unit[row]),
        )
        ends = (batch.dst if relayed else batch.src).position(sender), batch.dst.position(receiver)
        x, y = max(lo - start, 0), min(hi - start, each * len(batch.names))
        for i, k, a, b in _tensors(x, y, each):
            pieces = expand(
                batch.template, unit, *ends, begin + a // item, begin + b // item, relayed=relayed
            )
            yield from _transfers_of(
                p, batch, batch.names[i:k], (sender, receiver), pieces, relayed
            )


def _tensors(lo: int, hi: int, each: int) -> Iterator[tuple[int, int, int, int]]:
    """(tensors i..k-1, bytes a..b-1 of each) of bytes lo..hi-1 where every tensor has `each` bytes."""
    i, a = divmod(lo, each)
    k, b = divmod(hi, each)
    if i == k:
        yield i, i + 1, a, b
        return
    if a:
        yield i, i + 1, a, each
    if i + bool(a) < k:
        yield i + bool(a), k, 0, each
    if b:
        yield k, k + 1, 0, b


def _transfers_of(
    p: Plan,
    batch: Batch,
    names: tuple[str, ...],
    ends: tuple[int, int],
    pieces: list[Piece],
    relayed: bool,
) -> list[Transfer]:
    op_of, windows = batch.template.reduction.op_of, (len(p.src[names[0]]), len(p.dst[names[0]]))
    boxes = [("copy" if relayed else op_of(x.addend), x) for x in pieces]
    new = tuple.__new__  # what Transfer(...) does in the end, at half the time
    if windows == (1, 1):
        return [
            new(Transfer, (name, *ends, op, name, src, name, dst, shape, nbytes, at, addend))
            for name in names
            for op, (src, dst, at, shape, nbytes, addend) in boxes
        ]
    out = []
    for name in names:
        there = local_name(name, batch.target, windows[1])
        here = there if relayed else local_name(name, batch.source, windows[0])
        for op, (src, dst, at, shape, nbytes, addend) in boxes:
            out.append(Transfer(name, *ends, op, here, src, there, dst, shape, nbytes, at, addend))
    return out
