"""`shardmath.storage`: how trainers and engines really store tensors, declared in rows of text or recorded."""

from shardmath.models.recordings.recorded import Recorded
from shardmath.models.recordings.sides import RecordedSide
from shardmath.models.storage import *  # noqa: F403
from shardmath.models.storage import __all__ as _rows

__all__ = [*_rows, "Recorded", "RecordedSide"]
