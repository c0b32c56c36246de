"""Views: a rank's stored tensors, viewed as the local tensors of a plan.

1. A module's tensors are given by name: in one mapping, or one per chunk if a rank has several virtual stages.
2. Everything that does not fit is in one message: tensors that are missing, in no row, or of another shape or dtype.
3. A tensor stored by a function has no view: it is received in a separate buffer, from which the function computes the
   stored tensor.

>>> stored = {(0, "qk"): torch.zeros(2, 3)}
>>> make_view(stored, Slot(0, "qk", (slice(1, 2, 1), slice(0, 3, 1)), (1, 0), "")).shape
torch.Size([3, 1])
"""

from __future__ import annotations

import functools
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardmath.base import dtypes
from shardmath.base.errors import ExchangeError, StoreError
from shardmath.base.text import show_ranks, shown
from shardmath.layouts.layout import Layout
from shardmath.models.refits.coverage import Native, find_faults, show_native
from shardmath.models.refits.refit import Refit as Planned
from shardmath.models.storage.arranging import ARRANGEMENTS
from shardmath.models.storage.stored import KnownSide, Slot
from shardmath.plans.programs.part import own_boxes
from shardmath_torch.groups import compat
from shardmath_torch.groups.dtypes import dtype_of
from shardmath_torch.moves.exchange.local import check_memory
from shardmath_torch.moves.exchange.memory import plain
from shardmath_torch.tensors.refits.divided import find_contradictions
from shardmath_torch.tensors.refits.functions import FUNCTIONS, Function

