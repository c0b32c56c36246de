"""Groups of several jobs: two jobs of two ranks each, whose ranks begin at 0, and processes of no job."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from threading import Event, Thread
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import shardmath as sm
import shardmath_torch as smt
from shardmath_torch.groups.agreement import turns
from shardmath_torch.groups.agreement.failure import FailureDetector, Report
from shardmath_torch.groups.agreement.notes import add_line
from shardmath_torch.groups.joint import connect as connecting
from shardmath_torch.groups.joint.rendezvous import Seat
from tests.distributed.pool import Lost, Pool, alone, free_port
from tests.distributed.tasks import joint
from tests.distributed.tasks.breaks import ends

ONES = torch.ones(4, 4)

EACH = 2
"""Ranks of a job."""


def address() -> str:
    return f"127.0.0.1:{free_port()}"


class Jobs:
    """Two jobs that know nothing of each other."""

    def __init__(self) -> None:
        self.where = address()
        self._pools = [Pool(EACH), Pool(EACH)]

    def run(self, find: joint.Find, *args: Any) -> list[Any]:
        """What each rank of a joint group of both finds in it, by its place."""

        def ask(number: int) -> list[Any]:
            given = (self.where, number * EACH, 2 * EACH, "jobs", find, *args)
            return self._pools[number].run(joint.joined, *given)

        with ThreadPoolExecutor(len(self._pools)) as threads:
            trainers, engines = threads.map(ask, range(len(self._pools)))
        return trainers + engines

    def close(self) -> None:
        for pool in self._pools:
            pool.close()


@pytest.fixture(scope="module")
def jobs() -> Iterator[Jobs]:
    """Both, kept for all tests here, which leave no group behind: also that each test can connect by one name."""
    made = Jobs()
    yield made
    made.close()


@pytest.mark.parametrize("engine", ["auto", "broadcast"])
def test_moves(jobs: Jobs, engine: str) -> None:
    """In every way, of the right bytes; digests, and what ranks say, in the order of places."""
    for found in jobs.run(joint.moves, engine):
        assert not any(found), found


def test_moves_of_changes(jobs: Jobs) -> None:
    for found in jobs.run(joint.changes):
        assert not any(found), found


def test_blocks_that_jobs_cut_are_quantized_as_one(jobs: Jobs) -> None:
    assert jobs.run(joint.quantizes) == [""] * 4


def test_refits(jobs: Jobs) -> None:
    """With changes, commit="all", agree="once" and check="digest", some beside."""
    assert jobs.run(joint.refits) == [[3]] * 4


def test_groups_of_a_job_go_on_meanwhile(jobs: Jobs) -> None:
    """Moves in default groups and in the joint one at once, and collectives of torch's own."""
    for found in jobs.run(joint.beside, 8):
        assert found == [""] * 24


def test_the_lines_of_the_nccl_wire(jobs: Jobs) -> None:
    assert jobs.run(joint.nccl_lines) == [""] * 4


ENDED = "the joint group '' was disconnected; make another by smt.connect"


def test_a_group_that_has_ended_is_an_error(jobs: Jobs) -> None:
    """Whatever is asked of it; and a joint group is refused where torch's own are meant."""
    for *ended, save, end in jobs.run(joint.disconnected):
        assert ended == [ENDED] * 4
        assert "several jobs, which cannot save, load or export together" in save
        assert "was not made by smt.connect; pass a group that smt.connect returned" in end


def test_processes_without_a_default_group() -> None:
    for *found, asked in alone(3, joint.without_default, address(), 3):
        assert not any(found), found
        assert "torch.distributed has no process group; call" in asked


def test_an_end_waits_for_moves_beside() -> None:
    (held, waited, after), *others = alone(3, joint.left_early, address())
    assert (held, waited) == ("", "")
    assert "was disconnected; make a new group, and compile the plan on it" in after
    assert all(waited == "" for _, waited, _ in others)


def test_a_rank_dies_and_comes_again() -> None:
    """The others are told its place, go on without it, and then with another process by the name that they had."""
    found = alone(4, joint.killed, address(), 3, 1, gone=(0,))
    assert not any(isinstance(one, Lost) for one in found), found
    again = [one for one in found if one[1] == 0.0]
    assert [one[:3] for one in again] == [("", 0.0, [""])]
    for said, took, rest, version in found:
        if took:
            assert said.startswith("rank 1 failed while"), said
            assert took < joint.TIMEOUT_S
            assert rest == [""] * 6
        assert version >= 1


