"""What is sent: a model as a Megatron trainer divides it, and which engine takes it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tests.megatron.cases import Case

__all__ = ["Sending"]


@dataclass(frozen=True)
class Sending:
    """Checkpoints to be sent one after the other, by a trainer whose parameters have this dtype.

    The engine has `tp` workers and listens at port `engine`; trainers and workers meet at `port`.
    """

    case: Case
    folders: tuple[Path, ...]
    dtype: str
    tp: int
    engine: int
    port: int
