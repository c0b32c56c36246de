"""Refit: the plan from a trainer to its engines, with the storage of each rank.

1. A trainer and an engine declare how they store their tensors (`shardmath.storage`), as rows or as recordings; both
   are bound to the same logical tensors, and an ordinary plan moves these from one to the other.
2. Everything that does not fit, on either side, is one error.
3. Several engines share one plan. Engines that store a tensor in the same way share one window of it (`sharing`); if a
   tensor has several windows, the local name of each is `name[i]`.
4. Engines may hold what transforms make of the trainer's tensors, such as casts of float32 masters. Each side stores
   tensors as it holds them; the plan then moves the wire tensors of `transforms`.
5. Engines that leave are removed from the plan and from `engines`; nothing else changes, not even the names of windows.

>>> from shardmath.layouts.algebra.mesh import Mesh
>>> from shardmath.models.storage import rows
>>> trainer = Stored(rows.parse("qkv.* = [q k v].* : (2 (q + k + v) | tp n) h"), (Mesh(tp=2),))
>>> engine = Stored(rows.parse("qkv.* = [q k v].* : (tp (q + k + v)) h"), (Mesh(tp=4, ranks=range(2, 6)),))
>>> shapes = {f"{name}.weight": ((8, 4), "bfloat16") for name in "qkv"}
>>> moved = refit(trainer, engine, shapes)
>>> print(moved.explain("qkv.weight", rank=3))
qkv.weight (6, 4) on rank 3, from the row
    qkv.* = [q k v].* : (tp (q + k + v)) h
[0:2, 0:4] bfloat16[8, 4] (tp n) h on tp=4: q.weight
[2:4, 0:4] bfloat16[8, 4] (tp n) h on tp=4: k.weight
[4:6, 0:4] bfloat16[8, 4] (tp n) h on tp=4: v.weight
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from shardmath.base.arguments import text
from shardmath.base.drawn import svg
from shardmath.base.errors import PlanError, StoreError
from shardmath.base.public import public
from shardmath.base.text import plural, shown
from shardmath.layouts.holdings import Windows, windows_of
from shardmath.layouts.layout import Layout
from shardmath.models.recordings.recorded import label
from shardmath.models.recordings.sides import RecordedSide
from shardmath.models.refits.copying import copy_bound
from shardmath.models.refits.coverage import Native, find_faults, show_native
from shardmath.models.refits.pairing import group_tensors, list_held, pair
from shardmath.models.refits.plain import PlainSide
from shardmath.models.refits.sharing import share
from shardmath.models.refits.tiling import (
    check_places,
    check_scales,
    check_shapes,
    explain_cut,
    imply,
)
from shardmath.models.storage.binding import Bound, bind
from shardmath.models.storage.stored import KnownSide, Shapes, Slot, Stored, Vocabulary
from shardmath.plans.membership.leaving import without
from shardmath.plans.plan import Plan, plan
from shardmath.values.transforms.components import Transform
from shardmath.values.transforms.transformed import Transformed, transformed

__all__ = ["Refit", "refit"]

Declared: TypeAlias = Stored | RecordedSide | Mapping[str, Layout]
"""The storage of a side: rows, recordings, or a layout per tensor that is stored under its logical name."""

ENGINE = "engine"
"""The name of an engine that is the only one."""


@public
@dataclass(frozen=True, slots=True, repr=False)
class Refit:
    """A plan that moves a trainer's weights to inference engines, with a description of how each side stores them; made
    by `refit`.

    `transforms` convert between the tensors that sides hold and those that the plan moves; None if these are the same.
    `whole` is the refit before any engine left; None if none has left.
    """

    plan: Plan
    trainer: KnownSide
    engines: Mapping[str, KnownSide]
    transforms: Transformed | None = None
    whole: Refit | None = None

    def __repr__(self) -> str:
        tensors = plural(self.moved, "tensor")
        return f"<refit of {tensors} to {', '.join(self.engines)}: {self.plan!r}>"

    @property
    def moved(self) -> Collection[str]:
        """The names of the trainer's tensors that an engine needs."""
        if self.transforms is None:
            return self.plan.src
        names = []
        for name in self.transforms.find_held(self.plan.src):
            wired = self.transforms.wired.get(name)
            suffixes = () if wired is None else wired.suffixes[0]
            # Such as scales, which the trainer reads together with their tensor.
            names += [name, *(name + suffix for suffix in suffixes)]
        return names

    def _list_windows(self, name: str) -> Windows:
        """The windows in which engines hold a tensor that moves."""
        if self.transforms is None:
            return self.plan.dst[name]
        return windows_of(self.transforms.held_dst[name], name, PlanError)

    def slots(self, rank: int, engine: str | None = None) -> dict[str, Slot]:
        """Return a dict from each local tensor's name to the Slot (stored tensor, slices) where `rank` of `engine`
        stores it. If `engine` is None, `rank` is a rank of the trainer.

        It has the tensors that move, by the plan's names, such as w[1]. Raises PlanError for an unknown engine.
        """
        if engine is None:
            moved = set(self.moved)
            stored = self.trainer.slots(rank)
            return {name: slot for name, slot in stored.items() if name in moved}
        slots = self._find(engine).slots(rank)
        # Windows keep the names that they had before engines left.
        planned = self.whole or self
        # The one window of a single engine has the tensor's name.
        if len(planned.engines) == 1:
            return slots
        local_names = {}
        for together in planned._group_windows():
            held = list_held(planned.engines, together)
            if engine in held:
                _, numbers = share(tuple(held.values()))
                window_of_engine = dict(zip(held, numbers, strict=True))
                window = window_of_engine[engine]
                for name in together:
                    local_names[name] = planned._list_windows(name).local_name(name, window)
        return {local_names[name]: slot for name, slot in slots.items()}

    def _group_windows(self) -> Iterator[tuple[str, ...]]:
        """The tensors of the destination, each with its companions, which have the same windows."""
        if self.transforms is None:
            return group_tensors(self.plan.dst, {})
        companions = {}
        for name, wired in self.transforms.wired.items():
            _, suffixes = wired.suffixes
            companions[name] = [name + suffix for suffix in suffixes]
        return group_tensors(self.transforms.held_dst, companions)

    def without(self, *engines: str) -> Refit:
        """Return the refit without the engines whose names are the positional arguments (`*engines`). Transfers to all
        other engines stay the same.

        Raises PlanError for an unknown engine, if no engine is left, and if a leaving engine shares a rank with one
        that stays.
        """
        staying = dict(self.engines)
        ranks: set[int] = set()
        for engine in dict.fromkeys(text(engine, "an engine", PlanError) for engine in engines):
            ranks |= set(self._find(engine).ranks)
            del staying[engine]
        if not staying:
            what = f"{', '.join(engines)} leave, which are all engines of the refit"
            raise PlanError(f"{what}; keep at least one")
        for engine, side in staying.items():
            shared = sorted(ranks.intersection(side.ranks))
            if shared:
                raise PlanError(
                    f"rank {shared[0]} leaves with {', '.join(engines)}, but {engine}, which stays, has it too; "
                    f"plan again: refit(trainer, engines, shapes)"
                )
        if not engines:
            return self
        planned = self.whole or self
        # An engine's ranks may hold none of what moves.
        leaving = ranks.intersection(planned.plan.dst_ranks)
        rest = without(self.plan, leaving, window=True)
        return Refit(rest, self.trainer, staying, self.transforms, planned)

    def check(
        self,
        rank: int,
        has: Mapping[Native, Sequence[int]],
        engine: str | None = None,
        own: Sequence[str] = (),
    ) -> None:
        """Raise StoreError unless `has` gives the shapes of the tensors that `rank` should store, by (virtual pipeline
        stage, name). More tensors are allowed if they match a glob in `own`; if `engine` is None, the rank is looked up
        in the trainer, then in the engines.

        The side is the engine that is named, otherwise the trainer or, for a rank that the trainer lacks, the first
        engine that has the rank. `has` are the shapes of all parameters and persistent buffers of the rank by
        (chunk, name); `own` are globs of those that are not the trainer's.
        """
        if engine is None and rank not in self.trainer.ranks:
            engine = _guess_side(self, rank)
        side = self.trainer if engine is None else self._find(engine)
        stored = side.natives(rank)
        shapes = {native: tuple(shape) for native, shape in has.items()}
        faults = find_faults(stored, shapes, own)
        if faults:
            raise StoreError("\n".join([f"rank {rank}:", *faults]))

    def explain(self, native: str, rank: int, engine: str | None = None) -> str:
        """Return text about the stored tensor `native` on `rank`: how it is declared, and which of its slices hold
        logical tensors. If `engine` is None, the tensor of the first engine with this rank is explained, or the
        trainer's if no engine has the rank.

        Raises StoreError for a tensor that the rank does not store.
        """
        name = engine or _guess_side(self, rank)
        side = self._find(name) if name else self.trainer
        lines = []
        for stored, shape in side.natives(rank).items():
            if stored[1] == native:
                row = side.row_of(stored, rank)
                lines.append(f"{label(*stored)} {shape} on rank {rank}, from the row")
                lines.append(f"    {row}")
                lines += _list_parts(side, stored, rank)
        if not lines:
            names = [name for _, name in side.natives(rank)]
            raise StoreError(f"rank {rank} stores no {native!r}; pass one of {shown(names)}")
        return "\n".join(lines)

    def svg(
        self, tensor: str | None = None, rank: int | None = None, engine: str | None = None
    ) -> str:
        """Draw the stored tensor `tensor` of `rank` as an SVG document: which logical tensors lie where in it, and from
        which stored tensors of which trainer's ranks they come.

        By default `rank` is the first one of the engine that stores `tensor`, and `tensor` the first one there that
        has several logical tensors; without `engine`, it is the first engine with the rank, or else the trainer. Raises
        StoreError for a tensor that the rank does not store, PlanError for an unknown engine.
        """
        return svg(self, tensor=tensor, rank=rank, engine=engine)

    def _find(self, engine: str) -> KnownSide:
        """The side of an engine. Raises PlanError for an unknown one."""
        if engine not in self.engines:
            raise PlanError(f"no engine {engine!r}; pass one of {', '.join(self.engines)}")
        return self.engines[engine]


