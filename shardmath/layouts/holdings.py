"""Holdings: what ranks hold, in one form for all spellings.

1. Layouts are **equivalent** if every rank holds the same elements in the same order, and, with Partial axes,
   the same addend. An axis of size 1, and a Partial over one rank, make no difference.
2. What ranks hold is a product over dimensions: the distinct parts of each, and the part of each rank.
   Parts are numbered by the lowest rank that holds them, so that mesh order does not matter.
3. The parts of a digest (of a dimension, of positions, of ranks) are cached, since the tensors of a model
   share them.
4. Callers give a Layout, or a tuple of Layouts of one shape if a tensor is held in several pieces.
   `windows_of` and `read_windows` make `Windows` of either, and no later code asks which of the two it was.
5. A tensor held under one layout has one local tensor, with the tensor's name. Of several windows, the local
   tensor of window i is `name[i]`. If all ranks of a window leave, the other windows keep their names.

>>> from shardmath.layouts.algebra.mesh import Mesh
>>> one = Layout((8, 4), Mesh(dp=2, tp=2), "(dp tp n) h")
>>> equivalent(one, Layout((8, 4), Mesh(dp=4), "(dp n) h"))
True
>>> windows_of(one, "w", ValueError).local_names("w")
['w']
>>> left, right = (Layout((4,), Mesh(ranks=[r]), f"(n)=<{2 * r}:{2 * r + 2}>") for r in (0, 1))
>>> windows = windows_of((left, right), "w", ValueError)
>>> windows.local_names("w"), [name for name, _ in windows.locals("w", rank=1)]
(['w[0]', 'w[1]'], ['w[1]'])
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import TypeAlias

import numpy as np

from shardmath.base.arguments import instance
from shardmath.base.digest import digest
from shardmath.base.errors import LayoutError
from shardmath.base.memo import memo
from shardmath.base.text import shown
from shardmath.layouts.algebra.dimension import Dimension
from shardmath.layouts.algebra.mesh import Mesh
from shardmath.layouts.algebra.partition import partition
from shardmath.layouts.algebra.runs import Runs
from shardmath.layouts.layout import Layout

__all__ = [
    "LayoutOrWindows",
    "Windows",
    "count_stored",
    "equivalent",
    "holdings_digest",
    "label",
    "read_windows",
    "windows_of",
]

_Order: TypeAlias = tuple[int, ...] | None
"""An order of positions; None if they stay as they are."""


def equivalent(a: Layout, b: Layout) -> bool:
    """Return whether `a` and `b` have the same shape and dtype, and give every rank the same elements in the same
    order."""
    for layout in (a, b):
        instance(layout, Layout, "equivalent compares two layouts", LayoutError)
    return a is b or _canonicalize(a) == _canonicalize(b)


def holdings_digest(layout: Layout) -> tuple[str, str]:
    """Return two digests: the first depends on the tensor's shape, its dtype and what each rank holds, in ascending
    order of ranks, but not on the rank numbers. The second depends only on the rank numbers."""
    if layout._digest is None:
        order, ranks = _digest_ranks(layout.mesh)
        held = _digest_positions(layout.form, order)
        object.__setattr__(layout, "_digest", (held, ranks))
    return layout._digest  # type: ignore[return-value]


def _canonicalize(layout: Layout) -> tuple[object, ...]:
    """A value that equivalent layouts share: what each rank holds, by ascending rank, and the ranks."""
    form = layout.form
    order, ranks = _sort_ranks(layout.mesh)
    mesh = form.mesh
    dims = tuple(_number_parts(dim, mesh, order) for dim in form.dims)
    addends = _list_addends(form, order)
    return form.shape, form.dtype, dims, addends, ranks


def _sort_ranks(mesh: Mesh) -> tuple[_Order, tuple[int, ...]]:
    """The order of positions by ascending rank, None if they are ascending, and the sorted ranks."""
    ascending = tuple(sorted(mesh.ranks))
    if ascending == mesh.ranks:
        return None, ascending
    return tuple(np.argsort(mesh.ranks).tolist()), ascending


def _list_addends(form: Layout, order: _Order) -> tuple[object, ...]:
    """The reduction of the Partial axes and the addend of each position; () if there is one addend."""
    if not form.partial:
        return ()
    names = [name for name, _ in form.partial]
    addend = form.mesh.coordinate(names)
    if not addend.any():
        return ()
    if order is not None:
        addend = addend[list(order)]
    return (form.op, *addend.tolist())


_Numbered: TypeAlias = tuple[tuple[Runs, ...], tuple[int, ...]]
"""Parts, and the number of the part at each position."""


@memo()
def _number_parts(dim: Dimension, mesh: Mesh, order: _Order) -> _Numbered:
    """The parts, numbered by the first position that holds them, and the number of each position's part.

    Positions are taken in this `order`, or in the mesh's. A single part has no numbers, so that an undivided dimension
    is equal on all meshes.
    """
    divided = partition(dim)
    if len(divided.parts) == 1:
        return divided.parts, ()
    part_by_position = divided.by_rank(mesh)
    if order is not None:
        part_by_position = part_by_position[list(order)]
    old_numbers = part_by_position.tolist()
    # A dict keeps the order in which its keys first came.
    new_number = {old: new for new, old in enumerate(dict.fromkeys(old_numbers))}
    parts = tuple(divided.parts[old] for old in new_number)
    return parts, tuple(map(new_number.__getitem__, old_numbers))


@memo()
def _digest_dimension(dim: Dimension, mesh: Mesh, order: _Order) -> str:
    return digest(_number_parts(dim, mesh, order))


@memo()
def _digest_positions(form: Layout, order: _Order) -> str:
    """A digest of what the positions hold, in this order."""
    mesh = form.mesh
    dims = tuple(_digest_dimension(dim, mesh, order) for dim in form.dims)
    addends = _list_addends(form, order)
    return digest((form.shape, form.dtype, mesh.size, dims, addends))


@memo()
def _digest_ranks(mesh: Mesh) -> tuple[_Order, str]:
    """The order of positions by ascending rank, None if they are ascending, and a digest of the ranks."""
    order, ascending = _sort_ranks(mesh)
    return order, digest(ascending)


# How a side holds one tensor


LayoutOrWindows: TypeAlias = Layout | tuple[Layout, ...]
"""How callers give what a side holds of a tensor: a layout, or several windows of one shape."""


class Windows(tuple[Layout, ...]):
    """A tuple of one tensor's layouts on one side of a plan (source or destination): a single one, or several (windows)
    that each hold a part of the tensor.

    `numbers` are the numbers in their names after other windows have left; None: their positions.
    """

    numbers: tuple[int, ...] | None = None

    @property
    def is_single(self) -> bool:
        """Whether this tuple has one layout and is not a selection from several, so that the local tensor has the
        tensor's name. Otherwise, local tensors are called "name[i]", where i is the layout's index before any
        selection."""
        return len(self) == 1 and self.numbers is None

    def local_name(self, name: str, window: int) -> str:
        """Return the name of the local tensor under the layout at index `window`: `name` if `is_single`, else
        `name[i]`. The number i is `window`; if this tuple is a selection from a larger one, i is the layout's index
        there."""
        if self.is_single:
            return name
        number = window if self.numbers is None else self.numbers[window]
        return f"{name}[{number}]"

    def local_names(self, name: str) -> list[str]:
        """List the names of the local tensors, one per layout, in order: `name` if `is_single`, else `name[i]`. The
        number i is the layout's index; if this tuple is a selection from a larger one, i is the index there."""
        return [self.local_name(name, window) for window in range(len(self))]

    def locals(self, name: str, rank: int | None = None) -> Iterator[tuple[str, Layout]]:
        """Yield (local tensor's name, layout) for each layout of the tensor `name`, or only for those on `rank`."""
        for local, layout in zip(self.local_names(name), self, strict=True):
            if rank is None or rank in layout.mesh:
                yield local, layout

    def named_alike(self, layouts: Iterable[Layout]) -> Windows:
        """Return Windows with `layouts` in place of the present ones; the names of local tensors stay the same."""
        others = Windows(layouts)
        others.numbers = self.numbers
        return others

    def keep(self, layouts: Mapping[int, Layout]) -> Windows:
        """Return Windows of only the layouts whose index is a key of `layouts` (ascending), each replaced by its value;
        local tensors keep their names.

        >>> from shardmath.layouts.algebra.mesh import Mesh
        >>> both = Windows(Layout((4,), Mesh(ranks=[rank]), "n") for rank in (0, 1))
        >>> both.keep({1: both[1]}).local_names("w")
        ['w[1]']
        """
        kept = Windows(layouts.values())
        if len(kept) == len(self):
            kept.numbers = self.numbers
        else:
            numbers = self.numbers or range(len(self))
            kept.numbers = tuple(numbers[position] for position in layouts)
        return kept


