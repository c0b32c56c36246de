"""`shardmath.storage`: how trainers and engines really store tensors, declared in rows of text or recorded."""

from shardmath.models.recordings.recorded import Recorded
from shardmath.models.recordings.sides import RecordedSide
from shardmath.models.storage.binding import Bound, bind
from shardmath.models.storage.filling import fill, gather
from shardmath.models.storage.rows import Row, parse, show
from shardmath.models.storage.stored import Slot, Spot, Stored, Vocabulary

__all__ = [
    "Bound",
    "Recorded",
    "RecordedSide",
    "Row",
    "Slot",
    "Spot",
    "Stored",
    "Vocabulary",
    "bind",
    "fill",
    "gather",
    "parse",
    "show",
]
