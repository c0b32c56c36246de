"""Ports: the TCP ports on which this process listens, by the system's list of open files."""

from __future__ import annotations

import os
import socket
import stat
from contextlib import suppress

__all__ = ["find_listened_ports"]


def find_listened_ports() -> set[int]:
    """Return the set of TCP ports on which this process listens; it is empty if the system does not list open files."""
    ports = set()
    with suppress(OSError):
        for name in os.listdir("/dev/fd"):
            # Other threads close files meanwhile.
            with suppress(OSError):
                port = _find_listened_port(int(name))
                if port is not None:
                    ports.add(port)
    return ports


def _find_listened_port(fd: int) -> int | None:
    """The TCP port on which the open file listens; None if it does not listen."""
    if not stat.S_ISSOCK(os.fstat(fd).st_mode):
        return None
    with socket.fromfd(fd, socket.AF_INET6, socket.SOCK_STREAM) as opened:
        listens = opened.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        address = opened.getsockname()
    # Addresses of Unix sockets are strings.
    if not listens or not isinstance(address, tuple):
        return None
    port: int = address[1]
    return port
