"""What it costs to send only what has changed, beside a whole move of the same refit.

    python tests/bench/bench_changes.py [repeats] [layers]

Qwen3-235B-A22B's geometry, smaller: four trainer ranks (TP 2, EP 4) to four engine ranks (TP 4) with fused weights in
bfloat16, over eight gloo processes of one thread each. Shares of all elements change at random places; which, is found
by comparing with snapshots, or told by the caller. All ways take turns in one run, since machines have spells. Before,
one core alone does what its ranks do, and reads the same bytes by `torch.equal` and `Tensor.copy_`: no comparison with
snapshots is faster than `torch.equal`, which finds no places.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.distributed as dist

import shardmath as sm
import shardmath_torch as smt
from bench.models import MODELS
from shardmath.models.storage.stored import KnownSide
from shardmath.models.systems.megatron import logical_shapes, megatron
from shardmath.plans.programs.part import make_parts
from shardmath_torch.tensors.changes.changes import Sent
from shardmath_torch.tensors.changes.comparing import Snapshots
from shardmath_torch.tensors.changes.packets import Some
from shardmath_torch.tensors.changes.placing import Incoming
from shardmath_torch.tensors.changes.sorting import Outgoing
from shardmath_torch.tensors.refits.views import make_view
from tests.bench import section
from tests.bench.bench_refit import engine

SMALLER = MODELS["qwen3-235b-a22b"].config | {
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

HEADS = ["what moves", "seconds", "of a whole move", "CPU", "of a whole move's"]
HEADS += ["sent", "bytes an element", "phases"]

Tensors = dict[str, torch.Tensor]


class Way(NamedTuple):
    """What is moved: a share of all elements or, where it is None, all; and whether the caller tells which."""

    share: float | None
    is_told: bool = False

    def __str__(self) -> str:
        if self.share is None:
            return "all"
        return f"{self.share:.2%} changed, {'told' if self.is_told else 'compared'}"


WAYS = [Way(None), *(Way(share, is_told) for share in SHARES for is_told in (False, True))]


class Call(NamedTuple):
    """One rank's call: seconds until all were done, seconds of its processor, and what it sent."""

    seconds: float
    cpu: float
    sent: Sent


def make_refit(layers: int) -> sm.Refit:
    config = SMALLER | {"num_layers": layers}
    trainer = megatron(
        config, ranks=range(TRAINERS), tp=2, ep=4, etp=1, vocab=VOCAB, vocab_multiple=1
    )
    shapes = logical_shapes(config, vocab=VOCAB, dtype="bfloat16")
    return sm.refit(trainer, engine(range(TRAINERS, RANKS), 4, VOCAB, 128), shapes)


def make_natives(side: KnownSide, rank: int, dtype: torch.dtype) -> dict[Any, torch.Tensor]:
    """What the rank stores, as zeros."""
    return {name: torch.zeros(shape, dtype=dtype) for name, shape in side.natives(rank).items()}


def views(side: KnownSide, rank: int, own: Mapping[Any, torch.Tensor]) -> Tensors:
    """The rank's part of each logical tensor, in the memory of what it stores."""
    return {name: make_view(own, slot) for name, slot in side.slots(rank).items()}


def change(own: Mapping[Any, torch.Tensor], share: float, seed: int) -> dict[Any, torch.Tensor]:
    """Other bits at random places of all tensors, and where; replicas of a seed change alike."""
    drawn = torch.Generator().manual_seed(seed)
    where = {}
    for name, tensor in own.items():
        words = tensor.view(torch.int16).view(-1)
        places = torch.randint(len(words), (round(len(words) * share),), generator=drawn)
        words[places] ^= 1
        where[name] = torch.zeros_like(tensor, dtype=torch.bool)
        where[name].view(-1)[places] = True
    return where


