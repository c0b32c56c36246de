"""Claims: proofs that transfers made elsewhere do what a plan's layouts ask for, one by one.

1. Each transfer's slices, shape, size and global slices agree, and both ends hold those global
   elements there.
2. Each enters by the right operation, in the place of its addend.
3. **Exactly once**: each destination replica receives each source addend of each of its elements
   exactly once. Boxes that lie inside what is held, do not meet, and have its volume together are a
   partition of it.
4. They are read as Python's own names, slices and numbers, whatever made them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple, SupportsIndex, TypeAlias

from shardmath.base.arguments import as_integer, listed, text
from shardmath.base.errors import PlanError
from shardmath.layouts.algebra.box import Box, first_gap, first_overlap, from_slices, tiles
from shardmath.layouts.algebra.mesh import Mesh
from shardmath.layouts.algebra.runs import Runs
from shardmath.layouts.holdings import Windows
from shardmath.layouts.layout import Layout
from shardmath.plans.adjoint import Transposed, flip_of, swap_ends
from shardmath.plans.plan import Plan, Transfer
from shardmath.plans.reduction import Reduction, find_reduction

__all__ = ["check_claim"]

MANY = 256
"""Boxes of one receiver that are first weighed (`box.tiles`), and compared one by one only where
that fails."""


def check_claim(plan: Plan | Transposed, transfers: Iterable[Transfer]) -> None:
    """Raise PlanError unless the transfers are right one by one, and all of them together."""
    forward = plan.forward if isinstance(plan, Transposed) else plan
    flip = flip_of(forward) if isinstance(plan, Transposed) else None
    tensors = {name: _Tensor(forward, name) for name in forward.src}
    boxes: _Boxes = {}
    for t in read_transfers(transfers):
        tensor = _find_tensor(tensors, t)
        # An adjoint's transfer is proved as the one that it turns round; its operation is its own.
        ahead = t if flip is None else swap_ends(t)
        target, op = _check(tensor, ahead)
        entry = op, target.addend
        if flip is not None:
            entry = flip.entry(ahead.dst_tensor, ahead.dst_rank)
        _check_entry(t, entry)
        tensor.choose(target, ahead)
        box = from_slices(ahead.dst_slices)
        boxes.setdefault(target, []).append(box)
    for tensor in tensors.values():
        _check_complete(tensor, boxes)


def _find_tensor(tensors: Mapping[str, _Tensor], t: Transfer) -> _Tensor:
    """What the layouts say of a transfer's tensor. Raises PlanError for a stranger."""
    if t.tensor not in tensors:
        names = ", ".join(map(repr, tensors))
        raise PlanError(f"{t}: the plan has no tensor {t.tensor!r}; its tensors are {names}")
    return tensors[t.tensor]


# What the layouts say


class _Target(NamedTuple):
    """What boxes must partition: one addend of a window of a tensor, at a rank or a group of them.

    A group is of ranks that hold addends of which any one receives.
    """

    tensor: str
    window: int
    group: int
    addend: int


_Boxes: TypeAlias = dict[_Target, list[Box]]


class _Addends(NamedTuple):
    """What the ranks of a destination window have to do with addends, by rank.

    `group` is the number of the rank's group, of which one receives, `chosen` its addend if any one
    may receive, and `through` its addend of those that pass through.
    """

    group: dict[int, int]
    chosen: dict[int, int]
    through: dict[int, int]


def _number_addends(mesh: Mesh, rule: Reduction) -> _Addends:
    """The groups and the addends of the ranks of a mesh."""
    others = [axis for axis in mesh.shape if axis not in rule.chosen]
    passing = [axis for _, axes in rule.matched for axis in axes]
    chosen = _coordinates(mesh, rule.chosen) if rule.chosen else {}
    return _Addends(
        group=_coordinates(mesh, others),
        chosen=chosen,
        through=_coordinates(mesh, passing),
    )


_Choosing: TypeAlias = tuple[int, int, int]
"""A destination window, the addend that passes through, and the one that is folded."""


