"""`shardmath.errors`: what is raised on purpose. Each is a name of `shardmath`, too."""

from shardmath.base.errors import *  # noqa: F403
from shardmath.base.errors import __all__ as __all__
