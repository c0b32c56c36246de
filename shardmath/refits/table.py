"""The refit table: real models from a trainer's storage to an engine's, with what was published beside it.

1. A row is a model, a mapping, and how long a published system took where one published it. The plan of each is
   proved, and certified on nodes of eight ranks at the rates of `Topology`.
2. Both sides store what they really store: fused, grouped and padded, under Megatron-Core's rows and vLLM's.
3. Seconds of a plan are those of its transfers all at once; of a program those of its rounds, one after the other.

>>> row = find_rows(model="qwen3-4b")[0]
>>> print(row.mapping)
DP8 -> DP8
>>> measured = measure(row, program=False)
>>> measured.verified, measured.tensors
(True, 398)
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from shardmath.base.errors import PlanError
from shardmath.base.text import make_table, show_bytes
from shardmath.engines.vllm_core import vllm
from shardmath.families.megatron_core import megatron
from shardmath.flows.topology import Topology
from shardmath.programs.certify import certify
from shardmath.refits.models import MODELS, hf_config, shapes_of
from shardmath.refits.refit import Refit, refit
from shardmath.storage.stored import Stored

__all__ = ["ROWS", "Measured", "Row", "find_rows", "measure", "show"]

NODE = 8
"""Ranks of a node."""


class Trainer(NamedTuple):
    """Sizes of a Megatron trainer; `ends` are the layers of the first and last stage where they differ."""

    ranks: int
    tp: int = 1
    pp: int = 1
    ep: int = 1
    ends: tuple[int, int] | None = None


class Engine(NamedTuple):
    """Sizes of one vLLM engine, and how many of them there are."""

    tp: int = 1
    dp: int = 1
    ep: bool = False
    copies: int = 1


class Row(NamedTuple):
    """A model, what it goes from and to, and the seconds that somebody published, with who did."""

    model: str
    trainer: Trainer
    engine: Engine
    published_s: float | None = None
    source: str = ""

    @property
    def mapping(self) -> str:
        """Both sides as people write them."""
        return f"{_show_trainer(self.trainer)} -> {_show_engine(self.engine)}"


NEMO = "NeMo-RL #2413, #2971"
RDT = "vLLM sharded_rdt"
MILES = "miles P2P"

ROWS: tuple[Row, ...] = (
    Row("qwen3-4b", Trainer(8), Engine(dp=8), 0.21, NEMO),
    Row("qwen3-4b", Trainer(8), Engine(tp=8)),
    Row("qwen3-4b", Trainer(8, pp=2), Engine(tp=4, dp=2), 0.34, NEMO),
    Row("qwen3-4b", Trainer(8, tp=4), Engine(tp=2, dp=4)),
    Row("llama-3-70b", Trainer(64, tp=8, pp=4), Engine(tp=8, dp=4)),
    Row("qwen3-30b-a3b", Trainer(32, tp=8, pp=2, ep=8), Engine(tp=8, dp=2), 0.74, NEMO),
    Row("qwen3-30b-a3b", Trainer(16, tp=2, ep=8), Engine(tp=4, ep=True, copies=2)),
    Row("nemotron-3-nano", Trainer(16, tp=2, ep=8), Engine(tp=4, dp=4)),
    Row("nemotron-3-super", Trainer(32, tp=8, pp=2, ep=8), Engine(tp=8, dp=2), 1.66, NEMO),
    Row(
        "qwen3-235b-a22b",
        Trainer(128, tp=4, pp=8, ep=16, ends=(11, 11)),
        Engine(tp=8, dp=16),
        4.56,
        NEMO,
    ),
    Row("qwen3-235b-a22b", Trainer(16, tp=4, pp=2, ep=8), Engine(dp=16, ep=True), 3.49, RDT),
    Row(
        "qwen3-235b-a22b",
        Trainer(64, tp=4, pp=8, ep=8, ends=(11, 11)),
        Engine(tp=32, ep=True, copies=2),
        3.16,
        MILES,
    ),
    Row("glm-4.5", Trainer(64, tp=8, pp=4, ep=16), Engine(tp=8, dp=4, ep=True)),
    Row(
        "deepseek-v3",
        Trainer(256, pp=16, ep=16, ends=(3, 2)),
        Engine(tp=32, dp=8),
        2.39,
        NEMO,
    ),
    Row(
        "deepseek-v3",
        Trainer(256, pp=16, ep=16, ends=(3, 2)),
        Engine(tp=8, dp=32, ep=True),
    ),
    Row(
        "kimi-k2",
        Trainer(256, tp=8, pp=8, ep=32, ends=(7, 6)),
        Engine(tp=32, ep=True, copies=4),
        7.53,
        RDT,
    ),
)


@dataclass(frozen=True, slots=True)
class Measured:
    """What a row comes to: bytes of all tensors once, and those that the busiest rank takes in or gives out."""

    model: str
    mapping: str
    tensors: int
    bytes: int
    busiest_bytes: int
    verified: bool
    bound_s: float
    plan_s: float
    program_s: float | None
    ratio: float
    published_s: float | None
    source: str

    def as_json(self) -> dict[str, Any]:
        """The fields by name."""
        return asdict(self)


def find_rows(model: str | None = None, row: int | None = None) -> tuple[Row, ...]:
    """The rows of a model, or one by its number from 0; all if neither is given. Raises PlanError for none."""
    if row is not None and not 0 <= row < len(ROWS):
        raise PlanError(f"row {row} of a table of {len(ROWS)}; rows count from 0")
    found = ROWS if row is None else (ROWS[row],)
    chosen = tuple(one for one in found if model in (None, one.model))
    if not chosen:
        raise PlanError(f"no row of model {model!r}; models are {', '.join(MODELS)}")
    return chosen


def make_refit(row: Row) -> Refit:
    """The refit of a row."""
    model = MODELS[row.model]
    return refit(_make_trainer(row), _make_engines(row), shapes_of(model))


def _make_trainer(row: Row) -> Stored:
    model = MODELS[row.model]
    trainer = row.trainer
    config = dict(model.config)
    if trainer.ends is not None:
        config["num_layers_in_first_pipeline_stage"] = trainer.ends[0]
        config["num_layers_in_last_pipeline_stage"] = trainer.ends[1]
    return megatron(
        config,
        ranks=range(trainer.ranks),
        tp=trainer.tp,
        pp=trainer.pp,
        ep=trainer.ep,
        etp=1 if trainer.ep > 1 else None,
        vocab=model.vocab,
    )


def _make_engines(row: Row) -> Stored | dict[str, Stored]:
    """The engine, or each of several by its number."""
    engine = row.engine
    config = hf_config(MODELS[row.model])
    size = engine.tp * engine.dp
    made = {}
    for copy in range(engine.copies):
        start = row.trainer.ranks + copy * size
        ranks = range(start, start + size)
        made[str(copy)] = vllm(config, ranks=ranks, tp=engine.tp, dp=engine.dp, ep=engine.ep)
    return made["0"] if engine.copies == 1 else made


def measure(row: Row, program: bool = True) -> Measured:
    """Plan, prove and certify the row; without `program` what runs is the plan's transfers all at once."""
    # Scheduling and proving are imported on use: naming the rows needs neither.
    from shardmath.programs.scheduling import schedule
    from shardmath.proofs.verify import verify

    moved = make_refit(row)
    plan = moved.plan
    rack = Topology(ranks_per_node=NODE)
    verify(plan)
    planned = certify(plan, topology=rack)
    best = certify(schedule(plan, topology=rack)) if program else planned
    taken_in = max(plan.received_bytes().values(), default=0)
    given_out = max(plan.sent_bytes().values(), default=0)
    busiest = max(taken_in, given_out)
    return Measured(
        model=row.model,
        mapping=row.mapping,
        tensors=len(plan.src),
        bytes=_count_bytes(moved),
        busiest_bytes=busiest,
        verified=True,
        bound_s=planned.bound_s,
        plan_s=planned.plan_s,
        program_s=best.plan_s if program else None,
        ratio=best.ratio,
        published_s=row.published_s,
        source=row.source,
    )


