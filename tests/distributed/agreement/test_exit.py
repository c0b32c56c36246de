"""A process that ends in the middle of a move ends as Python does, and never by abort."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.distributed.pool import free_port

PROGRAM = """
import sys
import torch, torch.distributed as dist
import shardmath as sm, shardmath_torch as smt

rank, size, port = map(int, sys.argv[1:])
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
mesh = sm.Mesh(tp=size)
a, b = sm.Layout((300, 900), mesh, "(tp n) h"), sm.Layout((300, 900), mesh, "n (tp h)")
x, out = torch.ones(a.local_shape(rank)), torch.zeros(b.local_shape(rank))
move = smt.compile(sm.plan(a, b), timeout=5.0)
move(x, out=out)
print("ready", flush=True)
if rank < 2:
    while True:
        move(x, out=out, timeout=300.0)
import time
time.sleep(60)
"""


BESIDE = """
import sys, time
import torch, torch.distributed as dist
import shardmath as sm, shardmath_torch as smt

rank, size, port = map(int, sys.argv[1:])
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
mesh = sm.Mesh(tp=size)
a, b = sm.Layout((300, 900), mesh, "(tp n) h"), sm.Layout((300, 900), mesh, "n (tp h)")
x, out = torch.ones(a.local_shape(rank)), torch.zeros(b.local_shape(rank))
move = smt.compile(sm.plan(a, b), timeout=30.0, group=dist.new_group(), commit="all")
move(x, out=out)
print("ready", flush=True)
if rank == 1:
    handle = move(2 * x, out=out, async_op=True)
    sys.exit(0)
time.sleep(6)
try:
    move(2 * x, out=out)
except sm.ExchangeError as error:
    print(bool((out == 1.0).all()), error, flush=True)
"""


def start(program: str, size: int) -> list[subprocess.Popen[str]]:
    """The program as so many ranks."""
    port = free_port()
    env = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": os.pathsep.join(sys.path)}
    return [
        subprocess.Popen(
            [sys.executable, "-c", program, str(rank), str(size), str(port)],
            env=env,
            cwd=Path(__file__).parents[3],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]


def await_ready(ranks: list[subprocess.Popen[str]]) -> None:
    for one in ranks:
        assert one.stdout is not None
        assert one.stdout.readline() == "ready\n"


@pytest.mark.slow
@pytest.mark.parametrize("turn", range(6))
def test_ctrl_c_on_all_ranks(turn: int) -> None:
    """Two ranks wait in a move for the third; a terminal's Ctrl-C reaches all of them."""
    ranks = start(PROGRAM, 3)
    try:
        await_ready(ranks)
        time.sleep(0.2)
        for one in ranks:
            one.send_signal(signal.SIGINT)
        ends = [(one.communicate(timeout=60)[1][-300:], one.returncode) for one in ranks]
    finally:
        for one in ranks:
            one.kill()
    assert all(status in (1, -signal.SIGINT) for _, status in ends), ends


@pytest.mark.slow
def test_a_move_beside_at_exit() -> None:
    """Is called off after a few seconds: its process ends well, and the others are told why."""
    ranks = start(BESIDE, 2)
    try:
        await_ready(ranks)
        began = time.monotonic()
        _, errors = ranks[1].communicate(timeout=30)
        others, _ = ranks[0].communicate(timeout=30)
        took = time.monotonic() - began
    finally:
        for one in ranks:
            one.kill()
    assert ranks[1].returncode == 0, errors
    assert "RuntimeWarning: a move failed that was made with async_op=True" in errors
    assert others.startswith("True rank 1 failed"), others
    assert "its process ended in the middle of a move" in others
    assert took < 20.0
