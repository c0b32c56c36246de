"""Rules of buffers: parameters and rules drawn at random, and the laws that every rule keeps.

Check a custom rule with `check_rule`, on given parameters or on drawn ones:

>>> from shardmath import buffers
>>> def in_order(params, *, data_parallel_world_size):
...     ends = [*itertools.accumulate(param.numel for param in params)]
...     placed = {p.name: (end - p.numel, end, 0) for p, end in zip(params, ends)}
...     return buffers.PerBufferParamLayout(placed, [(0, ends[-1])], ends[-1:])
>>> params = [Param("w", (3, 4)), Param("b", (3,))]
>>> check_rule(in_order, params, data_parallel_world_size=3)
>>> check_rule(in_order, params, data_parallel_world_size=2)
Traceback (most recent call last):
AssertionError: in_order of w (3, 4), b (3), data_parallel_world_size=2: bucket 0 is [0, 15), not divided by 2 shards; \
pad its end to a multiple of 2 elements
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
from shardmath.buffers.param import read_positive

__all__ = ["RULE_LAWS", "RuleCase", "check_rule", "params", "rule_cases"]

Draw: TypeAlias = st.DrawFn

SIZES = (0, 1, 2, 3, 5, 8, 33, 64, 65, 100, 128, 200)
"""Sizes of a dimension: around the 64 elements at which parameters start, and around 128."""


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
    """A hypothesis strategy for lists of `least` to `most` Params in forward order, with dimensions of at most
    `longest`. `empty` allows Params without elements, `scalars` allows Params without dimensions, and `alike` gives all
    Params one dtype.

    They have up to three dimensions; some are shared, expert or quantized ones.
    """
    fewest_dims = 0 if scalars else 1
    sizes = st.sampled_from([n for n in SIZES if n <= longest and (n or empty)])
    dtype = st.just("bfloat16") if alike else st.sampled_from(["bfloat16", "bfloat16", "float32"])
    out = []
    for i in range(draw(st.integers(least, most))):
        most_dims = draw(_dimensions)
        shape = draw(st.lists(sizes, min_size=fewest_dims, max_size=most_dims))
        param = Param(
            f"w{i}",
            tuple(shape),
            draw(dtype),
            draw(_main_dtypes),
            quantized=draw(_formats),
            shared_embedding=draw(_seldom),
            expert_parallel=draw(_sometimes),
            managed=draw(_managed),
            gtp_remat_size=draw(_remat_sizes),
        )
        out.append(param)
    return out


_dimensions = st.sampled_from([1, 2, 2, 3])
_main_dtypes: st.SearchStrategy[str | None] = st.sampled_from([None, None, "float32"])
_seldom = st.sampled_from([False, False, False, True])
_sometimes = st.sampled_from([False, False, True])
_managed: st.SearchStrategy[bool | None] = st.sampled_from([None, None, False])
_remat_sizes = st.sampled_from([1, 1, 2])
_formats: st.SearchStrategy[bool | str] = st.sampled_from([False, False, True, "mxfp8"])


@dataclass(frozen=True)
class RuleCase:
    """A rule that lays out a flat buffer, with the parameters and the options with which it is called.

    `shards` is the number of shards of a bucket, None for no shards; parameters begin at multiples of `start`.
    """

    rule: Rule
    params: tuple[Param, ...]
    shards: int | None = None
    start: int = 1
    options: Mapping[str, object] = field(default_factory=dict)

    def layout(self) -> PerBufferParamLayout:
        """The layout that the rule returns. Raises AssertionError unless it is a PerBufferParamLayout."""
        out = self.rule(list(self.params), **self.options)
        what = f"{out!r} is not a PerBufferParamLayout; return one, as buffers.zero does"
        _require(isinstance(out, PerBufferParamLayout), self, what)
        return out

    def __str__(self) -> str:
        words = []
        for param in self.params:
            sizes = ", ".join(map(str, param.shape))
            words.append(f"{param.name} ({sizes})")
        words += [f"{name}={value!r}" for name, value in self.options.items()]
        name = getattr(self.rule, "__name__", self.rule)
        return f"{name} of {', '.join(words)}"


@st.composite
def rule_cases(
    draw: Draw, *, shards: st.SearchStrategy[int] | None = None, most: int = 7, longest: int = 100
) -> RuleCase:
    """A hypothesis strategy for RuleCases of the rules in shardmath.buffers, with up to `most` parameters, dimensions
    up to `longest`, and a number of shards drawn from `shards`.

    Without `shards` there are 1 to 8, and the rule may also be one that does not shard.
    """
    rules = list(START)
    if shards is None:
        shards = st.integers(1, 8)
    else:
        rules.remove(data_parallel)
    rule = draw(st.sampled_from(rules))
    # FSDP1 takes parameters of one dtype and no scalars; Megatron-FSDP takes no empty ones.
    flat = rule is flat_parameter
    empty = rule is not megatron_fsdp
    any_params = params(most=most, longest=longest, empty=empty, scalars=not flat, alike=flat)
    drawn = tuple(draw(any_params))
    options: dict[str, object] = {}
    for name, values in OPTIONS[rule].items():
        options[name] = draw(values)
    if rule is data_parallel:
        return RuleCase(rule, drawn, options=options)
    count = draw(shards)
    options["data_parallel_world_size"] = count
    # FSDP1 aligns parameters only with `use_orig_params`.
    unaligned = options.get("use_orig_params") is False
    start = 1 if unaligned else START[rule]
    return RuleCase(rule, drawn, count, start, options)


_bucket_sizes = st.sampled_from([None, 1, 100, 1000, 5000])

START: Mapping[Rule, int] = {
    data_parallel: 1,
    distributed_optimizer: 64,
    layer_wise: 64,
    flat_parameter: 8,
    zero: 1,
    megatron_fsdp: 1,
}
"""The number at whose multiples each rule starts parameters; for FSDP1, parameters of bfloat16."""

OPTIONS: Mapping[Rule, Mapping[str, st.SearchStrategy[object]]] = {
    data_parallel: {"bucket_size": _bucket_sizes},
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
    """Raise an AssertionError that names the case, also under `python -O`."""
    if not holds:
        raise AssertionError(f"{case}: {what}")


def every_parameter_once(case: RuleCase) -> None:
    """Check that the buffer has every parameter once, with its elements and its shape, and nothing else."""
    layout = case.layout()
    names = sorted(name for name, _ in layout.placed)
    asked = sorted(param.name for param in case.params)
    what = f"the layout has parameters {names}, and the rule was given {asked}"
    _require(names == asked, case, f"{what}; place each given parameter once")
    index = layout.param_index_map
    as_placed = tuple(index.items()) == layout.placed
    _require(as_placed, case, "param_index_map is not `placed`")
    # A layout may leave out the shapes: then none is compared.
    shapes = dict(zip(index, layout.shapes, strict=False))
    for param in case.params:
        start, end, _ = index[param.name]
        what = f"{param.name!r} lies at [{start}, {end}), and has {param.numel} elements; place all"
        _require(end - start == param.numel, case, what)
        shape = shapes.get(param.name, param.shape)
        what = f"{param.name!r} has shape {shape} in the layout, and {param.shape} as given"
        what += "; return the given shapes"
        _require(shape == param.shape, case, what)


def apart(case: RuleCase) -> None:
    """Check that no element of the buffer belongs to two parameters."""
    layout = case.layout()
    spans = []
    for name, (start, end, _) in layout.placed:
        if start < end:
            spans.append((start, end, name))
    spans.sort()
    for (_, end, name), (start, _, other) in itertools.pairwise(spans):
        what = f"{name!r} ends at {end}, {other!r} starts at {start}"
        _require(end <= start, case, what)


def inside_one_bucket(case: RuleCase) -> None:
    """Check that the rule of `case`, a function that lays out a flat buffer, puts each parameter in one bucket."""
    layout = case.layout()
    count = len(layout.bucket_indices)
    for name, (start, end, number) in layout.placed:
        _require(0 <= number < count, case, f"{name!r} is in bucket {number} of {count}")
        first, stop = layout.bucket_indices[number]
        what = f"{name!r} is at [{start}, {end}) of bucket [{first}, {stop})"
        _require(first <= start and end <= stop, case, what)


def buckets_follow_one_another(case: RuleCase) -> None:
    """Check that the first bucket starts at 0, and every other bucket where the bucket before it ends."""
    before = 0
    for number, (start, end) in enumerate(case.layout().bucket_indices):
        what = f"bucket {number} is [{start}, {end}), the one before ends at {before}"
        _require(start == before <= end, case, what)
        before = end


def evenly_divided(case: RuleCase) -> None:
    """Check that every bucket gives all shards the same number of elements."""
    buckets = case.layout().bucket_indices
    count = case.shards or 1
    for number, (start, end) in enumerate(buckets):
        rest = (end - start) % count
        what = f"bucket {number} is [{start}, {end}), not divided by {count} shards"
        what += f"; pad its end to a multiple of {count} elements"
        _require(rest == 0, case, what)


def uncut_where_said(case: RuleCase) -> None:
    """Check that no border between shards cuts a parameter, if the layout of `case` has `num_optimizer_shards`."""
    layout = case.layout()
    count = layout.num_optimizer_shards
    if count is None:
        return
    what = f"num_optimizer_shards is {count}, not {case.shards}; return {case.shards} or None"
    _require(count == case.shards, case, what)
    for name, (start, end, number) in layout.placed:
        if start == end:
            continue
        first, stop = layout.bucket_indices[number]
        size = (stop - first) // count
        first_shard = (start - first) // size
        last_shard = (end - 1 - first) // size
        placed = f"{name!r} at [{start}, {end})"
        what = f"{placed} crosses a border, shards of its bucket have {size}"
        _require(first_shard == last_shard, case, what)


def starts_aligned(case: RuleCase) -> None:
    """Check that the offset of every parameter in the flat buffer is a multiple of `case.start` elements."""
    for name, (start, _, _) in case.layout().placed:
        what = f"{name!r} starts at {start}, not a multiple of {case.start}; round its start up"
        _require(start % case.start == 0, case, what)


def padding_accounted(case: RuleCase) -> None:
    """Check that parameters and padding fill the buffer, and each bucket's parameters fit in its unpadded size."""
    layout = case.layout()
    padding = layout.padding
    held = sum(param.numel for param in case.params)
    what = f"{layout.numel} elements, {held} of parameters and {padding} of padding"
    _require(padding >= 0, case, what)
    _require(layout.numel == held + padding, case, what)
    count = len(layout.bucket_indices)
    unpadded = layout.per_bucket_numel_unpadded
    what = f"{len(unpadded)} unpadded sizes of {count} buckets"
    _require(len(unpadded) == count, case, what)
    for number, filled in enumerate(_count_filled(layout)):
        start, end = layout.bucket_indices[number]
        size = end - start
        counted = unpadded[number]
        what = f"bucket {number} has {filled} of {size} elements filled, {counted} unpadded"
        _require(filled <= counted <= size, case, what)


