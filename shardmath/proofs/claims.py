"""Claims: proofs that transfers made by other code do what a plan's layouts ask for, transfer by transfer.

1. The slices, shape, size and global slices of each transfer agree, and both ends hold those global
   elements at those slices.
2. Each transfer enters by the right operation, as the right addend.
3. **Exactly once**: each destination replica receives each source addend of each of its elements
   exactly once. Boxes are a partition of what a rank holds if they lie inside it, are disjoint, and
   have its volume together.
4. Names, slices and numbers are converted to Python's own types first, whatever made them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple, SupportsIndex, TypeAlias

from shardmath.base.arguments import as_integer, listed, text
from shardmath.base.errors import PlanError
from shardmath.base.text import plural
from shardmath.layouts.algebra.box import Box, first_gap, first_overlap, from_slices, tiles
from shardmath.layouts.algebra.mesh import Mesh
from shardmath.layouts.algebra.runs import Runs
from shardmath.layouts.holdings import Windows, label
from shardmath.layouts.layout import Layout
from shardmath.plans.adjoint import Transposed, flip_of, swap_ends
from shardmath.plans.plan import Plan
from shardmath.plans.reduction import Reduction, find_reduction
from shardmath.plans.transfers import Transfer

__all__ = ["check_claim"]

MANY = 256
"""More boxes than this of one receiver are first weighed (`box.tiles`), and compared one by one only if that fails."""


def check_claim(plan: Plan | Transposed, transfers: Iterable[Transfer]) -> None:
    """Raise PlanError unless `transfers` fit the layouts of `plan` and together bring each needed element once."""
    forward = plan.forward if isinstance(plan, Transposed) else plan
    flip = flip_of(forward) if isinstance(plan, Transposed) else None
    tensors = {name: _ClaimedTensor(forward, name) for name in forward.src}
    boxes: _Boxes = {}
    for t in read_transfers(transfers):
        tensor = _find_tensor(tensors, t)
        # An adjoint's transfer is proved as the forward transfer that it reverses; only its
        # operation and addend are the adjoint's.
        forward_t = t if flip is None else swap_ends(t)
        target, op = _check_transfer(tensor, forward_t)
        entry = op, target.addend
        if flip is not None:
            entry = flip.entry(forward_t.dst_tensor, forward_t.dst_rank)
        _check_entry(t, entry)
        tensor.choose(target, forward_t)
        box = from_slices(forward_t.dst_slices)
        boxes.setdefault(target, []).append(box)
    for tensor in tensors.values():
        _check_complete(tensor, boxes)


def _find_tensor(tensors: Mapping[str, _ClaimedTensor], t: Transfer) -> _ClaimedTensor:
    """The layouts of a transfer's tensor. Raises PlanError if the plan has no such tensor."""
    if t.tensor not in tensors:
        names = ", ".join(map(repr, list(tensors)[:8]))
        what = f"{t}: the plan has no tensor {t.tensor!r}"
        raise PlanError(f"{what}; give one of its {plural(tensors, 'tensor')}, such as {names}")
    return tensors[t.tensor]


# What the layouts say


class _Target(NamedTuple):
    """The key of boxes that must form a partition: a tensor, a window, a group of ranks, and an addend.

    A group is one rank, or the ranks whose Partial addends are chosen from: any one of them receives.
    """

    tensor: str
    window: int
    group: int
    addend: int


_Boxes: TypeAlias = dict[_Target, list[Box]]


class _Addends(NamedTuple):
    """Groups and addends of the ranks of a destination window, by rank.

    `group` is the number of the rank's group, of which one rank receives. `chosen` is the number of the rank's addend
    on the axes where any one addend may receive, and is empty if there are no such axes. `through` is the number of its
    addend on the axes where addends pass through.
    """

    group: dict[int, int]
    chosen: dict[int, int]
    through: dict[int, int]


def _number_addends(mesh: Mesh, rule: Reduction) -> _Addends:
    """The groups and addends of the ranks of a mesh."""
    other_axes = [axis for axis in mesh.shape if axis not in rule.chosen]
    matched_axes = [axis for _, axes in rule.matched for axis in axes]
    # Empty if there is no choice, in which case no receiver has to be noted.
    chosen = _coordinates(mesh, rule.chosen) if rule.chosen else {}
    return _Addends(
        group=_coordinates(mesh, other_axes),
        chosen=chosen,
        through=_coordinates(mesh, matched_axes),
    )


_Choosing: TypeAlias = tuple[int, int, int]
"""A destination window, the addend that passes through, and the one that is folded."""


