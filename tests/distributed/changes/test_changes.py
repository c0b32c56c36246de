"""Moves of what has changed: always what a whole move would bring, in fewer bytes, whatever is wrong."""

from __future__ import annotations

import re
import time
from typing import Any

import numpy as np
import pytest
import torch

import shardmath as sm
from shardmath_torch.tensors.changes import comparing
from shardmath_torch.tensors.changes.comparing import Changed, Snapshots, take
from shardmath_torch.tensors.changes.differing import Scratch, find_different_there
from shardmath_torch.tensors.changes.packets import Some, count_bytes, pack, unpack
from tests.distributed.pool import Pool
from tests.distributed.tasks import changes as work
from tests.distributed.tasks.cases import (
    Arrays,
    as_bytes,
    expected,
    random_arrays,
    random_plan,
    thinned,
)
from tests.distributed.tasks.scenarios import Case

SHARES = [0.0, 0.02, 0.3, 1.0]
"""Of cells that change from step to step."""

DTYPES = ["bool", "bfloat16", "float8_e4m3fn", "float32", "int64", "complex128"]


def change(arrays: Arrays, share: float, rng: np.random.Generator) -> Arrays:
    """The arrays with other bits in some cells, NaN among them."""
    out: Arrays = {}
    for rank, named in arrays.items():
        for key, array in named.items():
            bits = (
                np.ascontiguousarray(array)
                .view(np.uint8)
                .reshape(array.size, array.itemsize)
                .copy()
            )
            which = rng.random(array.size) < share
            bits[which] ^= 1 if array.dtype.kind == "b" else 0xFF
            out.setdefault(rank, {})[key] = bits.view(array.dtype).reshape(array.shape)
    return out


def check(pool: Pool, plans: list[sm.Plan], is_told: bool = False, **rest: Any) -> list[Any]:
    """Each step's destinations are those of a whole move, and then nothing is left. Gives what rank 0 sent."""
    cases, wanted = [], []
    for seed, plan in enumerate(plans):
        rng = np.random.default_rng(seed)
        src, dst = random_arrays(plan.src, rng), random_arrays(plan.dst, rng)
        case = Case(plan, as_bytes(src, plan.src), as_bytes(dst, plan.dst), **rest)
        at_times = [src]
        for share in SHARES:
            at_times.append(change(at_times[-1], share, rng))
        cases.append((case, [as_bytes(one, plan.src) for one in at_times[1:]]))
        wanted.append([expected(plan, one, dst) for one in (*at_times, at_times[-1])])
    found = pool.run(work.change_cases, cases, is_told)
    for rank, mine in enumerate(found):
        for steps, right in zip(mine, wanted, strict=True):
            for (held, _), there in zip(steps, right, strict=True):
                assert held == there.get(rank, {})
            assert steps[-1][1].nbytes == 0
    return [[sent for _, sent in steps[:-1]] for steps in found[0]]


def test_callers_may_have_another_default_device_and_resize_tensors(pool: Pool) -> None:
    """As they do where models are made on GPUs, and as FSDP does to parameters that it gathers."""
    assert pool.run(work.among_others) == [([float(r + 10) for r in range(8)], 0)] * 8


@pytest.mark.parametrize("is_inference", [True, False])
def test_moves_in_and_out_of_inference_mode(pool: Pool, is_inference: bool) -> None:
    """Snapshots made in one mode are updated in the other."""
    assert pool.run(work.in_modes, is_inference) == [[1.0, 2.0, 3.0, 4.0]] * 8


@pytest.mark.parametrize("lying", ["contiguous", "transposed", "strided"])
def test_random_plans(pool: Pool, lying: str) -> None:
    seeds = thinned(range(500, 560), len(lying))
    check(pool, [random_plan(seed, ops=()) for seed in seeds], lying=lying)


@pytest.mark.parametrize("lying", ["contiguous", "transposed"])
def test_told(pool: Pool, lying: str) -> None:
    """Cells that the caller tells, in any order, some of which go nowhere."""
    plans = [random_plan(seed, ops=()) for seed in thinned(range(600, 640), len(lying))]
    check(pool, plans, is_told=True, lying=lying)


