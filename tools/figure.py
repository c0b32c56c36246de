"""The README's figure: one matrix cut two ways, and who sends how much to whom.

python tools/figure.py          # writes docs/figure.svg
"""

from __future__ import annotations

from pathlib import Path

import shardmath as sm

FIGURE = Path(__file__).parents[1] / "docs" / "figure.svg"


def figure() -> str:
    """A weight under FSDP over tensor parallelism, then cut along rows and columns, on four ranks of two nodes."""
    before = sm.Layout((4096, 4096), sm.Mesh(dp=2, tp=2), "(tp dp n) h", dtype="bfloat16")
    after = sm.Layout((4096, 4096), sm.Mesh(dp=2, tp=2), "(dp n) (tp h)", dtype="bfloat16")
    return sm.plan(before, after, topology=sm.Topology(ranks_per_node=2)).svg()


if __name__ == "__main__":
    FIGURE.write_text(figure())
