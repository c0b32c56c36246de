"""shardmath: which ranks hold which pieces of which tensors, and how to get from one answer to another.

Everything here is an immutable value or a pure function; nothing does I/O and nothing imports torch. What only some
need is imported when it is first asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING

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
from shardmath.base.moved import forward
from shardmath.layouts.algebra.mesh import Mesh
from shardmath.layouts.algebra.runs import Runs, from_ranges
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
    from shardmath.layouts.edits import window
    from shardmath.layouts.fitting import from_holdings
    from shardmath.layouts.holdings import equivalent
    from shardmath.models.recordings.recorded import Recorded
    from shardmath.models.recordings.sides import RecordedSide
    from shardmath.models.refits.dividing import divide
    from shardmath.models.refits.refit import Refit, refit
    from shardmath.plans.adjoint import Transposed, adjoint
    from shardmath.plans.collectives.collective import Collective, recognise
    from shardmath.plans.flows.certificate import Certificate
    from shardmath.plans.flows.topology import Topology
    from shardmath.plans.membership.leaving import without
    from shardmath.plans.plan import Plan, Transfer, plan
    from shardmath.plans.programs.certify import certify, crossing_bytes
    from shardmath.plans.programs.program import Program
    from shardmath.plans.programs.scheduling import schedule
    from shardmath.plans.relabelling.relabelling import Relabelling, relabel
    from shardmath.proofs.simulate import simulate
    from shardmath.proofs.verify import verify
    from shardmath.values.amaxes.amaxes import Amaxes, plan_amaxes
    from shardmath.values.digests.content import Difference, digest_of, find_difference
    from shardmath.values.transforms.transformed import Transformed, transformed

    __version__: str

LATE = {
    "Amaxes": "values.amaxes.amaxes",
    "Certificate": "plans.flows.certificate",
    "Collective": "plans.collectives.collective",
    "Difference": "values.digests.content",
    "Plan": "plans.plan",
    "Program": "plans.programs.program",
    "Recorded": "models.recordings.recorded",
    "RecordedSide": "models.recordings.sides",
    "Refit": "models.refits.refit",
    "Relabelling": "plans.relabelling.relabelling",
    "Topology": "plans.flows.topology",
    "Transfer": "plans.plan",
    "Transformed": "values.transforms.transformed",
    "Transposed": "plans.adjoint",
    "adjoint": "plans.adjoint",
    "certify": "plans.programs.certify",
    "crossing_bytes": "plans.programs.certify",
    "digest_of": "values.digests.content",
    "divide": "models.refits.dividing",
    "equivalent": "layouts.holdings",
    "find_difference": "values.digests.content",
    "from_holdings": "layouts.fitting",
    "plan": "plans.plan",
    "plan_amaxes": "values.amaxes.amaxes",
    "recognise": "plans.collectives.collective",
    "refit": "models.refits.refit",
    "relabel": "plans.relabelling.relabelling",
    "schedule": "plans.programs.scheduling",
    "simulate": "proofs.simulate",
    "transformed": "values.transforms.transformed",
    "verify": "proofs.verify",
    "window": "layouts.edits",
    "without": "plans.membership.leaving",
}
"""Where names are that are imported on use."""

FACES = (
    "buffers",
    "formats",
    "models",
    "pictures",
    "rules",
    "storage",
    "store",
    "traces",
    "transforms",
)
"""Modules that people use by name."""

forward(
    {
        "shardmath.algebra": "shardmath.layouts.algebra",
        "shardmath.amaxes": "shardmath.values.amaxes",
        "shardmath.changes": "shardmath.values.changes",
        "shardmath.cli": "shardmath.display.cli",
        "shardmath.collectives": "shardmath.plans.collectives",
        "shardmath.digests": "shardmath.values.digests",
        "shardmath.engines": "shardmath.models.systems",
        "shardmath.families": "shardmath.models.systems",
        "shardmath.families.styles": "shardmath.layouts.styles",
        "shardmath.flows": "shardmath.plans.flows",
        "shardmath.membership": "shardmath.plans.membership",
        "shardmath.models.systems.hf_core": "shardmath.models.systems.hugging_face",
        "shardmath.models.systems.megatron_core": "shardmath.models.systems.megatron",
        "shardmath.models.systems.sglang_core": "shardmath.models.systems.sglang",
        "shardmath.models.systems.vllm_core": "shardmath.models.systems.vllm",
        "shardmath.numbers": "shardmath.values.formats",
        "shardmath.portions": "shardmath.models.refits",
        "shardmath.programs": "shardmath.plans.programs",
        "shardmath.protocol": "shardmath.plans.protocol",
        "shardmath.recordings": "shardmath.models.recordings",
        "shardmath.refits": "shardmath.models.refits",
        "shardmath.relabelling": "shardmath.plans.relabelling",
    }
)


def __getattr__(name: str) -> object:
    """What is imported on its first use. Raises AttributeError for what is not here."""
    if name in LATE:
        value = getattr(import_module(f"shardmath.{LATE[name]}"), name)
    elif name == "families":
        value = import_module("shardmath.families")
    elif name in FACES:
        value = import_module(f"shardmath.{name}")
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
