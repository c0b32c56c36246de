"""Options and values as JSON: all that comes back, and all that is refused, by name."""

from __future__ import annotations

import json
import math
import re
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from datetime import date
from enum import Enum, IntEnum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn, optim

from shardmath_torch.checkpoints.files.places import CheckpointError
from shardmath_torch.checkpoints.states import training
from shardmath_torch.checkpoints.states.memory import has_same_bits
from shardmath_torch.checkpoints.states.values import (
    code_value,
    decode_value,
    list_tensors,
    move_tensors,
)
from tests.distributed.tasks.states import freed

KEPT: dict[str, Any] = {
    "numbers": [0, -1, 2.5, 1e300, True, None, 10**400],
    "strange floats": (float("inf"), -float("inf")),
    "text": "\ud800 \n",
    "dicts that look coded": {"tuple": [1], "tensor": ["int8", 2], "dict": {"dict": {}}},
    "numbers of numpy": [np.float64(0.1), np.float32(0.1), np.float16("inf"), np.bool_(True)],
    "large numbers of numpy": (np.uint64(2**64 - 1), np.int8(-3)),
    "dtypes": [torch.bfloat16, (torch.float8_e4m3fn, torch.bool)],
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


def test_tensors_in_values_go_to_their_parameter() -> None:
    """JSON has no devices; the history of LBFGS is on that of its parameters."""
    found = move_tensors([({"a": torch.ones(2)}, 1), torch.ones(())], torch.device("meta"))
    assert [tensor.device.type for tensor in list_tensors(found)] == ["meta", "meta"]
    assert found[0][1] == 1 and type(found[0]) is tuple


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


class Text(str):
    pass


class Whole(int):
    pass


class Real(float):
    pass


class Phase(str, Enum):  # noqa: UP042  # what optimizers of 3.10 have
    WARM = "warm"
    FULL = "full"


class Other(Enum):
    WARM = "warm"


class Level(IntEnum):
    HIGH = 3


class Mode(Enum):
    LATE = (1, Level.HIGH)


class Pair(NamedTuple):
    first: object
    second: object


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
    "quantized": (
        lambda: torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.quint8),
        "is a tensor of quint8",
    ),
    "half bytes": (
        lambda: torch.ones(2, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
        "is a tensor of float4_e2m1fn_x2",
    ),
    "a quantized dtype": (lambda: torch.qint8, "is torch.qint8, which JSON cannot store"),
    "complex number": (lambda: 1j, "is 1j, which JSON cannot store"),
    "bytes": (lambda: b"a", "is b'a', which JSON cannot store"),
    "keys": (lambda: {1: 2}, "is {1: 2}, which JSON cannot store"),
    "keys of a class of text": (lambda: {Text("a"): 2}, "is {'a': 2}, which JSON cannot store"),
    "a class of text": (lambda: Text("a"), "is 'a', a Text, but would be loaded as a plain str"),
    "a class of int": (lambda: Whole(2), "is 2, a Whole, but would be loaded as a plain int"),
    "a class of float": (lambda: Real(2), "is 2.0, a Real, but would be loaded as a plain float"),
    "a size": (
        lambda: torch.Size([2]),
        "is torch.Size([2]), a Size, but would be loaded as a plain tuple",
    ),
    "a defaultdict": (
        lambda: defaultdict(int),
        "a defaultdict, but would be loaded as a plain dict",
    ),
    "an ordered dict": (
        OrderedDict,
        "is OrderedDict(), a OrderedDict, but would be loaded as a plain",
    ),
    "a date": (lambda: np.datetime64("2020-01-01"), "which JSON cannot store"),
    "a date of Python": (lambda: date(2020, 1, 1), "which JSON cannot store"),
    "an object in a pair": (lambda: Pair(1, object()), "is <object object at "),
    "digits": (lambda: 10**5000, "is <int that cannot be printed>, which JSON cannot store"),
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
    with pytest.raises(CheckpointError, match=f"'odd' of a parameter group .*{re.escape(said)}"):
        training.save_state(tmp_path, module, optimizer)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("place", ["a parameter group", "an optimizer's defaults"])
def test_options_that_contain_themselves_take_nothing(tmp_path: Path, place: str) -> None:
    """That was a RecursionError: what is there is looked through for tensors that keep their memory."""
    training.save_state(tmp_path, *with_option(1))
    module, optimizer = with_option(1)
    of = optimizer.defaults if "defaults" in place else optimizer.param_groups[0]
    of["odd"] = endless()
    before = module.weight.detach().clone()
    what = f"'odd' of {place} is nested more than 64 deep, or contains itself"
    with pytest.raises(CheckpointError, match=re.escape(what)):
        training.load_state(tmp_path, module, optimizer)
    assert torch.equal(module.weight, before)


SHOWN: list[Any] = [Phase.WARM, Level.HIGH, Mode.LATE, Pair(1, 0.5), [Pair(Phase.WARM, [1])]]
"""What comes back only where the optimizer has one of that class."""


def with_option(value: object) -> tuple[nn.Module, optim.Optimizer]:
    module = nn.Linear(2, 2)
    optimizer = optim.SGD(module.parameters(), lr=0.1)
    optimizer.param_groups[0]["odd"] = value
    return module, optimizer


@pytest.mark.parametrize("value", SHOWN)
def test_options_of_classes(tmp_path: Path, value: object) -> None:
    """Come back as that class, or are an error where the optimizer has another: text is not taken for a phase."""
    others = {Phase.WARM: Phase.FULL, Pair(1, 0.5): Pair(2, 0.25)}
    other = value if isinstance(value, list) else others.get(value, value)
    training.save_state(tmp_path, *with_option(value))
    module, optimizer = with_option(other)
    training.load_state(tmp_path, module, optimizer)
    found = optimizer.param_groups[0]["odd"]
    assert type(found) is type(value) and repr(found) == repr(value)
    for odd in ("warm", None, Other.WARM):
        with pytest.raises(
            CheckpointError, match=r"in the checkpoint, but .* here.*; make the opt"
        ):
            training.load_state(tmp_path, *with_option(odd))


@pytest.mark.parametrize("value", [*SHOWN, Text("a"), torch.Size([2]), defaultdict(int)])
def test_state_of_classes_is_refused(tmp_path: Path, value: object) -> None:
    """A fresh optimizer has no state that says which class it was: it would leave its phase without an error."""
    module, optimizer = with_option(1)
    optimizer.state[module.weight] = {"phase": value}
    with pytest.raises(CheckpointError, match="'phase' of 'weight' is "):
        training.save_state(tmp_path, module, optimizer)


@pytest.mark.parametrize("key", [Text("rare"), 1])
def test_keys_of_options_and_state(tmp_path: Path, key: Any) -> None:
    """A key comes back as plain text, under which an Enum is not found."""
    module, optimizer = with_option(1)
    optimizer.param_groups[0][key] = 1
    with pytest.raises(
        CheckpointError, match=r"a parameter group has the key .*; use text as keys"
    ):
        training.save_state(tmp_path, module, optimizer)
    module, optimizer = with_option(1)
    optimizer.state[module.weight] = {key: 1}
    with pytest.raises(
        CheckpointError, match=r"state of 'weight' has the key .*; use text as keys"
    ):
        training.save_state(tmp_path, module, optimizer)


def test_a_dtype_as_an_option(tmp_path: Path) -> None:
    """As that of the moments, which some optimizers have."""
    training.save_state(tmp_path, *with_option(torch.bfloat16))
    module, optimizer = with_option(torch.float32)
    training.load_state(tmp_path, module, optimizer)
    assert optimizer.param_groups[0]["odd"] is torch.bfloat16


def test_a_rate_of_numpy_goes_into_a_tensor(tmp_path: Path) -> None:
    """As what a schedule computes with numpy, for an optimizer that is captured."""
    module, optimizer = with_option(1)
    optimizer.param_groups[0]["lr"] = np.float32(0.5)
    training.save_state(tmp_path, module, optimizer)
    module, optimizer = with_option(1)
    held = optimizer.param_groups[0]["lr"] = torch.tensor(0.1)
    training.load_state(tmp_path, module, optimizer)
    assert optimizer.param_groups[0]["lr"] is held and held.item() == 0.5