class _ClaimedTensor:
    """The layouts of one tensor, prepared for look-ups by rank.

    `windows` holds, for each side, the number of each window by local name. `rules[i, j]` says how
    source window i enters destination window j; `ranks[j]` has the addends of the ranks of
    destination window j.
    """

    def __init__(self, plan: Plan, name: str) -> None:
        src = plan.src[name]
        dst = plan.dst[name]
        self.name = name
        self.src = src
        self.dst = dst
        self.itemsize = src[0].itemsize
        self.windows = _number_windows(name, src), _number_windows(name, dst)
        self.rules = _list_rules(src, dst)
        self.ranks: list[_Addends] = []
        for j, b in enumerate(dst):
            # All source windows have the same Partial axes, so the first one tells how addends arrive.
            rule = self.rules[0, j]
            self.ranks.append(_number_addends(b.mesh, rule))
        # The (box, chosen addend) of transfers, each dict an ordered set.
        self.choices: dict[_Choosing, dict[tuple[Box, int], None]] = {}
        # By side, window and rank.
        self.held: dict[tuple[int, int, int], tuple[Runs, ...]] = {}

    def runs(self, side: int, window: int, rank: int) -> tuple[Runs, ...]:
        """Return, for each dimension, the Runs (map from local to global positions) of `rank` in one of the tensor's
        layouts. `window` is the index of this layout in the source (`side` 0) or in the destination (`side` 1)."""
        key = side, window, rank
        if key not in self.held:
            windows = self.dst if side else self.src
            self.held[key] = windows[window].runs(rank)
        return self.held[key]

    def choose(self, target: _Target, t: Transfer) -> None:
        """Record which of the destination's partial values `t` is added to, unless the layouts leave no choice; a whole
        tensor can be added to any of several partial sums. `target` names the destination layout, and the source's
        partial value."""
        addends = self.ranks[target.window]
        if not addends.chosen:
            return
        passing_addend = addends.through[t.dst_rank]
        key = target.window, passing_addend, target.addend
        # A dict as an ordered set: replicas mostly repeat each other.
        choice = self.choices.setdefault(key, {})
        box = from_slices(t.global_slices)
        chosen_addend = addends.chosen[t.dst_rank]
        choice[box, chosen_addend] = None


def _list_rules(src: Windows, dst: Windows) -> dict[tuple[int, int], Reduction]:
    """The reduction by which each source window enters each destination window, by window numbers."""
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


def _check_transfer(tensor: _ClaimedTensor, t: Transfer) -> tuple[_Target, str]:
    """Prove one transfer by itself; return its target and the operation by which it must enter."""
    _check_sizes(tensor, t)
    src_window = _check_end(tensor, 0, t.src_tensor, t.src_rank, t.src_slices, t)
    dst_window = _check_end(tensor, 1, t.dst_tensor, t.dst_rank, t.dst_slices, t)
    src = tensor.src[src_window]
    dst = tensor.dst[dst_window]
    rule = tensor.rules[src_window, dst_window]
    addend = _find_addend(src, dst, rule, t)
    group = tensor.ranks[dst_window].group[t.dst_rank]
    target = _Target(t.tensor, dst_window, group, addend)
    return target, rule.op_of(addend)


def _check_sizes(tensor: _ClaimedTensor, t: Transfer) -> None:
    """Check that slices, shape and bytes agree."""
    for slices in (t.src_slices, t.dst_slices, t.global_slices):
        odd = any(s.step != 1 or s.start < 0 for s in slices)
        shape = tuple(s.stop - s.start for s in slices)
        if odd or shape != t.shape:
            what = f"{t}: slices {from_slices(slices)} do not have shape {t.shape}"
            raise PlanError(f"{what}; give slices of that shape, with step 1")
    _check_shape(tensor, t)
    nbytes = math.prod(t.shape) * tensor.itemsize
    if t.nbytes != nbytes:
        what = f"{t} has nbytes={t.nbytes}, but {t.shape} elements of {tensor.itemsize} B each"
        raise PlanError(f"{what}; give nbytes={nbytes}")


def _check_shape(tensor: _ClaimedTensor, t: Transfer) -> None:
    """Check that the shape is a box of the tensor."""
    if min(t.shape, default=1) <= 0 or len(t.shape) != tensor.src[0].ndim:
        what = f"{t}: shape {t.shape} is not a box of {tensor.src[0].shape}"
        raise PlanError(f"{what}; give one positive length per dimension")


