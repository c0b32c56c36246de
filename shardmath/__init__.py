"""shardmath: which ranks hold which pieces of which tensors, and how to get from one answer to another.

Everything here is an immutable value or a pure function; nothing does I/O and nothing imports torch.
"""

from shardmath.adjoint import adjoint
from shardmath.certify import certify
from shardmath.collectives import Collective, recognise
from shardmath.cost import Certificate
from shardmath.errors import (
    ExchangeError,
    LayoutError,
    MeshError,
    NotationError,
    PlacementError,
    PlanError,
    RunsError,
    ShardError,
    StoreError,
)
from shardmath.layout import Layout, equivalent
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
from shardmath.program import Program
from shardmath.relabel import Relabelling, relabel
from shardmath.runs import Runs
from shardmath.schedule import schedule
from shardmath.simulate import simulate
from shardmath.topology import Topology
from shardmath.verify import verify

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
    "equivalent",
    "plan",
    "recognise",
    "relabel",
    "schedule",
    "simulate",
    "verify",
]
