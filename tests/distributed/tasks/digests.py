"""What workers do with digests: of given tensors, of wrong ones, and in moves that go wrong. No pytest here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

import shardmath as sm
import shardmath_torch as smt
from tests.distributed.tasks.scenarios import Bytes, group_of, tensors_of


def digest_cases(rank: int, cases: Sequence[tuple[Any, Mapping[int, Bytes], str]]) -> list[Any]:
    """The digests of (held, tensors by rank, how they lie)."""
    return [
        smt.digest(held, tensors_of(given.get(rank), lying), seed=i)
        for i, (held, given, lying) in enumerate(cases)
    ]


def digest_in_group(rank: int, held: sm.Layout, ranks: tuple[int, ...]) -> int | None:
    """The digest of ones, over the group of these ranks alone."""
    group = group_of(ranks)
    if rank not in ranks:
        return None
    mine = torch.ones(held.local_shape(rank)) if rank in held.mesh else None
    return smt.digest(held, mine, group=group)


def refusal(act: Callable[[], object]) -> str:
    """What an ExchangeError says; "" where there is none."""
    try:
        act()
    except sm.ExchangeError as error:
        return str(error)
    return ""


def wrong_digests(rank: int, rows: sm.Layout, columns: sm.Layout) -> list[str]:
    """What is said of wrong calls, and at last the digest of a right one."""
    ones = torch.ones(rows.local_shape(rank))
    short = ones[:1] if rank == 3 else ones
    odd = ones.clone()
    if rank == 6:
        odd[1, 2:4] = 7
    partial = sm.Layout(rows.shape, rows.mesh, "n h {sum: dp tp}")
    part = sm.window(rows, ((0, 3), (0, 6)))
    seen = [
        refusal(lambda: smt.digest(rows, short)),
        refusal(lambda: smt.digest(rows, odd)),
        refusal(
            lambda: smt.digest(
                rows if rank else columns, torch.ones((rows if rank else columns).local_shape(rank))
            )
        ),
        refusal(lambda: smt.digest(rows, ones, seed=rank // 4)),
        refusal(lambda: smt.digest(partial, torch.ones(rows.shape))),
        refusal(lambda: smt.digest(part, ones)),
        refusal(lambda: smt.digest({"w": rows}, {"w": ones} if rank != 5 else {})),
        refusal(lambda: smt.digest(sm.Layout((8,), sm.Mesh(tp=9), "(tp n)"), torch.ones(1))),
    ]
    return [*seen, str(smt.digest(rows, ones))]


class _Meddler:
    """An engine that does more than it should."""

    def __init__(self, engine: Any, meddle: Callable[[Any, Any], None]) -> None:
        self._engine = engine
        self._meddle = meddle

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def move(self, src: Any, dst: Any, watch: Any) -> None:
        self._engine.move(src, dst, watch)
        self._meddle(src, dst)


def checked_moves(rank: int, plan: sm.Plan, reducing: sm.Plan, part: sm.Plan) -> list[str]:
    """What is said of moves of ones that go wrong on rank 5 in several ways, and of ones that cannot be compared."""
    move = smt.compile(plan)
    src = {name: torch.ones(own[0].local_shape(rank)) for name, own in plan.src.items()}
    out = {name: torch.zeros(own[0].local_shape(rank)) for name, own in plan.dst.items()}
    engine = move._carrier._engine
    seen = [refusal(lambda: move(src, out=out, check="digest"))]

    def with_meddling(meddle: Callable[[Any, Any], None]) -> None:
        move._carrier._engine = _Meddler(engine, meddle) if rank == 5 else engine
        seen.append(refusal(lambda: move(src, out=out, check="digest")))
        move._carrier._engine = engine
        for tensor in src.values():
            tensor.fill_(1)

    with_meddling(lambda src, dst: dst["w"][1, 1:].fill_(3))
    with_meddling(lambda src, dst: dst["norm"][2:4].fill_(3))
    with_meddling(lambda src, dst: src["w"][0, 2].fill_(3))
    if rank == 5:
        src["norm"][3] = 9
    seen.append(refusal(lambda: move(src, out=out, check="digest")))
    src["norm"].fill_(1)
    check = "digest" if rank else None
    seen.append(refusal(lambda: move(src, out=out, check=check)))
    seen.append(refusal(lambda: move(src, out=out, check="sum")))
    for other in (reducing, sm.adjoint(plan), part):
        seen.append(refusal(lambda other=other: smt.compile(other)(None, out=None, check="digest")))
    seen.append(refusal(lambda: move(src, out=out, check="digest", acknowledge=True)))
    assert all(bool((tensor == 1).all()) for tensor in out.values())
    return seen
