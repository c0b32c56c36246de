"""What is kept to save time is bounded by memory, can be emptied, and changes nothing."""

from __future__ import annotations

import gc
import sys
import tracemalloc
from collections.abc import Iterator

import numpy as np
import pytest

import shardmath as sm
from shardmath.base import memo
from shardmath.base.memo import clear_caches, weight
from shardmath.layouts import layout
from shardmath.plans import template


@pytest.fixture(autouse=True)
def cold() -> Iterator[None]:
    """No test finds or leaves results of another."""
    clear_caches()
    yield
    clear_caches()


def _moved(n: int) -> list[sm.Transfer]:
    """The transfers of one rank of a plan with many boxes."""
    mesh = sm.Mesh(x=16)
    src, dst = (sm.Layout((n,), mesh, {"x": sm.BlockCyclic(0, block)}) for block in (4, 6))
    return list(sm.plan(src, dst).transfers(dst=0))


def _kept() -> int:
    return sum(account.nbytes for account in memo._accounts)


def test_values_end_when_caches_are_emptied() -> None:
    """Layouts, of which equal ones are one object, are not held by what was computed from them."""
    gc.collect()
    before = len(layout._interned)
    for n in range(200, 230):
        _moved(n)
    assert template._make_template.cache_info().currsize == 30
    assert _kept() > 0
    clear_caches()
    gc.collect()
    assert template._make_template.cache_info().currsize == 0
    assert _kept() == 0
    assert len(layout._interned) <= before


def test_results_are_the_same_after_emptying() -> None:
    """Also where caches are emptied while a plan is being made."""
    wanted = _moved(1000)
    clear_caches()
    assert _moved(1000) == wanted


def test_results_are_the_same_with_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Emptying after every entry takes time and changes nothing."""
    mesh = sm.Mesh(dp=4, tp=2)
    texts = {"a": "(tp dp n) h", "b": "n (tp h)", "c": "(2 tp n) (dp h)"}

    def planned() -> sm.Plan:
        src = {name: sm.Layout((64, 48), mesh, text) for name, text in texts.items()}
        return sm.plan(src, {name: sm.Layout((64, 48), mesh, "(dp n) h") for name in texts})

    wanted = planned()
    transfers = list(wanted.transfers())
    clear_caches()
    monkeypatch.setattr(memo, "MOST_BYTES", 0)
    got = planned()
    assert got.digest == wanted.digest
    assert list(got.transfers()) == transfers
    sm.verify(got)


def test_a_stream_of_plans_keeps_no_more_than_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """By weight, and about by memory: ever new plans, each dropped at once."""
    monkeypatch.setattr(memo, "MOST_BYTES", 2 << 20)
    _moved(1999)
    tracemalloc.start()
    try:
        for n in range(2000, 2030):
            _moved(n)
            assert _kept() == memo._Account.total <= memo.MOST_BYTES
        gc.collect()
        grown = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert grown < 4 * memo.MOST_BYTES
    assert template._make_template.cache_info().currsize < 30


@pytest.mark.parametrize(
    ("value", "nbytes"),
    [
        (np.zeros(1000, np.int64), 8112),
        (b"x" * 1000, sys.getsizeof(b"x" * 1000)),
        (list(range(1000, 2000)), 28 * 1000 + sys.getsizeof([0] * 1000)),
        (
            {n: (n,) for n in range(1000, 1100)},
            100 * (28 + 28 + 48) + sys.getsizeof({n: n for n in range(100)}),
        ),
    ],
)
def test_weights(value: object, nbytes: int) -> None:
    """Of plain data, within a tenth."""
    assert weight(value) == pytest.approx(nbytes, rel=0.1)


def test_what_is_referred_to_twice_counts_once() -> None:
    """And what refers to itself ends: a layout may be its own form."""
    one = sm.Layout((6, 4), sm.Mesh(tp=2), "(tp n) h")
    assert weight((one, one)) < weight(one) + 100
    assert one.form is not None and weight(one) < 20_000


def test_every_cache_of_the_core_is_listed() -> None:
    """What `clear_caches` does not know would be kept for ever."""
    known = {account.cache for account in memo._accounts}
    modules = [module for name, module in sys.modules.items() if name.startswith("shardmath.")]
    caches = {
        one for module in modules for one in vars(module).values() if isinstance(one, memo._Wrapper)
    }
    assert caches <= known
