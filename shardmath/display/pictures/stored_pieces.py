"""Stored pieces: what lies where in a stored tensor of a rank, and from which stored tensors of a trainer it comes.

1. A **piece** is a box of the stored tensor that is a box of one logical tensor. It has one range of positions per
   stored dimension, which may have a step.
2. In a refit, a piece is what one transfer brings, with its place in the sender's stored tensor. Neighbors that are
   neighbors at the sender too are one piece.
3. A tensor that a transform makes has pieces without a source. Positions in no piece are padding.

>>> from shardmath.layouts.algebra.mesh import Mesh
>>> from shardmath.models.storage import rows
>>> from shardmath.models.storage.binding import bind
>>> from shardmath.models.storage.stored import Stored
>>> side = Stored(rows.parse("qk = [q k] : (tp (q + k)) h"), (Mesh(tp=2),))
>>> found = find_stored(bind(side, {"q": ((4, 2), "int8"), "k": ((2, 2), "int8")}), None, rank=1)
>>> for piece in found.pieces:
...     print(piece.tensor, piece.cells, piece.elements)
q (range(0, 2), range(0, 2)) (slice(2, 4, None), slice(0, 2, None))
k (range(2, 3), range(0, 2)) (slice(1, 2, None), slice(0, 2, None))
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from shardmath.base.arguments import as_integer
from shardmath.base.errors import PlanError, StoreError
from shardmath.base.text import shown
from shardmath.models.recordings.recorded import label
from shardmath.models.refits.coverage import Native
from shardmath.models.refits.refit import Refit
from shardmath.models.storage.stored import KnownSide, Slot

__all__ = ["Box", "StoredPiece", "PieceSource", "PiecedTensor", "find_stored"]

Box: TypeAlias = tuple[range, ...]
"""Positions of a stored tensor, by dimension."""
_Slices: TypeAlias = tuple[slice, ...]
"""A box of a logical tensor, by dimension."""


class PieceSource(NamedTuple):
    """The place of a piece at the trainer: a box of a stored tensor of a rank."""

    rank: int
    native: str
    shape: tuple[int, ...]
    cells: Box


class StoredPiece(NamedTuple):
    """A box of a stored tensor (`cells`), the box of the logical tensor that lies in it (`elements`), and the place
    from which it comes: None if it is not sent as it is. `function` is applied before it is stored; "" if none is.
    `made` is the kind of the transform that makes it, or ""."""

    tensor: str
    cells: Box
    elements: _Slices
    function: str = ""
    source: PieceSource | None = None
    made: str = ""


class PiecedTensor(NamedTuple):
    """A stored tensor of a rank: the side that has it, its name and shape, the declaration of its storage, its pieces,
    the number of its positions in no piece, and whether the pieces have been traced to the trainer."""

    side: str
    rank: int
    native: str
    shape: tuple[int, ...]
    declared: str
    pieces: tuple[StoredPiece, ...]
    padding: int
    is_traced: bool


class _Place(NamedTuple):
    """A stored tensor of a rank: the side that has it, by name and as a value."""

    engine: str | None
    side: KnownSide
    rank: int
    native: Native


def find_stored(
    value: Refit | KnownSide,
    tensor: str | None,
    rank: int | None = None,
    engine: str | None = None,
) -> PiecedTensor:
    """Return a stored tensor with its pieces. `value` is a refit, whose pieces have sources, or one bound side.

    By default `rank` is the first rank of the engine that stores `tensor`, and `tensor` the first one there with
    several logical tensors, or else the first one. Raises StoreError for a tensor that the rank does not store, and
    PlanError for an unknown engine.
    """
    number = None if rank is None else as_integer(rank, "a rank", StoreError)
    if isinstance(value, Refit):
        name, side = _choose_side(value, number, engine)
        what = "trainer" if name is None else _name_engine(value, name)
    else:
        name, side, what = None, value, ""
    place = _choose_place(name, side, tensor, number)
    pieces = _list_held(place)
    if isinstance(value, Refit) and name is not None:
        pieces = _trace(value, place, pieces)
    shape = side.natives(place.rank)[place.native]
    return PiecedTensor(
        side=what,
        rank=place.rank,
        native=label(*place.native),
        shape=shape,
        declared=str(side.row_of(place.native, place.rank)),
        pieces=tuple(pieces),
        padding=math.prod(shape) - sum(_count(piece.cells) for piece in pieces),
        is_traced=name is not None,
    )


def _count(cells: Box) -> int:
    """The number of positions in a box."""
    return math.prod(map(len, cells))


def _name_engine(refit: Refit, name: str) -> str:
    """The engine in words: its name only if there are several."""
    planned = refit.whole or refit
    return "engine" if len(planned.engines) == 1 else f"engine {name}"


def _choose_side(
    refit: Refit, rank: int | None, engine: str | None
) -> tuple[str | None, KnownSide]:
    """The engine that is named, otherwise the first one that has the rank; (None, trainer) if no engine has it."""
    if engine is not None:
        if engine not in refit.engines:
            raise PlanError(f"no engine {engine!r}; pass one of {', '.join(refit.engines)}")
        return engine, refit.engines[engine]
    for name, side in refit.engines.items():
        if rank is None or rank in side.ranks:
            return name, side
    if rank not in refit.trainer.ranks:
        what = f"neither an engine nor the trainer has rank {rank}"
        raise StoreError(f"{what}; pass a rank of {', '.join(refit.engines)} or of the trainer")
    return None, refit.trainer


def _choose_place(
    engine: str | None, side: KnownSide, tensor: str | None, rank: int | None
) -> _Place:
    """The stored tensor of this name on this rank, or the default of what is None.

    Raises StoreError if there is none.
    """
    names: dict[str, None] = {}
    for one in _list_ranks(side, rank):
        natives = list(side.natives(one))
        native = _choose_native(side, one, natives, tensor)
        if native is not None:
            return _Place(engine, side, one, native)
        names.update((label(*native), None) for native in natives)
    where = "no rank stores" if rank is None else f"rank {rank} does not store"
    wanted = "a tensor" if tensor is None else f"a tensor {shown(tensor)}"
    raise StoreError(f"{where} {wanted}; pass one of {shown(list(names))}")


def _list_ranks(side: KnownSide, rank: int | None) -> list[int]:
    """The rank, or all ranks of the side, ascending. Raises StoreError for a rank that the side lacks."""
    if rank is None:
        return sorted(side.ranks)
    if rank not in side.ranks:
        ranks = shown(sorted(side.ranks))
        raise StoreError(f"rank {rank} is not on this side; pass one of its ranks {ranks}")
    return [rank]


def _choose_native(
    side: KnownSide, rank: int, natives: Sequence[Native], tensor: str | None
) -> Native | None:
    """The stored tensor of this name; None if there is none."""
    if tensor is None:
        return _find_fused(side, rank, natives) if natives else None
    matching = (native for native in natives if tensor in (native[1], label(*native)))
    return next(matching, None)


def _find_fused(side: KnownSide, rank: int, natives: Sequence[Native]) -> Native:
    """The first stored tensor with several logical tensors; otherwise the first one."""
    seen = set()
    for _, slot, _ in side.visit(rank):
        native = slot.chunk, slot.native
        if native in seen:
            return native
        seen.add(native)
    return natives[0]


def _list_slots(place: _Place) -> Iterator[tuple[str, Slot]]:
    """(logical name, slot) of each logical tensor in the stored one."""
    for name, slot, _ in place.side.visit(place.rank):
        if (slot.chunk, slot.native) == place.native:
            yield name, slot


def _list_held(place: _Place) -> list[StoredPiece]:
    """The pieces by what the layouts say, without sources."""
    pieces = []
    for name, slot in _list_slots(place):
        runs = place.side.layouts[name].runs(place.rank)
        segments = [dim_runs.segments for dim_runs in runs]
        for box in itertools.product(*segments):
            local = tuple(slice(at, at + n) for at, _, n in box)
            elements = tuple(slice(start, start + n) for _, start, n in box)
            pieces.append(StoredPiece(name, _locate(slot, local), elements, slot.function))
    return pieces


def _locate(slot: Slot, local: Sequence[slice]) -> Box:
    """The positions, in the stored tensor, of a box of the slot's logical tensor on this rank."""
    logical_dims = iter(slot.order)
    cells = []
    for part in slot.cut:
        if isinstance(part, int):
            cells.append(range(part, part + 1))
        else:
            whole = range(part.start, part.stop, part.step or 1)
            cells.append(whole[local[next(logical_dims)]])
    return tuple(cells)


