"""Refit: the plan between a trainer and its engines, and where each rank has what moves.

1. A trainer and an engine say how they store their tensors (`shardmath.storage`), as rows or as recorded; both are
   bound to the same logical tensors, and a plan moves from one to the other like any other plan.
2. What does not fit is one error, of both sides.
3. Several engines are one plan. Those that store a tensor alike are one window of it (`sharing`); where there are
   several windows, the local name of each is `name[i]`.
4. What engines hold may be what transforms make of the trainer's tensors, as of float32 masters. Sides store tensors as
   they are held; what the plan moves are then the wire tensors of `transforms`.
5. Engines that leave are out of the plan and of `engines`; nothing else changes, and nobody's names do.

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

from shardmath.base.errors import PlanError, StoreError
from shardmath.base.public import public
from shardmath.base.text import plural, shown
from shardmath.layouts.holdings import Windows, windows_of
from shardmath.layouts.layout import Layout
from shardmath.models.recordings.sides import RecordedSide
from shardmath.models.refits.copying import copy_bound
from shardmath.models.refits.coverage import Native, find_faults, show_native
from shardmath.models.refits.pairing import group_tensors, list_held, pair
from shardmath.models.refits.plain import PlainSide
from shardmath.models.refits.sharing import share
from shardmath.models.refits.tiling import check_places, check_scales, explain_cut
from shardmath.models.storage.binding import Bound, bind
from shardmath.models.storage.stored import KnownSide, Shapes, Slot, Stored, Vocabulary
from shardmath.plans.membership.leaving import without
from shardmath.plans.plan import Plan, plan
from shardmath.values.transforms.components import Transform
from shardmath.values.transforms.transformed import Transformed, transformed

__all__ = ["Refit", "refit"]

Declared: TypeAlias = Stored | RecordedSide | Mapping[str, Layout]
"""How a side stores its tensors: as rows, as recorded, or each alone under its logical name."""

ENGINE = "engine"
"""What an engine is called that is the only one."""


@public
@dataclass(frozen=True, slots=True, repr=False)
class Refit:
    """A plan from a trainer to its engines, by name, and how each side stores what it moves.

    `transforms` say what is moved for what sides hold; None where that is the same. `whole` is the refit of which no
    engine has left; None for one of which none has.
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
        """The names of the trainer's tensors that engines need."""
        if self.transforms is None:
            return self.plan.src
        return self.transforms.find_held(self.plan.src)

    def _list_windows(self, name: str) -> Windows:
        """How engines hold a tensor that moves."""
        if self.transforms is None:
            return self.plan.dst[name]
        return windows_of(self.transforms.held_dst[name], name, PlanError)

    def slots(self, rank: int, engine: str | None = None) -> dict[str, Slot]:
        """Where the rank has each local tensor of the plan: of an engine, or of the trainer if none is named.

        The names are the plan's. Raises PlanError for an engine that there is not.
        """
        if engine is None:
            moved = set(self.moved)
            stored = self.trainer.slots(rank)
            return {name: slot for name, slot in stored.items() if name in moved}
        found = self._find(engine).slots(rank)
        # Windows are called as they were before engines left.
        planned = self.whole or self
        # An engine alone has one window of each tensor, which has the tensor's name.
        if len(planned.engines) == 1:
            return found
        named = {}
        for together in planned._list_together():
            held = list_held(planned.engines, together)
            if engine in held:
                _, numbers = share(tuple(held.values()))
                window = dict(zip(held, numbers, strict=True))[engine]
                for name in together:
                    named[name] = planned._list_windows(name).local_name(name, window)
        slots = {}
        for name, slot in found.items():
            local = named[name]
            slots[local] = slot
        return slots

    def _list_together(self) -> Iterator[tuple[str, ...]]:
        """The tensors of the destination, each with its companions."""
        beside = {}
        if self.transforms is not None:
            for name, wired in self.transforms.wired.items():
                _, suffixes = wired.suffixes
                beside[name] = [name + suffix for suffix in suffixes]
        held = self.plan.dst if self.transforms is None else self.transforms.held_dst
        return group_tensors(held, beside)

    def without(self, *engines: str) -> Refit:
        """The refit that these engines have left: all else goes as it did, and trainers keep what no engine needs now.

        Raises PlanError for an engine that there is not, where none is left, and where one that leaves has a rank of
        one that stays.
        """
        staying = dict(self.engines)
        ranks: set[int] = set()
        for engine in dict.fromkeys(engines):
            ranks |= set(self._find(engine).ranks)
            del staying[engine]
        if not staying:
            raise PlanError(f"{', '.join(engines)} leave, and no engine is left; keep one")
        for engine, side in staying.items():
            shared = sorted(ranks.intersection(side.ranks))
            if shared:
                raise PlanError(
                    f"rank {shared[0]} leaves with {', '.join(engines)}, and is one of {engine}, which stays; "
                    f"plan anew: refit(trainer, engines, shapes)"
                )
        planned = self.whole or self
        # An engine's ranks may hold none of what moves.
        leaving = ranks.intersection(planned.plan.dst_ranks)
        rest = without(self.plan, leaving, window=True)
        if not engines:
            return self
        return Refit(rest, self.trainer, staying, self.transforms, planned)

    def check(
        self,
        rank: int,
        has: Mapping[Native, Sequence[int]],
        engine: str | None = None,
        own: Sequence[str] = (),
    ) -> None:
        """Raise StoreError with all that differs between what the rank has, and what its side says it stores.

        The side is the engine that is named, else the trainer, or the first engine that has the rank where the trainer
        has not. `has` are the shapes of all its parameters and persistent buffers by (chunk, name); `own` globs of
        those that are no tensors of the trainer's.
        """
        if engine is None and rank not in self.trainer.ranks:
            engine = _guess_side(self, rank)
        side = self.trainer if engine is None else self._find(engine)
        stored = side.natives(rank)
        shapes = {native: tuple(shape) for native, shape in has.items()}
        faults = find_faults(stored, shapes, own)
        if faults:
            said = [f"rank {rank}:", *faults]
            raise StoreError("\n".join(said))

    def explain(self, native: str, rank: int, engine: str | None = None) -> str:
        """The row behind a stored tensor of a rank, and which logical tensors lie where in it.

        Raises StoreError for a tensor that the rank does not store.
        """
        name = engine or _guess_side(self, rank)
        side = self._find(name) if name else self.trainer
        lines = []
        for stored, shape in side.natives(rank).items():
            if stored[1] == native:
                row = side.row_of(stored, rank)
                lines.append(f"{show_native(stored)[1:-1]} {shape} on rank {rank}, from the row")
                lines.append(f"    {row}")
                lines += _list_parts(side, stored, rank)
        if not lines:
            raise StoreError(f"rank {rank} stores no {native!r}; ask for one of its natives")
        return "\n".join(lines)

    def _find(self, engine: str) -> KnownSide:
        if engine not in self.engines:
            raise PlanError(f"no engine {engine!r}; engines are {', '.join(self.engines)}")
        return self.engines[engine]


