"""Small values of a transfer: what is told, what is converted, and models that refuse to answer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardmath as sm
import shardmath_vllm as sv
from shardmath import ExchangeError
from shardmath_torch.conversions import saved as recording
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

    monkeypatch.setattr(recording, "_find_reversion", lambda module: revert)
    recorded = recording.record_conversion(nn.Identity(), {"w": ((3, 3), "float32")})
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


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ({"address": "tcp://a:1"}, ValueError, "is not 'host:port'; give one"),
        ({"address": "a"}, ValueError, "is not 'host:port'; give one"),
        ({"rank": "0"}, ValueError, r"rank='0' is no int; give int\('0'\)"),
        ({"rank": 2}, ValueError, "rank 2 of 2 trainers; give one of them"),
        ({"workers": "2"}, ValueError, "give how many each engine has"),
        ({"workers": (2, 0)}, ValueError, "give how many each engine has"),
        ({"timeout": 0}, ValueError, "is not a time to wait"),
        ({"dtype": "bf16"}, sm.LayoutError, "did you mean 'bfloat16'"),
    ],
)
def test_infos_that_are_none(given: dict[str, Any], error: type[Exception], said: str) -> None:
    info: dict[str, Any] = {"address": "a:1", "trainers": 2, "workers": 2, "rank": 0}
    with pytest.raises(error, match=said):
        sv.TrainerInfo(**(info | given))


def test_infos_name_types_as_vllm_does() -> None:
    info = sv.TrainerInfo("a:1", 1, workers=1, rank=0, dtype=torch.bfloat16)  # type: ignore[arg-type]
    assert info.dtype == "bfloat16"
