"""Where tensors lie: which of them meet, and what a module may have of one buffer."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from shardmath_torch.checkpoints.exports.export import export
from shardmath_torch.checkpoints.files.places import CheckpointError
from shardmath_torch.checkpoints.states import training
from shardmath_torch.checkpoints.states.memory import find_crowded, spot_of
from shardmath_torch.checkpoints.weights.filling import load_weights
from tests.distributed.tasks.states import freed


class Slots(nn.Module):
    """Buffers and a parameter where the given tensors lie."""

    def __init__(self, weight: Tensor, *others: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        for i, other in enumerate(others):
            self.register_buffer(f"buffer{i}", other)


def apart(*shapes: tuple[int, ...]) -> nn.Module:
    """A module of the same names, whose tensors are counted on."""
    return Slots(*(torch.arange(1.0, 1 + math.prod(s)).reshape(s) * 10 for s in shapes))


def load(path: Path, step: str, source: nn.Module, target: nn.Module) -> None:
    if step == "state":
        training.save_state(path, source)
        training.load_state(path, target)
    else:
        export(path, source)
        load_weights(path, target)


STEPS = pytest.mark.parametrize("step", ["state", "weights"])


@STEPS
@pytest.mark.parametrize("second", [slice(2, 6), slice(3, 5), slice(0, 8, 2)])
def test_slots_that_meet(tmp_path: Path, step: str, second: slice) -> None:
    """One would be restored over a part of the other."""
    flat = torch.zeros(8)
    target = Slots(flat[:4], flat[second])
    said = "'weight' and 'buffer0' have a part of their memory in common|'buffer0' and 'weight' h"
    with pytest.raises(CheckpointError, match=said):
        load(tmp_path, step, apart((4,), tuple(flat[second].shape)), target)
    assert not flat.any()


@STEPS
def test_slots_of_one_buffer_that_are_apart(tmp_path: Path, step: str) -> None:
    """One after the other, interleaved, and as columns of a matrix."""
    flat, matrix = torch.zeros(8), torch.zeros(3, 4)
    target = Slots(flat[:4], flat[4::2], flat[5::2], matrix[:, :2], matrix[:, 2:])
    source = apart((4,), (2,), (2,), (3, 2), (3, 2))
    load(tmp_path, step, source, target)
    for name, value in source.state_dict().items():
        assert target.state_dict()[name].equal(value), name


@STEPS
def test_slots_that_are_one(tmp_path: Path, step: str) -> None:
    """Fine where they were one, an error where they were two of several values."""
    one, two = torch.zeros(4), torch.zeros(4)
    same = torch.tensor([1.0, float("nan"), 0.0, 2.0])
    load(tmp_path / "same", step, Slots(same, same.clone()), Slots(one, one))
    assert one[0] == 1.0
    said = "'weight' and 'buffer0' are one tensor here, but differ in the checkpoint"
    with pytest.raises(CheckpointError, match=said):
        load(tmp_path / "others", step, Slots(same, same + 1), Slots(two, two))
    assert not two.any()


def test_which_tensors_are_crowded() -> None:
    """By bytes, whatever types and devices."""
    flat = torch.zeros(8)
    ends, middle, ints = flat[::7], flat[1:7], flat[7:].view(torch.int32)
    meta, freed_one, empty = torch.zeros(8, device="meta"), freed(), flat[:0]
    assert not find_crowded([ends, ends, middle, meta, meta[1:], freed_one, empty])
    assert find_crowded([ends, middle, ints]) == {spot_of(ends), spot_of(ints)}


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 4), st.integers(1, 3)), max_size=6))
def test_crowded_by_counting(cells: list[tuple[int, int, int]]) -> None:
    """As sets of cells say."""
    flat = torch.zeros(32, dtype=torch.int8)
    views = [flat[start : start + count * step : step][:count] for start, count, step in cells]
    held = {}
    for view, (start, count, step) in zip(views, cells, strict=True):
        held[spot_of(view)] = frozenset(range(start, start + count * step, step))
    wanted = {one for one, other in itertools.permutations(held, 2) if held[one] & held[other]}
    assert find_crowded(views) == wanted