def ask(given: list[Any], where: str = "") -> list[Any]:
    found = alone(len(given), joint.asks, where, given)
    assert not any(isinstance(one, Lost) for one in found), found
    return found


def test_ranks_that_do_not_come() -> None:
    """Are named, at the time that is given; without rank 0, which serves the store, it alone."""
    first, _, third = ask([(0, 4, 1.0), None, (2, 4, 1.0)])
    for said, took in (first, third):
        assert said.startswith(
            "ranks 1, 3 of 4 ranks did not call smt.connect in time; start them with"
        )
        assert 1.0 <= took < 3.0
    ((said, took),) = ask([(1, 2, 0.5)], address())
    assert said.startswith("no store answers at"), said
    assert 0.5 <= took < 2.5


def test_two_processes_of_one_rank() -> None:
    """Are told so, and so are the others, long before the time is over."""
    found = ask([(0, 3, 20.0), (1, 3, 20.0), (1, 3, 20.0)], address())
    assert any(
        "two processes give rank 1; give each process its own rank" in said for said, _ in found
    ), found
    assert all(said and took < 15.0 for said, took in found), found


def test_ranks_that_give_other_sizes() -> None:
    """Of the others, who comes after all is over waits in vain."""
    first, *others = (said for said, _ in ask([(0, 2, 20.0), (1, 3, 5.0), (2, 3, 5.0)]))
    assert "size=" in first and "give the same on all ranks" in first
    told = [said for said in others if said == first]
    late = [
        said
        for said in others
        if said.startswith("rank 0 of 3 ranks did not call smt.connect in time")
    ]
    assert told and len(told) + len(late) == 2, others


def test_nothing_is_left() -> None:
    """No open file and no thread, also where movers and groups are still held."""
    for first, last in alone(2, joint.leaves_nothing, "", 50):
        assert last == first


@pytest.mark.parametrize("rounds", [4, pytest.param(50, marks=pytest.mark.slow)])
def test_nothing_is_left_of_a_store_either(rounds: int) -> None:
    """Of its server, and of each rank's connections to it."""
    for first, last in alone(2, joint.leaves_nothing, address(), rounds):
        assert last == first


def test_a_child_forked_while_ranks_meet_withdraws_nothing() -> None:
    """Its parent's announcement stays, and the ranks connect."""
    (mine, announced), (others, _) = alone(2, joint.forked_meeting, address())
    assert (mine, others) == ("", "")
    assert all(announced)
    assert len(announced) == 1


def test_a_forked_child_is_refused() -> None:
    (said, _) = alone(2, joint.forked)
    assert "this process was forked from a rank" in said