# Sources


def _trace(refit: Refit, place: _Place, held: Sequence[StoredPiece]) -> list[StoredPiece]:
    """The pieces with their sources; those of tensors that transforms make stay without."""
    made = _list_made(refit)
    here = {name for name, _ in _list_slots(place)}
    sent = list(_list_sent(refit, place, here - set(made)))
    counts = dict.fromkeys(here, 0)
    for piece in sent:
        counts[piece.tensor] += _count(piece.cells)
    for piece in held:
        counts[piece.tensor] -= _count(piece.cells)
    unsent = []
    for piece in held:
        if counts[piece.tensor]:
            unsent.append(piece._replace(made=made.get(piece.tensor, "")))
    traced = [piece for piece in sent if not counts[piece.tensor]]
    return _merge(traced) + unsent


def _list_made(refit: Refit) -> dict[str, str]:
    """The kind of the transform that makes each tensor, or companion such as its scales, that is not sent as it is."""
    made: dict[str, str] = {}
    if refit.transforms is not None:
        for name, wired in refit.transforms.wired.items():
            _, suffixes = wired.suffixes
            kind = type(wired.transform).__name__
            made |= dict.fromkeys([name, *(name + suffix for suffix in suffixes)], kind)
    return made


def _list_sent(refit: Refit, place: _Place, names: set[str]) -> Iterator[StoredPiece]:
    """A piece for each transfer of these tensors into the stored tensor."""
    slots = refit.slots(place.rank, place.engine)
    functions = {name: slot.function for name, slot in _list_slots(place)}
    senders = _Senders(refit)
    for t in refit.plan.transfers(dst=place.rank):
        slot = slots.get(t.dst_tensor) if t.tensor in names else None
        if slot is None or (slot.chunk, slot.native) != place.native:
            continue
        cells = _locate(slot, t.dst_slices)
        source = senders.find(t.src_rank, t.src_tensor, t.src_slices)
        yield StoredPiece(t.tensor, cells, t.global_slices, functions[t.tensor], source)


