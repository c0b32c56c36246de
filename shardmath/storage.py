"""`shardmath.storage`: how trainers and engines really store tensors, declared in rows of text."""

from shardmath.models.storage import *  # noqa: F403
from shardmath.models.storage import __all__ as __all__
