"""What workers do: random programs of calls on one group, by movers of all kinds, each beside a plain one.

Imported by workers, so no pytest here.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

import shardmath as sm
import shardmath_torch as smt
from shardmath import transforms
from tests.distributed.tasks.breaks import Said, ends
from tests.distributed.tasks.cases import random_layout
from tests.distributed.tasks.scenarios import results, tensor_of

KINDS = ("plain", "changes", "transformed")
WAYS = ("one after another", "beside", "in a block")
LYING = ("contiguous", "transposed", "strided")


@functools.cache
def own_group() -> Any:
    """A group of all workers, on which moves may go on beside."""
    return dist.new_group()


class Sides(NamedTuple):
    """What is moved, by name, and by which rule where it is transformed."""

    src: dict[str, sm.Layout]
    dst: dict[str, sm.Layout]
    rules: dict[str, Any]


def draw_sides(rng: random.Random, kind: str) -> Sides:
    """Two tensors between random layouts; those that are transformed are of other types at the two ends."""
    while True:
        try:
            return _try_sides(rng, kind)
        except sm.ShardError:
            continue


def _try_sides(rng: random.Random, kind: str) -> Sides:
    op = rng.choice(("sum", "max")) if kind == "plain" and rng.random() < 0.4 else None
    src, dst = {}, {}
    for name in ("v", "w"):
        shape = tuple(rng.choice((0, 1, 3, 8, 12)) for _ in range(rng.randrange(1, 4)))
        dtype = rng.choice(("float32", "bfloat16", "int32"))
        there = dtype
        if kind == "transformed" and name == "w":
            dtype, there = "float32", "bfloat16"
        src[name] = random_layout(rng, shape, dtype, op, 8)
        dst[name] = random_layout(rng, shape, there, None, 8)
    rules = {}
    if kind == "transformed":
        rules = {"w": transforms.Cast("bfloat16", at=rng.choice(("source", "destination")))}
        sm.transforms.transformed(src, dst, rules)
    sm.plan({"v": src["v"]}, {"v": dst["v"]})
    return Sides(src, dst, rules)


class Twin:
    """A mover of some kind, and a plain one of the same plan, each with destinations of its own."""

    def __init__(self, rank: int, rng: random.Random, group: Any) -> None:
        self.kind = rng.choice(KINDS)
        self.name = f"{self.kind}, "
        self._rank = rank
        self._rng = rng
        self._sides = draw_sides(rng, self.kind)
        self.options = {
            "commit": rng.choice(("direct", "all")),
            "agree": rng.choice(("every", "once")),
            "max_inflight_bytes": rng.choice((None, 4096)),
        }
        self.name += ", ".join(map(str, self.options.values()))
        self._wholes = {name: self._draw(name) for name in self._sides.src}
        self.src = {}
        lying = rng.choice(LYING)
        for key, layout in self._sides.src.items():
            if rank in layout.mesh:
                self.src[key] = _make_empty(layout, rank, lying)
        self.out, self._plain_out = self._make_out(lying), self._make_out("contiguous")
        self.move = self._compile(self.options, group)
        self._plain = self._compile({}, group, is_plain=True)
        self.commits = 0

    def _make_out(self, lying: str) -> dict[str, torch.Tensor]:
        held = {key: layout for key, layout in self._sides.dst.items() if self._rank in layout.mesh}
        return {key: _make_empty(layout, self._rank, lying) for key, layout in held.items()}

    def _compile(self, options: dict[str, Any], group: Any, is_plain: bool = False) -> Any:
        src, dst, rules = self._sides
        if rules:
            t = sm.transforms.transformed(src, dst, rules)
            return smt.compile_transformed(t, group=group, timeout=30.0, **options)
        plan = sm.plan(src, dst)
        if is_plain or self.kind == "plain":
            return smt.compile(plan, group=group, timeout=30.0, **options)
        return smt.compile_changes(plan, group=group, timeout=30.0, **options)

    def _draw(self, name: str) -> torch.Tensor:
        layout = self._sides.src[name]
        found = [self._rng.randrange(0, 100) for _ in range(int(np.prod(layout.shape)))]
        return torch.tensor(found).reshape(layout.shape).to(getattr(torch, layout.dtype))

    def change(self) -> None:
        """Other numbers in none, some or all of the cells, on all ranks alike."""
        share = self._rng.choice((0.0, 0.1, 1.0))
        for name, whole in self._wholes.items():
            drawn = [self._rng.random() < share for _ in range(whole.numel())]
            which = torch.tensor(drawn, dtype=torch.bool)
            other = self._draw(name)
            self._wholes[name] = torch.where(which.reshape(whole.shape), other, whole)
        self.write()

    def write(self, value: float | None = None) -> None:
        """Give the rank's sources what they are to hold, or rubbish."""
        for key, tensor in self.src.items():
            indices = self._sides.src[key].indices(self._rank)
            own = np.ix_(*(np.flatnonzero(index >= 0) for index in indices))
            there = np.ix_(*(index[index >= 0] for index in indices))
            held = self._wholes[key][there]
            tensor[own] = held if value is None else torch.full_like(held, value)

    def draw_call(self) -> dict[str, Any]:
        """Options of a call that all ranks must pass alike."""
        call: dict[str, Any] = {"acknowledge": self._rng.random() < 0.3}
        partial = any(layout.partial for layout in self._sides.src.values())
        if not partial and self._rng.random() < 0.3:
            call["check"] = "digest"
        if self.kind == "changes" and self._rng.random() < 0.2:
            call["whole"] = True
        return call

    def __call__(self, **call: Any) -> Any:
        self.commits += self.options["commit"] == "all"
        return self.move(self.src or None, out=self.out or None, **call)

    def check(self) -> str:
        """What is wrong with what has come; "" for nothing."""
        self._plain(self.src or None, out=self._plain_out or None)
        if results(self.out) != results(self._plain_out):
            return "other bytes than by a plain move"
        found = self.move.version, self.move.torn, self.move.in_doubt
        return "" if found == (self.commits, (), False) else f"{found}"


