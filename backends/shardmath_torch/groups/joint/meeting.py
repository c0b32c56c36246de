"""Meeting places: a store at an address, served by rank 0, or one that the caller has.

Who comes before rank 0 tries again until its time is over, and so does who was there when rank 0's process ended.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import NamedTuple, TypeVar

from shardmath.base.errors import ExchangeError
from shardmath.base.text import shown
from shardmath_torch.groups.agreement import threads
from shardmath_torch.groups.compat import Store, TCPStore
from shardmath_torch.groups.stores import connect_anew

__all__ = ["Address", "meet_at", "read_where"]

LOOK_AGAIN_S = 0.02
"""While nobody serves the store."""

LEAST_S = 1.0
"""For an answer of a store that is there."""

GRACE_S = 1.0
"""For torch to say itself that its time is over; it never does if a server that has stopped accepted."""

LAST_PORT = 65535

LONGEST_HOST = 253
"""Characters of a name that the domain name system has (RFC 1035)."""

_T = TypeVar("_T")


class Address(NamedTuple):
    """Where a store is served."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


def read_where(where: object) -> Address | Store:
    """The address in "host:port", or the store itself. Raises ExchangeError for anything else."""
    if isinstance(where, Store):
        return where
    if isinstance(where, str):
        name, _, port = where.rpartition(":")
        host = name.removeprefix("[").removesuffix("]")
        if _is_host(host) and _is_port(port):
            return Address(host, int(port))
    fix = "pass 'host:port', where rank 0 serves a store, or a torch.distributed.Store"
    raise ExchangeError(f"where={shown(where)} is not a place to meet; {fix}")


def _is_host(text: str) -> bool:
    """Whether it can be looked up: Python and torch raise errors of several kinds for other texts."""
    try:
        text.encode("idna")
    except UnicodeError:
        return False
    return len(text) <= LONGEST_HOST and text.isprintable() and text.split() == [text]


def _is_port(text: str) -> bool:
    # Python refuses to read numbers of thousands of digits.
    is_number = text.isascii() and text.isdigit() and len(text) <= len(str(LAST_PORT))
    return is_number and 0 < int(text) <= LAST_PORT


def meet_at(where: Address | Store, serves: bool, until: float, meet: Callable[[Store], _T]) -> _T:
    """What `meet` gives in the store: once more where the store is lost meanwhile, until that time.

    Raises ExchangeError where it cannot be served, or is not there in time; and what `meet` does.
    """
    if isinstance(where, Store):
        return _meet_in(where, until, meet)
    while True:
        store = _open(where, serves, until)
        try:
            return meet(store)
        except RuntimeError as error:
            if time.monotonic() >= until:
                raise _make_lost_error(where, error) from error
        # Closed before another is opened.
        del store
        time.sleep(LOOK_AGAIN_S)


def _meet_in(given: Store, until: float, meet: Callable[[Store], _T]) -> _T:
    """What `meet` gives in the caller's store. Other threads may wait in that, which locks its connection.

    So do two threads that connect at once: each would wait for the other rank, and hold what the other thread needs.
    """
    left = max(0.0, until - time.monotonic())
    try:
        return meet(threads.within(left + GRACE_S, partial(connect_anew, given)))
    except RuntimeError as error:
        raise ExchangeError(f"the store in which ranks meet is lost: {error}") from error


def _open(address: Address, serves: bool, until: float) -> Store:
    """The store at the address, served by this process or another."""
    if serves:
        _check_known(address, until)
    else:
        _knock(address, until)
    left = max(LEAST_S, until - time.monotonic())
    make = partial(
        TCPStore,
        address.host,
        address.port,
        None,
        is_master=serves,
        timeout=timedelta(seconds=left),
        wait_for_workers=False,
        # Several groups of a process may meet at one address: the last to end it ends the server.
        multi_tenant=True,
    )
    try:
        return threads.within(left + GRACE_S, make)
    except RuntimeError as error:
        if not serves:
            raise _make_lost_error(address, error) from error
        raise _make_serving_error(address, error) from error


def _check_known(address: Address, until: float) -> None:
    """Raises ExchangeError for a host of no address: torch would look it up again and again, twice as long as told."""
    left = max(0.0, until - time.monotonic())
    try:
        threads.within(left + GRACE_S, partial(socket.getaddrinfo, *address))
    except (OSError, RuntimeError) as error:
        raise _make_serving_error(address, error) from error


def _knock(address: Address, until: float) -> None:
    """Return once somebody listens there. Torch would wait deaf to Ctrl-C, and write of each attempt."""
    while True:
        left = until - time.monotonic()
        try:
            # Beside: it looks the name up without a limit, and then gives each address the whole time.
            connect = partial(socket.create_connection, address, max(left, LOOK_AGAIN_S))
            threads.within(max(left, 0.0) + GRACE_S, connect).close()
            return
        except (OSError, RuntimeError) as error:
            if left <= 0:
                raise _make_lost_error(address, error) from error
        time.sleep(LOOK_AGAIN_S)


def _make_serving_error(address: Address, error: Exception) -> ExchangeError:
    what = f"rank 0 cannot serve a store at {address}"
    fix = "give an address of its own with a free port, or a store that is served already"
    return ExchangeError(f"{what}: {_first_line(error)}; {fix}")


def _make_lost_error(address: Address, error: Exception) -> ExchangeError:
    what = f"rank 0 did not come in time, or does not serve a store at {address}"
    fix = "see that it runs, and connects to the same address"
    return ExchangeError(f"{what} ({_first_line(error)}); {fix}")


def _first_line(error: Exception) -> str:
    """Torch's errors may go on with a trace of C++."""
    return next(iter(str(error).splitlines()), type(error).__name__)
