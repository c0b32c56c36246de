"""Verify: proofs that a plan, a program of it, or a list of transfers, does what two layouts ask for.

A plan is proved by its tables (`proof`), which are what its transfers expand from. Transfers from elsewhere are
proved one by one:

1. Each transfer's slices, shape, size and global slices agree, and both ends hold those global elements there.
2. Each enters by the right operation, in the place of its addend.
3. **Exactly once**: each destination replica receives each source addend of each of its elements exactly once. Boxes
   that lie inside what is held, do not meet, and have its volume together are a partition of it.

4. **All of it**: every element of a tensor is held at the destination, but of those tensors that the plan names in
   `in_part`.

`verify(p, transfers=...)` proves a claim made elsewhere against the same layouts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, SupportsIndex, TypeAlias

from shardmath.algebra.box import Box, first_gap, first_overlap, from_slices, tiles
from shardmath.algebra.mesh import Mesh
from shardmath.algebra.runs import Runs
from shardmath.base.errors import PlanError
from shardmath.base.given import listed, shown, text
from shardmath.base.integers import whole
from shardmath.layouts.layout import Layout
from shardmath.layouts.store import local_name
from shardmath.plans.adjoint import flip_of, swapped
from shardmath.plans.cover import not_whole
from shardmath.plans.plan import Plan, Transfer
from shardmath.plans.reduction import Reduction, identity_of, reduction

if TYPE_CHECKING:
    from shardmath.programs.program import Program

__all__ = ["verify"]

MANY = 256
"""Boxes of one receiver that are first weighed (`box.tiles`), and compared one by one only where that fails."""


def verify(p: Plan | Program, *, transfers: Iterable[Transfer] | None = None) -> None:
    """Raise PlanError unless the plan's or program's tables, or the transfers given, do what the layouts ask for.

    Proved is that each element that the destination holds arrives there exactly once, and that all elements of every
    tensor but those of `Plan.in_part` are held there. Without `transfers` the plan's own tables are proved, and what
    it fills in and divides by. With them the error names the first offending element.
    """
    promised = p if isinstance(p, Plan) else getattr(p, "plan", None)
    if not isinstance(promised, Plan):
        raise PlanError(f"{p!r} is not a Plan; pass what plan(src, dst) or schedule(plan) returns")
    _check_in_part(promised)
    if transfers is None:
        _prove(p, promised)
    else:
        _check_claim(promised, transfers)


def _check_in_part(p: Plan) -> None:
    """The plan says of exactly those tensors that the destination holds them in part."""
    short = not_whole(p.dst)
    if not isinstance(p.in_part, tuple) or not all(isinstance(name, str) for name in p.in_part):
        raise PlanError(f"in_part={shown(p.in_part)} is not a tuple of names; make the plan anew")
    if p.in_part != short:
        odd = sorted({*p.in_part} ^ {*short}) or list(p.in_part)
        says = "in part" if odd[0] in p.in_part else "whole"
        raise PlanError(
            f"tensor {odd[0]!r} is not held {says} at the destination of {p!r}; make the plan anew"
        )


def _prove(p: Plan | Program, promised: Plan) -> None:
    """Prove the tables, which few need who import this."""
    _check_rules(promised)
    if not isinstance(p, Plan):
        from shardmath.proofs.program_proof import prove_program

        prove_program(p)
        return
    from shardmath.proofs.plan_proof import prove

    if p.forward is not None and p.flip != flip_of(p.forward):
        raise PlanError(
            f"{p!r} does not list the transfers of {p.forward!r} with their ends swapped"
        )
    prove(p.forward or p)


def _check_claim(p: Plan, transfers: Iterable[Transfer]) -> None:
    """Prove the transfers one by one, and that all of them together are right."""
    forward = p.forward or p
    flip = flip_of(forward) if p.forward else None
    tensors = {name: _Tensor(forward, name) for name in forward.src}
    boxes: _Boxes = {}
    if not isinstance(transfers, Iterable):
        raise PlanError(f"transfers={transfers!r} are none; give an iterable of shardmath.Transfer")
    for given in listed(transfers, "transfers", PlanError):
        t = _plain(given)
        if t.tensor not in tensors:
            raise PlanError(
                f"{t}: the plan has no tensor {t.tensor!r}; its tensors are {', '.join(map(repr, tensors))}"
            )
        ahead = t if flip is None else swapped(t)
        tensor = tensors[t.tensor]
        target, op = _check(tensor, ahead)
        _check_entry(
            t, (op, target.addend) if flip is None else flip.entry(ahead.dst_tensor, ahead.dst_rank)
        )
        tensor.choose(target, ahead)
        boxes.setdefault(target, []).append(from_slices(ahead.dst_slices))
    for tensor in tensors.values():
        _check_complete(tensor, boxes)


def _check_type(t: object) -> Transfer:
    """The Transfer, if it is one of names, and of tuples of slices between integers. Raises PlanError."""
    if isinstance(t, Transfer):
        named = all(isinstance(name, str) for name in (t.tensor, t.op, t.src_tensor, t.dst_tensor))
        if named and all(map(_is_box, (t.src_slices, t.dst_slices, t.global_slices))):
            return t
    raise PlanError(
        f"{t!r} is not a Transfer whose slices have integer starts and stops; give shardmath.Transfer"
    )


def _is_box(slices: object) -> bool:
    return isinstance(slices, tuple) and all(
        isinstance(s, slice)
        and isinstance(s.start, SupportsIndex)
        and isinstance(s.stop, SupportsIndex)
        for s in slices
    )


def _plain(given: object) -> Transfer:
    """The transfer, its names, slices and numbers Python's own. Raises PlanError for what has others."""
    t = _check_type(given)
    return Transfer(
        text(t.tensor, "the tensor of a transfer", PlanError),
        whole(t.src_rank, "the src_rank of a transfer", PlanError),
        whole(t.dst_rank, "the dst_rank of a transfer", PlanError),
        text(t.op, "the op of a transfer", PlanError),
        text(t.src_tensor, "the src_tensor of a transfer", PlanError),
        _spans(t.src_slices),
        text(t.dst_tensor, "the dst_tensor of a transfer", PlanError),
        _spans(t.dst_slices),
        tuple(
            whole(n, "a size of a transfer", PlanError) for n in listed(t.shape, "sizes", PlanError)
        ),
        whole(t.nbytes, "the bytes of a transfer", PlanError),
        _spans(t.global_slices),
        whole(t.addend, "the addend of a transfer", PlanError),
    )


