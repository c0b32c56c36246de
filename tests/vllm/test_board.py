"""What place 0 waits for at the end of an update, in a store without other processes."""

from __future__ import annotations

import time

import pytest
import torch.distributed as dist

from shardmath import ExchangeError
from shardmath_torch.groups.agreement import notes
from shardmath_torch.groups.joint.rendezvous import LEFT
from shardmath_vllm.board import Board


def make_boards(timeout: float = 5.0) -> tuple[Board, Board]:
    """Those of a trainer's two ranks."""
    store = dist.HashStore()
    first, second = (Board(store, place, 2, 2, timeout) for place in range(2))
    return first, second


def do_nothing() -> None:
    """What place 0 has to do, which is right."""


def test_a_rank_that_has_heard_of_more_since_has_heard_of_this() -> None:
    """Also if it was interrupted in the next update before place 0 looked."""
    first, second = make_boards()
    second.excuse("finish update 1")
    second.excuse("begin update 2")
    began = time.monotonic()
    first.finish("finish update 1", do_nothing)
    assert time.monotonic() - began < 2.0


def test_a_rank_that_has_failed_is_not_waited_for() -> None:
    first, _ = make_boards()
    began = time.monotonic()
    with pytest.raises(ExchangeError, match="trainer rank 1: KeyboardInterrupt"):
        first.finish("finish update 1", do_nothing, lambda: "trainer rank 1: KeyboardInterrupt")
    assert time.monotonic() - began < 2.0


def test_a_rank_that_has_left_is_not_waited_for() -> None:
    """Neither for its vote, nor until it has read a result: others would wait for their whole time limit."""
    first, second = make_boards(timeout=60.0)
    second.excuse("finish update 1")
    notes.add_line(first.store, LEFT, "1")
    first.vote("begin update 2", "")
    began = time.monotonic()
    first.finish("finish update 1", do_nothing)
    assert first.decide("begin update 2").startswith("trainer rank 1 has left the group")
    with pytest.raises(ExchangeError, match="trainer rank 1 has left the group"):
        first.finish("finish update 2", do_nothing)
    assert time.monotonic() - began < 2.0


def test_a_worker_that_has_left_is_not_waited_for() -> None:
    """Its engine says so only once its other workers have answered, which wait for that worker."""
    first = Board(dist.HashStore(), 0, 1, 3, 3.0)
    notes.add_line(first.store, LEFT, "2")
    first.vote("begin update 2", "")
    began = time.monotonic()
    assert first.decide("begin update 2").startswith("worker 1 has left the group")
    assert time.monotonic() - began < 2.0


def test_place_0_that_has_left_is_not_waited_for() -> None:
    """Where its process still serves the store; its report from before it left is heard."""
    first, second = make_boards(timeout=1.0)
    first.relay("end update 1", do_nothing)
    notes.add_line(first.store, LEFT, "0")
    began = time.monotonic()
    second.relay("end update 1", do_nothing)
    with pytest.raises(ExchangeError, match="trainer rank 0 has left the group"):
        second.relay("start update 2", do_nothing)
    assert time.monotonic() - began < 2.0


def test_a_rank_that_says_nothing_is_named_in_time() -> None:
    first, _ = make_boards(timeout=0.2)
    with pytest.raises(
        ExchangeError, match=r"1 rank did not finish update 1 in 0\.2 s: trainer rank 1"
    ):
        first.finish("finish update 1", do_nothing)


def test_the_store_keeps_nothing_of_updates_that_are_forgotten() -> None:
    first, second = make_boards()
    second.vote("begin update 1", "")
    first.vote("begin update 1", "")
    assert first.decide("begin update 1") == ""
    second.excuse("finish update 1")
    first.finish("finish update 1", do_nothing)
    first.forget([1])
    assert first.store.num_keys() == 0
