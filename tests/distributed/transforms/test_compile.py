"""Transformed moves over gloo do what the oracle says, bit for bit; what fails on one rank is an error on all."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import shardmath as sm
from shardmath import transforms
from shardmath.layouts.edits import window
from tests.distributed.pool import Pool, alone
from tests.distributed.tasks import transforms as tasks
from tests.distributed.tasks.cases import as_bytes, random_arrays
from tests.distributed.tasks.transforms import Moved

Wanted = dict[int, dict[str, bytes]]


def make(
    src: dict[str, Any], dst: dict[str, Any], rules: dict[str, Any], seed: int = 0, **rest: Any
) -> tuple[Moved, Wanted]:
    """The sides with random data, and the destinations' bytes that must come of it."""
    sides = [{n: x if isinstance(x, tuple) else (x,) for n, x in s.items()} for s in (src, dst)]
    rng = np.random.default_rng(seed)
    here, there = (random_arrays(side, rng) for side in sides)
    case = Moved(src, dst, rules, as_bytes(here, sides[0]), as_bytes(there, sides[1]), **rest)
    t = sm.transforms.transformed(src, dst, rules)
    with np.errstate(all="ignore"):
        prepared = {rank: t.prepare(rank, arrays) for rank, arrays in here.items()}
        arrived: Any = sm.simulate(sm.plan(t.src, t.dst), prepared)
        for rank, arrays in there.items():
            t.finalize(rank, arrived[rank], arrays)
    wanted = {
        rank: {key: array.tobytes() for key, array in named.items()}
        for rank, named in there.items()
    }
    return case, wanted


def check(pool: Pool, cases: list[tuple[Moved, Wanted]]) -> None:
    got = pool.run(tasks.move_transformed, [case for case, _ in cases], timeout=90)
    for i, (case, wanted) in enumerate(cases):
        for rank, named in wanted.items():
            found, stayed = got[rank][i]
            assert found == named, f"case {i} {case.rules} on rank {rank}"
            assert stayed


LEFT, RIGHT, BOTH = sm.Mesh(tp=4), sm.Mesh(tp=3, ranks=(6, 1, 3)), sm.Mesh(dp=2, tp=2)


def layouts(src: str, dst: str) -> list[tuple[sm.Layout, sm.Layout]]:
    """A tensor of two dtypes in several layouts, holes and permutations among them."""
    specs = [
        (LEFT, "(tp n) h", RIGHT, "n (tp h)"),
        (BOTH, "(tp dp n) h", LEFT, "(n tp) h"),
        (LEFT, "n (tp h)=16", BOTH, "(dp n)=<-2 6:12 0:6 -2> (2 tp h)"),
    ]
    return [
        (sm.Layout((12, 10), a, x, dtype=src), sm.Layout((12, 10), b, y, dtype=dst))
        for a, x, b, y in specs
    ]


BUILT_IN = [
    (transforms.Cast("bfloat16"), "float32", "bfloat16"),
    (transforms.Cast("bfloat16", at="destination"), "float32", "bfloat16"),
    (transforms.Cast("float16"), "float32", "float64"),
    (transforms.Cast("bfloat16", at="destination"), "float64", "float32"),
    (transforms.Cast("int8", lossy=True), "int64", "bfloat16"),
    (transforms.NegativeExp(), "bfloat16", "float32"),
    (transforms.NegativeExp(at="source"), "float32", "bfloat16"),
]


def test_built_in_transforms_do_what_the_oracle_says(pool: Pool) -> None:
    cases = []
    for seed, (transform, a, b) in enumerate(BUILT_IN):
        pairs = layouts(a, b)
        src = {f"w{i}": x for i, (x, _) in enumerate(pairs)}
        dst = {f"w{i}": y for i, (_, y) in enumerate(pairs)}
        same = sm.Layout((5,), LEFT, "(tp n)"), sm.Layout((5,), RIGHT, "n")
        lying = ("contiguous", "transposed", "strided")[seed % 3]
        one = make(
            {**src, "as.is": same[0]},
            {**dst, "as.is": same[1]},
            {"w?": transform},
            seed,
            lying=lying,
        )
        cases.append(one)
    check(pool, cases)