class _Tensor:
    """What the layouts of one tensor say, looked up by rank.

    `windows` are, for either side, the number of each window by local name. `rules[i, j]` is how
    source window i enters destination window j, and `ranks[j]` what the ranks of destination window
    j have to do with addends.
    """

    def __init__(self, plan: Plan, name: str) -> None:
        src = plan.src[name]
        dst = plan.dst[name]
        self.name = name
        self.src = src
        self.dst = dst
        self.itemsize = src[0].itemsize
        here = _number_windows(name, src)
        there = _number_windows(name, dst)
        self.windows = here, there
        self.rules = _list_rules(src, dst)
        self.ranks: list[_Addends] = []
        for j, b in enumerate(dst):
            rule = self.rules[0, j]
            self.ranks.append(_number_addends(b.mesh, rule))
        self.choices: dict[_Choosing, dict[tuple[Box, int], None]] = {}
        self.held: dict[tuple[int, int, int], tuple[Runs, ...]] = {}

    def runs(self, side: int, window: int, rank: int) -> tuple[Runs, ...]:
        """What the rank holds of a window of the source (0) or of the destination (1)."""
        key = side, window, rank
        if key not in self.held:
            windows = self.dst if side else self.src
            self.held[key] = windows[window].runs(rank)
        return self.held[key]

    def choose(self, target: _Target, t: Transfer) -> None:
        """Note which of the destination's addends receives, where any one may."""
        ranks = self.ranks[target.window]
        if not ranks.chosen:
            return
        key = target.window, ranks.through[t.dst_rank], target.addend
        # A dict as an ordered set: replicas mostly repeat each other.
        choice = self.choices.setdefault(key, {})
        box = from_slices(t.global_slices)
        addend = ranks.chosen[t.dst_rank]
        choice[box, addend] = None


def _list_rules(src: Windows, dst: Windows) -> dict[tuple[int, int], Reduction]:
    """How each source window enters each destination window, by their numbers."""
    rules = {}
    for i, a in enumerate(src):
        for j, b in enumerate(dst):
            rules[i, j] = find_reduction(a, b)
    return rules


def _number_windows(name: str, side: Windows) -> dict[str, int]:
    """The number of each window by its local name."""
    return {local: i for i, local in enumerate(side.local_names(name))}


def _coordinates(mesh: Mesh, axes: Iterable[str]) -> dict[int, int]:
    """The coordinate of each rank on flattened axes."""
    coordinates = mesh.coordinate(axes).tolist()
    return dict(zip(mesh.ranks, coordinates, strict=True))


# One transfer


def _check(tensor: _Tensor, t: Transfer) -> tuple[_Target, str]:
    """Prove what can be said of one transfer alone.

    Returns what it is part of, and by which operation it must enter.
    """
    _check_sizes(tensor, t)
    i = _check_end(tensor, 0, t.src_tensor, t.src_rank, t.src_slices, t)
    j = _check_end(tensor, 1, t.dst_tensor, t.dst_rank, t.dst_slices, t)
    src = tensor.src[i]
    dst = tensor.dst[j]
    rule = tensor.rules[i, j]
    addend = _find_addend(src, dst, rule, t)
    groups = tensor.ranks[j].group
    group = groups[t.dst_rank]
    target = _Target(t.tensor, j, group, addend)
    op = rule.op_of(addend)
    return target, op


def _check_sizes(tensor: _Tensor, t: Transfer) -> None:
    """Slices, shape and bytes agree."""
    for slices in (t.src_slices, t.dst_slices, t.global_slices):
        odd = any(s.step != 1 or s.start < 0 for s in slices)
        shape = tuple(s.stop - s.start for s in slices)
        if odd or shape != t.shape:
            what = f"{t}: slices {from_slices(slices)} are not of shape {t.shape}"
            raise PlanError(f"{what}; all slices of a transfer list the same box")
    _check_shape(tensor, t)
    nbytes = math.prod(t.shape) * tensor.itemsize
    if t.nbytes != nbytes:
        what = f"{t}: {t.nbytes} B for {t.shape} of {tensor.itemsize} B each"
        raise PlanError(f"{what}; it is {nbytes} B")


def _check_shape(tensor: _Tensor, t: Transfer) -> None:
    """The shape is a box of the tensor."""
    if min(t.shape, default=1) <= 0 or len(t.shape) != tensor.src[0].ndim:
        what = f"{t}: shape {t.shape} is not a box of {tensor.src[0].shape}"
        raise PlanError(f"{what}; give a positive length a dimension")


