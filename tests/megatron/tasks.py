"""What workers do. Megatron is imported by them alone: pytest's own process would only wait for it."""

from __future__ import annotations

from tests.megatron.cases import Case, Found


def run(rank: int, case: Case) -> Found:
    """What this rank finds."""
    from tests.megatron.moves import move

    return move(rank, case)
