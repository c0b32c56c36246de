"""Plan: who sends which piece of which tensor to whom, as a value.

1. `plan(src, dst)` takes two Layouts, or two mappings name -> Layout with the same names. A tuple of Layouts of one
   shape stands for a tensor that is held as several windows.
2. A plan is templates, lines and cuts; `transfers` expands what it is asked for and nothing else. Both ends of a pair
   list the same transfers in the same order.
3. Copies that stay on a rank are transfers too; loads leave them out.
4. The digest and the transfers depend on what ranks hold, not on how it is spelled: ranks that agree on the digest
   have the same plan.

>>> from shardmath.mesh import Mesh
>>> mesh = Mesh(tp=2)
>>> p = plan(Layout((4, 2), mesh, "(tp n) h"), Layout((4, 2), mesh, "n (tp h)"))
>>> for t in p.transfers(src=0):
...     print(t)
0 -> 0 copy [0:2, 0:1] of [0:2, 0:1] to [0:2, 0:1], 8 B
0 -> 1 copy [0:2, 1:2] of [0:2, 1:2] to [0:2, 0:1], 8 B
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np

from shardmath.balance import (
    Batch,
    Lines,
    Requests,
    asked_loads,
    between,
    lines,
    requests,
    senders,
    sent_loads,
    share,
    stacked,
    unit_order,
)
from shardmath.cover import by_rank, check_covered, check_disjoint
from shardmath.digest import digest
from shardmath.errors import PlanError
from shardmath.layout import Layout, holdings_digest
from shardmath.overlay import Piece, expand, template
from shardmath.reduction import Reduction, reduction
from shardmath.store import local_name, local_tensors

__all__ = ["Plan", "Side", "Transfer", "Windows", "local_name", "plan"]

Windows: TypeAlias = Layout | tuple[Layout, ...]
"""How a side holds one tensor: a layout, or several windows of one shape."""
Side: TypeAlias = Windows | Mapping[str, Layout] | Mapping[str, tuple[Layout, ...]] | Mapping[str, Windows]


class Transfer(NamedTuple):
    """One box of one tensor that goes from a rank to a rank (or stays, where both are the same).

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
        whole, src, dst = (_spans(s) for s in (self.global_slices, self.src_slices, self.dst_slices))
        return f"{name}{self.src_rank} -> {self.dst_rank} {self.op} {whole} of {src} to {dst}, {self.nbytes} B"


def _spans(slices: tuple[slice, ...]) -> str:
    return f"[{', '.join(f'{s.start}:{s.stop}' for s in slices)}]"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Plan:
    """What `plan` returns. Equal plans do the same for the same names.

    `src` and `dst` are each tensor's windows, by sorted name ("" for two Layouts); `rules` what their Partial axes ask
    for. An adjoint has the plan that it transposes as `forward`, and lists its transfers through `flip`.
    """

    src: Mapping[str, tuple[Layout, ...]]
    dst: Mapping[str, tuple[Layout, ...]]
    rules: Mapping[str, Reduction]
    batches: tuple[Batch, ...]
    local: Requests
    lines: Lines
    digest: str
    is_tree: bool
    forward: Plan | None = None
    flip: Callable[[Transfer], Transfer] | None = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        what = "adjoint plan" if self.forward else "plan"
        ranks = f"{len(self.src_ranks)} -> {len(self.dst_ranks)} ranks"
        return f"<{what} of {len(self.src)} tensors, {ranks}, {self.digest[:12]}>"

    @property
    def src_ranks(self) -> tuple[int, ...]:
        """All ranks of the source, ascending."""
        return _ranks(self.src)

    @property
    def dst_ranks(self) -> tuple[int, ...]:
        """All ranks of the destination, ascending."""
        return _ranks(self.dst)

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks of either side, ascending."""
        return tuple(sorted({*self.src_ranks, *self.dst_ranks}))

    def fill(self, name: str) -> complex | None:
        """What the destination's own cells of the tensor hold before anything arrives; None: nothing is needed."""
        return self.rules[name].fill

    def divisor(self, name: str) -> int:
        """By what the tensor's destination cells are divided when all has arrived: the addends of an avg, else 1."""
        return self.rules[name].divisor

    def transfers(self, src: int | None = None, dst: int | None = None) -> Iterator[Transfer]:
        """The transfers, all or those of one sender, of one receiver, or of a pair; none for a rank without any."""
        if self.forward is None or self.flip is None:
            return _transfers(self, src, dst)
        return map(self.flip, _transfers(self.forward, dst, src))

    def sent_bytes(self) -> dict[int, int]:
        """Bytes that each rank of either side sends to other ranks."""
        return self._loads(sent=self.forward is None)

    def received_bytes(self) -> dict[int, int]:
        """Bytes that each rank of either side receives from other ranks."""
        return self._loads(sent=self.forward is not None)

    def _loads(self, sent: bool) -> dict[int, int]:
        count = [len(b.names) for b in self.batches]
        loads = sent_loads(self.lines) if sent else asked_loads(self.lines, count)
        return dict.fromkeys(self.ranks, 0) | dict(by_rank(*loads))