@pytest.mark.parametrize(
    ("given", "what"),
    [
        (
            {"where": "trainer"},
            "where='trainer' is neither an address nor a store; pass 'host:port'",
        ),
        ({"where": "trainer:0"}, "is neither an address nor a store"),
        ({"where": "trainer:65536"}, "is neither an address nor a store"),
        ({"where": "trainer:\u00b2"}, "is neither an address nor a store"),
        ({"where": None}, "is neither an address nor a store"),
        (
            {"rank": 1},
            "rank=1 is not in a group of size=1; give this process's place in the group, 0 to 0",
        ),
        ({"rank": -1}, "rank=-1 is not in a group of size=1"),
        ({"rank": 0.5}, "rank is 0.5; give an integer"),
        ({"size": 0}, "size=0 is not a number of ranks from 1 to"),
        ({"backend": "mpi"}, "backend='mpi' is unknown; pass 'gloo' or 'nccl'"),
        ({"backend": ["gloo"]}, "backend=['gloo'] is unknown; pass"),
        # "Ranks met, and rank 0 could not be reached; start them again on hosts that reach each other".
        pytest.param(
            {"backend": "nccl"},
            "backend='nccl', but torch was built without NCCL, or finds no GPU in this process",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="it connects there"),
        ),
        ({"timeout": 0}, "timeout=0 is not a time to wait"),
        ({"timeout": 10**5000}, "timeout=<int that cannot be printed> is not a time to wait"),
        ({"name": 3}, "name=3 is not a str"),
        ({"name": "\ud800"}, "name='\\ud800' has half a surrogate pair at character 0; pass"),
        # "The store passed as where= is lost", and others that used it lost it, too.
        ({"name": "x" * 10_000}, " has 10000 bytes in UTF-8; pass a text of at most 4096"),
        ({"run": 7}, "run=7 is not a str"),
        ({"rank": True}, "rank is True; give an integer"),
        ({"rank": 0.0}, "rank is 0.0; give an integer"),
        ({"size": -1}, "size=-1 is not a number of ranks"),
        (
            {"size": 2**31},
            "size=2147483648 is not a number of ranks from 1 to 2147483647, the most",
        ),
        ({"where": f"{'a' * 300}:80"}, "is neither an address nor a store"),
        ({"where": "..:80"}, "where='..:80' is neither an address nor a store"),
        ({"where": "a b:80"}, "is neither an address nor a store"),
        ({"where": "\ud800:80"}, "is neither an address nor a store"),
        ({"where": "\0:80"}, "is neither an address nor a store"),
        ({"where": f"a:{'1' * 5000}"}, "is neither an address nor a store"),
    ],
)
def test_bad_arguments_are_errors_at_once(given: dict[str, Any], what: str) -> None:
    named: Any = {"where": dist.HashStore(), "rank": 0, "size": 1, **given}
    assert what in ends(lambda: smt.connect(**named))


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("key", ["lead", "called off"])
@pytest.mark.parametrize("note", ["theirs", "", "\xff"])
def test_a_key_of_somebody_else(rank: int, key: str, note: str) -> None:
    """json.JSONDecodeError before, on rank 0 after it had written over the key."""
    store = dist.HashStore()
    there = dist.PrefixStore("shardmath/joint/jobs", store)
    there.set(key, note.encode("latin-1"))
    said = ends(lambda: smt.connect(store, rank, 2, name="jobs", timeout=5.0))
    where = (
        f"under 'shardmath/joint/<name>/{key}', which smt.connect did not write; remove that key"
    )
    assert said.startswith("the store has ")
    assert where in said
    assert there.get(key) == note.encode("latin-1")
    there.delete_key(key)
    assert store.num_keys() == 0


def test_an_address_that_is_taken() -> None:
    """By another process's store, or something else: an error at once, on rank 0."""
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        where = f"127.0.0.1:{taken.getsockname()[1]}"
        said = ends(lambda: smt.connect(where, 0, 2, timeout=5.0))
    assert said.startswith(f"rank 0 cannot serve a store at {where}: ")


def within(seconds: float, act: Callable[[], Any]) -> str:
    """How it ends, on a thread beside: if it does not, the test does."""
    said: list[str] = []
    beside = Thread(target=lambda: said.append(ends(act)), daemon=True)
    beside.start()
    beside.join(seconds)
    return said[0] if said else "no end"


def test_a_server_that_has_stopped() -> None:
    """The system accepts connections for it, and torch waits for its answer without an end."""
    with socket.socket() as stopped:
        stopped.bind(("127.0.0.1", 0))
        stopped.listen()
        where = f"127.0.0.1:{stopped.getsockname()[1]}"
        said = within(15.0, lambda: smt.connect(where, 1, 2, timeout=0.5))
    assert said.startswith("no store answers at"), said


class Between:
    """What stands between a store's server and its clients; once it has stopped, nothing passes."""

    def __init__(self) -> None:
        self._server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._connections = [self._listening]
        self._passes = Event()
        self._passes.set()
        Thread(target=self._accept, daemon=True).start()

    def open(self) -> dist.TCPStore:
        """A client's store."""
        port = self._listening.getsockname()[1]
        return dist.TCPStore("127.0.0.1", port, None, False)

    def stop(self) -> None:
        self._passes.clear()

    def close(self) -> None:
        """End all connections, and so the waits of whoever still waits."""
        for one in self._connections:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        self._passes.set()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                server = socket.create_connection(("127.0.0.1", self._server.port))
                self._connections += [client, server]
                for ends in ((client, server), (server, client)):
                    Thread(target=self._pass_on, args=ends, daemon=True).start()

    def _pass_on(self, here: socket.socket, there: socket.socket) -> None:
        with suppress(OSError):
            while said := here.recv(4096):
                self._passes.wait()
                there.sendall(said)


