"""`shardmath.transforms`: what is sent where it is not what is held: casts, computed parameters, your functions."""

from shardmath.values.transforms import *  # noqa: F403
from shardmath.values.transforms import __all__ as __all__
