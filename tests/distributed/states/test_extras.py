"""Extra states of modules come back as what they were."""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardmath_torch.checkpoints.exports.export import export
from shardmath_torch.checkpoints.files.places import CheckpointError
from shardmath_torch.checkpoints.states import training
from shardmath_torch.checkpoints.weights.filling import load_weights


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


def test_a_module_with_two_names(tmp_path: Path) -> None:
    """Its extra state is saved under both, as torch's state dict has it."""
    scaled = Scaled(b"abc")
    training.save_state(tmp_path, nn.ModuleDict({"one": scaled, "other": scaled}))
    found = Scaled(b"")
    training.load_state(tmp_path, nn.ModuleDict({"one": found, "other": found}))
    assert found.value == b"abc"


ERRORS: dict[str, tuple[Callable[[], object], str]] = {
    "object": (
        lambda: training.state_of(nn.Sequential(Scaled({"a": 1}))),
        "'0._extra_state' is of type dict, but must be bytes; return b",
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


class Cached(nn.Linear):
    """Makes something of its weights and its extra state."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.inner = nn.Linear(1, 1)
        self.cache = torch.zeros(2)

    def get_extra_state(self) -> bytes:
        return b"2"

    def set_extra_state(self, state: bytes) -> None:
        if not state:
            raise ValueError("not this one")
        self.cache = self.bias.detach() * int(state)


def test_an_extra_state_finds_the_weights(tmp_path: Path) -> None:
    """As by load_state_dict."""
    module, other, by_torch = Cached(), Cached(), Cached()
    training.save_state(tmp_path, module)
    training.load_state(tmp_path, other)
    by_torch.load_state_dict(module.state_dict())
    assert other.cache.equal(module.bias.detach() * 2) and by_torch.cache.equal(other.cache)


class Failing(Cached):
    def get_extra_state(self) -> bytes:
        return b""


def test_an_extra_state_that_cannot_be_set(tmp_path: Path) -> None:
    """All else is restored by then, also of the optimizer."""
    module, other = Failing(), Failing()
    optimizer, fresh = (
        torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.5) for m in (module, other)
    )
    module(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 7.0
    training.save_state(tmp_path, module, optimizer)
    with pytest.raises(CheckpointError, match="could not restore its state: ValueError: not this"):
        training.load_state(tmp_path, other, fresh)
    wanted, found = (training.state_of(*x)[0] for x in ((module, optimizer), (other, fresh)))
    assert wanted.keys() == found.keys() and all(found[n].equal(wanted[n]) for n in wanted)
    assert fresh.param_groups[0]["lr"] == 7.0


class Hooked(nn.Module):
    """Holds copies of its weights, made anew by hooks of load_state_dict, and counts the calls."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)
        self.second.weight = self.first.weight
        self.tied = self.first
        self.calls: list[str] = []
        for name, module in (("self", self), ("first", self.first), ("second", self.second)):
            module.register_load_state_dict_post_hook(partial(self.refresh, name))

    def refresh(self, name: str, module: nn.Module, keys: Any) -> None:
        self.calls.append(name)
        self.keys = keys
        self.copy = self.second.bias.detach().clone()


@pytest.mark.parametrize("load", [training.load_state, load_weights])
def test_hooks_of_a_module(tmp_path: Path, load: Callable[..., object]) -> None:
    """What a module makes of its weights after `load_state_dict` is made after other loads, too."""
    module, other = Hooked(), Hooked()
    if load is training.load_state:
        training.save_state(tmp_path, module)
    else:
        export(tmp_path, module)
    load(tmp_path, other)
    assert other.copy.equal(module.second.bias)
    assert other.calls == ["first", "second", "self"]
    assert not other.keys.missing_keys and not other.keys.unexpected_keys


def test_hooks_of_a_module_get_names_that_one_side_has(tmp_path: Path) -> None:
    """As load_state_dict gives them."""
    module, other = Hooked(), Hooked()
    module.old, other.new = nn.Linear(1, 1), nn.Linear(1, 1, bias=False)
    training.save_state(tmp_path, module)
    training.load_state(tmp_path, other, strict=False)
    assert other.keys.missing_keys == ["new.weight"]
    assert other.keys.unexpected_keys == ["old.weight", "old.bias"]
    with pytest.raises(CheckpointError, match=r"lacks model\.new\.weight"):
        training.load_state(tmp_path, other)
