"""Tensors that Meta's spmd_types has typed: the layout that their types say, and types that say none."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from safetensors.torch import load_file

import shardmath_torch as smt
from tests.distributed.pool import Pool
from tests.distributed.tasks import annotated as work

pytestmark = pytest.mark.skipif(work.spmd is None, reason="needs spmd_types")


def test_no_part_is_lost(pool: Pool, tmp_path: Path) -> None:
    """Rows divided by two axes in either order, and columns, agree with the package's own all-gather."""
    assert all(all(found) for found in pool.run(work.kept, str(tmp_path)))
    shapes = smt.open_checkpoint(tmp_path / "state").shapes
    assert shapes["model.w"] == shapes["model.b"] == ((16, 8), "float32")
    (file,) = (tmp_path / "module").glob("*.safetensors")
    assert load_file(file)["w"].equal(work.WHOLE)


REFUSED = {
    "an addend": r"rank 0: tensor 'w': .*its type on \w*tp is P, an addend; reduce it first",
    "no dimension": r"its type on \w*tp is V, without a dimension; assert S\(dim\) instead",
    "no axis": r"its axes \w*tp do not count all 8 ranks; assert a type for every axis of the mesh",
    "uneven": r"\(16, 4\) on rank .*, \(20, 4\) on rank 3; divide it into equal parts",
}


@pytest.mark.parametrize("case", REFUSED)
def test_types_that_say_no_layout(pool: Pool, case: str) -> None:
    """Before, such a tensor counted as the same on all ranks."""
    for said in pool.run(work.refused, case):
        assert re.search(REFUSED[case], said), said
