"""Tensors that transformers saves for a module, as parts of the module's tensors."""

from __future__ import annotations

import torch

from shardmath_torch.tensors.conversions.saved import SavedPart, find_parts
from shardmath_torch.tensors.refits.recording import record


def test_scalars() -> None:
    """A scalar is its whole, whether it is saved alone or of a tensor."""
    into = {"new.scale": torch.empty((), device="meta"), "first": torch.empty((), device="meta")}

    def load(tensors: dict[str, torch.Tensor]) -> None:
        into["new.scale"].copy_(tensors["scale"])
        into["first"].copy_(tensors["pair"][0])

    recorded = record(load, {"scale": ((), "float32"), "pair": ((2,), "float32")}, into)
    assert find_parts(recorded) == [
        SavedPart(name="new.scale", shape=(), tensor="scale", box=(), kept=()),
        SavedPart(name="first", shape=(), tensor="pair", box=((0, 1),), kept=()),
    ]
