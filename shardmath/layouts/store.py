"""Store: which buffer, and which view of it, a local tensor lies in.

1. A layout says what a rank's local tensor holds; a store says, as a separate value, where that tensor lies: a view
   (buffer, offset, strides, all in elements) for each (local tensor, rank). Plans and transfers stay logical.
2. Holes make several tensors fit one buffer: the q, k and v of an interleaved QKV are three layouts of the same
   view whose holes interlock; `check` proves that no cell is two tensors'.
3. A flat shard, any row-major range of a tensor, is at most 2 d - 1 windows, each a contiguous view of the flat buffer.

>>> windows, store = flat_windows("w", (4, 5), {0: (0, 7), 1: (7, 20)}, dtype="float32")
>>> [(str(w.mesh.ranks[0]), w.text) for w in windows]
[('0', '(n)=<0:1> h'), ('0', '(n)=<1:2> (h)=<0:2>'), ('1', '(n)=<1:2> (h)=<2:5>'), ('1', '(n)=<2:4> h')]
>>> store.place("w[1]", windows[1], 0)
Place(buffer='w', offset=5, shape=(1, 2), strides=(2, 1))
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardmath.algebra.box import Box, flat_boxes, volume
from shardmath.algebra.mesh import Mesh, strides
from shardmath.algebra.runs import Runs
from shardmath.base.errors import StoreError
from shardmath.base.given import instance, listed, mapping, shown, text
from shardmath.base.integers import whole
from shardmath.layouts.layout import Layout

__all__ = [
    "Place",
    "Store",
    "View",
    "check",
    "flat_windows",
    "local_name",
    "local_tensors",
    "locals_of",
    "views",
]


def local_name(name: str, window: int, count: int) -> str:
    """The key of a local tensor: the name, or name[i] where a side holds it as several windows."""
    return name if count == 1 else f"{name}[{window}]"


def local_tensors(name: str, windows: Sequence[Layout]) -> Iterator[tuple[str, Layout]]:
    """(local tensor, layout) of every window of a tensor."""
    return ((local_name(name, i, len(windows)), layout) for i, layout in enumerate(windows))


Held: TypeAlias = (
    Mapping[str, Layout]
    | Mapping[str, tuple[Layout, ...]]
    | Mapping[str, Layout | tuple[Layout, ...]]
)
"""How tensors are held, by name: each under a layout, or as windows."""


def locals_of(layouts: Held, rank: int) -> Iterator[tuple[str, Layout]]:
    """(local tensor, layout) of all that the rank has a part of. Raises StoreError for what is not held."""
    number = whole(rank, "the rank", StoreError)
    for name, one in mapping(layouts, "layouts are ", "name to Layout", StoreError).items():
        windows = one if isinstance(one, tuple) else (one,)
        for layout in windows:
            instance(
                layout,
                Layout,
                f"give a Layout of {shown(name)}, or a tuple of its windows",
                StoreError,
            )
        for local, layout in local_tensors(text(name, "the name of a tensor", StoreError), windows):
            if number in layout.mesh:
                yield local, layout


@dataclass(frozen=True, slots=True)
class View:
    """Where in a buffer a local tensor begins and, in elements, how it strides; row-major without `strides`.

    Raises StoreError for what is not a name, or not an integer.
    """

    buffer: str
    offset: int = 0
    strides: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if type(self.buffer) is str and type(self.offset) is int and self.strides is None:
            return  # nearly all: a flat buffer has a view of each of a model's parameters
        object.__setattr__(self, "buffer", text(self.buffer, "the buffer of a View", StoreError))
        object.__setattr__(self, "offset", whole(self.offset, "the offset of a View", StoreError))
        if self.strides is not None:
            steps = listed(self.strides, "the strides of a View", StoreError)
            steps = tuple(whole(step, "a stride of a View", StoreError) for step in steps)
            object.__setattr__(self, "strides", steps)


class Place(NamedTuple):
    """A view with its shape: what `as_strided` of numpy or torch takes, counted in elements."""

    buffer: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def end(self) -> int:
        """One past the last element of the buffer that the view reaches."""
        if 0 in self.shape:
            return self.offset
        return (
            self.offset
            + 1
            + sum((n - 1) * step for n, step in zip(self.shape, self.strides, strict=True))
        )


@dataclass(frozen=True, slots=True, init=False)
class Store:
    """A view for each (local tensor, rank), from a mapping; equal mappings are equal stores.

    Raises StoreError for what is not such an entry, and for a local tensor that has two views.
    """

    entries: tuple[tuple[tuple[str, int], View], ...]

    def __init__(
        self, entries: Mapping[tuple[str, int], View] | Iterable[tuple[tuple[str, int], View]]
    ) -> None:
        given = (
            entries.items()
            if isinstance(entries, Mapping)
            else listed(entries, "entries", StoreError)
        )
        ordered = sorted(map(_entry, given), key=itemgetter(0))
        keys = [key for key, _ in ordered]
        twice = next((key for key, after in itertools.pairwise(keys) if key == after), None)
        if twice is not None:
            raise StoreError(
                f"local tensor {twice[0]!r} of rank {twice[1]} has two views; give one"
            )
        object.__setattr__(self, "entries", tuple(ordered))

    def place(self, local: str, layout: Layout, rank: int) -> Place:
        """Where the rank's local tensor of this layout lies. Raises StoreError for a view missing or misfit."""
        key = (
            text(local, "the name of a local tensor", StoreError),
            whole(rank, "the rank", StoreError),
        )
        at = bisect.bisect_left(self.entries, key, key=itemgetter(0))
        if at == len(self.entries) or self.entries[at][0] != key:
            known = (
                ", ".join(f"{name!r} of rank {r}" for (name, r), _ in self.entries[:8]) or "none"
            )
            raise StoreError(
                f"no view for local tensor {local!r} of rank {rank}; views are there for {known}"
            )
        view = self.entries[at][1]
        shape = instance(
            layout, Layout, "give the layout of the local tensor", StoreError
        ).local_shape(rank)
        steps = strides(shape) if view.strides is None else view.strides
        if len(steps) != len(shape) or view.offset < 0 or min(steps, default=0) < 0:
            what = f"{view} of {local!r}, whose local shape is {shape}"
            raise StoreError(f"{what}; give an offset >= 0 and {len(shape)} strides >= 0")
        return Place(view.buffer, view.offset, shape, steps)


