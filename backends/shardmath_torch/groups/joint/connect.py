"""Connect: one process group of processes of several jobs, each with the rank that it passes.

group = smt.connect("trainer-0:29600", rank, size)     # on every process of every job
move = smt.compile(plan, group=group)
smt.disconnect(group)

All of a group's notes in the store have one prefix. The last rank to leave removes them: by `disconnect`, or after it
failed to reach the others.
"""

from __future__ import annotations

import os
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
"""Least time for connecting the ranks, once all have come."""

GRACE_S = 1.0
"""Time for finding out which ranks are gone if connecting fails."""

LEAVING_S = 1.0
"""Longest wait for the store to note that this rank leaves: its server may be gone."""

LOOK_AGAIN_S = 0.02

MOST = 2**31 - 1
"""Most ranks of a group: torch counts them in 32 bits."""

LONGEST_TEXT = 4096
"""Most bytes of a name or run: a TCPStore closes the connection over which a key of more than 8192 comes."""

TRIED, FAILED = "tried", "failed"
"""Notes below a full meeting: the ranks that have tried to connect to the others, and those that could not."""

TOKEN_BYTES = 8


@compat.untraced
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
    """Connect `size` processes of any jobs, this one as `rank`, and return their process group, to pass as `group=` to
    functions of this module. Collective. The processes meet in `where`, a store or its address "host:port"; `name`
    tells groups in one store apart, and `run`, equal on all ranks, keeps out processes left from an earlier start of
    the jobs.

    `where` is "host:port", where the process of rank 0 serves a key-value store (a TCPStore) until it disconnects, or a
    store. `backend` is "gloo" or "nccl". `timeout` is the time to wait for all ranks to come, in seconds, and then the
    time limit of the group's collectives. Groups that exist in one store at the same time must have different names.
    The same name may be used again, as after a rank has died: processes of two groups are never mixed.

    `run`, a text for this start of the jobs, keeps out processes of an earlier run that have not ended; processes that
    pass it must pass the same one. If rank 0 is given none, it draws one; the others take rank 0's. Pass the group's
    `run` whenever this process connects again, and to a process that replaces a dead one.

    Torch's registry does not know the group, and this process's default group, if it has one, is not touched. Ranks of
    plans are places in this group. Raises ExchangeError for invalid arguments, naming the ranks that do not come in
    time, and if rank 0 is of another run; and on all ranks if two processes give one rank, or ranks give different
    sizes or backends.
    """
    place = read_where(where)
    rank, size = _check_rank(rank, size)
    _check_backend(backend)
    if not is_time(timeout):
        raise ExchangeError(word_bad_time(timeout))
    for argument, text in (("name", name), ("run", run)):
        _check_text(argument, text)
    until = time.monotonic() + float(timeout)
    serves = rank == 0

    def find(store: Store) -> tuple[Store, Seat, Met]:
        store_of_name = _of_name(store, name)
        seat = Seat(rank, size, backend, secrets.token_hex(TOKEN_BYTES), run)
        return store_of_name, seat, carry_out(meet(seat), store_of_name, until)

    store_of_name, seat, met = meet_at(place, serves, until, find)
    group_store = PrefixStore(met.meeting, store_of_name)
    seconds_left = max(LEAST_S, until - time.monotonic())
    label = f"shardmath/joint/{name}/{met.meeting}"
    leave = partial(_leave, store_of_name, met, rank, size)
    process = os.getpid()
    try:
        channel = _connect(group_store, seat, seconds_left, label)
        channel.set_timeout(timedelta(seconds=float(timeout)))
        serves_store = serves if isinstance(place, Address) else None
        group = JointGroup(channel, group_store, backend, name, met.run, leave, serves_store, place)
        # No other group has this prefix, so the goodbyes need no name.
        turns_of(group).listen(group_store, "", rank, range(size), stores.serves_store(group))
    except BaseException:
        # A process that was forked here, as by a signal handler, is not the rank.
        if os.getpid() == process:
            leave()
        raise
    return group


def _of_name(store: Store, name: str) -> Store:
    """The part of the store for groups of this name."""
    return PrefixStore(f"shardmath/joint/{name}", store)


def call_off(
    where: str | Store, rank: int, why: str, *, name: str, timeout: float = DEFAULT_TIMEOUT_S
) -> None:
    """Make every call of `connect` with the name `name` in the store `where` raise ExchangeError with the text `why`,
    both waiting and later calls. Call it in another thread of the process that connects as `rank`; `timeout` limits the
    wait for the store, in seconds.

    Groups that are connected already are not touched. Raises ExchangeError if the store does not answer within
    `timeout` seconds.
    """
    until = time.monotonic() + timeout

    def close(store: Store) -> None:
        carry_out(rendezvous.call_off(why), _of_name(store, name), until)

    meet_at(read_where(where), rank == 0, until, close)


def _check_rank(rank: object, size: object) -> tuple[int, int]:
    """Both as ints. Raises ExchangeError for a rank outside of the group, or more ranks than torch can count."""
    number = as_integer(size, "size", ExchangeError)
    place = as_integer(rank, "rank", ExchangeError)
    if not 0 < number <= MOST:
        what = f"size={number} is not a number of ranks from 1 to {MOST}, the most of a torch group"
        raise ExchangeError(f"{what}; pass how many processes connect")
    if not 0 <= place < number:
        fix = f"give this process's place in the group, 0 to {number - 1}"
        raise ExchangeError(f"rank={place} is not in a group of size={number}; {fix}")
    return place, number


