"""Parameter layouts: where parameters lie in flat buffers, as values.

1. A buffer is one flat array; parameters lie in it without overlap, each inside one bucket; buckets follow one another
   without a gap, and elements of no parameter are padding.
2. A bucket is divided evenly among the data-parallel ranks: rank r of n has its r-th n-th, whatever lies there.
3. Fields have the meanings of Megatron-Core's `core.optimizer.param_layout` (d98e8a64), but are by name instead of
   by `torch.nn.Parameter`, and immutable. `param_index_map` iterates in the order in which the rule placed parameters,
   most often the reverse of the forward order; `param_indices` is in forward order.

>>> PerBufferParamLayout({"b": (0, 103, 0), "a": (128, 225, 0)}, [(0, 256)], [225]).padding
56
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeAlias, cast

import numpy as np

from shardmath.base.arguments import as_integer, listed
from shardmath.base.arrays import Ints
from shardmath.base.errors import ParamLayoutError
from shardmath.base.text import plural, shown
from shardmath.buffers.param import read_name, read_positive

__all__ = ["PerBufferParamLayout", "Placed", "Rule", "check_even"]

MOST = 1 << 62
"""The last position in a buffer: positions are integers of 64 bits."""

Placed: TypeAlias = tuple[int, int, int]
"""Start and end in the buffer, and the number of the bucket."""


@dataclass(frozen=True, slots=True, init=False, repr=False)
class PerBufferParamLayout:
    """The layout of one flat buffer: the start, end and bucket of each parameter.

    `placed` has (name, (start, end, bucket)) of each parameter; `param_index_map` is the same as a mapping.
    `per_bucket_numel_unpadded` counts elements that the rule does not call padding; gaps between parameters may be
    among them, as in Megatron. `param_indices` numbers each parameter among the parameters of its logical dtype, in
    forward order. `num_optimizer_shards` is set if no parameter crosses a border between that many shards of a bucket.
    `shapes` has a shape per entry of `placed`, or is empty if they are unknown. `data_parallel_world_size` is the
    number of ranks that may share the buffer, None for any.

    Raises ParamLayoutError if parameters overlap, leave their bucket, or the numbers contradict each other.
    """

    placed: tuple[tuple[str, Placed], ...]
    bucket_indices: tuple[tuple[int, int], ...]
    per_bucket_numel_unpadded: tuple[int, ...]
    param_indices: tuple[int, ...]
    num_optimizer_shards: int | None
    shapes: tuple[tuple[int, ...], ...]
    data_parallel_world_size: int | None
    _map: Mapping[str, Placed]

    def __init__(
        self,
        param_index_map: Mapping[str, Placed] | Iterable[tuple[str, Placed]] = (),
        bucket_indices: Iterable[tuple[int, int]] = (),
        per_bucket_numel_unpadded: Iterable[int] = (),
        param_indices: Iterable[int] = (),
        num_optimizer_shards: int | None = None,
        *,
        shapes: Iterable[tuple[int, ...]] = (),
        data_parallel_world_size: int | None = None,
    ) -> None:
        entries = param_index_map
        if isinstance(entries, Mapping):
            entries = entries.items()
        placed = _read_placed(entries)
        borders = listed(bucket_indices, "bucket_indices", ParamLayoutError)
        fields = (
            placed,
            tuple(map(_read_border, borders)),
            _read_integers(per_bucket_numel_unpadded, "an unpadded size"),
            _read_integers(param_indices, "a number of param_indices"),
            _read_size(num_optimizer_shards, "num_optimizer_shards"),
            _read_shapes(shapes),
            _read_size(data_parallel_world_size, "data_parallel_world_size"),
            MappingProxyType(dict(placed)),
        )
        for name, value in zip(self.__slots__, fields, strict=True):
            object.__setattr__(self, name, value)
        _check(self)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PerBufferParamLayout) and self._fields() == other._fields()

    def __hash__(self) -> int:
        return hash(self._fields())

    def __reduce__(self) -> tuple[object, ...]:
        return _restore, self._fields()

    def __repr__(self) -> str:
        _, *positional, shapes, size = self._fields()
        words = [repr(dict(self.placed)), *map(repr, positional)]
        words += [f"shapes={shapes!r}", f"data_parallel_world_size={size!r}"]
        return f"PerBufferParamLayout({', '.join(words)})"

    def __str__(self) -> str:
        what = f"{plural(self.placed, 'parameter')} in {plural(self.bucket_indices, 'bucket')}"
        share = f"{100 * self.padding_share:.2f} %"
        return f"{what}, {plural(self.numel, 'element')}, {self.padding} of them padding ({share})"

    def _fields(self) -> tuple[object, ...]:
        """All fields of the value, in the order of the arguments of its constructor."""
        return (
            self.placed,
            self.bucket_indices,
            self.per_bucket_numel_unpadded,
            self.param_indices,
            self.num_optimizer_shards,
            self.shapes,
            self.data_parallel_world_size,
        )

    @property
    def param_index_map(self) -> Mapping[str, Placed]:
        """A read-only mapping from each parameter's name to its (start, end, bucket), in the order of placement."""
        return self._map

    @property
    def numel(self) -> int:
        """The number of elements in the buffer, padding included."""
        return self.bucket_indices[-1][1] if self.bucket_indices else 0

    @property
    def padding(self) -> int:
        """The number of elements of the buffer that belong to no parameter."""
        sizes = [end - start for _, (start, end, _) in self.placed]
        return self.numel - sum(sizes)

    @property
    def padding_share(self) -> float:
        """The fraction of the buffer's elements that is padding, 0 to 1."""
        return self.padding / self.numel if self.numel else 0.0

    def with_indices(self, param_indices: Iterable[int]) -> PerBufferParamLayout:
        """Return a copy of the layout with other `param_indices`: one index per parameter of the buffer, in forward
        order. The indices number, from 0, all of a model's parameters of one dtype, even if these lie in several
        buffers."""
        numbers = _read_integers(param_indices, "a number of param_indices")
        copy = object.__new__(PerBufferParamLayout)
        for name in self.__slots__:
            object.__setattr__(copy, name, getattr(self, name))
        object.__setattr__(copy, "param_indices", numbers)
        _check_counts(copy)
        return copy