def _guess_side(moved: Refit, rank: int) -> str | None:
    """The first engine that has the rank; None if no engine has it."""
    for name, bound in moved.engines.items():
        if rank in bound.ranks:
            return name
    return None


def _list_parts(side: KnownSide, native: Native, rank: int) -> list[str]:
    """A line for each logical tensor in the stored one."""
    lines = []
    for name, slot in side.slots(rank).items():
        # A rank may hold nothing of a component, such as K or V when tp cuts raw rows finer than groups.
        if (slot.chunk, slot.native) == native and 0 not in side.layouts[name].local_shape(rank):
            cut = ", ".join(_show_cut(part) for part in slot.cut)
            lines.append(f"[{cut}] {side.layouts[name]}: {name}")
    return lines


def _show_cut(part: int | slice) -> str:
    """One dimension of a cut, as Python writes it."""
    if isinstance(part, int):
        return str(part)
    step = f":{part.step}" if part.step != 1 else ""
    return f"{part.start}:{part.stop}{step}"


def refit(
    trainer: Declared,
    engines: Declared | Mapping[str, Declared],
    shapes: Shapes | Vocabulary,
    *,
    unused: Sequence[str] = (),
    served: Shapes | Vocabulary | None = None,
    rules: Mapping[str, Transform] | None = None,
) -> Refit:
    """Return a Refit, a plan that moves weights from a trainer to one engine or to several, by name. `shapes` has the
    trainer's shapes and dtypes, and `served` the engines' if these differ; `rules` then transform the weights, and
    engines need not store weights that match a glob in `unused`.

    A side is a Stored, a RecordedSide, or layouts by name, such as `shardmath_torch.layout_of` returns for a module
    under FSDP2 or tensor parallelism. `unused` are globs of tensors that no engine needs. Shapes in a Vocabulary are
    not read again. `served` are the shapes and dtypes that engines hold, if these differ from the trainer's; `rules`
    then are transforms, as in `transformed`. Raises StoreError with everything that does not fit on any side, and for
    values on a rank without their scale; PlanError if the trainer does not hold what an engine needs, if an engine
    holds a part of a tensor, and for rules as `transformed` does.
    """
    trainer_tensors = _read_shapes(shapes)
    engine_tensors = trainer_tensors if served is None else _read_shapes(served)
    by_name = _name_engines(engines)
    unbound = [_UnboundSide("trainer", trainer, trainer_tensors, ())]
    for name, side in by_name.items():
        unbound.append(_UnboundSide(name, side, engine_tensors, unused))
    source, *others = _bind_all(unbound, rules or {})
    bound = dict(zip(by_name, others, strict=True))
    needed, windows = pair(source, bound, rules or {})
    _check_sources(source, needed)
    for name, side in by_name.items():
        _check_tiles(name, side, bound[name], engine_tensors, rules or {})
    if rules is None and served is None:
        return Refit(plan(needed, windows), source, bound)
    converted = transformed(needed, windows, rules or {})
    return Refit(plan(converted.src, converted.dst), source, bound, converted)