def _check_backend(backend: str) -> None:
    """Raises ExchangeError for an unknown backend, or one that this process cannot use."""
    if known(backend, tuple(BACKENDS)) is None:
        ways = " or ".join(map(repr, BACKENDS))
        raise ExchangeError(f"backend={shown(backend)} is unknown; pass {ways}")
    if backend == "nccl" and not (dist.is_nccl_available() and torch.cuda.is_available()):
        what = "torch was built without NCCL, or finds no GPU in this process"
        raise ExchangeError(
            f"backend='nccl', but {what}; pass 'gloo', or run on a GPU with a torch that has NCCL"
        )


def _check_text(argument: str, text: object) -> None:
    """Raises ExchangeError for a text that cannot be part of a store's key."""
    if not isinstance(text, str):
        raise ExchangeError(f"{argument}={shown(text)} is not a str; pass a str, or leave it out")
    try:
        length = len(text.encode())
    except UnicodeEncodeError as error:
        what = f"{argument}={shown(text)} has half a surrogate pair at character {error.start}"
        raise ExchangeError(f"{what}; pass a text that UTF-8 can encode") from None
    if length > LONGEST_TEXT:
        what = f"{argument}={shown(text)} has {length} bytes in UTF-8"
        raise ExchangeError(f"{what}; pass a text of at most {LONGEST_TEXT}")


def _connect(store: Store, seat: Seat, seconds_left: float, label: str) -> dist.ProcessGroup:
    """Connect the ranks of a full meeting. Raises ExchangeError, naming the ranks that are gone."""

    def make() -> dist.ProcessGroup:
        channel = make_channel(seat.backend, store, seat.rank, seat.size, seconds_left, label)
        # A rank that cannot connect looks at these notes to find which ranks are silent.
        notes.add_line(store, TRIED, str(seat.rank))
        return channel

    try:
        return threads.within(seconds_left + GRACE_S, make)
    except RuntimeError as error:
        what = f"all ranks called smt.connect, and then {_word_lost(store, seat)}"
        fix = "start them again on hosts that reach each other by network, and connect again"
        raise ExchangeError(f"{what}: {error}; {fix}") from error


def _word_lost(store: Store, seat: Seat) -> str:
    """Words for the ranks that could not be reached: those that left, or have not tried to connect."""
    among = plural(seat.size, "rank")
    try:
        # `_find_lost` waits for GRACE_S, and the store may take as long again to answer.
        gone, silent = threads.within(2 * GRACE_S, lambda: _find_lost(store, seat))
    except RuntimeError:
        # Without the store other lost ranks cannot be found.
        return f"rank 0 of {among} could not be reached"
    if gone and not silent:
        return f"{show_ranks(sorted(gone))} of {among} left"
    who = show_ranks(sorted(silent)) if silent else "a rank"
    return f"{who} of {among} could not be reached"


def _find_lost(store: Store, seat: Seat) -> tuple[set[int], set[int]]:
    """The ranks that have left, and those that have not noted within GRACE_S that they tried to connect."""
    until = time.monotonic() + GRACE_S
    for key in (FAILED, TRIED):
        notes.add_line(store, key, str(seat.rank))
    # In this order: a rank that fails notes so before it leaves.
    gone = _read_ranks(store, LEFT) - _read_ranks(store, FAILED)
    everybody = set(range(seat.size))
    while (silent := everybody - _read_ranks(store, TRIED)) and time.monotonic() < until:
        time.sleep(LOOK_AGAIN_S)
    return gone, silent


def _read_ranks(store: Store, key: str) -> set[int]:
    """The ranks of a note, one per line."""
    return set(map(int, notes.read_lines(store, key)))


def _leave(store: Store, met: Met, rank: int, size: int) -> None:
    """Note that this rank leaves; the last rank removes the group's notes. Waits at most LEAVING_S."""

    def act() -> None:
        # On any error the store is lost; to connect to it again, torch might try for long.
        with suppress(Exception):
            # The time limit, 0.0, is only for pauses, and leaving has none.
            carry_out(rendezvous.leave(met, rank, size), store, 0.0)

    threads.start(act).join(LEAVING_S)


@compat.untraced
def disconnect(group: dist.ProcessGroup) -> None:
    """End a process group that `connect` returned: close its connections and release its store. Objects that still
    refer to the group cannot use it any longer.

    Not collective: this rank leaves, whatever the others do. A group that has ended is left as it is. Waits for
    background moves. The last rank to disconnect removes the group's notes from the store.

    A message may be lost to a rank that has not received it: end with a call that all ranks wait in, as a move with
    `acknowledge=True`. Raises ExchangeError for any other group, inside of a call on this group, and if another
    thread's call lasts longer than the group's time limit.
    """
    if not isinstance(group, JointGroup):
        what = f"group={shown(group)} was not made by smt.connect"
        fix = "pass a group that smt.connect returned; torch.distributed.destroy_process_group ends others"
        raise ExchangeError(f"{what}; {fix}")
    if not group.is_open:
        return
    compat.check_not_forked(group)
    patience = compat.time_limit_of(group)
    with turns_of(group).ending(patience, "its process group was disconnected"):
        if group.store is not None:
            stop_asking(group.store)
        group.close()