Rule: TypeAlias = Callable[..., PerBufferParamLayout]
"""The type of rules, such as `zero`: functions that take Params in forward order and options by keyword, and return the
PerBufferParamLayout of one flat buffer."""


def _is_plain(values: Iterable[object]) -> bool:
    """Whether all values are Python's integers. Types are compared all at once, since a model has many."""
    return set(map(type, values)) <= {int}


def _read_integers(values: Iterable[object], what: str) -> tuple[int, ...]:
    """The values as ints. Raises ParamLayoutError, which says `what` each is, for other values or beyond `MOST`."""
    items = listed(values, what, ParamLayoutError)
    if not _is_plain(items):
        items = tuple(as_integer(value, what, ParamLayoutError) for value in items)
    numbers = cast(tuple[int, ...], items)
    if numbers and not -MOST <= min(numbers) <= max(numbers) <= MOST:
        worst = max(numbers, key=abs)
        raise ParamLayoutError(f"{what} is {worst}; give a buffer of at most 2^62 elements")
    return numbers


def _read_size(value: object, what: str) -> int | None:
    """None, or the value as an int of at least 1."""
    return None if value is None else read_positive(value, what)


def _read_placed(entries: object) -> tuple[tuple[str, Placed], ...]:
    """Each parameter's name and place. Raises ParamLayoutError for a malformed entry."""
    placed = []
    for entry in listed(entries, "entries of param_index_map", ParamLayoutError):
        if type(entry) is not tuple or len(entry) != 2:
            what = f"entry {shown(entry)} of param_index_map is not (name, (start, end, bucket))"
            raise ParamLayoutError(f"{what}; pass a mapping from names to (start, end, bucket)")
        name, place = entry
        placed.append((read_name(name), _read_place(name, place)))
    return tuple(placed)


def _read_place(name: object, place: object) -> Placed:
    """The place of the parameter as three ints. Raises ParamLayoutError."""
    numbers = listed(place, f"start, end and bucket of parameter {name!r}", ParamLayoutError)
    place_numbers = _read_integers(numbers, f"the place of parameter {name!r}")
    if len(place_numbers) != 3:
        raise ParamLayoutError(
            f"parameter {name!r} lies at {place_numbers}; give its start, its end and its bucket"
        )
    return place_numbers


