"""Amaxes: ranks that cut blocks quantise their own parts, exactly as the whole tensor would be.

In reading order:

- `parts`: what a rank holds, and the blocks that it touches;
- `slots`: which amaxes travel, and who needs them;
- `amaxes`: what ranks measure, send and make.
"""

from shardmath.values.amaxes.amaxes import Amaxes, plan_amaxes

__all__ = ["Amaxes", "plan_amaxes"]
