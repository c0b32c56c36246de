"""How DTensors lie, asked of all ranks of a group at once.

Where placements may stand for two layouts, the local shapes of other ranks tell which. A module's
DTensors may be on several meshes, each with groups of its own; of these a rank that has failed
cannot be heard. In the group of the call all ranks hear each other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor
from torch.distributed.tensor import DTensor

from shardmath_torch import compat
from shardmath_torch.compat import Group
from shardmath_torch.dtensors.devicemesh import mesh_of
from shardmath_torch.dtensors.dtensor import Ask, local_of
from shardmath_torch.dtensors.placements import Shape
from shardmath_torch.files.places import CheckpointError
from shardmath_torch.files.steps import gather_all, is_alone, share_of

__all__ = ["ask_group", "rename"]


def ask_group(tensors: Mapping[str, Tensor], group: Group | None) -> Ask | None:
    """The local shapes of these tensors on all ranks of the group, gathered now; None where none is a DTensor.

    All ranks are known to have DTensors of the same names. Raises CheckpointError where one is gone.
    """
    mine: dict[str, Shape] = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            mine[name] = tuple(local_of(tensor).shape)
    if not mine or is_alone():
        return None
    _, count = share_of(group)
    said = gather_all("find out how its DTensors lie", mine, count, group)
    ranks = compat.ranks_of(compat.group_of(group))
    shapes: dict[int, dict[str, Shape]] = dict(zip(ranks, said, strict=True))

    def ask(unsure: Mapping[str, DTensor]) -> dict[str, dict[int, Shape]]:
        return {name: _find_shapes(name, tensor, shapes) for name, tensor in unsure.items()}

    return ask


def _find_shapes(
    name: str, tensor: DTensor, shapes: Mapping[int, Mapping[str, Shape]]
) -> dict[int, Shape]:
    """The local shapes of a tensor on the ranks of its mesh. Raises CheckpointError where one is not of the group."""
    found = {}
    for rank in mesh_of(tensor.device_mesh).ranks:
        if rank not in shapes:
            what = f"tensor {name!r} is on rank {rank} too, the group has {sorted(shapes)[:8]}"
            raise CheckpointError(f"{what}; give a group of all ranks that hold it")
        found[rank] = shapes[rank][name]
    return found


def rename(ask: Ask | None, spell: Callable[[str], str]) -> Ask | None:
    """The same, asked about tensors under other names, which `spell` turns into its own."""
    if ask is None:
        return None

    def asked(unsure: Mapping[str, DTensor]) -> dict[str, dict[int, Shape]]:
        own = {spell(name): tensor for name, tensor in unsure.items()}
        answers = ask(own)
        return {name: answers[spell(name)] for name in unsure}

    return asked
