"""FSDP: private state of FSDP2 in the modules that it shards (torch 2.13)."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed._composable_state import _get_module_state, _module_state_mapping

__all__ = ["give_shards_back", "has_gathered", "list_fsdp_groups", "list_gathered", "list_keepers"]


def list_fsdp_groups() -> list[Any]:
    """Return FSDP2's groups (torch 2.13: FSDPParamGroup) of all live modules; the parameters of one group are gathered
    together.
    """
    group_by_id: dict[int, Any] = {}
    # Copied into a list at once: other threads may shard modules meanwhile.
    for module in [ref() for ref in _module_state_mapping.keyrefs()]:
        state = None if module is None else _get_module_state(module)
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:
            groups = [getattr(state, "_fsdp_param_group", None)]
        group_by_id |= {id(group): group for group in groups if group is not None}
    return list(group_by_id.values())


def list_keepers(group: Any) -> list[Any]:
    """Return FSDP2's objects for a group's parameters (torch 2.13: FSDPParam); each has a shard as `sharded_param`."""
    return list(group.fsdp_params)


def list_gathered(keeper: Any) -> list[Tensor]:
    """Return the tensors, freed or not, into which FSDP2 has gathered the parameter of `keeper` (an FSDPParam)."""
    names = "_unsharded_param", "_sharded_post_forward_param"
    candidates = [getattr(keeper, name, None) for name in names]
    return [tensor for tensor in candidates if tensor is not None]


def give_shards_back(group: Any) -> None:
    """Put the shards back as parameters of the group's modules, and free gathered parameters, as FSDP2 itself does.

    FSDP2's own `reshard` is not called, since it does nothing during a forward, and to FSDP2 a forward that failed
    never ends.
    """
    # A prefetched gather used the earlier values of the shards.
    group.wait_for_unshard()
    group._to_sharded()


def has_gathered(keeper: object, sharded: Tensor, now: object) -> bool:
    """Whether `now` is the gathered parameter that FSDP2 has put into a module in place of the shard `sharded`.
    `keeper` is an FSDPParam, FSDP2's object for a parameter; False if `keeper.sharded_param` is not `sharded`.
    """
    if now is None or getattr(keeper, "sharded_param", None) is not sharded:
        return False
    return any(now is tensor for tensor in list_gathered(keeper))
