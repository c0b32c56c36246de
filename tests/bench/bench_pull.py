"""A pull by torch's one-sided transport, next to gloo's messages, between two processes of this machine.

    make test-torch TORCH=2.15.0           # makes .venv-torch
    .venv-torch/bin/pip install nixl nixl-cu13
    .venv-torch/bin/python tests/bench/bench_pull.py

The receiver reads 256 MiB of the sender's memory by NIXL, over UCX, while the sender does nothing. Next to it, gloo
sends as many bytes. In the second row the bytes are half of each of 4,096 rows: NIXL reads each half row into its
place, gloo's sender packs them into one message, and its receiver unpacks them. Seconds, the least of five.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from shardmath.base.text import make_table

ROWS, COLUMNS = 4096, 32768
NAMES = "whole", "rows"
HALF = COLUMNS // 2
REPEATED = 5
LIMIT = timedelta(seconds=100)


def time_least(call: Callable[[], Any]) -> float:
    """The least seconds of several calls."""
    seconds = []
    for _ in range(REPEATED):
        begun_s = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begun_s)
    return min(seconds)


def pull(rank: int, store: dist.Store) -> tuple[float, float]:
    """The receiver's seconds for one read, and for a read of each half row."""
    from torch.distributed._transport import new_transport_rank
    from torch.distributed._transport.nixl import NIXLRemoteBuffer

    transport = new_transport_rank("nixl", "cpu", store=store, peer_rank=1 - rank, rank=rank)
    whole = torch.full((ROWS, HALF), float(rank == 0))
    rows = torch.full((ROWS, COLUMNS), float(rank == 0))
    memories = [transport.register_memory(whole), transport.register_memory(rows)]
    if rank == 0:
        for name, memory in zip(NAMES, memories, strict=True):
            store.set(name, memory.to_remote_buffer().serialize())
        store.wait(["pulled"], LIMIT)
        transport.close()
        return 0.0, 0.0
    theirs = [NIXLRemoteBuffer.deserialize(store.get(name)) for name in NAMES]
    half, step = 4 * HALF, 4 * COLUMNS
    parts = [
        (
            memories[1].to_mutable_view(at, half),
            replace(theirs[1], address=theirs[1].address + at, length=half),
        )
        for at in range(0, ROWS * step, step)
    ]
    once = time_least(lambda: transport.read(memories[0].to_mutable_view(), theirs[0]))

    def read_parts() -> None:
        reads = [transport.read(into, out_of, async_op=True) for into, out_of in parts]
        for read in reads:
            read.wait()

    each = time_least(read_parts)
    assert whole.eq(1).all() and rows[:, :HALF].eq(1).all() and rows[:, HALF:].eq(0).all()
    store.set("pulled", "")
    transport.close()
    return once, each


def push(rank: int) -> tuple[float, float]:
    """The receiver's seconds for one message by gloo, and for one of packed half rows."""
    whole = torch.full((ROWS, HALF), float(rank == 0))
    rows = torch.full((ROWS, COLUMNS), float(rank == 0))

    def send_whole() -> None:
        dist.barrier()
        dist.send(whole, 1) if rank == 0 else dist.recv(whole, 0)

    def send_packed() -> None:
        dist.barrier()
        if rank == 0:
            dist.send(rows[:, :HALF].contiguous(), 1)
        else:
            packed = torch.empty(ROWS, HALF)
            dist.recv(packed, 0)
            rows[:, :HALF] = packed

    once, each = time_least(send_whole), time_least(send_packed)
    assert whole.eq(1).all() and rows[:, :HALF].eq(1).all()
    return once, each


def work(rank: int, port: int) -> None:
    """One of the two processes; the receiver prints."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, timeout=LIMIT)
    pulled = pull(rank, store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=LIMIT)
    pushed = push(rank)
    dist.barrier()
    if rank == 1:
        rows = [
            [what, f"{read:.3f}", f"{sent:.3f}"]
            for what, read, sent in zip(
                ("one range of 256 MiB", "4,096 ranges of 64 KiB"), pulled, pushed, strict=True
            )
        ]
        print(make_table(["bytes", "NIXL read", "gloo message"], rows))


def main() -> None:
    """Start both processes."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]
    command = [sys.executable, __file__]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "NIXL_LOG_LEVEL": "WARN"}
    both = [
        subprocess.Popen([*command, str(rank), str(port)], env=environment) for rank in range(2)
    ]
    sys.exit(max(process.wait(timeout=180) for process in both))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        work(int(sys.argv[1]), int(sys.argv[2]))
    else:
        main()