_Entry: TypeAlias = tuple[tuple[str, int], View]


def _entry(entry: Any) -> _Entry:
    """The entry, of a plain name and rank."""
    pair = listed(entry, "an entry and its view", StoreError)
    key = pair[0] if len(pair) == 2 else None
    if not isinstance(key, tuple) or len(key) != 2 or not isinstance(pair[1], View):
        raise StoreError(f"entry {shown(entry)} is not one; give (local tensor, rank): View")
    if type(key[0]) is str and type(key[1]) is int:
        return key, pair[1]
    name = text(key[0], "the name of a local tensor", StoreError)
    return (name, whole(key[1], f"the rank of {name!r}", StoreError)), pair[1]


Buffers = Mapping[str, NDArray[Any]]


def views(store: Store, layouts: Held, rank: int, buffers: Buffers) -> dict[str, NDArray[Any]]:
    """The rank's local tensors as views of its flat buffers, by local name; writing one writes the buffer.

    A tensor held as several windows has a local tensor of each, `name[0]`, `name[1]`, ... Layouts whose mesh does not
    have the rank are left out. Raises StoreError for a missing buffer, or a view beyond its end.
    """
    instance(store, Store, "views takes a Store", StoreError)
    mapping(buffers, "buffers are ", "name to a flat numpy array", StoreError)
    places = {local: store.place(local, layout, rank) for local, layout in locals_of(layouts, rank)}
    return {
        local: _strided(place, _buffer(place, local, buffers)) for local, place in places.items()
    }


def _buffer(place: Place, local: str, buffers: Buffers) -> NDArray[Any]:
    if place.buffer not in buffers:
        known = ", ".join(map(repr, buffers)) or "none"
        raise StoreError(f"no buffer {place.buffer!r} for {local!r}; buffers are {known}")
    buffer = instance(buffers[place.buffer], np.ndarray, "give a flat numpy array", StoreError)
    if buffer.ndim != 1 or place.end > len(buffer):
        what = f"{place} of {local!r} ends at {place.end}, the buffer has shape {buffer.shape}"
        raise StoreError(f"{what}; give a flat one that holds it")
    return buffer


