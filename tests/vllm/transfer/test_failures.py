"""Two engines of two workers, and a trainer of two processes: refits, and all that may go wrong with one.

The engines are shared by the tests, each of which leaves them whole: running, with weights of one checkpoint. The last
one kills a worker.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.distributed.pool import Failure, Lost, Pool
from tests.vllm.transfer import inside, trainers
from tests.vllm.transfer.checking import TIMEOUT_S, check_refits, fails, generate
from tests.vllm.transfer.engines import Engines, ask, save
from tests.vllm.transfer.hosts import EngineError, Host

RANKS = 2
SOON_S = trainers.TIMEOUT_S / 2
"""On a machine whose two cores have all these processes; half of what ranks wait for each other."""


class Pair(NamedTuple):
    """Two engines, checkpoints, and what engines generate that were started on the first two of them."""

    engines: Engines
    hosts: list[Host]
    folders: list[Path]
    expected: list[Any]

    @property
    def pool(self) -> Pool:
        """The trainer's ranks."""
        return self.engines.pool(RANKS)

    def ask(self, folder: int = 0, **more: Any) -> trainers.Asked:
        """A trainer of both."""
        return ask(self.hosts, self.folders[folder], "fsdp", RANKS, **more)

    def send(self, seed: int) -> None:
        """A refit that goes well."""
        self.pool.run(trainers.send, self.folders[seed], timeout=TIMEOUT_S)
        assert generate(self.hosts) == [self.expected[seed]] * 2


@pytest.fixture(scope="module")
def pair(engines_of_module: Engines) -> Iterator[Pair]:
    """The two engines."""
    engines = engines_of_module
    folders = [save("llama", engines.folder, seed) for seed in range(3)]
    hosts = engines.start(*folders[:2], tp=2)
    return Pair(engines, hosts, folders, generate(hosts))


def test_refitted_engines_are_as_those_started_on_the_checkpoint(pair: Pair) -> None:
    check_refits(pair.pool, pair.ask(), pair.hosts, pair.folders)
    pair.send(0)
    pair.pool.run(trainers.leave)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (trainers.take_other_model, "vLLM's loader skips 'model.layers.0.self_attn.q_proj.bias'"),
        (trainers.take_other_sizes, "could not record its loader"),
        (trainers.leave_out, "no tensor of the trainer's is written to"),
        (trainers.differ, "have different shapes or dtypes of 'model.norm.weight'"),
    ],
)
def test_trainers_that_do_not_fit_are_refused(pair: Pair, change: Any, why: str) -> None:
    before = generate(pair.hosts)
    said = fails(pair.pool, trainers.join_changed, pair.ask(), change)
    assert all(why in one for one in said), said
    assert generate(pair.hosts) == before


@pytest.mark.parametrize(
    "change", [trainers.reshape_one, trainers.retype_one, trainers.drop_one, trainers.free_one]
)
def test_an_update_of_what_was_not_planned_is_refused_before_anything_moves(
    pair: Pair, change: Any
) -> None:
    before = generate(pair.hosts)
    pair.pool.run(trainers.join, pair.ask(1), timeout=TIMEOUT_S)
    said = fails(pair.pool, trainers.send_changed, change, 1)
    assert all("trainer rank 1 could not begin update 1" in one for one in said), said
    assert all("model.norm.weight" in one for one in said), said
    assert generate(pair.hosts) == before
    # All have heard of it, so they go on.
    pair.send(1)
    pair.send(0)
    pair.pool.run(trainers.leave)


@pytest.mark.parametrize(
    ("method", "what"), [("start_weight_update", "start"), ("update_weights", "cannot be reached")]
)
def test_an_engine_that_is_not_reached_is_not_waited_for(
    pair: Pair, method: str, what: str
) -> None:
    before = generate(pair.hosts)
    pair.pool.run(trainers.join, pair.ask(1), timeout=TIMEOUT_S)
    start = time.monotonic()
    said = fails(pair.pool, trainers.send_unreached, method)
    assert time.monotonic() - start < SOON_S
    assert all(what in one for one in said), said
    assert generate(pair.hosts) == before
    pair.pool.run(trainers.rejoin, pair.ask(), timeout=TIMEOUT_S)
    pair.send(1)
    pair.send(0)
    pair.pool.run(trainers.leave)


def test_an_engine_that_cannot_join_is_not_waited_for(pair: Pair) -> None:
    asked = pair.ask()
    start = time.monotonic()
    said = fails(pair.pool, trainers.join, asked._replace(engines=(asked.engines[0], "/no/host")))
    assert time.monotonic() - start < SOON_S
    assert all("engine 1: FileNotFoundError" in one for one in said), said
    said = fails(pair.pool, trainers.join, asked._replace(workers=(2, 1)))
    assert all("workers=1 for engine 1" in one for one in said), said


