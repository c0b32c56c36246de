"""The device of the tensors that workers make, and the backend of their groups. Imported by workers."""

from __future__ import annotations

import os

from tests.distributed.pool import VARIABLE

DEVICE = os.environ.get(VARIABLE, "cpu")
BACKEND = "nccl" if DEVICE == "cuda" else "gloo"