def _guess_side(moved: Refit, rank: int) -> str | None:
    """The engine that the rank is of; None for the trainer."""
    for name, bound in moved.engines.items():
        if rank in bound.ranks:
            return name
    return None


def _list_parts(side: KnownSide, native: Native, rank: int) -> list[str]:
    """A line for each logical tensor in the stored one."""
    lines = []
    for name, slot in side.slots(rank).items():
        # A rank may hold nothing of a component, as of K and V where raw rows are cut above the number of groups.
        if (slot.chunk, slot.native) == native and 0 not in side.layouts[name].local_shape(rank):
            cut = ", ".join(_show_cut(part) for part in slot.cut)
            lines.append(f"[{cut}] {side.layouts[name]}: {name}")
    return lines


def _show_cut(part: int | slice) -> str:
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
    """The plan from a trainer to an engine, or to several by name, that store these logical tensors.

    A side is a Stored, a RecordedSide, or layouts by name, such as `shardmath_torch.layout_of` gives of a module under
    FSDP2 or tensor parallelism. `unused` are globs of tensors that no engine needs; a Vocabulary of the shapes is not
    read again. `served` are the tensors as engines hold them, where that is not as the trainer does; `rules` then say
    what is made of them on the way, as `transformed` has it. Raises StoreError with all that does not fit on any side,
    and for numbers on a rank without their scale, PlanError where the trainer holds what an engine needs nowhere or an
    engine holds a part of a tensor, and for rules as `transformed` does.
    """
    held = _read_shapes(shapes)
    wanted = held if served is None else _read_shapes(served)
    named = _name_engines(engines)
    asked = [_Asked("trainer", trainer, held, ())]
    for name, side in named.items():
        asked.append(_Asked(name, side, wanted, unused))
    source, *others = _bind_all(asked, rules or {})
    bound = dict(zip(named, others, strict=True))
    if rules is None and served is None:
        needed, windows = pair(source, bound, {})
        _check_sources(source, needed)
        return Refit(plan(needed, windows), source, bound)
    needed, windows = pair(source, bound, rules or {})
    _check_sources(source, needed)
    made = transformed(needed, windows, rules or {})
    check_scales(bound, wanted, rules or {})
    check_places(bound, wanted, rules or {})
    return Refit(plan(made.src, made.dst), source, bound, made)


