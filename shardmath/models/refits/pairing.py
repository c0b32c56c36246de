"""Pairing: what moves from a trainer to its engines, as both sides hold it.

1. What no engine needs stays where it is, and is in no plan.
2. Several engines have a window each of a tensor, or one together where they store it alike (`sharing`).
3. A tensor that is held as several has its companions with it: the same windows, in the same order.
4. Each engine holds all elements of what it stores: what another holds does not stand for it.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence

from shardmath.base.errors import PlanError
from shardmath.layouts.layout import Layout
from shardmath.models.refits.sharing import share
from shardmath.models.storage.stored import KnownSide
from shardmath.plans.uncovered import first_unheld, holds_all
from shardmath.values.transforms.choosing import choose
from shardmath.values.transforms.components import End, Transform, list_companions

__all__ = ["group_tensors", "list_held", "pair"]


def pair(
    trainer: KnownSide, engines: Mapping[str, KnownSide], rules: Mapping[str, Transform]
) -> tuple[dict[str, Layout], dict[str, Layout] | dict[str, tuple[Layout, ...]]]:
    """What moves as both sides hold it. Raises PlanError for an engine that holds a part of a tensor."""
    for engine, side in engines.items():
        _check_whole(engine, side)
    # What no engine needs stays where it is: the trainer's other tensors are in no plan.
    stored = [engine.layouts for engine in engines.values()]
    held = dict.fromkeys(itertools.chain.from_iterable(stored))
    both = [name for name in held if name in trainer.layouts]
    chosen = choose(rules, both)
    needed = {name: trainer.layouts[name] for name in both}
    beside = _name_companions(chosen, "source")
    for own in itertools.chain.from_iterable(beside.values()):
        if own in trainer.layouts:
            needed[own] = trainer.layouts[own]
    if len(stored) == 1:
        return needed, dict(stored[0])
    windows: dict[str, tuple[Layout, ...]] = {}
    for together in group_tensors(held, _name_companions(chosen, "destination")):
        by_engine = list_held(engines, together)
        each, _ = share(tuple(by_engine.values()))
        windows.update(zip(together, each, strict=True))
    return needed, windows


def _check_whole(engine: str, side: KnownSide) -> None:
    """Raise PlanError for a tensor of which an engine holds a part, as where a loader cuts off what is too large."""
    for name, layout in side.layouts.items():
        if not holds_all((layout,)):
            raise PlanError(
                f"{engine} holds no element {first_unheld((layout,))} of {name!r} under {layout}; "
                f"cover it there, or give tensors of the shapes of its own model"
            )


def _name_companions(chosen: Mapping[str, Transform], end: End) -> dict[str, list[str]]:
    """What each tensor that has a transform has beside it."""
    named = {}
    for name, transform in chosen.items():
        beside = list_companions(transform, end)
        named[name] = [name + companion.suffix for companion in beside]
    return named


def group_tensors(
    names: Collection[str], beside: Mapping[str, Sequence[str]]
) -> Iterator[tuple[str, ...]]:
    """The tensors, each with those of its companions that there are."""
    taken = set(itertools.chain.from_iterable(beside.values()))
    for name in names:
        if name not in taken:
            yield name, *(own for own in beside.get(name, ()) if own in names)


def list_held(
    engines: Mapping[str, KnownSide], together: tuple[str, ...]
) -> dict[str, tuple[Layout, ...]]:
    """How each engine that stores a tensor holds it, with its companions. Raises PlanError where it lacks one."""
    first, *others = together
    held = {}
    for engine, side in engines.items():
        if first not in side.layouts:
            alone = [name for name in others if name in side.layouts]
            if alone:
                raise PlanError(f"{engine} stores {alone[0]!r} without {first!r}; give both a row")
            continue
        missing = [name for name in others if name not in side.layouts]
        if missing:
            raise PlanError(f"{engine} stores {first!r} without {missing[0]!r}; give both a row")
        held[engine] = tuple(side.layouts[name] for name in together)
    return held
