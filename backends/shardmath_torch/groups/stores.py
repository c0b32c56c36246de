"""Stores: key-value stores of process groups, which a process serves that may end before the others.

Once it has, torch writes a page about it to stderr whenever it asks the store. So a connection that nobody uses is
looked at before: it ends with that process.
"""

from __future__ import annotations

import socket
from weakref import WeakKeyDictionary

from shardmath_torch.groups.compat import Group, PrefixStore, Store, TCPStore, store_of
from shardmath_torch.groups.joint_group import JointGroup
from shardmath_torch.groups.ports import find_listened_ports

__all__ = ["apart_from", "check_served", "connect_anew", "serves_store"]

CONNECT_S = 1.0
"""For a connection to a server that is there."""

_apart: WeakKeyDictionary[Store, Store] = WeakKeyDictionary()
"""Our own connections to stores, by torch's."""

_unused: WeakKeyDictionary[Store, socket.socket | None] = WeakKeyDictionary()
"""Connections that end with the stores' servers; None where there is none to be looked at."""


def apart_from(store: Store) -> Store:
    """The same store by a connection of our own: torch's is locked while one of its calls waits for other ranks.

    Makes it where there is none, which takes as long as the store takes to answer. Raises as `check_served` does.
    """
    check_served(store)
    if store not in _apart:
        clone = getattr(store, "clone", None)
        _apart[store] = store if clone is None else clone()
    return _apart[store]


def connect_anew(store: Store) -> Store:
    """The same store by a connection that no other call uses, in torch or of ours; itself where it has none.

    The server ends with the store that was given, and not with this. Raises RuntimeError where it does not answer.
    """
    if _find_server(store) is None:
        return store
    # torch's stubs lack it.
    fresh: Store = store.clone()  # type: ignore[attr-defined]
    return fresh


def check_served(store: Store) -> None:
    """Raises RuntimeError where the process that serves the store has ended."""
    if store not in _unused:
        _unused[store] = _connect(store)
    connection = _unused[store]
    if connection is not None and _has_ended(connection):
        raise RuntimeError("the process that serves the store has ended")


def _has_ended(connection: socket.socket) -> bool:
    """Whether the other end has."""
    try:
        return not connection.recv(1)
    except BlockingIOError:
        return False
    except OSError:
        return True


def _connect(store: Store) -> socket.socket | None:
    """A connection to the store's server, if that is another process's."""
    server = _find_server(store)
    if server is None or _is_served_here(server):
        return None
    try:
        connection = socket.create_connection((server.host, server.port), CONNECT_S)
    except OSError:
        return None
    connection.setblocking(False)
    return connection


def serves_store(group: Group) -> bool:
    """Whether this process serves the group's store to others: whether it listens on its port."""
    if isinstance(group, JointGroup) and group.serves_store is not None:
        return group.serves_store
    store = store_of(group)
    server = None if store is None else _find_server(store)
    return server is not None and _is_served_here(server)


def _is_served_here(server: TCPStore) -> bool:
    return server.port in find_listened_ports()


def _find_server(store: Store) -> TCPStore | None:
    """What knows where the store is served; None of one without a server."""
    # torch tells only in the store's repr, which looks names up and may take seconds.
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store if isinstance(store, TCPStore) else None
