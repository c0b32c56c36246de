"""shardmath: which ranks hold which pieces of which tensors, and how to get from one answer to another.

Everything here is an immutable value or a pure function; nothing does I/O and nothing imports torch. What only some
need is imported when it is first asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from shardmath.adjoint import adjoint
from shardmath.errors import (
    ExchangeError,
    LayoutError,
    MeshError,
    NotationError,
    ParamLayoutError,
    PlacementError,
    PlanError,
    RunsError,
    ShardError,
    StoreError,
)
from shardmath.layout import Layout, equivalent
from shardmath.memo import clear_caches
from shardmath.mesh import Mesh
from shardmath.placement import (
    Balanced,
    BlockCyclic,
    Packed,
    Partial,
    Placement,
    Ragged,
    Replicate,
    Shard,
    StridedShard,
    Table,
)
from shardmath.plan import Plan, Transfer, plan
from shardmath.runs import Runs
from shardmath.simulate import simulate
from shardmath.topology import Topology
from shardmath.verify import verify

if TYPE_CHECKING:
    from shardmath.certificate import certify, crossing_bytes
    from shardmath.collectives import Collective, recognise
    from shardmath.cost import Certificate
    from shardmath.program import Program
    from shardmath.relabelling import Relabelling, relabel
    from shardmath.scheduling import schedule

    __version__: str

LATE = {
    "Certificate": "cost",
    "Collective": "collectives",
    "Program": "program",
    "Relabelling": "relabelling",
    "certify": "certificate",
    "crossing_bytes": "certificate",
    "recognise": "collectives",
    "relabel": "relabelling",
    "schedule": "scheduling",
}
"""Where names are that are imported on use; no module has the name of what it gives, which would hide it."""


def __getattr__(name: str) -> object:
    if name == "buffers":
        return import_module("shardmath.buffers")
    if name == "__version__":
        return _version()
    if name not in LATE:
        raise AttributeError(f"module 'shardmath' has no attribute {name!r}")
    return getattr(import_module(f"shardmath.{LATE[name]}"), name)


def _version() -> str:
    """That of the installed package; looking it up takes longer than importing this."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("shardmath")
    except PackageNotFoundError:
        return "0+unknown"


__all__ = [
    "Balanced",
    "BlockCyclic",
    "Certificate",
    "Collective",
    "ExchangeError",
    "Layout",
    "LayoutError",
    "Mesh",
    "MeshError",
    "NotationError",
    "Packed",
    "ParamLayoutError",
    "Partial",
    "Placement",
    "PlacementError",
    "Plan",
    "PlanError",
    "Program",
    "Ragged",
    "Relabelling",
    "Replicate",
    "Runs",
    "RunsError",
    "Shard",
    "ShardError",
    "StoreError",
    "StridedShard",
    "Table",
    "Topology",
    "Transfer",
    "adjoint",
    "certify",
    "clear_caches",
    "crossing_bytes",
    "equivalent",
    "plan",
    "recognise",
    "relabel",
    "schedule",
    "simulate",
    "verify",
]
