"""What is saved of a module: names of wrappers, hooks, tensors without a shape, memory that cannot be filled."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from shardmath.base.errors import LayoutError
from shardmath_torch.checkpoints.checkpoint import save
from shardmath_torch.checkpoints.exports.export import export
from shardmath_torch.checkpoints.files.places import CheckpointError
from shardmath_torch.checkpoints.states import training
from shardmath_torch.checkpoints.weights.filling import load_weights
from shardmath_torch.tensors.dtensors.modules import layout_of
from tests.distributed.tasks.states import Odd, freed, small


def test_names_of_wrappers(tmp_path: Path) -> None:
    """Those of torch.compile and activation checkpointing are left out."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    module, other = small(), small(seed=1)
    other[0] = checkpoint_wrapper(other[0])
    training.save_state(tmp_path, module)
    training.load_state(tmp_path, torch.compile(other))
    assert other[0].weight.equal(module[0].weight)


class Looks(nn.Module):
    """Has names that look like those of wrappers."""

    def __init__(self) -> None:
        super().__init__()
        self.a_orig_mod, self.aweight = nn.Linear(2, 2), nn.Parameter(torch.randn(2, 2))


def test_names_that_only_look_like_wrappers(tmp_path: Path) -> None:
    module = Looks()
    assert set(training.state_of(module)[0]) == {
        "model.a_orig_mod.weight",
        "model.a_orig_mod.bias",
        "model.aweight",
        "training",
    }
    wanted = {name: p.detach().clone() for name, p in module.named_parameters()}
    training.save_state(tmp_path, module)
    with torch.no_grad():
        for p in module.parameters():
            p.zero_()
    training.load_state(tmp_path, module)
    assert all(p.equal(wanted[name]) for name, p in module.named_parameters())


def hooked() -> nn.Module:
    """Its state dict has more than it should."""
    module = small()
    module.register_state_dict_post_hook(lambda module, state, *_: state.update(more=torch.ones(1)))
    return module


ERRORS: dict[str, tuple[Callable[[], object], str]] = {
    "hook": (
        lambda: training.state_of(hooked()),
        "has 'more', not a parameter, a buffer or an extra state",
    ),
    "meta": (lambda: training.state_of(small().to("meta")), "'0.weight' is on the meta device"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name: str) -> None:
    act, said = ERRORS[name]
    with pytest.raises(CheckpointError) as error:
        act()
    assert said in str(error.value)


def test_nested_tensors(tmp_path: Path) -> None:
    """They have no shape."""
    module = nn.Module()
    module.register_buffer("w", torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]))
    for act in (training.save_state, export):
        with pytest.raises(CheckpointError, match="'w' is a nested tensor, of 2 parts"):
            act(tmp_path, module)
    with pytest.raises(CheckpointError, match="'w' is a nested tensor, of 2 parts"):
        export(tmp_path, {"w": module.w})
    with pytest.raises(
        CheckpointError, match="'w' is a nested tensor, where a move takes a tensor of one shape"
    ):
        save(tmp_path, {"w": module.w}, {"w": layout_of(nn.Linear(1, 1))["weight"]})


MEMORY = {
    "expanded": (lambda: torch.zeros(1).expand(4), r"'odd' has shape \(4,\) and strides \(0,\)"),
    "freed": (freed, "'odd' reaches 16 bytes into a storage of 0"),
}


@pytest.mark.parametrize("case", MEMORY)
@pytest.mark.parametrize("step", ["state", "weights"])
def test_memory_that_cannot_be_written_to(tmp_path: Path, case: str, step: str) -> None:
    """Said before anything is restored."""
    make, what = MEMORY[case]
    training.save_state(tmp_path / "state", Odd(torch.ones(4), 5.0))
    export(tmp_path / "weights", Odd(torch.ones(4), 5.0))
    module = Odd(make())
    load = training.load_state if step == "state" else load_weights
    with pytest.raises(CheckpointError, match=what):
        load(tmp_path / step, module)
    assert module.first.tolist() == [1.0] * 4


@pytest.mark.parametrize("made_in", [False, True])
@pytest.mark.parametrize("loaded_in", [False, True])
@pytest.mark.parametrize("step", ["state", "weights"])
def test_memory_of_inference_mode(
    tmp_path: Path, made_in: bool, loaded_in: bool, step: str
) -> None:
    """An engine's weights are made there; each is written in the mode in which it was made."""
    training.save_state(tmp_path / "state", Odd(torch.ones(4), 5.0))
    export(tmp_path / "weights", Odd(torch.ones(4), 5.0))
    with torch.inference_mode(made_in):
        module = Odd(torch.zeros(4))
    load = training.load_state if step == "state" else load_weights
    with torch.inference_mode(loaded_in):
        load(tmp_path / step, module)
    assert module.first.tolist() == [5.0] * 4 and module.odd.tolist() == [1.0] * 4


class Lazy(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        if kind == "buffer":
            self.register_buffer("odd", nn.parameter.UninitializedBuffer())
        else:
            self.odd = nn.parameter.UninitializedParameter()


@pytest.mark.parametrize("kind", ["parameter", "buffer"])
def test_lazy_modules_that_have_not_run(tmp_path: Path, kind: str) -> None:
    """The tensor without a shape is named, and what to do."""
    module, said = Lazy(kind), "'odd' has no shape yet; run its lazy module once"
    with pytest.raises(CheckpointError, match=said):
        training.state_of(module)
    for act in (training.save_state, training.load_state, load_weights, export):
        training.save_state(tmp_path, nn.Linear(1, 1))
        with pytest.raises(CheckpointError, match=said):
            act(tmp_path, module)
    with pytest.raises(CheckpointError, match=said):
        export(tmp_path, {"odd": module.odd})
    if kind == "parameter":
        with pytest.raises(LayoutError, match=said):
            layout_of(module)
