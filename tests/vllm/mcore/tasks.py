"""What workers do. Megatron-Core and vLLM are imported by those alone that need them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.vllm.mcore.cases import Sending

__all__ = ["generate", "send", "serve"]


def send(rank: int, sending: Sending) -> dict[str, Any]:
    """A trainer's rank."""
    from tests.vllm.mcore import trainers

    return trainers.send(rank, sending)


def serve(rank: int, folder: Path, tp: int, port: int) -> Any:
    """An engine."""
    from tests.vllm.mcore import calls

    return calls.serve(rank, folder, tp, port)


def generate(rank: int, folder: Path, tp: int) -> Any:
    """What an engine that was started on a checkpoint generates."""
    from tests.vllm.mcore import calls

    return calls.generate(rank, folder, tp)
