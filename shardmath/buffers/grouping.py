"""Grouping: which parameters of a model share a buffer, and the layout of every buffer.

1. Parameters share a buffer if they agree in storage dtype (uint8 if quantized), gradient dtype, expert parallelism,
   and, for a rule that manages only some of them, in whether it does.
2. `param_indices` numbers parameters of one logical dtype, quantized or not, so that one's checkpoints fit the other.
3. Experts have their own data-parallel size.

>>> params = [Param(name, (10,), quantized=name in "ac") for name in "abcd"]
>>> layouts = full_layout(params, rule=distributed_optimizer, data_parallel_world_size=2)
>>> [(key.param_dtype, layout.param_indices) for key, layout in layouts.items()]
[('uint8', (0, 2)), ('bfloat16', (1, 3))]
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from shardmath.base import dtypes
from shardmath.base.arguments import instance, mapping
from shardmath.base.errors import ParamLayoutError
from shardmath.base.memo import memo
from shardmath.buffers.layer_wise import layer_wise
from shardmath.buffers.megatron_ddp import distributed_optimizer
from shardmath.buffers.param import Param, number_alike, read_flag, read_params
from shardmath.buffers.param_layout import PerBufferParamLayout, Rule

__all__ = ["BufferKey", "FullParamLayout", "apply_rule", "check_rule", "full_layout"]


@dataclass(frozen=True, slots=True)
class BufferKey:
    """The key of a flat buffer of a model: the dtypes and kinds (such as expert-parallel) that its parameters share."""

    param_dtype: str
    grad_dtype: str
    is_expert_parallel: bool
    is_managed_by_layer_wise_optimizer: bool = False

    def __post_init__(self) -> None:
        for name in ("param_dtype", "grad_dtype"):
            dtype = dtypes.canonical(getattr(self, name))
            object.__setattr__(self, name, dtype)
        for name in ("is_expert_parallel", "is_managed_by_layer_wise_optimizer"):
            marked = read_flag(getattr(self, name), name)
            object.__setattr__(self, name, marked)


@dataclass(frozen=True, slots=True, init=False, repr=False)
class FullParamLayout(Mapping[BufferKey, PerBufferParamLayout]):
    """A read-only mapping from the BufferKey of each flat buffer of a model to its layout, a PerBufferParamLayout.

    It keeps the order given; `full_layout` orders it by the buffers' first parameters.
    """

    entries: tuple[tuple[BufferKey, PerBufferParamLayout], ...]

    def __init__(self, layouts: Mapping[BufferKey, PerBufferParamLayout]) -> None:
        kinds = "BufferKey to PerBufferParamLayout"
        checked = mapping(layouts, "layouts are ", kinds, ParamLayoutError)
        for key, layout in checked.items():
            if not isinstance(key, BufferKey) or not isinstance(layout, PerBufferParamLayout):
                what = f"layouts has {key!r}: {type(layout).__name__}"
                fix = "give a mapping from BufferKey to PerBufferParamLayout"
                raise ParamLayoutError(f"{what}; {fix}")
        object.__setattr__(self, "entries", tuple(checked.items()))

    @property
    def layouts(self) -> dict[BufferKey, PerBufferParamLayout]:
        """The layout of each buffer, by its key, as a dict."""
        return dict(self.entries)

    def __getitem__(self, key: BufferKey) -> PerBufferParamLayout:
        for known, layout in self.entries:
            if known == key:
                return layout
        known_keys = [known for known, _ in self.entries]
        raise KeyError(f"no buffer {key!r}; use one of the keys {known_keys}")

    def __iter__(self) -> Iterator[BufferKey]:
        return iter([key for key, _ in self.entries])

    def __len__(self) -> int:
        return len(self.entries)

    def __repr__(self) -> str:
        return f"FullParamLayout({dict(self.entries)!r})"


_OTHER_RULE: Mapping[Rule, Rule] = {layer_wise: distributed_optimizer}
"""Rules that manage only some parameters, and the rule that lays out the others."""


def full_layout(
    params: Iterable[Param],
    *,
    rule: Rule,
    beside: Rule | None = None,
    grad_reduce_in_fp32: bool = False,
    expert_data_parallel_world_size: int | None = None,
    **options: object,
) -> FullParamLayout:
    """Group a model's `params` into flat buffers by dtype, gradient dtype and kind (such as expert-parallel), and
    return each buffer's layout by its BufferKey. The function `rule`, such as `zero`, lays out a buffer; `beside`, if
    given, lays out buffers of parameters that a layer-wise optimizer (such as Muon) does not update.

    `params` are the parameters of a model, or of one virtual stage, in forward order. `rule` lays out each buffer with
    `options`. The rule `beside` lays out the parameters that `rule` does not manage; for `layer_wise`, even with
    options bound by functools.partial, it is `distributed_optimizer` if not given. `expert_data_parallel_world_size`
    replaces `data_parallel_world_size` for experts.

    Raises ParamLayoutError for a parameter given twice, and any error of the rule.
    """
    check_rule(rule, "rule")
    expert_options = _choose_expert_options(options, expert_data_parallel_world_size)
    read_flag(grad_reduce_in_fp32, "grad_reduce_in_fp32")
    if beside is not None:
        check_rule(beside, "beside")
    other = beside or _find_other_rule(rule)
    listed = read_params(params)
    keys = [_make_key(param, grad_reduce_in_fp32, other is not None) for param in listed]
    number_of = _number_params(listed, keys)
    layouts = {}
    for key, group in _group_params(listed, keys).items():
        is_managed = key.is_managed_by_layer_wise_optimizer
        buffer_rule = rule if other is None or is_managed else other
        buffer_options = expert_options if key.is_expert_parallel else options
        layout = apply_rule(buffer_rule, group, buffer_options)
        layouts[key] = layout.with_indices(number_of[param.name] for param in group)
    return FullParamLayout(layouts)


def _choose_expert_options(
    options: Mapping[str, object], experts: int | None
) -> Mapping[str, object]:
    """The options of experts' buffers, whose data-parallel size is `experts` if given.

    Raises ParamLayoutError if only the size of experts is given: it replaces `data_parallel_world_size`, which the
    buffers of other parameters need.
    """
    if experts is None:
        return options
    if "data_parallel_world_size" not in options:
        given = f"expert_data_parallel_world_size={experts}"
        what = f"{given} without data_parallel_world_size"
        raise ParamLayoutError(f"{what}; pass data_parallel_world_size= too")
    return {**options, "data_parallel_world_size": experts}


def check_rule(rule: object, name: str) -> None:
    """Raise ParamLayoutError unless `rule` is callable; the error message names it `name`."""
    if not callable(rule):
        raise ParamLayoutError(
            f"{name} is {rule!r}; give a function such as buffers.distributed_optimizer"
        )


def _find_other_rule(rule: Rule) -> Rule | None:
    """The rule for the parameters that this rule does not manage, even with options bound to it."""
    if isinstance(rule, functools.partial):
        return _OTHER_RULE.get(rule.func)
    return _OTHER_RULE.get(rule)


def apply_rule(
    rule: Rule, params: list[Param], options: Mapping[str, object]
) -> PerBufferParamLayout:
    """Return the layout that the function `rule` makes of `params`, with `options` as keyword arguments. Raises
    ParamLayoutError if `rule` does not accept these arguments.

    Also raises it if the rule returns anything else. `options` are passed by keyword.
    """
    name = getattr(rule, "__name__", repr(rule))
    try:
        inspect.signature(rule).bind(params, **options)
    except (TypeError, ValueError) as error:  # ValueError: some built-in types have no signature
        option_names = ", ".join(options) or "no options"
        what = f"rule {name} does not take parameters and {option_names}: {error}"
        raise ParamLayoutError(f"{what}; pass only options that the rule has") from None
    fix = f"have rule {name} return one, as buffers.zero does"
    return instance(rule(params, **options), PerBufferParamLayout, fix, ParamLayoutError)


def _group_params(
    params: Iterable[Param], keys: Iterable[BufferKey]
) -> dict[BufferKey, list[Param]]:
    """The parameters of each buffer, in forward order."""
    groups: dict[BufferKey, list[Param]] = {}
    for param, key in zip(params, keys, strict=True):
        groups.setdefault(key, []).append(param)
    return groups


def _number_params(params: Sequence[Param], keys: Iterable[BufferKey]) -> dict[str, int]:
    """The number of each parameter, by name, among those of its logical dtype, quantized or not."""
    names = []
    kinds = []
    for param, key in zip(params, keys, strict=True):
        marks = (key.is_expert_parallel, key.is_managed_by_layer_wise_optimizer)
        kind = (param.dtype, key.grad_dtype, *marks)
        names.append(param.name)
        kinds.append(kind)
    numbers = number_alike(kinds)
    return dict(zip(names, numbers, strict=True))


def _make_key(param: Param, grad_reduce_in_fp32: bool, has_other: bool) -> BufferKey:
    """The buffer of the parameter; whether it is managed counts only if another rule lays out the rest."""
    stored = "uint8" if param.quantized else param.dtype
    gradient = param.gradient
    if grad_reduce_in_fp32 and param.grad_dtype is None:
        gradient = "float32"
    is_managed = has_other and param.is_managed
    return _intern_key(stored, gradient, param.expert_parallel, is_managed)


_intern_key = memo()(BufferKey)
"""A model has thousands of parameters and few keys."""
