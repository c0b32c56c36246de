"""A copy of a bound side is what binding the copy itself gives, on every rank."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

import pytest

from shardmath import Mesh
from shardmath.models.refits.copying import copy_bound
from shardmath.models.storage.stored import Stored
from shardmath.storage import bind
from tests.property.storage.test_binding import SHAPES, engine, trainer


def rename(side: Stored, ranks: dict[int, int]) -> Stored:
    meshes = [mesh.relabel(ranks) for mesh in side.meshes]
    return dataclasses.replace(side, meshes=tuple(meshes))


@pytest.mark.parametrize("side", [trainer(), engine()], ids=["trainer", "engine"])
@pytest.mark.parametrize("seed", range(3))
def test_a_copy_is_what_binding_it_gives(side: Stored, seed: int) -> None:
    """Redundant experts, a tied tensor, several chunks and meshes; ranks in any order."""
    ours = side.meshes[0].ranks
    theirs = random.Random(seed).sample(range(100), len(ours))
    other = rename(side, dict(zip(ours, theirs, strict=True)))
    copy, plain = copy_bound(bind(side, SHAPES), other), bind(other, SHAPES)
    assert copy is not None
    assert copy.stored == plain.stored
    assert dict(copy.layouts) == dict(plain.layouts)
    assert list(copy.layouts) == list(plain.layouts)
    for rank in theirs:
        assert list(copy.visit(rank)) == list(plain.visit(rank))
        for native in plain.natives(rank):
            assert copy.row_of(native, rank) == plain.row_of(native, rank)


def swap_in_one_mesh(side: Stored) -> Stored:
    first, second = side.meshes
    turned = Mesh(ep=4, ranks=second.ranks[::-1])
    return dataclasses.replace(side, meshes=(first, turned))


OTHERS: dict[str, Callable[[Stored], Stored]] = {
    "row": lambda side: side.extended("x = y"),
    "number": lambda side: side.extended("", vocab=20),
    "exact": lambda side: dataclasses.replace(side, exact=False),
    "axes": lambda side: dataclasses.replace(side, meshes=(Mesh(dp=2, tp=2), Mesh(ep=4))),
    "meshes": lambda side: dataclasses.replace(side, meshes=side.meshes[:1]),
    "two names of a rank": swap_in_one_mesh,
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_differs_in_more_than_ranks_is_no_copy(name: str) -> None:
    assert copy_bound(bind(engine(), SHAPES), OTHERS[name](engine())) is None
