"""Transports: the package that carries a group's bytes, by the group's backend.

Transports import this package, and need not be installed if they are not used. So they are imported by name, when a
group is joined.
"""

from __future__ import annotations

import importlib
from types import ModuleType

from shardmath.base.errors import ExchangeError
from shardmath_torch.groups import compat
from shardmath_torch.groups.agreement.party import Party
from shardmath_torch.groups.agreement.turns import turns_of

__all__ = ["TRANSPORTS", "join", "join_within", "package_of"]

LONGEST_GRACE_S = 5.0
"""Most time for finding out who failed."""

TRANSPORTS = {"gloo": "shardmath_gloo", "nccl": "shardmath_nccl"}
"""The package that serves a backend of torch.distributed."""


def package_of(group: compat.Group) -> ModuleType:
    """Return the transport package for the group's backend, such as shardmath_gloo. Raises ExchangeError for a backend
    other than gloo and NCCL."""
    backend = compat.backend_of(group)
    if backend not in TRANSPORTS:
        known = " or ".join(map(repr, TRANSPORTS))
        what = f"the process group has backend {backend!r}, where {known} is needed"
        raise ExchangeError(f"{what}; make a group with that, as by dist.new_group(backend=...)")
    return importlib.import_module(TRANSPORTS[backend])


def join(group: compat.Group, patience: float, grace: float) -> Party:
    """Return this rank's connections in the group (`Party`): calls wait `patience` seconds for other ranks, and after a
    failure `grace` seconds more for reports on it. Sends nothing."""
    wire = package_of(group).open_wire(group, patience)
    rank = compat.rank_in(group)
    ranks = compat.ranks_of(group)
    return Party(group, rank, ranks, wire, turns_of(group), patience, grace)


def join_within(group: compat.Group, limit: float) -> Party:
    """Return this rank's connections in the group (`Party`), with timeouts such that a call raises within `limit`
    seconds after it begins to wait for a failed rank. The limit includes the time to find out which rank failed
    first."""
    grace = min(LONGEST_GRACE_S, limit / 5)
    # An extra fifth of the grace is for reporting the failure.
    return join(group, limit - 1.2 * grace, grace)
