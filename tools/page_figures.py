"""The figures of pages that explain: what an example of theirs looks like.

python tools/page_figures.py          # writes an SVG into docs for each
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import shardmath as sm
from shardmath.display.pictures.cells import cells_of
from shardmath.display.pictures.elements import beside, document
from shardmath.display.pictures.layout_drawing import about, colors_of, draw_layout

DOCS = Path(__file__).parents[1] / "docs"


def figures() -> dict[str, str]:
    """The SVG of each page's figure, by the page's name."""
    mesh = sm.Mesh(dp=4, tp=2)
    small = sm.Mesh(tp=2)
    rows, columns = sm.Layout((4, 2), small, "(tp n) h"), sm.Layout((4, 2), small, "n (tp h)")
    dp = sm.Mesh(dp=2)
    addends, divided = sm.Layout((4,), dp, "n {sum: dp}"), sm.Layout((4,), dp, "(dp n)")
    return {
        "layouts": sm.Layout((9, 4), mesh, "(tp dp n) h").svg(),
        "plans": sm.plan(rows, columns).svg(),
        "partial": sm.plan(addends, divided).svg(),
        "stores": sm.Layout((10, 4), sm.Mesh(tp=4), "(tp n)=12 h").svg(),
        "digests": draw_digests(),
        "formats": draw_formats(),
    }


def draw_digests() -> str:
    """Two layouts of one tensor, which have the same digest."""
    rows = sm.Layout((6, 4), sm.Mesh(dp=2, tp=2), "(tp n) h", dtype="bfloat16")
    columns = sm.Layout((6, 4), sm.Mesh(ep=3, ranks=(7, 2, 4)), "(2 ep n) h", dtype="bfloat16")
    return draw_beside((rows, columns), "One tensor under two layouts")


def draw_formats() -> str:
    """Tiles that shards cut: the data on the left, and on the right the scale of each tile."""
    weight = sm.Layout((256, 512), sm.Mesh(tp=4), "(tp n) k", dtype="bfloat16")
    both = sm.formats.FP8Blocks().layouts(weight, duplicated=True)
    return draw_beside(
        both, "Data of a weight on four ranks, and the scales of its tiles of 128 x 128"
    )


def draw_beside(layouts: Sequence[sm.Layout], title: str) -> str:
    """The layouts from left to right, with the same color for the same ranks."""
    cells = [cells_of(layout) for layout in layouts]
    colors = colors_of(cells)
    drawn = [draw_layout(layout, each, colors) for layout, each in zip(layouts, cells, strict=True)]
    texts = [f"{layout}: {about(layout)}" for layout in layouts]
    return document(beside(drawn, 24), title, ". ".join(texts))


if __name__ == "__main__":
    for page, figure in figures().items():
        (DOCS / f"{page}.svg").write_text(figure)
