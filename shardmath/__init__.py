"""shardmath: which ranks hold which pieces of which tensors, and how to get from one answer to another.

Everything here is an immutable value or a pure function; nothing does I/O but `Plan.html`, and nothing imports torch.
What only some need is imported when it is first asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from shardmath.base.errors import (
    DigestError as DigestError,
)
from shardmath.base.errors import (
    ExchangeError as ExchangeError,
)
from shardmath.base.errors import (
    FormatError as FormatError,
)
from shardmath.base.errors import (
    LayoutError as LayoutError,
)
from shardmath.base.errors import (
    MeshError as MeshError,
)
from shardmath.base.errors import (
    NotationError as NotationError,
)
from shardmath.base.errors import (
    ParamLayoutError as ParamLayoutError,
)
from shardmath.base.errors import (
    PlacementError as PlacementError,
)
from shardmath.base.errors import (
    PlanError as PlanError,
)
from shardmath.base.errors import (
    RunsError as RunsError,
)
from shardmath.base.errors import (
    ShardError,
)
from shardmath.base.errors import (
    StoreError as StoreError,
)
from shardmath.base.memo import clear_caches
from shardmath.base.moved import find_former, forward
from shardmath.layouts.algebra.mesh import Mesh
from shardmath.layouts.algebra.runs import Runs, from_ranges
from shardmath.layouts.from_type import register_strategies as _register_strategies
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
    from shardmath import buffers as buffers
    from shardmath import content as content
    from shardmath import errors as errors
    from shardmath import formats as formats
    from shardmath import models as models
    from shardmath import pictures as pictures
    from shardmath import rules as rules
    from shardmath import storage as storage
    from shardmath import store as store
    from shardmath import traces as traces
    from shardmath import transforms as transforms
    from shardmath.display.explorer.page import explore
    from shardmath.layouts.edits import window
    from shardmath.layouts.fitting import from_holdings
    from shardmath.layouts.holdings import equivalent
    from shardmath.models.recordings.recorded import Recorded as Recorded
    from shardmath.models.recordings.sides import RecordedSide as RecordedSide
    from shardmath.models.refits.dividing import divide
    from shardmath.models.refits.refit import Refit, refit
    from shardmath.plans.adjoint import Transposed as Transposed
    from shardmath.plans.adjoint import adjoint
    from shardmath.plans.collectives.collective import Collective as Collective
    from shardmath.plans.collectives.collective import recognize
    from shardmath.plans.flows.certificate import Certificate
    from shardmath.plans.flows.topology import Topology
    from shardmath.plans.membership.leaving import without
    from shardmath.plans.plan import Plan, plan
    from shardmath.plans.programs.certify import certify, crossing_bytes
    from shardmath.plans.programs.program import Program
    from shardmath.plans.programs.scheduling import schedule
    from shardmath.plans.relabeling.relabeling import Relabeling as Relabeling
    from shardmath.plans.relabeling.relabeling import relabel
    from shardmath.plans.table import ByteRanges as ByteRanges
    from shardmath.plans.table import TransferTable
    from shardmath.plans.transfers import Transfer
    from shardmath.proofs.simulate import simulate
    from shardmath.proofs.sizes.prove import prove, prove_equivalent
    from shardmath.proofs.sizes.verdict import Verdict as Verdict
    from shardmath.proofs.verify import verify
    from shardmath.values.amaxes.amaxes import Amaxes as Amaxes
    from shardmath.values.amaxes.amaxes import plan_amaxes as plan_amaxes
    from shardmath.values.digests.content import Difference as Difference
    from shardmath.values.digests.content import digest_of as digest_of
    from shardmath.values.digests.content import find_difference as find_difference
    from shardmath.values.transforms.transformed import Transformed as Transformed
    from shardmath.values.transforms.transformed import transformed as transformed

    __version__: str

LATE = {
    "ByteRanges": "plans.table",
    "Certificate": "plans.flows.certificate",
    "Collective": "plans.collectives.collective",
    "Plan": "plans.plan",
    "Program": "plans.programs.program",
    "Refit": "models.refits.refit",
    "Relabeling": "plans.relabeling.relabeling",
    "Topology": "plans.flows.topology",
    "Transfer": "plans.plan",
    "TransferTable": "plans.table",
    "Transposed": "plans.adjoint",
    "Verdict": "proofs.sizes.verdict",
    "adjoint": "plans.adjoint",
    "certify": "plans.programs.certify",
    "crossing_bytes": "plans.programs.certify",
    "divide": "models.refits.dividing",
    "equivalent": "layouts.holdings",
    "explore": "display.explorer.page",
    "from_holdings": "layouts.fitting",
    "plan": "plans.plan",
    "prove": "proofs.sizes.prove",
    "prove_equivalent": "proofs.sizes.prove",
    "recognize": "plans.collectives.collective",
    "refit": "models.refits.refit",
    "relabel": "plans.relabeling.relabeling",
    "schedule": "plans.programs.scheduling",
    "simulate": "proofs.simulate",
    "verify": "proofs.verify",
    "window": "layouts.edits",
    "without": "plans.membership.leaving",
}
"""Where names are that are imported on use."""

FORMER = {
    "Amaxes": "formats.Amaxes",
    "Difference": "content.Difference",
    "Recorded": "storage.Recorded",
    "RecordedSide": "storage.RecordedSide",
    "Relabelling": "Relabeling",
    "Transformed": "transforms.Transformed",
    "digest_of": "content.digest_of",
    "find_difference": "content.find_difference",
    "plan_amaxes": "formats.plan_amaxes",
    "recognise": "recognize",
    "transformed": "transforms.transformed",
}
"""Former names, and the present ones."""

FACES = (
    "buffers",
    "content",
    "errors",
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
        "shardmath.plans.relabelling": "shardmath.plans.relabeling",
        "shardmath.plans.relabelling.relabelling": "shardmath.plans.relabeling.relabeling",
        "shardmath.relabelling": "shardmath.plans.relabeling",
        "shardmath.relabelling.relabelling": "shardmath.plans.relabeling.relabeling",
        "shardmath.values.transforms.quantising": "shardmath.values.transforms.quantizing",
    }
)


def __getattr__(name: str) -> object:
    """Import and return a name of the package on its first use. Raises AttributeError for other names."""
    if name in LATE:
        value = getattr(import_module(f"shardmath.{LATE[name]}"), name)
    elif name in FORMER:
        return find_former(f"shardmath.{name}", f"shardmath.{FORMER[name]}")
    elif name == "families":
        # A former module, found with a warning.
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
    """All names of the package, imported or not."""
    return sorted({*__all__, *FACES, "__version__"})


def _version() -> str:
    """The version of the installed package; looking it up takes longer than importing this."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("shardmath")
    except PackageNotFoundError:
        return "0+unknown"


# If hypothesis is imported later, it calls this through the entry point in shardmath_hypothesis.
_register_strategies()

__all__ = [
    "Mesh",
    "Layout",
    "Placement",
    "Shard",
    "StridedShard",
    "Replicate",
    "Partial",
    "Ragged",
    "Balanced",
    "BlockCyclic",
    "Packed",
    "Table",
    "Runs",
    "from_ranges",
    "from_holdings",
    "window",
    "equivalent",
    "plan",
    "Plan",
    "Transfer",
    "TransferTable",
    "prove",
    "prove_equivalent",
    "verify",
    "simulate",
    "adjoint",
    "relabel",
    "schedule",
    "Program",
    "certify",
    "Certificate",
    "crossing_bytes",
    "Topology",
    "recognize",
    "explore",
    "refit",
    "Refit",
    "divide",
    "without",
    "ShardError",
    "clear_caches",
]
