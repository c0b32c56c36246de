"""Sides: the ranks of a trainer or an engine as their loaders stored tensors, in the place of rows.

1. On each rank a logical tensor is a view of one stored tensor: its dimensions are dimensions of that, in any order
   and with any positions of each. What is not is an error that names the tensor.
2. Over the ranks that hold it a tensor has one layout, which `from_holdings` finds.
3. What is bound has the interface of rows that are bound (`Side`), so that refits take either.

>>> from shardmath.models.recordings.pieces import Piece
>>> halves = [Native("w", (2,), "int8", (Piece("q", 0, 2 * i, ((2, 1, 1),)),), "views", "") for i in (0, 1)]
>>> side = RecordedSide({rank: Recorded((("q", (4,), "int8"),), (halves[rank],)) for rank in (0, 1)})
>>> bound = side.bind({"q": ((4,), "int8")})
>>> print(bound.layouts["q"])
int8[4] (d0 n) on d0=2
>>> bound.slots(1)["q"].native, bound.natives(1)
('w', {(0, 'w'): (2,)})
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from shardmath.base.dtypes import canonical
from shardmath.base.errors import ShardError, StoreError
from shardmath.base.public import public_in
from shardmath.base.text import shown
from shardmath.layouts.algebra.mesh import Mesh
from shardmath.layouts.algebra.runs import Runs
from shardmath.layouts.fitting import fit, from_holdings
from shardmath.layouts.layout import Layout, intern
from shardmath.models.recordings.pieces import Piece
from shardmath.models.recordings.recorded import Native, Recorded, show
from shardmath.models.recordings.views import RecordedView
from shardmath.models.storage.names import matches
from shardmath.models.storage.stored import Shapes, Slot

__all__ = ["BoundRecorded", "RecordedSide"]

_Shape: TypeAlias = tuple[int, ...]
_Key: TypeAlias = tuple[int, str]
"""Chunk and name of a stored tensor."""
Entry: TypeAlias = tuple[_Shape, str]
"""Shape and dtype."""

SHOWN = 5
"""Tensors that no rank stores that a message names."""


@public_in("storage")
@dataclass(frozen=True, slots=True)
class RecordedSide:
    """What each rank of a side was recorded to store. Raises StoreError for no ranks."""

    ranks: Mapping[int, Recorded]

    def __post_init__(self) -> None:
        if not self.ranks:
            raise StoreError("no rank is recorded; give {rank: Recorded}")
        given: Mapping[int, object] = self.ranks
        for rank, recorded in given.items():
            if not isinstance(recorded, Recorded):
                what = f"rank {shown(rank)} is recorded as {shown(recorded)}"
                raise StoreError(f"{what}; give what smt.record returned there")

    def bind(self, tensors: Shapes, unused: Sequence[str] = ()) -> BoundRecorded:
        """Where each rank has these tensors. Raises StoreError with all that does not fit."""
        held = self._hold(tensors)
        faults = []
        for rank, own in held.items():
            faults += [f"rank {rank}: {fault}" for fault in own.faults]
        if faults:
            raise StoreError("\n".join(faults))
        found = _Layouts(held)
        for name, entry in tensors.items():
            found.add(name, entry)
        faults = found.list_faults(unused)
        if faults:
            raise StoreError("\n".join(faults))
        return BoundRecorded(self, found.layouts, held)

    def _hold(self, tensors: Shapes) -> dict[int, _Held]:
        """What each rank holds."""
        # Replicas store the same, and what is equal is looked at once.
        known: dict[Recorded, _Held] = {}
        held = {}
        for rank, recorded in self.ranks.items():
            if recorded not in known:
                known[recorded] = _hold(recorded, tensors)
            held[rank] = known[recorded]
        return held


class _Part(NamedTuple):
    """A logical tensor on one rank: where it lies, and what the view holds."""

    slot: Slot
    runs: tuple[Runs, ...]


class _Held(NamedTuple):
    """What one rank holds, and what is wrong with it."""

    parts: Mapping[str, _Part]
    shapes: Mapping[_Key, _Shape]
    faults: list[str]


@dataclass(frozen=True, slots=True)
class BoundRecorded:
    """A recorded side whose tensors are known: the layout of each, and where ranks store it."""

    side: RecordedSide
    layouts: Mapping[str, Layout]
    held: Mapping[int, _Held]

    @property
    def ranks(self) -> Collection[int]:
        """The ranks that are recorded."""
        return self.held.keys()

    def slots(self, rank: int) -> dict[str, Slot]:
        """Where each tensor that the rank holds a part of lies, by logical name."""
        held = self._at(rank)
        return {name: part.slot for name, part in held.parts.items()}

    def natives(self, rank: int) -> dict[_Key, _Shape]:
        """The shape of each tensor in which the rank stores something, by chunk and name."""
        return dict(self._at(rank).shapes)

    def row_of(self, native: _Key, rank: int) -> str:
        """What was recorded of this tensor. Raises StoreError where nothing was."""
        self._at(rank)
        for own in self.side.ranks[rank].natives:
            if (own.chunk, own.name) == native and own.pieces:
                return f"recorded: {show(own)}"
        raise StoreError(
            f"rank {rank} stores no {native[1]!r} in chunk {native[0]}; see its natives"
        )

    def visit(self, rank: int) -> Iterator[tuple[str, Slot, _Shape]]:
        """(logical name, slot, shape of the stored tensor) of all that the rank holds."""
        held = self._at(rank)
        for name, part in held.parts.items():
            yield name, part.slot, held.shapes[part.slot.chunk, part.slot.native]

    def find_computed(self, names: Collection[str]) -> tuple[str, Slot] | None:
        """The first of these logical tensors that any rank stores as a function of it, and where; None for none."""
        # Replicas share what they hold.
        different = {id(held): held for held in self.held.values()}
        for held in different.values():
            for name, part in held.parts.items():
                if part.slot.function and name in names:
                    return name, part.slot
        return None

    def _at(self, rank: int) -> _Held:
        if rank not in self.held:
            raise StoreError(f"rank {rank} is not recorded; ranks are {sorted(self.held)}")
        return self.held[rank]


def _hold(recorded: Recorded, tensors: Shapes) -> _Held:
    """What one rank holds of these tensors."""
    faults = []
    views: dict[str, tuple[Native, RecordedView]] = {}
    # Made anew at each look, of as many tensors as a model has.
    shapes = recorded.shapes
    make = _Views()
    for name, holders in _find_holders(recorded, tensors).items():
        recorded_as = shapes[name]
        native = holders[0].native
        try:
            _check_entry(name, recorded_as, tensors[name])
            view = make.find(name, recorded_as[0], holders)
        except StoreError as error:
            faults.append(str(error))
        else:
            views[name] = native, view
    return _Held(*_make_parts(recorded, views), faults)


def _check_entry(name: str, recorded: Entry, given: Entry) -> None:
    """Raise StoreError where a tensor was recorded with another shape or dtype."""
    wanted = tuple(given[0]), canonical(given[1])
    if recorded != wanted:
        raise StoreError(f"{name!r} was recorded as {recorded}, and is {wanted}; record it so")


class _Holder(NamedTuple):
    """A stored tensor, and the pieces in it of one logical tensor."""

    native: Native
    pieces: list[Piece]


class _Views:
    """Tensors in what stores them. Layers that are alike have equal views, each of which is made once."""

    def __init__(self) -> None:
        self._known: dict[object, RecordedView] = {}

    def find(self, name: str, shape: _Shape, holders: Sequence[_Holder]) -> RecordedView:
        """A tensor's view. Raises StoreError where it is none, and where two store it."""
        first, *others = holders
        stored = first.native
        if others:
            again = others[0].native.label
            raise StoreError(
                f"{name!r} lies in {stored.label!r} and again in {again!r}; record one"
            )
        try:
            return self._make(stored.shape, shape, first.pieces)
        except StoreError as error:
            raise StoreError(f"{name!r} is not a view of {stored.label!r}: {error}") from None

    def _make(self, stored: _Shape, shape: _Shape, pieces: Sequence[Piece]) -> RecordedView:
        placed = []
        for piece in pieces:
            placed.append((piece.cell, piece.element, piece.blocks))
        key = stored, shape, tuple(placed)
        known = self._known.get(key)
        if known is None:
            known = RecordedView(stored, shape, pieces)
            self._known[key] = known
        return known


