"""Store: the buffer that a local tensor lies in, and its view there.

1. A layout gives the elements of a rank's local tensor; a store, a separate value, gives the place of that
   tensor: a view (buffer, offset, strides, all in elements) for each (local tensor, rank). Plans and
   transfers stay logical.
2. Holes make several tensors fit one buffer: the q, k and v of an interleaved QKV are three layouts of the
   same view whose holes interlock; `check` proves that no two tensors share a cell.
3. A flat shard, any row-major range of a tensor, is at most 2 d - 1 windows, each a contiguous view of the
   flat buffer.

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

from shardmath.base.arguments import as_integer, instance, listed, mapping, text
from shardmath.base.errors import StoreError
from shardmath.base.text import shown
from shardmath.layouts.algebra.box import Box, flat_boxes, volume
from shardmath.layouts.algebra.mesh import Mesh, strides
from shardmath.layouts.algebra.runs import from_ranges
from shardmath.layouts.holdings import LayoutOrWindows, Windows, windows_of
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
    """Return the name of the local tensor for one of a tensor's layouts: `name` if `count` is 1, otherwise
    `name[window]`. `window` is the index of the layout, and `count` the number of layouts.

    Raises StoreError unless the name is a str and the numbers are integers.
    """
    tensor = text(name, "the name of a tensor", StoreError)
    number = as_integer(window, "the number of a window", StoreError)
    is_only_one = as_integer(count, "the number of windows", StoreError) == 1
    return tensor if is_only_one else f"{tensor}[{number}]"


def local_tensors(name: str, windows: Sequence[Layout]) -> Iterator[tuple[str, Layout]]:
    """Yield (local name, layout) for each layout of the tensor `name` in `windows`. The local name is `name` if
    `windows` has just one layout, otherwise `name[i]` with the layout's index i.

    Raises StoreError unless the name is a str and the windows are Layouts.
    """
    tensor = text(name, "the name of a tensor", StoreError)
    given = listed(windows, f"the windows of tensor {tensor!r}", StoreError)
    # `windows_of` raises an error for an empty tuple, which here has no local tensors.
    read = windows_of(given, tensor, StoreError) if given else Windows()
    return read.locals(tensor)


Held: TypeAlias = (
    Mapping[str, Layout] | Mapping[str, tuple[Layout, ...]] | Mapping[str, LayoutOrWindows]
)
"""By name, how each tensor is held: under a layout, or as windows."""


def locals_of(layouts: Held, rank: int) -> Iterator[tuple[str, Layout]]:
    """Yield (name, layout) of each local tensor of `rank`; `layouts` maps each tensor's name to its layout or layouts.

    Raises StoreError for anything but a Layout or windows.
    """
    number = as_integer(rank, "the rank", StoreError)
    held = mapping(layouts, "layouts are ", "name to Layout", StoreError)
    for name, given in held.items():
        tensor = text(name, "the name of a tensor", StoreError)
        if given == ():
            continue  # `flat_windows` gives () for a tensor that no rank holds
        windows = windows_of(given, tensor, StoreError)
        yield from windows.locals(tensor, number)


@dataclass(frozen=True, slots=True)
class View:
    """The position of a local tensor in the buffer named `buffer`: its offset and strides (None: row-major).

    Both count elements. Raises StoreError unless `buffer` is a str and the numbers are integers.
    """

    buffer: str
    offset: int = 0
    strides: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if type(self.buffer) is str and type(self.offset) is int and self.strides is None:
            return  # the common case: a flat buffer has a view per parameter of a model
        buffer = text(self.buffer, "the buffer of a View", StoreError)
        offset = as_integer(self.offset, "the offset of a View", StoreError)
        object.__setattr__(self, "buffer", buffer)
        object.__setattr__(self, "offset", offset)
        if self.strides is not None:
            given = listed(self.strides, "the strides of a View", StoreError)
            steps = tuple(as_integer(step, "a stride of a View", StoreError) for step in given)
            object.__setattr__(self, "strides", steps)


class Place(NamedTuple):
    """The place of a local tensor: its buffer's name, and its offset, shape and strides in elements, as torch's
    `as_strided` takes them."""

    buffer: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def end(self) -> int:
        """One past the position of the local tensor's last element in the buffer."""
        if 0 in self.shape:
            return self.offset
        last = self.offset
        for n, step in zip(self.shape, self.strides, strict=True):
            last += (n - 1) * step
        return last + 1