__all__ = [
    "Computed",
    "Given",
    "Natives",
    "Views",
    "are_related",
    "bind_side",
    "bind_views",
    "check_functions",
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
"""A rank's tensors by their stored names, or a mapping per chunk."""


class Computed(NamedTuple):
    """A stored tensor, called `name`, that a function computes from the received tensor `key`.

    `boxes` are the slices of the elements it computes; the elements between them belong to other tensors.
    """

    key: str
    name: str
    stored: Tensor
    function: Function
    boxes: tuple[tuple[slice, ...], ...]


class Views(NamedTuple):
    """The tensors that one side (the trainer or an engine) sends or receives: `tensors` has them by name, as views of
    stored tensors where possible. `computed` lists the stored tensors that functions compute from received ones.
    """

    tensors: dict[str, Tensor]
    computed: list[Computed]

    def keep(self, names: Iterable[str]) -> Views:
        """Return Views with all of `computed`, but only those `tensors` whose names are in `names`. If `names` has all
        of these, return this object itself.
        """
        wanted = set(names)
        if wanted.issuperset(self.tensors):
            return self
        kept = {name: tensor for name, tensor in self.tensors.items() if name in wanted}
        return Views(kept, self.computed)


def name_natives(given: Given | None) -> Natives:
    """Return the tensors of `given` as a dict by (virtual stage, stored name). Raises ExchangeError unless `given` is a
    mapping from name to tensor, a list of such mappings (one per virtual stage), or None.
    """
    if not isinstance(given, Mapping | Sequence | None):
        raise ExchangeError(
            f"src= or dst= is {type(given).__name__}, where a mapping from name to tensor is needed; "
            f"pass dict(model.named_parameters()), or a list of such dicts, one per virtual stage"
        )
    natives = {}
    for chunk, named in enumerate(list_chunks(given)):
        if not isinstance(named, Mapping):
            raise ExchangeError(
                f"item {chunk} of src= or dst= is {type(named).__name__}; pass a mapping from name "
                f"to tensor, or a list of such mappings, one per virtual stage"
            )
        for name, tensor in named.items():
            if not isinstance(tensor, Tensor):
                raise ExchangeError(
                    f"src= or dst= has {type(tensor).__name__} as {name!r}, where a torch.Tensor is "
                    f"needed; pass a mapping from name to tensor"
                )
            natives[chunk, name] = tensor
    return natives


def list_chunks(given: Given | None) -> list[Mapping[str, Tensor]]:
    """Return a list of the mappings from name to tensor that `given` has, one per chunk (virtual stage)."""
    return [given] if isinstance(given, Mapping) else list(given or ())


def to_local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor; any other tensor itself."""
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():
        local: Tensor = tensor.to_local()
    return local


def describe(tensor: Tensor) -> tuple[object, ...]:
    """Return a tuple that identifies the memory, shape, strides and dtype of the tensor's local part. Compare it with
    an earlier result to see whether one of these has changed.
    """
    local = to_local(tensor)
    storage = local.untyped_storage()
    # An address alone may be reused after memory is freed; the views keep their storage alive, and so its identity.
    where = compat.identity_of(storage), local.data_ptr(), storage.nbytes()
    # Flat, as shape and strides are equally long: the garbage collector does not visit tuples of plain values.
    return (*where, *local.shape, *local.stride(), local.dtype)


def bind_side(
    planned: Planned,
    rank: int,
    engine: str | None,
    natives: Natives,
    own: Sequence[str],
    functions: Mapping[str, Function],
) -> Views:
    """Check the tensors `natives` that `rank` of an engine (None: the trainer) stores against the refit `planned`, and
    return what the rank sends or receives, as `bind_views` does. Without tensors, return empty Views for a rank that
    the trainer lacks; with tensors, raises ExchangeError for it.
    """
    bound = planned.trainer if engine is None else planned.engines[engine]
    # An engine that is named has this rank, so that this is the trainer.
    if rank not in bound.ranks:
        if natives:
            raise ExchangeError(
                f"rank {rank} was given src=, but the trainer has {show_ranks(sorted(bound.ranks))}; "
                f"leave src= out on this rank"
            )
        return Views({}, [])
    slots = planned.slots(rank, engine)
    # Read once: the sides of a portion make this mapping at each access.
    bound_layouts = bound.layouts
    layouts = {name: bound_layouts[drop_window(name, bound_layouts)] for name in slots}
    receives = engine is not None
    return bind_views(bound, slots, layouts, natives, rank, own, functions, receives=receives)


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
    """Check this rank's stored tensors, `natives`, against the planned names and shapes in `bound`. Return the slices
    of these tensors to send, or to receive into if `receives`, as Views. `slots` maps each tensor's name in the plan to
    its slice of a stored tensor; `own` has globs for the names of tensors that the trainer lacks.

    `bound` has the planned names and shapes of stored tensors, `layouts` the dtypes of the plan's tensors. `natives`
    has tensors by (virtual stage, stored name), `slots` and the Views by their names in the plan. `own` are globs for
    tensors that the trainer lacks; `functions`, by the function's name, compute stored tensors from received ones.

    Raises StoreError with everything that does not fit, ExchangeError for a tensor whose memory does not exist.
    """
    stored = bound.natives(rank)
    locals_ = {native: to_local(tensor) for native, tensor in natives.items()}
    shapes = {native: tuple(tensor.shape) for native, tensor in locals_.items()}
    faults = find_faults(stored, shapes, own)
    faults += find_contradictions(stored, slots, layouts, natives, rank)
    if faults:
        raise StoreError(f"rank {rank}:\n" + "\n".join(faults))
    reshaped = {}
    for native, shape in stored.items():
        local = locals_[native]
        check_memory(show_native(native), plain(local))
        # An engine may store the (C, k) of rows as (C, 1, k), the weight of a convolution.
        whole = local.detach()
        reshaped[native] = whole if shapes[native] == shape else whole.view(shape)
    tensors = {}
    computed = []
    for name, slot in slots.items():
        view = make_view(reshaped, slot)
        dtype = layouts[name].dtype
        if not slot.function:
            _check_dtype(_name_dtype(view.dtype), dtype, slot)
            tensors[name] = view
            continue
        if not receives:
            raise StoreError(
                f"the trainer stores {slot.function}({name}) as {show_native((slot.chunk, slot.native))}, "
                f"from which {name} cannot be computed; give the trainer a row that stores {name} itself"
            )
        tensors[name] = torch.empty(view.shape, dtype=dtype_of(dtype), device=view.device)
        stored_name = show_native((slot.chunk, slot.native))
        boxes = own_boxes(layouts[name].runs(rank))
        computed.append(Computed(name, stored_name, view, _find_function(slot, functions), boxes))
    return Views(tensors, computed)


def make_view(stored: Mapping[Native, Tensor], slot: Slot) -> Tensor:
    """Return a view of the tensor that `slot` names in `stored`: the slice that `slot` describes, with the dimensions
    in the order of the checkpoint tensor.
    """
    view = stored[slot.chunk, slot.native][slot.cut]
    if slot.order == tuple(range(len(slot.order))):
        return view
    # Position i of `inverse` is the dimension of the slice that is dimension i of the checkpoint tensor.
    inverse = sorted(range(len(slot.order)), key=slot.order.__getitem__)
    return view.permute(inverse)


@functools.cache
def _name_dtype(dtype: torch.dtype) -> str:
    """The name of the dtype in layouts."""
    return dtypes.canonical(dtype)


def _check_dtype(dtype: str, wanted: str, slot: Slot) -> None:
    """Raise StoreError if the stored tensor has another dtype than the plan."""
    if dtype != wanted:
        raise StoreError(
            f"{show_native((slot.chunk, slot.native))} is {dtype}, but the refit was planned for {wanted} and "
            f"does not cast; plan with shapes= of dtype {dtype}, or pass the tensor as {wanted}"
        )


def compute(target: Computed, received: Tensor) -> Tensor:
    """Apply the function of `target` to the tensor `received`, and return the result in the stored dtype.

    Raises StoreError if the result has another shape than the stored tensor, or another kind of numbers.
    """
    stored = target.stored
    value: object = target.function(received)
    wanted = f"{dtypes.canonical(stored.dtype)}{list(stored.shape)}"
    if not isinstance(value, Tensor):
        result = type(value).__name__
    elif value.shape == stored.shape and _kind_of(value) == _kind_of(stored):
        return value.to(stored.dtype)
    else:
        result = f"{dtypes.canonical(value.dtype)}{list(value.shape)}"
    raise StoreError(
        f"the function that computes {target.name} returned {result}, where the stored tensor is {wanted}; "
        f"return a tensor of that shape, of float, integer, complex or bool numbers as it has"
    )


def _kind_of(tensor: Tensor) -> tuple[bool, bool, bool]:
    """(is complex, is floating point, is bool): a function may change the dtype only within such a kind."""
    return tensor.is_complex(), tensor.is_floating_point(), tensor.dtype == torch.bool


def check_functions(functions: object) -> Mapping[str, Function]:
    """Return `functions`. Raises ExchangeError unless it is a mapping from name to function."""
    if not isinstance(functions, Mapping):
        what = f"functions= is {type(functions).__name__}, where a mapping from name to function is needed"
        raise ExchangeError(f"{what}; pass functions={{name: your_function}}")
    for name, function in functions.items():
        if not callable(function):
            raise ExchangeError(
                f"functions= has {shown(function)} as {name!r}, which cannot be called; pass a function "
                f"that takes the received tensor and returns the stored one"
            )
    return functions


def _find_function(slot: Slot, functions: Mapping[str, Function]) -> Function:
    """The function that the slot names. Raises StoreError for an unknown one, and for one that moves elements."""
    if slot.function in ARRANGEMENTS:
        raise StoreError(
            f"{slot.native!r} is stored as {slot.function}(...), in an order into which no refit writes; "
            f"refit before weights are processed, with a side that says so, such as vllm(processed=False)"
        )
    known = {**FUNCTIONS, **functions}
    if slot.function not in known:
        raise StoreError(
            f"{slot.native!r} is stored as {slot.function}(...), but the known functions are "
            f"{', '.join(known)}; pass functions={{{slot.function!r}: your_function}} to prepare()"
        )
    return known[slot.function]


def check_named(
    rank: int, engines: Sequence[str], dst: Given | Mapping[str, Given] | None
) -> Mapping[str, Given]:
    """Return `dst` as a mapping from engine to tensors. Raises ExchangeError unless its keys are exactly `engines`, the
    engines that have `rank`.
    """
    by_engine = dst or {}
    named = list(by_engine) if isinstance(by_engine, Mapping) else [type(by_engine).__name__]
    if not isinstance(by_engine, Mapping) or set(named) != set(engines):
        fix = (
            "pass dst={engine: tensors} with exactly these engines" if engines else "leave dst= out"
        )
        raise ExchangeError(
            f"rank {rank} is in {', '.join(engines) or 'no engine'}, but dst= has tensors for "
            f"{', '.join(map(str, named)) or 'no engine'}; {fix}"
        )
    return by_engine  # type: ignore[return-value]


def is_by_name(dst: object, engines: Mapping[str, KnownSide]) -> bool:
    """Whether `dst` is a mapping by engine: its keys are exactly the names in `engines`, and no value is a tensor."""
    if not isinstance(dst, Mapping) or set(dst) != set(engines):
        return False
    return not any(isinstance(given, Tensor) for given in dst.values())


def drop_window(local: str, layouts: Container[str]) -> str:
    """Return the name of the checkpoint tensor to which the plan's tensor `local` belongs: "w" for a slice such as
    "w[0]". A name in `layouts`, the layouts of a side by name, is a checkpoint tensor's name already, and is returned
    unchanged.
    """
    return local if local in layouts else local.rpartition("[")[0]


def are_related(one: Planned, other: Planned) -> bool:
    """Whether two refits have the same plan, apart from ranks that have left."""
    # `whole` is the plan before ranks left; None if none have.
    return (one.plan.whole or one.plan) == (other.plan.whole or other.plan)


def list_sides(planned: Planned, rank: int) -> dict[str | None, KnownSide]:
    """Return the sides with `rank`: a dict from an engine's name (None: the trainer) to how it stores its tensors."""
    sides: dict[str | None, KnownSide] = {None: planned.trainer}
    sides.update(planned.engines)
    return {name: side for name, side in sides.items() if rank in side.ranks}