@pytest.fixture
def between() -> Iterator[Between]:
    made = Between()
    yield made
    made.close()


def test_a_store_that_stops_before_ranks_meet(between: Between) -> None:
    """Is waited for until the time is over, and no longer."""
    store = between.open()
    between.stop()
    calls: list[Callable[[], Any]] = [
        lambda: smt.connect(store, 0, 2, timeout=0.5),
        lambda: connecting.call_off(store, 0, "no", name="", timeout=0.5),
    ]
    for call in calls:
        assert within(15.0, call).startswith("the store passed as where= is lost: no answer in")


def test_a_store_that_stops_once_ranks_have_met(between: Between) -> None:
    make = connecting.make_channel

    def stop_and_make(*given: Any) -> dist.ProcessGroup:
        between.stop()
        return make(*given)

    store = between.open()
    with mock.patch.object(connecting, "make_channel", stop_and_make):
        said = within(20.0, lambda: smt.connect(store, 0, 1, timeout=0.5))
    assert said.startswith(
        "all ranks called smt.connect, and then rank 0 of 1 rank could not be reached: "
    ), said


def test_a_store_that_stops_before_the_end(between: Between) -> None:
    """Nothing tells of it, and the connections are given back."""
    group = smt.connect(between.open(), 0, 1, timeout=5.0)
    between.stop()
    assert within(15.0, lambda: smt.disconnect(group)) == ""
    assert not group.is_open


def test_a_store_of_the_caller_s() -> None:
    """By one name as often as wanted, one group after the other and two at once."""
    store = dist.HashStore()
    first = smt.connect(store, 0, 1, name="a")
    second = smt.connect(store, 0, 1, name="a")
    layout = sm.Layout((4, 4), sm.Mesh(tp=1), "n h")
    for group in (first, second):
        assert smt.digest(layout, ONES, group=group) == sm.content.digest_of(
            layout, {0: ONES.numpy()}
        )
        smt.disconnect(group)
    assert store.num_keys() == 0


def test_a_store_in_which_another_thread_waits() -> None:
    """As one does that connects, too: torch lets nobody else use that connection meanwhile."""
    store = make_store("tcp", Path())
    waiting = Thread(target=ends, args=(partial(store.wait, ["key"], timedelta(seconds=30)),))
    waiting.start()
    time.sleep(0.2)
    group = smt.connect(store, 0, 1, timeout=3.0)
    asked = dist.TCPStore("127.0.0.1", store.port, None, False)
    del store
    asked.set("key", "")
    waiting.join()
    # The server, which ends with the store that was given, is there as long as the group.
    assert asked.num_keys() > 1
    smt.disconnect(group)


def test_a_host_of_no_address() -> None:
    """Is an error at once on rank 0, which would serve there; torch takes twice the time that it is given."""
    start = time.monotonic()
    said = ends(lambda: smt.connect("nowhere.invalid:29600", 0, 2, timeout=20.0))
    assert time.monotonic() - start < 15.0
    assert said.startswith("rank 0 cannot serve a store at nowhere.invalid:29600: ")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_name_that_nobody_answers_for(rank: int) -> None:
    """To look it up, or to try its addresses one after the other, may take the system longer than the time."""
    asked = Event()

    def look_up(*given: Any) -> Any:
        asked.wait()
        raise OSError

    with (
        mock.patch.object(socket, "getaddrinfo", look_up),
        mock.patch.object(socket, "create_connection", look_up),
    ):
        said = within(15.0, lambda: smt.connect("trainer:29600", rank, 2, timeout=0.2))
        asked.set()
    assert said.startswith(("rank 0 ", "no store answers at ")) and "trainer:29600" in said, said


def test_a_large_size_takes_no_longer() -> None:
    """Ranks that are absent are not asked for one by one."""
    store = dist.HashStore()
    start = time.monotonic()
    said = ends(lambda: smt.connect(store, 0, 4_000_000, timeout=0.2))
    assert time.monotonic() - start < 5.0
    assert said.startswith("ranks 1-3999999 of 4000000 ranks did not call smt.connect in time")
    assert store.num_keys() == 0


