"""What workers do: moves of given arrays, and the same with something wrong. Imported by workers, so no pytest here."""

from __future__ import annotations

import functools
import gc
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import shardmath as sm
import shardmath_torch as smt
from tests.distributed.tasks.device import DEVICE

Bytes = Mapping[str, tuple[tuple[int, ...], str, bytes]]
"""Tensors by local buffer key, as (shape, dtype, bytes)."""


@dataclass(frozen=True)
class Case:
    """A plan and every rank's tensors before the move: {rank: tensors}."""

    plan: sm.Plan
    src: Mapping[int, Bytes]
    dst: Mapping[int, Bytes]
    options: Mapping[str, Any] = field(default_factory=dict)
    lying: str = "contiguous"
    group: tuple[int, ...] = tuple(range(8))


@functools.cache
def group_of(ranks: tuple[int, ...]) -> Any:
    """A group of these ranks; all workers ask for it at the same time."""
    return dist.group.WORLD if len(ranks) == dist.get_world_size() else dist.new_group(list(ranks))


def tensor_of(
    shape: tuple[int, ...], dtype: str, data: bytes, lying: str = "contiguous"
) -> torch.Tensor:
    """The tensor, lying in memory in a chosen way."""
    kind = getattr(torch, dtype)
    flat = (
        torch.frombuffer(bytearray(data), dtype=torch.uint8).view(kind)
        if data
        else torch.empty(0, dtype=kind)
    )
    plain = flat.reshape(shape).to(DEVICE)
    if lying == "contiguous":
        return plain.clone()
    wider = [n + 2 for n in shape]
    order = list(range(len(shape)))
    if lying == "transposed":
        order = order[::-1]
        wider = wider[::-1]
    base = torch.zeros([*wider, 2 * kind.itemsize], dtype=torch.uint8, device=DEVICE).view(kind)
    cells = base[..., 0].permute(order)[tuple(slice(1, 1 + n) for n in shape)]
    cells.copy_(plain)
    return cells


def bytes_of(tensor: torch.Tensor) -> bytes:
    """The tensor's elements row-major."""
    plain = tensor.clone(memory_format=torch.contiguous_format)
    return plain.view(-1).view(torch.uint8).cpu().numpy().tobytes()


def tensors_of(given: Bytes | None, lying: str = "contiguous") -> Any:
    """What a rank passes: None, a tensor, or a dict."""
    if not given:
        return None
    out = {key: tensor_of(*value, lying=lying) for key, value in given.items()}
    return out[""] if set(out) == {""} else out


def results(out: Any) -> dict[str, bytes]:
    """The bytes of what a rank passed as out."""
    named = {} if out is None else {"": out} if isinstance(out, torch.Tensor) else out
    return {key: bytes_of(t) for key, t in named.items()}


def move_cases(rank: int, cases: Sequence[Case]) -> list[dict[str, bytes]]:
    """Each case's destinations after one move."""
    out = []
    for case in cases:
        group = group_of(case.group)
        if rank not in case.group:
            out.append({})
            continue
        src, dst = (tensors_of(side.get(rank), case.lying) for side in (case.src, case.dst))
        move = smt.compile(case.plan, group=group, timeout=30.0, **case.options)
        move(src, out=dst)
        out.append(results(dst))
    return out


def move_again(rank: int, cases: Sequence[Case]) -> list[dict[str, bytes]]:
    """The destinations of all cases, which have one plan, moved by one mover."""
    move, out = smt.compile(cases[0].plan, timeout=30.0), []
    for case in cases:
        src, dst = (tensors_of(side.get(rank), case.lying) for side in (case.src, case.dst))
        move(src, out=dst)
        out.append(results(dst))
    return out


def resized(t: torch.Tensor, nbytes: int) -> torch.Tensor:
    """A copy whose storage was made so many bytes long."""
    out = t.clone()
    out.untyped_storage().resize_(nbytes)
    return out


class Wrapper(torch.Tensor):
    """A subclass that has no memory and can do nothing."""

    @staticmethod
    def __new__(cls, t: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(
            cls, t.shape, dtype=t.dtype, strides=t.stride(), device=t.device
        )

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"no {func}")


