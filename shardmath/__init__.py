"""shardmath: which ranks hold which pieces of which tensors, and how to get from one answer to another.

Everything here is an immutable value or a pure function; nothing does I/O and nothing imports torch. What only some
need is imported when it is first asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from shardmath.algebra.mesh import Mesh
from shardmath.algebra.runs import Runs, from_ranges
from shardmath.base.errors import (
    DigestError,
    ExchangeError,
    FormatError,
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
from shardmath.base.memo import clear_caches
from shardmath.layouts.layout import Layout
from shardmath.layouts.placement import (
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

if TYPE_CHECKING:
    from shardmath.amaxes.amaxes import Amaxes, plan_amaxes
    from shardmath.collectives.collective import Collective, recognise
    from shardmath.digests.content import Difference, digest_of, find_difference
    from shardmath.flows.certificate import Certificate
    from shardmath.flows.topology import Topology
    from shardmath.layouts.edits import window
    from shardmath.layouts.holdings import equivalent
    from shardmath.membership.leaving import without
    from shardmath.plans.adjoint import Transposed, adjoint
    from shardmath.plans.plan import Plan, Transfer, plan
    from shardmath.portions.dividing import divide
    from shardmath.programs.certify import certify, crossing_bytes
    from shardmath.programs.program import Program
    from shardmath.programs.scheduling import schedule
    from shardmath.proofs.simulate import simulate
    from shardmath.proofs.verify import verify
    from shardmath.recordings.recorded import Recorded
    from shardmath.recordings.sides import RecordedSide
    from shardmath.refits.refit import Refit, refit
    from shardmath.relabelling.relabelling import Relabelling, relabel
    from shardmath.storage.fitting import from_holdings
    from shardmath.transforms.transformed import Transformed, transformed

    __version__: str

LATE = {
    "Amaxes": "amaxes.amaxes",
    "Certificate": "flows.certificate",
    "Collective": "collectives.collective",
    "Difference": "digests.content",
    "Plan": "plans.plan",
    "Program": "programs.program",
    "Recorded": "recordings.recorded",
    "RecordedSide": "recordings.sides",
    "Refit": "refits.refit",
    "Relabelling": "relabelling.relabelling",
    "Topology": "flows.topology",
    "Transfer": "plans.plan",
    "Transformed": "transforms.transformed",
    "Transposed": "plans.adjoint",
    "adjoint": "plans.adjoint",
    "certify": "programs.certify",
    "crossing_bytes": "programs.certify",
    "digest_of": "digests.content",
    "divide": "portions.dividing",
    "equivalent": "layouts.holdings",
    "find_difference": "digests.content",
    "from_holdings": "storage.fitting",
    "plan": "plans.plan",
    "plan_amaxes": "amaxes.amaxes",
    "recognise": "collectives.collective",
    "refit": "refits.refit",
    "relabel": "relabelling.relabelling",
    "schedule": "programs.scheduling",
    "simulate": "proofs.simulate",
    "transformed": "transforms.transformed",
    "verify": "proofs.verify",
    "window": "layouts.edits",
    "without": "membership.leaving",
}
"""Where names are that are imported on use."""

FACES = {
    "buffers": "buffers",
    "families": "families",
    "formats": "formats",
    "pictures": "pictures",
    "rules": "families.rules",
    "storage": "storage",
    "store": "layouts.store",
    "traces": "traces",
    "transforms": "transforms",
}
"""Modules that people use by name, and where they are."""


def __getattr__(name: str) -> object:
    """What is imported on its first use. Raises AttributeError for what is not here."""
    if name in LATE:
        value = getattr(import_module(f"shardmath.{LATE[name]}"), name)
    elif name in FACES:
        value = import_module(f"shardmath.{FACES[name]}")
    elif name == "__version__":
        value = _version()
    else:
        raise AttributeError(f"module 'shardmath' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """What there is, imported or not."""
    return sorted({*__all__, *FACES, "__version__"})


def _version() -> str:
    """That of the installed package; looking it up takes longer than importing this."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("shardmath")
    except PackageNotFoundError:
        return "0+unknown"


__all__ = [
    "Amaxes",
    "Balanced",
    "BlockCyclic",
    "Certificate",
    "Collective",
    "Difference",
    "DigestError",
    "ExchangeError",
    "FormatError",
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
    "Recorded",
    "RecordedSide",
    "Refit",
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
    "Transformed",
    "Transposed",
    "adjoint",
    "certify",
    "clear_caches",
    "crossing_bytes",
    "digest_of",
    "divide",
    "equivalent",
    "find_difference",
    "from_holdings",
    "from_ranges",
    "plan",
    "plan_amaxes",
    "recognise",
    "refit",
    "relabel",
    "schedule",
    "simulate",
    "transformed",
    "verify",
    "window",
    "without",
]
