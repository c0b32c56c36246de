"""Cases: a tiny model, how a trainer divides it, and how engines do.

>>> print(CASES[1], CASES[1].world)
llama PP2xDP4 -> TP4xDP2 8
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import shardmath as sm
from shardmath.models.systems.megatron import megatron
from shardmath.models.systems.vllm import vllm
from shardmath.storage import Stored
from tests.references.megatron import Trainer
from tests.references.vllm import Engine
from tests.refits.families import FAMILIES, Family

__all__ = ["CASES", "LARGE", "LOGARITHM", "MORE", "Case"]

LOGARITHM = "mixer.A_log"
"""An engine has no A_log, only what was computed of it: a way there, and none back."""


@dataclass(frozen=True)
class Case:
    """A family, a trainer, and engines by name."""

    name: str
    trainer: Trainer
    engines: Mapping[str, Engine]

    @property
    def family(self) -> Family:
        return FAMILIES[self.name]

    @property
    def world(self) -> int:
        """Ranks from 0 to the last one that is of any side."""
        return max(side.ranks[-1] for side in (self.trainer, *self.engines.values())) + 1

    def __str__(self) -> str:
        named = [self.trainer, *self.engines.values()]
        # Where it is said which ranks are whose, the sides are not all of the same ones.
        same = all(side.ranks == range(8) for side in named)
        words = []
        for side in named:
            ranks = "" if same else f" on {side.ranks[0]}-{side.ranks[-1]}"
            words.append(f"{side}{ranks}")
        return f"{self.name} {words[0]} -> {' and '.join(words[1:])}"

    def declare_trainer(self) -> Stored:
        """The trainer as shardmath says it."""
        trainer = self.trainer
        return megatron(
            self.family.megatron,
            ranks=trainer.ranks,
            tp=trainer.tp,
            pp=trainer.pp,
            vpp=trainer.vpp,
            ep=trainer.ep,
            etp=trainer.etp,
            spec="te" if trainer.te else "local",
            experts="grouped" if trainer.te else "sequential",
            vocab=self.family.hf["vocab_size"],
            vocab_multiple=trainer.multiple,
        )

    def declare_engine(self, name: str) -> Stored:
        """An engine as shardmath says it."""
        engine = self.engines[name]
        return vllm(
            self.family.hf,
            ranks=engine.ranks,
            tp=engine.tp,
            pp=engine.pp,
            dp=engine.dp,
            ep=engine.ep,
            placement=engine.placement,
        )

    def refit(self) -> sm.Refit:
        """From the trainer to all engines."""
        engines = {name: self.declare_engine(name) for name in self.engines}
        return sm.refit(self.declare_trainer(), engines, self.family.shapes())

    def refit_back(self, name: str) -> sm.Refit:
        """From an engine to the trainer: all but what the engine has only computed."""
        shapes = {one: of for one, of in self.family.shapes().items() if LOGARITHM not in one}
        return sm.refit(self.declare_engine(name), self.declare_trainer(), shapes)


ALL = range(8)
FIRST = range(4)
LAST = range(4, 8)


def _case(name: str, trainer: Trainer, *engines: Engine) -> Case:
    return Case(name, trainer, {f"engine{i}": engine for i, engine in enumerate(engines)})


CASES = [
    _case("llama", Trainer(ALL), Engine(ALL, dp=8)),
    _case("llama", Trainer(ALL, pp=2), Engine(ALL, tp=4, dp=2)),
    _case("qwen3", Trainer(ALL, tp=2, pp=2, vpp=2), Engine(ALL, tp=8)),
    _case("qwen3", Trainer(range(6), tp=2, te=False), Engine(range(3, 7), tp=4)),
    _case("qwen3", Trainer(FIRST, pp=4), Engine(LAST, tp=4), Engine(range(3, 5), dp=2)),
    _case("qwen3_moe", Trainer(ALL, ep=8), Engine(ALL, tp=2, dp=4, ep=True)),
    _case(
        "deepseek_v3",
        Trainer(ALL, tp=2, pp=2, ep=2),
        Engine(range(6), dp=6, ep=True),
        Engine(LAST, tp=4, ep=True, placement="round_robin"),
    ),
    _case("nemotron_h", Trainer(ALL, tp=2, pp=2, ep=2), Engine(ALL, tp=4, dp=2)),
    _case("nemotron_h", Trainer(FIRST, tp=2, ep=2, etp=2), Engine(LAST, tp=2, dp=2, ep=True)),
]
"""Of at most eight ranks: the same for both sides, some of both, or each their own; one engine, or two at once."""

MORE = [
    _case("llama", Trainer(ALL), Engine(ALL, tp=8)),
    _case("llama", Trainer(ALL, tp=4, te=False), Engine(ALL, tp=2, dp=4)),
    _case("qwen3_moe", Trainer(ALL, tp=2, pp=2, ep=4), Engine(ALL, tp=4, dp=2)),
    _case("qwen3_moe", Trainer(ALL, tp=4, ep=2, etp=2), Engine(ALL, tp=8)),
    _case("deepseek_v3", Trainer(ALL, pp=2, ep=4), Engine(ALL, tp=4, dp=2)),
    _case("nemotron_h_1_group", Trainer(ALL, pp=2, ep=4), Engine(ALL, tp=4, dp=2)),
    _case("llama", Trainer(ALL, tp=8), Engine(ALL, tp=4, pp=2)),
    _case("qwen3", Trainer(FIRST, tp=2, pp=2), Engine(LAST, tp=2, pp=2)),
    _case(
        "qwen3_moe", Trainer(ALL, tp=2, ep=4, te=False), Engine(range(1, 7), tp=2, dp=3, ep=True)
    ),
    _case("qwen3_moe", Trainer(FIRST, pp=2, vpp=2, ep=2), Engine(LAST, tp=4, ep=True)),
    _case(
        "deepseek_v3",
        Trainer(ALL, tp=2, ep=2, etp=2, te=False),
        Engine(ALL, tp=2, dp=4, ep=True),
    ),
    _case("nemotron_h", Trainer(ALL, tp=4, ep=8), Engine(ALL, tp=2, dp=4)),
]
"""Of eight ranks, too: other sizes of what is in `CASES`."""

LARGE = [
    _case("llama", Trainer(ALL, pp=2), Engine(range(8, 16), tp=4, dp=2)),
    _case("qwen3_moe", Trainer(range(16), tp=2, pp=2, ep=8), Engine(range(8, 16), tp=4, dp=2)),
    _case("deepseek_v3", Trainer(ALL, pp=2, ep=4), Engine(range(8, 16), tp=8, ep=True)),
]
"""Of sixteen ranks."""
