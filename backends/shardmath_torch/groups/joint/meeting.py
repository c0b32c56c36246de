"""Meeting: the store for a rendezvous, served by rank 0 at an address, or given by the caller.

A process that comes before rank 0, or loses rank 0's store, tries again until its time is over.
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
"""Time between two tries while nobody serves the store."""

LEAST_S = 1.0
"""Least time for a running store to answer."""

GRACE_S = 1.0
"""Time for torch to raise its own timeout; it never does if a stopped server had accepted the connection."""

LAST_PORT = 65535

LONGEST_HOST = 253
"""Most characters of a domain name (RFC 1035)."""

_T = TypeVar("_T")


class Address(NamedTuple):
    """The host and port at which a key-value store is served."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


def read_where(where: object) -> Address | Store:
    """Convert `where` to an Address if it is "host:port"; return a store unchanged. Raises ExchangeError for others."""
    if isinstance(where, Store):
        return where
    if isinstance(where, str):
        name, _, port = where.rpartition(":")
        host = name.removeprefix("[").removesuffix("]")
        if _is_host(host) and _is_port(port):
            return Address(host, int(port))
    fix = "pass 'host:port', where rank 0 serves a store, or a torch.distributed.Store"
    raise ExchangeError(f"where={shown(where)} is neither an address nor a store; {fix}")


def _is_host(text: str) -> bool:
    """Whether the text can be looked up: Python and torch raise errors of several kinds for other texts."""
    try:
        text.encode("idna")
    except UnicodeError:
        return False
    has_no_space = text.split() == [text]
    return len(text) <= LONGEST_HOST and text.isprintable() and has_no_space


def _is_port(text: str) -> bool:
    # The length first: Python refuses to read numbers of thousands of digits.
    is_number = text.isascii() and text.isdigit() and len(text) <= len(str(LAST_PORT))
    return is_number and 0 < int(text) <= LAST_PORT


def meet_at(where: Address | Store, serves: bool, until: float, meet: Callable[[Store], _T]) -> _T:
    """Call `meet` with the store at `where`, and return the result; if `serves` is True, this process runs the store's
    server. If the store at an address is lost, the store is opened and `meet` called again, until `time.monotonic()`
    reaches `until`.

    Raises ExchangeError if the store cannot be served, or is not there in time, and any exception of `meet`.
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
    """Run `meet` in the caller's store, over a fresh connection, since a waiting thread locks a connection.

    Two threads that connect at once over one would deadlock: each waits for the other rank, and holds the lock.
    """
    seconds_left = max(0.0, until - time.monotonic())
    try:
        return meet(threads.within(seconds_left + GRACE_S, partial(connect_anew, given)))
    except RuntimeError as error:
        what = f"the store passed as where= is lost: {error}"
        fix = "start its process again, and connect again on all ranks"
        raise ExchangeError(f"{what}; {fix}") from error


def _open(address: Address, serves: bool, until: float) -> Store:
    """Open the store at the address, served by this process or another."""
    if serves:
        _check_host(address, until)
    else:
        _await_server(address, until)
    seconds_left = max(LEAST_S, until - time.monotonic())
    make = partial(
        TCPStore,
        address.host,
        address.port,
        None,
        is_master=serves,
        timeout=timedelta(seconds=seconds_left),
        wait_for_workers=False,
        # Several groups of a process may use one address: the server ends with the last of them.
        multi_tenant=True,
    )
    try:
        return threads.within(seconds_left + GRACE_S, make)
    except RuntimeError as error:
        if not serves:
            raise _make_lost_error(address, error) from error
        raise _make_serving_error(address, error) from error


def _check_host(address: Address, until: float) -> None:
    """Raises ExchangeError for an unknown host: torch would look it up again and again, for twice the timeout."""
    seconds_left = max(0.0, until - time.monotonic())
    try:
        threads.within(seconds_left + GRACE_S, partial(socket.getaddrinfo, *address))
    except (OSError, RuntimeError) as error:
        raise _make_serving_error(address, error) from error


def _await_server(address: Address, until: float) -> None:
    """Return once a server listens there. Torch would ignore Ctrl-C while waiting, and log each attempt."""
    while True:
        seconds_left = until - time.monotonic()
        try:
            # In a thread: it looks the name up without a limit, and then tries each address for the whole time.
            connect = partial(socket.create_connection, address, max(seconds_left, LOOK_AGAIN_S))
            threads.within(max(seconds_left, 0.0) + GRACE_S, connect).close()
            return
        except (OSError, RuntimeError) as error:
            if seconds_left <= 0:
                raise _make_lost_error(address, error) from error
        time.sleep(LOOK_AGAIN_S)


def _make_serving_error(address: Address, error: Exception) -> ExchangeError:
    what = f"rank 0 cannot serve a store at {address}"
    fix = "give an address of rank 0's host with a free port, or a store that is served already"
    return ExchangeError(f"{what}: {_first_line(error)}; {fix}")


def _make_lost_error(address: Address, error: Exception) -> ExchangeError:
    what = f"no store answers at {address}, where rank 0 serves one ({_first_line(error)})"
    fix = f"call smt.connect({str(address)!r}, 0, ...) in time in the process of rank 0"
    return ExchangeError(f"{what}; {fix}")


def _first_line(error: Exception) -> str:
    """The first line of an error: torch's errors may continue with a C++ trace."""
    return next(iter(str(error).splitlines()), type(error).__name__)
