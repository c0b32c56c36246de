"""Local: the tensors that a rank passes, checked against a plan's layouts.

1. A plan of two layouts takes one tensor per side; a plan of mappings takes dicts by local buffer
   key; a side without this rank takes None.
2. Nothing is converted: a wrong shape, dtype or kind of device is an objection that names both and
   the fix.
3. A tensor's memory must exist (`memory`), which is checked before a move begins.
4. Tensors may not share memory that a move writes (`apart`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardmath.base.errors import ExchangeError
from shardmath.layouts.holdings import Windows
from shardmath.layouts.layout import Layout
from shardmath.plans.plan import Movable
from shardmath.plans.programs.part import layouts_on, own_boxes
from shardmath_torch.moves.exchange.glance import Glance, are_apart, look, sign_memory
from shardmath_torch.moves.exchange.memory import missing_memory, plain
from shardmath_torch.moves.exchange.overlaps import (
    find_meeting,
    find_meeting_sides,
    overlaps_itself,
    shares_memory,
)

__all__ = [
    "Local",
    "Tensors",
    "Wanted",
    "by_key",
    "check",
    "check_device",
    "check_memory",
    "check_written",
    "fits",
    "signature",
    "want_side",
    "wanted",
    "witness",
]

Local: TypeAlias = Tensor | Mapping[str, Tensor] | None
"""The tensors that a rank passes for one side."""
Tensors: TypeAlias = Mapping[str, Tensor]

MOST_NAMES = 8
"""Most names that an error shows."""


class Wanted(NamedTuple):
    """The tensors that a rank must pass for one side (source or destination): name -> (local shape, layout).

    If `single`, the rank passes one tensor instead of a dict.
    """

    side: str
    rank: int
    tensors: Mapping[str, tuple[tuple[int, ...], Layout]]
    single: bool


def wanted(plan: Movable, rank: int) -> tuple[Wanted, Wanted]:
    """Return the names, shapes and layouts of the tensors that `rank` must pass to a move: source, and destination."""
    sides = []
    for side, layouts in (("source", plan.src), ("destination", plan.dst)):
        # A plan that is not of mappings calls its tensor "".
        single = not plan.is_tree and layouts[""].is_single
        sides.append(want_side(side, rank, layouts, single))
    return sides[0], sides[1]


def want_side(side: str, rank: int, windows: Mapping[str, Windows], single: bool) -> Wanted:
    """Return what `rank` must pass for one side, called `side` in errors, of which it holds its part of `windows`: one
    tensor instead of a dict if `single`."""
    layouts = layouts_on(windows, rank)
    # Tens of thousands of tensors have few layouts, which are looked at once.
    entries = {layout: (layout.local_shape(rank), layout) for layout in set(layouts.values())}
    tensors = {key: entries[layout] for key, layout in layouts.items()}
    return Wanted(side, rank, tensors, single)


# Names


def by_key(want: Wanted, given: Local) -> Tensors:
    """Return the tensors `given` for one side (source or destination) as a dict by name. Raises ExchangeError if their
    names are not the names in `want`. Subclasses become plain tensors, except Parameters and classes with a custom
    `__torch_dispatch__`."""
    named = _name_tensors(want, given)
    _check_names(want, named)
    return {key: plain(t) if isinstance(t, Tensor) else t for key, t in named.items()}


def _name_tensors(want: Wanted, given: Local) -> Tensors:
    """The tensors as a mapping. Raises ExchangeError for one tensor instead of a dict, and the other way round."""
    if given is None:
        return {}
    if isinstance(given, Tensor):
        if want.single:
            return {"": given}
        what = f"the {want.side} is one tensor, but the plan has tensors by name"
        fix = f"pass a dict with {_list_names(want.tensors)}" if want.tensors else "pass None"
        raise ExchangeError(f"{what}; {fix} on rank {want.rank}")
    if not isinstance(given, Mapping):
        raise ExchangeError(
            f"the {want.side} is of type {type(given).__name__}; "
            "pass a torch.Tensor, a dict of tensors by name, or None"
        )
    if want.single and given:
        what = f"the {want.side} is a dict with {_list_names(given)}, but the plan has one tensor"
        raise ExchangeError(f"{what}; pass that tensor without a dict")
    return given


def _check_names(want: Wanted, given: Tensors) -> None:
    """Raise ExchangeError for a missing name, and for an unknown one."""
    if given.keys() == want.tensors.keys():
        return
    for key in want.tensors:
        if key not in given:
            what = f"{_label(want.side, key)} is missing: {_list_names(given)} given"
            out = " as out=" if want.side == "destination" else ""
            raise ExchangeError(f"{what}; pass {_list_names(want.tensors)}{out}")
    for key in given:
        if key in want.tensors:
            continue
        label = _label(want.side, key)
        if not want.tensors:
            what = f"{label} is given, but rank {want.rank} is not on the plan's {want.side} side"
            raise ExchangeError(f"{what}; {'pass None' if want.single else 'leave it out'}")
        what = f"{label} is given, but the plan has no such tensor on rank {want.rank}"
        raise ExchangeError(f"{what}; pass {_list_names(want.tensors)}")


def _label(side: str, key: str) -> str:
    """The words for a tensor in errors."""
    return f"{side} tensor {key!r}" if key else f"the {side} tensor"


def _list_names(keys: Mapping[str, object]) -> str:
    """The first MOST_NAMES names, with the total number if there are more."""
    names = [repr(key) for key in keys if key]
    if not names:
        return "one tensor" if "" in keys else "nothing"
    listed = ", ".join(names[:MOST_NAMES])
    if len(names) > MOST_NAMES:
        listed += f", ... ({len(names)} in all)"
    return listed


# Each tensor


def fits(want: Wanted, tensors: Tensors, device: torch.device | None = None) -> None:
    """Raise ExchangeError for the first of one side's `tensors` that a move cannot take: one that has another shape or
    dtype than in `want`, is not on `device` (if given), or does not have its elements in strided memory, such as a
    sparse tensor."""
    for key, (shape, layout) in want.tensors.items():
        label = _label(want.side, key)
        tensor = tensors[key]
        _check_kind(label, tensor)
        _check_shape(label, tensor, shape, layout)
        if device is not None:
            check_device(label, tensor, device)
        check_memory(label, tensor)


def _check_kind(label: str, tensor: object) -> None:
    """Raise ExchangeError for an object that is not a tensor, and for a DTensor or nested tensor."""
    if not isinstance(tensor, Tensor):
        raise ExchangeError(f"{label} is of type {type(tensor).__name__}; pass a torch.Tensor")
    if isinstance(tensor, DTensor):
        what = f"{label} is a DTensor, where a move takes a rank's local tensor"
        raise ExchangeError(f"{what}; pass tensor.to_local()")
    if tensor.is_nested:
        what = f"{label} is a nested tensor, where a move takes a tensor of one shape"
        raise ExchangeError(f"{what}; pass a plain tensor, as from tensor.to_padded_tensor(0.0)")


def _check_shape(label: str, tensor: Tensor, shape: tuple[int, ...], layout: Layout) -> None:
    """Raise ExchangeError if shape or dtype differ from the layout's."""
    if tuple(tensor.shape) != shape:
        what = f"{label} has shape {tuple(tensor.shape)}, the plan's layout stores {shape} there"
        raise ExchangeError(f"{what}; pass the local tensor of {layout}")
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype != layout.dtype:
        what = f"{label} has dtype {dtype}, the plan's layout has {layout.dtype}"
        fix = f"pass a tensor of {layout.dtype}, or plan with dtype={dtype!r}"
        raise ExchangeError(f"{what}; {fix}")


