"""Plans on torch.distributed: `compile` once, then `move` many times.

move = compile(plan)                        # collective; every rank of the group, once
move(src_tensors, out=dst_tensors)          # collective; many times, in the same order on every rank
"""

from __future__ import annotations

from shardmath_torch.compile import Mover, compile

__all__ = ["Mover", "compile"]
