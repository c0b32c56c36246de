"""Memory: where a tensor lies, whether it can be filled, and which tensors share memory.

1. Tensors of one **spot** are one tensor: the same device, bytes, shape, strides and dtype.
2. Tensors of different spots **meet** if they share a byte. Interleaved views of one buffer do not.
3. A tensor without elements has no spot, and neither has one whose class stores its values elsewhere: where these lie
   is not known.

>>> flat = torch.zeros(8)
>>> len(find_crowded([flat[:4], flat[4:], flat[4:]])), len(find_crowded([flat[:5], flat[4:]]))
(0, 2)
>>> len(find_crowded([flat[::2], flat[1::2]]))
0
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from shardmath.base.dtypes import ITEMSIZE
from shardmath.base.text import plural
from shardmath_torch.checkpoints.files.places import CheckpointError
from shardmath_torch.groups.dtypes import view_bytes
from shardmath_torch.moves.exchange.memory import missing_memory, plain, reach
from shardmath_torch.moves.exchange.overlaps import overlaps_itself
from shardmath_torch.moves.exchange.overlaps import shares_memory as share_cells
from shardmath_torch.tensors.dtensors.dtensor import local_of
from shardmath_torch.tensors.dtensors.modules import SHAPELESS

__all__ = [
    "MemorySpot",
    "can_fill",
    "check_shaped",
    "fill",
    "find_crowded",
    "find_meetings",
    "has_same_bits",
    "local_part",
    "say_unwritable",
    "spot_of",
    "spots_of",
]


def local_part(name: str, tensor: Tensor) -> Tensor:
    """Return this rank's part of `tensor`, detached from autograd. Raises CheckpointError if it is on the meta
    device."""
    local = local_of(tensor) if isinstance(tensor, DTensor) else tensor.detach()
    if local.is_meta:
        raise CheckpointError(
            f"{name!r} is on the meta device and has no memory; call the module's to_empty() first"
        )
    return local


def check_shaped(name: str, tensor: Tensor) -> None:
    """Raise CheckpointError if `tensor` cannot have a layout: shardmath's layouts do not support its dtype, it is
    nested, or it has no shape yet. `name` is its name in the message.

    A tensor of a lazy module has no shape until the module has run.
    """
    if is_lazy(tensor):
        raise CheckpointError(f"{name!r} {SHAPELESS}")
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in ITEMSIZE:
        what = f"{name!r} is {dtype}, a type that layouts do not have"
        fix = "replace it by plain numbers, such as its int_repr() or dequantize()"
        raise CheckpointError(f"{what}; {fix}")
    if tensor.is_nested:
        parts = plural(tensor.size(0), "part")
        what = f"{name!r} is a nested tensor, of {parts} without one shape"
        raise CheckpointError(f"{what}; save its parts under separate names, from unbind()")


def say_unwritable(local: Tensor) -> str:
    """Return why values cannot be copied into `local`, as words that follow the tensor's name; "" if they can."""
    if local.layout != torch.strided:
        return f"is stored as {local.layout}"
    # A class with custom kernels writes by these, wherever its memory is.
    if plain(local).__class__ is Tensor:
        missing = missing_memory(local)
        if missing:
            return missing
    if overlaps_itself(local):
        shape, strides = tuple(local.shape), local.stride()
        return f"has shape {shape} and strides {strides}, so several elements in the same memory"
    return ""


def fill(local: Tensor, value: Tensor) -> None:
    """Copy `value` into `local`, in place and without autograd; in inference mode if `local` was made in it."""
    with torch.inference_mode(local.is_inference()), torch.no_grad():
        local.copy_(value)


def can_fill(held: Tensor) -> bool:
    """Whether values can be copied into `held`, a tensor of an optimizer, and the optimizer's later steps can update it
    in place. For example, an inference tensor could be filled, but not updated."""
    if held.is_nested or held.is_meta or held.is_inference():
        return False
    local = local_of(held).detach() if isinstance(held, DTensor) else held
    return not local.is_meta and not say_unwritable(local)


def has_same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same dtype, device and shape, and are equal bit by bit, so that NaN equals NaN."""
    if a.dtype != b.dtype or a.device != b.device or a.shape != b.shape:
        return False
    return view_bytes(a).equal(view_bytes(b))


# Where tensors lie


class MemorySpot(NamedTuple):
    """A tensor's place in memory: its device, the addresses there of its start and end, its shape, strides and dtype,
    and whether values are conjugated or negated."""

    device: torch.device
    start: int
    end: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    is_lazy: tuple[bool, bool]
    """Whether its values are conjugated, and negated, when they are read."""


def _plain_local(tensor: Tensor) -> Tensor:
    local = local_of(tensor) if isinstance(tensor, DTensor) else tensor
    return plain(local)


def spot_of(tensor: Tensor) -> MemorySpot | None:
    """Return the memory of this rank's part of `tensor` as a `MemorySpot` (device, address range, strides); None if it
    is empty or has no known address."""
    if tensor.is_nested:
        return None
    local = _plain_local(tensor)
    if local.layout != torch.strided or missing_memory(local) or not local.numel():
        return None
    start = local.data_ptr()
    end = start + reach(local) * local.element_size()
    is_lazy = local.is_conj(), local.is_neg()
    return MemorySpot(
        local.device, start, end, tuple(local.shape), local.stride(), local.dtype, is_lazy
    )


def spots_of(tensors: Iterable[Tensor]) -> list[MemorySpot]:
    """Return the regions of memory (`MemorySpot`) that `tensors` occupy on this rank, without tensors that are empty or
    have no known address."""
    spots = map(spot_of, tensors)
    return [spot for spot in spots if spot is not None]


def find_meetings(tensors: Iterable[Tensor]) -> Iterator[tuple[MemorySpot, MemorySpot]]:
    """Yield each pair of different `MemorySpot`s (address range, shape, strides, dtype) of `tensors` that overlap in
    memory. A pair is also yielded if it takes too long to decide whether the two overlap."""
    # By spot, so that a tensor that thousands of parameters share is compared once.
    by_spot: dict[MemorySpot, Tensor] = {}
    for tensor in tensors:
        spot = spot_of(tensor)
        if spot is not None:
            by_spot.setdefault(spot, _plain_local(tensor))
    reaching: list[MemorySpot] = []
    for spot in sorted(by_spot, key=lambda spot: (str(spot.device), spot.start)):
        reaching = [other for other in reaching if _reaches(other, spot)]
        for other in reaching:
            if share_cells(by_spot[other], by_spot[spot]):
                yield other, spot
        reaching.append(spot)


def _reaches(spot: MemorySpot, later: MemorySpot) -> bool:
    """Whether the spot ends behind the first byte of `later`, which begins no earlier."""
    return spot.device == later.device and spot.end > later.start


def find_crowded(tensors: Iterable[Tensor]) -> set[MemorySpot]:
    """Return the `MemorySpot`s (address range, shape, strides, dtype) of `tensors` that overlap a different spot of
    another of these tensors. Tensors with equal spots do not count as overlapping.

    For example, two different views of the same bytes are both included.
    """
    return {spot for pair in find_meetings(tensors) for spot in pair}