def check_device(label: str, tensor: Tensor, device: torch.device) -> None:
    """Raise ExchangeError unless `tensor` is on `device`, the only one whose tensors the process group can move.
    `label` names the tensor in the error."""
    if tensor.device != device:
        what = (
            f"{label} is on device '{tensor.device}', the process group moves tensors on '{device}'"
        )
        fix = f"pass it on '{device}', or compile on a group for '{tensor.device}'"
        raise ExchangeError(f"{what}; {fix}")


def check_memory(label: str, tensor: Tensor) -> None:
    """Raise ExchangeError if the tensor's memory does not hold its values: if it is sparse, a lazy conjugate or
    negative view, or has no memory, as on the meta device. `label` names the tensor in the error."""
    if tensor.layout != torch.strided:
        what = f"{label} is stored as {tensor.layout}, where a move takes {torch.strided}"
        raise ExchangeError(f"{what}; pass tensor.to_dense()")
    if tensor.is_conj() or tensor.is_neg():
        what = f"{label} is a lazy conjugate or negative, whose memory does not have its values"
        fix = "pass tensor.resolve_conj().resolve_neg()"
        raise ExchangeError(f"{what}; {fix}")
    fault = missing_memory(tensor)
    if fault:
        fix = "pass a plain tensor whose memory has not been freed"
        raise ExchangeError(f"{label} {fault}; {fix}")


# All tensors together


