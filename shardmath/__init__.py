"""shardmath: which ranks hold which pieces of which tensors, and how to get from one answer to another.

Everything here is an immutable value or a pure function; nothing does I/O and nothing imports torch.
"""

from shardmath.adjoint import adjoint
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
from shardmath.runs import Runs
from shardmath.simulate import simulate
from shardmath.verify import verify

__all__ = [
    "Balanced",
    "BlockCyclic",
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
    "Ragged",
    "Replicate",
    "Runs",
    "RunsError",
    "Shard",
    "ShardError",
    "StoreError",
    "StridedShard",
    "Table",
    "Transfer",
    "adjoint",
    "equivalent",
    "plan",
    "simulate",
    "verify",
]
