"""`shardmath.traces`: what takes time on ranks, measured or modelled, on one line of time."""

from shardmath.display.traces import *  # noqa: F403
from shardmath.display.traces import __all__ as __all__
