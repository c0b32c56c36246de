"""Connect: processes of several jobs in one group, each by a rank that it gives.

group = smt.connect("trainer-0:29600", rank, size)     # on every process of every job
move = smt.compile(plan, group=group)
smt.disconnect(group)
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from shardmath.base.arguments import as_integer, known
from shardmath.base.errors import ExchangeError
from shardmath.base.text import plural, show_ranks, shown
from shardmath_torch import compat
from shardmath_torch.agreement import threads
from shardmath_torch.agreement.party import is_time, word_bad_time
from shardmath_torch.agreement.turns import turns_of
from shardmath_torch.compat import PrefixStore, Store
from shardmath_torch.joint import rendezvous
from shardmath_torch.joint.meeting import Address, meet_at, read_where
from shardmath_torch.joint.rendezvous import Seat, meet
from shardmath_torch.joint_group import BACKENDS, JointGroup, make_channel

__all__ = ["call_off", "connect", "disconnect"]

DEFAULT_TIMEOUT_S = 60.0

LEAST_S = 1.0
"""For connecting ranks that have just met."""

GRACE_S = 1.0
"""For finding out which of them are gone, where that fails."""

LOOK_AGAIN_S = 0.02

HEARD_S = 0.5
"""For all who wait to see that a meeting was called off; they look ten times per second."""

TOKEN_BYTES = 8

_T = TypeVar("_T")


def connect(
    where: str | Store,
    rank: int,
    size: int,
    *,
    backend: str = "gloo",
    timeout: float = DEFAULT_TIMEOUT_S,
    name: str = "",
) -> dist.ProcessGroup:
    """A process group of `size` processes of any jobs, of which this is `rank`: what `group=` takes. Collective.

    `where` is "host:port", where the process of rank 0 serves a key-value store (a TCPStore) until it disconnects, or
    a store. `backend` is "gloo" or "nccl". `timeout`: seconds to wait for all ranks to come, and then what the group's
    own collectives wait. `name` tells groups apart that meet in one store. The same name may be used again, as after a
    rank has died: processes of two groups never meet.

    Torch's registry does not know the group, and this process's default group, if it has one, is not touched. Ranks of
    plans are places in this group. Raises ExchangeError for arguments that are no use, with the ranks that do not come
    in time, and on all ranks where two processes give one rank, or ranks give other sizes or backends.
    """
    place = read_where(where)
    rank, size = _check_rank(rank, size)
    if known(backend, tuple(BACKENDS)) is None:
        ways = " or ".join(map(repr, BACKENDS))
        raise ExchangeError(f"backend={shown(backend)}; pass {ways}")
    if not is_time(timeout):
        raise ExchangeError(word_bad_time(timeout))
    if not isinstance(name, str):
        raise ExchangeError(f"name={shown(name)} is not a text; pass one, or leave it out")
    until = time.monotonic() + float(timeout)
    seat = Seat(rank, size, backend, secrets.token_hex(TOKEN_BYTES))
    serves = rank == 0
    prefix = _name_prefix(name)
    store, number = meet_at(
        place, serves, until, lambda store: meet(PrefixStore(prefix, store), seat, until)
    )
    own = PrefixStore(f"{prefix}{number}/", store)
    left = max(LEAST_S, until - time.monotonic())
    label = f"shardmath/joint/{name}/{number}"
    channel = _make(own, seat, left, label)
    channel.set_timeout(timedelta(seconds=float(timeout)))
    serves_store = serves if isinstance(place, Address) else None
    return JointGroup(channel, own, backend, name, serves_store)


def _name_prefix(name: str) -> str:
    """What the store has of groups of this name begins so."""
    return f"shardmath/joint/{name}/"


def call_off(
    where: str | Store, rank: int, why: str, *, name: str, timeout: float = DEFAULT_TIMEOUT_S
) -> None:
    """Have nobody wait for others in `connect`, by this name, in this store: who does, or comes, raises `why`.

    From another thread of the process that has this rank. What all have met in goes on. Raises
    ExchangeError where the store is not there in so many seconds.
    """

    def close(store: Store) -> None:
        rendezvous.call_off(PrefixStore(_name_prefix(name), store), why)
        # Rank 0's process may end next, and the store with it: the others have looked by then.
        time.sleep(HEARD_S)

    until = time.monotonic() + timeout
    meet_at(read_where(where), rank == 0, until, close)


def _check_rank(rank: object, size: object) -> tuple[int, int]:
    """Both as ints. Raises ExchangeError for a rank that the group does not have."""
    among = as_integer(size, "size", ExchangeError)
    mine = as_integer(rank, "rank", ExchangeError)
    if not 0 <= mine < among:
        fix = "ranks are 0 to size - 1, places in the group"
        raise ExchangeError(f"rank={mine} is not in a group of size={among}; {fix}")
    return mine, among


def _make(store: Store, seat: Seat, left: float, label: str) -> dist.ProcessGroup:
    """The group of those who have met. Raises ExchangeError, with the ranks that were gone then."""
    try:
        made = _beside(lambda: make_channel(seat.backend, store, seat.rank, seat.size, left, label))
        store.set(f"tried/{seat.rank}", "")
    except RuntimeError as error:
        lost = _find_lost(store, seat)
        who = show_ranks(lost) if lost else "a rank"
        what = f"ranks met, and {who} of {plural(seat.size, 'rank')} could not be reached"
        fix = "see that they run and have a network interface in common, and connect again"
        raise ExchangeError(f"{what}: {error}; {fix}") from error
    return made


def _find_lost(store: Store, seat: Seat) -> list[int]:
    """The ranks that do not say soon that they have tried to connect, too."""
    silent = set(range(seat.size))
    until = time.monotonic() + GRACE_S
    try:
        store.set(f"tried/{seat.rank}", "")
        while silent and time.monotonic() < until:
            silent = {rank for rank in silent if not store.check([f"tried/{rank}"])}
            time.sleep(LOOK_AGAIN_S)
    except RuntimeError:
        # The store is lost, and with it who else is.
        return [0]
    return sorted(silent)


def _beside(make: Callable[[], _T]) -> _T:
    """What it gives, made on a thread of its own: torch, which waits in it for others, is deaf to Ctrl-C."""
    made: list[_T] = []
    failed: list[BaseException] = []

    def act() -> None:
        try:
            made.append(make())
        except BaseException as error:
            # Raised below, where somebody can take it.
            failed.append(error)

    threads.start(act).join()
    if failed:
        raise failed[0]
    return made.pop()


def disconnect(group: dist.ProcessGroup) -> None:
    """End what `connect` gave: connections and store are given back, also where movers still hold it.

    On this rank alone, whatever the others do; one that was ended is left as it is. Waits for moves that go on beside.
    What was sent last may be lost to a rank that has not received it: end with a call that all ranks wait in, as a
    move with `acknowledge=True`. Raises ExchangeError for any other group, within a call on this one, and where
    another thread is in such a call for as long as the group waits.
    """
    if not isinstance(group, JointGroup):
        fix = "pass what smt.connect returned, and end others by torch.distributed.destroy_process_group"
        raise ExchangeError(f"{shown(group)} is not a joint group; {fix}")
    if not group.is_open:
        return
    compat.check_not_forked(group)
    patience = compat.time_limit_of(group)
    with turns_of(group).ending(patience, "its process group was disconnected"):
        group.close()
