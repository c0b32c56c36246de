"""torch's own tools on what we write: loads by key, nested state dicts, conversion to a file of torch.save."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

import shardmath as sm
import shardmath_torch as smt
from shardmath_torch.checkpoints.files.places import CheckpointError
from shardmath_torch.checkpoints.opening import BLOBS

TENSORS = {
    "model.a.w": torch.arange(6.0).view(2, 3),
    "model.b": torch.ones(2),
    "step": torch.tensor(3.0),
}
LAYOUTS = {name: sm.Layout(tuple(t.shape), sm.Mesh(), {}) for name, t in TENSORS.items()}
PATHS = {"model.a.w": ("model", "a.w"), "model.b": ("model", "b")}


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """torch says that there are no processes, and that its own loader is deprecated."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def equal(a: Any, b: Any) -> bool:
    """Whether two nested state dicts are the same."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    return torch.equal(a, b)


def converted(path: Path) -> Any:
    """What torch makes of a checkpoint as one file."""
    dcp_to_torch_save(path, path / "all.pt")
    return torch.load(path / "all.pt", weights_only=True)


def test_flat_names_stay_flat(tmp_path: Path) -> None:
    """As when torch saves a flat mapping."""
    smt.save(tmp_path, TENSORS, LAYOUTS)
    assert equal(converted(tmp_path), TENSORS)
    assert equal(
        _load_state_dict_from_keys({"model.b"}, checkpoint_id=tmp_path),
        {"model.b": TENSORS["model.b"]},
    )


def test_paths_nest(tmp_path: Path) -> None:
    """As when torch saves a nested one."""
    nested = {
        "model": {"a.w": TENSORS["model.a.w"], "b": TENSORS["model.b"]},
        "step": TENSORS["step"],
    }
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    dcp.save(nested, checkpoint_id=theirs)
    smt.save(ours, TENSORS, LAYOUTS, paths=PATHS)
    for keys in ("model", {"model.b"}, {"step", "model.a.w"}):
        assert equal(
            *(_load_state_dict_from_keys(keys, checkpoint_id=path) for path in (ours, theirs))
        )
    assert equal(converted(ours), nested)
    into = {"model": {"a.w": torch.zeros(2, 3), "b": torch.zeros(2)}, "step": torch.zeros(())}
    dcp.load(into, checkpoint_id=ours)
    assert equal(into, nested)


def test_states_of_modules_nest(tmp_path: Path) -> None:
    """`model` is a state dict of the module, `optim` one of the optimizer's by parameter."""
    module = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(4, 3)).sum().backward()
    optimizer.step()
    smt.save_state(tmp_path, module, optimizer)
    found = _load_state_dict_from_keys("model", checkpoint_id=tmp_path)["model"]
    nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).load_state_dict(found, strict=True)
    assert equal(found, dict(module.state_dict()))
    state = converted(tmp_path)["optim"]["state"]
    assert torch.equal(state["0.weight"]["exp_avg"], optimizer.state[module[0].weight]["exp_avg"])


def test_a_tensor_called_like_our_key_of_bytes(tmp_path: Path) -> None:
    """Bytes are found without the index, whatever tensors are called."""
    name = BLOBS[0]
    layouts = {name: sm.Layout((2,), sm.Mesh(), {}), "own": None}
    smt.save(tmp_path, {name: torch.ones(2), "own": b"ab"}, layouts)
    (tmp_path / "shardmath.json").unlink()
    assert bytes(smt.load(tmp_path, {"own": None})["own"].numpy()) == b"ab"
    assert set(converted(tmp_path)) == {name, "own"}


def test_the_paths_that_torch_makes_of_an_optimizer(tmp_path: Path) -> None:
    """With a number for each item of a list of tensors, as in `param_groups`."""
    module = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(module.parameters(), lr=torch.tensor(0.5))
    module(torch.ones(4, 3)).sum().backward()
    optimizer.step()
    state = {"optim": optimizer.state_dict(), "list": [torch.ones(2), [torch.zeros(1)]]}
    flat, paths = flatten_state_dict(state)
    tensors = {name: each for name, each in flat.items() if isinstance(each, torch.Tensor)}
    layouts = {name: sm.Layout(tuple(t.shape), sm.Mesh(), {}) for name, t in tensors.items()}
    own = {name: paths[name] for name in tensors}
    assert ("optim", "param_groups", 0, "lr") in own.values()
    smt.save(tmp_path, tensors, layouts, paths=own)
    found = converted(tmp_path)
    assert found["optim"]["param_groups"] == [{"lr": torch.tensor(0.5)}]
    assert equal(found["optim"]["state"]["0"], optimizer.state_dict()["state"][0])
    assert found["list"][1][0].equal(torch.zeros(1))


@pytest.mark.parametrize(
    ("paths", "what"),
    [
        ({"model.b": ("model",)}, "joined with dots"),
        ({"other": ("other",)}, "but layouts= has not"),
        ({"model.b": "model.b"}, "not a tuple of str and integers"),
        ({"model.b": ()}, "not a tuple of str and integers"),
        ({"0.b": (0, "b")}, "a str first"),
        ({"model.-1": ("model", -1)}, "not a tuple of str and integers"),
        ({"model.True": ("model", True)}, "not a tuple of str and integers"),
        ({"model.b": ("model", "b"), "model.0": ("model", 0)}, "have a list and a dict at"),
    ],
)
def test_paths_that_cannot_be(tmp_path: Path, paths: Any, what: str) -> None:
    """Said before anything is written."""
    names = {*TENSORS, *paths} - {"other"}
    layouts = {name: sm.Layout((2,), sm.Mesh(), {}) for name in names}
    with pytest.raises(CheckpointError, match=what):
        smt.save(tmp_path / "none", {}, layouts, paths=paths)
    assert not (tmp_path / "none").exists()


def test_a_path_through_a_tensor(tmp_path: Path) -> None:
    """No state dict has both."""
    layouts = {name: sm.Layout((1,), sm.Mesh(), {}) for name in ("a", "a.b")}
    paths = {"a": ("a",), "a.b": ("a", "b")}
    with pytest.raises(CheckpointError, match="leads through"):
        smt.save(tmp_path, {name: torch.ones(1) for name in layouts}, layouts, paths=paths)


ONES = {
    "a column of one row": lambda: torch.arange(1000.0).view(10, 100)[:1, 5],
    "every other of one": lambda: torch.arange(4.0)[::2][:1],
    "one expanded": lambda: torch.tensor(3.0).expand(1),
    "one of a transposed weight": lambda: torch.arange(12.0).view(3, 4).t()[3:4, 2:3],
    "a row of a transposed weight": lambda: torch.arange(12.0).view(3, 4).t()[:1],
}


@pytest.mark.parametrize("case", ONES)
def test_one_element_with_a_stride(tmp_path: Path, case: str) -> None:
    """torch calls these contiguous whatever their strides; they are saved, loaded and read by torch."""
    tensor = ONES[case]()
    layouts = {"w": sm.Layout(tuple(tensor.shape), sm.Mesh(), "...")}
    smt.save(tmp_path, {"w": tensor}, layouts)
    assert torch.equal(smt.load(tmp_path, layouts)["w"], tensor)
    assert torch.equal(converted(tmp_path)["w"], tensor)
    module = nn.Module()
    module.w = nn.Parameter(torch.zeros(8 * tensor.numel())[::8].view(tensor.shape))
    smt.load_weights(tmp_path, module)
    assert torch.equal(module.w, tensor)
    smt.save_state(tmp_path / "state", module)