def _make_empty(layout: sm.Layout, rank: int, lying: str) -> torch.Tensor:
    """Memory for the rank's local tensor, all of it 7."""
    shape = layout.local_shape(rank)
    seven = torch.full(shape, 7).to(getattr(torch, layout.dtype))
    data = seven.flatten().view(torch.uint8).numpy().tobytes()
    return tensor_of(shape, layout.dtype, data, lying)


def run_programs(rank: int, seeds: Sequence[int], steps: int) -> list[Said]:
    """Of each seed what went wrong; "" for nothing."""
    return [ends_by(lambda seed=seed: _run(rank, seed, steps)) for seed in seeds]  # type: ignore[misc]


def ends_by(act: Callable[[], str]) -> Said:
    """What it gives, or raises."""
    found: list[str] = []
    return ends(lambda: found.append(act())) or found[0]


def _run(rank: int, seed: int, steps: int) -> str:
    rng = random.Random(seed)
    # What ranks need not do alike.
    own = random.Random(seed * 100 + rank)
    group = own_group()
    twins = [Twin(rank, rng, group) for _ in range(2)]
    done = []
    for _ in range(steps):
        way = rng.choice(WAYS)
        some = rng.sample(twins, rng.randrange(1, len(twins) + 1))
        for twin in some:
            twin.change()
        done.append(f"{way}: {', '.join(twin.name for twin in some)}")
        if way == "one after another":
            for twin in some:
                twin(**twin.draw_call())
        elif way == "beside":
            _move_beside(rank, some, rng, own, twins, group)
        else:
            _move_in_block([twin for twin in some if twin.options["commit"] == "all"], rng, group)
            some = [twin for twin in some if twin.options["commit"] == "all"]
        for twin in some:
            wrong = twin.check()
            if wrong:
                return f"{wrong} after {done}"
    return ""


def _move_beside(
    rank: int,
    some: list[Twin],
    rng: random.Random,
    own: random.Random,
    twins: list[Twin],
    group: Any,
) -> None:
    """Some ranks' moves go on beside, among a compile and collectives of other groups."""
    handles = []
    for twin in some:
        call = twin.draw_call()
        found = twin(async_op=own.random() < 0.7, **call)
        if isinstance(found, smt.Handle):
            handles.append(found)
        if rng.random() < 0.2:
            dist.all_reduce(torch.ones(4))
        if rng.random() < 0.2 and len(twins) < 3:
            twins.append(Twin(rank, rng, group))
    for handle in own.sample(handles, len(handles)):
        handle.wait()
        assert handle.done()
        handle.wait()


def _move_in_block(some: list[Twin], rng: random.Random, group: Any) -> None:
    """All of them, whose sources change before the end."""
    is_named = rng.random() < 0.5
    block: AbstractContextManager[None] = nullcontext()
    if some:
        block = smt.commit(*(twin.move for twin in some)) if is_named else smt.commit(group)
    with block:
        for twin in some:
            call = twin.draw_call()
            call.pop("check", None)
            before = results(twin.out)
            twin(**call)
            twin.write(-1.0)
            assert results(twin.out) == before
    for twin in some:
        twin.write()
