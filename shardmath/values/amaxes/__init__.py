"""Amaxes: ranks whose cuts divide blocks quantize their parts, bit for bit as if from the whole tensor.

In reading order:

- `parts`: the positions that a rank holds, and the blocks that they touch;
- `slots`: the amaxes that travel, and the ranks that need them;
- `amaxes`: measuring amaxes, sending them, and quantizing with them.
"""

from shardmath.values.amaxes.amaxes import Amaxes, plan_amaxes

__all__ = ["Amaxes", "plan_amaxes"]
