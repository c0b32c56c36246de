"""Gathered: FSDP2's gathered copies of the parameters into which a refit moves.

1. A move writes shards, but FSDP2 keeps using copies that it gathered before: on its root after each forward without a
   backward, and on other modules if they are configured so. These copies are given back, to be gathered again.
2. They are given back once all ranks have agreed on the move, on each rank that was given such parameters, even if it
   stores none of them: if the move fails later, either all ranks gather again or none.
3. A gathered copy cannot be a destination: data written there is lost when the copy is given back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from torch import Tensor
from torch.distributed.tensor import DTensor

from shardmath.base.errors import ExchangeError
from shardmath.models.refits.coverage import Native, show_native
from shardmath_torch.groups import compat
from shardmath_torch.tensors import fsdp

__all__ = ["check_not_gathered", "find_groups", "give_back"]


def find_groups(tensors: Iterable[Tensor]) -> list[object]:
    """Return FSDP2's parameter groups that hold one of `tensors` as a shard, or a shard in the same memory."""
    memories = {_memory_of(tensor) for tensor in tensors} - {None}
    if not memories:
        return []
    groups = []
    for group in fsdp.list_fsdp_groups():
        shards = [keeper.sharded_param for keeper in fsdp.list_keepers(group)]
        if any(_memory_of(shard) in memories for shard in shards):
            groups.append(group)
    return groups


def check_not_gathered(natives: Mapping[Native, Tensor]) -> None:
    """Raise ExchangeError if one of the tensors `natives` lies in memory into which FSDP2 has gathered a parameter."""
    gathered = {_memory_of(tensor) for tensor in _list_gathered()} - {None}
    for native, tensor in natives.items():
        if _memory_of(tensor) in gathered:
            what = f"{show_native(native)} is a copy that FSDP2 gathered for a forward, not a shard"
            fix = "call reshard() on the FSDP2 modules, then pass their parameters"
            raise ExchangeError(f"{what}; {fix}")


def _list_gathered() -> Iterator[Tensor]:
    """All copies that FSDP2 has gathered on this rank."""
    for group in fsdp.list_fsdp_groups():
        for keeper in fsdp.list_keepers(group):
            yield from fsdp.list_gathered(keeper)


def _memory_of(tensor: Tensor) -> int | None:
    """The identity of the memory of a rank's part of the tensor; None if it has no storage."""
    local = compat.local_of(tensor) if isinstance(tensor, DTensor) else tensor
    try:
        return compat.identity_of(local.untyped_storage())
    except RuntimeError:
        return None


def give_back(groups: Iterable[object]) -> None:
    """Put FSDP2's shards back as parameters, and free their gathered copies; FSDP2 gathers the parameters again before
    it next uses them. Each of `groups` is a group of parameters that FSDP2 gathers together.
    """
    for group in groups:
        fsdp.give_shards_back(group)
