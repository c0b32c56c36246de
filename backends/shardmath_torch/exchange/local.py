"""The tensors that a rank passes, checked against what a plan's layouts store there.

1. A plan of two layouts takes a tensor a side; a plan of mappings takes dicts by local buffer key; a side that the rank
   is not on takes None.
2. Nothing is converted: a wrong shape, dtype or kind of device is an objection that names both and the fix.
3. Its memory must be there (`memory`): a move that found out later would have begun.
4. Source and destination may be any views, but must not share memory: what arrives would overwrite what has not left.
   Destinations must not share cells that are theirs; holes may be another's.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardmath.base.errors import ExchangeError
from shardmath.layouts.layout import Layout
from shardmath.plans.plan import Movable
from shardmath.programs.part import own_boxes, stored_on
from shardmath_torch.exchange.memory import missing_memory, plain, reach, stored_bytes

__all__ = [
    "Local",
    "Tensors",
    "Wanted",
    "by_key",
    "check",
    "fits",
    "overlaps_itself",
    "signature",
    "wanted",
]

Local: TypeAlias = Tensor | Mapping[str, Tensor] | None
"""What a rank passes for one side."""
Tensors: TypeAlias = Mapping[str, Tensor]


class Wanted(NamedTuple):
    """What a rank stores on one side: local buffer key -> (local shape, layout); `single`: one tensor, not a dict."""

    side: str
    rank: int
    tensors: Mapping[str, tuple[tuple[int, ...], Layout]]
    single: bool


def wanted(plan: Movable, rank: int) -> tuple[Wanted, Wanted]:
    """What `rank` passes to a move of the plan: source and destination."""
    sides = []
    for side, layouts in (("source", plan.src), ("destination", plan.dst)):
        stored = {
            key: (layout.local_shape(rank), layout)
            for key, (_, layout) in stored_on(layouts, rank).items()
        }
        sides.append(Wanted(side, rank, stored, not plan.is_tree and len(layouts[""]) == 1))
    return sides[0], sides[1]


def by_key(want: Wanted, given: Local) -> Tensors:
    """The side's tensors, without subclasses that can be seen through, by local buffer key.

    Raises ExchangeError for names that are missing or too many.
    """
    if given is None:
        given = {}
    elif isinstance(given, Tensor):
        if not want.single:
            raise ExchangeError(
                f"the {want.side} is one tensor; the plan has names: pass a dict with {_names(want.tensors)}"
            )
        given = {"": given}
    elif not isinstance(given, Mapping):
        raise ExchangeError(
            f"the {want.side} is {type(given).__name__}; pass a tensor, a dict of tensors, or None"
        )
    elif want.single and given:
        what = f"the {want.side} is a dict with {_names(given)}; the plan has one tensor"
        raise ExchangeError(f"{what}: pass it without a dict")
    _check_names(want, given)
    return {key: plain(t) if isinstance(t, Tensor) else t for key, t in given.items()}


def check(wants: tuple[Wanted, Wanted], given: tuple[Tensors, Tensors], device_type: str) -> None:
    """Raises ExchangeError for the first tensor that does not fit."""
    for want, tensors in zip(wants, given, strict=True):
        fits(want, tensors, device_type)
    _check_writable(given[1])
    _check_one_device(*given)
    _check_apart(*given)
    _check_distinct(wants[1], given[1])


def fits(want: Wanted, tensors: Tensors, device_type: str | None = None) -> None:
    """Raises ExchangeError for the first tensor of a side that is not as stored there, or not on such a device."""
    for key, (shape, layout) in want.tensors.items():
        _check(_label(want.side, key), tensors[key], shape, layout, device_type)


def signature(given: tuple[Tensors, Tensors]) -> tuple[object, ...]:
    """Equal for plain tensors that lie at the same place in the same way: what was checked need not be again.

    A storage that shrank may stay where it was, so its size counts.
    """
    return tuple((key, *_lies(t)) for side in given for key, t in side.items())


def _lies(t: object) -> tuple[object, ...]:
    if not isinstance(t, Tensor) or t.layout != torch.strided or missing_memory(t):
        return (object(),)
    return (
        t.data_ptr(),
        stored_bytes(t),
        t.shape,
        t.stride(),
        t.dtype,
        t.device,
        t.is_conj(),
        t.is_neg(),
    )


def _label(side: str, key: str) -> str:
    return f"{side} tensor {key!r}" if key else f"the {side} tensor"


def _check_names(want: Wanted, given: Tensors) -> None:
    lacking = [key for key in want.tensors if key not in given]
    if lacking:
        what = f"{_label(want.side, lacking[0])} is missing: {_names(given)} given"
        out = " as out=" if want.side == "destination" else ""
        raise ExchangeError(f"{what}; pass {_names(want.tensors)}{out}")
    extra = [key for key in given if key not in want.tensors]
    if extra and not want.tensors:
        what = (
            f"{_label(want.side, extra[0])} is given, but this rank is not on the {want.side} side"
        )
        raise ExchangeError(f"{what}; pass None")
    if extra:
        what = f"{_label(want.side, extra[0])} is not one that this rank stores"
        raise ExchangeError(f"{what}; pass {_names(want.tensors)}")


def _names(keys: Mapping[str, object]) -> str:
    shown = [repr(key) for key in keys if key]
    few = ", ".join(shown[:8]) + (f", ... ({len(shown)} in all)" if len(shown) > 8 else "")
    return few or ("one tensor" if "" in keys else "nothing")


def _check(
    label: str, tensor: object, shape: tuple[int, ...], layout: Layout, device_type: str | None
) -> None:
    if not isinstance(tensor, Tensor):
        raise ExchangeError(f"{label} is {type(tensor).__name__}; pass a torch.Tensor")
    if isinstance(tensor, DTensor):
        raise ExchangeError(f"{label} is a DTensor; pass its local tensor, tensor.to_local()")
    if tensor.is_nested:
        raise ExchangeError(f"{label} is a nested tensor, which has no shape; pass a plain one")
    dtype = str(tensor.dtype).removeprefix("torch.")
    if tuple(tensor.shape) != shape:
        what = f"{label} has shape {tuple(tensor.shape)}, the plan's layout stores {shape} there"
        raise ExchangeError(f"{what}; pass the local tensor of {layout}")
    if dtype != layout.dtype:
        what = f"{label} has dtype {dtype}, the plan's layout has {layout.dtype}"
        raise ExchangeError(
            f"{what}; pass a tensor of {layout.dtype}, or plan with dtype={dtype!r}"
        )
    if device_type is not None and tensor.device.type != device_type:
        what = f"{label} is on device '{tensor.device}', the process group moves tensors on '{device_type}'"
        raise ExchangeError(
            f"{what}; pass it on '{device_type}', or compile on a group for '{tensor.device.type}'"
        )
    if tensor.layout != torch.strided or tensor.is_conj() or tensor.is_neg():
        raise ExchangeError(
            f"{label} is {_kind(tensor)}; pass a plain strided tensor: {_made_plain(tensor)}"
        )
    lacks = missing_memory(tensor)
    if lacks:
        raise ExchangeError(
            f"{label} {lacks}; pass a plain tensor on its own memory, while that is there"
        )


def _kind(tensor: Tensor) -> str:
    return (
        "a lazy conjugate or negative"
        if tensor.layout == torch.strided
        else f"stored as {tensor.layout}"
    )


def _made_plain(tensor: Tensor) -> str:
    return ".resolve_conj().resolve_neg()" if tensor.layout == torch.strided else ".to_dense()"


def _check_writable(dst: Tensors) -> None:
    for key, t in dst.items():
        if overlaps_itself(t):
            what = (
                f"{_label('destination', key)} has shape {tuple(t.shape)} and strides {t.stride()}"
            )
            raise ExchangeError(
                f"{what}, which put several elements into one cell; pass .contiguous() of it"
            )


def overlaps_itself(t: Tensor) -> bool:
    """Whether two elements may lie in one cell.

    Of a small tensor it is known; a large one must nest: each stride steps over all that smaller ones reach.
    """
    reach = 0
    dims = sorted((step, n) for n, step in zip(t.shape, t.stride(), strict=True) if n > 1)
    for step, n in dims:
        if step <= reach:
            return t.numel() > COUNTED or not _all_apart(dims, t.numel())
        reach += (n - 1) * step
    return False


COUNTED = 1 << 20
"""Elements of a tensor whose cells are looked at one by one."""


def _all_apart(dims: list[tuple[int, int]], count: int) -> bool:
    """Whether so many elements of these strides and lengths lie in as many cells."""
    if not count:
        return True
    cells = np.zeros(1, np.int64)
    for step, n in dims:
        cells = np.add.outer(cells, step * np.arange(n)).reshape(-1)
    return len(np.unique(cells)) == count


def _check_distinct(want: Wanted, dst: Tensors) -> None:
    """No cell is two destinations' own, as it would be for tied weights that are passed twice."""
    for one, other in _meeting(dst):
        boxes = [own_boxes(want.tensors[key][1].runs(want.rank)) for key in (one, other)]
        for a, b in itertools.product(*boxes):
            if _share(dst[one][a], dst[other][b]):
                what = (
                    f"{_label('destination', one)} and {_label('destination', other)} share memory"
                )
                raise ExchangeError(
                    f"{what}: one would overwrite the other; pass tensors of their own"
                )


