"""What every rank of a group says, gathered as Python objects, before anything is planned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from shardmath.base.errors import ExchangeError
from shardmath_torch.compat import Group

__all__ = ["gather"]

_T = TypeVar("_T")


def _word_gone(error: RuntimeError) -> ExchangeError:
    """What to raise where a rank does not answer."""
    what = f"a rank is gone, or did not make this call: {error}"
    return ExchangeError(f"{what}; see which ended first, and start the ranks again")


def gather(
    mine: _T,
    group: Group | None,
    word_gone: Callable[[RuntimeError], Exception] = _word_gone,
) -> list[_T]:
    """What the ranks say, in the group's order. Waits as long as the group's own time limit.

    Raises ExchangeError where a rank is gone or does not call, or what `word_gone` makes of torch's
    own error.
    """
    said: list[Any] = [mine] * dist.get_world_size(group)
    try:
        dist.all_gather_object(said, mine, group=group)
    except RuntimeError as error:
        raise word_gone(error) from error
    return said