def _count_filled(layout: PerBufferParamLayout) -> list[int]:
    """The number of elements in each bucket that belong to parameters."""
    filled = [0] * len(layout.bucket_indices)
    for start, end, number in layout.param_index_map.values():
        filled[number] += end - start
    return filled


def numbered_or_not(case: RuleCase) -> None:
    """Check that the layout by the rule of `case` has an index per parameter in `param_indices`, or none."""
    count = len(case.layout().param_indices)
    params = len(case.params)
    what = f"{count} param_indices of {params} parameters; return one per parameter, or none"
    _require(count in (0, params), case, what)


def deterministic(case: RuleCase) -> None:
    """Check that the rule gives equal layouts when called again, and that pickle and repr give them back."""
    layout = case.layout()
    again = case.layout()
    copied_params = pickle.loads(pickle.dumps(case.params))
    layout_of_copies = replace(case, params=copied_params).layout()
    what = (
        "the rule returns different layouts for equal parameters; use only parameters and options"
    )
    _require(layout == again == layout_of_copies, case, what)
    pickled = pickle.loads(pickle.dumps(layout))
    same_hash = hash(pickled) == hash(layout) == hash(layout_of_copies)
    what = "the layout differs from its pickled copy"
    _require(pickled == layout, case, what)
    _require(same_hash, case, what)
    names = {"PerBufferParamLayout": PerBufferParamLayout}
    evaluated = eval(repr(layout), names)
    _require(evaluated == layout, case, "the layout's repr is of another one")


