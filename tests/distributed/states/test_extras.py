"""Extra states of modules come back as what they were."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardmath_torch.files.places import CheckpointError
from shardmath_torch.states import training


class Scaled(nn.Module):
    """Has something besides tensors."""

    def __init__(self, value: object) -> None:
        super().__init__()
        self.value = value

    def get_extra_state(self) -> object:
        return self.value

    def set_extra_state(self, state: Any) -> None:
        self.value = state


@pytest.mark.parametrize(
    "value", [b"", b"abc", bytearray(b"x"), None, io.BytesIO(b"file"), torch.arange(5).byte()]
)
def test_extra_states(tmp_path: Path, value: object) -> None:
    """They come back as what they were."""
    training.save_state(tmp_path, nn.Sequential(nn.Linear(1, 1), Scaled(value)))
    other = nn.Sequential(nn.Linear(1, 1), Scaled(b"other"))
    training.load_state(tmp_path, other)
    found = other[1].value
    plain = {
        io.BytesIO: lambda x: x.getvalue(),
        Tensor: lambda x: x.tolist(),
        bytearray: bytes,
    }.get(type(value), lambda x: x)
    assert isinstance(found, bytes if isinstance(value, bytearray) else type(value))
    assert plain(found) == plain(value)


ERRORS: dict[str, tuple[Callable[[], object], str]] = {
    "object": (
        lambda: training.state_of(nn.Sequential(Scaled({"a": 1}))),
        "'0._extra_state' is of type dict; return b",
    ),
    "floats": (
        lambda: training.state_of(nn.Sequential(Scaled(torch.ones(2)))),
        "return bytes, a BytesIO, or a 1-d",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name: str) -> None:
    act, said = ERRORS[name]
    with pytest.raises(CheckpointError) as error:
        act()
    assert said in str(error.value)


class Bytes(nn.Module):
    """Has a state of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.state = b"before"

    def get_extra_state(self) -> bytes:
        return self.state

    def set_extra_state(self, state: bytes) -> None:
        self.state = state


def test_extra_state_of_a_compiled_module(tmp_path: Path) -> None:
    module = nn.ModuleDict({"one": torch.compile(Bytes())})
    training.save_state(tmp_path, module)
    module["one"]._orig_mod.state = b"after"
    training.load_state(tmp_path, module)
    assert module["one"]._orig_mod.state == b"before"
