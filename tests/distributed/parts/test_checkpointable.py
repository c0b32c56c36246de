"""torch's checkpointable tensors: the layout that ranks' attributes say, whoever asks; and layouts as attributes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

import shardmath as sm
import shardmath_torch as smt
from shardmath_torch.tensors.parts.checkpointable import keep_boxes
from tests.distributed.pool import Pool
from tests.distributed.tasks import parts as work

LINE = sm.Layout((9, 4), sm.Mesh(), "(n)=<3:9 -2 0:3> h")
"""On one rank, in two boxes around padding."""


def test_no_rows_are_lost(pool: Pool, tmp_path: Path) -> None:
    """Each rank has one or two of nine rows, and some have none; padded under other parallelism."""
    assert all(all(found) for found in pool.run(work.kept, str(tmp_path)))
    assert smt.open_checkpoint(tmp_path / "state").shapes["model.w"] == ((9, 4), "float32")
    for folder, names in (("module", {"w", "b", "bias"}), ("tensors", {"w", "bias"})):
        (file,) = (tmp_path / folder).glob("*.safetensors")
        stored = load_file(file)
        assert set(stored) == names and stored["w"].equal(work.WHOLE)


def test_ranks_that_say_other_shapes(pool: Pool) -> None:
    """An error on all ranks, that names two of them."""
    for said in pool.run(work.disagreeing, (10, 4)):
        assert "tensor 'w': global_shape is (9, 4) on rank" in said and "(10, 4) on rank 3" in said


def test_attributes_that_are_wrong_on_one_rank(pool: Pool) -> None:
    """The others waited for that rank until the group's timeout."""
    for said in pool.run(work.disagreeing, (1, 4)):
        assert (
            said.startswith("rank 3: tensor 'w': ") and "in dimension 0, whose length is 1" in said
        )


def layout_of(tensor: torch.Tensor) -> sm.Layout:
    """As a parameter of a module, in a process alone."""
    module: Any = torch.nn.Module()
    module.w = torch.nn.Parameter(tensor)
    keep_boxes(tensor, module.w)
    return smt.layout_of(module)["w"]


def test_there_and_back() -> None:
    """In two boxes; with a torch that does not know such tensors, making one is an error that names the version."""
    local = work.own_part(LINE, 0)
    assert sm.equivalent(layout_of(work.say(local.clone(), LINE, 0)), LINE)
    if not hasattr(dcp, "CheckpointableTensor"):
        with pytest.raises(sm.LayoutError, match=r"install torch 2\.14 or later"):
            smt.checkpointable(local, LINE)
        return
    assert smt.checkpointable(local, LINE) is local
    assert sm.equivalent(layout_of(local), LINE)


@pytest.mark.skipif(not hasattr(dcp, "CheckpointableTensor"), reason="torch before 2.14")
def test_torch_saves_and_loads_it(tmp_path: Path) -> None:
    """Every row, in a checkpoint that any layout loads."""
    local = smt.checkpointable(work.own_part(LINE, 0), LINE)
    dcp.save({"w": local}, checkpoint_id=tmp_path, no_dist=True)
    whole = sm.Layout((9, 4), sm.Mesh(), "n h")
    assert smt.load(tmp_path, {"w": whole})["w"].equal(work.WHOLE)
    into = smt.checkpointable(torch.zeros(11, 4), LINE)
    dcp.load({"w": into}, checkpoint_id=tmp_path, no_dist=True)
    assert into.equal(work.own_part(LINE, 0))


BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "lists of several lengths": ({"local_sizes": ()}, "zip"),
    "too few dimensions": ({"global_shape": (9,)}, "dimensions"),
    "outside the tensor": ({"global_offsets": ((6, 0),)}, "in dimension 0, whose length is 9"),
    "outside the memory": ({"local_offsets": ((1, 0),)}, "does not fit a local length of 4"),
    "no numbers": ({"global_offsets": (("0", 0),)}, "integer"),
    "not a product": (
        {
            "global_offsets": ((0, 0), (1, 1)),
            "local_offsets": ((0, 0), (1, 1)),
            "local_sizes": ((1, 1), (1, 1)),
        },
        "all combinations of some ranges",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_attributes_that_are_no_boxes(case: str) -> None:
    """Named, with what they say."""
    changed, what = BROKEN[case]
    module: Any = torch.nn.Module()
    module.w = torch.nn.Parameter(torch.zeros(4, 4))
    said = {"global_shape": (9, 4), "global_offsets": ((0, 0),), "local_offsets": ((0, 0),)}
    for name, value in {**said, "local_sizes": ((4, 4),), **changed}.items():
        setattr(module.w, name, value)
    with pytest.raises(sm.LayoutError, match=rf"tensor 'w'.*global_shape.*(?:{what})"):
        smt.layout_of(module)