def test_many_rounds(pool: Pool) -> None:
    plans = [random_plan(seed, ops=()) for seed in thinned(range(560, 600))]
    check(pool, plans, options={"max_inflight_bytes": 1000})


def test_all_sizes_of_elements_in_one_message(pool: Pool) -> None:
    left, right = sm.Mesh(tp=4), sm.Mesh(tp=4, ranks=range(3, 7))
    a = {name: sm.Layout((6, 9), left, "(tp n) h", dtype=name) for name in DTYPES}
    b = {name: sm.Layout((6, 9), right, "n (tp h)", dtype=name) for name in DTYPES}
    ((first, nothing, few, _, everything),) = check(pool, [sm.plan(a, b)])
    assert nothing.nbytes == nothing.elements == nothing.whole == 0
    assert 0 < few.nbytes < first.nbytes
    assert everything.nbytes == first.nbytes and everything.whole == first.whole > 0


def test_bfloat16_takes_six_bytes_an_element(pool: Pool) -> None:
    a = sm.Layout((64, 64), sm.Mesh(tp=2), "(tp n) h", dtype="bfloat16")
    b = sm.Layout((64, 64), sm.Mesh(tp=2, ranks=(4, 5)), "n (tp h)", dtype="bfloat16")
    ((first, _, few, many, _),) = check(pool, [sm.plan(a, b)])
    assert first.nbytes == 64 * 64
    assert few.whole == 0 < few.elements and few.nbytes == 6 * few.elements
    assert many.whole == 0 and many.nbytes < first.nbytes


FAULTS = {
    "other memory": "rank 1: the tensors differ from the last move of all elements, or lie elsewhere",
    "shape": r"rank 1: the source tensor has shape \(1, 3\)",
    "whole": "ranks disagree",
    "whole=1": "rank 1: whole=1 is not a bool; pass True or False",
    "outside": "rank 1: positions of '' go from 4 to 4, but it has 4 elements; pass positions from 0 to 3",
    "twice": "rank 1: positions of '' have 1 twice; pass each position once",
    "name": "rank 1: positions= names 'w', which this rank does not send; pass names of its 1 source tensors: none",
    "kind": "rank 1: positions of '' are .*; pass a 1-D tensor of int64",
    "no snapshot": "rank 1: positions= is not given, and snapshots=False, .*; pass positions= on every rank",
}


@pytest.mark.parametrize("name", FAULTS)
def test_what_one_rank_does_wrong_is_an_error_on_all(pool: Pool, name: str) -> None:
    """Nothing has changed, and the next call is right."""
    for said, after in pool.run(work.fails, name):
        assert re.search(FAULTS[name], said), said
        assert after == [float(rank + 10) for rank in range(8)]


@pytest.mark.parametrize("agree", ["every", "once"])
def test_a_rank_that_has_let_go_says_so(pool: Pool, agree: str) -> None:
    """Not the others wait for changes that never come, and all are told what to call."""
    began = time.monotonic()
    for said, after in pool.run(work.lets_go, agree):
        assert "let_go() has dropped" in said and "whole=True on all ranks" in said, said
        if agree == "every":
            assert after == [float(rank + 20) for rank in range(8)]
    assert time.monotonic() - began < 8.0


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("program", "compile_changes got Program, where a Plan is needed"),
        ("reduces", "compile_changes cannot move partial sums"),
        ("none", "got NoneType"),
    ],
)
def test_what_has_no_changes(pool: Pool, name: str, what: str) -> None:
    assert all(what in said for said in pool.run(work.refuses, name))


