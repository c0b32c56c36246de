"""What ranks hold of a dimension of every length n at once, by isl: sets and maps of integers with n as a parameter.

Made from the digits alone, and from the definitions of the cuts in words; nothing here calls what computes Runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import islpy as isl

from shardmath.layouts.algebra.cuts import BalancedChunks, Chunks
from shardmath.layouts.algebra.stages import Coords, Stage

CONTEXT = isl.Context()
SPACE = isl.Space.create_from_names(CONTEXT, set=[], params=["n"])
ZERO = isl.PwAff.from_aff(isl.Aff.zero_on_domain(isl.LocalSpace.from_space(SPACE)))


def _number(value: int) -> isl.PwAff:
    aff = isl.Aff.zero_on_domain(isl.LocalSpace.from_space(SPACE))
    return isl.PwAff.from_aff(aff.set_constant_val(isl.Val.int_from_si(CONTEXT, value)))


def _length() -> isl.PwAff:
    aff = isl.Aff.zero_on_domain(isl.LocalSpace.from_space(SPACE))
    one = isl.Val.int_from_si(CONTEXT, 1)
    return isl.PwAff.from_aff(aff.set_coefficient_val(isl.dim_type.param, 0, one))


def _times(value: isl.PwAff, factor: int) -> isl.PwAff:
    return value.scale_val(isl.Val.int_from_si(CONTEXT, factor))


def _over(value: isl.PwAff, divisor: int) -> isl.PwAff:
    return value.scale_down_val(isl.Val.int_from_si(CONTEXT, divisor))


def _part(cut: Chunks | BalancedChunks, size: isl.PwAff, i: int) -> tuple[isl.PwAff, isl.PwAff]:
    """Where part i of a piece of this size begins, and its size."""
    if isinstance(cut, Chunks):
        step = _over(size, cut.parts).ceil()
        start = _times(step, i).min(size)
        return start, (size - start).min(step)
    # numpy.array_split: the first n mod parts are one longer.
    step = _over(size, cut.parts).floor()
    extra = size.mod_val(isl.Val.int_from_si(CONTEXT, cut.parts))
    longer = (extra - _number(i)).max(ZERO).min(_number(1))
    return _times(step, i) + extra.min(_number(i)), step + longer


def _pieces(
    stage: Stage, start: isl.PwAff, size: isl.PwAff, coords: Coords
) -> Iterator[tuple[isl.PwAff, isl.PwAff]]:
    """(start, size) of all that a rank keeps, in order."""
    if not stage:
        yield start, size
        return
    digit, *rest = stage
    kept = [digit.coordinate(coords)] if digit.axes else range(digit.cut.parts)
    for i in kept:
        offset, length = _part(digit.cut, size, i)
        yield from _pieces(tuple(rest), start + offset, length, coords)


def held(stages: Sequence[Stage], coords: Coords) -> isl.Map:
    """[n] -> {[local] -> [global]}: what the rank holds, for every n."""
    whole = isl.Map.read_from_str(CONTEXT, "[n] -> { [l] -> [l] : 0 <= l < n }")
    length = _length()
    for stage in stages:
        kept = None
        local = ZERO
        for start, size in _pieces(stage, ZERO, length, coords):
            triple = isl.Map.from_pw_aff(local).flat_range_product(isl.Map.from_pw_aff(start))
            triple = triple.flat_range_product(isl.Map.from_pw_aff(size)).range()
            take = "[n] -> { [a, s, z] -> [l, g] : l - a = g - s and s <= g < s + z }"
            pairs = triple.apply(isl.Map.read_from_str(CONTEXT, take))
            kept = pairs if kept is None else kept | pairs
            local = (local + size).coalesce()
        as_map = isl.Map.read_from_str(CONTEXT, "[n] -> { [l, g] -> [[l] -> [g]] }")
        step = as_map.intersect_domain(kept).range().unwrap().coalesce()
        whole = step.apply_range(whole).coalesce()
        length = local
    return whole


def smallest_difference(one: isl.Map, other: isl.Map) -> int | None:
    """The smallest n >= 0 at which two maps differ; None if they are equal for all."""
    lengths = ((one - other) | (other - one)).params()
    lengths &= isl.Set.read_from_str(CONTEXT, "[n] -> { : n >= 0 }")
    if lengths.is_empty():
        return None
    as_set = lengths.move_dims(isl.dim_type.set, 0, isl.dim_type.param, 0, 1)
    point = as_set.lexmin().sample_point()
    return int(point.get_coordinate_val(isl.dim_type.set, 0).get_num_si())
