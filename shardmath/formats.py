"""`shardmath.formats`: weights as numbers of few bits, and scales that blocks of them share."""

from shardmath.values.formats import *  # noqa: F403
from shardmath.values.formats import __all__ as __all__