class Touchy(torch.Tensor):
    """A subclass on plain memory that stops whoever calls what a move needs."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in ("as_strided", "copy_", "view", "detach"):
            raise RuntimeError(f"no {func.__name__}")
        return super().__torch_function__(func, types, args, kwargs or {})


def inference(t: torch.Tensor) -> torch.Tensor:
    """A copy that may be written in inference mode only."""
    with torch.inference_mode():
        return t.clone()


def unusual_moves(rank: int, case: Case) -> list[dict[str, bytes]]:
    """The destinations of moves from and into unusual tensors that have memory; `lying` sends them through staging."""
    out = []
    for kind in (inference, lambda t: t.as_subclass(Touchy)):
        src, dst = (
            tensors_of(case.src.get(rank), case.lying),
            tensors_of(case.dst.get(rank), case.lying),
        )
        made = kind(dst)
        with torch.inference_mode():  # staging that is made in it serves moves outside, too
            smt.compile(case.plan, timeout=20.0)(src, out=made.clone())
        smt.compile(case.plan, timeout=20.0)(kind(src), out=made)
        with torch._C.DisableTorchFunctionSubclass():
            out.append(results(made.as_subclass(torch.Tensor)))
    return out


def _first(tensors: Any) -> tuple[str, torch.Tensor]:
    return next(iter(tensors.items())) if isinstance(tensors, dict) else ("", tensors)


def _with(tensors: Any, key: str, new: Any) -> Any:
    return {**tensors, key: new} if isinstance(tensors, dict) else new


def broken(how: str, src: Any, dst: Any) -> tuple[Any, Any]:
    """The arguments of a move with one thing wrong."""
    side, _, what = how.partition(" ")
    other, given = (dst, src) if side == "src" else (src, dst)
    key, t = _first(given)
    if what == "alias":
        buffer = t.new_zeros(t.numel() + 1)
        return _with(src, _first(src)[0], buffer[1 : 1 + src.numel()].view(src.shape)), buffer[
            : dst.numel()
        ].view(dst.shape)
    changed = {
        "shape": lambda: _with(given, key, t.new_zeros((*t.shape, 2))),
        "dtype": lambda: _with(given, key, t.to(torch.float64)),
        "device": lambda: _with(given, key, t.to("meta")),
        "none": lambda: None,
        "missing": lambda: {k: v for k, v in given.items() if k != key},
        "extra": lambda: {**given, "zz": t},
        "bare": lambda: t,
        "dict": lambda: {"w": t},
        "list": lambda: [t],
        "number": lambda: _with(given, key, 7),
        "sparse": lambda: _with(given, key, t.to_sparse()),
        "expanded": lambda: _with(given, key, t[:1].expand(t.shape)),
        "freed": lambda: _with(given, key, resized(t, 0)),
        "shrunk": lambda: _with(given, key, resized(t, 8)),
        "wrapper": lambda: _with(given, key, Wrapper(t)),
    }[what]()
    return (changed, other) if side == "src" else (other, changed)


def bad_move(
    rank: int, case: Case, who: Sequence[int], how: str
) -> tuple[str, bool, dict[str, bytes]]:
    """A good move, a bad one on some ranks, a good one: the error, whether destinations stayed so, the end."""
    src, dst = tensors_of(case.src.get(rank)), tensors_of(case.dst.get(rank))
    move = smt.compile(case.plan, timeout=20.0, **case.options)
    move(src, out=dst)
    for t in dst.values() if isinstance(dst, dict) else [] if dst is None else [dst]:
        t.view(torch.uint8).fill_(113)
    before = results(dst)
    wrong, error = broken(how, src, dst) if rank in who else (src, dst), ""
    try:
        move(wrong[0], out=wrong[1])
    except sm.ExchangeError as raised:
        error = str(raised)
    same = results(dst) == before
    move(src, out=dst)
    return error, same, results(dst)


def compile_with(
    rank: int, plans: Sequence[Any], options: Sequence[Mapping[str, Any]], group: tuple[int, ...]
) -> str:
    """The error of a compile for which each rank has a plan and options of its own; "" for none."""
    made = group_of(group)
    if rank not in group:
        return ""
    try:
        smt.compile(
            plans[rank % len(plans)],
            group=made,
            **{"timeout": 20.0, **options[rank % len(options)]},
        )
    except sm.ExchangeError as error:
        return str(error)
    return ""


def outsider(rank: int, plan: sm.Plan, group: tuple[int, ...]) -> str:
    """The error of a rank that compiles on a group that it is not in."""
    made = group_of(group)
    if rank in group:
        return ""
    try:
        smt.compile(plan, group=made)
    except sm.ExchangeError as error:
        return str(error)
    return ""


def staging(rank: int, case: Case, moves: int) -> list[tuple[int, int, int]]:
    """After each move: (bytes of staging held, its address, bytes that torch has allocated during the move).

    What the first move allocates is not looked at: it makes the staging, and torch's profiler takes longer than a move.
    """
    src, dst = (
        tensors_of(case.src.get(rank), case.lying),
        tensors_of(case.dst.get(rank), case.lying),
    )
    move = smt.compile(case.plan, timeout=30.0, **case.options)
    out = []
    for turn in range(moves):
        most = 0
        if turn:
            with torch.profiler.profile(
                activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
            ) as seen:
                move(src, out=dst)
            most = sum(max(0, e.self_cpu_memory_usage) for e in seen.key_averages())
        else:
            move(src, out=dst)
        with move._carrier._engine._staging.lend(move.staging_bytes) as block:
            out.append((move.staging_bytes, block.memory.data_ptr(), most))
    return out


def shared_staging(rank: int, cases: Sequence[Case]) -> tuple[list[int], list[int]]:
    """Bytes of staging that each case's mover needs, and of the blocks that there are after moves of all, twice."""
    movers = [smt.compile(case.plan, timeout=30.0) for case in cases]
    for move, case in [*zip(movers, cases, strict=True)] * 2:
        move(tensors_of(case.src.get(rank)), out=tensors_of(case.dst.get(rank)))
    blocks = [block.memory.nbytes for block in movers[0]._carrier._engine._staging._free_blocks]
    return [move.staging_bytes for move in movers], blocks