def _spans(slices: tuple[slice, ...]) -> tuple[slice, ...]:
    """The slices, between Python's integers."""
    what = "an end of a slice of a transfer"
    given = ((s.start, s.stop, 1 if s.step is None else s.step) for s in slices)
    return tuple(slice(*(whole(x, what, PlanError) for x in ends)) for ends in given)


def _check_rules(p: Plan) -> None:
    """What is filled in, and divided by, is what the layouts ask for."""
    forward = p.forward or p
    asked: dict[tuple[Layout, Layout], Reduction] = {}
    for name, windows in forward.src.items():
        pair = windows[0], forward.dst[name][0]
        if pair not in asked:
            asked[pair] = reduction(*pair)
        expected = asked[pair]
        if p.forward is not None:
            expected = replace(expected, fill=identity_of("sum", windows[0].dtype))
        if p.rules[name] is not expected and repr(p.rules[name]) != repr(expected):
            raise PlanError(
                f"tensor {name!r} is reduced by {p.rules[name]}; its layouts ask for {expected}"
            )


def _check_entry(t: Transfer, expected: tuple[str, int]) -> None:
    if (t.op, t.addend) != expected:
        raise PlanError(
            f"{t}: enters by {t.op!r} as addend {t.addend}; "
            f"rank {t.src_rank} enters by {expected[0]!r} as addend {expected[1]}"
        )


class _Target(NamedTuple):
    """What boxes must partition: one addend of a window of a tensor at a rank, or at any rank of a group of addends."""

    tensor: str
    window: int
    group: int
    addend: int


_Boxes: TypeAlias = dict[_Target, list[Box]]