def _count_bytes(moved: Refit) -> int:
    """All tensors of the refit, once."""
    layouts = [windows[0] for windows in moved.plan.src.values()]
    return sum(math.prod(layout.shape) * layout.itemsize for layout in layouts)


def show(measured: Iterable[Measured]) -> str:
    """The rows as a table for people."""
    head = (
        "model",
        "mapping",
        "tensors",
        "bytes",
        "busiest rank",
        "bound",
        "program",
        "ratio",
        "published",
    )
    lines = []
    for one in measured:
        runs = one.plan_s if one.program_s is None else one.program_s
        published = "-" if one.published_s is None else f"{one.published_s:g} s, {one.source}"
        lines.append(
            (
                one.model,
                one.mapping,
                f"{one.tensors:,}",
                show_bytes(one.bytes),
                show_bytes(one.busiest_bytes),
                f"{1000 * one.bound_s:.1f} ms",
                f"{1000 * runs:.1f} ms",
                f"{one.ratio:.4f}",
                published,
            )
        )
    return make_table(head, lines)


def _show_trainer(trainer: Trainer) -> str:
    dp = trainer.ranks // (trainer.tp * trainer.pp)
    return _join(TP=trainer.tp, PP=trainer.pp, EP=trainer.ep, DP=dp)


def _show_engine(engine: Engine) -> str:
    ep = engine.tp * engine.dp if engine.ep else 1
    one = _join(TP=engine.tp, EP=ep, DP=engine.dp)
    return f"{engine.copies} x {one}" if engine.copies > 1 else one


def _join(**sizes: int) -> str:
    """The sizes that are not 1."""
    return " ".join(f"{name}{n}" for name, n in sizes.items() if n > 1) or "1"
