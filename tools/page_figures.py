"""The figures of pages that explain: what their first example looks like.

python tools/page_figures.py          # writes docs/layouts.svg, plans.svg, partial.svg and stores.svg
"""

from __future__ import annotations

from pathlib import Path

import shardmath as sm

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
    }


if __name__ == "__main__":
    for page, figure in figures().items():
        (DOCS / f"{page}.svg").write_text(figure)