def _check_tiles(
    name: str,
    declared: Declared,
    bound: KnownSide,
    tensors: Vocabulary,
    rules: Mapping[str, Transform],
) -> None:
    """Raise StoreError if a rank of the engine has values without their scale, or begins one inside a tile, or if
    scales belong to tiles of another size."""
    making = {**rules, **imply(declared, tensors, rules)}
    check_scales({name: bound}, tensors, making)
    check_places({name: bound}, tensors, making)
    check_shapes(name, declared, bound, tensors, rules)


def _read_shapes(given: Shapes | Vocabulary) -> Vocabulary:
    """The vocabulary of these shapes."""
    return given if isinstance(given, Vocabulary) else Vocabulary(given)


class _UnboundSide(NamedTuple):
    """A side with the tensors to which it will be bound."""

    name: str
    declared: Declared
    tensors: Vocabulary
    unused: Sequence[str]


def _bind_all(unbound: Sequence[_UnboundSide], rules: Mapping[str, Transform]) -> list[KnownSide]:
    """The sides, bound to their tensors. Raises StoreError with the faults of all of them."""
    bound: list[KnownSide | None] = []
    faults = []
    for side in unbound:
        # Sides that are bound to the same tensors already; zip ends with the last of these.
        before = zip(unbound, bound, strict=False)
        others = [done for other, done in before if other.tensors is side.tensors]
        try:
            bound.append(_bind(side, others))
        except StoreError as error:
            bound.append(None)
            making = {**rules, **imply(side.declared, side.tensors, rules)}
            why = explain_cut(side.declared, side.tensors, making) or error
            faults.append(f"{side.name}: {why}")
    if faults:
        raise StoreError("\n".join(faults))
    return [side for side in bound if side is not None]


