"""Meshes against numpy arrays of ranks."""

from __future__ import annotations

import itertools
import pickle

import numpy as np
import pytest
from hypothesis import given

from shardmath import Mesh, MeshError, testing
from shardmath.layouts.algebra.mesh import strides


def test_literals() -> None:
    mesh = Mesh(dp=4, tp=2)
    assert (mesh.size, mesh.shape, mesh.ranks) == (8, {"dp": 4, "tp": 2}, tuple(range(8)))
    assert mesh.axes == (("dp", 4), ("tp", 2))
    assert mesh.coords(5) == {"dp": 2, "tp": 1}
    assert mesh.array().tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert Mesh(tp=2, ranks=[9, 3]).coords(3) == {"tp": 1}
    assert Mesh().ranks == (0,) and Mesh(ranks=[7]).coords(7) == {} and Mesh().array().shape == ()


def test_strides() -> None:
    assert strides((4, 3, 2)) == (6, 2, 1)
    assert strides(()) == ()
    assert strides(iter((5,))) == (1,)


@given(testing.meshes())
def test_coordinates_are_numpys(mesh: Mesh) -> None:
    for index in itertools.product(*(range(n) for n in mesh.shape.values())):
        rank = int(mesh.array()[index])
        assert tuple(mesh.coords(rank).values()) == index
        assert mesh.ranks[mesh.position(rank)] == rank
        assert rank in mesh
    assert -1 not in mesh and "0" not in mesh


@given(testing.meshes())
def test_coordinate_on_flattened_axes(mesh: Mesh) -> None:
    for k in range(len(mesh.axes) + 1):
        for names in itertools.permutations(mesh.shape, k):
            sizes = [mesh.axis_size(name) for name in names]
            expected = [
                int(np.ravel_multi_index([mesh.coords(r)[name] for name in names], sizes))
                if names
                else 0
                for r in mesh.ranks
            ]
            assert mesh.coordinate(names).tolist() == expected


@given(testing.meshes())
def test_values(mesh: Mesh) -> None:
    assert eval(repr(mesh), {"Mesh": Mesh}) == mesh
    again = pickle.loads(pickle.dumps(mesh))
    assert again == mesh and hash(again) == hash(mesh)
    assert Mesh(mesh.shape, ranks=mesh.ranks) == mesh


def test_order_of_axes_and_ranks_is_part_of_the_value() -> None:
    assert Mesh(a=2, b=1) != Mesh(b=1, a=2)
    assert Mesh(a=2) != Mesh(a=2, ranks=(1, 0))
    assert len({Mesh(a=2), Mesh(a=2, ranks=range(2)), Mesh({"a": 2})}) == 1


@pytest.mark.parametrize(
    "text",
    [
        "Mesh()",
        "Mesh(dp=4, tp=2)",
        "Mesh(tp=4, ranks=range(8, 12))",
        "Mesh(tp=2, ranks=[9, 3])",
        "Mesh(tp=3, ranks=[0, 1, 3])",
        "Mesh({'ranks': 2})",
        "Mesh({'ranks': 2}, ranks=range(3, 5))",
    ],
)
def test_repr(text: str) -> None:
    assert repr(eval(text)) == text


def test_numpy_sizes_and_ranks_turn_into_int() -> None:
    mesh = Mesh(a=np.int64(2), ranks=np.array([4, 5]))
    assert repr(mesh) == "Mesh(a=2, ranks=range(4, 6))"
    assert all(type(r) is int for r in mesh.ranks) and type(mesh.axes[0][1]) is int


def test_split_and_merge() -> None:
    mesh = Mesh(dp=2, tp=6, pp=2, ranks=range(100, 124))
    split = mesh.split("tp", kv=2, rep=3)
    assert split.axes == (("dp", 2), ("kv", 2), ("rep", 3), ("pp", 2))
    assert split.ranks == mesh.ranks
    assert split.merge(("kv", "rep"), "tp") == mesh
    assert mesh.split("tp", tp=6) == mesh