class _Senders:
    """The stored tensors of the trainer's ranks, each rank's read once."""

    def __init__(self, refit: Refit) -> None:
        self.refit = refit
        self.slots: dict[int, Mapping[str, Slot]] = {}
        self.shapes: dict[int, Mapping[Native, tuple[int, ...]]] = {}

    def find(self, rank: int, name: str, local: Sequence[slice]) -> PieceSource:
        """Return the place of a box of the local tensor `name` of `rank`, in the tensor that the rank stores."""
        if rank not in self.slots:
            self.slots[rank] = self.refit.slots(rank)
            self.shapes[rank] = self.refit.trainer.natives(rank)
        slot = self.slots[rank][name]
        native = slot.chunk, slot.native
        shape = self.shapes[rank][native]
        return PieceSource(rank, label(*native), shape, _locate(slot, local))


def _merge(pieces: Iterable[StoredPiece]) -> list[StoredPiece]:
    """The pieces in the order of their positions, each joined with the one before if it continues that one."""
    merged: list[StoredPiece] = []
    for piece in sorted(pieces, key=_order):
        joined = _join(merged[-1], piece) if merged else None
        if joined is None:
            merged.append(piece)
        else:
            merged[-1] = joined
    return merged


def _order(piece: StoredPiece) -> tuple[object, ...]:
    """The first position of the piece, all but the first dimension before the first one."""
    starts = [(cells.start, cells.stop) for cells in piece.cells]
    return piece.tensor, starts[1:], starts[:1]


def _join(one: StoredPiece, other: StoredPiece) -> StoredPiece | None:
    """Both pieces as one if `other` continues `one` along one dimension, here, in the logical tensor and at the source;
    else None."""
    first, second = one.source, other.source
    if one.tensor != other.tensor or first is None or second is None or first[:3] != second[:3]:
        return None
    cells = _continue(one.cells, other.cells)
    there = _continue(first.cells, second.cells)
    elements = _continue(_as_ranges(one.elements), _as_ranges(other.elements))
    if cells is None or there is None or elements is None:
        return None
    slices = tuple(slice(dim.start, dim.stop) for dim in elements)
    return one._replace(cells=cells, elements=slices, source=first._replace(cells=there))


def _as_ranges(slices: _Slices) -> Box:
    return tuple(range(dim.start, dim.stop) for dim in slices)


def _continue(one: Box, other: Box) -> Box | None:
    """Both boxes as one, if they differ in one dimension, in which `other` begins where `one` ends; else None."""
    differing = [d for d, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1]]
    if len(differing) != 1:
        return None
    d = differing[0]
    whole = range(one[d].start, other[d].stop, one[d].step)
    if whole[: len(one[d])] != one[d] or whole[len(one[d]) :] != other[d]:
        return None
    return (*one[:d], whole, *one[d + 1 :])