def test_a_worker_that_fails_leaves_its_engine_torn_until_a_whole_update(pair: Pair) -> None:
    pair.pool.run(trainers.join, pair.ask(1), timeout=TIMEOUT_S)
    pair.hosts[0].ask(inside.ask_workers, inside.fail, 1, 1, "raise")
    start = time.monotonic()
    try:
        said = fails(pair.pool, trainers.send, pair.folders[1])
    finally:
        pair.hosts[0].ask(inside.ask_workers, inside.mend)
    assert time.monotonic() - start < SOON_S
    # It says why, and leaves the group: which of both a rank hears of first is open.
    assert all(re.match(r"ranks? [\d, -]*(failed|left)", one) for one in said), said
    assert all("this layer cannot be processed" in one for one in said), said
    # Both have some layers of either checkpoint. They are not asked for tokens: by that vLLM ends an engine.
    for host in pair.hosts:
        assert host.ask(inside.ask_workers, inside.is_refusing) == [True, True]
    pair.pool.run(trainers.rejoin, pair.ask(), timeout=TIMEOUT_S)
    pair.send(1)
    pair.send(0)
    pair.pool.run(trainers.leave)


@pytest.mark.parametrize("dying", [1, 0])
def test_a_trainer_s_rank_that_dies_leaves_engines_torn_until_a_whole_update(
    pair: Pair, dying: int
) -> None:
    """Also the first one, which has the store, and has told the engines to receive."""
    pool = pair.pool
    pool.run(trainers.join, pair.ask(1), timeout=TIMEOUT_S)
    start = time.monotonic()
    answers = pool.attempt(trainers.send_until, pair.folders[1], dying, timeout=TIMEOUT_S)
    assert time.monotonic() - start < SOON_S
    left = answers[1 - dying]
    assert isinstance(answers[dying], Lost), answers
    assert isinstance(left, Failure) and left.kind == "ExchangeError", answers
    for host in pair.hosts:
        assert host.ask(inside.ask_workers, inside.is_refusing) == [True, True]
    pool.broken = True
    pair.pool.run(trainers.join, pair.ask(), timeout=TIMEOUT_S)
    pair.send(1)
    pair.send(0)
    pair.pool.run(trainers.leave)


def test_many_updates_leave_nothing_behind(pair: Pair) -> None:
    pair.pool.run(trainers.join, pair.ask(), timeout=TIMEOUT_S)
    # Caches are full, and allocators have what they need.
    pair.pool.run(trainers.send_often, 10, timeout=TIMEOUT_S)
    before = count_all(pair)
    pair.pool.run(trainers.send_often, 50, timeout=TIMEOUT_S)
    after = count_all(pair)
    for earlier, later in zip(before, after, strict=True):
        assert later["files"] <= earlier["files"], (before, after)
        assert later["threads"] <= earlier["threads"], (before, after)
        assert later["python threads"] <= earlier["python threads"], (before, after)
        # An update is of 1.1 MB.
        assert later["bytes"] - earlier["bytes"] < MOST_BYTES, (before, after)
    print(
        *(later["bytes"] - earlier["bytes"] for earlier, later in zip(before, after, strict=True))
    )
    pair.pool.run(trainers.leave)


MOST_BYTES = 8 << 20


def count_all(pair: Pair) -> list[dict[str, int]]:
    """What trainers, workers and their hosts hold."""
    counted = pair.pool.run(trainers.count_held)
    for host in pair.hosts:
        counted += host.ask(inside.ask_workers, inside.count_held)
        counted.append(host.ask(inside.count_held))
    return counted


def test_a_worker_that_dies_ends_its_engine_and_another_takes_its_place(pair: Pair) -> None:
    pool = pair.pool
    pool.run(trainers.join, pair.ask(1), timeout=TIMEOUT_S)
    pair.hosts[0].ask(inside.ask_workers, inside.fail, 1, 1, "die")
    start = time.monotonic()
    said = fails(pool, trainers.send, pair.folders[1])
    assert time.monotonic() - start < SOON_S
    assert all("rank 3 failed" in one for one in said), said
    # One engine has died with its worker. The other one has layers of both checkpoints.
    with pytest.raises(EngineError):
        pair.hosts[0].ask(inside.generate)
    assert pair.hosts[1].ask(inside.ask_workers, inside.is_refusing) == [True, True]
    pair.hosts[0].close()
    pair.hosts[:1] = pair.engines.start(pair.folders[0], tp=2)
    pool.run(trainers.rejoin, pair.ask(), timeout=TIMEOUT_S)
    pair.send(1)
    pair.send(0)
    pool.run(trainers.leave)


def test_an_engine_that_is_torn_does_not_answer(pair: Pair) -> None:
    """The last one here: vLLM has no way back from what a model raises."""
    pair.pool.run(trainers.join, pair.ask(1), timeout=TIMEOUT_S)
    pair.hosts[0].ask(inside.ask_workers, inside.fail, 1, 1, "raise")
    fails(pair.pool, trainers.send, pair.folders[1])
    for host in pair.hosts:
        with pytest.raises(EngineError, match="the weights are torn"):
            host.ask(inside.generate)
