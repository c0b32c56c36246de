"""What a refit costs: from storage to a plan, one rank's prepared call, and a gigabyte beside its peers.

    python tests/bench/bench_refit.py

Processor seconds of one process, or of one rank's thread: planning at full size for 256 + 256 ranks, moving at tiny
sizes over four local processes, so that what is left is Python's share. "By hand" is the least that a program does for
the same first call: it makes the views of tensors and messages, and copies, and checks and agrees on nothing.

The gigabyte's peers take turns with it. "Packed messages" are plain messages that pack what is not contiguous, as gloo
needs it; they check and agree on nothing, either. Beside seconds is the processor time of all ranks together.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.distributed as dist

import shardmath as sm
import shardmath_torch as smt
from bench.models import MODELS
from shardmath.models.systems.megatron import logical_shapes, megatron
from shardmath.storage import Stored, parse
from shardmath_torch.tensors.refits.views import make_view
from tests.refits.tables import ENGINE

DEEPSEEK_V3 = MODELS["deepseek-v3"].config | {
    "num_layers_in_first_pipeline_stage": 3,
    "num_layers_in_last_pipeline_stage": 2,
}
VOCAB = MODELS["deepseek-v3"].vocab
TINY = MODELS["deepseek-v3"].config | {
    "hidden_size": 16,
    "num_attention_heads": 4,
    "num_query_groups": 4,
    "ffn_hidden_size": 16,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_head_dim": 4,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 4,
    "moe_ffn_hidden_size": 8,
    "moe_shared_expert_intermediate_size": 8,
}
TINY_VOCAB = 64
CALLS = 5
TURNS = 6


def engine(ranks: range, tp: int, vocab: int, head: int) -> Stored:
    mesh = sm.Mesh(dp=len(ranks) // tp, tp=tp, ranks=ranks)
    return Stored(parse(ENGINE), (mesh,), numbers={"vocab": vocab, "hd": head, "rep": 1})


def plan() -> None:
    """PP16 EP16 to TP32 DP8, at full size."""
    shapes = logical_shapes(DEEPSEEK_V3, vocab=VOCAB, dtype="bfloat16")
    best: dict[str, float] = {}
    for _ in range(3):
        sm.clear_caches()
        start = time.process_time()
        trainer = megatron(DEEPSEEK_V3, ranks=range(256), pp=16, ep=16, etp=1, vocab=VOCAB)
        moved = sm.refit(trainer, engine(range(256, 512), 32, VOCAB, 128), shapes)
        planned = time.process_time()
        sm.verify(moved.plan)
        proved = time.process_time()
        list(moved.plan.transfers(dst=300))
        listed = time.process_time()
        moved.slots(300, "engine")
        took = {
            "storage to plan": planned - start,
            "verify": proved - planned,
            "one rank's list": listed - proved,
            "one rank's slots": time.process_time() - listed,
        }
        best = {name: min(best.get(name, s), s) for name, s in took.items()}
    for name, seconds in best.items():
        print(f"{name:20} {1000 * seconds:6.0f} ms")


def move(rank: int, port: int, results: Any) -> None:
    """Two trainer ranks, two engine ranks; the thread's own seconds."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, None, is_master=rank == 0, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=4)
    trainer = megatron(TINY, ranks=range(2), tp=2, ep=2, etp=1, vocab=TINY_VOCAB, vocab_multiple=1)
    shapes = logical_shapes(TINY, vocab=TINY_VOCAB)
    moved = sm.refit(trainer, engine(range(2, 4), 2, TINY_VOCAB, 4), shapes)
    side = moved.trainer if rank < 2 else moved.engines["engine"]
    own = {name: torch.zeros(shape) for (_, name), shape in side.natives(rank).items()}
    start = time.thread_time()
    refit = smt.Refit(moved, timeout=300.0)
    made = time.thread_time() - start
    refit.prepare(*((own, None) if rank < 2 else (None, own)))
    prepared = time.thread_time() - start - made
    seconds = []
    for _ in range(CALLS):
        start = time.thread_time()
        refit()
        seconds.append(time.thread_time() - start)
    by_hand = _ByHand(moved, rank, own)
    start = time.thread_time()
    by_hand()
    hand = time.thread_time() - start
    results.put((rank, len(own), made, prepared, seconds[0], min(seconds[1:]), hand))
    dist.destroy_process_group()


