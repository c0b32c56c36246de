"""The figure of docs/programs.md: the rounds of a program in which each byte enters a node once.

python tools/program_figure.py      # writes docs/program.svg
"""

from __future__ import annotations

from pathlib import Path

import shardmath as sm

FIGURE = Path(__file__).parents[1] / "docs" / "program.svg"


def figure() -> str:
    """Two ranks send to two other nodes, whose ranks relay."""
    held = sm.Layout((8192, 8192), sm.Mesh(tp=2), "(tp n) h", dtype="bfloat16")
    mesh = sm.Mesh(dp=4, tp=2, ranks=range(4, 12))
    wanted = sm.Layout((8192, 8192), mesh, "n (tp h)", dtype="bfloat16")
    rack = sm.Topology(ranks_per_node=4)
    return sm.schedule(sm.plan(held, wanted), topology=rack, fanout="node").svg()


if __name__ == "__main__":
    FIGURE.write_text(figure())