@pytest.mark.parametrize("dtype", DTYPES)
def test_snapshots_compare_bits(dtype: str) -> None:
    """NaN is itself, and zeros have signs; in any strides."""
    base = torch.randint(0, 2, (7, 5, 16), dtype=torch.uint8)
    for cells in (base, base.permute(1, 0, 2), base[::2], base[:, ::2]):
        bits = cells.contiguous().view(getattr(torch, dtype))
        tensor = bits.permute(1, 0, 2)
        snapshots = Snapshots({"": tensor}, {"": tuple(slice(0, n) for n in tensor.shape)})
        assert list(snapshots.list_changed({"": tensor})) == []
        some = torch.randperm(tensor.numel())[:5].sort().values
        along = torch.unravel_index(some, tensor.shape)
        words = tensor.view(
            {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}[
                tensor.element_size()
            ]
        )
        if tensor.element_size() == 16:
            words = tensor.view(torch.int64).unflatten(-1, (-1, 2))[..., 0]
        words[along] = words[along] ^ 1
        (found,) = snapshots.list_changed({"": tensor})
        assert sorted(found.cells.tolist()) == some.tolist()
        taken = take(tensor, found.cells)
        assert found.words.view(torch.uint8).equal(taken.view(torch.uint8))
        snapshots.update([found])
        assert list(snapshots.list_changed({"": tensor})) == []


WORDS = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64, 16: np.complex128}


@pytest.mark.parametrize("size", WORDS)
@pytest.mark.parametrize("count", [0, 1, 7, 4096, 4099])
def test_differences_are_found_whether_few_or_many(size: int, count: int) -> None:
    """Wherever the rows begin; and so does torch, on whatever device."""
    rng = np.random.default_rng(count)
    scratch = Scratch()
    for share in (0.0, 0.001, 0.05, 1.0):
        for shift in (0, 1):
            before = np.frombuffer(rng.bytes((count + shift) * size), WORDS[size])[shift:]
            now = before.copy()
            which = np.flatnonzero(rng.random(count) < share)
            # The last byte: of a complex word, its second half.
            now.view(np.uint8).reshape(count, size)[which, -1] ^= 1
            assert scratch.find_different(now, before).tolist() == which.tolist()
            if count:
                rows = torch.from_numpy(now), torch.from_numpy(before.copy())
                assert find_different_there(*rows).tolist() == which.tolist()


def test_snapshots_of_boxes_in_many_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """What changes beyond the box is not seen, and not remembered where it is told."""
    monkeypatch.setattr(comparing, "BLOCK_BYTES", 96)
    rng = np.random.default_rng(0)
    shape = 9, 7, 11
    box = slice(2, 8), slice(1, 7), slice(3, 11)
    inside = torch.zeros(shape, dtype=torch.bool)
    inside[box] = True
    for order in ((0, 1, 2), (2, 0, 1), (1, 2, 0)):
        lying = torch.zeros([shape[k] for k in order], dtype=torch.bfloat16)
        tensor = lying.permute([order.index(k) for k in range(3)])
        snapshots = Snapshots({"a": tensor, "b": tensor}, {"a": box, "b": box})
        assert snapshots.nbytes == 2 * 2 * 6 * 6 * 8
        for share in (0.01, 0.5):
            changed = torch.from_numpy(rng.random(shape) < share)
            tensor[changed] += 1
            found = list(snapshots.list_changed({"a": tensor, "b": tensor}))
            wanted = (changed & inside).reshape(-1).nonzero().view(-1).tolist()
            assert [sorted(one.cells.tolist()) for one in found] == [wanted, wanted]
            told = changed.reshape(-1).nonzero().view(-1).numpy()
            (first, _) = found
            snapshots.update([first, Changed("b", told, take(tensor, told))])
            assert list(snapshots.list_changed({"a": tensor, "b": tensor})) == []


def test_packets_are_where_tensors_are() -> None:
    """Of sizes of which nothing changed there are tensors on the CPU, wherever the others are."""
    nothing = Some(4, np.zeros(0, np.int64), torch.zeros(0, dtype=torch.int32))
    numbers, words = np.arange(3), torch.arange(3, dtype=torch.int16)
    nbytes = count_bytes((4, 2), (0, 3))
    packet = torch.zeros(nbytes, dtype=torch.uint8)
    pack([nothing, Some(2, numbers, words)], packet)
    assert unpack(packet, (4, 2), (0, 3))[1].words.equal(words)
    pack([nothing, Some(2, numbers, words.to("meta"))], packet.to("meta"))