def _ranks(side: Mapping[str, tuple[Layout, ...]]) -> tuple[int, ...]:
    meshes = {layout.mesh for windows in side.values() for layout in windows}
    return tuple(sorted({rank for mesh in meshes for rank in mesh.ranks}))


def plan(src: Side, dst: Side) -> Plan:
    """The plan that gives every rank of `dst` what it holds there, from the ranks of `src`.

    Raises PlanError where names, shapes or dtypes differ, where source windows overlap, or where the destination needs
    an element that no source rank holds.
    """
    source, target = _side(src), _side(dst)
    _check_names(source, target)
    for side in (source, target):
        _check_local_names(side)
    alike: dict[tuple[tuple[Layout, ...], tuple[Layout, ...]], tuple[Reduction, tuple[object, ...]]] = {}
    for name, held in source.items():
        if (held, target[name]) not in alike:
            _check_tensor(name, held, target[name])
            rule = _rule(name, held, target[name])
            alike[held, target[name]] = rule, _key(held, target[name])
    rules = {name: alike[held, target[name]][0] for name, held in source.items()}
    keys = {name: alike[held, target[name]][1] for name, held in source.items()}
    batches = _batches(source, target, keys)
    asked = [requests(b, batch) for b, batch in enumerate(batches)]
    check_covered(batches, [rows for rows, _, _ in asked])
    remote = [(rows[~here], klass[~here]) for rows, klass, here in asked]
    local = stacked([_sorted(batches[b], rows[here]) for b, (rows, _, here) in enumerate(asked)])
    cut = lines(batches, remote)
    tree = isinstance(src, Mapping)
    return Plan(source, target, rules, batches, local, cut, digest((tree, keys)), tree)


def _side(side: Side) -> dict[str, tuple[Layout, ...]]:
    named: Mapping[str, Windows] = side if isinstance(side, Mapping) else {"": side}
    for name in named:
        if not isinstance(name, str):
            raise PlanError(f"tensor name {name!r} is not text; name tensors by str")
    out = {}
    for name, held in sorted(named.items()):
        out[name] = held if isinstance(held, tuple) else (held,)
        if not out[name] or not all(isinstance(layout, Layout) for layout in out[name]):
            raise PlanError(f"tensor {name!r} is {held!r}; give a Layout or a tuple of Layouts")
    return out


def _check_names(src: dict[str, tuple[Layout, ...]], dst: dict[str, tuple[Layout, ...]]) -> None:
    if src.keys() != dst.keys():
        only = [
            f"{side} alone has {sorted(names)[:8]}"
            for side, names in (("the source", src.keys() - dst.keys()), ("the destination", dst.keys() - src.keys()))
            if names
        ]
        raise PlanError(f"names differ: {'; '.join(only)}; give both sides the same names")


def _check_local_names(side: Mapping[str, tuple[Layout, ...]]) -> None:
    """A window's name is no tensor's."""
    for name, windows in side.items():
        for local, _ in local_tensors(name, windows) if len(windows) > 1 else ():
            if local in side:
                raise PlanError(f"window {local!r} of tensor {name!r} has the name of another tensor; rename one")


def _check_tensor(name: str, src: tuple[Layout, ...], dst: tuple[Layout, ...]) -> None:
    """All windows of both sides hold one tensor, and those of the source hold nothing twice."""
    first = src[0]
    for layout in (*src, *dst):
        if (layout.shape, layout.dtype) != (first.shape, first.dtype):
            here, there = (f"{x.dtype}{list(x.shape)}" for x in (first, layout))
            what = f"tensor {name!r}: {here} here, {there} there"
            raise PlanError(f"{what}; both sides and all windows hold one tensor of one shape and dtype")
    check_disjoint(name, src)


def _rule(name: str, src: tuple[Layout, ...], dst: tuple[Layout, ...]) -> Reduction:
    """What the Partial axes of a tensor's windows ask for, in which all windows have to agree."""
    first = reduction(src[0], dst[0])
    for b in dst:
        there = _asks(reduction(src[0], b))
        for a in src:
            rule = reduction(a, b)
            if _asks(rule) != there or (rule.op, rule.addends, rule.fill) != (first.op, first.addends, first.fill):
                what = f"tensor {name!r}: windows {a} and {src[0]} to {b} and {dst[0]} are Partial in different ways"
                raise PlanError(f"{what}; give all windows of a side the same Partial axes")
    return first


