"""Options and values as JSON: all that comes back, and all that is refused, by name."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from shardmath_torch.files.places import CheckpointError
from shardmath_torch.states import training
from shardmath_torch.states.memory import has_same_bits
from shardmath_torch.states.values import code_value, decode_value
from tests.distributed.tasks.states import freed

KEPT: dict[str, Any] = {
    "numbers": [0, -1, 2.5, 1e300, True, None, 10**400],
    "strange floats": (float("inf"), -float("inf")),
    "text": "\ud800 \n",
    "dicts that look coded": {"tuple": [1], "tensor": ["int8", 2], "dict": {"dict": {}}},
    "nested": ([(), [], {}], {"a": ({"b": [1]},)}),
}


@pytest.mark.parametrize("case", KEPT)
def test_values_come_back(case: str) -> None:
    """Through JSON, as what they were."""
    found = decode_value(json.loads(json.dumps(code_value(KEPT[case], "it"))))
    assert repr(found) == repr(KEPT[case])


TENSORS: dict[str, Callable[[], Tensor]] = {
    "0-d": lambda: torch.tensor(0.1),
    "bool": lambda: torch.tensor([[True, False]]),
    "bfloat16": lambda: torch.tensor([0.1, 1e30, float("inf"), -0.0]).bfloat16(),
    "float8": lambda: torch.tensor([0.5, -3.0]).to(torch.float8_e4m3fn),
    "uint64": lambda: torch.tensor([2**64 - 1, 0], dtype=torch.uint64),
    "no rows": lambda: torch.zeros(0, 3),
    "no columns": lambda: torch.zeros(2, 0, dtype=torch.int8),
    "strided": lambda: torch.arange(6.0).reshape(2, 3).T,
    "a parameter": lambda: nn.Parameter(torch.ones(2)),
}


@pytest.mark.parametrize("case", TENSORS)
def test_tensors_come_back(case: str) -> None:
    """Bit by bit, in their shape."""
    tensor = TENSORS[case]()
    found = decode_value(json.loads(json.dumps(code_value(tensor, "it"))))
    assert has_same_bits(found, tensor)


def test_nan_comes_back() -> None:
    found = decode_value(json.loads(json.dumps(code_value([float("nan")], "it"))))
    assert math.isnan(found[0])


class Wraps(Tensor):
    """Keeps its values in a way of its own."""

    @staticmethod
    def __new__(cls) -> Wraps:
        return Tensor._make_wrapper_subclass(cls, (3,))

    @classmethod
    def __torch_dispatch__(cls, *args: object, **kwargs: object) -> object:
        raise NotImplementedError


def endless() -> list[object]:
    out: list[object] = []
    out.append(out)
    return out


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "freed": (lambda: freed(), "reaches 16 bytes into a storage of 0"),
    "meta": (lambda: torch.ones(2, device="meta"), "is on the meta device"),
    "meta, empty": (lambda: torch.ones(0, device="meta"), "is on the meta device"),
    "a class of its own": (Wraps, "is a Wraps, which has no plain memory"),
    "sparse": (lambda: torch.ones(2).to_sparse(), "is stored as torch.sparse_coo"),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(1)]), "is a nested tensor"),
    "complex": (lambda: torch.ones(2, dtype=torch.complex64), "is a tensor of complex64"),
    "quantised": (
        lambda: torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.quint8),
        "is a tensor of quint8",
    ),
    "half bytes": (
        lambda: torch.ones(2, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
        "is a tensor of float4_e2m1fn_x2",
    ),
    "complex number": (lambda: 1j, "is 1j, which JSON cannot say"),
    "bytes": (lambda: b"a", "is b'a', which JSON cannot say"),
    "keys": (lambda: {1: 2}, "is {1: 2}, which JSON cannot say"),
    "digits": (lambda: 10**5000, "is <int that cannot be printed>, which JSON cannot say"),
    "endless": (endless, "is nested more than 64 deep"),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("inside", [False, True])
def test_values_that_are_refused(tmp_path: Path, case: str, inside: bool) -> None:
    """The option is named, and nothing is saved."""
    make, said = REFUSED[case]
    module = nn.Linear(2, 2)
    optimizer = optim.SGD(module.parameters(), lr=0.1)
    optimizer.param_groups[0]["odd"] = [make()] if inside else make()
    with pytest.raises(CheckpointError, match=f"'odd' of a parameter group {re.escape(said)}"):
        training.save_state(tmp_path, module, optimizer)
    assert not list(tmp_path.iterdir())
