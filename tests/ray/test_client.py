"""The client and the address, with actors of Ray that have no engine."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

import shardmath as sm
from shardmath_ray import RayClient
from shardmath_vllm import Client
from tests.ray import actors

Engine = ray.remote(num_cpus=0)(actors.Engine)
Rank = ray.remote(num_cpus=0)(actors.Rank)
SOON_S = actors.TIMEOUT_S / 2


@pytest.fixture(scope="module", autouse=True)
def started(program: Path) -> Iterator[None]:
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100 << 20)
    yield
    ray.shutdown()


def test_what_an_actor_is_told() -> None:
    actor = Engine.remote()
    client = RayClient(actor)
    assert isinstance(client, Client)
    client.init_weight_transfer_engine({"address": "10.0.0.1:29600", "own": []})
    assert ray.get(actor.tell.remote()) == {"address": "10.0.0.1:29600", "own": []}


def test_what_goes_wrong_in_an_actor() -> None:
    actor = Engine.remote()
    with pytest.raises(sm.ExchangeError, match=r"update: raised KeyError: 'no engine'"):
        RayClient(actor).start_weight_update()
    with pytest.raises(sm.ExchangeError, match=r"finish_weight_update: does not answer.*ActorDied"):
        RayClient(actor).finish_weight_update()
    # It is dead now, and no later call waits.
    start = time.monotonic()
    with pytest.raises(sm.ExchangeError, match=r"start_weight_update: does not answer.*ActorDied"):
        RayClient(actor).start_weight_update()
    assert time.monotonic() - start < SOON_S


def test_an_actor_that_hangs_is_not_waited_for() -> None:
    actor = Engine.remote()
    ray.get(actor.__ray_ready__.remote())
    start = time.monotonic()
    with pytest.raises(sm.ExchangeError, match=r"update_weights: has not answered in 2 s"):
        RayClient(actor, timeout=2).update_weights({})
    assert time.monotonic() - start < SOON_S
    ray.kill(actor)
    with pytest.raises(sm.ExchangeError, match=r"killed by `ray.kill`"):
        RayClient(actor).start_weight_update()


def test_what_is_not_an_engine_or_not_a_time() -> None:
    with pytest.raises(ValueError, match="no remote method 'init_weight_transfer_engine'; pass"):
        RayClient(Rank.remote())
    with pytest.raises(ValueError, match=r"actor=<tests.ray.actors.Engine .* has no remote method"):
        RayClient(actors.Engine())
    with pytest.raises(ValueError, match=r"timeout=-1 is not a time to wait"):
        RayClient(Engine.remote(), timeout=-1)


def test_an_address_is_kept_until_its_actor_ends() -> None:
    ranks = [Rank.remote() for _ in range(2)]
    address, run = ray.get(ranks[0].find_address.remote())
    again, other = ray.get(ranks[0].find_address.remote())
    assert address == again
    assert run != other
    host, port = address.split(":")
    with pytest.raises(OSError, match="in use"):
        socket.create_server((host, int(port)))
    met = [rank.meet.remote(address, run, place) for place, rank in enumerate(ranks)]
    assert ray.get(met, timeout=actors.TIMEOUT_S) == [11.0, 11.0]
    # It is kept after both groups were made, and free once the process ends.
    with pytest.raises(OSError, match="in use"):
        socket.create_server((host, int(port)))
    ray.kill(ranks[0])
    until = time.monotonic() + SOON_S
    while True:
        try:
            socket.create_server((host, int(port))).close()
            break
        except OSError:
            assert time.monotonic() < until
            time.sleep(0.1)
