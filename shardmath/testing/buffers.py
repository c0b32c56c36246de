"""Rules of buffers: strategies of parameters and of the rules that are here, and the laws that every rule keeps.

Whoever writes a rule checks it with `check_rule`, on parameters of their own or on drawn ones:

>>> from shardmath import buffers
>>> def in_order(params, *, data_parallel_world_size):
...     ends = [*itertools.accumulate(param.numel for param in params)]
...     placed = {p.name: (end - p.numel, end, 0) for p, end in zip(params, ends)}
...     return buffers.PerBufferParamLayout(placed, [(0, ends[-1])], ends[-1:])
>>> params = [Param("w", (3, 4)), Param("b", (3,))]
>>> check_rule(in_order, params, data_parallel_world_size=3)
>>> check_rule(in_order, params, data_parallel_world_size=2)
Traceback (most recent call last):
AssertionError: in_order of w (3, 4), b (3), data_parallel_world_size=2: bucket 0 is [0, 15), not divided by 2 shards
"""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import hypothesis.strategies as st

from shardmath.buffers import (
    Param,
    PerBufferParamLayout,
    Rule,
    data_parallel,
    distributed_optimizer,
    flat_parameter,
    layer_wise,
    megatron_fsdp,
    zero,
)
from shardmath.buffers.param import positive

__all__ = ["RULE_LAWS", "RuleCase", "check_rule", "params", "rule_cases"]

Draw: TypeAlias = st.DrawFn

SIZES = (0, 1, 2, 3, 5, 8, 33, 64, 65, 100, 128, 200)
"""Sizes of a dimension: on either side of the 64 elements at which parameters start, and of 128."""


# --- strategies


@st.composite
def params(
    draw: Draw,
    *,
    least: int = 0,
    most: int = 7,
    longest: int = 100,
    empty: bool = True,
    scalars: bool = True,
    alike: bool = False,
) -> list[Param]:
    """Parameters in forward order: matrices, vectors, scalars, shared embeddings, experts, quantised ones.

    Dimensions are at most `longest`; with `empty` parameters may have no elements, with `scalars` no dimensions, with
    `alike` they share one dtype.
    """
    ndim = 0 if scalars else 1
    sizes = st.sampled_from([n for n in SIZES if n <= longest and (n or empty)])
    dtype = st.just("bfloat16") if alike else st.sampled_from(["bfloat16", "bfloat16", "float32"])
    return [
        Param(
            f"w{i}",
            tuple(
                draw(st.lists(sizes, min_size=ndim, max_size=draw(st.sampled_from([1, 2, 2, 3]))))
            ),
            draw(dtype),
            draw(st.sampled_from([None, None, "float32"])),
            quantised=draw(_formats),
            shared_embedding=draw(st.sampled_from([False, False, False, True])),
            expert_parallel=draw(st.sampled_from([False, False, True])),
            managed=draw(st.sampled_from([None, None, False])),
            gtp_remat_size=draw(st.sampled_from([1, 1, 2])),
        )
        for i in range(draw(st.integers(least, most)))
    ]


_formats: st.SearchStrategy[bool | str] = st.sampled_from([False, False, True, "mxfp8"])


@dataclass(frozen=True)
class RuleCase:
    """A rule and what it is asked; `shards` divide buckets, None if nothing does, parameters begin at `start`s."""

    rule: Rule
    params: tuple[Param, ...]
    shards: int | None = None
    start: int = 1
    options: Mapping[str, object] = field(default_factory=dict)

    def layout(self) -> PerBufferParamLayout:
        """What the rule lays out. Raises AssertionError for anything but a PerBufferParamLayout."""
        out = self.rule(list(self.params), **self.options)
        _require(isinstance(out, PerBufferParamLayout), self, f"{out!r} is no PerBufferParamLayout")
        return out

    def __str__(self) -> str:
        shapes = [f"{param.name} ({', '.join(map(str, param.shape))})" for param in self.params]
        options = [f"{name}={value!r}" for name, value in self.options.items()]
        return f"{getattr(self.rule, '__name__', self.rule)} of {', '.join([*shapes, *options])}"