class _Tensor:
    """What the layouts of one tensor say, looked up by rank."""

    def __init__(self, p: Plan, name: str) -> None:
        self.name, self.src, self.dst = name, p.src[name], p.dst[name]
        self.itemsize = self.src[0].itemsize
        self.windows = [
            {local_name(name, i, len(side)): i for i in range(len(side))}
            for side in (self.src, self.dst)
        ]
        self.rules = {
            (i, j): reduction(a, b) for i, a in enumerate(self.src) for j, b in enumerate(self.dst)
        }
        chosen = [self.rules[0, j].chosen for j in range(len(self.dst))]
        self.groups = [
            _at(x.mesh, _others(x.mesh, axes)) for x, axes in zip(self.dst, chosen, strict=True)
        ]
        self.chosen = [
            _at(x.mesh, axes) if axes else {} for x, axes in zip(self.dst, chosen, strict=True)
        ]
        self.through = [_at(x.mesh, _through(self.rules[0, j])) for j, x in enumerate(self.dst)]
        self.choices: dict[tuple[int, int, int], dict[tuple[Box, int], None]] = {}
        self.held: dict[tuple[int, int, int], tuple[Runs, ...]] = {}

    def runs(self, side: int, window: int, rank: int) -> tuple[Runs, ...]:
        """What the rank holds of a window of the source (0) or of the destination (1)."""
        key = (side, window, rank)
        if key not in self.held:
            self.held[key] = (self.src, self.dst)[side][window].runs(rank)
        return self.held[key]

    def choose(self, target: _Target, t: Transfer) -> None:
        """Note which of the destination's addends receives, where any one may."""
        j = target.window
        if self.chosen[j]:
            choice = self.choices.setdefault((j, self.through[j][t.dst_rank], target.addend), {})
            choice[from_slices(t.global_slices), self.chosen[j][t.dst_rank]] = None


def _through(rule: Reduction) -> tuple[str, ...]:
    return tuple(name for _, axes in rule.matched for name in axes)


def _others(mesh: Mesh, names: Iterable[str]) -> tuple[str, ...]:
    left_out = set(names)
    return tuple(name for name in mesh.shape if name not in left_out)


def _at(mesh: Mesh, axes: Iterable[str]) -> dict[int, int]:
    return dict(zip(mesh.ranks, mesh.coordinate(axes).tolist(), strict=True))


def _check(tensor: _Tensor, t: Transfer) -> tuple[_Target, str]:
    """Prove what can be said of one transfer alone; what it is part of, and by which operation it must enter."""
    _check_sizes(tensor, t)
    i = _end(tensor, 0, t.src_tensor, t.src_rank, t.src_slices, t)
    j = _end(tensor, 1, t.dst_tensor, t.dst_rank, t.dst_slices, t)
    rule = tensor.rules[i, j]
    addend = _addend(tensor.src[i], tensor.dst[j], rule, t)
    return _Target(t.tensor, j, tensor.groups[j][t.dst_rank], addend), rule.op_of(addend)


def _check_sizes(tensor: _Tensor, t: Transfer) -> None:
    for slices in (t.src_slices, t.dst_slices, t.global_slices):
        if (
            any(s.step not in (None, 1) or s.start < 0 for s in slices)
            or tuple(s.stop - s.start for s in slices) != t.shape
        ):
            what = f"{t}: slices {from_slices(slices)} are not of shape {t.shape}"
            raise PlanError(f"{what}; all slices of a transfer list the same box")
    if any(n <= 0 for n in t.shape) or len(t.shape) != tensor.src[0].ndim:
        raise PlanError(
            f"{t}: shape {t.shape} is not a box of {tensor.src[0].shape}; give a positive length a dimension"
        )
    if t.nbytes != math.prod(t.shape) * tensor.itemsize:
        raise PlanError(
            f"{t}: {t.nbytes} B for {t.shape} of {tensor.itemsize} B each; "
            f"it is {math.prod(t.shape) * tensor.itemsize} B"
        )


def _end(
    tensor: _Tensor, side: int, local: str, rank: int, slices: tuple[slice, ...], t: Transfer
) -> int:
    """The window of one end, which must hold the global slices at the local ones."""
    word = ("source", "destination")[side]
    if local not in tensor.windows[side]:
        raise PlanError(
            f"{t}: no {word} tensor {local!r}; they are {', '.join(map(repr, tensor.windows[side]))}"
        )
    window = tensor.windows[side][local]
    layout = (tensor.src, tensor.dst)[side][window]
    if rank not in layout.mesh:
        raise PlanError(f"{t}: rank {rank} is not in the {word} {layout}")
    held = tensor.runs(side, window, rank)
    for d, (runs, here, there) in enumerate(zip(held, slices, t.global_slices, strict=True)):
        if not _holds(runs, here, there):
            element = tuple(s.start for s in t.global_slices)
            raise PlanError(
                f"{t}: element {element}: rank {rank} of the {word} holds {runs} of dimension {d}, not "
                f"{there.start}:{there.stop} at {here.start}:{here.stop}"
            )
    return window


