"""Pairing: the layouts of both sides of a plan from a trainer to its engines.

1. Tensors that no engine needs are not in the plan.
2. Each of several engines has a window of a tensor; engines that store it in the same way share one (`sharing`).
3. A tensor and its companions, such as scales, have the same windows in the same order.
4. Each engine holds all elements of the tensors that it stores; other engines' elements do not count.
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
    """Return the source and the destination of a plan, dicts by tensor name: the trainer's layouts, and the engines'
    layouts (a tuple per tensor for several engines). The source leaves out tensors that no engine stores and no
    transform in `rules` reads.

    The destination has one layout per tensor for one engine, else a tuple of layouts (windows). Raises PlanError if an
    engine stores only a part of a tensor.
    """
    for engine, side in engines.items():
        _check_whole(engine, side)
    # The trainer's other tensors, which no engine needs, are not in the plan.
    layouts = [engine.layouts for engine in engines.values()]
    # A dict, whose keys are distinct and in order.
    engine_names = dict.fromkeys(itertools.chain.from_iterable(layouts))
    common_names = [name for name in engine_names if name in trainer.layouts]
    chosen = choose(rules, common_names)
    needed = {name: trainer.layouts[name] for name in common_names}
    companions = itertools.chain.from_iterable(_name_companions(chosen, "source").values())
    needed |= {name: trainer.layouts[name] for name in companions if name in trainer.layouts}
    if len(layouts) == 1:
        return needed, dict(layouts[0])
    windows: dict[str, tuple[Layout, ...]] = {}
    for together in group_tensors(engine_names, _name_companions(chosen, "destination")):
        by_engine = list_held(engines, together)
        windows_by_tensor, _ = share(tuple(by_engine.values()))
        windows.update(zip(together, windows_by_tensor, strict=True))
    return needed, windows


def _check_whole(engine: str, side: KnownSide) -> None:
    """Raise PlanError for a tensor of which an engine holds a part, as when a loader cuts off surplus rows."""
    for name, layout in side.layouts.items():
        if not holds_all((layout,)):
            raise PlanError(
                f"{engine} does not store element {first_unheld((layout,))} of {name!r}, which is of shape "
                f"{layout.shape} in the trainer: the engine's model may be smaller, or some of its ranks missing; use "
                f"one model on both sides, and all ranks of the engine"
            )


def _name_companions(chosen: Mapping[str, Transform], end: End) -> dict[str, list[str]]:
    """The names of the companions, at this end, of each tensor that has a transform."""
    companion_names = {}
    for name, transform in chosen.items():
        companions = list_companions(transform, end)
        companion_names[name] = [name + companion.suffix for companion in companions]
    return companion_names


def group_tensors(
    names: Collection[str], companions: Mapping[str, Sequence[str]]
) -> Iterator[tuple[str, ...]]:
    """Divide `names` into groups and yield each as a tuple: a tensor's name, then the names of its companions, such as
    its scales. `companions` maps a tensor's name to the names of its companions; those not in `names` are left out."""
    companion_names = set(itertools.chain.from_iterable(companions.values()))
    for name in names:
        if name not in companion_names:
            yield name, *(other for other in companions.get(name, ()) if other in names)


def list_held(
    engines: Mapping[str, KnownSide], together: tuple[str, ...]
) -> dict[str, tuple[Layout, ...]]:
    """Return a dict from engine to the layouts of the tensors whose names are in `together`, in the same order. Engines
    that store none of these tensors are left out.

    Raises PlanError if an engine stores only some.
    """
    first, *others = together
    held = {}
    for engine, side in engines.items():
        if first not in side.layouts:
            orphans = [name for name in others if name in side.layouts]
            if orphans:
                raise PlanError(
                    f"{engine} stores {orphans[0]!r} without {first!r}; add a row for {first!r}"
                )
            continue
        missing = [name for name in others if name not in side.layouts]
        if missing:
            what = f"{engine} stores {first!r} without {missing[0]!r}"
            raise PlanError(f"{what}; add a row for {missing[0]!r}")
        held[engine] = tuple(side.layouts[name] for name in together)
    return held
