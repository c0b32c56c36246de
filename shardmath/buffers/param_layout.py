"""Parameter layouts: where parameters lie in flat buffers, as values.

1. A buffer is one flat array; parameters lie in it without overlap, each inside one bucket; buckets follow one another
   without a gap, and what no parameter has is padding.
2. A bucket is divided evenly among the data-parallel ranks: rank r of n has its r-th n-th, whatever lies there.
3. Fields and their meanings are those of Megatron-Core's `core.optimizer.param_layout` (d98e8a64), by name instead of
   by `torch.nn.Parameter`, and immutable. `param_index_map` iterates in the order in which the rule placed parameters,
   most often the reverse of the forward order; `param_indices` is in forward order.

>>> PerBufferParamLayout({"b": (0, 103, 0), "a": (128, 225, 0)}, [(0, 256)], [225]).padding
56
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from shardmath.base import dtypes
from shardmath.base.errors import ParamLayoutError
from shardmath.base.given import listed, mapping, plural, shown
from shardmath.base.integers import as_integer
from shardmath.buffers.param import Param, flag, named, numbered, positive

__all__ = ["BufferKey", "FullParamLayout", "PerBufferParamLayout", "Placed", "Rule", "laid_out"]


@dataclass(frozen=True, slots=True)
class BufferKey:
    """Which parameters share a buffer: those that agree in all of this."""

    param_dtype: str
    grad_dtype: str
    is_expert_parallel: bool
    is_managed_by_layer_wise_optimizer: bool = False

    def __post_init__(self) -> None:
        for name in ("param_dtype", "grad_dtype"):
            object.__setattr__(self, name, dtypes.canonical(getattr(self, name)))
        for name in ("is_expert_parallel", "is_managed_by_layer_wise_optimizer"):
            object.__setattr__(self, name, flag(getattr(self, name), name))


Placed: TypeAlias = tuple[int, int, int]
"""Start and end in the buffer, and the number of the bucket."""


@dataclass(frozen=True, slots=True, init=False, repr=False)
class PerBufferParamLayout:
    """Where the parameters of one buffer lie.

    `placed` has (name, (start, end, bucket)) of each; `param_index_map` is the same as a mapping.
    `per_bucket_numel_unpadded` counts what the rule does not call padding; gaps between parameters may be in it, as in
    Megatron. `param_indices` is the number of each parameter among those of its logical dtype, in forward order.
    `num_optimizer_shards` is set where no parameter crosses a border between that many shards of a bucket. `shapes` are
    those of `placed`, or empty if unknown. `data_parallel_world_size` is the number of ranks that it was laid out for,
    if for any; no other number may share it.

    Raises ParamLayoutError where parameters overlap, leave their bucket, or the numbers contradict each other.
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
        given = param_index_map.items() if isinstance(param_index_map, Mapping) else param_index_map
        pairs = map(_pair, listed(given, "entries of param_index_map", ParamLayoutError))
        placed = tuple((named(name), _place(name, at)) for name, at in pairs)
        fields = (
            placed,
            tuple(map(_border, listed(bucket_indices, "bucket_indices", ParamLayoutError))),
            _integers(per_bucket_numel_unpadded, "an unpadded size"),
            _integers(param_indices, "a number of param_indices"),
            _size(num_optimizer_shards, "num_optimizer_shards"),
            _shapes(shapes),
            _size(data_parallel_world_size, "data_parallel_world_size"),
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
        return _restored, self._fields()

    def __repr__(self) -> str:
        *given, shapes, size = self._fields()
        shown = ", ".join(map(repr, (dict(self.placed), *given[1:])))
        return (
            f"PerBufferParamLayout({shown}, shapes={shapes!r}, data_parallel_world_size={size!r})"
        )

    def __str__(self) -> str:
        what = f"{plural(self.placed, 'parameter')} in {plural(self.bucket_indices, 'bucket')}"
        share = f"{100 * self.padding_share:.2f} %"
        return f"{what}, {plural(self.numel, 'element')}, {self.padding} of them padding ({share})"

    def _fields(self) -> tuple[object, ...]:
        counts = self.per_bucket_numel_unpadded, self.param_indices, self.num_optimizer_shards
        return self.placed, self.bucket_indices, *counts, self.shapes, self.data_parallel_world_size

    @property
    def param_index_map(self) -> Mapping[str, Placed]:
        """Name -> (start, end, bucket), read-only, in the order in which the rule placed them."""
        return self._map

    @property
    def numel(self) -> int:
        """Elements of the buffer, padding included."""
        return self.bucket_indices[-1][1] if self.bucket_indices else 0

    @property
    def padding(self) -> int:
        """Elements of the buffer that are no parameter's."""
        return self.numel - sum(end - start for _, (start, end, _) in self.placed)

    @property
    def padding_share(self) -> float:
        """The share of the buffer that is no parameter's."""
        return self.padding / self.numel if self.numel else 0.0

    def with_indices(self, param_indices: Iterable[int]) -> PerBufferParamLayout:
        """The same layout with other `param_indices`."""
        out = object.__new__(PerBufferParamLayout)
        for name in self.__slots__:
            object.__setattr__(out, name, getattr(self, name))
        object.__setattr__(
            out, "param_indices", _integers(param_indices, "a number of param_indices")
        )
        _check_counts(out)
        return out


MOST = 1 << 62
"""The last position in a buffer: positions are integers of 64 bits."""


def _integers(values: Iterable[object], what: str) -> tuple[int, ...]:
    """The values as ints. Raises ParamLayoutError, which says `what` each is, for what is none, or beyond `MOST`."""
    given = listed(values, what, ParamLayoutError)
    if not set(map(type, given)) <= {int}:
        given = tuple(as_integer(value, what, ParamLayoutError) for value in given)
    out = cast(tuple[int, ...], given)
    if out and not -MOST <= min(out) <= max(out) <= MOST:
        raise ParamLayoutError(f"{what} is {max(out, key=abs)}; a buffer has at most 2^62 elements")
    return out


def _size(value: object, what: str) -> int | None:
    return None if value is None else positive(value, what)


def _pair(entry: object) -> tuple[object, Iterable[object]]:
    if type(entry) is tuple and len(entry) == 2:
        return entry
    raise ParamLayoutError(
        f"entry {shown(entry)} of param_index_map is not one; give name -> (start, end, bucket)"
    )


def _place(name: object, at: Iterable[object]) -> Placed:
    numbers = listed(at, f"start, end and bucket of parameter {name!r}", ParamLayoutError)
    out = _integers(numbers, f"the place of parameter {name!r}")
    if len(out) != 3:
        raise ParamLayoutError(
            f"parameter {name!r} lies at {out}; give its start, its end and its bucket"
        )
    return out


def _border(pair: Iterable[object]) -> tuple[int, int]:
    out = _integers(
        listed(pair, "start and end of a bucket", ParamLayoutError), "a border of a bucket"
    )
    if len(out) != 2:
        raise ParamLayoutError(f"a bucket is {out}; give its start and its end")
    return out


def _shapes(shapes: object) -> tuple[tuple[int, ...], ...]:
    """The shapes, all sizes in integers; of a model's they are looked at all at once."""
    every = listed(shapes, "shapes", ParamLayoutError)
    given = tuple(listed(one, "sizes of a shape", ParamLayoutError) for one in every)
    sizes = _integers(itertools.chain.from_iterable(given), "a size in shapes")
    rest = iter(sizes)
    plain = set(map(type, itertools.chain.from_iterable(given))) <= {int}
    return given if plain else tuple(tuple(itertools.islice(rest, len(one))) for one in given)


def _restored(*fields: object) -> PerBufferParamLayout:
    *given, shapes, size = fields
    return PerBufferParamLayout(*given, shapes=shapes, data_parallel_world_size=size)  # type: ignore[arg-type]


def _check(layout: PerBufferParamLayout) -> None:
    names = Counter(name for name, _ in layout.placed)
    if len(names) != len(layout.placed):
        ((twice, _),) = names.most_common(1)
        raise ParamLayoutError(
            f"parameter {twice!r} is given twice; a parameter lies in a buffer once"
        )
    _check_buckets(layout)
    _check_placed(layout)
    _check_counts(layout)
    _check_shares(layout)


def _check_counts(layout: PerBufferParamLayout) -> None:
    for what, given in (("param_indices", layout.param_indices), ("shapes", layout.shapes)):
        if given and len(given) != len(layout.placed):
            raise ParamLayoutError(
                f"{len(given)} {what} of {len(layout.placed)} parameters; give one each, or none"
            )
    if min(layout.param_indices, default=0) < 0:
        raise ParamLayoutError(f"param_indices has {min(layout.param_indices)}; numbers are >= 0")


def _check_shares(layout: PerBufferParamLayout) -> None:
    """Ranks get equal shares, and no parameter has elements of two optimizer shards."""
    ranks, shards = layout.data_parallel_world_size, layout.num_optimizer_shards
    if None not in (ranks, shards) and ranks != shards:
        raise ParamLayoutError(
            f"{plural(shards or 0, 'optimizer shard')} for {plural(ranks or 0, 'rank')}; a rank has one shard"
        )
    size = ranks or shards or 1
    for number, (start, end) in enumerate(layout.bucket_indices):
        if (end - start) % size:
            what = f"bucket {number} has {end - start} elements, which {size} ranks do not divide evenly"
            raise ParamLayoutError(f"{what}; pad its end")
    for name, (start, end, number) in layout.placed if shards else ():
        first, stop = layout.bucket_indices[number]
        share = (stop - first) // size
        if end > start and (start - first) // share != (end - 1 - first) // share:
            what = f"parameter {name!r} at [{start}, {end}) has elements of two of {size} optimizer shards"
            raise ParamLayoutError(f"{what}; place it in one, or leave out num_optimizer_shards")


def _check_buckets(layout: PerBufferParamLayout) -> None:
    buckets, unpadded = layout.bucket_indices, layout.per_bucket_numel_unpadded
    if len(unpadded) != len(buckets):
        raise ParamLayoutError(
            f"{plural(unpadded, 'unpadded size')} of {plural(buckets, 'bucket')}; give one each"
        )
    before = 0
    for number, ((start, end), filled) in enumerate(zip(buckets, unpadded, strict=True)):
        if start != before or end < start:
            what = f"bucket {number} is [{start}, {end}), the one before ends at {before}"
            raise ParamLayoutError(f"{what}; buckets follow one another from 0 on")
        if not 0 <= filled <= end - start:
            what = f"bucket {number} has {end - start} elements, {filled} of them unpadded"
            raise ParamLayoutError(f"{what}; a bucket holds what is unpadded, and padding after it")
        before = end


def _check_placed(layout: PerBufferParamLayout) -> None:
    if not layout.placed:
        return
    at = np.array([place for _, place in layout.placed], np.int64)
    buckets = np.array(layout.bucket_indices, np.int64).reshape(-1, 2)
    known = (at[:, 2] >= 0) & (at[:, 2] < len(buckets))
    inside = known.copy()
    inside[known] &= (at[known, 0] >= buckets[at[known, 2], 0]) & (
        at[known, 1] <= buckets[at[known, 2], 1]
    )
    inside &= at[:, 0] <= at[:, 1]
    if not inside.all():
        name, (start, end, number) = layout.placed[int(np.flatnonzero(~inside)[0])]
        has = (
            f"[{buckets[number, 0]}, {buckets[number, 1]})"
            if 0 <= number < len(buckets)
            else "none such"
        )
        raise ParamLayoutError(
            f"parameter {name!r} lies at [{start}, {end}) of bucket {number}, which is {has}"
        )
    filled = np.zeros(len(buckets), np.int64)
    np.add.at(filled, at[:, 2], at[:, 1] - at[:, 0])
    short = np.flatnonzero(filled > np.array(layout.per_bucket_numel_unpadded))
    if len(short):
        number = int(short[0])
        what = f"bucket {number} has parameters of {filled[number]} elements"
        raise ParamLayoutError(
            f"{what}, and {layout.per_bucket_numel_unpadded[number]} unpadded; count them all"
        )
    _check_disjoint(layout, at)
    for (name, (start, end, _)), shape in zip(layout.placed, layout.shapes, strict=False):
        if math.prod(shape) != end - start:
            raise ParamLayoutError(
                f"parameter {name!r} of shape {shape} lies at [{start}, {end}); make the sizes agree"
            )


def _check_disjoint(layout: PerBufferParamLayout, at: NDArray[np.int64]) -> None:
    own = np.flatnonzero(at[:, 1] > at[:, 0])
    order = own[np.argsort(at[own, 0], kind="stable")]
    clash = np.flatnonzero(at[order[1:], 0] < at[order[:-1], 1])
    if len(clash):
        i, j = (layout.placed[int(order[int(clash[0]) + k])] for k in (0, 1))
        what = f"parameters {i[0]!r} at {i[1][:2]} and {j[0]!r} at {j[1][:2]}"
        raise ParamLayoutError(f"{what} overlap; an element of a buffer is one parameter's")


Rule: TypeAlias = Callable[..., PerBufferParamLayout]
"""Parameters in forward order, and options by keyword, to the layout of one buffer."""


@dataclass(frozen=True, slots=True, init=False, repr=False)
class FullParamLayout(Mapping[BufferKey, PerBufferParamLayout]):
    """The buffers of a model: BufferKey -> PerBufferParamLayout, in order of the first parameter of each."""

    entries: tuple[tuple[BufferKey, PerBufferParamLayout], ...]

    def __init__(self, layouts: Mapping[BufferKey, PerBufferParamLayout]) -> None:
        known = mapping(
            layouts, "layouts are ", "BufferKey to PerBufferParamLayout", ParamLayoutError
        )
        for key, layout in known.items():
            if not isinstance(key, BufferKey) or not isinstance(layout, PerBufferParamLayout):
                raise ParamLayoutError(
                    f"{key!r}: {type(layout).__name__}; give BufferKey -> PerBufferParamLayout"
                )
        object.__setattr__(self, "entries", tuple(known.items()))

    @property
    def layouts(self) -> dict[BufferKey, PerBufferParamLayout]:
        """The same as a dict."""
        return dict(self.entries)

    def __getitem__(self, key: BufferKey) -> PerBufferParamLayout:
        for known, layout in self.entries:
            if known == key:
                return layout
        raise KeyError(key)

    def __iter__(self) -> Iterator[BufferKey]:
        return iter([key for key, _ in self.entries])

    def __len__(self) -> int:
        return len(self.entries)

    def __repr__(self) -> str:
        return f"FullParamLayout({dict(self.entries)!r})"


def laid_out(
    params: Sequence[Param],
    placed: Sequence[tuple[str, Placed]],
    bucket_indices: Iterable[tuple[int, int]],
    per_bucket_numel_unpadded: Iterable[int],
    num_optimizer_shards: int | None = None,
    *,
    ranks: int | None = None,
) -> PerBufferParamLayout:
    """What a rule for so many `ranks` returns; shapes and `param_indices` are of the parameters, in forward order."""
    shape = {param.name: param.shape for param in params}
    return PerBufferParamLayout(
        placed,
        bucket_indices,
        per_bucket_numel_unpadded,
        numbered((param.dtype, param.gradient, param.expert_parallel) for param in params),
        num_optimizer_shards,
        shapes=[shape[name] for name, _ in placed],
        data_parallel_world_size=ranks,
    )
