"""Sides: a trainer or an engine by the recordings of its ranks, as an alternative to rows.

1. On each rank a logical tensor is a view of one stored tensor: its dimensions are dimensions of the stored tensor, in
   any order and with any positions of each. A tensor that is not a view is an error that names it.
2. A tensor has one layout over the ranks that hold it, which `from_holdings` finds.
3. A bound side has the interface of bound rows (`KnownSide`), so that refits take either.

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

from shardmath.base.arguments import mapping
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
"""The most tensors without a rank that a message names."""


@public_in("storage")
@dataclass(frozen=True, slots=True)
class RecordedSide:
    """A trainer or engine, given by a Recorded (recorded storage) of each of its ranks. Raises StoreError if there are
    no ranks."""

    ranks: Mapping[int, Recorded]

    def __post_init__(self) -> None:
        mapping(self.ranks, "ranks= is ", "rank to Recorded", StoreError)
        if not self.ranks:
            raise StoreError(
                "ranks={} has no rank; pass {rank: Recorded}, as smt.record makes them"
            )
        given: Mapping[int, object] = self.ranks
        for rank, recorded in given.items():
            if not isinstance(recorded, Recorded):
                what = f"ranks= has {shown(recorded)} for rank {shown(rank)}, and not a Recorded"
                raise StoreError(f"{what}; pass the result of smt.record on that rank")

    def bind(self, tensors: Shapes, unused: Sequence[str] = ()) -> BoundRecorded:
        """Find `tensors` (shapes and dtypes by name) in the ranks' recorded storage; return their layouts and locations
        as a BoundRecorded. Each tensor must be stored on at least one rank, unless it matches a glob in `unused`.

        Raises StoreError with everything that does not fit.
        """
        held = self._bind_ranks(tensors)
        faults = []
        for rank, on_rank in held.items():
            faults += [f"rank {rank}: {fault}" for fault in on_rank.faults]
        if faults:
            raise StoreError("\n".join(faults))
        finder = _LayoutFinder(held)
        for name, entry in tensors.items():
            finder.add(name, entry)
        faults = finder.list_faults(unused)
        if faults:
            raise StoreError("\n".join(faults))
        return BoundRecorded(self, finder.layouts, held)

    def _bind_ranks(self, tensors: Shapes) -> dict[int, _RankHoldings]:
        """The holdings of each rank; replicas, whose recordings are equal, share theirs."""
        known: dict[Recorded, _RankHoldings] = {}
        held = {}
        for rank, recorded in self.ranks.items():
            if recorded not in known:
                known[recorded] = _bind_rank(recorded, tensors)
            held[rank] = known[recorded]
        return held


class _RankPart(NamedTuple):
    """A rank's part of a logical tensor: its slot, and the positions in each dimension of the view."""

    slot: Slot
    runs: tuple[Runs, ...]


class _RankHoldings(NamedTuple):
    """A rank's parts by logical name, the shapes of its stored tensors, and errors."""

    parts: Mapping[str, _RankPart]
    shapes: Mapping[_Key, _Shape]
    faults: list[str]


@dataclass(frozen=True, slots=True)
class BoundRecorded:
    """The tensors that `bind` found in a RecordedSide: the layout of each, by name, and where each rank stores it."""

    side: RecordedSide
    layouts: Mapping[str, Layout]
    held: Mapping[int, _RankHoldings]

    @property
    def ranks(self) -> Collection[int]:
        """The ranks whose storage was recorded."""
        return self.held.keys()

    def slots(self, rank: int) -> dict[str, Slot]:
        """A dict from each logical tensor's name to the Slot (stored tensor, slices) where `rank` stores its part."""
        return {name: part.slot for name, part in self._holdings(rank).parts.items()}

    def natives(self, rank: int) -> dict[_Key, _Shape]:
        """Return the shape of each tensor of `rank` in which a logical tensor is stored, by (virtual stage, stored
        name)."""
        return dict(self._holdings(rank).shapes)

    def row_of(self, native: _Key, rank: int) -> str:
        """Return a text for error messages that says how `rank` stores the tensor `native`: a pair (virtual pipeline
        stage, stored name). Raises StoreError if `rank` lacks this tensor."""
        self._holdings(rank)  # raises for a rank that is not recorded
        for recorded in self.side.ranks[rank].natives:
            if (recorded.chunk, recorded.name) == native and recorded.pieces:
                return f"recorded: {show(recorded)}"
        raise StoreError(
            f"rank {rank} stores no {native[1]!r} in chunk {native[0]}; pass a key of natives({rank})"
        )

    def visit(self, rank: int) -> Iterator[tuple[str, Slot, _Shape]]:
        """Yield (logical name, Slot (location), stored tensor's shape) for each tensor with a part on `rank`."""
        held = self._holdings(rank)
        for name, part in held.parts.items():
            yield name, part.slot, held.shapes[part.slot.chunk, part.slot.native]

    def find_computed(self, names: Collection[str]) -> tuple[str, Slot] | None:
        """Return the name and Slot (location) of a tensor in `names` that is stored as a function of its values, such
        as neg_exp; or None."""
        # Replicas share their holdings, which are looked at once.
        distinct = {id(held): held for held in self.held.values()}
        for held in distinct.values():
            for name, part in held.parts.items():
                if part.slot.function and name in names:
                    return name, part.slot
        return None

    def _holdings(self, rank: int) -> _RankHoldings:
        """The rank's holdings. Raises StoreError for a rank that is not recorded."""
        if rank not in self.held:
            ranks = shown(sorted(self.held))
            raise StoreError(
                f"the storage of rank {rank} is not recorded; pass one of the ranks {ranks}"
            )
        return self.held[rank]