def _name_engines(engines: Declared | Mapping[str, Declared]) -> dict[str, Declared]:
    """The engines by name. Raises PlanError for none."""
    if isinstance(engines, Stored | RecordedSide):
        return {ENGINE: engines}
    if not isinstance(engines, Mapping):
        raise PlanError(
            f"engines= is {shown(engines)}, where one side is needed, or several by name; "
            f"pass a Stored, a RecordedSide, or a mapping"
        )
    given: dict[str, object] = dict(engines)
    if not given:
        raise PlanError("engines={} has no engine; pass one side, or several by name")
    # A mapping of layouts is one engine, which stores every tensor separately.
    if all(isinstance(layout, Layout) for layout in given.values()):
        return {ENGINE: given}  # type: ignore[dict-item]
    return given  # type: ignore[return-value]


def _bind(side: _UnboundSide, others: Iterable[KnownSide | None]) -> KnownSide:
    """The side bound to its tensors, as a copy if one of the `others`, bound to the same tensors, stores alike."""
    declared = side.declared
    if isinstance(declared, RecordedSide):
        return declared.bind(side.tensors.shapes, side.unused)
    if isinstance(declared, Mapping):
        return PlainSide(declared).bind(side.tensors.shapes, side.unused)
    if not isinstance(declared, Stored):
        raise StoreError(
            f"{shown(declared)} does not say how tensors are stored; "
            f"pass a Stored, a RecordedSide, or layouts by name"
        )
    for other in others:
        copy = copy_bound(other, declared) if isinstance(other, Bound) else None
        if copy is not None:
            return copy
    return bind(declared, side.tensors, side.unused)


def _check_sources(trainer: KnownSide, needed: Collection[str]) -> None:
    """Raise StoreError if the trainer stores only a function of a tensor that engines need."""
    computed = trainer.find_computed(needed)
    if computed is not None:
        name, slot = computed
        raise StoreError(
            f"trainer: {show_native((slot.chunk, slot.native))} stores {slot.function}(...), from "
            f"which {name} cannot be computed; give the trainer a row that stores {name} itself"
        )
