"""What FSDP2 keeps to itself of the modules that it divides (torch 2.13)."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed._composable_state import _get_module_state, _module_state_mapping

__all__ = ["give_shards_back", "has_gathered", "list_fsdp_groups", "list_gathered", "list_keepers"]


def list_fsdp_groups() -> list[Any]:
    """What FSDP2 gathers together, of all modules that are alive (torch 2.13: FSDPParamGroup)."""
    found: dict[int, Any] = {}
    # A list at once: other threads may divide modules meanwhile.
    for module in [ref() for ref in _module_state_mapping.keyrefs()]:
        state = None if module is None else _get_module_state(module)
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:
            groups = [getattr(state, "_fsdp_param_group", None)]
        found |= {id(group): group for group in groups if group is not None}
    return list(found.values())


def list_keepers(group: Any) -> list[Any]:
    """What it keeps of each parameter, with its `sharded_param` (torch 2.13: FSDPParam)."""
    return list(group.fsdp_params)


def list_gathered(keeper: Any) -> list[Tensor]:
    """What FSDP2 has gathered of a parameter, whether or not it still has memory."""
    names = "_unsharded_param", "_sharded_post_forward_param"
    found = [getattr(keeper, name, None) for name in names]
    return [one for one in found if one is not None]


def give_shards_back(group: Any) -> None:
    """Puts shards in their places, and frees what was gathered of them: as FSDP2 itself does before a `state_dict`.

    Not its `reshard`, which does nothing in a forward: in one that has failed, it is for ever.
    """
    # What was gathered ahead came of the shards as they were.
    group.wait_for_unshard()
    group._to_sharded()


def has_gathered(keeper: object, sharded: Tensor, now: object) -> bool:
    """Whether FSDP2 has what it gathered of a sharded parameter in its place, or a part of that, for the time being."""
    if now is None or getattr(keeper, "sharded_param", None) is not sharded:
        return False
    return any(now is one for one in list_gathered(keeper))
