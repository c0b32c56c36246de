"""What workers do with transforms: moves by way of other tensors, and the same with something wrong. No pytest here."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

import shardmath as sm
import shardmath_torch as smt
from shardmath import transforms
from tests.distributed.tasks.scenarios import Bytes, bytes_of, results, tensors_of


@dataclass(frozen=True)
class Moved:
    """Two sides, their rules, and every rank's tensors: {rank: tensors}."""

    src: Mapping[str, Any]
    dst: Mapping[str, Any]
    rules: Mapping[str, Any]
    tensors_src: Mapping[int, Bytes]
    tensors_dst: Mapping[int, Bytes]
    lying: str = "contiguous"
    options: Mapping[str, Any] = field(default_factory=dict)
    nodes: int = 0


def move_transformed(rank: int, cases: Sequence[Moved]) -> list[tuple[dict[str, bytes], bool]]:
    """Each case's destinations after two moves, and whether wire buffers stayed where they were."""
    out = []
    for case in cases:
        src = tensors_of(case.tensors_src.get(rank), case.lying)
        dst = tensors_of(case.tensors_dst.get(rank), case.lying)
        t = sm.transforms.transformed(case.src, case.dst, case.rules)
        given: Any = None
        if case.nodes:
            nodes = sm.Topology(ranks_per_node=8 // case.nodes)
            given = sm.schedule(sm.plan(t.src, t.dst), topology=nodes)
        move = smt.compile_transformed(t, given, timeout=30.0, **case.options)
        at = addresses(move)
        move(src, out=dst)
        first = results(dst)
        move(src, out=dst)
        out.append((first, results(dst) == first and addresses(move) == at))
    return out


def addresses(move: Any) -> list[int]:
    """Where the wire buffers are."""
    workers = [part.worker for side in move._ends._parts for part in side if part.worker]
    return [one.data_ptr() for worker in workers for one in worker.buffers.values()]


def fails(values: Any) -> Any:
    raise KeyError("no such scale")


def same(values: Any) -> Any:
    return values[0] if isinstance(values, tuple) else (values,)


def two(values: Any) -> Any:
    return values, values


def longer(values: Any) -> Any:
    return (torch.cat([values, values]),)


def wider(values: Any) -> Any:
    return (values.double(),)


WRONG = {
    "prepare": (fails, same),
    "finalize": (same, fails),
    "number": (two, same),
    "shape": (longer, same),
    "dtype": (wider, same),
}


def custom(functions: tuple[Any, Any]) -> transforms.Custom:
    """Float32 as it is, by these functions of tensors."""
    parts = (transforms.Component("data", "float32"),)
    return transforms.Custom("c", parts, same, same, functions)


ROWS = sm.Layout((8, 6), sm.Mesh(tp=2), "(tp n) h")
COLUMNS = sm.Layout((8, 6), sm.Mesh(tp=2, ranks=(1, 2)), "n (tp h)")


NOTHING: Mapping[str, Any] = {}


def go_wrong(
    rank: int, who: int, how: str, options: Mapping[str, Any] = NOTHING
) -> tuple[str, bool, bool, float]:
    """A good move, one that goes wrong on one rank, a good one: the error, whether nothing changed, whether the last
    was right, seconds."""
    broken = [False]

    def switch(good: Any, bad: Any) -> Any:
        return lambda values: (bad if broken[0] and rank == who else good)(values)

    functions = switch(same, WRONG[how][0]), switch(same, WRONG[how][1])
    t = sm.transforms.transformed({"w": ROWS}, {"w": COLUMNS}, {"w": custom(functions)})
    move = smt.compile_transformed(t, timeout=20.0, **options)
    src, dst = locals_of(rank)
    move(src, out=dst, acknowledge=True)
    for tensor in dst.values() if dst else ():
        tensor.fill_(-1.0)
    broken[0] = True
    error, start = "", time.monotonic()
    try:
        move(src, out=dst, acknowledge=True)
    except sm.ExchangeError as raised:
        error = str(raised)
    took = time.monotonic() - start
    kept = all(bool((tensor == -1).all()) for tensor in (dst or {}).values())
    broken[0] = False
    try:
        move(src, out=dst, acknowledge=True)
    except sm.ExchangeError:
        return error, kept, False, took
    return error, kept, right(rank, dst), took


def locals_of(rank: int) -> tuple[Any, Any]:
    """The rank's rows and columns of 0, 1, 2, ..."""
    whole = torch.arange(48.0).reshape(8, 6)
    src = {"w": whole[ROWS.indices(rank)[0]].clone()} if rank in ROWS.mesh else None
    dst = {"w": torch.zeros(8, 3)} if rank in COLUMNS.mesh else None
    return src, dst


def right(rank: int, dst: Any) -> bool:
    """Whether the rank has its columns."""
    whole = torch.arange(48.0).reshape(8, 6)
    return dst is None or torch.equal(dst["w"], whole[:, COLUMNS.indices(rank)[1]])


# Hooks of Megatron-Core


class Hook:
    """As a ReshardTransform: bfloat16 in two halves of bits, the destination in memory of its own."""

    def __init__(self, stored: dict[str, torch.Tensor], breaks: str = "") -> None:
        self.stored = stored
        self.breaks = breaks
        self.calls: list[tuple[str, str, str]] = []

    def note(self, what: str, name: str, slices: Any) -> None:
        self.calls.append((what, name, str([(s.start, s.stop) for s in slices])))
        if self.breaks == what:
            raise RuntimeError(f"no {what}")

    def should_transform(self, name: str) -> bool:
        if self.breaks == "should_transform":
            raise RuntimeError("no should_transform")
        return name.endswith("weight")

    def prepare_send(self, name: str, slices: Any, parameter: Any) -> list[torch.Tensor]:
        assert isinstance(parameter, torch.nn.Parameter)
        self.note("prepare_send", name, slices)
        bits = parameter.data[slices].contiguous().to(torch.bfloat16).view(torch.int16)
        sent = [(bits & 255).to(torch.uint8), (bits >> 8 & 255).to(torch.uint8)]
        return self.bend("send", sent)

    def prepare_recv(self, name: str, slices: Any) -> list[torch.Tensor]:
        self.note("prepare_recv", name, slices)
        shape = self.stored[name][slices].shape
        return self.bend("recv", [torch.empty(shape, dtype=torch.uint8) for _ in range(2)])

    def finalize_recv(self, name: str, slices: Any, buffers: list[torch.Tensor]) -> None:
        self.note("finalize_recv", name, slices)
        low, high = (one.to(torch.int16) for one in buffers)
        self.stored[name][slices].copy_((low | high << 8).view(torch.bfloat16))

    def bend(self, end: str, made: list[torch.Tensor]) -> list[torch.Tensor]:
        """Something wrong with what was made."""
        bent = {
            f"{end} number": lambda: made[:1],
            f"{end} shape": lambda: [made[0], made[1].flatten()],
            f"{end} dtype": lambda: [made[0], made[1].to(torch.int8)],
            f"{end} none": lambda: [made[0], None],
        }
        return bent.get(self.breaks, lambda: made)()


HALVES = (transforms.Component("low", "uint8"), transforms.Component("high", "uint8"))
DEALT = sm.Layout(
    (8, 6), sm.Mesh(tp=2, ranks=(1, 2)), {"tp": sm.BlockCyclic(0, 2)}, dtype="bfloat16"
)


def move_by_hook(
    rank: int, dst: sm.Layout, who: int = -1, when: str = "", how: str = ""
) -> tuple[str, bool, list[tuple[str, str, str]], float]:
    """A move by a hook that may break on one rank, when compiled or later, and a good one: the error, whether the last
    was right, the calls of the hook, seconds."""
    stored = {}
    if rank in dst.mesh:
        stored["a.weight"] = torch.zeros(dst.local_shape(rank), dtype=torch.bfloat16)
    hook = Hook(stored, how if (rank, when) == (who, "compile") else "")
    src, _ = locals_of(rank)
    named = {"a.weight": src["w"], "a.bias": torch.ones(3)} if src else None
    biases = {} if rank not in dst.mesh else {"a.bias": torch.zeros(3)}
    error, start = "", time.monotonic()
    try:
        move = compile_hook(hook, dst)
        if rank == who:
            hook.breaks = how
        move(named, out=biases or None, acknowledge=True)
    except sm.ExchangeError as raised:
        error = str(raised)
    took = time.monotonic() - start
    hook.breaks = ""
    calls = list(hook.calls)
    try:
        if when != "move":
            move = compile_hook(hook, dst)
        move(named, out=biases or None, acknowledge=True)
    except sm.ExchangeError:
        return error, False, calls, took
    whole = torch.arange(48.0).reshape(8, 6).to(torch.bfloat16)
    good = True
    if rank in dst.mesh:
        rows, columns = dst.indices(rank)
        good = torch.equal(stored["a.weight"], whole[rows][:, columns])
        good = good and bool((biases["a.bias"] == 1).all())
    return error, good, calls, took


def compile_hook(hook: Hook, dst: sm.Layout) -> Any:
    """The hook's mover of a weight, and of a bias that it does not transform."""
    transform = smt.megatron_hook(hook, HALVES)
    here = {"a.weight": ROWS, "a.bias": sm.Layout((3,), ROWS.mesh, "n")}
    there = {"a.weight": dst, "a.bias": sm.Layout((3,), dst.mesh, "n")}
    t = sm.transforms.transformed(here, there, {"*.weight": transform})
    return smt.compile_transformed(t, timeout=20.0)


def compile_apart(rank: int, how: str) -> str:
    """The error of a compile in which one rank has other transforms, or another plan; "" for none."""
    at = "destination" if rank == 3 and how == "transforms" else "source"
    wide = sm.Layout((8, 6), sm.Mesh(tp=2), "(tp n) h", dtype="float32")
    narrow = sm.Layout((8, 6), sm.Mesh(tp=2), "(tp n) h", dtype="bfloat16")
    given: Any = sm.transforms.transformed(
        {"w": wide}, {"w": narrow}, {"w": transforms.Cast("bfloat16", at=at)}
    )
    plan = None
    if rank == 3 and how == "plan":
        plan = sm.plan({"w": wide}, {"w": wide})
    if rank == 3 and how == "type":
        given = sm.plan({"w": wide}, {"w": wide})
    try:
        smt.compile_transformed(given, plan, timeout=20.0)
    except sm.ExchangeError as error:
        return str(error)
    return ""


def memory(rank: int, case: Moved) -> tuple[int, bytes]:
    """Bytes of wire buffers, and the destination of a move in its own memory."""
    move = smt.compile_transformed(
        sm.transforms.transformed(case.src, case.dst, case.rules), timeout=30.0
    )
    src, dst = tensors_of(case.tensors_src.get(rank)), tensors_of(case.tensors_dst.get(rank))
    # A trainer's parameters need gradients; a backward that needs what a destination was has to see that it changed.
    for tensor in (src or {}).values():
        tensor.requires_grad_()
    before = {key: tensor._version for key, tensor in (dst or {}).items()}
    move(src, out=dst)
    assert all(tensor._version > before[key] for key, tensor in (dst or {}).items())
    return move.wire_bytes, b"" if dst is None else bytes_of(next(iter(dst.values())))


def cut_apart(rank: int) -> tuple[str, str, bool]:
    """The errors of sides that cut a block, on every rank, and of boxes that do, on one; and whether a good move then
    goes well."""
    parts = (transforms.Component("low", "uint8"), transforms.Component("high", "uint8", (4,)))
    hook = smt.megatron_hook(Hook({"a.weight": torch.zeros(8, dtype=torch.bfloat16)}), parts)
    whole = sm.Layout((8,), sm.Mesh(), "n")
    apart = sm.Layout((8,), sm.Mesh(ranks=(2,)), "(n)=<2:4 -1 0:2 4:8>")
    cut = sm.Layout((8,), sm.Mesh(tp=4), "(tp n)")
    errors = []
    for held in (cut, apart):
        try:
            t = sm.transforms.transformed({"a.weight": held}, {"a.weight": whole}, {"*": hook})
            smt.compile_transformed(t, timeout=20.0)
            errors.append("")
        except sm.ShardError as error:
            errors.append(str(error))
    move = smt.compile_transformed(
        sm.transforms.transformed({"w": ROWS}, {"w": COLUMNS}, {"w": custom((same, same))}),
        timeout=20.0,
    )
    src, dst = locals_of(rank)
    move(src, out=dst)
    return errors[0], errors[1], right(rank, dst)
