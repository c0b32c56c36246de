"""Views: what a rank stores, seen as the local tensors of a plan.

1. A module's tensors come by name: a mapping, or one per chunk where a rank has several virtual stages.
2. All that does not fit is in one message: tensors that are missing, misshapen, of another dtype, or in no row.
3. What a function makes has no view: the tensor is received beside, and the function writes what is stored.

>>> stored = {(0, "qk"): torch.zeros(2, 3)}
>>> make_view(stored, Slot(0, "qk", (slice(1, 2, 1), slice(0, 3, 1)), (1, 0), "")).shape
torch.Size([3, 1])
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardmath.base import dtypes
from shardmath.base.errors import ExchangeError, StoreError
from shardmath.layouts.layout import Layout
from shardmath.models.refits.coverage import Native, find_faults, show_native
from shardmath.models.refits.refit import Refit as Planned
from shardmath.models.storage.stored import KnownSide, Slot
from shardmath_torch.groups import compat
from shardmath_torch.groups.dtypes import dtype_of
from shardmath_torch.tensors.refits.divided import find_contradictions

__all__ = [
    "FUNCTIONS",
    "Computed",
    "Function",
    "Given",
    "Natives",
    "Views",
    "are_related",
    "bind_views",
    "check_named",
    "compute",
    "describe",
    "drop_window",
    "is_by_name",
    "list_chunks",
    "list_sides",
    "make_view",
    "name_natives",
    "to_local",
]

Natives: TypeAlias = dict[Native, Tensor]
Given: TypeAlias = Mapping[str, Tensor] | Sequence[Mapping[str, Tensor]]
"""A rank's tensors by their own names, or a mapping per chunk."""
Function: TypeAlias = Callable[[Tensor], Tensor]

FUNCTIONS: dict[str, Function] = {"neg_exp": lambda tensor: -torch.exp(tensor.float())}
"""Functions that rows of the families name."""


class Computed(NamedTuple):
    """What is stored of a tensor that arrives beside it, and the names of both."""

    key: str
    name: str
    stored: Tensor
    function: Function


class Views(NamedTuple):
    """The local tensors of one side, and those of them that a function stores."""

    tensors: dict[str, Tensor]
    computed: list[Computed]

    def keep(self, names: Iterable[str]) -> Views:
        """Those of these names; the same object where these are all."""
        own = set(names)
        if own.issuperset(self.tensors):
            return self
        kept = {name: tensor for name, tensor in self.tensors.items() if name in own}
        return Views(kept, self.computed)


def name_natives(given: Given | None) -> Natives:
    """The tensors as given, by (chunk, name). Raises ExchangeError for what is not a mapping of tensors."""
    if not isinstance(given, Mapping | Sequence | None):
        raise ExchangeError(
            f"tensors are {type(given).__name__}; pass a mapping from name to tensor, or a list of them"
        )
    natives = {}
    for chunk, named in enumerate(list_chunks(given)):
        if not isinstance(named, Mapping):
            raise ExchangeError(
                f"chunk {chunk} is {type(named).__name__}; pass a mapping from name to tensor, "
                f"or one per virtual stage"
            )
        for name, tensor in named.items():
            if not isinstance(tensor, Tensor):
                raise ExchangeError(f"{name!r} is {type(tensor).__name__}; pass tensors")
            natives[chunk, name] = tensor
    return natives


def list_chunks(given: Given | None) -> list[Mapping[str, Tensor]]:
    """The mapping of each chunk."""
    return [given] if isinstance(given, Mapping) else list(given or ())


def to_local(tensor: Tensor) -> Tensor:
    """What the rank has of the tensor."""
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():
        local: Tensor = tensor.to_local()
    return local


def describe(tensor: Tensor) -> tuple[object, ...]:
    """Where and how the rank's part of the tensor lies: what is the same as long as views of it are of it."""
    local = to_local(tensor)
    storage = local.untyped_storage()
    # Memory that was freed may be given again at the same address; the views keep their own storage alive, and with
    # it its identity.
    where = compat.identity_of(storage), local.data_ptr(), storage.nbytes()
    return (*where, local.shape, local.stride(), local.dtype)