def run(rank: int, port: int, repeats: int, layers: int, results: Any) -> None:
    """All ways, turn by turn."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, None, is_master=rank == 0, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    moved = make_refit(layers)
    side = moved.trainer if rank < TRAINERS else moved.engines["engine"]
    own = make_natives(side, rank, torch.bfloat16)
    mine = views(side, rank, own)
    src, out = (mine, None) if rank < TRAINERS else (None, mine)
    send = smt.compile_changes(moved.plan, timeout=300.0)
    # The first move of all makes room.
    send(src, out=out)
    calls: list[list[Call]] = [[] for _ in WAYS]
    for repeat in range(repeats):
        for way, done in zip(WAYS, calls, strict=True):
            positions: Tensors | None = None
            if way.share is not None and rank < TRAINERS:
                where = views(side, rank, change(own, way.share, repeat))
                if way.is_told:
                    positions = {k: one.reshape(-1).nonzero().view(-1) for k, one in where.items()}
            elif way.is_told:
                positions = {}
            dist.barrier()
            start, used = time.perf_counter(), time.process_time()
            sent = send(src, out=out, whole=way.share is None, positions=positions)
            used = time.process_time() - used
            dist.barrier()
            done.append(Call(time.perf_counter() - start, used, sent))
    results.put((rank, sum(t.nbytes for t in own.values()), calls))
    dist.destroy_process_group()


def list_rows(ranks: Sequence[Sequence[Sequence[Call]]]) -> Iterator[list[str]]:
    """A row per way: the slowest rank's seconds, all ranks' processors and bytes, and the phases of a trainer rank."""
    whole = section.slowest([call.seconds for call in each[0]] for each in ranks)
    whole_cpu = 0.0
    for number, way in enumerate(WAYS):
        each = [rank[number] for rank in ranks]
        seconds = section.slowest([call.seconds for call in calls] for calls in each)
        repeats = list(zip(*each, strict=True))
        cpu = statistics.median(sum(call.cpu for call in repeat) for repeat in repeats)
        whole_cpu = whole_cpu or cpu
        nbytes = sum(call.sent.nbytes for call in repeats[-1])
        elements = sum(call.sent.elements for call in repeats[-1])
        yield [
            str(way),
            f"{seconds:.3f}",
            f"{seconds / whole:.2f}",
            f"{cpu:.3f}",
            f"{cpu / whole_cpu:.2f}",
            f"{nbytes / 1e6:.1f} MB",
            f"{nbytes / elements:.2f}" if elements else "2",
            _word_phases([call for calls in each[:TRAINERS] for call in calls]),
        ]


def _word_phases(calls: Sequence[Call]) -> str:
    """The share of each phase in these calls."""
    totals: dict[str, float] = {}
    for call in calls:
        for phase, seconds in call.sent.seconds.items():
            totals[phase] = totals.get(phase, 0.0) + seconds
    whole = sum(totals.values())
    return ", ".join(f"{phase} {seconds / whole:.0%}" for phase, seconds in totals.items())


# One core alone


def measure(act: Callable[[], object], repeats: int) -> float:
    """The median of its seconds."""
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        act()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def bench_core(repeats: int, layers: int) -> Iterator[list[str]]:
    """What the first trainer rank and the last engine rank do, each on one core."""
    torch.set_num_threads(1)
    moved = make_refit(layers)
    first, last = (make_parts(moved.plan)[rank] for rank in (0, RANKS - 1))
    own = make_natives(moved.trainer, 0, torch.bfloat16)
    src = views(moved.trainer, 0, own)
    sends = [message for one in first.rounds for message in one.sends]
    outgoing = Outgoing({key: tuple(one.shape) for key, one in src.items()}, sends, [])
    snapshots = Snapshots(src, outgoing.hulls)
    nbytes = snapshots.nbytes
    side = moved.engines["engine"]
    natives = make_natives(side, RANKS - 1, torch.bfloat16)
    receives = [message for one in last.rounds for message in one.receives]
    incoming = Incoming(views(side, RANKS - 1, natives), receives)
    here = next(n for n, message in enumerate(sends) if message.dst_rank == RANKS - 1)
    there = next(n for n, message in enumerate(receives) if message.src_rank == 0)

    flat = torch.zeros(nbytes // 8, dtype=torch.int64)
    same = flat.clone()
    for name, act in (("torch.equal", flat.equal), ("copy_", flat.copy_)):
        rate = nbytes / measure(lambda act=act: act(same), repeats) / 1e9  # type: ignore[misc]
        yield [f"memory: {name} of as many bytes", f"{rate:.1f} GB/s of source"]
    for share in (0.0, *SHARES):
        change(own, share, 0)
        rate = nbytes / measure(lambda: list(snapshots.list_changed(src)), repeats) / 1e9
        yield [f"comparing, {share:.2%} changed", f"{rate:.1f} GB/s of source"]
        if not share:
            continue
        changed = list(snapshots.list_changed(src))
        count = sum(len(one.cells) for one in changed)
        rate = count / measure(lambda c=changed: outgoing.sort(c), repeats) / 1e6  # type: ignore[misc]
        yield [f"mapping, {share:.2%} changed", f"{rate:.1f} M positions/s"]
        elements: Any = outgoing.sort(changed).sends[here]
        rate = _measure_placing(incoming, there, elements, repeats)
        yield [f"placing, {share:.2%} changed", f"{rate:.1f} M positions/s"]


def _measure_placing(incoming: Incoming, number: int, elements: list[Some], repeats: int) -> float:
    """Millions of elements of a message per second."""
    count = sum(len(some.numbers) for some in elements)
    return count / measure(lambda: incoming.place(number, elements), repeats) / 1e6


def main() -> None:
    args = section.arguments(__doc__ or "", repeats=9, layers=4)
    about = (
        "In the next section, ranks refit [only what has changed](changes.md). This table has the rates of a rank's "
        "steps in such a refit, each alone on one core. `tests/bench/bench_changes.py` measures this."
    )
    rows = list(bench_core(args.repeats, args.layers))
    section.show(args.page, "Changes only, one core", about, ["what", "rate"], rows)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    processes = []
    for rank in range(RANKS):
        given = rank, port, args.repeats, args.layers, results
        processes.append(context.Process(target=run, args=given))
    for process in processes:
        process.start()
    found = sorted(results.get(timeout=600) for _ in processes)
    for process in processes:
        process.join()
    nbytes = sum(one[1] for one in found[:TRAINERS])
    about = (
        f"4 trainer ranks refit 4 engine ranks, which store fused weights: {nbytes / 1e6:.0f} MB of {args.layers} "
        f"layers, over gloo. Figures are seconds of the slowest rank, in the median of {args.repeats} runs. CPU "
        "columns are processor seconds. The column "
        '"phases" says how a trainer rank spends its time. The phase "agreeing" includes the wait for the slowest '
        "rank. `tests/bench/bench_changes.py` measures this."
    )
    rows = list(list_rows([one[2] for one in found]))
    section.show(args.page, "Changes only", about, HEADS, rows)


if __name__ == "__main__":
    main()
