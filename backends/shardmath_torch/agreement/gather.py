"""What every rank of a group says, gathered as Python objects, before anything is planned."""

from __future__ import annotations

from typing import Any, TypeVar

import torch.distributed as dist

from shardmath.base.errors import ExchangeError
from shardmath_torch.compat import Group

__all__ = ["gather"]

_T = TypeVar("_T")


def gather(mine: _T, group: Group | None) -> list[_T]:
    """What the ranks say, in the group's order. Waits as long as the group's own time limit.

    Raises ExchangeError where a rank is gone or does not call.
    """
    said: list[Any] = [mine] * dist.get_world_size(group)
    try:
        dist.all_gather_object(said, mine, group=group)
    except RuntimeError as error:
        what = f"a rank is gone, or did not make this call: {error}"
        raise ExchangeError(f"{what}; see which ended first, and start the ranks again") from error
    return said
