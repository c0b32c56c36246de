"""Grouping: which parameters of a model share a buffer, and the layout of every buffer.

1. Parameters share a buffer where they agree in storage dtype (uint8 if quantised), gradient dtype, expert parallelism,
   and, for a rule that manages some of them only, in that.
2. `param_indices` numbers parameters of one logical dtype, quantised or not: checkpoints of either find the other's.
3. Experts have their own data-parallel size.

>>> params = [Param(name, (10,), quantised=name in "ac") for name in "abcd"]
>>> layouts = full_layout(params, rule=distributed_optimizer, data_parallel_world_size=2)
>>> [(key.param_dtype, layout.param_indices) for key, layout in layouts.items()]
[('uint8', (0, 2)), ('bfloat16', (1, 3))]
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, Mapping

from shardmath.base.errors import ParamLayoutError
from shardmath.base.given import instance
from shardmath.base.memo import memo
from shardmath.buffers.ddp import distributed_optimizer
from shardmath.buffers.layer_wise import layer_wise
from shardmath.buffers.param import Param, flag, forward, numbered
from shardmath.buffers.param_layout import BufferKey, FullParamLayout, PerBufferParamLayout, Rule

__all__ = ["full_layout"]

_BESIDE: Mapping[Rule, Rule] = {layer_wise: distributed_optimizer}
"""Rules that manage some parameters only, and what lays out the others."""


def full_layout(
    params: Iterable[Param],
    *,
    rule: Rule,
    beside: Rule | None = None,
    grad_reduce_in_fp32: bool = False,
    expert_data_parallel_world_size: int | None = None,
    **options: object,
) -> FullParamLayout:
    """All buffers of a model chunk: BufferKey -> PerBufferParamLayout, `params` in forward order.

    `rule` lays out each buffer with `options`. Where `beside` is given, that lays out what the rule does not manage;
    beside `layer_wise`, also with options bound by functools.partial, that is `distributed_optimizer`.
    `expert_data_parallel_world_size` takes the place of `data_parallel_world_size` for experts.

    Raises ParamLayoutError for a parameter given twice, and what the rule raises.
    """
    if not callable(rule):
        raise ParamLayoutError(
            f"rule is {rule!r}; give a function such as buffers.distributed_optimizer"
        )
    if expert_data_parallel_world_size is not None and "data_parallel_world_size" not in options:
        what = f"expert_data_parallel_world_size={expert_data_parallel_world_size} without data_parallel_world_size"
        raise ParamLayoutError(f"{what}; give both, to a rule that takes it")
    flag(grad_reduce_in_fp32, "grad_reduce_in_fp32")
    if beside is not None and not callable(beside):
        raise ParamLayoutError(
            f"beside is {beside!r}; give a function such as buffers.distributed_optimizer"
        )
    other = beside or _BESIDE.get(rule.func if isinstance(rule, functools.partial) else rule)
    listed = forward(params)
    keys = [_key(param, grad_reduce_in_fp32, other is not None) for param in listed]
    logical = (
        (param.dtype, key.grad_dtype, *_apart(key)) for param, key in zip(listed, keys, strict=True)
    )
    number = dict(zip([param.name for param in listed], numbered(logical), strict=True))
    layouts = {}
    for key, group in _grouped(listed, keys).items():
        chosen = rule if other is None or key.is_managed_by_layer_wise_optimizer else other
        given = dict(options)
        if key.is_expert_parallel and expert_data_parallel_world_size is not None:
            given["data_parallel_world_size"] = expert_data_parallel_world_size
        layouts[key] = _by_rule(chosen, group, given).with_indices(
            number[param.name] for param in group
        )
    return FullParamLayout(layouts)


def _by_rule(
    rule: Rule, params: list[Param], options: Mapping[str, object]
) -> PerBufferParamLayout:
    """What the rule says of the parameters. Raises ParamLayoutError for options that it does not take."""
    name = getattr(rule, "__name__", repr(rule))
    try:
        inspect.signature(rule).bind(params, **options)
    except (
        TypeError,
        ValueError,
    ) as error:  # ValueError: a type of Python's own, which is not a rule
        what = f"rule {name} does not take parameters and {', '.join(options) or 'no options'}: {error}"
        raise ParamLayoutError(f"{what}; give it options of its own") from None
    fix = f"rule {name} is to return what buffers.zero returns"
    return instance(rule(params, **options), PerBufferParamLayout, fix, ParamLayoutError)


def _grouped(params: Iterable[Param], keys: Iterable[BufferKey]) -> dict[BufferKey, list[Param]]:
    """The parameters of each buffer, in forward order."""
    out: dict[BufferKey, list[Param]] = {}
    for param, key in zip(params, keys, strict=True):
        out.setdefault(key, []).append(param)
    return out


def _key(param: Param, grad_reduce_in_fp32: bool, tagged: bool) -> BufferKey:
    stored = "uint8" if param.quantised else param.dtype
    gradient = "float32" if grad_reduce_in_fp32 and param.grad_dtype is None else param.gradient
    return _buffer_key(stored, gradient, param.expert_parallel, tagged and param.is_managed)


_buffer_key = memo()(BufferKey)


def _apart(key: BufferKey) -> tuple[bool, bool]:
    return key.is_expert_parallel, key.is_managed_by_layer_wise_optimizer
