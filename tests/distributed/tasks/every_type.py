"""One tensor of every type that safetensors slices, and odd shapes."""

from __future__ import annotations

import torch

from shardmath_torch.checkpoints.safetensors.headers import DTYPES


def tensors() -> dict[str, torch.Tensor]:
    """One tensor of every type that safetensors slices, (10, 6), and odd shapes."""
    raw = torch.arange(10 * 6 * 8, dtype=torch.int64).to(torch.uint8)
    typed = {
        name: raw[: 60 * size_of(name)].view(getattr(torch, name)).view(10, 6)
        for name in DTYPES.values()
    }
    typed["bool"] = (raw[:60] % 3 == 0).view(10, 6)
    return {
        **typed,
        "scalar": torch.tensor(3.5),
        "empty": torch.zeros(0, 4),
        "bias": torch.arange(9.0),
    }


def size_of(name: str) -> int:
    return int(getattr(torch, name).itemsize)


def raw(tensor: torch.Tensor) -> list[int]:
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist()