def _asks(rule: Reduction) -> tuple[object, ...]:
    """What a rule says of the destination alone."""
    return rule.chosen, [axes for _, axes in rule.matched]


def _key(src: tuple[Layout, ...], dst: tuple[Layout, ...]) -> tuple[object, ...]:
    """All that the transfers of a tensor depend on, but for its name; the same for every spelling of its layouts."""
    sides = [tuple(map(holdings_digest, side)) for side in (src, dst)]
    rules = tuple(reduction(a, b).by_ranks(a, b) for a in src for b in dst) if src[0].partial or dst[0].partial else ()
    return src[0].shape, src[0].dtype, *sides, rules if any(rules) else ()


def _batches(
    src: Mapping[str, tuple[Layout, ...]],
    dst: Mapping[str, tuple[Layout, ...]],
    keys: Mapping[str, tuple[object, ...]],
) -> tuple[Batch, ...]:
    """Tensors with one key share their templates."""
    groups: dict[tuple[object, ...], list[str]] = {}
    for name, key in keys.items():
        groups.setdefault(key, []).append(name)
    return tuple(
        Batch(template(a, b, reduction(a, b)), tuple(names), i, j)
        for names in groups.values()
        for i, a in enumerate(src[names[0]])
        for j, b in enumerate(dst[names[0]])
    )


def _sorted(batch: Batch, rows: Requests) -> Requests:
    return rows[np.lexsort((unit_order(batch.template)[rows.unit], rows.rank))]


def _transfers(p: Plan, src: int | None, dst: int | None) -> Iterator[Transfer]:
    if src is None and dst is None:
        return (t for rank in p.src_ranks for t in _transfers(p, rank, None))
    if src is None:
        return _received(p, int(dst or 0))
    return (t for t in _sent(p, src) if dst is None or t.dst_rank == dst)


def _copies(p: Plan, rank: int) -> Iterator[Transfer]:
    """What stays on the rank."""
    rows = p.local
    for i in np.flatnonzero(rows.rank == rank).tolist():
        batch = p.batches[int(rows.batch[i])]
        pieces = expand(batch.template, int(rows.unit[i]), rank, int(rows.lo[i]), int(rows.hi[i]))
        for name in batch.names:
            yield from _named(p, batch, name, rank, rank, pieces)


def _sent(p: Plan, rank: int) -> Iterator[Transfer]:
    yield from _copies(p, rank)
    for line, lo, hi in share(p.lines, rank):
        for request in between(p.lines, line, lo, hi):
            yield from _stretch(p, request, rank, lo, hi)


def _received(p: Plan, rank: int) -> Iterator[Transfer]:
    yield from _copies(p, rank)
    on = p.lines
    asked = np.flatnonzero(on.requests.rank == rank)
    line = np.searchsorted(on.first, asked, "right") - 1
    for request, n in zip(asked.tolist(), line.tolist(), strict=True):
        begin = int(on.start[request])
        end = begin + int(on.nbytes[request]) * len(p.batches[int(on.requests.batch[request])].names)
        for sender, lo, hi in senders(on, n, begin, end):
            yield from _stretch(p, request, sender, lo, hi)


def _stretch(p: Plan, request: int, sender: int, lo: int, hi: int) -> Iterator[Transfer]:
    """What the bytes lo..hi-1 of the line are of one request, sent by one holder, tensor by tensor."""
    on, rows = p.lines, p.lines.requests
    batch = p.batches[int(rows.batch[request])]
    unit, begin, end, rank = (int(x[request]) for x in (rows.unit, rows.lo, rows.hi, rows.rank))
    each, item = int(on.nbytes[request]), batch.template.src.itemsize
    lo, hi = max(lo - int(on.start[request]), 0), min(hi - int(on.start[request]), each * len(batch.names))
    whole: list[Piece] | None = None
    for i in range(lo // each, -(-hi // each)):
        a, b = max(lo - i * each, 0) // item, min(hi - i * each, each) // item
        if b - a == end - begin:
            whole = whole or expand(batch.template, unit, sender, begin, end)
            pieces = whole
        else:
            pieces = expand(batch.template, unit, sender, begin + a, begin + b)
        yield from _named(p, batch, batch.names[i], sender, rank, pieces)


def _named(p: Plan, batch: Batch, name: str, sender: int, receiver: int, pieces: list[Piece]) -> Iterator[Transfer]:
    t = batch.template
    here = local_name(name, batch.source, len(p.src[name]))
    there = local_name(name, batch.target, len(p.dst[name]))
    for piece in pieces:
        nbytes = math.prod(piece.shape) * t.src.itemsize
        op = t.reduction.op_of(piece.addend)
        yield Transfer(
            name,
            sender,
            receiver,
            op,
            here,
            piece.src,
            there,
            piece.dst,
            piece.shape,
            nbytes,
            piece.whole,
            piece.addend,
        )