@st.composite
def rule_cases(
    draw: Draw, *, shards: st.SearchStrategy[int] | None = None, most: int = 7, longest: int = 100
) -> RuleCase:
    """A rule of shardmath.buffers, sharded by the number drawn if `shards` are given, and what it takes."""
    rule = draw(
        st.sampled_from(
            [*START] if shards is None else [rule for rule in START if rule is not data_parallel]
        )
    )
    flat = rule is flat_parameter
    listed = draw(
        params(
            most=most,
            longest=longest,
            empty=rule is not megatron_fsdp,
            scalars=not flat,
            alike=flat,
        )
    )
    if rule is data_parallel:
        return RuleCase(rule, tuple(listed), options={"bucket_size": draw(_bucket_sizes)})
    count = draw(st.integers(1, 8) if shards is None else shards)
    options = {name: draw(values) for name, values in OPTIONS[rule].items()}
    start = 1 if options.get("use_orig_params") is False else START[rule]
    return RuleCase(
        rule, tuple(listed), count, start, {"data_parallel_world_size": count, **options}
    )


_bucket_sizes = st.sampled_from([None, 1, 100, 1000, 5000])

START: Mapping[Rule, int] = {
    data_parallel: 1,
    distributed_optimizer: 64,
    layer_wise: 64,
    flat_parameter: 8,
    zero: 1,
    megatron_fsdp: 1,
}
"""What the rules that are here start parameters at; FSDP1 those of bfloat16."""

OPTIONS: Mapping[Rule, Mapping[str, st.SearchStrategy[object]]] = {
    distributed_optimizer: {
        "bucket_size": _bucket_sizes,
        "pad_for_high_nccl_busbw": st.sampled_from([False] * 7 + [True]),
    },
    layer_wise: {"bucket_size": _bucket_sizes},
    flat_parameter: {"use_orig_params": st.booleans()},
    zero: {"round_robin": st.booleans()},
    megatron_fsdp: {
        "bucket_size": _bucket_sizes,
        "chunk_size_factor": st.sampled_from([None, 1, 8, 24]),
    },
}


# --- laws


def _require(holds: bool, case: RuleCase, what: str) -> None:
    """An AssertionError that names the case, also under `python -O`."""
    if not holds:
        raise AssertionError(f"{case}: {what}")


def every_parameter_once(case: RuleCase) -> None:
    """Every parameter lies in the buffer once, with all of its elements and its shape, and nothing else does."""
    layout = case.layout()
    names = sorted(name for name, _ in layout.placed)
    asked = sorted(param.name for param in case.params)
    _require(names == asked, case, f"the buffer has {names}")
    _require(
        list(layout.param_index_map.items()) == list(layout.placed),
        case,
        "param_index_map is not `placed`",
    )
    shapes = dict(zip(layout.param_index_map, layout.shapes, strict=False))
    for param in case.params:
        start, end, _ = layout.param_index_map[param.name]
        _require(
            end - start == param.numel,
            case,
            f"{param.name!r} lies at [{start}, {end}), it has {param.numel}",
        )
        has = shapes.get(param.name, param.shape)
        _require(has == param.shape, case, f"{param.name!r} has shape {has} in the layout")


def apart(case: RuleCase) -> None:
    """No element of the buffer is two parameters'."""
    own = sorted(
        (start, end, name) for name, (start, end, _) in case.layout().placed if start < end
    )
    for (_, end, name), (start, _, other) in itertools.pairwise(own):
        _require(end <= start, case, f"{name!r} ends at {end}, {other!r} starts at {start}")


def inside_one_bucket(case: RuleCase) -> None:
    """Every parameter lies inside the bucket that it names."""
    layout = case.layout()
    for name, (start, end, number) in layout.placed:
        known = 0 <= number < len(layout.bucket_indices)
        _require(known, case, f"{name!r} is in bucket {number} of {len(layout.bucket_indices)}")
        first, stop = layout.bucket_indices[number]
        _require(
            first <= start and end <= stop,
            case,
            f"{name!r} is at [{start}, {end}) of bucket [{first}, {stop})",
        )


def buckets_follow_one_another(case: RuleCase) -> None:
    """The first bucket starts at 0, and every other one where the one before ends."""
    before = 0
    for number, (start, end) in enumerate(case.layout().bucket_indices):
        _require(
            start == before <= end,
            case,
            f"bucket {number} is [{start}, {end}), the one before ends at {before}",
        )
        before = end


def evenly_divided(case: RuleCase) -> None:
    """Every bucket gives all shards as many elements."""
    for number, (start, end) in enumerate(case.layout().bucket_indices):
        even = case.shards is None or (end - start) % case.shards == 0
        _require(
            even, case, f"bucket {number} is [{start}, {end}), not divided by {case.shards} shards"
        )