def _meeting(tensors: Tensors) -> Iterator[tuple[str, str]]:
    """Pairs of keys whose stretches of memory meet."""
    active: list[tuple[int, str]] = []
    for start, end, key in sorted((*_extent(t), key) for key, t in tensors.items() if t.numel()):
        active = [span for span in active if span[0] > start]
        yield from ((name, key) for _, name in active)
        active.append((end, key))


def _check_one_device(src: Tensors, dst: Tensors) -> None:
    first: tuple[str, torch.device] | None = None
    for side, tensors in (("source", src), ("destination", dst)):
        for key, t in tensors.items():
            first = first or (_label(side, key), t.device)
            if t.device != first[1]:
                what = f"{_label(side, key)} is on device '{t.device}', {first[0]} on '{first[1]}'"
                raise ExchangeError(f"{what}; pass all tensors of a rank on one device")


def _check_apart(src: Tensors, dst: Tensors) -> None:
    for here, there in _suspects(src, dst):
        if _share(src[here], dst[there]):
            what = f"{_label('source', here)} and {_label('destination', there)} share memory"
            raise ExchangeError(
                f"{what}: arriving bytes would overwrite some that have not left; pass a clone of one"
            )


def _suspects(src: Tensors, dst: Tensors) -> Iterator[tuple[str, str]]:
    """Pairs (source key, destination key) whose stretches of memory meet: one sweep over their starts."""
    spans = sorted(
        (*_extent(t), side, key)
        for side, ts in enumerate((src, dst))
        for key, t in ts.items()
        if t.numel()
    )
    active: tuple[list[tuple[int, str]], list[tuple[int, str]]] = ([], [])
    for start, end, side, key in spans:
        other = active[1 - side]
        other[:] = [span for span in other if span[0] > start]
        yield from ((key, name) if side == 0 else (name, key) for _, name in other)
        active[side].append((end, key))


def _extent(t: Tensor) -> tuple[int, int]:
    """First and one past the last byte of memory that the tensor uses."""
    return t.data_ptr(), t.data_ptr() + reach(t) * t.element_size()


class _Cells:
    """The tensor's addresses as numpy sees them; its memory is never read."""

    def __init__(self, t: Tensor) -> None:
        strides = tuple(step * t.element_size() for step in t.stride())
        self.__array_interface__ = {
            "version": 3,
            "data": (t.data_ptr(), True),
            "shape": tuple(t.shape),
            "strides": strides,
            "typestr": f"|V{t.element_size()}",
        }


def _share(a: Tensor, b: Tensor) -> bool:
    """Whether the tensors have a byte in common; yes where that is too hard to tell."""
    shares: Callable[..., bool] = (
        np.shares_memory
    )  # numpy's own types know two values of max_work only
    try:
        return shares(np.asarray(_Cells(a)), np.asarray(_Cells(b)), max_work=100_000)
    except np.exceptions.TooHardError:
        return True