def _check_end(
    tensor: _Tensor, side: int, local: str, rank: int, slices: tuple[slice, ...], t: Transfer
) -> int:
    """The window of one end, which must hold the global slices at the local ones."""
    word = ("source", "destination")[side]
    if local not in tensor.windows[side]:
        names = ", ".join(map(repr, tensor.windows[side]))
        raise PlanError(f"{t}: no {word} tensor {local!r}; they are {names}")
    window = tensor.windows[side][local]
    layout = (tensor.src, tensor.dst)[side][window]
    if rank not in layout.mesh:
        raise PlanError(f"{t}: rank {rank} is not in the {word} {layout}")
    held = tensor.runs(side, window, rank)
    for d, runs in enumerate(held):
        here = slices[d]
        there = t.global_slices[d]
        if not _holds(runs, here, there):
            element = tuple(s.start for s in t.global_slices)
            has = f"rank {rank} of the {word} holds {runs} of dimension {d}"
            given = f"{there.start}:{there.stop} at {here.start}:{here.stop}"
            raise PlanError(f"{t}: element {element}: {has}, not {given}")
    return window


def _holds(runs: Runs, here: slice, there: slice) -> bool:
    """Whether the local positions `here` are the global ones `there`.

    Runs are canonical, so these are within one segment.
    """
    for lo, g, n in runs.segments:
        inside = lo <= here.start and here.stop <= lo + n
        if inside and g + here.start - lo == there.start:
            return True
    return False


def _find_addend(src: Layout, dst: Layout, rule: Reduction, t: Transfer) -> int:
    """The sender's place in the fold; addends that pass through must stay in theirs."""
    here = src.mesh.coords(t.src_rank)
    there = dst.mesh.coords(t.dst_rank)
    for a, b in rule.matched:
        ours = _flatten(src.mesh, here, a)
        theirs = _flatten(dst.mesh, there, b)
        if ours != theirs:
            left = f"addend {ours} of {'*'.join(a)}"
            arrives = f"addend {theirs} of {'*'.join(b)}"
            what = f"{t}: {left} arrives as {arrives}"
            raise PlanError(f"{what}; addends pass through along these axes")
    return _flatten(src.mesh, here, rule.folded)


def _flatten(mesh: Mesh, coords: Mapping[str, int], axes: Iterable[str]) -> int:
    """The coordinate on flattened axes."""
    out = 0
    for name in axes:
        out = out * mesh.axis_size(name) + coords[name]
    return out


def _check_entry(t: Transfer, expected: tuple[str, int]) -> None:
    """The transfer enters by the operation and as the addend expected."""
    if (t.op, t.addend) == expected:
        return
    op, addend = expected
    what = f"{t}: enters by {t.op!r} as addend {t.addend}"
    raise PlanError(f"{what}; rank {t.src_rank} enters by {op!r} as addend {addend}")


# All together


def _check_complete(tensor: _Tensor, boxes: _Boxes) -> None:
    """Each replica receives each addend of each element once, and all choose the same receivers."""
    for window in range(len(tensor.dst)):
        _check_window(tensor, window, boxes)
    for choice in tensor.choices.values():
        made = [box for box, _ in choice]
        chosen = [addend for _, addend in choice]
        _check_replicas(tensor, made, chosen)


def _check_window(tensor: _Tensor, window: int, boxes: _Boxes) -> None:
    """Each replica of a window receives each addend of each element once."""
    # One rank stands for its group: the first, as earlier ranks come later here.
    number = tensor.ranks[window].group
    layout = tensor.dst[window]
    ranks = layout.mesh.ranks
    first = {number[rank]: rank for rank in reversed(ranks)}
    addends = tensor.rules[0, window].addends
    for group, rank in first.items():
        runs = tensor.runs(1, window, rank)
        for addend in range(addends):
            target = _Target(tensor.name, window, group, addend)
            arrived = boxes.get(target, [])
            _check_partition(tensor, rank, runs, addend, arrived)


def _check_replicas(tensor: _Tensor, boxes: list[Box], chosen: list[int]) -> None:
    """Replicas of an addend stay equal: no element goes to two different addends of the
    destination."""
    pair = first_overlap(boxes, chosen)
    if pair is None:
        return
    i, j = pair
    at = _first_common(boxes[i], boxes[j])
    what = f"tensor {tensor.name!r}: element {at} goes to addend {chosen[i]} of some replicas"
    raise PlanError(f"{what} and to addend {chosen[j]} of others; replicas have to stay equal")


def _check_partition(
    tensor: _Tensor, rank: int, runs: tuple[Runs, ...], addend: int, boxes: list[Box]
) -> None:
    """The boxes are all that the rank holds, each element once."""
    held = []
    for r in runs:
        held.append([(lo, lo + n) for lo, _, n in r.segments])
    if len(boxes) > MANY and tiles(held, boxes):
        return
    what = _name_receiver(tensor, rank, addend)
    once = "it is to be received exactly once"
    pair = first_overlap(boxes)
    if pair is not None:
        i, j = pair
        local = _first_common(boxes[i], boxes[j])
        element = _name_element(runs, local)
        raise PlanError(f"{what} receives element {element} twice; {once}")
    # Boxes that do not meet are all of it if their volume is.
    volume = sum(map(_measure, boxes))
    expected = math.prod(r.size for r in runs)
    if volume != expected:
        gap = first_gap(held, boxes) or ()
        element = _name_element(runs, gap)
        raise PlanError(f"{what} never receives element {element}; {once}")


