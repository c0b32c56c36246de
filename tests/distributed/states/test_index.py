"""The JSON of a checkpoint: what was written comes back, and what a stranger wrote is an error."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

from shardmath_torch.checkpoints.checkpoint import save
from shardmath_torch.checkpoints.files.places import CheckpointError
from shardmath_torch.checkpoints.states import training
from shardmath_torch.tensors.dtensors.modules import layout_of


def test_another_checkpoint(tmp_path: Path) -> None:
    """One that is not of `save_state`, and one that only looks like it."""
    module, none = nn.Linear(3, 2), {"training": None}
    save(tmp_path, {"model.weight": module.weight}, {"model.weight": layout_of(module)["weight"]})
    with pytest.raises(
        CheckpointError,
        match="was not written by save_state: it has no 'training'; fill the module's weights with load_weights",
    ):
        training.load_state(tmp_path, module)
    for data in (b"{", b"[1]", b'{"names": {}}'):
        save(tmp_path, {"training": data}, none)
        with pytest.raises(CheckpointError, match="'training' was not written by save_state"):
            training.load_state(tmp_path, module)


def group(options: str) -> str:
    return f'[{{"parameters": ["weight"], "options": {options}}}]'


ODD = {
    "names": ('{"weight": 1}', "{}", "null", "{}"),
    "kind": ("{}", '{"weight": "pickle"}', "null", "{}"),
    "groups": ("{}", "{}", "[1]", "{}"),
    "options": ("{}", "{}", group("[]"), "{}"),
    "option": ("{}", "{}", group('{"lr": {"set": []}}'), "{}"),
    "dtype": ("{}", "{}", group('{"lr": {"tensor": ["Tensor", 1]}}'), "{}"),
    "elements": ("{}", "{}", group('{"lr": {"tensor": ["int8", [1, [2]]]}}'), "{}"),
    "large": ("{}", "{}", group('{"lr": {"tensor": ["int8", 300]}}'), "{}"),
    "shape": ("{}", "{}", group('{"lr": {"tensor": ["int8", [], [-2]]}}'), "{}"),
    "entry": ("{}", "{}", "null", '{"weight": {"step": {"near": 1}}}'),
    "type": ("{}", "{}", "null", '{"weight": {"step": {"like": "load"}}}'),
    "size": ("{}", "{}", "null", '{"weight": {"step": {"own": ["int8", [-1]]}}}'),
}


@pytest.mark.parametrize("case", ODD)
def test_parts_that_are_not_ours(tmp_path: Path, case: str) -> None:
    """Named as such, and not by whatever fails over them."""
    names, extra, groups, state = ODD[case]
    said = f'{{"names": {names}, "extra": {extra}, "groups": {groups}, "state": {state}}}'
    save(tmp_path, {"training": said.encode()}, {"training": None})
    with pytest.raises(CheckpointError, match="'training' was not written by save_state"):
        training.load_state(tmp_path, nn.Linear(3, 2), strict=False)
