"""Pictures of meshes: ranks at their coordinates."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest
from hypothesis import given

from shardmath import Mesh, PlanError, Topology, testing
from shardmath.display.pictures.mesh_drawing import mesh_svg

SVG = "{http://www.w3.org/2000/svg}"


def boxes(text: str) -> dict[int, tuple[float, float, str, str]]:
    """x, y, fill and what the title says of each rank; x and y within its panel."""
    out = {}
    for found in ElementTree.fromstring(text).iter(f"{SVG}rect"):
        title = found.find(f"{SVG}title")
        assert title is not None
        said = re.fullmatch(r"rank (\d+): (.*)", title.text or "")
        assert said is not None
        x, y = float(found.attrib["x"]), float(found.attrib["y"])
        out[int(said[1])] = x, y, found.attrib["fill"], said[2]
    return out


@given(testing.meshes())
def test_ranks_are_at_their_coordinates(mesh: Mesh) -> None:
    found = boxes(mesh_svg(mesh))
    assert set(found) == set(mesh.ranks)
    xs, ys = sorted({x for x, *_ in found.values()}), sorted({y for _, y, *_ in found.values()})
    names = [name for name, _ in mesh.axes]
    for rank, (x, y, _, said) in found.items():
        coords = mesh.coords(rank)
        assert said == " ".join(f"{name}={i}" for name, i in coords.items())
        assert xs.index(x) == (coords[names[-1]] if names else 0)
        assert ys.index(y) == (coords[names[-2]] if len(names) > 1 else 0)


@given(testing.meshes())
def test_ranks_of_one_node_have_one_color(mesh: Mesh) -> None:
    where = Topology(ranks_per_node=2)
    found = boxes(mesh.svg(topology=where))
    fills = {where.node(rank): fill for rank, (_, _, fill, _) in found.items()}
    assert all(fills[where.node(rank)] == fill for rank, (_, _, fill, _) in found.items())
    assert len(set(fills.values())) == len(fills)


@pytest.mark.parametrize("axes", [{"dp": 16384}, {"pp": 64, "dp": 64, "tp": 8}, {"a" * 99: 300}])
def test_large_meshes_are_small_pictures(axes: dict[str, int]) -> None:
    text = mesh_svg(Mesh(axes), topology=Topology())
    assert len(text) < 200_000 and "…" in text


def test_only_a_topology_has_nodes() -> None:
    with pytest.raises(PlanError, match="topology=8 is no"):
        Mesh(tp=2).svg(topology=8)
