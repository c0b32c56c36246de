"""Layout laws: what all Runs and all layouts keep.

A law is a function with a one-line docstring that asserts; one law, one cause of failure.
"""

from __future__ import annotations

import pickle

import numpy as np

from shardmath.algebra.mesh import Mesh
from shardmath.algebra.runs import Runs, compose, invert
from shardmath.algebra.stages import pieces_runs, stage_runs
from shardmath.layouts.edits import relabelled
from shardmath.layouts.holdings import equivalent
from shardmath.layouts.layout import Layout
from shardmath.layouts.placement import Shard, Table

__all__ = [
    "compose_is_after",
    "fast_is_definition",
    "invert_undoes",
    "mesh_transposition_changes_nothing",
    "one_piece_needs_no_border",
    "parse_print",
    "relabelling_moves_holdings",
    "runs_are_canonical",
    "shape_counts_runs",
    "splitting_an_axis_changes_nothing",
    "transpose_mesh",
]

# Runs


def compose_is_after(f: Runs, g: Runs) -> None:
    """compose(f, g) at i is g at f(i), a hole where either has one."""
    after = g.indices().tolist()
    expected = []
    for i in f.indices().tolist():
        inside = 0 <= i < len(g)
        expected.append(after[i] if inside else -1)
    longer = Runs(g.segments, max(len(g), f.extent))
    assert compose(f, longer).indices().tolist() == expected


def invert_undoes(r: Runs) -> None:
    """Inverting twice is the identity, and a Runs after its inverse leaves what it holds."""
    back = invert(r, r.extent + 1)
    assert invert(back, len(r)) == r
    positions = np.arange(len(r))
    positions[r.indices() < 0] = -1
    assert compose(r, back).indices().tolist() == positions.tolist()


def runs_are_canonical(r: Runs) -> None:
    """Cutting segments apart, or giving them in another order, makes the same value."""
    cells = [(i, g, 1) for i, g in enumerate(r.indices().tolist()) if g >= 0]
    assert Runs(reversed(cells), len(r)) == r
    assert hash(Runs(cells, len(r))) == hash(r)


# Layouts


def fast_is_definition(layout: Layout) -> None:
    """The closed form of every stage equals cutting pieces one by one."""
    fields = [f for dim in layout.dims for f in dim.fields]
    for rank in layout.mesh.ranks:
        coords = layout.mesh.coords(rank)
        for f in fields:
            length = f.size
            for stage in f.stages:
                held = stage_runs(stage, length, coords)
                assert held == pieces_runs(stage, length, coords)
                length = len(held)


def parse_print(layout: Layout) -> None:
    """Reading the printed text gives the same layout, and so do pickle and repr."""
    text = layout.text
    again = Layout(layout.shape, layout.mesh, text, dtype=layout.dtype, rules=layout.rules)
    assert again is layout
    assert pickle.loads(pickle.dumps(layout)) is layout
    names = {kind.__name__: kind for kind in (Layout, Mesh, Runs, Table)}
    assert eval(repr(layout), names) is layout


def shape_counts_runs(layout: Layout) -> None:
    """local_shape, runs and indices say the same."""
    for rank in layout.mesh.ranks:
        held = layout.runs(rank)
        index = layout.indices(rank)
        assert layout.local_shape(rank) == tuple(map(len, held)) == tuple(map(len, index))
        assert [r.indices().tolist() for r in held] == [i.tolist() for i in index]


def relabelling_moves_holdings(layout: Layout) -> None:
    """Renaming ranks gives the new name what the old one held."""
    names = {rank: 1000 - 3 * rank for rank in layout.mesh.ranks}
    renamed = relabelled(layout, names)
    for rank in layout.mesh.ranks:
        assert renamed.runs(names[rank]) == layout.runs(rank)


def mesh_transposition_changes_nothing(layout: Layout) -> None:
    """Transposing the mesh changes no holding."""
    again = transpose_mesh(layout)
    for rank in layout.mesh.ranks:
        assert again.runs(rank) == layout.runs(rank)


def transpose_mesh(layout: Layout) -> Layout:
    """The layout with the axes of its mesh in the opposite order."""
    turned = layout.mesh.transpose(tuple(layout.mesh.shape)[::-1])
    return Layout(layout.shape, turned, layout.text, dtype=layout.dtype, rules=layout.rules)


def splitting_an_axis_changes_nothing(n: int, outer: int, inner: int) -> None:
    """Splitting a mesh axis, or merging two that are used as one digit, changes no holding."""
    one = Mesh(t=outer * inner)
    two = one.split("t", x=outer, y=inner)
    merged = two.merge(("x", "y"), "t")
    for text in ("(t n)", "(2 t n)", "(n t 2)", "(t~ n)"):
        split = Layout((n,), two, text.replace("t", "x*y"))
        assert equivalent(Layout((n,), one, text), split)
        assert equivalent(split, Layout((n,), merged, text))


def one_piece_needs_no_border(n: int, first: int, second: int) -> None:
    """`a | b` is `a b` where a leaves one piece per rank."""
    mesh = Mesh(a=first, b=second)
    joined = Layout((n,), mesh, "(a b n)")
    assert Layout((n,), mesh, "(a n | b n)") is joined
    assert Layout((n,), mesh, (Shard(0), Shard(0))) is joined