def _read_shapes(given: Shapes | Vocabulary) -> Vocabulary:
    return given if isinstance(given, Vocabulary) else Vocabulary(given)


class _Asked(NamedTuple):
    """A side to be bound to the tensors of a vocabulary."""

    name: str
    side: Declared
    of: Vocabulary
    unused: Sequence[str]


def _bind_all(asked: Sequence[_Asked], rules: Mapping[str, Transform]) -> list[KnownSide]:
    """The sides, bound. Raises StoreError with the faults of all."""
    bound: list[KnownSide | None] = []
    faults = []
    for one in asked:
        # Those that are bound already to the same tensors.
        before = zip(asked, bound, strict=False)
        others = [side for other, side in before if other.of is one.of]
        try:
            bound.append(_bind(one, others))
        except StoreError as error:
            bound.append(None)
            why = explain_cut(one.side, one.of, rules) or error
            faults.append(f"{one.name}: {why}")
    if faults:
        raise StoreError("\n".join(faults))
    return [side for side in bound if side is not None]


def _name_engines(engines: Declared | Mapping[str, Declared]) -> dict[str, Declared]:
    """The engines by name. Raises PlanError for none."""
    if isinstance(engines, Stored | RecordedSide):
        return {ENGINE: engines}
    if not isinstance(engines, Mapping):
        raise PlanError(f"engines are {shown(engines)}; give one side, or several by name")
    given: dict[str, object] = dict(engines)
    if not given:
        raise PlanError("no engine; give one side, or several by name")
    # A mapping of layouts is one engine, of which every tensor is stored alone.
    if all(isinstance(layout, Layout) for layout in given.values()):
        return {ENGINE: given}  # type: ignore[dict-item]
    return given  # type: ignore[return-value]


def _bind(asked: _Asked, others: Iterable[KnownSide | None]) -> KnownSide:
    """The side bound to its tensors; `others` are bound to the same ones."""
    side = asked.side
    if isinstance(side, RecordedSide):
        return side.bind(asked.of.shapes, asked.unused)
    if isinstance(side, Mapping):
        return PlainSide(side).bind(asked.of.shapes, asked.unused)
    if not isinstance(side, Stored):
        raise StoreError(f"{shown(side)} is not a side; give rows, what was recorded, or layouts")
    for other in others:
        copy = copy_bound(other, side) if isinstance(other, Bound) else None
        if copy is not None:
            return copy
    return bind(side, asked.of, asked.unused)


def _check_sources(trainer: KnownSide, needed: Collection[str]) -> None:
    """Raise StoreError where the trainer stores a function of what engines need, and not the tensor itself."""
    computed = trainer.find_computed(needed)
    if computed is not None:
        name, slot = computed
        raise StoreError(
            f"trainer: {show_native((slot.chunk, slot.native))} stores {slot.function}(...), from "
            f"which {name} cannot be had; give the trainer a row that stores it"
        )