def uncut_where_said(case: RuleCase) -> None:
    """Where `num_optimizer_shards` is set, it is the number of shards, and no parameter crosses their borders."""
    layout = case.layout()
    count = layout.num_optimizer_shards
    if count is None:
        return
    _require(count == case.shards, case, f"num_optimizer_shards is {count}, not {case.shards}")
    for name, (start, end, number) in layout.placed:
        first, stop = layout.bucket_indices[number]
        size = (stop - first) // count
        within = start == end or (start - first) // size == (end - 1 - first) // size
        _require(
            within,
            case,
            f"{name!r} at [{start}, {end}) crosses a border, shards of its bucket have {size}",
        )


def starts_aligned(case: RuleCase) -> None:
    """Every parameter starts at a multiple of `start`."""
    for name, (start, _, _) in case.layout().placed:
        _require(
            start % case.start == 0,
            case,
            f"{name!r} starts at {start}, no multiple of {case.start}",
        )


def padding_accounted(case: RuleCase) -> None:
    """The buffer is its parameters and its padding; unpadded is between a bucket's parameters and its size."""
    layout = case.layout()
    held = sum(param.numel for param in case.params)
    counted = layout.padding >= 0 and layout.numel == held + layout.padding
    _require(
        counted,
        case,
        f"{layout.numel} elements, {held} of parameters and {layout.padding} of padding",
    )
    sizes = [end - start for start, end in layout.bucket_indices]
    filled = [0] * len(sizes)
    for start, end, number in layout.param_index_map.values():
        filled[number] += end - start
    unpadded = layout.per_bucket_numel_unpadded
    _require(
        len(unpadded) == len(sizes), case, f"{len(unpadded)} unpadded sizes of {len(sizes)} buckets"
    )
    for number, (own, said, size) in enumerate(zip(filled, unpadded, sizes, strict=True)):
        _require(
            own <= said <= size,
            case,
            f"bucket {number} has {own} of {size} elements filled, {said} unpadded",
        )


def numbered_or_not(case: RuleCase) -> None:
    """There is one of `param_indices` for each parameter, or none at all."""
    count = len(case.layout().param_indices)
    _require(
        count in (0, len(case.params)),
        case,
        f"{count} param_indices of {len(case.params)} parameters",
    )


def deterministic(case: RuleCase) -> None:
    """Asked again the rule gives an equal layout; so do copies of its parameters, pickling, and the layout's repr."""
    layout = case.layout()
    copies = replace(case, params=pickle.loads(pickle.dumps(case.params))).layout()
    _require(layout == case.layout() == copies, case, "it gives another layout every time")
    pickled = pickle.loads(pickle.dumps(layout))
    alike = pickled == layout and hash(pickled) == hash(layout) == hash(copies)
    _require(alike, case, "the layout differs from its pickled copy")
    again = eval(repr(layout), {"PerBufferParamLayout": PerBufferParamLayout})
    _require(again == layout, case, "the layout's repr is of another one")


def names_mean_nothing(case: RuleCase) -> None:
    """Renaming parameters renames them in the layout and changes nothing else."""
    names = {param.name: f"other {len(case.params) - i:09}" for i, param in enumerate(case.params)}
    layout = case.layout()
    other = replace(
        case, params=tuple(replace(param, name=names[param.name]) for param in case.params)
    ).layout()
    expected = tuple((names[name], at) for name, at in layout.placed)
    _require(other.placed == expected, case, "parameters of other names lie elsewhere")
    _require(
        _without_names(other) == _without_names(layout),
        case,
        "other names change buckets or counts",
    )


def _without_names(layout: PerBufferParamLayout) -> tuple[object, ...]:
    counts = layout.per_bucket_numel_unpadded, layout.param_indices, layout.num_optimizer_shards
    return layout.bucket_indices, *counts, layout.shapes


RULE_LAWS = (
    every_parameter_once,
    buckets_follow_one_another,
    inside_one_bucket,
    apart,
    evenly_divided,
    uncut_where_said,
    starts_aligned,
    padding_accounted,
    numbered_or_not,
    deterministic,
    names_mean_nothing,
)
"""What every rule keeps; a law takes the RuleCase alone, and stands on those before it."""


def check_rule(
    rule: Rule,
    params: Iterable[Param],
    *,
    shards: int | None = None,
    start: int = 1,
    **options: object,
) -> None:
    """Check a rule of your own against its laws, for these parameters in forward order and options.

    `shards` divide every bucket, `data_parallel_world_size` of them if not given and that is; parameters begin at
    multiples of `start`. The laws are those of RULE_LAWS. Raises AssertionError, which names the case.
    """
    given = options.get("data_parallel_world_size") if shards is None else shards
    ranks = None if given is None else positive(given, "shards")
    case = RuleCase(rule, tuple(params), ranks, positive(start, "start"), options)
    for law in RULE_LAWS:
        law(case)