def bind_views(
    bound: KnownSide,
    slots: Mapping[str, Slot],
    layouts: Mapping[str, Layout],
    natives: Natives,
    rank: int,
    own: Sequence[str],
    functions: Mapping[str, Function],
    *,
    receives: bool,
) -> Views:
    """A view for every slot; `layouts` are those of each. A side that does not receive sends what it views.

    Raises StoreError with all that does not fit.
    """
    stored = bound.natives(rank)
    locals_ = {native: to_local(tensor) for native, tensor in natives.items()}
    shapes = {native: tuple(tensor.shape) for native, tensor in locals_.items()}
    faults = find_faults(stored, shapes, own)
    faults += find_contradictions(stored, slots, layouts, natives, rank)
    if faults:
        raise StoreError(f"rank {rank}:\n" + "\n".join(faults))
    # A view, so that an engine's (C, 1, k) is written where rows speak of (C, k).
    reshaped = {native: locals_[native].detach().view(shape) for native, shape in stored.items()}
    tensors = {}
    computed = []
    for name, slot in slots.items():
        view = make_view(reshaped, slot)
        dtype = layouts[name].dtype
        if not slot.function:
            _check_dtype(view, dtype, slot)
            tensors[name] = view
            continue
        if not receives:
            raise StoreError(
                f"{show_native((slot.chunk, slot.native))} stores {slot.function}(...), from which "
                f"{name} cannot be had; give the trainer a row that stores it"
            )
        tensors[name] = torch.empty(view.shape, dtype=dtype_of(dtype), device=view.device)
        what = show_native((slot.chunk, slot.native))
        computed.append(Computed(name, what, view, _find_function(slot, functions)))
    return Views(tensors, computed)


def make_view(stored: Mapping[Native, Tensor], slot: Slot) -> Tensor:
    """The part of a stored tensor that is one logical tensor's, in the logical order of dimensions."""
    view = stored[slot.chunk, slot.native][slot.cut]
    back = sorted(range(len(slot.order)), key=slot.order.__getitem__)
    return view.permute(back)


def _check_dtype(view: Tensor, wanted: str, slot: Slot) -> None:
    found = dtypes.canonical(view.dtype)
    if found != wanted:
        raise StoreError(
            f"{show_native((slot.chunk, slot.native))} is {found}, the refit moves {wanted}; "
            f"nothing is cast on the way: plan in {found}, or pass cast tensors"
        )


def compute(one: Computed, received: Tensor) -> Tensor:
    """What is to be stored of what has arrived. Raises StoreError where the function gives no such tensor."""
    made: object = one.function(received)
    wanted = f"{dtypes.canonical(one.stored.dtype)}{list(one.stored.shape)}"
    if not isinstance(made, Tensor):
        found = type(made).__name__
    elif made.shape == one.stored.shape and _kind_of(made) == _kind_of(one.stored):
        return made.to(one.stored.dtype)
    else:
        found = f"{dtypes.canonical(made.dtype)}{list(made.shape)}"
    raise StoreError(
        f"the function of {one.name} gives {found}, and {wanted} is stored; give one that keeps "
        f"the shape, and numbers of that kind"
    )


def _kind_of(tensor: Tensor) -> tuple[bool, bool, bool]:
    """What a cast of the tensor keeps: whether numbers are complex or have fractions, or are truths."""
    return tensor.is_complex(), tensor.is_floating_point(), tensor.dtype == torch.bool


def _find_function(slot: Slot, functions: Mapping[str, Function]) -> Function:
    known = {**FUNCTIONS, **functions}
    if slot.function not in known:
        raise StoreError(
            f"{slot.native!r} is stored as {slot.function}(...), and known are {', '.join(known)}; "
            f"pass functions={{{slot.function!r}: ...}}"
        )
    return known[slot.function]


def check_named(
    rank: int, mine: Sequence[str], dst: Given | Mapping[str, Given] | None
) -> Mapping[str, Given]:
    """What was given by engine, for these of the rank. Raises ExchangeError where it is of others, or not by engine."""
    given = dst or {}
    named = list(given) if isinstance(given, Mapping) else [type(given).__name__]
    if not isinstance(given, Mapping) or set(named) != set(mine):
        raise ExchangeError(
            f"rank {rank} is of {', '.join(mine) or 'no engine'}, and was given "
            f"{', '.join(map(str, named)) or 'none'}; pass dst={{engine: tensors}} for each of them"
        )
    return given  # type: ignore[return-value]


def is_by_name(dst: object, engines: Mapping[str, KnownSide]) -> bool:
    """Whether the tensors of the only engine are given under its name, as those of several are."""
    if not isinstance(dst, Mapping) or set(dst) != set(engines):
        return False
    return not any(isinstance(given, Tensor) for given in dst.values())


def drop_window(local: str, bound: KnownSide) -> str:
    """The logical tensor of a local one: a window's has its number behind."""
    return local if local in bound.layouts else local.rpartition("[")[0]


def are_related(one: Planned, other: Planned) -> bool:
    """Whether they differ in who has left, and in nothing else that is planned."""
    return (one.plan.whole or one.plan) == (other.plan.whole or other.plan)


def list_sides(planned: Planned, rank: int) -> dict[str | None, KnownSide]:
    """The sides that the rank is of, by engine; None for the trainer."""
    sides: dict[str | None, KnownSide] = {None: planned.trainer}
    sides.update(planned.engines)
    return {name: side for name, side in sides.items() if rank in side.ranks}
