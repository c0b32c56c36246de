"""Whatever one rank gets wrong, every rank raises the same, nothing has moved, and the next move works."""

from __future__ import annotations

import re

import pytest

import shardmath as sm
from shardmath import transforms
from tests.distributed.pool import Pool
from tests.distributed.tasks.cases import make_case
from tests.distributed.tasks.scenarios import bad_move, compile_with, outsider, unusual_moves

EIGHT = sm.Mesh(dp=4, tp=2)
LEFT, RIGHT = sm.Mesh(tp=4), sm.Mesh(tp=3, ranks=range(4, 7))
SAME = sm.plan(sm.Layout((8, 4), EIGHT, "(tp dp n) h"), sm.Layout((8, 4), EIGHT, "n (tp h)"))
APART = sm.plan(sm.Layout((8, 6), LEFT, "(tp n) h"), sm.Layout((8, 6), RIGHT, "n (tp h)"))
TREE = sm.plan(
    {name: sm.Layout((8, 6), LEFT, "(tp n) h") for name in ("v", "w")},
    {name: sm.Layout((8, 6), RIGHT, "n (tp h)") for name in ("v", "w")},
)

MOVES = [
    (
        SAME,
        "src shape",
        (3,),
        "rank 3: the source tensor has shape (1, 4, 2), the plan's layout stores (1, 4) there; pass",
    ),
    (
        SAME,
        "dst shape",
        (5,),
        "rank 5: the destination tensor has shape (8, 2, 2), the plan's layout stores (8, 2) there",
    ),
    (
        SAME,
        "src dtype",
        (0,),
        "rank 0: the source tensor has dtype float64, the plan's layout has float32; pass",
    ),
    (
        SAME,
        "dst device",
        (7,),
        "rank 7: the destination tensor is on device 'meta', the process group moves tensors on 'cpu'",
    ),
    (
        SAME,
        "src none",
        (2,),
        "rank 2: the source tensor is missing: nothing given; pass one tensor",
    ),
    (
        SAME,
        "src dict",
        (2,),
        "rank 2: the source is a dict with 'w', but the plan has one tensor; pass that tensor without a dict",
    ),
    (
        SAME,
        "src list",
        (2,),
        "rank 2: the source is of type list; pass a torch.Tensor, a dict of tensors by name, or None",
    ),
    (
        SAME,
        "src sparse",
        (2,),
        "rank 2: the source tensor is stored as torch.sparse_coo, where a move takes torch.strided",
    ),
    (
        SAME,
        "dst expanded",
        (2,),
        "rank 2: the destination tensor has shape (8, 2) and strides (0, 1), which put several elements at one address",
    ),
    (
        SAME,
        "src freed",
        (1,),
        "rank 1: the source tensor reaches 16 bytes into a storage of 0, which was freed",
    ),
    (
        SAME,
        "dst freed",
        (1,),
        "rank 1: the destination tensor reaches 64 bytes into a storage of 0, which was freed",
    ),
    (
        SAME,
        "src shrunk",
        (1,),
        "rank 1: the source tensor reaches 16 bytes into a storage of 8, which was freed",
    ),
    (
        SAME,
        "src wrapper",
        (1,),
        "rank 1: the source tensor is a Wrapper, which has no plain memory; pass a plain",
    ),
    (
        SAME,
        "dst wrapper",
        (1,),
        "rank 1: the destination tensor is a Wrapper, which has no plain memory",
    ),
    (TREE, "src freed", (1,), "rank 1: source tensor 'v' reaches"),
    (SAME, "dst alias", (4,), "rank 4: the source tensor and the destination tensor share memory"),
    (SAME, "src shape", (1, 2, 3, 6), "ranks 1-3, 6: the source tensor has shape (1, 4, 2)"),
    (TREE, "src missing", (1,), "rank 1: source tensor 'v' is missing: 'w' given; pass 'v', 'w'"),
    (TREE, "dst missing", (5,), "rank 5: destination tensor 'v' is missing"),
    (
        TREE,
        "src extra",
        (1,),
        "rank 1: source tensor 'zz' is given, but the plan has no such tensor on rank 1; pass 'v', 'w'",
    ),
    (
        TREE,
        "src bare",
        (1,),
        "rank 1: the source is one tensor, but the plan has tensors by name; pass a dict with 'v', 'w' on rank 1",
    ),
    (TREE, "src number", (1,), "rank 1: source tensor 'v' is of type int; pass a torch.Tensor"),
    (TREE, "src dtype", (2,), "rank 2: source tensor 'v' has dtype float64"),
]


@pytest.mark.parametrize(
    ("plan", "how", "who", "text"), MOVES, ids=lambda x: x if isinstance(x, str) else None
)
def test_a_bad_tensor_on_the_second_move(
    pool: Pool, plan: sm.Plan, how: str, who: tuple[int, ...], text: str
) -> None:
    """All ranks raise what is wrong and where; no destination has changed; the third move is right."""
    case, wanted = make_case(plan)
    for rank, (error, same, end) in enumerate(pool.run(bad_move, case, who, how)):
        assert error.startswith(text), error
        assert "nothing was moved" in error
        assert same
        assert end == wanted.get(rank, {})


def test_unusual_tensors_that_have_memory(pool: Pool) -> None:
    """Inference tensors, and subclasses on plain memory, are moved as plain tensors are, also through staging."""
    case, wanted = make_case(SAME, lying="transposed")
    for rank, ends in enumerate(pool.run(unusual_moves, case)):
        assert all(end == wanted[rank] for end in ends)


