"""The picture of docs/observing.md: a real move between four processes on this machine, beside its program's model.

python tools/trace_figure.py [SVG]      # writes docs/trace.svg
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch

import shardmath as sm
import shardmath_torch as smt
from shardmath import traces
from shardmath_torch.commands.processes import Report, run

FIGURE = Path(__file__).parents[1] / "docs" / "trace.svg"

TRAINERS = sm.Layout((4096, 2048), sm.Mesh(tp=2), "(tp n) h")
ENGINES = sm.Layout((4096, 2048), sm.Mesh(dp=2, ranks=(2, 3)), "n h")

PAIRS = sm.Topology(ranks_per_node=2, intra_bytes_per_s=1e9, inter_bytes_per_s=1e9, latency_s=1e-3)
"""Nodes of two ranks. Its rates are round numbers, and no measurement."""


def move(folder: str, rank: int, report: Report) -> None:
    """Trace the third of three moves: the first two make memory and connections."""
    plan = sm.plan(TRAINERS, ENGINES, topology=PAIRS)
    mover = smt.compile(sm.schedule(plan, fanout="node", max_inflight_bytes=1 << 24))
    src = torch.ones(TRAINERS.local_shape(rank)) if rank < 2 else None
    out = torch.zeros(ENGINES.local_shape(rank)) if rank > 1 else None
    for _ in range(2):
        mover(src, out=out)
    with smt.trace(f"{folder}/move.json"):
        mover(src, out=out, label="step 3")


def figure() -> str:
    """The trace of all four, drawn."""
    with tempfile.TemporaryDirectory() as folder:
        run(move, folder, 4, timeout=60.0)
        files = sorted(Path(folder).glob("move.rank*.json"))
        return traces.svg(traces.merge(map(traces.read, files)))


if __name__ == "__main__":
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else FIGURE
    path.write_text(figure())