@given(testing.meshes())
def test_merging_flattens_the_axes(mesh: Mesh) -> None:
    for k in range(1, len(mesh.axes) + 1):
        for names in itertools.permutations(mesh.shape, k):
            merged = mesh.merge(names, "m")
            assert sorted(merged.ranks) == sorted(mesh.ranks)
            assert list(merged.shape) == [
                "m" if name == names[0] else name for name in mesh.shape if name not in names[1:]
            ]
            here = dict(zip(mesh.ranks, mesh.coordinate(names).tolist(), strict=True))
            for rank in mesh.ranks:
                rest = {name: at for name, at in mesh.coords(rank).items() if name not in names}
                assert merged.coords(rank) == {"m": here[rank], **rest}


@given(testing.meshes())
def test_transposing_keeps_coordinates(mesh: Mesh) -> None:
    for names in itertools.permutations(mesh.shape):
        turned = mesh.transpose(names)
        assert tuple(turned.shape) == names
        assert all(turned.coords(r) == mesh.coords(r) for r in mesh.ranks)


@given(testing.meshes())
def test_selecting(mesh: Mesh) -> None:
    assert mesh.select() == mesh
    for name, n in mesh.axes:
        for at in range(n):
            sub = mesh.select(**{name: at})
            assert sub.ranks == tuple(r for r in mesh.ranks if mesh.coords(r)[name] == at)
            assert sub.axes == tuple(axis for axis in mesh.axes if axis[0] != name)


def test_relabel() -> None:
    assert Mesh(a=3).relabel({0: 7, 2: 0}) == Mesh(a=3, ranks=(7, 1, 0))


LONG = Mesh(a=17)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Mesh(tp=0),
            ("mesh axis 'tp' has size 0, but must have 1 or more; give a larger one"),
        ),
        (lambda: Mesh(tp=2.0), "the size of axis 'tp' is 2.0; give an integer"),
        (
            lambda: Mesh({"a-b": 2}),
            (
                "axis name 'a-b' is not an identifier; use letters, digits and underscores, "
                "and begin with a letter"
            ),
        ),
        (
            lambda: Mesh({3: 2}),
            (
                "axis name 3 is not an identifier; use letters, digits "
                "and underscores, and begin with a letter"
            ),
        ),
        (
            lambda: Mesh(a=2, b=2, ranks=[0, 1]),
            (
                "ranks= has 2 ranks, but the mesh a=2 b=2 has 4; give one rank for each "
                "coordinate, 4 in all"
            ),
        ),
        (
            lambda: Mesh(ranks=[]),
            (
                "ranks= has 0 ranks, but the mesh without axes has 1; give one rank for each "
                "coordinate, 1 in all"
            ),
        ),
        (
            lambda: Mesh(a=3, ranks=[4, 5, 4]),
            "rank 4 appears twice in the mesh a=3; give 3 different ranks",
        ),
        (
            lambda: Mesh(a=2, ranks=[0, -1]),
            "rank -1 of the mesh a=2 is negative; number ranks from 0",
        ),
        (lambda: Mesh(a=2).position(2), ("rank 2 is not in Mesh(a=2); use one of its ranks, 0, 1")),
        (lambda: Mesh(a=2).coords(9), "rank 9 is not in Mesh(a=2); use one of its ranks, 0, 1"),
        (
            lambda: Mesh(a=16).position(16),
            "rank 16 is not in Mesh(a=16); use one of its ranks, " + ", ".join(map(str, range(16))),
        ),
        (
            lambda: LONG.position(17),
            (
                "rank 17 is not in Mesh(a=17); use one of its ranks, 0, 1, 2, 3, 4, 5, 6, 7, "
                "... (17 in all)"
            ),
        ),
        (
            lambda: Mesh(a=2).axis_size("b"),
            ("axis 'b' is not in Mesh(a=2); use one of its axes, a"),
        ),
        (lambda: Mesh().axis_size("b"), "axis 'b' is not in Mesh(); it has no axes"),
        (
            lambda: Mesh(a=4).split("a", b=2, c=3),
            (
                "mesh axis 'a' has size 4, but the product of its parts b=2 c=3 is 6; give "
                "parts whose product is 4"
            ),
        ),
        (
            lambda: Mesh(a=4, b=2).split("a", b=2, c=2),
            (
                "two axes of mesh b, c, b would have one name; choose a name that the mesh "
                "does not have"
            ),
        ),
        (
            lambda: Mesh(a=4).merge((), "b"),
            "cannot merge axes () of Mesh(a=4); give one or more, each once",
        ),
        (
            lambda: Mesh(a=4).merge(("a", "a"), "b"),
            "cannot merge axes ('a', 'a') of Mesh(a=4); give one or more, each once",
        ),
        (
            lambda: Mesh(a=4, b=2, c=2).merge(("a", "b"), "c"),
            (
                "two axes of mesh c, c would have one name; choose a name that the mesh does "
                "not have"
            ),
        ),
        (
            lambda: Mesh(a=4, b=2).transpose(("a",)),
            "cannot transpose Mesh(a=4, b=2) to ('a',); give each of its axes once",
        ),
        (lambda: Mesh(a=4).select(a=4), "coordinate 4 is not on axis 'a' of size 4; use 0..3"),
        (lambda: Mesh(a=4).select(a=-1), "coordinate -1 is not on axis 'a' of size 4; use 0..3"),
        (lambda: Mesh(a=4).select(b=0), "axis 'b' is not in Mesh(a=4); use one of its axes, a"),
        (
            lambda: Mesh(a=2).relabel({0: 1}),
            "rank 1 appears twice in the mesh a=2; give 2 different ranks",
        ),
    ],
)
def test_errors(make, message: str, fails) -> None:
    fails(make, MeshError, message)