def _bind_rank(recorded: Recorded, tensors: Shapes) -> _RankHoldings:
    """The holdings of one rank of these tensors."""
    faults = []
    views: dict[str, tuple[Native, RecordedView]] = {}
    # The property makes the mapping, of all tensors of a model, at each access.
    shapes = recorded.shapes
    finder = _ViewFinder()
    for name, holders in _find_holders(recorded, tensors).items():
        shape, _ = shapes[name]
        try:
            _check_entry(name, shapes[name], tensors[name])
            # There is one holder: `find` raises for several.
            views[name] = holders[0].native, finder.find(name, shape, holders)
        except StoreError as error:
            faults.append(str(error))
    return _RankHoldings(*_make_parts(recorded, views), faults)


def _check_entry(name: str, recorded: Entry, given: Entry) -> None:
    """Raise StoreError if a tensor was recorded with another shape or dtype."""
    wanted = tuple(given[0]), canonical(given[1])
    if recorded != wanted:
        what = f"{name!r} was recorded as {recorded}, and is given as {wanted}"
        raise StoreError(f"{what}; record the ranks again, or give the recorded shape and dtype")


class _Holder(NamedTuple):
    """A stored tensor, and the pieces of one logical tensor in it."""

    native: Native
    pieces: list[Piece]


class _ViewFinder:
    """Finds logical tensors in their stored tensors. Layers have equal views, each of which is made once."""

    def __init__(self) -> None:
        self._views_by_key: dict[object, RecordedView] = {}

    def find(self, name: str, shape: _Shape, holders: Sequence[_Holder]) -> RecordedView:
        """Return the view in which a rank stores the logical tensor `name`, of shape `shape`. `holders` are the tensors
        on that rank that store elements of `name`.

        Raises StoreError if there are several holders, or if the elements are not one view of the holder.
        """
        first, *others = holders
        stored = first.native
        if others:
            again = others[0].native.label
            raise StoreError(
                f"{name!r} was recorded in two stored tensors, {stored.label!r} and {again!r}; "
                f"make the loader copy it into one"
            )
        try:
            return self._make(stored.shape, shape, first.pieces)
        except StoreError as error:
            what = f"{name!r} {shape} is not a view of {stored.label!r} {stored.shape}"
            raise StoreError(f"{what}: {error}") from None

    def _make(self, stored: _Shape, shape: _Shape, pieces: Sequence[Piece]) -> RecordedView:
        """The view of these pieces, whatever their tensor is called. Raises StoreError as RecordedView."""
        unnamed = tuple((piece.cell, piece.element, piece.blocks) for piece in pieces)
        key = stored, shape, unnamed
        if key not in self._views_by_key:
            self._views_by_key[key] = RecordedView(stored, shape, pieces)
        return self._views_by_key[key]


def _find_holders(recorded: Recorded, tensors: Shapes) -> dict[str, list[_Holder]]:
    """The stored tensors in which each of these logical tensors lies."""
    holders: dict[str, list[_Holder]] = {}
    for native in recorded.natives:
        by_tensor: dict[str, list[Piece]] = {}
        for piece in native.pieces:
            by_tensor.setdefault(piece.tensor, []).append(piece)
        for name, pieces in by_tensor.items():
            if name in tensors:
                holders.setdefault(name, []).append(_Holder(native, pieces))
    return holders