def _read_border(pair: object) -> tuple[int, int]:
    """The start and the end of a bucket as two ints. Raises ParamLayoutError."""
    numbers = listed(pair, "start and end of a bucket", ParamLayoutError)
    border = _read_integers(numbers, "a border of a bucket")
    if len(border) != 2:
        raise ParamLayoutError(f"a bucket is {border}; give its start and its end")
    return border


def _read_shapes(shapes: object) -> tuple[tuple[int, ...], ...]:
    """The shapes, all sizes as ints. Raises ParamLayoutError."""
    entries = listed(shapes, "shapes", ParamLayoutError)
    items = tuple(listed(shape, "sizes of a shape", ParamLayoutError) for shape in entries)
    # All sizes of all shapes are checked at once, which is fast if they are plain.
    flat = tuple(itertools.chain.from_iterable(items))
    sizes = _read_integers(flat, "a size in shapes")
    if _is_plain(flat):
        return items
    remaining = iter(sizes)
    return tuple(tuple(itertools.islice(remaining, len(shape))) for shape in items)


def _restore(*fields: object) -> PerBufferParamLayout:
    """The layout that was pickled as these fields, as `_fields` lists them."""
    *positional, shapes, size = fields
    return PerBufferParamLayout(*positional, shapes=shapes, data_parallel_world_size=size)  # type: ignore[arg-type]


def _check(layout: PerBufferParamLayout) -> None:
    """Raise ParamLayoutError if parameters, buckets and numbers contradict each other."""
    names = Counter(name for name, _ in layout.placed)
    if len(names) != len(layout.placed):
        ((twice, _),) = names.most_common(1)
        raise ParamLayoutError(f"parameter {twice!r} is given twice; give each parameter once")
    _check_buckets(layout)
    _check_placed(layout)
    _check_counts(layout)
    _check_shares(layout)


def _check_buckets(layout: PerBufferParamLayout) -> None:
    """Raise ParamLayoutError unless buckets follow one another and hold their unpadded elements."""
    buckets = layout.bucket_indices
    unpadded = layout.per_bucket_numel_unpadded
    if len(unpadded) != len(buckets):
        raise ParamLayoutError(
            f"per_bucket_numel_unpadded has {plural(unpadded, 'size')}, and bucket_indices has "
            f"{plural(buckets, 'bucket')}; give one size per bucket"
        )
    before = 0
    for number, (start, end) in enumerate(buckets):
        if start != before or end < start:
            what = f"bucket {number} is [{start}, {end}), the one before ends at {before}"
            raise ParamLayoutError(f"{what}; begin it at {before}, and end it there or later")
        filled = unpadded[number]
        if not 0 <= filled <= end - start:
            what = f"bucket {number} has {end - start} elements, {filled} of them unpadded"
            raise ParamLayoutError(f"{what}; give an unpadded size from 0 to {end - start}")
        before = end


def _check_placed(layout: PerBufferParamLayout) -> None:
    """Raise ParamLayoutError unless parameters fit their buckets and shapes, and do not overlap."""
    if not layout.placed:
        return
    places = np.array([place for _, place in layout.placed], np.int64)
    _check_inside(layout, places)
    _check_filled(layout, places)
    _check_disjoint(layout, places)
    # Without shapes there is nothing to compare.
    for (name, (start, end, _)), shape in zip(layout.placed, layout.shapes, strict=False):
        if math.prod(shape) != end - start:
            what = f"parameter {name!r} of shape {shape} lies at [{start}, {end})"
            fix = f"give it {math.prod(shape)} elements there, or another shape"
            raise ParamLayoutError(f"{what}, which has {end - start} elements; {fix}")


def _check_inside(layout: PerBufferParamLayout, places: Ints) -> None:
    """Raise ParamLayoutError unless each parameter lies in its bucket."""
    start, end, number = places.T
    count = len(layout.bucket_indices)
    is_known = (number >= 0) & (number < count)
    # One more bucket, in which nothing fits, stands for buckets that do not exist.
    buckets = np.array([*layout.bucket_indices, (0, -1)], np.int64)
    bucket = np.where(is_known, number, count)
    first, stop = buckets[bucket].T
    is_outside = (start < first) | (end < start) | (stop < end)
    if not is_outside.any():
        return
    outside = int(is_outside.argmax())
    name, (begin, finish, named) = layout.placed[outside]
    extent = "not a bucket of the buffer"
    if 0 <= named < count:
        low, high = layout.bucket_indices[named]
        extent = f"[{low}, {high})"
    what = f"parameter {name!r} lies at [{begin}, {finish}) of the buffer, in bucket {named}"
    raise ParamLayoutError(f"{what}, which is {extent}; place it inside a bucket")