def count_stored(side: Mapping[str, Windows]) -> dict[int, int]:
    """Return a dict from rank to the number of bytes in all its local tensors of `side` (the source or destination of a
    plan), including padding (holes).

    >>> count_stored({"w": Windows([Layout((5, 2), Mesh(tp=2), "(tp n) h")])})
    {0: 24, 1: 16}
    """
    # Tensors share layouts, so each is looked at once.
    layouts = Counter(layout for windows in side.values() for layout in windows)
    nbytes: dict[int, int] = {}
    for layout, times in layouts.items():
        for rank in layout.mesh.ranks:
            cells = math.prod(layout.local_shape(rank))
            nbytes[rank] = nbytes.get(rank, 0) + times * cells * layout.itemsize
    return nbytes


def label(name: str) -> str:
    """Return the text that names a tensor in error messages: "tensor 'w'", or "the tensor" without a name."""
    return f"tensor {name!r}" if name else "the tensor"


def windows_of(held: object, name: str, error: type[ValueError]) -> Windows:
    """Return `held`, a Layout or a tuple of one or more, as Windows. Raises `error`, which names the tensor `name`, for
    any other value."""
    windows = held if isinstance(held, tuple) else (held,)
    if not windows or not all(isinstance(layout, Layout) for layout in windows):
        raise error(f"{label(name)} is {shown(held)}; give a Layout or a tuple of Layouts")
    return windows if type(windows) is Windows else Windows(windows)


