"""Memory: where a tensor lies, whether values can be put there, and which tensors meet.

1. Tensors of one **spot** are one tensor: the same device, bytes, shape, strides and type.
2. Tensors of different spots **meet** where they have a byte in common. Views of one buffer that
   only interleave do not.
3. A tensor without elements has no spot, and neither has one whose class keeps its values in a way
   of its own: where these lie is not known.

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
    """The memory of a tensor. Raises CheckpointError for a tensor on the meta device."""
    local = local_of(tensor) if isinstance(tensor, DTensor) else tensor.detach()
    if local.is_meta:
        raise CheckpointError(
            f"{name!r} is on the meta device and has no memory; call the module's to_empty() first"
        )
    return local


def check_shaped(name: str, tensor: Tensor) -> None:
    """Raises CheckpointError for a type that layouts do not have, for a nested tensor, whose parts have shapes, and for
    a tensor of a lazy module that has not run yet, which has none."""
    if is_lazy(tensor):
        raise CheckpointError(f"{name!r} {SHAPELESS}")
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in ITEMSIZE:
        what = f"{name!r} is {dtype}, a type that layouts do not have"
        raise CheckpointError(f"{what}; give plain numbers, such as its int_repr() or dequantize()")
    if tensor.is_nested:
        parts = plural(tensor.size(0), "part")
        what = f"{name!r} is a nested tensor, of {parts} without one shape"
        raise CheckpointError(f"{what}; save its parts under names of their own, from unbind()")


def say_unwritable(local: Tensor) -> str:
    """Why values cannot be put into the memory: "" where they can; words that follow its name otherwise."""
    if local.layout != torch.strided:
        return f"is stored as {local.layout}"
    if plain(local).__class__ is Tensor:
        missing = missing_memory(local)
        if missing:
            return missing
    if overlaps_itself(local):
        shape, strides = tuple(local.shape), local.stride()
        return f"has shape {shape} and strides {strides}, several elements in one cell"
    return ""


def fill(local: Tensor, value: Tensor) -> None:
    """Put values where the tensor lies, in the mode in which it was made: no other writes to it for good."""
    with torch.inference_mode(local.is_inference()), torch.no_grad():
        local.copy_(value)


def can_fill(held: Tensor) -> bool:
    """Whether an optimizer's values can be put where the tensor lies, and steps write there."""
    if held.is_nested or held.is_meta or held.is_inference():
        return False
    local = local_of(held).detach() if isinstance(held, DTensor) else held
    return not local.is_meta and not say_unwritable(local)


def has_same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are of one type, device and shape, and equal bit by bit: NaN is NaN."""
    if a.dtype != b.dtype or a.device != b.device or a.shape != b.shape:
        return False
    return _flatten_to_bytes(a).equal(_flatten_to_bytes(b))


def _flatten_to_bytes(tensor: Tensor) -> Tensor:
    row = tensor.detach().contiguous().reshape(-1)
    return row.view(torch.uint8)


# Where tensors lie


class MemorySpot(NamedTuple):
    """Where and how a tensor lies: its device, first byte and one past the last, and all that says which is which."""

    device: torch.device
    start: int
    end: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    is_lazy: tuple[bool, bool]
    """Whether its values are to be conjugated or negated."""


def _plain_part(tensor: Tensor) -> Tensor:
    local = local_of(tensor) if isinstance(tensor, DTensor) else tensor
    return plain(local)


def spot_of(tensor: Tensor) -> MemorySpot | None:
    """Where this rank's part of the tensor lies; None where it has no cells, or none that are known."""
    if tensor.is_nested:
        return None
    local = _plain_part(tensor)
    if local.layout != torch.strided or missing_memory(local) or not local.numel():
        return None
    start = local.data_ptr()
    end = start + reach(local) * local.element_size()
    is_lazy = local.is_conj(), local.is_neg()
    return MemorySpot(
        local.device, start, end, tuple(local.shape), local.stride(), local.dtype, is_lazy
    )


def spots_of(tensors: Iterable[Tensor]) -> list[MemorySpot]:
    """The spots of those that have one."""
    spots = map(spot_of, tensors)
    return [spot for spot in spots if spot is not None]


def find_meetings(tensors: Iterable[Tensor]) -> Iterator[tuple[MemorySpot, MemorySpot]]:
    """Pairs of spots that have a byte in common: one sweep over their first bytes."""
    # By spot, so that a tensor that thousands of parameters share is looked at once.
    by_spot: dict[MemorySpot, Tensor] = {}
    for tensor in tensors:
        spot = spot_of(tensor)
        if spot is not None:
            by_spot.setdefault(spot, _plain_part(tensor))
    reaching: list[MemorySpot] = []
    for spot in sorted(by_spot, key=lambda spot: (str(spot.device), spot.start)):
        reaching = [other for other in reaching if _reaches(other, spot)]
        for other in reaching:
            if share_cells(by_spot[other], by_spot[spot]):
                yield other, spot
        reaching.append(spot)


def _reaches(spot: MemorySpot, later: MemorySpot) -> bool:
    """Whether the spot ends behind the first byte of one that begins no earlier."""
    return spot.device == later.device and spot.end > later.start


def find_crowded(tensors: Iterable[Tensor]) -> set[MemorySpot]:
    """The spots that have a byte in common with another spot."""
    return {spot for pair in find_meetings(tensors) for spot in pair}
