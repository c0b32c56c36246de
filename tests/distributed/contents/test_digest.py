"""smt.digest gives the numbers of sm.content.digest_of, and every rank hears of what one has wrong."""

from __future__ import annotations

import numpy as np
import torch

import shardmath as sm
from shardmath.base import dtypes
from tests.distributed.pool import Pool
from tests.distributed.tasks.digests import digest_cases, digest_in_group, wrong_digests

EIGHT = sm.Mesh(dp=4, tp=2)
ROWS, COLUMNS = sm.Layout((8, 6), EIGHT, "(tp n) h"), sm.Layout((8, 6), EIGHT, "n (tp h)")


def make_case(held, lying="contiguous"):
    """The side, all ranks' tensors as bytes, how they lie, and as arrays: content by position, junk in holes."""
    side = held if isinstance(held, dict) else {"": held}
    given: dict[int, dict] = {}
    arrays: dict[int, dict] = {}
    for name, one in side.items():
        windows = one if isinstance(one, tuple) else (one,)
        for i, layout in enumerate(windows):
            key = f"{name}[{i}]" if len(windows) > 1 else name
            values = np.random.default_rng(7).bytes(int(np.prod(layout.shape)) * layout.itemsize)
            if layout.dtype == "bool":  # of which torch copies values, not bits
                values = bytes(byte & 1 for byte in values)
            kind = np.dtype(f"V{layout.itemsize}")
            whole = np.frombuffer(values, kind).reshape(layout.shape)
            for rank in layout.mesh.ranks:
                local = np.full(layout.local_shape(rank), np.array(b"\7" * layout.itemsize, kind))
                for here, there in layout.boxes(rank):
                    local[tuple(slice(*s) for s in here)] = whole[tuple(slice(*s) for s in there)]
                given.setdefault(rank, {})[key] = (local.shape, layout.dtype, local.tobytes())
                arrays.setdefault(rank, {})[key] = local
    named = isinstance(held, dict | tuple)
    return (held, given, lying), arrays if named else {r: a[""] for r, a in arrays.items()}


def test_same_numbers(pool: Pool) -> None:
    """Replicas, windows, padding, several tensors, ranks that hold nothing, every dtype, tensors that lie anyhow."""
    some = sm.Mesh(tp=3, ranks=(6, 1, 3))
    windows = (sm.window(ROWS, ((0, 3), (0, 6))), sm.window(ROWS, ((2, 8), (0, 6))))
    every = {
        name: sm.Layout((6, 9), EIGHT, "(tp n) h", dtype=name)
        for name in sorted(dtypes.ITEMSIZE)
        if hasattr(torch, name)
    }
    cases = [
        make_case(ROWS),
        make_case(COLUMNS, "transposed"),
        make_case(COLUMNS, "strided"),
        make_case(sm.Layout((700, 3), some, "(tp n) h", dtype="bfloat16")),
        make_case(sm.Layout((9, 4), sm.Mesh(tp=4), "(tp n)=16 h")),
        make_case(sm.Layout((), EIGHT, "")),
        make_case(sm.Layout((0, 4), EIGHT, "n h")),
        make_case(windows),
        make_case({"w": windows, "v": ROWS}),
        make_case({}),
        make_case(every),
    ]
    expected = [
        sm.content.digest_of(held, arrays, seed=i) for i, ((held, _, _), arrays) in enumerate(cases)
    ]
    assert pool.run(digest_cases, [case for case, _ in cases]) == [expected] * 8


def test_groups_of_some_ranks(pool: Pool) -> None:
    layout = sm.Layout((5, 4), sm.Mesh(tp=2, ranks=(5, 1)), "(tp n) h")
    expected = sm.content.digest_of(
        layout, {5: np.ones((3, 4), np.float32), 1: np.ones((2, 4), np.float32)}
    )
    found = pool.run(digest_in_group, layout, (5, 3, 1, 7))
    assert found == [expected if rank in (5, 3, 1, 7) else None for rank in range(8)]


def test_errors_are_errors_on_all_ranks(pool: Pool) -> None:
    """And the next call works."""
    answers = pool.run(wrong_digests, ROWS, COLUMNS)
    assert answers == [answers[0]] * 8
    *said, digest = answers[0]
    starts = [
        "rank 3: the given tensor has shape (1, 6), the plan's layout stores (4, 6) there",
        "the tensor: rank 6 holds other bits in [1:2, 2:4] than ranks 0, 2, 4; "
        "make the replicas equal, or use a layout with Partial if they are addends",
        "ranks disagree",
        "ranks disagree",
        "ranks 0-7: the tensor is Partial, so its ranks do not hold its content",
        "ranks 0-7: the tensor: no rank holds element (3, 0)",
        "rank 5: given tensor 'w' is missing: nothing given; pass 'w'",
        "ranks 0-7: rank 8 of float32[8] (tp n) on tp=9 is not in the group of ranks [0, 1,",
    ]
    for text, start in zip(said, starts, strict=True):
        assert text.startswith(start), text
    assert int(digest) == sm.content.digest_of(
        ROWS, {rank: np.ones((4, 6), np.float32) for rank in range(8)}
    )