def _check_end(
    tensor: _ClaimedTensor, side: int, local: str, rank: int, slices: tuple[slice, ...], t: Transfer
) -> int:
    """The window at one end. Raises PlanError unless its rank holds the global slices at the local slices."""
    word = ("source", "destination")[side]
    if local not in tensor.windows[side]:
        names = ", ".join(map(repr, tensor.windows[side]))
        raise PlanError(f"{t}: the {word} has no local tensor {local!r}; give one of {names}")
    window = tensor.windows[side][local]
    layout = (tensor.src, tensor.dst)[side][window]
    if rank not in layout.mesh:
        what = f"{t}: rank {rank} is not in the {word} {layout}"
        raise PlanError(f"{what}; give a rank of its mesh")
    held = tensor.runs(side, window, rank)
    for d, runs in enumerate(held):
        local_range = slices[d]
        global_range = t.global_slices[d]
        if not _holds(runs, local_range, global_range):
            element = tuple(s.start for s in t.global_slices)
            has = f"rank {rank} of the {word} holds {runs} of dimension {d}"
            place = f"{local_range.start}:{local_range.stop}"
            given = (
                f"{global_range.start}:{global_range.stop} at local positions {place} of this rank"
            )
            what = f"{has}, but the transfer has {given}"
            raise PlanError(f"{t}, element {element}: {what}; give slices that the rank holds")
    return window


def _holds(runs: Runs, local_range: slice, global_range: slice) -> bool:
    """Whether these local positions hold these global positions."""
    # Runs are canonical, so both ranges lie within one segment (local start, global start, size).
    for lo, g, n in runs.segments:
        inside = lo <= local_range.start and local_range.stop <= lo + n
        if inside and g + local_range.start - lo == global_range.start:
            return True
    return False


def _find_addend(src: Layout, dst: Layout, rule: Reduction, t: Transfer) -> int:
    """The sender's addend. Raises PlanError if an addend that passes through arrives as another addend."""
    src_coords = src.mesh.coords(t.src_rank)
    dst_coords = dst.mesh.coords(t.dst_rank)
    for src_axes, dst_axes in rule.matched:
        sent = _flatten(src.mesh, src_coords, src_axes)
        received = _flatten(dst.mesh, dst_coords, dst_axes)
        if sent != received:
            sent_addend = f"addend {sent} of {'*'.join(src_axes)}"
            received_addend = f"addend {received} of {'*'.join(dst_axes)}"
            what = f"{t}: {sent_addend} arrives as {received_addend}"
            raise PlanError(f"{what}; send it to the rank of the same addend")
    return _flatten(src.mesh, src_coords, rule.folded)


def _flatten(mesh: Mesh, coords: Mapping[str, int], axes: Iterable[str]) -> int:
    """The coordinate on these axes, flattened."""
    out = 0
    for name in axes:
        out = out * mesh.axis_size(name) + coords[name]
    return out


def _check_entry(t: Transfer, expected: tuple[str, int]) -> None:
    """Check that the transfer enters by the expected operation, as the expected addend."""
    if (t.op, t.addend) == expected:
        return
    op, addend = expected
    what = f"{t} has op={t.op!r} and addend={t.addend}"
    raise PlanError(f"{what}; give op={op!r} and addend={addend}, as its layouts need")


# All together


def _check_complete(tensor: _ClaimedTensor, boxes: _Boxes) -> None:
    """Check that each replica receives each addend of each element once, and that replicas choose one receiver."""
    for window in range(len(tensor.dst)):
        _check_window(tensor, window, boxes)
    for choice in tensor.choices.values():
        global_boxes = [box for box, _ in choice]
        dst_addends = [addend for _, addend in choice]
        _check_replicas(tensor, global_boxes, dst_addends)


def _check_window(tensor: _ClaimedTensor, window: int, boxes: _Boxes) -> None:
    """Check that each replica of a window receives each addend of each element once."""
    group_of_rank = tensor.ranks[window].group
    layout = tensor.dst[window]
    ranks = layout.mesh.ranks
    # The first rank stands for its group: in reverse order it is the last that the dict keeps.
    first_of_group = {group_of_rank[rank]: rank for rank in reversed(ranks)}
    # All source windows have the same Partial axes, so the first one has the number of addends.
    addends = tensor.rules[0, window].addends
    for group, rank in first_of_group.items():
        runs = tensor.runs(1, window, rank)  # of side 1, the destination
        for addend in range(addends):
            target = _Target(tensor.name, window, group, addend)
            arrived = boxes.get(target, [])
            _check_partition(tensor, rank, runs, addend, arrived)


def _check_replicas(tensor: _ClaimedTensor, boxes: list[Box], dst_addends: list[int]) -> None:
    """Check that one source addend enters the same destination addends in all replicas.

    Its global box `boxes[i]` enters `dst_addends[i]` of some replica. No element may enter different destination
    addends in different replicas.
    """
    # With addends as labels, only overlaps of boxes that enter different addends are found.
    pair = first_overlap(boxes, dst_addends)
    if pair is None:
        return
    i, j = pair
    element = _first_common(boxes[i], boxes[j])
    what = (
        f"{label(tensor.name)}: element {element} goes to addend {dst_addends[i]} of some replicas"
    )
    fix = "send it to the same addend of all replicas"
    raise PlanError(f"{what} and to addend {dst_addends[j]} of others; {fix}")