@pytest.mark.parametrize("kind", ["hash", "file", "tcp", "prefix"])
def test_nothing_is_left_in_the_store(kind: str, tmp_path: Path) -> None:
    """Once all have disconnected, and where ranks do not come, or come to a rank that has left."""
    where = make_store(kind, tmp_path)
    before = where.num_keys()
    other = [smt.connect(where, 0, 1, name="other")]

    def join(rank: int) -> str:
        group = smt.connect(where.clone(), rank, 3, timeout=20.0)
        run = group.run
        smt.disconnect(group)
        return run

    with ThreadPoolExecutor(3) as threads:
        assert len(set(threads.map(join, range(3)))) == 1
    for rank in range(2):
        assert "did not call smt.connect in time" in ends(
            lambda: smt.connect(where, rank, 2, timeout=0.1)  # noqa: B023
        )
    smt.disconnect(other.pop())
    assert where.num_keys() == before + (kind == "file"), where.list_keys()


@pytest.mark.parametrize("host", [None, 0])
def test_nothing_is_left_of_who_failed(host: int | None) -> None:
    """Which a rank still asks, on a thread beside, as it disconnects."""
    store = dist.HashStore()
    group = smt.connect(store, 0, 1)
    detector = FailureDetector(group.store, host, "key", 0, (0, 1), grace=1.0)
    asking = detector.report(Report(None, None, "left in the middle"), lambda: None)
    smt.disconnect(group)
    asking.join()
    assert store.num_keys() == 0


def test_ctrl_c_at_both_ends_of_a_group() -> None:
    """Just before the caller has the group, and as the store is told that this rank leaves."""
    store = dist.HashStore()
    stopped = mock.Mock(side_effect=KeyboardInterrupt)
    at_last = mock.patch.object(connecting.stores, "serves_store", stopped)
    with at_last, pytest.raises(KeyboardInterrupt):
        smt.connect(store, 0, 1)
    assert store.num_keys() == 0
    group = smt.connect(store, 0, 1)
    group._leave = stopped
    with pytest.raises(KeyboardInterrupt):
        smt.disconnect(group)
    # Its server would go on, and its port be taken.
    assert group.store is None


def test_ctrl_c_as_a_mover_says_goodbye() -> None:
    """Lets go of its tensors all the same: to close it again does nothing."""
    group = smt.connect(dist.HashStore(), 0, 1)
    layout = sm.Layout((4, 4), sm.Mesh(tp=1), "n h")
    move = smt.compile(sm.plan(layout, layout), group=group, commit="all")
    move(ONES, out=torch.zeros(4, 4))
    assert move.shadow_bytes
    saying = mock.patch.object(turns.Turns, "part", side_effect=KeyboardInterrupt)
    with saying, pytest.raises(KeyboardInterrupt):
        move.close()
    assert not move._carrier._shadows.tensors  # type: ignore[attr-defined]
    smt.disconnect(group)


def make_store(kind: str, folder: Path) -> Any:
    if kind == "hash":
        return dist.HashStore()
    if kind == "file":
        # It counts what opens its file in a key that it adds to at its end.
        return dist.FileStore(str(folder / "store"), -1)
    if kind == "tcp":
        return dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    store = dist.HashStore()
    # torch's own `list_keys` of a PrefixStore fails where a key is its prefix.
    store.set("mine", "")
    return dist.PrefixStore("mine", store)


@pytest.mark.parametrize(
    ("failed", "what"),
    [([], "rank 1 of 2 ranks left"), ([1], "a rank of 2 ranks could not be reached")],
)
def test_a_rank_that_left_is_told_from_one_that_failed(failed: list[int], what: str) -> None:
    """To those who have met it, and cannot reach it."""
    store = dist.HashStore()
    add_line(store, "left", "1")
    add_line(store, "tried", "1")
    for rank in failed:
        add_line(store, "failed", str(rank))
    with mock.patch.object(connecting, "make_channel", side_effect=RuntimeError("closed")):
        said = ends(lambda: connecting._connect(store, Seat(0, 2, "gloo", "a"), 5.0, ""))
    assert said.startswith(f"all ranks called smt.connect, and then {what}: closed; start them")
