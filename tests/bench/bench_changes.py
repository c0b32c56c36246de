"""What it costs to send only what has changed, beside a whole move of the same refit.

    python tests/bench/bench_changes.py

Qwen3-235B-A22B's geometry, smaller: four trainer ranks (TP 2, EP 4) to four engine ranks (TP 4) with fused weights in
bfloat16, over eight gloo processes of one thread each. Shares of all elements change at random places.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.distributed as dist

import shardmath as sm
import shardmath_torch as smt
from shardmath.families.megatron_core import logical_shapes, megatron
from shardmath.refits.models import MODELS
from shardmath.storage.stored import Side
from shardmath_torch.refits.views import make_view
from tests.bench import section
from tests.bench.bench_refit import engine

SMALLER = MODELS["qwen3-235b-a22b"].config | {
    "num_layers": 4,
    "qk_layernorm": False,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_query_groups": 4,
    "ffn_hidden_size": 3072,
    "num_moe_experts": 32,
    "moe_ffn_hidden_size": 384,
}
VOCAB = 16384
SHARES = (0.0005, 0.025)
TRAINERS, RANKS = 4, 8
CALLS = 3


def views(side: Side, rank: int, own: dict[Any, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The rank's part of each logical tensor, in the memory of what it stores."""
    return {name: make_view(own, slot) for name, slot in side.slots(rank).items()}


def change(own: dict[Any, torch.Tensor], share: float, seed: int) -> None:
    """Other bits at random places of all tensors; replicas of a seed change alike."""
    drawn = torch.Generator().manual_seed(seed)
    for tensor in own.values():
        words = tensor.view(torch.int16).view(-1)
        count = round(len(words) * share)
        words[torch.randint(len(words), (count,), generator=drawn)] ^= 1


def run(rank: int, port: int, results: Any) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, None, is_master=rank == 0, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    trainer = megatron(
        SMALLER, ranks=range(TRAINERS), tp=2, ep=4, etp=1, vocab=VOCAB, vocab_multiple=1
    )
    shapes = logical_shapes(SMALLER, vocab=VOCAB, dtype="bfloat16")
    moved = sm.refit(trainer, engine(range(TRAINERS, RANKS), 4, VOCAB, 128), shapes)
    side = moved.trainer if rank < TRAINERS else moved.engines["engine"]
    own = {n: torch.zeros(s, dtype=torch.bfloat16) for n, s in side.natives(rank).items()}
    mine = views(side, rank, own)
    src, out = (mine, None) if rank < TRAINERS else (None, mine)
    send = smt.compile_changes(moved.plan, timeout=300.0)
    found = []
    for share in (None, *SHARES):
        sent = []
        for call in range(CALLS):
            if share is not None and rank < TRAINERS:
                change(own, share, call)
            dist.barrier()
            start = time.perf_counter()
            done = send(src, out=out, whole=share is None)
            dist.barrier()
            sent.append((time.perf_counter() - start, done))
        found.append(min(sent, key=lambda one: one[0]))
    results.put((rank, sum(t.nbytes for t in own.values()), found))
    dist.destroy_process_group()


def main() -> None:
    args = section.arguments(__doc__ or "")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    processes = [context.Process(target=run, args=(rank, port, results)) for rank in range(RANKS)]
    for process in processes:
        process.start()
    found = sorted(results.get(timeout=600) for _ in processes)
    for process in processes:
        process.join()
    nbytes = sum(one[1] for one in found[:TRAINERS])
    section.show(
        args.page,
        "Changes only",
        f"`python tests/bench/bench_changes.py`: {nbytes / 1e6:.0f} MB at four trainer ranks, into "
        "four engine ranks with fused weights, over eight gloo processes; the slowest rank's seconds.",
        ["what moves", "seconds", "of a whole move", "sent", "bytes an element", "phases"],
        list(_list_rows([one[2] for one in found])),
    )


def _list_rows(found: list[Any]) -> Iterator[list[str]]:
    """A row for each share: the slowest rank's seconds, what all ranks have sent, the longest of each phase."""
    whole = max(took for took, _ in (each[0] for each in found))
    for number, share in enumerate((None, *SHARES)):
        each = [one[number] for one in found]
        seconds = max(took for took, _ in each)
        nbytes = sum(sent.nbytes for _, sent in each)
        elements = sum(sent.elements for _, sent in each)
        phases = []
        for phase in each[0][1].seconds:
            longest = max(sent.seconds[phase] for _, sent in each)
            phases.append(f"{phase} {1000 * longest:.0f} ms")
        yield [
            "all" if share is None else f"{share:.2%} changed",
            f"{seconds:.3f}",
            f"{seconds / whole:.2f}",
            f"{nbytes / 1e6:.1f} MB",
            f"{nbytes / elements:.2f}" if elements else "2",
            ", ".join(phases),
        ]


if __name__ == "__main__":
    main()