def test_ranks_that_the_plan_does_not_name_pass_none(pool: Pool) -> None:
    """A stranger, and a rank that is not on a side, that pass a tensor all the same are told to pass None."""
    case, _ = make_case(APART)
    tensor = case.src[0]
    for rank, side in ((7, "source"), (5, "source"), (1, "destination"), (7, "destination")):
        given = (
            {"src": {**case.src, rank: tensor}}
            if side == "source"
            else {"dst": {**case.dst, rank: tensor}}
        )
        bad = type(case)(case.plan, **{"src": case.src, "dst": case.dst, **given})
        answers = pool.attempt(bad_move, bad, (), "")
        assert all(
            f"rank {rank}: the {side} tensor is given, but rank {rank} is not on the plan's {side} side; pass None"
            in a.text
            for a in answers
        )


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        (
            [{"max_inflight_bytes": 1 << 20}] + [{}] * 7,
            ["rank 0: compile(", "max_inflight_bytes=1048576", "ranks 1-7: "],
        ),
        (
            [{}] * 5 + [{"engine": "broadcast"}] * 2 + [{}],
            ["ranks 5-6: ", "engine='broadcast'", "ranks 0-4, 7: "],
        ),
        ([{}] * 7 + [{"timeout": 21.0}], ["rank 7: ", "timeout=21.0"]),
        (
            [{"engine": "fast"}],
            [
                "ranks 0-7: engine='fast' is unknown on gloo; pass one of 'auto', 'exchange', 'broadcast'"
            ],
        ),
        ([{"timeout": 0}], ["timeout=0 is not a time to wait; pass seconds > 0"]),
        (
            [{"max_inflight_bytes": 8}],
            [
                "max_inflight_bytes=8 has no room for a message of 16 bytes each way; pass 32 or more"
            ],
        ),
        (
            [{"max_inflight_bytes": "8"}] + [{}] * 7,
            ["rank 0: max_inflight_bytes='8' is not a number of bytes"],
        ),
    ],
)
def test_settings_that_differ_or_are_wrong(
    pool: Pool, options: list[dict[str, object]], shown: list[str]
) -> None:
    """compile raises on every rank, and says which ranks pass what."""
    for error in pool.run(compile_with, [SAME], options, tuple(range(8))):
        assert all(text in error for text in shown), error


def test_plans_that_differ(pool: Pool) -> None:
    """One rank with another plan, or none: every rank raises and shows which."""
    for error in pool.run(compile_with, [SAME] * 6 + [APART, SAME], [{}], tuple(range(8))):
        assert error.startswith(
            "ranks disagree on what to do\nranks 0-5, 7: compile(plan " + SAME.digest[:24]
        )
        assert "rank 6: compile(plan " + APART.digest[:24] in error
    for error in pool.run(compile_with, [SAME] * 7 + [None], [{}], tuple(range(8))):
        assert (
            "rank 7: compile takes a Plan or Program, got NoneType; pass shardmath.plan(src, dst)"
            in error
        )
    layouts = {"w": sm.Layout((8,), sm.Mesh(tp=8), "(tp n)")}
    transformed = sm.transforms.transformed(layouts, layouts, {"w": transforms.Cast("bfloat16")})
    for error in pool.run(compile_with, [SAME] * 7 + [transformed], [{}], tuple(range(8))):
        assert "rank 7: compile takes a Plan or Program, got Transformed; pass" in error
        assert "a Transformed to compile_transformed" in error


def test_a_program_of_more_messages_than_a_group_takes(pool: Pool) -> None:
    """NCCL hangs on many thousands: rounds are to be cut where all ranks know it, which is in the program."""
    program = sm.schedule(SAME, max_ops_per_group=8001)
    for error in pool.run(compile_with, [program], [{}], tuple(range(8))):
        assert "ranks 0-7: the program has max_ops_per_group=8001, where at most" in error
        assert "schedule the plan with max_ops_per_group=8000 or less" in error


def test_a_group_without_a_rank_of_the_plan(pool: Pool) -> None:
    """A plan needs all of its ranks; and only ranks of the group compile on it."""
    errors = pool.run(compile_with, [APART], [{}], (0, 1, 2, 3, 5))
    assert all(
        "[4, 6] are not in the group; compile on a group that has all of them" in errors[r]
        for r in (0, 1, 2, 3, 5)
    )
    for rank, error in enumerate(pool.run(outsider, APART, (0, 1, 2, 3, 5))):
        assert rank in (0, 1, 2, 3, 5) or f"rank {rank} is not in the process group" in error


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_a_reduction_that_torch_cannot_do(pool: Pool, dtype: str) -> None:
    """A type without arithmetic moves, but does not add up: compile says so, naming tensor and fix."""
    mesh = sm.Mesh(dp=8)
    plan = sm.plan(
        {"g": sm.Layout((8, 2), mesh, "n h {sum: dp}", dtype=dtype)},
        {"g": sm.Layout((8, 2), mesh, "(dp n) h", dtype=dtype)},
    )
    for error in pool.run(compile_with, [plan], [{}], tuple(range(8))):
        assert re.search(
            f"ranks 0-7: tensor 'g' needs 'sum' of {dtype}, which torch does not have; cast it to float32",
            error,
        )