class _ByHand:
    """The first call of a refit, written by hand: a view of each piece in its tensor, and one in the message between
    each pair of ranks."""

    def __init__(self, moved: sm.Refit, rank: int, own: dict[str, torch.Tensor]) -> None:
        self.rank = rank
        # The views of tensors that `prepare` binds, and the pieces of each peer's message: known before the call.
        side = moved.trainer if rank < 2 else moved.engines["engine"]
        stored = {(0, name): tensor for name, tensor in own.items()}
        self.tensors = {name: make_view(stored, slot) for name, slot in side.slots(rank).items()}
        of_rank = {"src": rank} if rank < 2 else {"dst": rank}
        self.pieces: dict[int, list[Any]] = {}
        for one in moved.plan.transfers(**of_rank):
            self.pieces.setdefault(one.dst_rank if rank < 2 else one.src_rank, []).append(one)

    def __call__(self) -> None:
        messages = []
        for peer, pieces in self.pieces.items():
            message = torch.empty(sum(one.nbytes for one in pieces) // 4)
            views, parts = [], []
            start = 0
            for one in pieces:
                key, cut = one.src_tensor, one.src_slices
                if self.rank > 1:
                    key, cut = one.dst_tensor, one.dst_slices
                tensor = self.tensors[key]
                views.append(tensor if tensor.shape == one.shape else tensor[cut])
                parts.append(message[start : start + one.nbytes // 4].view(one.shape))
                start += one.nbytes // 4
            messages.append((peer, message, views, parts))
        for peer, message, views, parts in messages:
            if self.rank < 2:
                torch._foreach_copy_(parts, views)
                dist.send(message, peer)
            else:
                dist.recv(message, peer)
                torch._foreach_copy_(views, parts)


GIGABYTE = {
    "num_layers": 8,
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_query_groups": 8,
    "ffn_hidden_size": 5120,
    "gated_linear_unit": True,
    "add_bias_linear": False,
    "normalization": "RMSNorm",
}
"""A dense model of 1.4 GB in float32."""
GIGABYTE_VOCAB = 8192


def exchange(rank: int, port: int, results: Any) -> None:
    """Seconds of a refit of four trainer ranks to four engine ranks, and of its peers, each the best of some."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, None, is_master=rank == 0, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=8)
    trainer = megatron(GIGABYTE, ranks=range(4), tp=2, pp=2, vocab=GIGABYTE_VOCAB, vocab_multiple=1)
    shapes = logical_shapes(GIGABYTE, vocab=GIGABYTE_VOCAB)
    moved = sm.refit(trainer, engine(range(4, 8), 4, GIGABYTE_VOCAB, 128), shapes)
    refit = smt.Refit(moved, timeout=300.0)
    side = moved.trainer if rank < 4 else moved.engines["engine"]
    own = {name: torch.ones(shape) for (_, name), shape in side.natives(rank).items()}
    refit.prepare(*((own, None) if rank < 4 else (None, own)))
    peers = {
        "refit": refit,
        "plain messages of the same bytes": _Messages(moved, rank),
        "packed messages of the same bytes": _Packed(moved, rank, own),
        "gather and load": _Gather(moved, rank, own),
    }
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in peers}
    for _ in range(TURNS):
        for name, act in peers.items():
            dist.barrier()
            start, used = time.perf_counter(), time.process_time()
            act()
            used = time.process_time() - used
            dist.barrier()
            found[name].append((time.perf_counter() - start, used))
    results.put((rank, sum(moved.plan.received_bytes().values()), found))
    dist.destroy_process_group()


class _Messages:
    """One message per pair of ranks, as large as what the plan moves between them, from and into plain buffers."""

    def __init__(self, moved: sm.Refit, rank: int) -> None:
        self.out: dict[int, torch.Tensor] = {}
        self.into: dict[int, torch.Tensor] = {}
        sizes: dict[tuple[int, int], int] = {}
        for one in moved.plan.transfers():
            pair = one.src_rank, one.dst_rank
            sizes[pair] = sizes.get(pair, 0) + one.nbytes
        for (src, dst), nbytes in sizes.items():
            if src == rank:
                self.out[dst] = torch.ones(nbytes, dtype=torch.uint8)
            if dst == rank:
                self.into[src] = torch.empty(nbytes, dtype=torch.uint8)

    def __call__(self) -> None:
        works = [dist.irecv(buffer, src) for src, buffer in self.into.items()]
        works += [dist.isend(buffer, dst) for dst, buffer in self.out.items()]
        for work in works:
            work.wait()


class _Packed:
    """One message per piece: of the tensor itself where the piece is contiguous there, else of a buffer, which is
    packed or unpacked."""

    def __init__(self, moved: sm.Refit, rank: int, own: dict[str, torch.Tensor]) -> None:
        side = moved.trainer if rank < 4 else moved.engines["engine"]
        stored = {(0, name): tensor for name, tensor in own.items()}
        tensors = {name: make_view(stored, slot) for name, slot in side.slots(rank).items()}
        # (peer, message, view to be packed or unpacked, or None)
        self.out: list[tuple[int, torch.Tensor, torch.Tensor | None]] = []
        self.into: list[tuple[int, torch.Tensor, torch.Tensor | None]] = []
        for one in moved.plan.transfers():
            if one.src_rank == rank:
                view = tensors[one.src_tensor][one.src_slices]
                self.out.append((one.dst_rank, *self._buffer(view)))
            if one.dst_rank == rank:
                view = tensors[one.dst_tensor][one.dst_slices]
                self.into.append((one.src_rank, *self._buffer(view)))

    def _buffer(self, view: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The memory of a message, and the view that it is copied from or to."""
        return (view, None) if view.is_contiguous() else (torch.empty(view.shape), view)

    def __call__(self) -> None:
        receives = [dist.irecv(message, src) for src, message, _ in self.into]
        sends = []
        for dst, message, view in self.out:
            if view is not None:
                message.copy_(view)
            sends.append(dist.isend(message, dst))
        for work, (_, message, view) in zip(receives, self.into, strict=True):
            work.wait()
            if view is not None:
                view.copy_(message)
        for work in sends:
            work.wait()


class _Gather:
    """Every logical tensor made whole and sent to every engine rank, which takes its part: what loaders do."""

    def __init__(self, moved: sm.Refit, rank: int, own: dict[str, torch.Tensor]) -> None:
        self.rank = rank
        self.parts = []
        self.groups = {root: dist.new_group([root, *range(4, 8)]) for root in (0, 2)}
        pairs = {stage: dist.new_group([stage, stage + 1]) for stage in (0, 2)}
        for name, layout in moved.trainer.layouts.items():
            root = layout.mesh.ranks[0]
            whole = torch.empty(layout.shape)
            self.parts.append((name, root, pairs[root], whole))
        self.bound = moved.engines["engine"]
        self.slots = self.bound.slots(rank) if rank > 3 else {}
        self.own = own

    def __call__(self) -> None:
        for name, root, pair, whole in self.parts:
            if self.rank in (root, root + 1):
                # The other half of the stage's tensor, at the rank that will send it.
                part = torch.empty(whole.numel() // 2)
                if self.rank == root:
                    dist.recv(part, group_src=1, group=pair)
                else:
                    dist.send(part, group_dst=0, group=pair)
            if self.rank == root or self.rank > 3:
                dist.broadcast(whole, root, group=self.groups[root])
            if self.rank > 3:
                slot = self.slots[name]
                held = self.bound.layouts[name].runs(self.rank)
                box = tuple(slice(r.segments[0][1], r.segments[0][1] + len(r)) for r in held)
                self.own[slot.native][slot.cut].copy_(whole[box])


def main() -> None:
    plan()
    for task, ranks in ((move, 4), (exchange, 8)):
        for line in _run(task, ranks):
            print(line)


def _run(task: Callable[..., None], ranks: int) -> list[str]:
    """What the task's processes say, in words."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    processes = [context.Process(target=task, args=(rank, port, results)) for rank in range(ranks)]
    for process in processes:
        process.start()
    found = sorted(results.get(timeout=500) for _ in processes)
    for process in processes:
        process.join()
    return list(_word_calls(found) if task is move else _word_exchange(found))


def _word_calls(
    found: Sequence[tuple[int, int, float, float, float, float, float]],
) -> Iterator[str]:
    for rank, stored, *seconds in found:
        made, prepared, first, later, hand = (f"{1000 * each:.0f} ms" for each in seconds)
        yield (
            f"rank {rank}: 45,395 local views of {stored} tensors: Refit {made}, prepare {prepared}, "
            f"first call {first} (by hand {hand}), next {later}"
        )


def _word_exchange(
    found: Sequence[tuple[int, int, dict[str, list[tuple[float, float]]]]],
) -> Iterator[str]:
    """The least seconds of all turns, and the least processor seconds of all ranks together."""
    best = {}
    for name in found[0][2]:
        turns = list(zip(*(by_name[name] for _, _, by_name in found), strict=True))
        clock = min(max(seconds for seconds, _ in turn) for turn in turns)
        best[name] = clock, min(sum(used for _, used in turn) for turn in turns)
    nbytes = found[0][1] / 1e9
    for name, each in best.items():
        clock, used = each
        ratios = [one / ours for one, ours in zip(each, best["refit"], strict=True)]
        yield (
            f"{name:34} {nbytes:.2f} GB {clock:6.2f} s, {ratios[0]:5.2f} times the refit; "
            f"processors {used:6.2f} s, {ratios[1]:5.2f} times"
        )


if __name__ == "__main__":
    main()
