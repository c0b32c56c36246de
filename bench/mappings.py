"""Mappings: which model goes from which trainer to which engines, and how long a published system took.

1. Sizes are those of Megatron-Core's and vLLM's arguments. Copies of an engine are engines of their own that store the
   same; data parallelism inside an engine (`dp`) cuts experts.
2. A mapping that was published has the words of its publication, in which EP and DP may overlap TP. miles measured
   engines of SGLang; here they are vLLM's, of the same sizes.

Source: NeMo-RL pull requests 2413 and 2971; vLLM's blog of 2026-08-22; miles, `p2p-weight-transfer.md`, and the layers
of stages in its scripts.

>>> row = find_rows(model="qwen3-4b")[2]
>>> print(row.mapping)
PP2 DP4 -> TP4 DP2
>>> row.trainer, row.engine
(Trainer(ranks=8, tp=1, pp=2, ep=1, cp=1, ends=None), Engine(tp=4, dp=1, ep=False, copies=2))
"""

from __future__ import annotations

from typing import NamedTuple

from bench.models import MODELS
from shardmath.base.errors import PlanError
from shardmath.base.text import plural

__all__ = ["ROWS", "Engine", "Row", "Trainer", "find_rows"]


class Trainer(NamedTuple):
    """Sizes of a Megatron trainer; `ends` are the layers of the first and last stage where they differ."""

    ranks: int
    tp: int = 1
    pp: int = 1
    ep: int = 1
    cp: int = 1
    ends: tuple[int, int] | None = None


class Engine(NamedTuple):
    """Sizes of one vLLM engine, and how many of them there are."""

    tp: int = 1
    dp: int = 1
    ep: bool = False
    copies: int = 1


class Row(NamedTuple):
    """A model, what it goes from and to, and the least seconds that somebody published.

    `source` is who did, `written` the mapping in their words.
    """

    model: str
    trainer: Trainer
    engine: Engine
    published_s: float | None = None
    source: str = ""
    written: str = ""

    @property
    def mapping(self) -> str:
        """Both sides as people write them."""
        return self.written or f"{_show_trainer(self.trainer)} -> {_show_engine(self.engine)}"


NEMO = "NeMo-RL #2413"
NEMO_PYTHON = "NeMo-RL #2971"
RDT = "vLLM sharded_rdt"
MILES = "miles P2P"
MILES_NCCL = "miles NCCL"

SMALL = "qwen3-4b"
SMALL_FP8 = "qwen3-4b-fp8"
MIDDLE = "qwen3-30b-a3b"
MIDDLE_FP8 = "qwen3-30b-a3b-fp8"
LARGE = "qwen3-235b-a22b"
STAGES = Trainer(256, pp=16, ep=16, ends=(3, 2))
"""DeepSeek-V3's: 61 layers do not divide."""