def names_mean_nothing(case: RuleCase) -> None:
    """Check that renaming parameters renames them in the layout, and changes nothing else."""
    # New names sort in the opposite order, so that a rule that sorts by name is found.
    backwards = reversed(case.params)
    names = {}
    for number, param in enumerate(backwards, 1):
        names[param.name] = f"other {number:09}"
    renamed = []
    for param in case.params:
        name = names[param.name]
        renamed.append(replace(param, name=name))
    layout = case.layout()
    other = replace(case, params=tuple(renamed)).layout()
    expected = tuple((names[name], place) for name, place in layout.placed)
    what = "renamed parameters lie elsewhere; do not place parameters by their names"
    _require(other.placed == expected, case, what)
    same = _without_names(other) == _without_names(layout)
    what = "renamed parameters change buckets or counts; do not lay out parameters by their names"
    _require(same, case, what)


def _without_names(layout: PerBufferParamLayout) -> tuple[object, ...]:
    """The fields of the layout without names of parameters."""
    return (
        layout.bucket_indices,
        layout.per_bucket_numel_unpadded,
        layout.param_indices,
        layout.num_optimizer_shards,
        layout.shapes,
    )


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
"""The laws that every rule of flat buffers keeps, a tuple of functions law(rule_case) that raise AssertionError if
broken. Call them in this order: some rely on laws before them."""


def check_rule(
    rule: Rule,
    params: Iterable[Param],
    *,
    shards: int | None = None,
    start: int = 1,
    **options: object,
) -> None:
    """Check that `rule`, a function that lays out flat buffers, obeys all laws in RULE_LAWS for `params`, given in
    forward order: for example, no two parameters overlap. Each bucket must be divisible into `shards` shards, and
    parameters must begin at multiples of `start`.

    `shards` is `data_parallel_world_size` by default, if that is given. Other keyword arguments go to `rule`. Raises
    AssertionError, which names the case.
    """
    given = options.get("data_parallel_world_size") if shards is None else shards
    count = None if given is None else read_positive(given, "shards")
    first = read_positive(start, "start")
    case = RuleCase(rule, tuple(params), count, first, options)
    for law in RULE_LAWS:
        law(case)
