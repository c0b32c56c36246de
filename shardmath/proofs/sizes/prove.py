"""Every size: laws of layouts, decided for all sizes of their dimensions by finitely many.

A layout is an example: each of its dimensions may have any length n. What ranks hold is a product over dimensions, so
each dimension is decided alone, by the code that plans and moves use (`cells`, `divide_lengths`), at lengths 0, 1, 2
and so on. How many of them decide for all is computed from the cuts (`settling`); the first that breaks the law is the
smallest counterexample. A dimension whose text or table gives sizes has one length, and is decided there.

>>> from shardmath.layouts.layout import Layout
>>> from shardmath.layouts.algebra.mesh import Mesh
>>> mesh = Mesh(dp=4, tp=2)
>>> fsdp = Layout((8, 4), mesh, "(tp dp n) h")
>>> print(prove(fsdp))
proved for every n and h: ranks hold each element once, up to copies; 42 lengths of n decide
>>> print(prove_equivalent(fsdp, Layout((8, 4), mesh, "(2 dp n | tp n) h")))
false at n = 9: rank 6 holds nothing under the first layout, and [8:9] under the second
"""

from __future__ import annotations

from shardmath.base.arguments import instance
from shardmath.base.errors import LayoutError, PlanError
from shardmath.layouts.layout import Layout
from shardmath.plans.reduction import find_reduction
from shardmath.proofs.sizes.equal import decide_equal, find_other_ranks, pair_cells
from shardmath.proofs.sizes.family import common_size, pair_dimensions
from shardmath.proofs.sizes.verdict import Decided, Verdict
from shardmath.proofs.sizes.whole import decide_arrives, decide_whole, find_missing

__all__ = ["prove", "prove_equivalent"]


def prove(layout: Layout, dst: Layout | None = None) -> Verdict:
    """Decide for all sizes whether ranks hold each element of a tensor once under `layout`, up to copies along mesh
    axes that do not divide it. With `dst`, decide whether a move from `layout` to `dst` brings each element that the
    destination holds to it exactly once. If both hold all elements, a move back restores the source.

    The sizes of the layouts are examples; dimensions with padding, listed sizes or a table keep theirs. A custom
    placement is proved if it declares `period(parts)`: a number p so that its ranges move by fixed numbers of positions
    from n to n + p to n + 2p. Otherwise it is tested (docs/every-size.md). If a placement declares `overlaps`, several
    coordinates may hold an element.

    Raises LayoutError for other values, and if a dimension can have no size that both layouts allow; PlanError if no
    plan between the layouts exists at any size, because dtypes or reductions differ; and PlacementError if a custom
    placement's `period` raises, or returns something other than a positive integer.
    """
    instance(layout, Layout, "prove is about layouts", LayoutError)
    if dst is None:
        law = f"ranks hold each element {_word_times(layout)}"
        return _decide(law, [layout])
    instance(dst, Layout, "prove is about layouts", LayoutError)
    if layout.dtype != dst.dtype:
        what = f"the source is {layout.dtype}, and the destination {dst.dtype}"
        raise PlanError(f"{what}; give both one dtype, or cast on the way by `transformed`")
    find_reduction(layout, dst)  # raises if their Partial axes do not fit
    return _decide("each element that the destination holds arrives exactly once", [layout, dst])


def _word_times(layout: Layout) -> str:
    """How often ranks hold each element: more than once only if a placement says so."""
    overlapping = any(getattr(by, "overlaps", False) for by in layout.rules.values())
    return "at least once" if overlapping else "once, up to copies"


def _decide(law: str, sides: list[Layout]) -> Verdict:
    """Decide about a layout, or about a source and a destination, dimension by dimension."""
    dims = []
    found = None
    for name, families in pair_dimensions(sides):
        size = common_size(name, families)
        if size is not None:
            decided, found = Decided(name, "one", size), find_missing(name, size, families)
        elif len(families) == 1:
            decided, found = decide_whole(name, families[0])
        else:
            decided, found = decide_arrives(name, *families)
        dims.append(decided)
        if found is not None:
            break
    return Verdict(law, tuple(dims), found)


def prove_equivalent(a: Layout, b: Layout) -> Verdict:
    """Decide whether `a` and `b` give every rank the same elements in the same order, for all sizes of the tensor;
    `sm.equivalent` decides it for the sizes of the layouts.

    Sizes are examples, as in `prove`. Raises LayoutError for other values, and if a dimension can have no size that
    both layouts allow, and PlacementError for a wrong `period`, as in `prove`.
    """
    for layout in (a, b):
        instance(layout, Layout, "prove_equivalent compares two layouts", LayoutError)
    law = "both layouts give every rank the same elements in the same order"
    dims = []
    found = find_other_ranks(a, b)
    for name, families in pair_dimensions([a, b]):
        if found is not None:
            break
        decided, found = decide_equal(name, families, pair_cells(a, b, families))
        dims.append(decided)
    return Verdict(law, tuple(dims), found)
