"""`shardmath.rules`: which tensors of a model lie how, in one line of text."""

from shardmath.models.systems.rules import *  # noqa: F403
from shardmath.models.systems.rules import __all__ as __all__
