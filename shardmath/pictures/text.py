"""Show: values as text for people; strings only.

>>> from shardmath.layouts.layout import Layout
>>> from shardmath.algebra.mesh import Mesh
>>> print(show(Layout((9, 4), Mesh(dp=4, tp=2), "(tp dp n) h")))
float32[9, 4] (tp dp n) h on dp=4 tp=2
rank  dp tp  local shape  dimension 0  dimension 1
   0   0  0       (2, 4)        [0:2]        [0:4]
   1   0  1       (1, 4)        [5:6]        [0:4]
   2   1  0       (2, 4)        [2:4]        [0:4]
   3   1  1       (1, 4)        [6:7]        [0:4]
   4   2  0       (1, 4)        [4:5]        [0:4]
   5   2  1       (1, 4)        [7:8]        [0:4]
   6   3  0       (0, 4)           []        [0:4]
   7   3  1       (1, 4)        [8:9]        [0:4]
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from shardmath.base.errors import LayoutError, PlanError
from shardmath.base.given import instance, plural
from shardmath.base.integers import whole
from shardmath.layouts.layout import Layout
from shardmath.plans.plan import Plan

__all__ = ["grid", "nbytes", "show", "table"]


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Aligned columns under their heads."""
    cells = [list(head), *([str(x) for x in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = (
        "  ".join(x.rjust(w) for x, w in zip(row, widths, strict=True)).rstrip() for row in cells
    )
    return "\n".join(lines)


def nbytes(n: float) -> str:
    """A number of bytes as people read it.

    >>> nbytes(512), nbytes(23_800_000)
    ('512 B', '23.80 MB')
    """
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if n >= size:
            return f"{n / size:.2f} {unit}"
    return f"{int(n)} B"


LEGEND = "sender -> receiver operation [box of the tensor] of [box at the sender] to [box at the receiver], bytes"
"""What stands where in a transfer's line."""

MOST = 1 << 24
"""Lines; more than anybody reads."""


def show(value: Layout | Plan, most: int = 32) -> str:
    """A layout: what each rank holds. A plan: what each rank sends and receives, and its first `most` transfers.

    Raises ShardError for anything else.
    """
    count = whole(most, "most", PlanError)
    if not 0 <= count <= MOST:
        raise PlanError(f"most={count}; show at least 0 and at most {MOST} ranks and transfers")
    if isinstance(value, Layout):
        return _layout(value, count)
    return _plan(instance(value, Plan, "show takes a Layout or a Plan", PlanError), count)


def _more(count: int, most: int, what: str) -> str:
    return f"\n... and {plural(count - most, f'more {what}')}" if count > most else ""


def _layout(layout: Layout, most: int) -> str:
    axes = " ".join(layout.mesh.shape)
    head = [
        "rank",
        *([axes] if axes else []),
        "local shape",
        *(f"dimension {d}" for d in range(layout.ndim)),
    ]
    widths = [len(name) for name in layout.mesh.shape]
    rows = []
    for rank in layout.mesh.ranks[:most]:
        coords = [
            str(x).rjust(w) for x, w in zip(layout.mesh.coords(rank).values(), widths, strict=True)
        ]
        rows.append(
            [
                rank,
                *([" ".join(coords)] if axes else []),
                layout.local_shape(rank),
                *layout.runs(rank),
            ]
        )
    return f"{layout}\n{table(head, rows)}{_more(layout.mesh.size, most, 'rank')}"


def _plan(p: Plan, most: int) -> str:
    sent, received = p.sent_bytes(), p.received_bytes()
    shown = p.ranks[:most]
    loads = table(
        ["rank", "sends", "receives"], ([r, nbytes(sent[r]), nbytes(received[r])] for r in shown)
    )
    listed = list(itertools.islice(p.transfers(), most + 1))
    lines = "\n".join([LEGEND] * bool(listed) + list(map(str, listed[:most]))) + (
        "\n..." if len(listed) > most else ""
    )
    tensors = plural(p.src, "tensor")
    tensors += f", {len(p.in_part)} of which the destination holds in part" if p.in_part else ""
    between = f"{len(p.src_ranks)} and {len(p.dst_ranks)} ranks"
    total = f"{nbytes(sum(sent.values()))} between {between}, {tensors}"
    return f"{total}\n{loads}{_more(len(p.ranks), most, 'rank')}\n{lines}"


def grid(layout: Layout) -> str:
    """Which ranks hold each element of a 1-d or 2-d tensor, as a grid; `.` where nobody does, `+` where more than one.

    Raises LayoutError for more dimensions.

    >>> from shardmath.algebra.mesh import Mesh
    >>> print(grid(Layout((3, 4), Mesh(tp=2), "n (2 tp h)")))
    0 1 0 1
    0 1 0 1
    0 1 0 1
    """
    if layout.ndim not in (1, 2):
        raise LayoutError(f"{layout} has {layout.ndim} dimensions; grid() draws 1 or 2")
    shape = layout.shape if layout.ndim == 2 else (1, *layout.shape)
    held: list[list[str]] = [["."] * shape[1] for _ in range(shape[0])]
    for rank in layout.mesh.ranks:
        index = [i[i >= 0].tolist() for i in layout.indices(rank)]
        for row, column in itertools.product(*(index if layout.ndim == 2 else [[0], *index])):
            held[row][column] = str(rank) if held[row][column] == "." else "+"
    width = max((len(x) for row in held for x in row), default=1)
    return "\n".join(" ".join(x.rjust(width) for x in row) for row in held)