def test_windows_custom_transforms_and_reductions(pool: Pool) -> None:
    """Windows, functions of arrays on tensors, blocks, other shapes, addends that are added before they are cast."""
    whole = sm.Layout((8, 6), BOTH, "(tp n) h")
    halves = tuple(window(whole, ((a, b), (0, 6))) for a, b in ((0, 3), (3, 8)))
    narrow = sm.Layout((8, 6), RIGHT, "n (tp h)", dtype="bfloat16")
    addends = sm.Layout((8, 6), BOTH, "n (tp h) {sum: dp}")
    average = sm.Layout((8, 6), BOTH, "n (tp h) {avg: dp}")
    nibbles = transforms.Custom(
        "nibbles", (transforms.Component("data", "uint8", (2,), (1,)),), pack_nibbles
    )
    scaled = transforms.Custom(
        "blocks",
        (transforms.Component("data", "uint8"), transforms.Component("most", "uint8", (4,))),
        find_largest,
        add_largest,
    )
    cast, late = transforms.Cast("bfloat16"), transforms.Cast("bfloat16", at="destination")
    bytes_of = [sm.Layout((3, n), m, s, dtype="uint8") for n, m, s in NIBBLES]
    check(
        pool,
        [
            make({"w": halves}, {"w": narrow}, {"w": cast}),
            make({"w": addends, "v": average}, {"w": narrow, "v": narrow}, {"*": late}),
            make({"w": bytes_of[0]}, {"w": bytes_of[1]}, {"w": nibbles}),
            make({"w": bytes_of[0]}, {"w": bytes_of[2]}, {"w": scaled}),
        ],
    )


NIBBLES = ((16, LEFT, "h (tp n)"), (8, BOTH, "h (dp tp n)"), (16, BOTH, "h (2 tp n)"))


def pack_nibbles(array: Any) -> Any:
    return ((array[..., ::2] & 15) | (array[..., 1::2] & 15) << 4,)


def find_largest(array: Any) -> Any:
    return array, array.reshape(array.shape[0], -1, 4).max(-1)


def add_largest(arrays: Any) -> Any:
    return arrays[0] + np.repeat(arrays[1], 4, axis=-1)


def test_programs_and_little_staging(pool: Pool) -> None:
    """A program of what travels, over nodes; and a plan in many rounds."""
    a = sm.Layout((12, 10), sm.Mesh(tp=4), "(tp n) h")
    b = sm.Layout((12, 10), sm.Mesh(dp=4, ranks=range(4, 8)), "n h", dtype="float16")
    rule = {"w": transforms.Cast("float16")}
    few = {"max_inflight_bytes": 64}
    by_program, wanted = make({"w": a}, {"w": b}, rule, 1, nodes=2)
    assert by_program.nodes == 2
    check(pool, [(by_program, wanted), make({"w": a}, {"w": b}, rule, 2, options=few)])


def test_only_what_is_made_has_buffers(pool: Pool) -> None:
    """A cast has buffers at one end alone, as many bytes as travel there; a tensor without a rule has none."""
    ranks = sm.Mesh(tp=2), sm.Mesh(tp=2, ranks=(2, 3))
    wide, plain = (sm.Layout((8, 6), m, "(tp n) h") for m in ranks)
    narrow = sm.Layout((8, 6), ranks[1], "(tp n) h", dtype="bfloat16")
    for at, here, there in (("source", 48, 0), ("destination", 0, 96)):
        rule = {"w": transforms.Cast("bfloat16", at=at)}
        case, wanted = make({"w": wide, "v": wide}, {"w": narrow, "v": plain}, rule)
        got = pool.run(tasks.memory, case)
        assert [found for found, _ in got] == [here, here, there, there, 0, 0, 0, 0]
        assert got[3][1] == wanted[3]["w"]


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("prepare", "prepare of 'w' failed: KeyError: 'no such scale'"),
        (
            "number",
            "Custom('c': data float32) makes 2 tensors at the source, not 1: float32[4, 6]; return",
        ),
        ("shape", "makes float32[8, 6] at the source, where float32[4, 6] is needed"),
        ("dtype", "makes float64[4, 6] at the source, where float32[4, 6] is needed"),
    ],
)
def test_what_fails_before_the_vote_is_an_error_on_all_ranks(
    pool: Pool, how: str, words: str
) -> None:
    """Nothing has moved, and the next move works."""
    for error, kept, right, took in pool.run(tasks.go_wrong, 1, how):
        assert words in error and "rank 1: " in error and "nothing was moved" in error
        assert kept and right and took < 10


def test_what_fails_after_arrival_is_this_rank_s_failure() -> None:
    for error, _, right, took in alone(3, tasks.go_wrong, 2, "finalize"):
        assert "rank 2" in error and "finalize of 'w' failed: KeyError" in error
        assert not right and took < 15


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("transforms", "ranks disagree"),
        ("plan", "for 'w', but the transforms need"),
        ("type", "transforms= is Plan, where transformed layouts are needed; pass the result of"),
    ],
)
def test_ranks_agree_on_transforms(pool: Pool, how: str, words: str) -> None:
    for error in pool.run(tasks.compile_apart, how):
        assert words in error