def _make_parts(
    recorded: Recorded, views: Mapping[str, tuple[Native, RecordedView]]
) -> tuple[dict[str, _RankPart], dict[_Key, _Shape]]:
    """The parts of a rank by logical name, and the shapes of the stored tensors of which they are views."""
    stored = [native for native in recorded.natives if native.pieces]
    shapes = {(native.chunk, native.name): native.shape for native in stored}
    for native, view in views.values():
        # A stored tensor with fewer dimensions than a logical one gets dimensions of 1: the same cells in order.
        wanted = native.shape + (1,) * view.missing
        key = native.chunk, native.name
        shapes[key] = max(shapes[key], wanted, key=len)
    parts = {}
    for name, (native, view) in views.items():
        cut = view.cut(len(shapes[native.chunk, native.name]))
        slot = Slot(native.chunk, native.name, cut, view.order, native.function)
        parts[name] = _RankPart(slot, view.runs)
    return parts, shapes


class _LayoutFinder:
    """Finds the layout of each tensor over the ranks that hold it; collects errors."""

    def __init__(self, held: Mapping[int, _RankHoldings]) -> None:
        self.held = held
        self.layouts: dict[str, Layout] = {}
        self.faults: list[str] = []
        self.missing: list[str] = []
        # Equal layers share a layout object, which plans read once.
        self._layouts_by_key: dict[object, Layout] = {}

    def add(self, name: str, entry: Entry) -> None:
        """Look for one layout that describes the tensor `name` on all ranks, and add it to `self.layouts`; `entry` has
        the tensor's shape and dtype. If no rank stores the tensor, its name goes to `self.missing`; if no layout fits,
        a message goes to `self.faults`."""
        parts = {}
        for rank, on_rank in self.held.items():
            if name in on_rank.parts:
                parts[rank] = on_rank.parts[name].runs
        if not parts:
            self.missing.append(name)
            return
        shape, dtype = tuple(entry[0]), canonical(entry[1])
        key = shape, dtype, tuple(parts.items())
        try:
            if key not in self._layouts_by_key:
                self._layouts_by_key[key] = _find_layout(shape, dtype, parts)
            self.layouts[name] = self._layouts_by_key[key]
        except ShardError as error:
            self.faults.append(f"{name!r} has no single layout over its ranks: {error}")

    def list_faults(self, unused: Sequence[str]) -> list[str]:
        """Return a list of messages: the errors found so far, and one more if there are tensors that no rank stores.
        Tensors whose names match a glob in `unused` do not count as missing."""
        missing = [name for name in self.missing if not matches(name, unused)]
        if not missing:
            return self.faults
        more = f" and {len(missing) - SHOWN} more" if len(missing) > SHOWN else ""
        listed = ", ".join(missing[:SHOWN])
        fix = "load them while recording, leave them out of the shapes, or name them in unused="
        return [*self.faults, f"no recorded rank stores {listed}{more}; {fix}"]


def _find_layout(shape: _Shape, dtype: str, parts: Mapping[int, tuple[Runs, ...]]) -> Layout:
    """The one layout of these parts, by rank. Raises StoreError if there is none."""
    layout = from_holdings(shape, parts, dtype=dtype)
    if isinstance(layout, Layout):
        return layout
    by_dim = list(zip(*parts.values(), strict=True))
    divided = [d for d, held in enumerate(by_dim) if len(set(held)) > 1]
    if len(divided) != 1:
        some = sorted(parts)[:SHOWN]
        more = f"; and {len(parts) - SHOWN} more" if len(parts) > SHOWN else ""
        held_parts = "; ".join(f"rank {rank} {' x '.join(map(str, parts[rank]))}" for rank in some)
        what = f"of {shape} the ranks hold no grid of equal parts in dimensions {divided}: {held_parts}{more}"
        fix = "record every rank that holds a part, and divide one dimension only, or all evenly"
        raise StoreError(f"{what}; {fix}")
    # Some parts are on more ranks than others, as heads over ranks that they do not divide evenly.
    axes = {"part": len(parts)}
    mesh = Mesh(axes, ranks=list(parts))
    dims = [fit(n, axes, held) for n, held in zip(shape, by_dim, strict=True)]
    return intern(shape, dtype, mesh, tuple(dims), ())
