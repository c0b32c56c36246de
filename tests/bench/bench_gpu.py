"""What a refit costs on a GPU besides the network, beside torch's own copies of the same tensors, in one process.

    python tests/bench/bench_gpu.py [tensors] [rows]

Tensors have `rows` rows of 1,280 numbers in bfloat16. All are moved by a plan that changes nothing, so that every byte
is copied, by a process group of one rank over NCCL. Figures are milliseconds, the mean of 5 calls after 2 others.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.distributed as dist

import shardmath as sm
import shardmath_torch as smt
from tests.bench.section import arguments, show
from tests.distributed.pool import free_port

WARM, COUNTED = 2, 5
COLUMNS = 1280


def measure(act: Callable[[], object]) -> str:
    """Milliseconds of one call, with what it leaves for the GPU to do."""
    for _ in range(WARM):
        act()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(COUNTED):
        act()
    torch.cuda.synchronize()
    return f"{(time.perf_counter() - start) / COUNTED * 1e3:.2f}"


def main(tensors: int, rows: int, page: Path | None) -> None:
    """Measure each step, and show the table."""
    torch.cuda.set_device(0)
    address = f"tcp://127.0.0.1:{free_port()}"
    dist.init_process_group("nccl", init_method=address, rank=0, world_size=1)
    src = {
        f"layers.{i}": torch.randn(rows, COLUMNS, device="cuda").bfloat16() for i in range(tensors)
    }
    out = {name: torch.empty_like(tensor) for name, tensor in src.items()}
    layout = sm.Layout((rows, COLUMNS), sm.Mesh(tp=1), "(tp n) h", dtype="bfloat16")
    layouts = dict.fromkeys(src, layout)
    plan = sm.plan(layouts, layouts)
    move, once = smt.compile(plan), smt.compile(plan, agree="once")
    send = smt.compile_changes(plan)
    send(src, out=out)
    block = torch.randn(8192, 16384, device="cuda").bfloat16()

    def copy_each() -> None:
        for name, tensor in src.items():
            out[name].copy_(tensor)

    def change() -> None:
        for tensor in src.values():
            tensor[: rows // 100] += 1
        send(src, out=out)

    found = [
        [
            "torch._foreach_copy_",
            measure(lambda: torch._foreach_copy_([*out.values()], [*src.values()])),
        ],
        ["copy_ of each tensor", measure(copy_each)],
        ["a move", measure(lambda: move(src, out=out))],
        ['a move, agree="once"', measure(lambda: once(src, out=out))],
        ["smt.digest", measure(lambda: smt.digest(layouts, src))],
        ["a move of changes: none", measure(lambda: send(src, out=out))],
        ["a move of changes: 1 of 100 rows", measure(change)],
        ["MXFP8 of (8192, 16384)", measure(lambda: smt.quantize(sm.formats.MXFP8(), block))],
    ]
    dist.destroy_process_group()
    gigabytes = sum(tensor.nbytes for tensor in src.values()) / 1e9
    about = f"Milliseconds on one {torch.cuda.get_device_name()}, {tensors} tensors of {gigabytes:.2f} GB together."
    show(page, "On one GPU", about, ["what", "ms"], found)


if __name__ == "__main__":
    given = arguments(__doc__ or "", tensors=400, rows=1024)
    main(given.tensors, given.rows, given.page)
