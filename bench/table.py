"""The refit table: real models from a trainer's storage to an engine's, with what was published beside it.

1. A row is a model, a mapping, and how long a published system took where one published it. The plan of each is
   proved, and certified on nodes of eight ranks at the rates of `Topology`.
2. Both sides store what they really store: fused, grouped and padded, under Megatron-Core's rows and vLLM's.
3. With FP8 engines, what moves and is counted are data and scales, which trainers make.
4. Seconds of a plan are those of its transfers all at once; of a program those of its rounds, one after the other.

>>> from bench.mappings import find_rows
>>> (row,) = find_rows(row=1)
>>> measured = measure(row, program=False)
>>> measured.verified, measured.tensors
(True, 398)
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from bench.mappings import Row, Trainer
from bench.models import (
    MODELS,
    Model,
    hf_config,
    rules_of,
    served_shapes,
    shapes_of,
)
from shardmath.base.memo import memo
from shardmath.base.text import make_table, show_bytes
from shardmath.models.refits.refit import Refit, refit
from shardmath.models.storage.stored import Stored, Vocabulary
from shardmath.models.systems.megatron import megatron
from shardmath.models.systems.vllm import vllm
from shardmath.plans.flows.certificate import Certificate
from shardmath.plans.flows.topology import Topology
from shardmath.plans.programs.certify import certify
from shardmath.plans.programs.loads import sum_leg_loads, sum_pairs
from shardmath.plans.programs.program import Program

__all__ = ["Measured", "make_refit", "measure", "show"]

NODE = 8
"""Ranks of a node."""

GOOD = 1.02
"""A ratio to the bound above which the reason is told."""


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
    reason: str
    published_s: float | None
    source: str

    def as_json(self) -> dict[str, Any]:
        """The fields by name."""
        return asdict(self)


KV_SCALES = """
[decoder.layers.{l}.self_attention. = model.layers.{l}.self_attn.]
core_attention.k_scale = k_scale
core_attention.v_scale = v_scale
"""
"""Where a trainer keeps what it finds keys and values to need in FP8. Megatron has no such tensors of its own."""


def make_refit(row: Row, model: Model | None = None) -> Refit:
    """The refit of a row; of `model`, such as a smaller one, in the place of its own if that is given."""
    if model is None:
        model = MODELS[row.model]
        held, served = _read_names(row.model)
    else:
        held, served = _list_names(model)
    trainer, engines = _make_trainer(row.trainer, model), _make_engines(row, model)
    if model.tiles is None or served is None:
        return refit(trainer, engines, held)
    rules = rules_of(model.tiles)
    return refit(trainer.extended(KV_SCALES), engines, held, served=served, rules=rules)


@memo(1)
def _read_names(model: str) -> tuple[Vocabulary, Vocabulary | None]:
    """The same by a model's name; rows of one model follow each other, so its names are read once."""
    return _list_names(MODELS[model])


def _list_names(model: Model) -> tuple[Vocabulary, Vocabulary | None]:
    """The tensors of a model, and those that an engine has of them where these are others."""
    shapes = shapes_of(model)
    served = None if model.tiles is None else Vocabulary(served_shapes(shapes, model.tiles))
    return Vocabulary(shapes), served


def _make_trainer(trainer: Trainer, model: Model) -> Stored:
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
        cp=trainer.cp,
        etp=1 if trainer.ep > 1 else None,
        vocab=model.vocab,
    )


def _make_engines(row: Row, model: Model) -> Stored | dict[str, Stored]:
    """The engine, or each of several by its number."""
    engine = row.engine
    config = hf_config(model)
    size = engine.tp * engine.dp
    start = row.trainer.ranks
    made = {}
    for copy in range(engine.copies):
        stop = start + size
        ranks = range(start, stop)
        name = str(copy)
        made[name] = vllm(config, ranks=ranks, tp=engine.tp, dp=engine.dp, ep=engine.ep)
        start = stop
    return made["0"] if engine.copies == 1 else made


def measure(row: Row, program: bool = True) -> Measured:
    """Plan, prove and certify the row; without `program` what runs is the plan's transfers all at once."""
    # Scheduling and proving are imported on use: naming the rows needs neither.
    from shardmath.plans.programs.scheduling import schedule
    from shardmath.proofs.verify import verify

    moved = make_refit(row)
    plan = moved.plan
    rack = Topology(ranks_per_node=NODE)
    verify(plan)
    planned = certify(plan, topology=rack)
    best = planned
    reason = "" if planned.ratio <= GOOD else "each replica gets a copy of its own"
    if program:
        prog = schedule(plan, topology=rack)
        best = certify(prog)
        reason = "" if best.ratio <= GOOD else _explain(prog, best)
    taken_in = max(plan.received_bytes().values(), default=0)
    given_out = max(plan.sent_bytes().values(), default=0)
    return Measured(
        model=row.model,
        mapping=row.mapping,
        tensors=len(plan.src),
        bytes=_count_bytes(moved),
        busiest_bytes=max(taken_in, given_out),
        verified=True,
        bound_s=planned.bound_s,
        plan_s=planned.plan_s,
        program_s=best.plan_s if program else None,
        ratio=best.ratio,
        reason=reason,
        published_s=row.published_s,
        source=row.source,
    )


def _explain(prog: Program, best: Certificate) -> str:
    """Why a program is not nearer to the bound: the link that takes longest, and what its slots cost."""
    rack = prog.topology
    near, far = rack.intra_bytes_per_s, rack.inter_bytes_per_s
    pairs = sum_pairs(prog)
    loads = sum_leg_loads(prog, pairs).sum(axis=(0, 1))
    seconds = loads / [near, near, far, far]
    place, link = np.unravel_index(seconds.argmax(), seconds.shape)
    rank = prog.ranks[place]
    way = "takes in" if link % 2 else "sends"
    busy = (
        f"rank {rank} {way} {show_bytes(int(loads[place, link]))} in {1000 * seconds.max():.1f} ms"
    )
    rest = 1000 * (best.plan_s - seconds.max())
    return f"{busy}; {rest:.1f} ms more are latency, and slots in which a relay waits"


def _count_bytes(moved: Refit) -> int:
    """All tensors of the refit, once."""
    total = 0
    for windows in moved.plan.src.values():
        layout = windows[0]
        numel = math.prod(layout.shape)
        total += numel * layout.itemsize
    return total


def show(measured: Iterable[Measured]) -> str:
    """The rows as a table for people, and why some are not near their bound."""
    rows = list(measured)
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
    for one in rows:
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
    reasons = [f"{one.model} {one.mapping}: {one.reason}" for one in rows if one.reason]
    return "\n".join([make_table(head, lines), *reasons])