@dataclass(frozen=True, slots=True, init=False)
class Store:
    """A mapping from (name, rank) of each local tensor to its View, the position in a flat buffer; equal mappings make
    equal stores.

    Raises StoreError for a malformed entry, and for a local tensor with two views.
    """

    entries: tuple[tuple[tuple[str, int], View], ...]

    def __init__(
        self, entries: Mapping[tuple[str, int], View] | Iterable[tuple[tuple[str, int], View]]
    ) -> None:
        if isinstance(entries, Mapping):
            given: Iterable[object] = entries.items()
        else:
            given = listed(entries, "entries", StoreError)
        ordered = sorted(map(_read_entry, given), key=_KEY)
        for (key, _), (next_key, _) in itertools.pairwise(ordered):
            if key == next_key:
                raise StoreError(
                    f"local tensor {key[0]!r} of rank {key[1]} has two views; give it one"
                )
        object.__setattr__(self, "entries", tuple(ordered))

    def place(self, local: str, layout: Layout, rank: int) -> Place:
        """Return the Place (buffer, offset, shape, strides) of local tensor `local`, which `rank` holds under `layout`.

        Raises StoreError if its view is missing or does not fit.
        """
        view = self._find_view(local, rank)
        instance(layout, Layout, "give the layout of the local tensor", StoreError)
        shape = layout.local_shape(rank)
        steps = strides(shape) if view.strides is None else view.strides
        if len(steps) != len(shape) or view.offset < 0 or min(steps, default=0) < 0:
            raise StoreError(
                f"{view} does not fit local tensor {local!r} of shape {shape}; "
                f"give an offset >= 0 and {len(shape)} strides >= 0"
            )
        return Place(view.buffer, view.offset, shape, steps)

    def _find_view(self, local: str, rank: int) -> View:
        """The view of the rank's local tensor. Raises StoreError if there is none."""
        name = text(local, "the name of a local tensor", StoreError)
        key = (name, as_integer(rank, "the rank", StoreError))
        index = bisect.bisect_left(self.entries, key, key=_KEY)
        if index < len(self.entries) and self.entries[index][0] == key:
            return self.entries[index][1]
        first_eight = [f"{known!r} of rank {r}" for (known, r), _ in self.entries[:8]]
        count = len(self.entries)
        raise StoreError(
            f"the store has no view of local tensor {local!r} of rank {rank}; add one to its {count}, "
            f"which are of {', '.join(first_eight) or 'nothing'}"
        )


_Entry: TypeAlias = tuple[tuple[str, int], View]
_KEY = itemgetter(0)


def _read_entry(entry: Any) -> _Entry:
    """The entry, its name and rank as plain str and int. Raises StoreError for a malformed entry."""
    pair = listed(entry, "an entry and its view", StoreError)
    key, view = pair if len(pair) == 2 else (None, None)
    if not isinstance(key, tuple) or len(key) != 2 or not isinstance(view, View):
        raise StoreError(
            f"entry {shown(entry)} is not a name, a rank and a View; give (name of a local tensor, rank): View"
        )
    local, rank = key
    if type(local) is str and type(rank) is int:
        return key, view
    name = text(local, "the name of a local tensor", StoreError)
    number = as_integer(rank, f"the rank of {name!r}", StoreError)
    return (name, number), view


Buffers = Mapping[str, NDArray[Any]]


def views(store: Store, layouts: Held, rank: int, buffers: Buffers) -> dict[str, NDArray[Any]]:
    """Return a dict of the rank's local tensors, by local name, as numpy views of its flat `buffers`; writing a view
    writes the buffer.

    A tensor held as several windows has one local tensor per window, `name[0]`, `name[1]`, ... Layouts whose
    mesh does not have the rank are left out. Raises StoreError for a missing buffer, or a view beyond its end.
    """
    instance(store, Store, "views takes a Store", StoreError)
    mapping(buffers, "buffers are ", "name to a flat numpy array", StoreError)
    views = {}
    for local, layout in list(locals_of(layouts, rank)):
        place = store.place(local, layout, rank)
        buffer = _find_buffer(place, local, buffers)
        views[local] = _view_buffer(place, buffer)
    return views


def _find_buffer(place: Place, local: str, buffers: Buffers) -> NDArray[Any]:
    """The flat buffer of the place. Raises StoreError if it is missing, or the place does not fit it."""
    if place.buffer not in buffers:
        known = ", ".join(map(repr, buffers)) or "none"
        what = f"buffer {place.buffer!r} of local tensor {local!r} is not among buffers {known}"
        raise StoreError(f"{what}; add it")
    buffer = instance(buffers[place.buffer], np.ndarray, "give a flat numpy array", StoreError)
    if buffer.ndim != 1 or place.end > len(buffer):
        raise StoreError(
            f"local tensor {local!r} ends at element {place.end} of buffer {place.buffer!r}, "
            f"which has shape {buffer.shape}; give a flat buffer of {place.end} elements or more"
        )
    return buffer


def _view_buffer(place: Place, buffer: NDArray[Any]) -> NDArray[Any]:
    """The place as an array, a view of the buffer."""
    itemsize = buffer.itemsize  # numpy's strides are in bytes
    steps = tuple(step * itemsize for step in place.strides)
    start = buffer[place.offset :]
    return np.lib.stride_tricks.as_strided(start, place.shape, steps)


