"""Connect: processes of several jobs in one group, each by a rank that it gives.

group = smt.connect("trainer-0:29600", rank, size)     # on every process of every job
move = smt.compile(plan, group=group)
smt.disconnect(group)

What the store has of a group lies under one key. The last rank to leave removes it: by `disconnect`, or because it
could not reach the others.
"""

from __future__ import annotations

import secrets
import time
from contextlib import suppress
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from shardmath.base.arguments import as_integer, known
from shardmath.base.errors import ExchangeError
from shardmath.base.text import plural, show_ranks, shown
from shardmath_torch.groups import compat, stores
from shardmath_torch.groups.agreement import notes, threads
from shardmath_torch.groups.agreement.failure import stop_asking
from shardmath_torch.groups.agreement.party import is_time, word_bad_time
from shardmath_torch.groups.agreement.turns import turns_of
from shardmath_torch.groups.compat import PrefixStore, Store
from shardmath_torch.groups.joint import rendezvous
from shardmath_torch.groups.joint.meeting import Address, meet_at, read_where
from shardmath_torch.groups.joint.rendezvous import LEFT, Met, Seat, meet
from shardmath_torch.groups.joint.steps import carry_out
from shardmath_torch.groups.joint_group import BACKENDS, JointGroup, make_channel

__all__ = ["call_off", "connect", "disconnect"]

DEFAULT_TIMEOUT_S = 60.0

LEAST_S = 1.0
"""For connecting ranks that have just met."""

GRACE_S = 1.0
"""For finding out which of them are gone, where that fails."""

LEAVING_S = 1.0
"""At most, for the store to hear that this rank leaves: it may be gone."""

LOOK_AGAIN_S = 0.02

MOST = 2**31 - 1
"""Ranks, as torch counts them."""

TRIED, FAILED = "tried", "failed"
"""Below a full meeting: the ranks that have tried to connect to the others, and those that could not."""

TOKEN_BYTES = 8


def connect(
    where: str | Store,
    rank: int,
    size: int,
    *,
    backend: str = "gloo",
    timeout: float = DEFAULT_TIMEOUT_S,
    name: str = "",
    run: str = "",
) -> JointGroup:
    """A process group of `size` processes of any jobs, of which this is `rank`: what `group=` takes. Collective.

    `where` is "host:port", where the process of rank 0 serves a key-value store (a TCPStore) until it disconnects, or
    a store. `backend` is "gloo" or "nccl". `timeout`: seconds to wait for all ranks to come, and then what the group's
    own collectives wait. `name` tells groups apart that meet in one store. The same name may be used again, as after a
    rank has died: processes of two groups never meet.

    `run` tells processes of one run from those of an earlier one that have not ended. Rank 0 draws one if it is given
    none; the others take rank 0's. The group's `run` says which: pass it whenever this process connects again, and to a
    process that takes a dead one's place.

    Torch's registry does not know the group, and this process's default group, if it has one, is not touched. Ranks of
    plans are places in this group. Raises ExchangeError for arguments that are no use, with the ranks that do not come
    in time, if rank 0 is of another run, and on all ranks where two processes give one rank, or ranks give other sizes
    or backends.
    """
    place = read_where(where)
    rank, size = _check_rank(rank, size)
    _check_backend(backend)
    if not is_time(timeout):
        raise ExchangeError(word_bad_time(timeout))
    for what, given in (("name", name), ("run", run)):
        _check_text(what, given)
    until = time.monotonic() + float(timeout)
    serves = rank == 0

    def find(store: Store) -> tuple[Store, Seat, Met]:
        below = _below(store, name)
        seat = Seat(rank, size, backend, secrets.token_hex(TOKEN_BYTES), run)
        return below, seat, carry_out(meet(seat), below, until)

    below, seat, met = meet_at(place, serves, until, find)
    own = PrefixStore(met.meeting, below)
    left = max(LEAST_S, until - time.monotonic())
    label = f"shardmath/joint/{name}/{met.meeting}"
    leave = partial(_leave, below, met, rank, size)
    try:
        channel = _make(own, seat, left, label)
    except BaseException:
        leave()
        raise
    channel.set_timeout(timedelta(seconds=float(timeout)))
    serves_store = serves if isinstance(place, Address) else None
    group = JointGroup(channel, own, backend, name, met.run, leave, serves_store, place)
    # The store below the meeting is the group's alone, so the goodbyes need no name.
    turns_of(group).listen(own, "", rank, range(size), stores.serves_store(group))
    return group


def _below(store: Store, name: str) -> Store:
    """What the store has of groups of this name."""
    return PrefixStore(f"shardmath/joint/{name}", store)


