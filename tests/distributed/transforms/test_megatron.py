"""Hooks of Megatron-Core plug in unchanged; one that breaks or gives other tensors on one rank is an error on all."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import shardmath as sm
import shardmath_torch as smt
from shardmath.transforms import Component
from tests.distributed.pool import Pool, alone
from tests.distributed.tasks.transforms import (
    COLUMNS,
    DEALT,
    HALVES,
    Hook,
    cut_apart,
    move_by_hook,
)

PLAIN = sm.Layout((8, 6), COLUMNS.mesh, "n (tp h)", dtype="bfloat16")


@pytest.mark.parametrize(("dst", "boxes"), [(PLAIN, 1), (DEALT, 2)], ids=["one box", "boxes"])
def test_a_hook_is_called_for_each_box(pool: Pool, dst: sm.Layout, boxes: int) -> None:
    got = pool.run(move_by_hook, dst)
    for rank, (error, right, calls, _) in enumerate(got):
        assert not error and right
        sent = [call for call in calls if call[0] == "prepare_send"]
        received = [call for call in calls if call[0] == "prepare_recv"]
        stored = [call for call in calls if call[0] == "finalize_recv"]
        # Once on zeros, when ranks compile.
        assert len(sent) == (2 if rank in (0, 1) else 0)
        assert len(received) == len(stored) == (boxes if rank in dst.mesh else 0)


@pytest.mark.parametrize(
    ("who", "when", "how", "words"),
    [
        (1, "compile", "should_transform", "no should_transform"),
        (0, "compile", "prepare_send", "no prepare_send"),
        (2, "compile", "prepare_recv", "no prepare_recv"),
        (
            0,
            "compile",
            "send number",
            "prepare_send of Hook gives 1 tensor for a box of shape (4, 6), not 2: ",
        ),
        (
            0,
            "compile",
            "send shape",
            "gives uint8[24] for a box of shape (4, 6), where uint8[4, 6] is needed",
        ),
        (
            0,
            "compile",
            "send dtype",
            "gives int8[4, 6] for a box of shape (4, 6), where uint8[4, 6] is needed",
        ),
        (
            0,
            "compile",
            "send none",
            "gives NoneType for a box of shape (4, 6), where uint8[4, 6] is needed",
        ),
        (
            2,
            "compile",
            "recv number",
            "prepare_recv of Hook gives 1 tensor for a box of shape (8, 3), not 2: ",
        ),
        (
            2,
            "compile",
            "recv shape",
            "gives uint8[24] for a box of shape (8, 3), where uint8[8, 3] is needed",
        ),
        (
            2,
            "compile",
            "recv dtype",
            "gives int8[8, 3] for a box of shape (8, 3), where uint8[8, 3] is needed",
        ),
        (1, "move", "prepare_send", "prepare of 'a.weight' failed: RuntimeError: no prepare_send"),
        (
            1,
            "move",
            "send shape",
            "gives uint8[24] for a box of shape (4, 6), where uint8[4, 6] is needed",
        ),
    ],
)
def test_a_hook_that_breaks_is_an_error_on_all_ranks(
    pool: Pool, who: int, when: str, how: str, words: str
) -> None:
    """Before anything moves; and the next call works."""
    for error, right, _, took in pool.run(move_by_hook, PLAIN, who, when, how):
        assert words in error and f"rank {who}: " in error
        assert right and took < 10


def test_a_hook_that_breaks_after_arrival_is_this_rank_s_failure() -> None:
    got = alone(3, move_by_hook, PLAIN, 2, "move", "finalize_recv")
    for error, right, _, took in got:
        assert "finalize of 'a.weight' failed: RuntimeError: no finalize_recv" in error
        assert not right and took < 15


def test_a_hook_takes_whole_blocks() -> None:
    """A block whose halves lie apart on a rank is whole as a tensor, not as boxes."""
    blocks = smt.megatron_hook(
        Hook({}), (Component("low", "uint8"), Component("high", "uint8", (4,)))
    )
    apart = sm.Layout((8,), sm.Mesh(), "(n)=<2:4 -1 0:2 4:8>", dtype="bfloat16")
    t = sm.transforms.transformed({"w": apart}, {"w": apart}, {"w": blocks})
    job = next(t.jobs(0, "source"))
    with pytest.raises(sm.ShardError) as caught:
        blocks.make_worker(job._replace(tensor="a.weight"), 0, "source", torch.device("cpu"))
    assert str(caught.value) == (
        "rank 0 holds 0:2 of dimension 0 of 'w', but a hook needs whole blocks of 4; "
        "use a layout that cuts between blocks"
    )


def test_what_a_hook_is() -> None:
    hook = smt.megatron_hook(Hook({}), HALVES)
    assert str(hook) == "a Megatron hook of low uint8, high uint8"
    assert hook.rules(["a.weight", "a.bias"]) == {"a.weight": hook}
    t = sm.transforms.transformed({"w": PLAIN}, {"w": PLAIN}, {"w": hook})
    job = next(t.jobs(1, "source"))
    for make, words in (
        (
            lambda: smt.megatron_hook(torch, HALVES),
            "module has no method should_transform, prepare_send,",
        ),
        (lambda: smt.megatron_hook(Hook({}), ["low"]), "'low' is not a Component"),
        (
            lambda: t.prepare(1, {"w": np.zeros((8, 3), np.uint16)}),
            "takes torch tensors, not NumPy arrays; use",
        ),
        (
            lambda: hook.make_worker(job, 1, "source", torch.device("cpu")),
            "a rule transforms 'w' by the hook, whose should_transform says no",
        ),
    ):
        with pytest.raises(sm.ShardError) as caught:
            make()
        assert words in str(caught.value)


@pytest.mark.parametrize("scratch", [False, True])
def test_buffers_of_a_hook_are_received_into_where_nobody_shares_them(scratch: bool) -> None:
    """One buffer given for every tensor would be overwritten by the next: then they are filled one by one."""
    hook = Hook(
        {name: torch.zeros(8, 3, dtype=torch.bfloat16) for name in ("a.weight", "b.weight")}
    )
    given = [torch.empty(8, 3, dtype=torch.uint8) for _ in range(4)]
    picks = {"a.weight": given[:2], "b.weight": given[:2] if scratch else given[2:]}
    hook.prepare_recv = lambda name, slices: list(picks[name])  # type: ignore[method-assign]
    transform = smt.megatron_hook(hook, HALVES)
    side = dict.fromkeys(picks, PLAIN)
    t = sm.transforms.transformed(side, side, transform.rules(side))
    cpu = torch.device("cpu")
    workers = [
        transform.make_worker(job, 1, "destination", cpu) for job in t.jobs(1, "destination")
    ]
    own = [buffer.data_ptr() for worker in workers for buffer in worker.buffers.values()]
    first = [one.data_ptr() for one in given]
    assert own[:2] == first[:2] and (own[2:] == first[2:]) is not scratch
    for value, worker in enumerate(workers, 1):
        for buffer in worker.buffers.values():
            buffer.fill_(value)
    for worker in workers:
        worker.run(None)
    expected = [torch.tensor([v | v << 8], dtype=torch.int16).view(torch.bfloat16) for v in (1, 2)]
    assert all(bool((x == y).all()) for x, y in zip(hook.stored.values(), expected, strict=True))


def test_buffers_elsewhere_are_refused() -> None:
    hook = Hook({"a.weight": torch.zeros(8, 3, dtype=torch.bfloat16)})
    hook.prepare_recv = lambda name, slices: [  # type: ignore[method-assign]
        torch.empty(8, 3, dtype=torch.uint8, device="meta") for _ in range(2)
    ]
    transform = smt.megatron_hook(hook, HALVES)
    t = sm.transforms.transformed(
        {"a.weight": PLAIN}, {"a.weight": PLAIN}, transform.rules(["a.weight"])
    )
    (job,) = t.jobs(1, "destination")
    with pytest.raises(sm.ExchangeError) as caught:
        transform.make_worker(job, 1, "destination", torch.device("cpu"))
    assert (
        "a buffer on 'meta', but the process group moves tensors on 'cpu'; return buffers"
        in str(caught.value)
    )


def test_cuts_inside_a_block_are_errors_on_all_ranks(pool: Pool) -> None:
    for cut, apart, right in pool.run(cut_apart):
        assert "tensor 'a.weight': rank 0 holds positions 0:2 of dimension 0" in cut
        assert "at 2; divide the dimension at multiples of 4" in cut
        assert "rank 2: rank 2 holds 0:2 of dimension 0 of 'a.weight', but" in apart
        assert right
