"""The second figure of docs/programs.md: the certificate of a program on five nodes.

python tools/certificate_figure.py      # writes docs/certificate.svg
"""

from __future__ import annotations

from pathlib import Path

import shardmath as sm

FIGURE = Path(__file__).parents[1] / "docs" / "certificate.svg"


def figure() -> str:
    """The page's program with fanout="node"."""
    held = sm.Layout((65536, 8192), sm.Mesh(tp=8), "(tp n) h", dtype="bfloat16")
    mesh = sm.Mesh(dp=16, tp=2, ranks=range(8, 40))
    wanted = sm.Layout((65536, 8192), mesh, "n (tp h)", dtype="bfloat16")
    program = sm.schedule(
        sm.plan(held, wanted), topology=sm.Topology(), fanout="node", max_inflight_bytes=1 << 30
    )
    return sm.certify(program).svg()


if __name__ == "__main__":
    FIGURE.write_text(figure())