def check(
    wants: tuple[Wanted, Wanted],
    given: tuple[Tensors, Tensors],
    device: torch.device,
    apart: bool = True,
    signed: tuple[list[object], list[object]] | None = None,
) -> None:
    """Raise ExchangeError for a tensor in `given` (sources, destinations) that does not fit its layout in `wants` or is
    not on `device`, and for a destination that shares memory with itself or another destination. With `apart`,
    destinations must not share memory with sources, either. `signed` is the tensors' `signature`, if the caller has it.
    """
    src, dst = given
    # Many tensors are checked at a glance; one by one only if they do not pass.
    src_seen, dst_seen = map(look, given, signed or signature(given))
    for want, tensors, seen in zip(wants, given, (src_seen, dst_seen), strict=True):
        if seen is None or not seen.fits(want.tensors, device):
            fits(want, tensors, device)
    if dst_seen is None or not dst_seen.is_writable:
        _check_writable(dst)
    if apart and not _are_apart(src_seen, dst_seen):
        _check_sides_apart(src, dst)
    if not _are_apart(dst_seen):
        _check_destinations_apart(wants[1], dst)


def _are_apart(*seen: Glance | None) -> bool:
    """Whether a glance shows that no two tensors overlap."""
    return None not in seen and are_apart(*filter(None, seen))


def check_written(written: Tensors, src: Tensors, others: Tensors) -> None:
    """Raise ExchangeError if a tensor in `written` shares memory with itself, with a source in `src`, or with another
    tensor in `written` or `others`. `written` are destinations whose values are computed after a move, and `others` are
    the remaining destinations."""
    _check_writable(written)
    _check_sides_apart(src, written)
    dst = {**others, **written}
    for key, other in find_meeting(dst):
        if (key in written or other in written) and shares_memory(dst[key], dst[other]):
            raise ExchangeError(_word_shared(key, other))


def _check_writable(dst: Tensors) -> None:
    """Raise ExchangeError for a destination in which several elements share memory."""
    for key, tensor in dst.items():
        if overlaps_itself(tensor):
            label = _label("destination", key)
            what = f"{label} has shape {tuple(tensor.shape)} and strides {tensor.stride()}"
            why = "which put several elements at one address"
            raise ExchangeError(f"{what}, {why}; pass a contiguous tensor, tensor.contiguous()")


def _check_sides_apart(src: Tensors, dst: Tensors) -> None:
    """Raise ExchangeError if a source and a destination share memory."""
    if not src or not dst:
        return
    for src_key, dst_key in find_meeting_sides(src, dst):
        if shares_memory(src[src_key], dst[dst_key]):
            what = f"{_label('source', src_key)} and {_label('destination', dst_key)} share memory"
            why = "arriving bytes would overwrite bytes that have not left"
            fix = "pass a clone of the source, or compile with commit='all'"
            raise ExchangeError(f"{what}: {why}; {fix}")


def _check_destinations_apart(want: Wanted, dst: Tensors) -> None:
    """Raise ExchangeError if two destinations' own cells share memory, as with tied weights passed twice."""
    for key, other in find_meeting(dst):
        parts = _list_own_parts(want, key, dst), _list_own_parts(want, other, dst)
        if any(shares_memory(a, b) for a, b in itertools.product(*parts)):
            raise ExchangeError(_word_shared(key, other))


def _word_shared(key: str, other: str) -> str:
    """The error for two destinations in the same memory."""
    what = f"{_label('destination', key)} and {_label('destination', other)} share memory"
    return f"{what}: one would overwrite the other; pass separate tensors"


def _list_own_parts(want: Wanted, key: str, tensors: Tensors) -> list[Tensor]:
    """The boxes of the tensor's own cells; the holes between them may belong to another tensor."""
    _, layout = want.tensors[key]
    return [tensors[key][box] for box in own_boxes(layout.runs(want.rank))]


def witness(*given: Local) -> Callable[[], str]:
    """Record the memory addresses of destination tensors; each argument is a tensor, or a dict of tensors by name.
    Return a function that returns an error text if one of them was freed or moved since then, else ""."""
    tensors: dict[str, Tensor] = {}
    for local in given:
        tensors.update({"": local} if isinstance(local, Tensor) else local or {})
    signatures = {key: sign_memory({key: tensor}) for key, tensor in tensors.items()}

    def find_lost() -> str:
        for key, signature_before in signatures.items():
            if sign_memory({key: tensors[key]}) != signature_before:
                what = f"{_label('destination', key)} was freed or moved in smt.commit"
                return f"{what}; leave destinations alone until the block ends"
        return ""

    return find_lost


def signature(given: tuple[Tensors, Tensors]) -> tuple[list[object], list[object]]:
    """Return a list for the source tensors and one for the destination tensors, to compare with the lists of an earlier
    call. Equal lists mean the same names, classes, addresses, shapes, strides and dtypes."""
    src, dst = given
    return sign_memory(src), sign_memory(dst)
