"""FSDP2 by accelerate on CPUs, for tests only: accelerate 1.15 shards on GPUs only, and elsewhere makes DDP instead.

Ranks become FSDP at state.py:986, and MULTI_CPU is not in the list there. A later `AcceleratorState()` takes the kind
from PartialState again, so every construction is patched.
"""

from __future__ import annotations

import os
from typing import Any

from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType

_init = AcceleratorState.__init__


def _shard_on_cpus(self: Any, *args: Any, fsdp_plugin: Any = None, **more: Any) -> None:
    _init(self, *args, fsdp_plugin=fsdp_plugin, **more)
    plugin = fsdp_plugin or self.__dict__.get("fsdp_plugin")
    if plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
        self.distributed_type = DistributedType.FSDP
        self.fsdp_plugin = plugin


if os.environ.get("ACCELERATE_USE_FSDP") == "true":
    AcceleratorState.__init__ = _shard_on_cpus