ROWS: tuple[Row, ...] = (
    Row(SMALL, Trainer(8), Engine(copies=8), 0.07, NEMO, "DP8 -> DP8"),
    Row(SMALL, Trainer(8), Engine(tp=8), 0.07, NEMO, "DP8 -> TP8"),
    Row(SMALL, Trainer(8, pp=2), Engine(tp=4, copies=2), 0.09, NEMO, "PP2 DP4 -> TP4 DP2"),
    Row(SMALL, Trainer(8, pp=4), Engine(tp=4, copies=2), 0.13, NEMO, "PP4 DP2 -> TP4 DP2"),
    Row(
        SMALL, Trainer(8, tp=2, pp=2), Engine(tp=4, copies=2), 0.13, NEMO, "TP2 PP2 DP2 -> TP4 DP2"
    ),
    Row(SMALL, Trainer(8, tp=2), Engine(tp=4, copies=2), 0.11, NEMO, "TP2 DP4 -> TP4 DP2"),
    Row(SMALL, Trainer(8, tp=4), Engine(tp=2, copies=4)),
    Row(
        MIDDLE,
        Trainer(16, tp=2, ep=4),
        Engine(tp=4, copies=4),
        0.54,
        NEMO,
        "EP4 TP2 DP2 -> TP4 DP4",
    ),
    Row(
        MIDDLE,
        Trainer(16, tp=2, pp=2, ep=4),
        Engine(tp=4, copies=4),
        0.48,
        NEMO,
        "EP4 TP2 PP2 -> TP4 DP4",
    ),
    Row(MIDDLE, Trainer(16, pp=2, ep=8), Engine(tp=2, copies=8), 0.51, NEMO, "EP8 PP2 -> TP2 DP8"),
    Row(MIDDLE, Trainer(16, pp=2, ep=8), Engine(tp=8, copies=2), 0.50, NEMO, "EP8 PP2 -> TP8 DP2"),
    Row(
        MIDDLE,
        Trainer(16, tp=2, cp=2, ep=8),
        Engine(tp=4, copies=4),
        1.02,
        NEMO_PYTHON,
        "TP2 CP2 EP8 -> TP4 DP4",
    ),
    Row(
        MIDDLE,
        Trainer(16, tp=2, ep=4),
        Engine(tp=4, ep=True, copies=4),
        1.00,
        NEMO_PYTHON,
        "EP4 TP2 DP2 -> TP4 EP4 DP4",
    ),
    Row(MIDDLE, Trainer(16, tp=2, pp=2, ep=4), Engine(tp=2, copies=8)),
    Row(MIDDLE, Trainer(16, ep=8), Engine(tp=2, copies=8)),
    Row(MIDDLE, Trainer(16, tp=2, ep=8), Engine(tp=4, ep=True, copies=2)),
    Row(
        "nemotron-3-nano",
        Trainer(16, tp=2, ep=8),
        Engine(tp=4, copies=4),
        0.48,
        NEMO,
        "EP8 TP2 -> TP4 DP4",
    ),
    Row(
        "nemotron-3-super",
        Trainer(32, tp=8, pp=2, ep=8),
        Engine(tp=8, copies=2),
        1.66,
        NEMO,
        "EP8 TP8 PP2 DP2 -> TP8 DP2",
    ),
    Row("gpt-oss-120b", Trainer(32, tp=4, pp=2, ep=8), Engine(tp=4, copies=4)),
    Row("llama-3-70b", Trainer(64, tp=8, pp=4), Engine(tp=8, copies=4)),
    Row(
        LARGE,
        Trainer(128, tp=4, pp=8, ep=16, ends=(11, 11)),
        Engine(tp=8, copies=16),
        4.56,
        NEMO,
        "TP4 PP8 EP16 -> TP8 DP16",
    ),
    Row(
        LARGE,
        Trainer(16, tp=4, pp=2, ep=8),
        Engine(dp=16, ep=True),
        3.49,
        RDT,
        "TP4 PP2 EP8 -> DP16 EP16",
    ),
    Row(
        LARGE,
        Trainer(64, tp=4, pp=4, cp=2, ep=16, ends=(24, 22)),
        Engine(tp=32, ep=True, copies=2),
        3.16,
        MILES,
    ),
    Row("glm-4.5", Trainer(64, tp=8, pp=4, ep=16), Engine(tp=8, dp=4, ep=True)),
    Row("deepseek-v3", STAGES, Engine(tp=32, copies=8), 2.39, NEMO_PYTHON, "PP16 EP16 -> TP32 DP8"),
    Row("deepseek-v3", STAGES, Engine(tp=32, dp=8)),
    Row("deepseek-v3", STAGES, Engine(tp=8, dp=32, ep=True)),
    Row(
        "kimi-k2",
        Trainer(256, tp=8, pp=8, ep=32, ends=(7, 6)),
        Engine(tp=32, ep=True, copies=4),
        7.53,
        RDT,
        "TP8 PP8 EP32 -> 4 x TP32 EP32",
    ),
    # Engines in FP8, on mappings of which no rank cuts a tile: TP8 would cut 9728 rows in tiles of 128, TP4 768.
    Row(SMALL_FP8, Trainer(8), Engine(copies=8), 0.06, NEMO, "DP8 -> DP8"),
    Row(SMALL_FP8, Trainer(8, pp=2), Engine(tp=4, copies=2)),
    Row(SMALL_FP8, Trainer(8, pp=4), Engine(tp=4, copies=2)),
    Row(SMALL_FP8, Trainer(8, tp=2, pp=2), Engine(tp=4, copies=2)),
    Row(SMALL_FP8, Trainer(8, tp=2), Engine(tp=4, copies=2)),
    Row(
        MIDDLE_FP8,
        Trainer(16, tp=2, pp=2, ep=4),
        Engine(tp=2, copies=8),
        3.19,
        NEMO_PYTHON,
        "EP4 TP2 PP2 -> TP2 DP8",
    ),
    Row(
        MIDDLE_FP8,
        Trainer(16, pp=2, ep=8),
        Engine(tp=2, copies=8),
        3.20,
        NEMO_PYTHON,
        "EP8 PP2 -> TP2 DP8",
    ),
    Row(
        MIDDLE_FP8,
        Trainer(16, ep=8),
        Engine(tp=2, copies=8),
        2.90,
        NEMO_PYTHON,
        "EP8 DP2 -> TP2 DP8",
    ),
    # Tiles of 64 x 64, since 32 ranks cut 18432 rows at multiples of 576.
    Row(
        "kimi-k2-fp8",
        Trainer(256, tp=8, pp=8, cp=4, ep=32, ends=(8, 5)),
        Engine(tp=32, ep=True, copies=8),
        7.23,
        MILES,
    ),
    Row(
        "glm-4.7-flash",
        Trainer(8, tp=4, ep=8),
        Engine(tp=4, ep=True, copies=2),
        2.51,
        MILES_NCCL,
    ),
    Row(MIDDLE, Trainer(16, tp=4, ep=8), Engine(tp=8, ep=True, copies=2), 2.16, MILES),
    Row(
        "glm-4.5-air",
        Trainer(32, pp=4, ep=8, ends=(12, 10)),
        Engine(tp=8, ep=True, copies=4),
        2.64,
        MILES,
    ),
)


def find_rows(model: str | None = None, row: int | None = None) -> tuple[Row, ...]:
    """The rows of a model (default: of all), or one of those by its number from 0. Raises PlanError for none."""
    found = tuple(one for one in ROWS if model in (None, one.model))
    if not found:
        raise PlanError(f"no row of model {model!r}; models are {', '.join(MODELS)}")
    if row is None:
        return found
    if not 0 <= row < len(found):
        of = f" of {model}" if model else ""
        raise PlanError(f"row {row} of {plural(found, 'row')}{of}; rows count from 0")
    return (found[row],)


def _show_trainer(trainer: Trainer) -> str:
    dp = trainer.ranks // (trainer.tp * trainer.cp * trainer.pp)
    return _join(TP=trainer.tp, CP=trainer.cp, PP=trainer.pp, EP=trainer.ep, DP=dp)


def _show_engine(engine: Engine) -> str:
    ep = engine.tp * engine.dp if engine.ep else 1
    one = _join(TP=engine.tp, EP=ep, DP=engine.dp)
    if engine.copies == 1:
        return one
    return f"{engine.copies} x {one}"


def _join(**sizes: int) -> str:
    """The sizes that are not 1."""
    return " ".join(f"{name}{n}" for name, n in sizes.items() if n > 1) or "1"
