"""Simulate: the meaning of a plan or a program, with all ranks in one process, in numpy.

The oracle that every backend is compared with: obviously right and kept slow. Destination arrays
start as zeros, and their cells of the tensor as `Plan.fill`; pieces enter in order of addend; an
average is divided at the end.

>>> import numpy as np
>>> from shardmath.layouts.layout import Layout
>>> from shardmath.layouts.algebra.mesh import Mesh
>>> from shardmath.plans.plan import plan
>>> mesh = Mesh(tp=2)
>>> p = plan(Layout((4,), mesh, "(tp n)"), Layout((4,), mesh, "n"))
>>> simulate(p, {0: np.array([1, 2]), 1: np.array([3, 4])})[1]
array([1, 2, 3, 4])
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from shardmath.base.errors import PlanError
from shardmath.layouts.holdings import label
from shardmath.layouts.layout import Layout
from shardmath.plans.adjoint import Transposed
from shardmath.plans.plan import Movable, Plan
from shardmath.plans.transfers import Transfer

if TYPE_CHECKING:
    from shardmath.plans.programs.messages import Message, Step
    from shardmath.plans.programs.program import Program

__all__ = ["Array", "Shards", "simulate"]

Array: TypeAlias = NDArray[Any]
Shards: TypeAlias = Mapping[int, Array] | Mapping[int, Mapping[str, Array]]
"""Local arrays by rank; for a plan of several tensors or windows, by rank and local tensor name."""

FOLD: dict[str, Callable[[Array, Array], Array]] = {
    "copy": lambda there, piece: piece,
    "sum": np.add,
    "product": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
}
"""By a transfer's operation, the function of the value that is there and the piece that enters."""

NO_NUMBERS = "OSUMmT"
"""Kinds of numpy's dtypes that are not numbers: objects, text and times. Dtypes of other libraries have other kinds."""


def simulate(
    plan: Plan | Transposed | Program, shards: Shards
) -> dict[int, Array] | dict[int, dict[str, Array]]:
    """Run a plan or a program on numpy arrays in this process: take the source's local arrays by rank, and return the
    destination's by rank.

    A program runs round by round. A plan of two Layouts takes {rank: array} and returns {rank: array}; for
    mappings, or tensors held as several windows, the values are mappings by local name (`name`, or `name[i]`
    for window i). Arrays may have any numeric dtype. Raises PlanError if a rank or tensor is missing, or if an
    array does not have the layout's local shape.
    """
    if not isinstance(plan, Plan | Transposed):
        plan = _as_program(plan)
    if not isinstance(shards, Mapping):
        raise PlanError(
            f"source arrays are {shards!r}; give a mapping from rank to array, or to arrays by name"
        )
    held = {rank: _read_arrays(plan, shards, rank) for rank in plan.src_ranks}
    out = _make_destination(plan, held)
    if isinstance(plan, Plan | Transposed):
        _run_transfers(plan, held, out)
    else:
        _run_rounds(plan, held, out)
    for arrays in out.values():
        _divide(plan, arrays)
    if plan.is_tree or not plan.dst[""].is_single:
        return out
    return {rank: arrays[""] for rank, arrays in out.items()}


def _as_program(given: object) -> Program:
    """The value, if it is a Program. Raises PlanError if it is not.

    The class is imported here because few programs that import this module have one.
    """
    from shardmath.plans.programs.program import Program

    if not isinstance(given, Program):
        what = "pass what plan(src, dst) or schedule(plan) returns"
        raise PlanError(f"{given!r} is not a Plan; {what}")
    return given


_Arrays: TypeAlias = Mapping[int, Mapping[str, Array]]
"""Local arrays by rank and local tensor name."""


def _make_destination(plan: Movable, held: _Arrays) -> dict[int, dict[str, Array]]:
    """The destination's arrays before anything enters."""
    out: dict[int, dict[str, Array]] = {rank: {} for rank in plan.dst_ranks}
    for name, windows in plan.dst.items():
        dtype = _find_dtype(plan, name, held)
        fill = plan.fill(name)
        for key, layout in windows.locals(name):
            for rank in layout.mesh.ranks:
                array = _make_array(layout, rank, dtype, fill)
                out[rank][key] = array
    return out


def _read(t: Transfer, source: _Arrays) -> Array:
    """The piece's elements, where they are at their sender."""
    return source[t.src_rank][t.src_tensor][t.src_slices].copy()


def _enter(out: _Arrays, read: list[tuple[Transfer, Array]]) -> None:
    """Write the pieces with these elements into `out`."""
    for t, piece in read:
        fold = FOLD[t.op]
        array = out[t.dst_rank][t.dst_tensor]
        before = array[t.dst_slices]
        array[t.dst_slices] = fold(before, piece)


def _run_transfers(plan: Plan | Transposed, held: _Arrays, out: _Arrays) -> None:
    """Run all transfers of a plan, in order of addend."""
    for rank in out:
        transfers = sorted(plan.transfers(dst=rank), key=lambda t: t.addend)
        _enter(out, [(t, _read(t, held)) for t in transfers])