def _check_filled(layout: PerBufferParamLayout, places: Ints) -> None:
    """Raise ParamLayoutError if the parameters of a bucket have more elements than it counts as unpadded."""
    start, end, number = places.T
    unpadded = layout.per_bucket_numel_unpadded
    filled = np.zeros(len(unpadded), np.int64)
    np.add.at(filled, number, end - start)
    too_small = np.flatnonzero(filled > np.array(unpadded))
    if len(too_small):
        bucket = int(too_small[0])
        what = f"bucket {bucket} has parameters of {filled[bucket]} elements"
        what = f"{what}, and per_bucket_numel_unpadded has {unpadded[bucket]} for it"
        raise ParamLayoutError(f"{what}; give at least {filled[bucket]}")


def _check_disjoint(layout: PerBufferParamLayout, places: Ints) -> None:
    """Raise ParamLayoutError if an element belongs to two parameters; empty parameters lie anywhere."""
    start, end, _ = places.T
    filled = np.flatnonzero(end > start)
    order = filled[np.argsort(start[filled], kind="stable")]
    clashes = np.flatnonzero(start[order[1:]] < end[order[:-1]])
    if not len(clashes):
        return
    first = int(clashes[0])
    texts = []
    for number in order[first : first + 2].tolist():
        name, place = layout.placed[number]
        texts.append(f"{name!r} at {place[:2]}")
    what = f"parameters {' and '.join(texts)} overlap"
    raise ParamLayoutError(f"{what}; give each parameter its own elements")


def _check_counts(layout: PerBufferParamLayout) -> None:
    """Raise ParamLayoutError unless indices and shapes are one per parameter, or not given."""
    optional: dict[str, Sequence[object]] = {}
    optional["param_indices"] = layout.param_indices
    optional["shapes"] = layout.shapes
    for what, values in optional.items():
        if values and len(values) != len(layout.placed):
            raise ParamLayoutError(
                f"{what} has {len(values)} entries for {len(layout.placed)} parameters; "
                f"give one per parameter, or none"
            )
    least = min(layout.param_indices, default=0)
    if least < 0:
        raise ParamLayoutError(f"param_indices has {least}; give numbers of 0 or more")


def _check_shares(layout: PerBufferParamLayout) -> None:
    """Raise ParamLayoutError unless ranks get equal shares, and no parameter has elements of two optimizer shards."""
    ranks = layout.data_parallel_world_size
    shards = layout.num_optimizer_shards
    if ranks and shards and ranks != shards:
        what = f"{plural(shards, 'optimizer shard')} for {plural(ranks, 'rank')}"
        raise ParamLayoutError(f"{what}; make num_optimizer_shards equal data_parallel_world_size")
    check_even(layout.bucket_indices, ranks or shards or 1, "pad its end")
    if shards:
        _check_borders(layout, shards)


def check_even(buckets: Iterable[tuple[int, int]], ranks: int, fix: str) -> None:
    """Raise ParamLayoutError unless `ranks` divides the size of each bucket (start, end). The error message ends with
    `fix`, advice to the user such as "pad its end"."""
    for number, (start, end) in enumerate(buckets):
        if (end - start) % ranks:
            what = f"bucket {number} has {end - start} elements"
            raise ParamLayoutError(f"{what}, which {ranks} ranks do not divide evenly; {fix}")


def _check_borders(layout: PerBufferParamLayout, shards: int) -> None:
    """Raise ParamLayoutError if a parameter lies across a border between optimizer shards."""
    for name, (start, end, number) in layout.placed:
        if end == start:
            continue
        first, stop = layout.bucket_indices[number]
        share = (stop - first) // shards
        if (start - first) // share != (end - 1 - first) // share:
            what = f"parameter {name!r} at [{start}, {end}) has elements of two of {shards}"
            fix = "place it in one, or leave out num_optimizer_shards"
            raise ParamLayoutError(f"{what} optimizer shards; {fix}")