def _strided(place: Place, buffer: NDArray[Any]) -> NDArray[Any]:
    steps = tuple(step * buffer.itemsize for step in place.strides)
    return np.lib.stride_tricks.as_strided(buffer[place.offset :], place.shape, steps)


def check(store: Store, layouts: Held, rank: int) -> None:
    """Raise StoreError if two cells of the rank's local tensors, holes left out, lie at one place of a buffer.

    Takes a byte for each element that the buffers reach.
    """
    instance(store, Store, "check takes a Store", StoreError)
    own = dict(locals_of(layouts, rank))
    places = {local: store.place(local, layout, rank) for local, layout in own.items()}
    ends: dict[str, int] = {}
    for place in places.values():
        ends[place.buffer] = max(ends.get(place.buffer, 0), place.end)
    owners = list(places)
    taken = {buffer: np.zeros(end, np.int32) for buffer, end in ends.items()}
    for number, local in enumerate(owners, 1):
        cells = _cells(places[local], own[local], rank)
        buffer = taken[places[local].buffer]
        clash = cells[buffer[cells] > 0] if len(np.unique(cells)) == len(cells) else cells
        if len(clash):
            other = owners[int(buffer[clash[0]]) - 1] if buffer[clash[0]] else local
            where = f"element {int(clash[0])} of {places[local].buffer!r}"
            what = f"rank {rank}: {local!r} and {other!r} both lie at {where}"
            raise StoreError(f"{what}; their holes have to interlock")
        buffer[cells] = number


def _cells(place: Place, layout: Layout, rank: int) -> NDArray[np.int64]:
    """The buffer elements of the tensor's own cells."""
    out = np.array([place.offset])
    for index, step in zip(layout.indices(rank), place.strides, strict=True):
        out = (out[:, None] + np.flatnonzero(index >= 0) * step).ravel()
    return out


def flat_windows(
    name: str,
    shape: Sequence[int],
    ranges: Mapping[int, tuple[int, int]],
    *,
    dtype: object = "float32",
    buffer: str | None = None,
) -> tuple[tuple[Layout, ...], Store]:
    """A tensor of which each rank holds a row-major flat range [lo, hi), in a flat buffer of its own.

    The windows, rank by rank and in order, and where they lie: in `buffer` (the name, if not given), whose element 0 is
    the rank's element lo. Raises PlanError for a range outside the tensor, StoreError for what is not a range.
    """
    windows: list[Layout] = []
    places: list[tuple[int, int]] = []
    sizes = Layout(shape, Mesh(), "...", dtype=dtype).shape
    name = text(name, "the name of a tensor", StoreError)
    held = mapping(ranges, "ranges are ", "rank to (start, stop)", StoreError)
    for rank, span in held.items():
        offset, (lo, hi) = 0, _range(rank, span)
        for box in flat_boxes(sizes, lo, hi):
            windows.append(_boxed(sizes, rank, box, dtype))
            places.append((rank, offset))
            offset += volume(box)
    names = [local_name(name, i, len(windows)) for i in range(len(windows))]
    home = name if buffer is None else buffer
    views = {(local, rank): View(home, at) for local, (rank, at) in zip(names, places, strict=True)}
    return tuple(windows), Store(views)


def _range(rank: object, span: object) -> tuple[int, ...]:
    whole(rank, "a rank of ranges", StoreError)
    ends = listed(span, f"the start and stop of rank {rank}", StoreError)
    if len(ends) != 2:
        raise StoreError(f"the range of rank {rank} is {shown(span)}; give its start and its stop")
    return tuple(whole(end, f"an end of the range of rank {rank}", StoreError) for end in ends)


def _boxed(shape: tuple[int, ...], rank: int, box: Box, dtype: object) -> Layout:
    """One rank holds exactly the box."""
    stored = {d: Runs(((0, lo, hi - lo),)) for d, (lo, hi) in enumerate(box)}
    return Layout(shape, Mesh(ranks=[rank]), (), dtype=dtype, stored=stored)