_Handed: TypeAlias = dict[tuple[int, int, int], list[Array]]
"""What ranks have been handed and keep in staging: elements of pieces, by rank, holder and last receiver."""


def _run_rounds(prog: Program, held: _Arrays, out: _Arrays) -> None:
    """Run all rounds of all ranks, step by step; relayed pieces are read from destination arrays."""
    steps: dict[Step, list[Message]] = {}
    for rank in prog.ranks:
        for round_ in prog.for_rank(rank):
            messages = steps.setdefault(round_.step, [])
            messages += (*round_.receives, *round_.keeps)
    handed: _Handed = {}
    for step in sorted(steps):
        _run_step(steps[step], held, out, handed)


def _run_step(messages: list[Message], held: _Arrays, out: _Arrays, handed: _Handed) -> None:
    """Move all messages of a step; all are read before any is written."""
    entering: list[tuple[Transfer, Array]] = []
    kept: _Handed = {}
    for message in messages:
        first = message.pieces[0]
        ends = first.src_rank, first.dst_rank
        if message.is_handed:
            elements = handed.pop((message.src_rank, *ends))
        else:
            source = out if message.relayed else held
            elements = [_read(t, source) for t in message.pieces]
        if message.is_handing:
            kept[message.dst_rank, *ends] = elements
        else:
            entering += zip(message.pieces, elements, strict=True)
    _enter(out, entering)
    handed.update(kept)


def _read_arrays(plan: Movable, shards: Shards, rank: int) -> dict[str, Array]:
    """The rank's source arrays by local name, checked against their layouts."""
    if rank not in shards:
        ranks = ", ".join(map(str, plan.src_ranks))
        raise PlanError(f"no source arrays for rank {rank}; give them for ranks {ranks}")
    arrays: object = shards[rank]
    named = arrays if isinstance(arrays, Mapping) else {"": arrays}
    given = cast(Mapping[str, Array], named)
    out = {}
    for name, windows in plan.src.items():
        for key, layout in windows.locals(name, rank):
            out[key] = _read_array(given, key, rank, layout)
    return out


def _read_array(given: Mapping[str, Array], key: str, rank: int, layout: Layout) -> Array:
    """One source array. Raises PlanError if it is missing, not numeric, or of another shape than the layout's."""
    if key not in given:
        fix = f"pass it with {', '.join(map(repr, given))}" if given else "pass it"
        raise PlanError(f"rank {rank}: source array {key!r} is missing; {fix}")
    what = f"rank {rank}: source array" + (f" {key!r}" if key else "")
    try:
        array = np.asarray(given[key])
    except ValueError as error:
        raise PlanError(f"{what} is not an array: {error}; pass a numpy array") from None
    if array.dtype.kind in NO_NUMBERS:
        raise PlanError(f"{what} has dtype {array.dtype}; pass an array of numbers")
    expected = layout.local_shape(rank)
    if array.shape != expected:
        local = f"but {layout} gives this rank {expected}"
        raise PlanError(f"{what} has shape {array.shape}, {local}; pass an array of that shape")
    return array


def _find_dtype(plan: Movable, name: str, held: _Arrays) -> np.dtype[Any]:
    """The dtype of all arrays of a tensor. Raises PlanError if there are several, or if integers are averaged."""
    keys = set(plan.src[name].local_names(name))
    # The last rank that holds an array of each dtype.
    rank_of: dict[np.dtype[Any], int] = {}
    for rank, arrays in held.items():
        for key in keys & arrays.keys():
            rank_of[arrays[key].dtype] = rank
    if len(rank_of) != 1:
        dtypes = ", ".join(f"{dtype} on rank {rank}" for dtype, rank in rank_of.items())
        raise PlanError(f"{label(name)} has arrays of several dtypes, {dtypes}; pass one dtype")
    dtype = next(iter(rank_of))
    if plan.divisor(name) > 1 and dtype.kind in "biu":
        what = f"{label(name)} is averaged, but has arrays of dtype {dtype}"
        raise PlanError(f"{what}; pass floating-point or complex arrays")
    return dtype


def _make_array(layout: Layout, rank: int, dtype: np.dtype[Any], fill: complex | None) -> Array:
    """An array of zeros, with the fill in the cells that hold elements of the tensor."""
    out = np.zeros(layout.local_shape(rank), dtype)
    if fill is not None:
        # Positions of holes are negative.
        held = [np.flatnonzero(index >= 0) for index in layout.indices(rank)]
        out[np.ix_(*held)] = fill
    return out


def _divide(plan: Movable, arrays: dict[str, Array]) -> None:
    """Replace the sums of averaged tensors by the averages."""
    for name, windows in plan.dst.items():
        divisor = plan.divisor(name)
        if divisor == 1:
            continue
        for key in windows.local_names(name):
            if key in arrays:
                total = arrays[key]
                arrays[key] = np.asarray(total / divisor, total.dtype)