def call_off(
    where: str | Store, rank: int, why: str, *, name: str, timeout: float = DEFAULT_TIMEOUT_S
) -> None:
    """Have nobody wait for others in `connect`, by this name, in this store: who does, or comes, raises `why`.

    From another thread of the process that has this rank. What all have met in goes on. Raises
    ExchangeError where the store is not there in so many seconds.
    """
    until = time.monotonic() + timeout

    def close(store: Store) -> None:
        carry_out(rendezvous.call_off(why), _below(store, name), until)

    meet_at(read_where(where), rank == 0, until, close)


def _check_rank(rank: object, size: object) -> tuple[int, int]:
    """Both as ints. Raises ExchangeError for a rank that the group does not have, or more ranks than torch counts."""
    among = as_integer(size, "size", ExchangeError)
    mine = as_integer(rank, "rank", ExchangeError)
    if among > MOST:
        raise ExchangeError(f"size={among}; torch has groups of at most {MOST} ranks")
    if not 0 <= mine < among:
        fix = "ranks are 0 to size - 1, places in the group"
        raise ExchangeError(f"rank={mine} is not in a group of size={among}; {fix}")
    return mine, among


def _check_backend(backend: str) -> None:
    """Raises ExchangeError for a backend that connects no group, or not in this process."""
    if known(backend, tuple(BACKENDS)) is None:
        ways = " or ".join(map(repr, BACKENDS))
        raise ExchangeError(f"backend={shown(backend)}; pass {ways}")
    if backend == "nccl" and not (dist.is_nccl_available() and torch.cuda.is_available()):
        what = "torch was built without NCCL, or finds no GPU in this process"
        raise ExchangeError(
            f"backend='nccl', and {what}; pass 'gloo', or connect where it has both"
        )


def _check_text(what: str, given: object) -> None:
    """Raises ExchangeError for what no store has as part of a key."""
    if not isinstance(given, str):
        raise ExchangeError(f"{what}={shown(given)} is not a text; pass one, or leave it out")
    try:
        given.encode()
    except UnicodeEncodeError as error:
        what = f"{what}={shown(given)} has half a surrogate pair at character {error.start}"
        raise ExchangeError(f"{what}; pass a text that UTF-8 has") from None


def _make(store: Store, seat: Seat, left: float, label: str) -> dist.ProcessGroup:
    """The group of those who have met. Raises ExchangeError, with the ranks that were gone then."""

    def make() -> dist.ProcessGroup:
        made = make_channel(seat.backend, store, seat.rank, seat.size, left, label)
        notes.add_line(store, TRIED, str(seat.rank))
        return made

    try:
        return threads.within(left + GRACE_S, make)
    except RuntimeError as error:
        what = f"ranks met, and {_word_lost(store, seat)}"
        fix = "see that they run and have a network interface in common, and connect again"
        raise ExchangeError(f"{what}: {error}; {fix}") from error


def _word_lost(store: Store, seat: Seat) -> str:
    """Who could not be reached: ranks that have left, or do not say soon that they have tried to connect, too."""
    among = plural(seat.size, "rank")
    try:
        left, silent = threads.within(2 * GRACE_S, lambda: _find_lost(store, seat))
    except RuntimeError:
        # The store is lost, and with it who else is.
        return f"rank 0 of {among} could not be reached"
    if left and not silent:
        return f"{show_ranks(sorted(left))} of {among} left"
    who = show_ranks(sorted(silent)) if silent else "a rank"
    return f"{who} of {among} could not be reached"


def _find_lost(store: Store, seat: Seat) -> tuple[set[int], set[int]]:
    """The ranks that have left, and those that do not say in GRACE_S that they have tried to connect."""
    until = time.monotonic() + GRACE_S
    for key in (FAILED, TRIED):
        notes.add_line(store, key, str(seat.rank))
    # In this order: whoever fails says so before it leaves.
    left = _read_ranks(store, LEFT) - _read_ranks(store, FAILED)
    everybody = set(range(seat.size))
    while (silent := everybody - _read_ranks(store, TRIED)) and time.monotonic() < until:
        time.sleep(LOOK_AGAIN_S)
    return left, silent


def _read_ranks(store: Store, key: str) -> set[int]:
    """The ranks that a note has, one per line."""
    return set(map(int, notes.read_lines(store, key)))


def _leave(store: Store, met: Met, rank: int, size: int) -> None:
    """Have the store forget the group once all have left. Waits for a store that does not answer, but not long."""

    def act() -> None:
        # Whatever goes wrong, the store is lost. Not over another connection, which torch would try to make for long.
        with suppress(Exception):
            carry_out(rendezvous.leave(met, rank, size), store, 0.0)

    threads.start(act).join(LEAVING_S)


def disconnect(group: dist.ProcessGroup) -> None:
    """End what `connect` gave: connections and store are given back, also where movers still hold it.

    On this rank alone, whatever the others do; one that was ended is left as it is. Waits for moves that go on beside.
    The last rank to disconnect removes from the store what it has of the group.
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
        if group.store is not None:
            stop_asking(group.store)
        group.close()