def check(store: Store, layouts: Held, rank: int) -> None:
    """Raise StoreError if two elements of the rank's local tensors lie at the same position in a buffer.

    Holes are left out. Takes 4 bytes per element that the buffers reach and, for one local tensor at a
    time, about 24 bytes per element.
    """
    instance(store, Store, "check takes a Store", StoreError)
    layout_of = dict(locals_of(layouts, rank))
    places = {local: store.place(local, layout, rank) for local, layout in layout_of.items()}
    ends: dict[str, int] = {}
    for place in places.values():
        ends[place.buffer] = max(ends.get(place.buffer, 0), place.end)
    # Each element of a buffer has the number of the local tensor that lies there, 0 for no tensor.
    owner_of = {buffer: np.zeros(end, np.int32) for buffer, end in ends.items()}
    names = list(places)
    for number, (local, place) in enumerate(places.items(), 1):
        owner = owner_of[place.buffer]
        elements = _list_elements(place, layout_of[local], rank)
        clash = _find_clash(owner, elements)
        if clash is not None:
            # Without an owner, the local tensor itself has the element twice.
            earlier = int(owner[clash])
            other = names[earlier - 1] if earlier else local
            raise StoreError(
                f"rank {rank}: {local!r} and {other!r} both lie at element {clash} "
                f"of {place.buffer!r}; give them views that share no element"
            )
        owner[elements] = number


def _find_clash(owner: NDArray[np.int32], elements: NDArray[np.int64]) -> int | None:
    """An element whose owner is not 0, or the first element if any is listed twice; None if all are free."""
    if len(np.unique(elements)) < len(elements):
        return int(elements[0])
    owned = owner[elements] > 0
    return int(elements[owned][0]) if owned.any() else None


def _list_elements(place: Place, layout: Layout, rank: int) -> NDArray[np.int64]:
    """The positions in the buffer of the local tensor's elements, row-major; holes are left out."""
    elements = np.array([place.offset])
    indices_by_dim = layout.indices(rank)
    for global_indices, step in zip(indices_by_dim, place.strides, strict=True):
        positions = np.flatnonzero(global_indices >= 0)  # a hole has -1
        offsets = positions * step
        elements = np.add.outer(elements, offsets).ravel()
    return elements


def flat_windows(
    name: str,
    shape: Sequence[int],
    ranges: Mapping[int, tuple[int, int]],
    *,
    dtype: object = "float32",
    buffer: str | None = None,
) -> tuple[tuple[Layout, ...], Store]:
    """Describe a tensor of which each rank r has the row-major elements start..stop-1, where `ranges[r]` = (start,
    stop), in a 1-d array named `buffer` (default: `name`). Return a layout per rectangular slice of a rank's elements,
    and a Store with the slices' offsets in these arrays.

    A range is (lo, hi) of the tensor's row-major elements. Windows are listed rank by rank and in order. They lie in a
    flat buffer per rank, called `buffer` (`name`, if not given), whose element 0 is the rank's element lo. Raises
    PlanError for a range outside the tensor, StoreError for a malformed range.
    """
    layouts: list[Layout] = []
    places: list[tuple[int, int]] = []  # the rank of each window, and its offset
    whole = Layout(shape, Mesh(), "...", dtype=dtype)
    sizes = whole.shape
    name = text(name, "the name of a tensor", StoreError)
    held = mapping(ranges, "ranges are ", "rank to (start, stop)", StoreError)
    for rank, span in held.items():
        lo, hi = _read_range(rank, span)
        offset = 0
        for box in flat_boxes(sizes, lo, hi):
            layout = _hold_box(sizes, rank, box, dtype)
            layouts.append(layout)
            places.append((rank, offset))
            offset += volume(box)
    home = name if buffer is None else buffer
    windows = Windows(layouts)
    names = windows.local_names(name)
    views = {}
    for local, (rank, offset) in zip(names, places, strict=True):
        views[local, rank] = View(home, offset)
    return windows, Store(views)


def _read_range(rank: object, span: object) -> tuple[int, ...]:
    """The start and stop of a rank's range. Raises StoreError for a malformed range."""
    as_integer(rank, "a rank of ranges", StoreError)
    ends = listed(span, f"the start and stop of rank {rank}", StoreError)
    if len(ends) != 2:
        raise StoreError(f"the range of rank {rank} is {shown(span)}; give (start, stop)")
    return tuple(as_integer(end, f"an end of the range of rank {rank}", StoreError) for end in ends)


def _hold_box(shape: tuple[int, ...], rank: int, box: Box, dtype: object) -> Layout:
    """The layout under which one rank holds exactly the box."""
    runs = [from_ranges([span]) for span in box]
    stored = dict(enumerate(runs))
    mesh = Mesh(ranks=[rank])
    return Layout(shape, mesh, (), dtype=dtype, stored=stored)