def read_windows(
    side: Mapping[str, object], error: type[ValueError], names: Iterable[str] | None = None
) -> dict[str, Windows]:
    """Return a dict from each name in `names` (default: all of `side`), in this order, to the tensor's layouts
    (Windows). Raises `error` if a value in `side` is not a Layout or a tuple of Layouts."""
    order = list(side if names is None else names)
    held = list(map(side.__getitem__, order))
    try:
        distinct = dict.fromkeys(held)
    except TypeError:
        distinct = {}  # some value is not a layout, nor a tuple of them
    # Tens of thousands of tensors go through here: the few layouts are read once each, and the rest is map.
    if set(map(type, distinct)) == {Layout}:
        single = {layout: windows_of(layout, "", error) for layout in distinct}
        # A copy of a dict of these names has room for all of them, and their hashes.
        out = dict(names) if isinstance(names, dict) else {}
        out.update(zip(order, map(single.__getitem__, held), strict=True))
        return out
    # Tuples are read by their ids, since equal ones may have other names for their windows.
    windows_by_id: dict[int, Windows] = {}
    windows = []
    for name, value in zip(order, held, strict=True):
        known = windows_by_id.get(id(value))
        if known is None:
            known = windows_by_id[id(value)] = windows_of(value, name, error)
        windows.append(known)
    return dict(zip(order, windows, strict=True))