def _holds(runs: Runs, here: slice, there: slice) -> bool:
    """Whether the local positions `here` are the global ones `there`; within one segment, as runs are canonical."""
    return any(
        lo <= here.start and here.stop <= lo + n and g + here.start - lo == there.start
        for lo, g, n in runs.segments
    )


def _addend(src: Layout, dst: Layout, rule: Reduction, t: Transfer) -> int:
    """The sender's place in the fold; addends that pass through must stay in theirs."""
    here, there = src.mesh.coords(t.src_rank), dst.mesh.coords(t.dst_rank)
    for a, b in rule.matched:
        ours, theirs = _flat(src.mesh, here, a), _flat(dst.mesh, there, b)
        if ours != theirs:
            what = (
                f"{t}: addend {ours} of {'*'.join(a)} arrives as addend {theirs} of {'*'.join(b)}"
            )
            raise PlanError(f"{what}; addends pass through along these axes")
    return _flat(src.mesh, here, rule.folded)


def _flat(mesh: Mesh, coords: Mapping[str, int], axes: Iterable[str]) -> int:
    """The coordinate on flattened axes."""
    out = 0
    for name in axes:
        out = out * mesh.axis_size(name) + coords[name]
    return out


def _check_complete(tensor: _Tensor, boxes: _Boxes) -> None:
    """Prove that each replica receives each addend of each element once, and that all choose the same receivers."""
    for j, layout in enumerate(tensor.dst):
        for group, rank in {
            tensor.groups[j][rank]: rank for rank in reversed(layout.mesh.ranks)
        }.items():
            runs = tensor.runs(1, j, rank)
            for addend in range(tensor.rules[0, j].addends):
                _check_partition(
                    tensor,
                    rank,
                    runs,
                    addend,
                    boxes.get(_Target(tensor.name, j, group, addend), []),
                )
    for choice in tensor.choices.values():
        _check_replicas(tensor, [box for box, _ in choice], [chosen for _, chosen in choice])


def _check_replicas(tensor: _Tensor, boxes: list[Box], chosen: list[int]) -> None:
    """Replicas of an addend stay equal: no element goes to two different addends of the destination."""
    pair = first_overlap(boxes, chosen)
    if pair is not None:
        a, b = (boxes[i] for i in pair)
        at = tuple(max(x[0], y[0]) for x, y in zip(a, b, strict=True))
        what = f"tensor {tensor.name!r}: element {at} goes to addend {chosen[pair[0]]} of some replicas"
        raise PlanError(
            f"{what} and to addend {chosen[pair[1]]} of others; replicas have to stay equal"
        )


def _check_partition(
    tensor: _Tensor, rank: int, runs: tuple[Runs, ...], addend: int, boxes: list[Box]
) -> None:
    what = f"tensor {tensor.name!r}: rank {rank}" + (
        f", addend {addend}" if tensor.rules[0, 0].addends > 1 else ""
    )
    held = [[(lo, lo + n) for lo, _, n in r.segments] for r in runs]
    if len(boxes) > MANY and tiles(held, boxes):
        return
    pair = first_overlap(boxes)
    if pair is not None:
        at = _element(
            runs,
            tuple(max(a[0], b[0]) for a, b in zip(boxes[pair[0]], boxes[pair[1]], strict=True)),
        )
        raise PlanError(f"{what} receives element {at} twice; it is to be received exactly once")
    if sum(math.prod(hi - lo for lo, hi in box) for box in boxes) != math.prod(
        r.size for r in runs
    ):
        gap = first_gap(held, boxes)
        raise PlanError(
            f"{what} never receives element {_element(runs, gap or ())}; it is to be received exactly once"
        )


def _element(runs: tuple[Runs, ...], local: tuple[int, ...]) -> tuple[int, ...]:
    """The global element at a local position."""
    spans = (
        (at, next(s for s in r.segments if s[0] <= at < s[0] + s[2]))
        for r, at in zip(runs, local, strict=True)
    )
    return tuple(g + at - lo for at, (lo, g, _) in spans)
