"""Forks: the process groups of the process that this one was forked from, which owns their connections.

1. `shardmath_torch` imports this file at once, and everything else on its first use, so that a process can be forked
   before that. So this file imports nothing of torch.
2. A group that is there at a fork belongs to the parent, and stays unusable in the child.
"""

from __future__ import annotations

import os
import sys
from typing import Any
from weakref import WeakSet

__all__ = ["inherited"]

inherited: WeakSet[Any] = WeakSet()
"""Process groups that this process cannot use."""


def _note_inherited() -> None:
    """Note the groups that torch and this library know of, if they are imported."""
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    world = getattr(c10d, "_world", None)
    if world is not None:
        inherited.update(world.pg_map)
    joint_group = sys.modules.get("shardmath_torch.groups.joint_group")
    if joint_group is not None:
        inherited.update(joint_group.list_joint())


os.register_at_fork(after_in_child=_note_inherited)
