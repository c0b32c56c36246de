"""Stores: key-value stores of process groups, whose serving process may end before the others.

After that, each of torch's requests to the store writes a page to stderr. So a separate idle connection is checked
before a request: it ends with the serving process.
"""

from __future__ import annotations

import socket
from weakref import WeakKeyDictionary

from shardmath_torch.groups.compat import Group, PrefixStore, Store, TCPStore, store_of
from shardmath_torch.groups.joint_group import JointGroup
from shardmath_torch.groups.ports import find_listened_ports

__all__ = ["apart_from", "check_served", "connect_anew", "serves_store"]

CONNECT_S = 1.0
"""Time to connect to a running server."""

_clones: WeakKeyDictionary[Store, Store] = WeakKeyDictionary()
"""Our own connections to stores, by torch's."""

_idle: WeakKeyDictionary[Store, socket.socket | None] = WeakKeyDictionary()
"""Idle connections, which end with the stores' servers; None for a store without another process as its server."""


def apart_from(store: Store) -> Store:
    """Return a second connection to the server of `store`, for use while another thread waits on `store` and so locks
    it. Every call returns the same connection; a store that cannot be cloned is returned itself.

    The first call connects, and waits until the store answers. Raises as `check_served` does.
    """
    check_served(store)
    if store not in _clones:
        _clones[store] = _clone(store)
    return _clones[store]


def _clone(store: Store) -> Store:
    """A clone of the store; the store itself if it cannot be cloned."""
    clone = getattr(store, "clone", None)
    try:
        return store if clone is None else clone()
    except RuntimeError as error:
        # A store written in Python that has no `clone` inherits torch's, which only raises.
        if "pure virtual" not in str(error):
            raise
        return store


def connect_anew(store: Store) -> Store:
    """Return a new connection, for this caller only, to the server of `store`. If `store` has no server, it is returned
    itself.

    A server lives as long as the given store, not as the returned one. Raises RuntimeError if it does not answer.
    """
    if _find_server(store) is None:
        return store
    # torch's stubs lack it.
    fresh: Store = store.clone()  # type: ignore[attr-defined]
    return fresh


def check_served(store: Store) -> None:
    """Raise RuntimeError if the process that serves the key-value store has ended since the first check of this
    store."""
    if store not in _idle:
        _idle[store] = _connect(store)
    connection = _idle[store]
    if connection is not None and _has_ended(connection):
        raise RuntimeError("the process that serves the store has ended")


def _has_ended(connection: socket.socket) -> bool:
    """Whether the server closed the connection."""
    try:
        return not connection.recv(1)
    except BlockingIOError:
        return False
    except OSError:
        return True


def _connect(store: Store) -> socket.socket | None:
    """Connect to the store's server; None if this process serves it, or it does not answer."""
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
    """Whether this process serves the group's store, that is, listens on its port."""
    if isinstance(group, JointGroup) and group.serves_store is not None:
        return group.serves_store
    store = store_of(group)
    server = None if store is None else _find_server(store)
    return server is not None and _is_served_here(server)


def _is_served_here(server: TCPStore) -> bool:
    return server.port in find_listened_ports()


def _find_server(store: Store) -> TCPStore | None:
    """The underlying TCPStore, which knows the server's address; None for a store without a server."""
    # Torch's other source, the store's repr, looks names up and may take seconds.
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store if isinstance(store, TCPStore) else None
