"""`shardmath.store`: which buffer, and which view of it."""

from shardmath.layouts.store import *  # noqa: F403
from shardmath.layouts.store import __all__ as __all__