@given(testing.meshes())
def test_groups_are_the_ranks_along_axes(mesh: Mesh) -> None:
    for k in range(len(mesh.axes) + 1):
        for names in itertools.permutations(mesh.shape, k):
            others = [name for name in mesh.shape if name not in names]
            ranges = [range(mesh.axis_size(name)) for name in others]
            along = [range(mesh.axis_size(name)) for name in names]
            expected = []
            for there in itertools.product(*ranges):
                group = []
                for here in itertools.product(*along):
                    coords = dict(zip((*others, *names), (*there, *here), strict=True))
                    group.append(int(mesh.array()[tuple(coords[name] for name in mesh.shape)]))
                expected.append(tuple(group))
            assert mesh.groups(names) == tuple(expected)


def test_ranks_along_axes_are_the_groups_of_the_others() -> None:
    mesh = Mesh(a=2, b=2, c=3, ranks=range(12, 0, -1))
    assert mesh.ranks_along(["b"]) == tuple(map(frozenset, mesh.groups(["a", "c"])))
    assert mesh.ranks_along(["c", "a"])[1] == {6, 3}
    small = Mesh(a=2, b=2, ranks=(7, 5, 3, 1))
    assert small.ranks_along("a") == (frozenset({5, 7}), frozenset({1, 3}))
    assert small.ranks_along("b") == (frozenset({3, 7}), frozenset({1, 5}))
    with pytest.raises(MeshError, match="axis 'pp' is not in"):
        mesh.ranks_along(["pp"])


def test_groups_of_any_ranks() -> None:
    mesh = Mesh(dp=2, tp=2, ranks=[9, 3, 5, 0])
    assert mesh.groups(["tp"]) == ((9, 3), (5, 0))
    assert mesh.groups(["dp"]) == ((9, 5), (3, 0))
    assert mesh.groups(["tp", "dp"]) == ((9, 5, 3, 0),)
    assert mesh.groups([]) == ((9,), (3,), (5,), (0,))
    assert Mesh(ranks=[4]).groups(()) == ((4,),)
    with pytest.raises(MeshError, match="axis 'pp' is not in"):
        mesh.groups(["pp"])
    with pytest.raises(MeshError, match="with an axis twice; give it once"):
        mesh.groups(["tp", "tp"])