def begin_again(rank: int, ports: Sequence[int]) -> tuple[list[bool], int]:
    """Moves between ranks 0 and 1 under one default group after the other: whether right; old ones still alive."""
    some = sm.Mesh(tp=2)
    src, dst = sm.Layout((4, 6), some, "(tp n) h"), sm.Layout((4, 6), some, "n (tp h)")
    moved, worlds = [], []
    for port in ports:
        dist.destroy_process_group()
        store = dist.TCPStore("127.0.0.1", port, None, is_master=rank == 0, wait_for_workers=False)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=3)
        worlds.append(weakref.ref(dist.group.WORLD))
        given = torch.arange(24.0).view(4, 6).chunk(2)[rank] if rank < 2 else torch.empty(0)
        out = smt.redistribute(given, dst, layout=src)
        local = out.to_local() if isinstance(out, DTensor) else out
        moved.append(rank == 2 or local.equal(torch.arange(24.0).view(4, 6).chunk(2, 1)[rank]))
        del out, local
        dist.barrier()
    gc.collect()
    return moved, sum(world() is not None for world in worlds)


def dies(rank: int, case: Case, victim: int, when: str, timeout: float) -> tuple[str, str, float]:
    """A move in which the victim kills or stops itself; on the others (error, error of the next move, seconds)."""
    import os
    import signal

    from shardmath_gloo.wire import GlooWire

    src, dst = tensors_of(case.src.get(rank)), tensors_of(case.dst.get(rank))
    move = smt.compile(case.plan, timeout=timeout, **case.options)
    move(src, out=dst)
    how, _, at = when.partition(" ")
    number = signal.SIGKILL if how == "kill" else signal.SIGSTOP
    if rank == victim:
        if at == "before":
            time.sleep(0.3)
            os.kill(os.getpid(), number)
        posted = [0]
        plain = GlooWire.receive if at == "receive" else GlooWire.send

        def post(self: Any, memory: torch.Tensor, peer: int) -> Any:
            posted[0] += 1
            if posted[0] > 1:
                time.sleep(0.3)
                os.kill(os.getpid(), number)
            return plain(self, memory, peer)

        setattr(GlooWire, at, post)
    start, errors = time.monotonic(), []
    took = 0.0
    for _ in range(2):
        try:
            move(src, out=dst)
            if not errors:
                move(src, out=dst)
            errors.append("")
        except sm.ExchangeError as error:
            errors.append(str(error))
        took = took or time.monotonic() - start
    return errors[0], errors[1], took
