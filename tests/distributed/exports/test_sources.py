"""What is exported, and who holds what of it."""

from __future__ import annotations

from pathlib import Path

from tests.distributed.pool import alone
from tests.distributed.tasks import steps


def test_dtensors_on_parts_of_a_mesh(tmp_path: Path) -> None:
    """As FSDP2 and tensor parallelism leave them: each part holds the same."""
    assert alone(4, steps.parts_of_a_mesh, str(tmp_path)) == [[True] * 4] * 4
