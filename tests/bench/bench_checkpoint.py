"""`shardmath_torch.save` and `load` beside torch.distributed.checkpoint, over 8 processes, in one run.

    python tests/bench/bench_checkpoint.py [megabytes] [repeats] [--folder /dev/shm]

Seconds of the slowest rank, median of the repeats, ours and theirs in turns, from tensors to files and back. A save
waits until its bytes are on disk (fsync), as torch's does; a load finds the files in memory. What is saved is (dp=4,
tp=2) `(tp dp n) h`, other layouts are rows and columns of 8 ranks. Every file is removed again.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import shardmath as sm
import shardmath_torch as smt
from tests.bench.section import arguments, show, slowest
from tests.distributed.pool import Pool
from tests.distributed.tasks import dtensors

TENSORS = 32


def bench(
    rank: int, folder: str, rows: int, repeats: int
) -> dict[str, tuple[list[float], list[float]]]:
    """Seconds of each repeat, ours and theirs, by step."""
    plane, line = (
        dtensors.device_mesh(range(8), (4, 2), ("dp", "tp")),
        dtensors.device_mesh(range(8), (8,), ("world",)),
    )
    mesh, row = sm.Mesh(dp=4, tp=2), sm.Mesh(world=8)
    placed: dict[str, tuple[Any, Any, sm.Layout]] = {
        "strided": (
            plane,
            (_StridedShard(0, split_factor=2), Shard(0)),
            sm.Layout((rows, rows), mesh, "(tp dp n) h"),
        ),
        "columns": (line, (Shard(1),), sm.Layout((rows, rows), row, "n (world h)")),
        "rows": (line, (Shard(0),), sm.Layout((rows, rows), row, "(world n) h")),
    }
    names = [f"w{i}" for i in range(TENSORS)]
    held = {name: torch.rand(placed["strided"][2].local_shape(rank)) for name in names}
    layouts = {how: dict.fromkeys(names, layout) for how, (_, _, layout) in placed.items()}

    def state(how: str, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
        devices, placements, layout = placed[how]
        return {
            name: DTensor.from_local(
                t, devices, placements, run_check=False, shape=layout.shape, stride=(rows, 1)
            )
            for name, t in tensors.items()
        }

    def empty(how: str) -> dict[str, torch.Tensor]:
        return {name: torch.empty(placed[how][2].local_shape(rank)) for name in names}

    steps: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "save": (
            lambda: smt.save(f"{folder}/ours", held, layouts["strided"]),
            lambda: dcp.save(state("strided", held), checkpoint_id=f"{folder}/theirs"),
        )
    }
    for how in placed:
        label = "load, same layout" if how == "strided" else f"load, other layout: {how}"
        steps[label] = (
            lambda how=how: smt.load(f"{folder}/ours", layouts[how]),
            lambda how=how: dcp.load(state(how, empty(how)), checkpoint_id=f"{folder}/theirs"),
        )
    out: dict[str, tuple[list[float], list[float]]] = {}
    for label, both in steps.items():
        out[label] = [], []
        for turn in range(2 * (repeats + 1)):
            dist.barrier()
            start = time.perf_counter()
            both[turn % 2]()
            out[label][turn % 2].append(time.perf_counter() - start)
    return {label: (ours[1:], theirs[1:]) for label, (ours, theirs) in out.items()}


def main(
    megabytes: int = 1024, repeats: int = 5, folder: str | None = None, page: Path | None = None
) -> None:
    """Runs all steps and shows the table."""
    rows = int((megabytes * 2**20 / 4 / TENSORS) ** 0.5) // 8 * 8
    where, workers = tempfile.mkdtemp(dir=folder), Pool(8)
    try:
        ranks = workers.run(bench, where, rows, repeats, timeout=900)
    finally:
        workers.close()
        shutil.rmtree(where)
    found = []
    for label in ranks[0]:
        ours, theirs = (slowest(way) for way in zip(*(each[label] for each in ranks), strict=True))
        found.append([label, f"{ours:.3f}", f"{theirs:.3f}", f"{theirs / ours:.1f}x"])
    kind = "in memory" if folder else "on disk"
    about = (
        f"8 processes save and load {TENSORS} tensors of {rows} x {rows} float32. Figures are seconds of the slowest "
        f"process, the median of {repeats} runs."
    )
    show(
        page, f"Checkpoints {kind}", about, ["step", "shardmath", "torch DCP", "DCP / ours"], found
    )


if __name__ == "__main__":
    given = arguments(__doc__ or "", megabytes=1024, repeats=5)
    main(given.megabytes, given.repeats, given.folder, given.page)
