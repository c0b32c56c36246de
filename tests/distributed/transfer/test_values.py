"""Small values of a transfer: what is told, what is converted, and models that refuse to answer."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import shardmath_vllm as sv
from shardmath import ExchangeError
from shardmath_vllm import converting
from shardmath_vllm.workers.refusing import accept, refuse


def test_globs_that_are_a_text() -> None:
    """Would be its letters, of which "*" is everything."""
    with pytest.raises(ValueError, match=r"own='\*\.k_scale' is a text"):
        sv.TrainerInfo("a:1", 1, workers=1, rank=0, own="*.k_scale")  # type: ignore[arg-type]


def test_equal_names_of_other_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Are recorded: a checkpoint may have a tensor transposed."""

    def revert(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor.t().contiguous() for name, tensor in tensors.items()}

    monkeypatch.setattr(converting, "_find_reversion", lambda module: revert)
    recorded = converting.record_conversion(nn.Identity(), {"w": ((3, 3), "float32")})
    assert recorded is not None
    weight = torch.arange(9.0).reshape(3, 3)
    ((name, made),) = converting.convert(recorded, {"w": weight}.items())
    assert name == "w" and torch.equal(made, weight.t())


class Generating(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x

    def compute_logits(self, x: Tensor) -> Tensor:
        return x + 1


class Pooling(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1


@pytest.mark.parametrize("kind", [Generating, Pooling])
def test_a_torn_model(kind: type[nn.Module]) -> None:
    """Refuses to answer until it is accepted, whatever it is asked for."""
    model = kind()

    def ask() -> Tensor:
        hidden = model(torch.ones(1))
        answer: Tensor = getattr(model, "compute_logits", lambda x: x)(hidden)
        return answer

    refuse(model, "a worker was lost")
    refuse(model, "another was lost")
    with pytest.raises(ExchangeError, match="weights are torn: another was lost; update all"):
        ask()
    accept(model)
    assert float(ask()) == 2.0
