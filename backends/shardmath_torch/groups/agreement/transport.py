"""Transports: the package that carries a group's bytes, by the group's backend.

They stand above this package, and each is there only where it is used: hence imported by name, when a group is joined.
"""

from __future__ import annotations

import importlib
from types import ModuleType

from shardmath.base.errors import ExchangeError
from shardmath_torch.groups import compat
from shardmath_torch.groups.agreement.party import Party
from shardmath_torch.groups.agreement.turns import turns_of

__all__ = ["TRANSPORTS", "join", "package_of"]

TRANSPORTS = {"gloo": "shardmath_gloo", "nccl": "shardmath_nccl"}
"""The package that serves a backend of torch.distributed."""


def package_of(group: compat.Group) -> ModuleType:
    """The package that serves the group. Raises ExchangeError if none does."""
    backend = compat.backend_of(group)
    if backend not in TRANSPORTS:
        known = " or ".join(TRANSPORTS)
        raise ExchangeError(f"the group's backend is {backend!r}; init_process_group with {known}")
    return importlib.import_module(TRANSPORTS[backend])


def join(group: compat.Group, patience: float, grace: float) -> Party:
    """This rank in the group, its times in seconds as `Party` has them. Talks to nobody."""
    wire = package_of(group).open_wire(group, patience)
    rank = compat.rank_in(group)
    ranks = compat.ranks_of(group)
    return Party(group, rank, ranks, wire, turns_of(group), patience, grace)
