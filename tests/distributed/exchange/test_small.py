"""Many small tensors: what a move does for each of them is a copy, and no more."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import shardmath as sm
from shardmath.plans.programs.part import make_parts
from shardmath_torch.groups import dtypes
from shardmath_torch.moves.exchange.engine import Exchange
from shardmath_torch.moves.exchange.task import Task
from tests.distributed.exchange.test_groups import Group, Recording, make_tensors, time_nothing

COUNT = 100
HERE, THERE = sm.Mesh(tp=2), sm.Mesh(tp=2, ranks=(2, 3))


class Calls(TorchDispatchMode):
    """How often each operation of torch is called."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def make_plan(text: str) -> sm.Plan:
    """Of tensors whose rows are divided, into tensors that are divided like this."""
    sides = []
    for mesh, how in ((HERE, "(tp n) h"), (THERE, text)):
        sides.append({f"w.{n}": sm.Layout((8, 8), mesh, how) for n in range(COUNT)})
    return sm.plan(*sides)


def count_calls(plan: sm.Plan, rank: int, held: bool) -> list[int]:
    """Calls of torch in three moves of one rank; the last is of other tensors."""
    part = next(one for one in make_parts(plan) if one.rank == rank)
    wire: Any = Recording()
    engine = Exchange(Task(part, Group(), wire), apart=1 << 20)
    src, dst = make_tensors(part)
    engine.prepare(src, dst, held)
    found = []
    for turn in range(3):
        if turn == 2:
            src, dst = make_tensors(part)
        with Calls() as calls:
            engine.move(src, dst, time_nothing())
        found.append(sum(calls.counts.values()))
    return found


@pytest.mark.parametrize("rank", [0, 2])
def test_whole_tensors_are_copied_as_they_are(rank: int) -> None:
    """After the first move nothing is made for each, at the sender or the receiver, whatever tensors these are."""
    for held in (False, True):
        first, second, other = count_calls(make_plan("(tp n) h"), rank, held)
        assert first >= COUNT
        assert second < 10
        assert other < 10


def test_pieces_are_found_in_the_tensors_alone() -> None:
    """Where pieces are not whole tensors, views of them are made in every move; of held ones, in none but the first."""
    first, second, other = count_calls(make_plan("n (tp h)"), 0, held=False)
    assert first >= 4 * COUNT
    assert 2 * COUNT <= second <= other <= 2 * COUNT + 10
    _, second, _ = count_calls(make_plan("n (tp h)"), 0, held=True)
    assert second < 10


@pytest.mark.parametrize("dtype", sorted(dtypes.COPIED, key=str), ids=str)
def test_copies_keep_all_bits(dtype: torch.dtype) -> None:
    """Of NaN, too, however elements lie; which is not so of bool."""
    count = 1003
    raw = torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8)
    given = raw.view(dtype)
    apart = torch.zeros(2 * count, dtype=dtype)[::2]
    back = torch.zeros(count, dtype=dtype)
    with torch.inference_mode():
        torch._foreach_copy_([apart], [given])
        torch._foreach_copy_([back], [apart])
    assert torch.equal(back.view(torch.uint8), raw)
    assert torch.bool not in dtypes.COPIED