def _check_partition(
    tensor: _ClaimedTensor, rank: int, runs: tuple[Runs, ...], addend: int, boxes: list[Box]
) -> None:
    """Check that the boxes are all that the rank holds, each element once."""
    held = []
    for r in runs:
        held.append([(lo, lo + n) for lo, _, n in r.segments])
    # A fast proof for many boxes; if it fails, the comparisons below find the element to name.
    if len(boxes) > MANY and tiles(held, boxes):
        return
    what = _name_receiver(tensor, rank, addend)
    pair = first_overlap(boxes)
    if pair is not None:
        i, j = pair
        local = _first_common(boxes[i], boxes[j])
        element = _name_element(runs, local)
        raise PlanError(f"{what} receives element {element} twice; leave out one of the transfers")
    # Disjoint boxes inside the rank's elements are all of them if they have their volume.
    volume = sum(map(_measure, boxes))
    expected = math.prod(r.size for r in runs)
    if volume != expected:
        gap = first_gap(held, boxes) or ()
        element = _name_element(runs, gap)
        raise PlanError(f"{what} never receives element {element}; add a transfer that brings it")


def _name_receiver(tensor: _ClaimedTensor, rank: int, addend: int) -> str:
    """The start of a message: the tensor, the rank, and the addend if there are several."""
    what = f"{label(tensor.name)}: rank {rank}"
    return f"{what}, addend {addend}" if tensor.rules[0, 0].addends > 1 else what


def _measure(box: Box) -> int:
    """The number of elements of a box."""
    return math.prod(hi - lo for lo, hi in box)


def _first_common(a: Box, b: Box) -> tuple[int, ...]:
    """The first common element of two boxes that overlap."""
    element = []
    for (begin, _), (other, _) in zip(a, b, strict=True):
        element.append(max(begin, other))
    return tuple(element)


def _name_element(runs: tuple[Runs, ...], local: tuple[int, ...]) -> tuple[int, ...]:
    """The global element at a local position."""
    element = []
    for dim_runs, position in zip(runs, local, strict=True):
        for local_start, start, size in dim_runs.segments:
            if local_start <= position < local_start + size:
                element.append(start + position - local_start)
    return tuple(element)


# Transfers made by other code


def read_transfers(transfers: object) -> Iterator[Transfer]:
    """Return an iterator of `transfers`, in which all ranks, sizes and offsets are converted to Python's int. Raises
    PlanError if an item is not a Transfer.

    It raises at the latest when the wrong item is reached.
    """
    if not isinstance(transfers, Iterable):
        what = f"transfers={transfers!r} is not an iterable"
        raise PlanError(f"{what}; give an iterable of shardmath.Transfer")
    return map(_read_transfer, listed(transfers, "transfers", PlanError))


def _read_transfer(given: object) -> Transfer:
    """The transfer with Python's own names, slices and numbers. Raises PlanError if it has other ones."""
    t = _require_transfer(given)
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


def _require_transfer(given: object) -> Transfer:
    """The Transfer. Raises PlanError unless it is one, with text as names and tuples of integer slices as boxes."""
    if isinstance(given, Transfer):
        names = given.tensor, given.op, given.src_tensor, given.dst_tensor
        slices = given.src_slices, given.dst_slices, given.global_slices
        named = all(isinstance(name, str) for name in names)
        if named and all(map(_is_box, slices)):
            return given
    what = "is not a Transfer with texts as names and tuples of slices between integers"
    raise PlanError(f"{given!r} {what}; give shardmath.Transfer")


def _is_box(slices: object) -> bool:
    """Whether `slices` is a tuple of slices between integers."""
    return isinstance(slices, tuple) and all(map(_is_range, slices))


def _is_range(given: object) -> bool:
    """Whether `given` is a slice between integers."""
    if not isinstance(given, slice):
        return False
    return isinstance(given.start, SupportsIndex) and isinstance(given.stop, SupportsIndex)


def _read_slices(slices: tuple[slice, ...]) -> tuple[slice, ...]:
    """The slices with Python integers as ends."""
    what = "an end of a slice of a transfer"
    out = []
    for given in slices:
        start = as_integer(given.start, what, PlanError)
        stop = as_integer(given.stop, what, PlanError)
        step = 1 if given.step is None else as_integer(given.step, what, PlanError)
        out.append(slice(start, stop, step))
    return tuple(out)