def _name_receiver(tensor: _Tensor, rank: int, addend: int) -> str:
    """Who receives, and which addend where there are several."""
    what = f"tensor {tensor.name!r}: rank {rank}"
    return f"{what}, addend {addend}" if tensor.rules[0, 0].addends > 1 else what


def _measure(box: Box) -> int:
    """The number of elements of a box."""
    return math.prod(hi - lo for lo, hi in box)


def _first_common(a: Box, b: Box) -> tuple[int, ...]:
    """The first element of two boxes that meet."""
    element = []
    for (begin, _), (other, _) in zip(a, b, strict=True):
        element.append(max(begin, other))
    return tuple(element)


def _name_element(runs: tuple[Runs, ...], local: tuple[int, ...]) -> tuple[int, ...]:
    """The global element at a local position."""
    element = []
    for r, at in zip(runs, local, strict=True):
        for lo, g, n in r.segments:
            if lo <= at < lo + n:
                element.append(g + at - lo)
    return tuple(element)


# Transfers from elsewhere


def read_transfers(transfers: object) -> Iterator[Transfer]:
    """The transfers. Raises PlanError for what is not an iterable of them."""
    if not isinstance(transfers, Iterable):
        raise PlanError(f"transfers={transfers!r} are none; give an iterable of shardmath.Transfer")
    return map(_read, listed(transfers, "transfers", PlanError))


def _read(given: object) -> Transfer:
    """The transfer, its names, slices and numbers Python's own. Raises PlanError for what is not
    one, or has others."""
    t = _check_transfer(given)
    sizes = listed(t.shape, "sizes", PlanError)
    return Transfer(
        tensor=_read_name(t.tensor, "tensor"),
        src_rank=_read_integer(t.src_rank, "the src_rank"),
        dst_rank=_read_integer(t.dst_rank, "the dst_rank"),
        op=_read_name(t.op, "op"),
        src_tensor=_read_name(t.src_tensor, "src_tensor"),
        src_slices=_read_slices(t.src_slices),
        dst_tensor=_read_name(t.dst_tensor, "dst_tensor"),
        dst_slices=_read_slices(t.dst_slices),
        shape=tuple(_read_integer(n, "a size") for n in sizes),
        nbytes=_read_integer(t.nbytes, "the bytes"),
        global_slices=_read_slices(t.global_slices),
        addend=_read_integer(t.addend, "the addend"),
    )


def _read_name(given: object, what: str) -> str:
    return text(given, f"the {what} of a transfer", PlanError)


def _read_integer(given: object, what: str) -> int:
    return as_integer(given, f"{what} of a transfer", PlanError)


def _check_transfer(given: object) -> Transfer:
    """The Transfer, if it is one of names, and of tuples of slices between integers. Raises
    PlanError."""
    if isinstance(given, Transfer):
        names = given.tensor, given.op, given.src_tensor, given.dst_tensor
        slices = given.src_slices, given.dst_slices, given.global_slices
        named = all(isinstance(name, str) for name in names)
        if named and all(map(_is_box, slices)):
            return given
    what = "is not a Transfer whose slices have integer starts and stops"
    raise PlanError(f"{given!r} {what}; give shardmath.Transfer")


def _is_box(slices: object) -> bool:
    """Whether this is a tuple of slices between integers."""
    return isinstance(slices, tuple) and all(map(_is_range, slices))


def _is_range(given: object) -> bool:
    """Whether this is a slice between integers."""
    if not isinstance(given, slice):
        return False
    return isinstance(given.start, SupportsIndex) and isinstance(given.stop, SupportsIndex)


def _read_slices(slices: tuple[slice, ...]) -> tuple[slice, ...]:
    """The slices, between Python's integers."""
    what = "an end of a slice of a transfer"
    out = []
    for given in slices:
        start = as_integer(given.start, what, PlanError)
        stop = as_integer(given.stop, what, PlanError)
        step = 1 if given.step is None else as_integer(given.step, what, PlanError)
        out.append(slice(start, stop, step))
    return tuple(out)
