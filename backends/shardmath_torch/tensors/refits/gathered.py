"""Gathered: what FSDP2 has gathered of the parameters into which a refit moves.

1. A move writes shards. FSDP2 goes on with what it gathered of them before: on its root after each forward that no
   backward follows, on other modules too where it was told so. Hence that is given back, and gathered again.
2. It is given back once all ranks have agreed on the move, on each rank that was given such parameters, if it has
   nothing of them: also where the move fails later, all ranks are to gather again, or none.
3. What was gathered is no destination: when it is given back, what was written there is gone.
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
    """What FSDP2 gathers together and any of the tensors is a shard of, or lies in the memory of one."""
    memories = {_memory_of(tensor) for tensor in tensors} - {None}
    if not memories:
        return []
    found = []
    for group in fsdp.list_fsdp_groups():
        shards = [keeper.sharded_param for keeper in fsdp.list_keepers(group)]
        if any(_memory_of(shard) in memories for shard in shards):
            found.append(group)
    return found


def check_not_gathered(natives: Mapping[Native, Tensor]) -> None:
    """Raise ExchangeError for a tensor that is not a shard, but what FSDP2 has gathered."""
    gathered = {_memory_of(tensor) for tensor in _list_gathered()} - {None}
    for native, tensor in natives.items():
        if _memory_of(tensor) in gathered:
            what = f"{show_native(native)} is what FSDP2 has gathered for a forward, and not kept"
            fix = "call reshard() of the FSDP2 modules, and give their parameters then"
            raise ExchangeError(f"{what}; {fix}")


def _list_gathered() -> Iterator[Tensor]:
    for group in fsdp.list_fsdp_groups():
        for keeper in fsdp.list_keepers(group):
            yield from fsdp.list_gathered(keeper)


def _memory_of(tensor: Tensor) -> int | None:
    """What tells the memory of a rank's part of the tensor from all other; None where it has none of its own."""
    local = compat.local_of(tensor) if isinstance(tensor, DTensor) else tensor
    try:
        return compat.identity_of(local.untyped_storage())
    except RuntimeError:
        return None


def give_back(groups: Iterable[object]) -> None:
    """Let FSDP2 gather anew before it goes on."""
    for group in groups:
        fsdp.give_shards_back(group)
