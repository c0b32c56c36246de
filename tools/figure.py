"""The README's figure: one weight sharded over a trainer and over an engine, and who sends how much to whom.

python tools/figure.py          # writes docs/figure.svg
"""

from __future__ import annotations

from pathlib import Path

import shardmath as sm

FIGURE = Path(__file__).parents[1] / "docs" / "figure.svg"


def figure() -> str:
    """A weight under FSDP2 over tensor parallelism, and as an engine of two ranks shards it."""
    trainer = sm.Layout((9, 4), sm.Mesh(dp=2, tp=2), "(tp dp n) h")
    engine = sm.Layout((9, 4), sm.Mesh(tp=2, ranks=(4, 5)), "n (tp h)")
    return sm.plan(trainer, engine).svg()


if __name__ == "__main__":
    FIGURE.write_text(figure())
