"""What workers do. vLLM is imported by them alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

__all__ = ["generate", "load_again", "refit", "reload"]


def refit(
    rank: int, held: list[Path], loaded: list[Path] | None = None, rules: Any = None
) -> list[list[str]]:
    """Refits of these checkpoints, one after the other; which tensors of this rank differ after each.

    `loaded` are what vLLM's own loader takes in their place, where `rules` make other tensors of them.
    """
    from tests.vllm import moves

    return moves.refit(rank, moves.Asked(held, loaded or held, rules))


def generate(rank: int, folder: Path) -> list[list[int]]:
    """The greedy tokens of an engine that was started on a checkpoint."""
    from tests.vllm import serving

    return serving.generate(serving.start(folder))


def reload(rank: int, first: Path, then: Path) -> Any:
    """The greedy tokens of an engine on one checkpoint, and once it was refitted with another."""
    from tests.vllm import serving

    return serving.reload(first, then)


def load_again(rank: int, first: Path, then: Path) -> list[list[int]]:
    """The greedy tokens of an engine on one checkpoint, once vLLM itself has loaded another."""
    from tests.vllm import serving

    return serving.load_again(first, then)
