"""Layout laws: the laws of Runs and layouts.

A law is a function with a one-line docstring that asserts; one law, one cause of failure.
"""

from __future__ import annotations

import pickle

import numpy as np

from shardmath.layouts.algebra.mesh import Mesh
from shardmath.layouts.algebra.runs import Runs, compose, invert
from shardmath.layouts.algebra.stages import pieces_runs, stage_runs
from shardmath.layouts.edits import relabeled
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
    "relabeling_moves_holdings",
    "runs_are_canonical",
    "shape_counts_runs",
    "splitting_an_axis_changes_nothing",
    "transpose_mesh",
]

# Runs


def compose_is_after(f: Runs, g: Runs) -> None:
    """Check that compose(f, g) maps each i to g(f(i)), and maps i to nothing if f(i) or g(f(i)) is missing."""
    before = f.indices()
    after = g.indices().tolist()
    expected = []
    for i in before.tolist():
        inside = 0 <= i < len(g)
        expected.append(after[i] if inside else -1)
    # `compose` takes no g that is shorter than the positions that f reaches.
    length = max(len(g), f.extent)
    longer = Runs(g.segments, length)
    composed = compose(f, longer)
    found = composed.indices()
    assert found.tolist() == expected


def invert_undoes(runs: Runs) -> None:
    """Check that inverting `runs`, a map from local to global positions, twice gives `runs` again. The map followed by
    its inverse must lead each local position to itself; holes (positions without an element) must stay holes."""
    # One position longer than needed, so that the inverse has a hole.
    back = invert(runs, runs.extent + 1)
    assert invert(back, len(runs)) == runs
    held = runs.indices() >= 0
    positions = np.arange(len(runs))
    expected = np.where(held, positions, -1)
    composed = compose(runs, back)
    found = composed.indices()
    assert np.array_equal(found, expected)


def runs_are_canonical(runs: Runs) -> None:
    """Check that Runs which map the same positions to the same indices are equal, in whatever pieces and order they
    were given."""
    index = runs.indices().tolist()
    cells = []
    for i, g in enumerate(index):
        if g >= 0:
            cells.append((i, g, 1))
    cut = Runs(cells, len(runs))
    backwards = Runs(reversed(cells), len(runs))
    assert cut == backwards == runs
    assert hash(cut) == hash(runs)


# Layouts


def fast_is_definition(layout: Layout) -> None:
    """Check that `stage_runs`, which finds the indices that a rank holds, agrees in every dimension of `layout` with
    `pieces_runs`, a simpler and slower function."""
    fields = [f for dim in layout.dims for f in dim.fields]
    for rank in layout.mesh.ranks:
        coords = layout.mesh.coords(rank)
        for f in fields:
            # Each stage divides the positions that the stage before it leaves.
            length = f.size
            for stage in f.stages:
                held = stage_runs(stage, length, coords)
                assert held == pieces_runs(stage, length, coords)
                length = len(held)


def parse_print(layout: Layout) -> None:
    """Check that reading a layout's printed text gives an equal layout, and so do pickle and repr."""
    text = layout.text
    again = Layout(layout.shape, layout.mesh, text, dtype=layout.dtype, rules=layout.rules)
    assert again is layout
    pickled = pickle.dumps(layout)
    assert pickle.loads(pickled) is layout
    names = {"Layout": Layout, "Mesh": Mesh, "Runs": Runs, "Table": Table}
    evaluated = eval(repr(layout), names)
    assert evaluated is layout


def shape_counts_runs(layout: Layout) -> None:
    """Check, for every rank, that `layout.indices` lists the global positions that `layout.runs` describes, and that
    both have the lengths in `layout.local_shape`."""
    for rank in layout.mesh.ranks:
        held = layout.runs(rank)
        indices = layout.indices(rank)
        for runs, index in zip(held, indices, strict=True):
            found = runs.indices()
            assert np.array_equal(found, index)
        sizes = tuple(map(len, indices))
        assert sizes == tuple(map(len, held))
        assert sizes == layout.local_shape(rank)


def relabeling_moves_holdings(layout: Layout) -> None:
    """Check that a renumbered rank holds what the rank with the old number held."""
    names = {}
    for rank in layout.mesh.ranks:
        names[rank] = 1000 - 3 * rank
    renamed = relabeled(layout, names)
    for rank, name in names.items():
        held = layout.runs(rank)
        assert renamed.runs(name) == held


def mesh_transposition_changes_nothing(layout: Layout) -> None:
    """Check that every rank holds the same after the axes of the mesh are put in the opposite order."""
    turned = transpose_mesh(layout)
    for rank in layout.mesh.ranks:
        held = layout.runs(rank)
        assert turned.runs(rank) == held


def transpose_mesh(layout: Layout) -> Layout:
    """Return the layout on a mesh whose axes are in the opposite order; ranks hold the same elements."""
    mesh = layout.mesh
    axes_backwards = tuple(reversed(mesh.shape))
    turned = mesh.transpose(axes_backwards)
    return Layout(layout.shape, turned, layout.text, dtype=layout.dtype, rules=layout.rules)


def splitting_an_axis_changes_nothing(n: int, outer: int, inner: int) -> None:
    """Check, for a length `n`, that ranks hold the same after a mesh axis is split into `outer` times `inner`, and
    after these two are merged again."""
    shape = (n,)
    whole = Mesh(t=outer * inner)
    in_two = whole.split("t", x=outer, y=inner)
    merged = in_two.merge(("x", "y"), "t")
    for text in ("(t n)", "(2 t n)", "(n t 2)", "(t~ n)"):
        text_of_two = text.replace("t", "x*y")
        before = Layout(shape, whole, text)
        split = Layout(shape, in_two, text_of_two)
        after = Layout(shape, merged, text)
        assert equivalent(before, split)
        assert equivalent(split, after)


def one_piece_needs_no_border(n: int, first: int, second: int) -> None:
    """Check that three ways to divide a dimension of length `n` over mesh axes a and b (sizes `first` and `second`)
    give the same Layout. These are Shard(0) on both axes, "(a b n)" (divide by a and b together), and "(a n | b n)"
    (divide by a, then divide each part by b)."""
    mesh = Mesh(a=first, b=second)
    shape = (n,)
    shards = (Shard(0), Shard(0))
    joined = Layout(shape, mesh, "(a b n)")
    assert Layout(shape, mesh, "(a n | b n)") is joined
    assert Layout(shape, mesh, shards) is joined
