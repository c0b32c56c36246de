"""The speed of the core, beside PyTorch's where PyTorch has the same thing. Cold: every cache is emptied each round.

Only what is computed is asserted; what it costs is printed (`conftest`) and never fails.
"""

from __future__ import annotations

import gc
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import shardmath as sm
from shardmath.layouts import layout

N = 1 << 27
"""The dimension whose cost must not depend on its size."""
SMALL = 1 << 22
"""PyTorch's strided shards cost seconds and gigabytes at N: its figure is taken here and grows with the size."""
MESH = sm.Mesh(dp=8, tp=8)
RANK = 13

PLACEMENTS: dict[str, dict[str, Any]] = {
    "Shard": {"tp": sm.Shard(0)},
    "Balanced": {"tp": sm.Balanced(0)},
    "StridedShard, Shard": {"dp": sm.StridedShard(0, split_factor=8), "tp": sm.Shard(0)},
    "Ragged": {"tp": sm.Ragged(0, [N // 8 + 1] * 7 + [N // 8 - 7])},
    "Packed, 64 components": {"tp": sm.Packed(0, [N // 64] * 64)},
}
TORCH = {"Shard": N, "StridedShard, Shard": SMALL}
"""The size at which PyTorch is measured on the same placements."""


def cold() -> None:
    """Forget everything computed so far, also what layouts remember."""
    sm.clear_caches()
    for held in list(layout._interned.values()):
        object.__setattr__(held, "_form", None)
        object.__setattr__(held, "_digest", None)


def rounds_of(
    act: Callable[[], object], rounds: int, before: Callable[[], object] = cold
) -> list[float]:
    """Seconds of each round, `before` left out; garbage is not collected while the clock runs, as in timeit.

    Rounds are taken in five spells, half a second apart: neighbors on a shared machine are busy by spells too.
    """
    out = []
    for i in range(rounds):
        if i and i % -(-rounds // 5) == 0:
            time.sleep(0.5)
        before()
        gc.disable()
        start = time.perf_counter()
        act()
        out.append(time.perf_counter() - start)
        gc.enable()
    return out


def measured(benchmark: Any, act: Callable[[], object], rounds: int) -> list[float]:
    """The same through pytest-benchmark, so that its table and its files have it too."""
    benchmark.pedantic(act, setup=cold, rounds=rounds, warmup_rounds=min(5, rounds))
    return list(benchmark.stats.stats.data) if benchmark.stats else rounds_of(act, 1)


@pytest.fixture(scope="module")
def torch_mesh() -> Iterator[Any]:
    """A DeviceMesh like MESH without any other process."""
    dist = pytest.importorskip("torch.distributed")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=RANK, world_size=MESH.size)
    yield init_device_mesh("cpu", tuple(MESH.shape.values()), mesh_dim_names=tuple(MESH.shape))
    dist.destroy_process_group()


def torch_placements(spec: dict[str, Any]) -> list[Any]:
    """One PyTorch placement a mesh axis."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    def one(value: Any) -> Any:
        if isinstance(value, sm.StridedShard):
            return _StridedShard(value.dim, split_factor=value.split_factor)
        return Shard(value.dim) if value else Replicate()

    return [one(spec.get(axis)) for axis in MESH.shape]


@pytest.mark.parametrize("name", PLACEMENTS)
def test_runs_of_one_rank(
    benchmark: Any, record: Callable[..., None], torch_mesh: Any, name: str
) -> None:
    """`local_shape` and `runs` of one rank cost the same at every size."""
    from torch.distributed.tensor._utils import (
        _compute_local_shape_and_global_offset as torch_shape,
    )

    held = sm.Layout((N,), MESH, PLACEMENTS[name])
    seconds = measured(benchmark, lambda: (held.local_shape(RANK), held.runs(RANK)), 2000)
    assert held.local_shape(RANK) == (len(held.runs(RANK)[0]),)
    row = (f"`local_shape` and `runs` of one rank, 2^27 rows, {name}", seconds, 30e-6)
    if name not in TORCH:
        record(*row)
        return
    n, mine, theirs = (
        TORCH[name],
        list(MESH.coords(RANK).values()),
        torch_placements(PLACEMENTS[name]),
    )
    shape, offset = torch_shape((n,), tuple(MESH.shape.values()), mine, theirs)
    small = sm.Layout((n,), MESH, PLACEMENTS[name])
    assert (shape, offset) == (small.local_shape(RANK), (small.runs(RANK)[0].segments[0][1],))
    peer = rounds_of(lambda: torch_shape((n,), tuple(MESH.shape.values()), mine, theirs), 3)
    record(*row, f"PyTorch DTensor, 2^{n.bit_length() - 1} rows", peer)


SPECS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "S0,S1 -> S1,S0": (
        {"dp": sm.Shard(0), "tp": sm.Shard(1)},
        {"dp": sm.Shard(1), "tp": sm.Shard(0)},
    ),
    "_StridedShard(0, 8),S0 -> S0,S0": (
        {"dp": sm.StridedShard(0, split_factor=8), "tp": sm.Shard(0)},
        {"dp": sm.Shard(0), "tp": sm.Shard(0)},
    ),
}


@pytest.mark.parametrize("name", SPECS)
def test_plan_of_a_relayout(
    benchmark: Any, record: Callable[..., None], torch_mesh: Any, name: str
) -> None:
    """One plan between two layouts of a 4096 x 4096 tensor on 8 x 8 ranks, and PyTorch's sequence of collectives."""
    src, dst = (sm.Layout((4096, 4096), MESH, spec) for spec in SPECS[name])
    seconds = measured(benchmark, lambda: sm.plan(src, dst), 300)
    sm.verify(sm.plan(src, dst))
    for kind, graph in (("greedy", False), ("graph", True)):
        peer = torch_plans(torch_mesh, *SPECS[name], graph)
        if kind == "greedy" and "Strided" in name:
            continue  # PyTorch itself plans strided shards by graph only
        record(
            f"plan on 8 x 8 ranks, `{name}`", seconds, 1e-3, f"PyTorch redistribute, {kind}", peer
        )


def torch_plans(mesh: Any, src: dict[str, Any], dst: dict[str, Any], graph: bool) -> list[float]:
    """Seconds of PyTorch's planner, without its caches."""
    import torch
    from torch.distributed.tensor import _redistribute
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    meta = TensorMeta(torch.Size((4096, 4096)), (4096, 1), torch.float32)

    def act() -> object:
        specs = [
            DTensorSpec(mesh, tuple(torch_placements(spec)), tensor_meta=meta)
            for spec in (src, dst)
        ]
        return _redistribute._gen_transform_infos_non_cached(*specs, graph)

    return rounds_of(act, 50, _redistribute.clear_redistribute_planner_cache)


IMPORT = """
import sys, time
start = time.perf_counter()
import numpy
between = time.perf_counter()
import shardmath
print(between - start, time.perf_counter() - between, "torch" in sys.modules)
"""


def import_times(cache: Path, runs: int) -> list[tuple[float, float]]:
    """Seconds of `import numpy` and of `import shardmath` after it, each run in a process of its own.

    Byte code is cached, as after any installation, by a first run that is not counted.
    """
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    env["PYTHONPYCACHEPREFIX"] = str(cache)
    out = []
    for _ in range(runs + 1):
        done = subprocess.run(
            [sys.executable, "-c", IMPORT], env=env, capture_output=True, text=True, check=True
        )
        numpy, ours, torch = done.stdout.split()
        assert torch == "False"
        out.append((float(numpy), float(ours)))
    return out[1:]


def test_import(record: Callable[..., None], tmp_path: Path) -> None:
    """`import shardmath` never imports torch, and costs little beside numpy."""
    numpy, ours = zip(*import_times(tmp_path, 15), strict=True)
    assert statistics.median(ours) > 0
    record("import shardmath, after numpy", ours, 30e-3, "import numpy", numpy)


STREAM = """
import gc
import shardmath as sm
mesh = sm.Mesh(tp=4)

def pages():
    gc.collect()
    with open("/proc/self/statm") as text:
        return int(text.read().split()[1])

def move(n):
    plan = sm.plan(sm.Layout((n, 8), mesh, "(tp n) h"), sm.Layout((n, 8), mesh, "n (tp h)"))
    return len(list(plan.transfers()))

for n in range(1000, 2000):
    move(n)
before = pages()
for n in range(2000, 22_000):
    move(n)
print(pages() - before)
"""
"""Pages that the process has more after 20,000 plans, none like another, each listed and dropped."""


def test_memory_of_a_stream_of_plans(note: Callable[..., None]) -> None:
    """A service that plans for ever does not grow for ever."""
    told = subprocess.run(
        [sys.executable, "-c", STREAM], capture_output=True, text=True, check=True
    )
    grown = int(told.stdout) * resource.getpagesize() / 2**20
    note(
        "memory",
        f"After 20,000 different plans, each listed and dropped, the process is {grown:.0f} MiB larger.",
    )
    assert grown < 100
