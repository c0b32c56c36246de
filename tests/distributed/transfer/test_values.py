"""Small values of a transfer: what is told, what is converted, and models that refuse to answer."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import shardmath as sm
import shardmath_vllm as sv
from shardmath import ExchangeError
from shardmath_torch.tensors.conversions import saved as recording
from shardmath_vllm import converting
from shardmath_vllm.workers.refusing import accept, refuse


def test_globs_that_are_a_text() -> None:
    """Would be its letters, of which "*" is everything."""
    with pytest.raises(ValueError, match=r"globs in own are '\*\.k_scale'; give a tuple"):
        sv.TrainerInfo("a:1", 1, workers=1, rank=0, own="*.k_scale")  # type: ignore[arg-type]


def test_equal_names_of_other_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Are recorded: a checkpoint may have a tensor transposed."""

    def revert(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor.t().contiguous() for name, tensor in tensors.items()}

    monkeypatch.setattr(recording, "_find_converter", lambda module: revert)
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
    with pytest.raises(ExchangeError, match="another was lost; send all weights again"):
        ask()
    accept(model)
    assert float(ask()) == 2.0


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ({"address": "tcp://a:1"}, ValueError, "is not 'host:port'; pass text"),
        ({"address": "a"}, ValueError, "is not 'host:port'; pass text"),
        ({"address": "h:99999999"}, ValueError, "is not 'host:port'; pass text"),
        ({"address": "h:²"}, ValueError, "is not 'host:port'; pass text"),
        ({"address": b"h:1"}, ValueError, "is not 'host:port'; pass text"),
        ({"rank": "0"}, ValueError, "rank is '0'; give an integer"),
        ({"trainers": 2.0}, ValueError, "trainers is 2.0; give an integer"),
        ({"rank": 2}, ValueError, "rank=2 is not the rank of one of trainers=2; pass"),
        ({"workers": "2"}, ValueError, "workers are '2'; give a tuple"),
        ({"workers": None}, ValueError, "workers is None; give an integer"),
        ({"workers": 1.5}, ValueError, "workers is 1.5; give an integer"),
        ({"workers": True}, ValueError, "workers is True; give an integer"),
        ({"workers": (1, "2")}, ValueError, "workers is '2'; give an integer"),
        ({"workers": ()}, ValueError, "is not a number of workers, 1 or more, per engine; pass"),
        (
            {"workers": (2, 0)},
            ValueError,
            "is not a number of workers, 1 or more, per engine; pass",
        ),
        ({"timeout": 0}, ValueError, "is not a time to wait"),
        ({"timeout": np.complex64(5)}, ValueError, "is not a time to wait"),
        ({"workers": {1: 2}}, ValueError, r"workers=\{1: 2\} is not a number of workers"),
        ({"workers": {2, 1}}, ValueError, r"workers=\{1, 2\} is not a number of workers"),
        ({"own": 5}, ValueError, "globs in own are 5; give a tuple"),
        ({"own": (5,)}, ValueError, "a glob in own is 5"),
        ({"max_inflight_bytes": "x"}, ValueError, "max_inflight_bytes is 'x'; give an integer"),
        (
            {"max_inflight_bytes": 0},
            ValueError,
            "max_inflight_bytes=0 is not a positive number of bytes; pass an integer",
        ),
        ({"transport": "mpi"}, ValueError, "transport='mpi' is unknown; pass 'gloo' or 'nccl'"),
        (
            {"transport": ["gloo"]},
            ValueError,
            r"transport=\['gloo'\] is unknown; pass 'gloo' or 'nccl'",
        ),
        ({"run": 5}, ValueError, "run is 5"),
        ({"dtype": 5}, sm.LayoutError, "unknown dtype '5'"),
        ({"dtype": "bf16"}, sm.LayoutError, "did you mean 'bfloat16'"),
    ],
)
def test_infos_that_are_none(given: dict[str, Any], error: type[Exception], said: str) -> None:
    info: dict[str, Any] = {"address": "a:1", "trainers": 2, "workers": 2, "rank": 0}
    with pytest.raises(error, match=said):
        sv.TrainerInfo(**(info | given))


def test_infos_have_torchruns_id_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless all runs have the same."""
    for told, run in {"f1440a51": "f1440a51", "none": ""}.items():
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", told)
        assert sv.TrainerInfo("a:1", 1, workers=1, rank=0).run == run
        assert sv.TrainerInfo("a:1", 1, workers=1, rank=0, run="job 7").run == "job 7"
        assert sv.TrainerInfo("a:1", 1, workers=1, rank=0, run="").run == ""
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    assert not sv.TrainerInfo("a:1", 1, workers=1, rank=0).run


def test_infos_name_types_as_vllm_does() -> None:
    info = sv.TrainerInfo("a:1", 1, workers=1, rank=0, dtype=torch.bfloat16)  # type: ignore[arg-type]
    assert info.dtype == "bfloat16"


def test_infos_are_plain_and_cannot_be_changed() -> None:
    """What workers are told is JSON."""
    sizes: Any = [np.int64(2), 1]
    globs: Any = ["*.k_scale"]
    seconds: Any = np.float32(5)
    info = sv.TrainerInfo("a:1", 1, workers=sizes, rank=0, own=globs, timeout=seconds)
    assert info.workers == (2, 1) and info.own == ("*.k_scale",)
    assert hash(info) == hash(info)
    told = json.loads(json.dumps(info.tell(1, "meeting")))
    assert told["workers"] == 1 and told["timeout"] == 5.0


def test_a_client_waits_for_seconds_of_numpy() -> None:
    """TypeError before: a lock takes no such number."""
    client = sv.HTTPClient("http://127.0.0.1:1", timeout=np.float32(5))  # type: ignore[arg-type]
    with pytest.raises(ExchangeError, match="gave no answer"):
        client.start_weight_update()
