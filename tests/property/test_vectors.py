"""Every case and rank of tests/vectors: layouts that PyTorch 2.13's DTensor code computed.

`ls` local shapes, `ix` ordered runs and `crc` of the placement reading, `ixo` runs and `dec` of the order reading,
`cover` whether every element is held once a replica. The meta entry of each file says the same at length.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from pathlib import Path

import numpy as np
import pytest

from shardmath import Layout, Mesh, PlacementError, Replicate, Shard, StridedShard

VECTORS = Path(__file__).parent.parent / "vectors"
CASES = [
    case
    for name in ("torch_layouts", "torch_suite_layouts")
    for case in json.loads((VECTORS / f"{name}.json").read_text())["cases"]
]


def name_of(case: dict) -> str:
    return "-".join(
        ("x".join(map(str, case["shape"])), "x".join(map(str, case["mesh"])), *case["pl"])
    )


def spec(text: str) -> Replicate | Shard | StridedShard:
    if text == "R":
        return Replicate()
    strided = re.fullmatch(r"SS(\d+):(\d+)", text)
    return StridedShard(int(strided[1]), int(strided[2])) if strided else Shard(int(text[1:]))


def layout_of(case: dict, reading: str = "placement") -> Layout:
    mesh = Mesh({f"a{i}": n for i, n in enumerate(case["mesh"])})
    return Layout(case["shape"], mesh, tuple(map(spec, case["pl"])), reading=reading)


def ordered_runs(layout: Layout, rank: int) -> list[list[int]]:
    return [[x for _, start, n in runs.segments for x in (start, n)] for runs in layout.runs(rank)]


def crc(layout: Layout, rank: int) -> int:
    flat = np.zeros((1,) * layout.ndim, np.int64)
    for n, index in zip(layout.shape, np.ix_(*layout.indices(rank)), strict=True):
        flat = flat * n + index
    return zlib.crc32(np.ascontiguousarray(flat, "<i8").data) if flat.size else 0


def covers(layout: Layout) -> bool:
    times = np.zeros(layout.shape, np.int32)
    for rank in layout.mesh.ranks:
        times[np.ix_(*layout.indices(rank))] += 1
    return bool(
        (times == math.prod(layout.mesh.axis_size(name) for name in layout.free_axes)).all()
    )


def test_all_vectors_are_here() -> None:
    assert len(CASES) == 407
    assert sum(math.prod(case["mesh"]) for case in CASES) == 5206
    assert sum("ixo" in case for case in CASES) == 7


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_placement_reading(case: dict) -> None:
    layout = layout_of(case)
    ranks = layout.mesh.ranks
    assert [list(layout.local_shape(r)) for r in ranks] == case["ls"]
    assert [ordered_runs(layout, r) for r in ranks] == case["ix"]
    assert [crc(layout, r) for r in ranks] == case["crc"]
    assert not any(layout.holes(r) for r in ranks)
    assert covers(layout) == case["cover"]


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_text_round_trip(case: dict) -> None:
    layout = layout_of(case)
    assert Layout(layout.shape, layout.mesh, layout.text) is layout


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_order_reading(case: dict) -> None:
    if not case["dec"]:
        with pytest.raises(
            PlacementError, match=r"no order of splits gives.*use reading='placement'"
        ):
            layout_of(case, "order")
        return
    layout = layout_of(case, "order")
    assert [ordered_runs(layout, r) for r in layout.mesh.ranks] == case.get("ixo", case["ix"])
    assert covers(layout) == case.get("covero", case["cover"])
    assert Layout(layout.shape, layout.mesh, layout.text) is layout
