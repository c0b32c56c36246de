"""Plans on torch.distributed: `compile` once, then `move` many times; and DTensors as what they really are.

move = compile(plan)                        # collective; every rank of the group, once
move(src_tensors, out=dst_tensors)          # collective; many times, in the same order on every rank

layout = from_dtensor(dtensor)              # what every rank really holds
other = redistribute(dtensor, target)       # any mesh to any mesh, differentiable
"""

from __future__ import annotations

from shardmath_torch.checkpoint import load, save
from shardmath_torch.compile import Mover, compile
from shardmath_torch.dtensor import from_dtensor, to_dtensor
from shardmath_torch.modules import layout_of
from shardmath_torch.redistribute import redistribute
from shardmath_torch.stored import open_checkpoint

__all__ = [
    "Mover",
    "compile",
    "from_dtensor",
    "layout_of",
    "load",
    "open_checkpoint",
    "redistribute",
    "save",
    "to_dtensor",
]
