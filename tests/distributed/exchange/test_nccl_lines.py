"""The lines of the NCCL wire do what they say, as far as that can be seen without NCCL: on the CPU, over gloo."""

from __future__ import annotations

import dataclasses
import threading
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import shardmath as sm
import shardmath_torch as smt
from shardmath_nccl import batches, wire
from shardmath_torch.groups import compat
from shardmath_torch.groups.agreement.wire import PeerFailure
from tests.distributed.pool import Pool
from tests.distributed.tasks.cases import make_case, random_plan
from tests.distributed.tasks.nccl_lines import (
    PATIENCE_S,
    fail_in_batch,
    meet,
    move_in_inference,
    move_over_gloo,
    over_gloo,
    start_and_fail,
)


def test_moves(pool: Pool) -> None:
    """Random plans, reduced, relayed and cut finely: what simulate says."""
    mesh = sm.Mesh(dp=2, tp=4)
    p = sm.plan(sm.Layout((64, 64), mesh, "(tp dp n) h"), sm.Layout((64, 64), mesh, "n (tp h)"))
    where = sm.Topology(ranks_per_node=4, latency_s=0.0)
    finely = {"max_inflight_bytes": 64}
    made = [make_case(random_plan(seed), options=finely) for seed in range(4)]
    made += [make_case(random_plan(seed)) for seed in range(4, 10)]
    case, wanted = make_case(p)
    program: Any = sm.schedule(p, topology=where, fanout="node")
    made.append((dataclasses.replace(case, plan=program), wanted))
    ends = pool.run(move_over_gloo, [case for case, _ in made])
    for rank, mine in enumerate(ends):
        for number, (_, wanted) in enumerate(made):
            assert mine[number] == wanted.get(rank, {}), number


def test_in_inference_mode(pool: Pool) -> None:
    """The thread that posts is in it, too."""
    assert pool.run(move_in_inference) == [["fine", "fine", "fine", ""]] * 8


def test_a_rank_that_does_not_come(pool: Pool) -> None:
    """It is named, after the patience: NCCL itself would wait for it for ever."""
    told = pool.run(meet, (3,))
    for rank, (blamed, cause, seconds) in enumerate(told):
        if rank != 3:
            assert (blamed, cause) == (3, "it did not answer in time")
            assert PATIENCE_S <= seconds < PATIENCE_S + 4.5
    assert all(answer == (None, "", 0.0) for answer in pool.run(meet, ()))


class Stopped(dist.HashStore):
    """One that answers only once it goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.goes_on = threading.Event()

    def compare_set(self, key: str, old: str, new: str) -> bytes:
        self.goes_on.wait()
        return super().compare_set(key, old, new)


def tell_meeting(store: dist.Store) -> str:
    """What comes of a vote of a group that has this store."""
    group = smt.connect(dist.HashStore(), 0, 1)
    failed = pytest.raises(PeerFailure)
    with over_gloo(), mock.patch.object(compat, "store_of", return_value=store), failed as told:
        wire.NcclWire(group, 0.2).gather(b"here")
    smt.disconnect(group)
    return told.value.cause


def test_a_store_that_is_lost_as_ranks_come() -> None:
    """Whether its server has ended or stopped."""
    stopped = Stopped()
    assert tell_meeting(stopped).startswith("no answer in")
    stopped.goes_on.set()
    servers = [dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)]
    client = dist.TCPStore("127.0.0.1", servers[0].port, None, False)
    servers.clear()
    assert tell_meeting(client)


def test_what_fails(pool: Pool) -> None:
    """Groups that do not end are given up, and so are posts that wait; NCCL's open groups are another thread's; what
    would hide an error is refused."""
    late = "PeerFailure: it did not answer in time"
    for ahead, start, finish, left, waits, posted_by, refused in pool.run(start_and_fail):
        assert ahead == "8 groups under way"
        assert (start, finish) == (late, late)
        assert (left, waits) == ("PeerFailure: connection closed", late)
        assert posted_by == "1 other thread"
        assert "reports cancelled messages as received; unset it, or set it to 0" in refused


class Channel:
    """In the place of a group with NCCL's groups of messages; notes what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []

    def _get_backend(self, device: torch.device) -> Any:
        return SimpleNamespace(supports_coalescing=True)

    def __getattr__(self, name: str) -> Any:
        return lambda *given: self.told.append((name, *given)) or name


def test_messages_of_a_batch_are_one_group() -> None:
    """Begun and ended on the device, as torch's own `batch_isend_irecv` does."""
    channel: Any = Channel()
    device = torch.device("cpu")
    row, other = torch.zeros(4), torch.zeros(2)
    messages = [batches.WireMessage(False, row, 3), batches.WireMessage(True, other, 1)]
    assert batches.start_batch(channel, device, messages) == ["_end_coalescing"]
    assert channel.told == [
        ("_start_coalescing", device),
        ("recv", [row], 3, 0),
        ("send", [other], 1, 0),
        ("_end_coalescing", device),
    ]


@pytest.mark.parametrize(
    ("offers", "missing"),
    [
        ({}, "supports_coalescing, options._timeout, _add_ephemeral_timeout"),
        ({"supports_coalescing": False}, "supports_coalescing"),
        ({"options": SimpleNamespace(_timeout=600)}, "options._timeout"),
        ({"_add_ephemeral_timeout": None}, "_add_ephemeral_timeout"),
    ],
)
def test_another_nccl_of_torchs_has_to_offer_as_much(offers: dict[str, Any], missing: str) -> None:
    """From torch 2.15 on "nccl" is ProcessGroupNCCL2: what it lacks is found before it is needed."""
    whole = {
        "supports_coalescing": True,
        "options": SimpleNamespace(_timeout=timedelta(minutes=10)),
        "_add_ephemeral_timeout": print,
    }
    held = whole | offers if offers else {}
    backend = SimpleNamespace(**{name: it for name, it in held.items() if it is not None})
    group: Any = SimpleNamespace(_get_backend=lambda device: backend)
    said = pytest.raises(sm.ExchangeError, match=f"lacks {missing}, .*TORCH_DIST_USE_NCCL2=0")
    with mock.patch.object(compat, "backend_of", return_value="nccl"), said:
        wire.NcclWire(group, 1.0)
    backend.wrapped_pg = SimpleNamespace(**whole)
    assert compat.find_missing(group) == ("SimpleNamespace", [])


def test_what_torch_raises_is_a_rank_s_failure(pool: Pool) -> None:
    """And what a signal handler raises meanwhile is itself."""
    for torchs, handlers in pool.run(fail_in_batch):
        assert torchs.startswith("PeerFailure: ")
        assert handlers == "RuntimeError: from a handler"


def test_torch_waits_as_long_as_the_wire() -> None:
    """Torch's watchdog is given what it lacks to the longer wait, and nothing where the group's own limit is longer."""
    given: list[timedelta] = []
    backend = SimpleNamespace(_add_ephemeral_timeout=given.append)
    group: Any = SimpleNamespace(_get_backend=lambda device: backend)
    with mock.patch.object(compat, "time_limit_of", return_value=600.0):
        compat.allow_seconds(group, 54.0)
        compat.allow_seconds(group, 3600.0)
    assert given == [timedelta(seconds=3000)]
    # Where torch wraps the backend there is no such call.
    with mock.patch.object(compat, "time_limit_of", return_value=600.0):
        compat.allow_seconds(mock.Mock(_get_backend=lambda device: object()), 3600.0)