def _find_holders(recorded: Recorded, tensors: Shapes) -> dict[str, list[_Holder]]:
    """The stored tensors in which each of these lies."""
    holders: dict[str, list[_Holder]] = {}
    for native in recorded.natives:
        by_tensor: dict[str, list[Piece]] = {}
        for piece in native.pieces:
            own = by_tensor.setdefault(piece.tensor, [])
            own.append(piece)
        for name, pieces in by_tensor.items():
            if name not in tensors:
                continue
            listed = holders.setdefault(name, [])
            listed.append(_Holder(native, pieces))
    return holders


def _make_parts(
    recorded: Recorded, views: Mapping[str, tuple[Native, RecordedView]]
) -> tuple[dict[str, _Part], dict[_Key, _Shape]]:
    """The parts of a rank, and the shapes of which they are views."""
    stored = [native for native in recorded.natives if native.pieces]
    shapes = {(native.chunk, native.name): native.shape for native in stored}
    for native, view in views.values():
        # Dimensions of 1 are added where a tensor has more than what stores it: the same cells in the same order.
        wanted = native.shape + (1,) * view.missing
        key = native.chunk, native.name
        shapes[key] = max(shapes[key], wanted, key=len)
    parts = {}
    for name, (native, view) in views.items():
        cut = view.cut(len(shapes[native.chunk, native.name]))
        slot = Slot(native.chunk, native.name, cut, view.order, native.function)
        parts[name] = _Part(slot, view.runs)
    return parts, shapes


class _Layouts:
    """The layout of each tensor over the ranks that hold it, and what is wrong with any."""

    def __init__(self, held: Mapping[int, _Held]) -> None:
        self.held = held
        self.layouts: dict[str, Layout] = {}
        self.faults: list[str] = []
        self.missing: list[str] = []
        # Layers that are alike share a layout, which plans read once.
        self._known: dict[object, Layout] = {}

    def add(self, name: str, entry: Entry) -> None:
        """Note the layout of one more."""
        parts = {}
        for rank, own in self.held.items():
            if name in own.parts:
                parts[rank] = own.parts[name].runs
        if not parts:
            self.missing.append(name)
            return
        shape, dtype = tuple(entry[0]), canonical(entry[1])
        key = shape, dtype, tuple(parts.items())
        try:
            if key not in self._known:
                self._known[key] = _find_layout(shape, dtype, parts)
            self.layouts[name] = self._known[key]
        except ShardError as error:
            self.faults.append(f"{name!r} has no one layout: {error}")

    def list_faults(self, unused: Sequence[str]) -> list[str]:
        """All that is wrong; no rank has to hold what fits a glob of `unused`."""
        missing = [name for name in self.missing if not matches(name, unused)]
        if not missing:
            return self.faults
        more = f" and {len(missing) - SHOWN} more" if len(missing) > SHOWN else ""
        shown = ", ".join(missing[:SHOWN])
        return [*self.faults, f"no rank stores {shown}{more}; load them too"]


def _find_layout(shape: _Shape, dtype: str, parts: Mapping[int, tuple[Runs, ...]]) -> Layout:
    """The one layout of these parts. Raises StoreError where there is none."""
    found = from_holdings(shape, parts, dtype=dtype)
    if isinstance(found, Layout):
        return found
    by_dim = list(zip(*parts.values(), strict=True))
    differ = []
    for d, held in enumerate(by_dim):
        if len(set(held)) > 1:
            differ.append(d)
    if len(differ) != 1:
        ranks = sorted(parts)
        raise StoreError(f"ranks {ranks} hold parts of dimensions {differ} that are no mesh")
    # Some parts more often than others, as of heads over ranks that do not divide evenly.
    axes = {"part": len(parts)}
    mesh = Mesh(axes, ranks=list(parts))
    dims = [fit(n, axes, held) for n, held in zip(shape, by_dim, strict=True)]
    return intern(shape, dtype, mesh, tuple(dims), ())
