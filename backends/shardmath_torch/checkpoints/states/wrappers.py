"""Wrappers: optimizers in optimizers, and state that would be lost if only state and groups were saved.

1. An optimizer may have inner optimizers as attributes, at any depth of containers, and these may have more. An inner
   one with separate state has to be given instead. Containers' stored items are read without running their code.
2. Other objects are not searched: an attribute may be a trainer, a monitor or a schedule, which refers to optimizers
   without being part of one.
3. A state dict may hold more than the optimizer's state and groups, also inside of these. Only a class with its own
   `state_dict`, or a hook, can add entries, so only these state dicts are made. A hook may also write to the state
   first, which is then saved.

>>> import torch
>>> from torch.optim import SGD
>>> outer = SGD([torch.ones(1)])
>>> outer.more = {"a": [SGD([torch.ones(1)])]}
>>> [one.path for one in list_inner(outer)]
["optimizer.more['a'][0]"]
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import UserList, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from types import (
    GetSetDescriptorType,
    MappingProxyType,
    MemberDescriptorType,
    SimpleNamespace,
)
from typing import Any, NamedTuple, TypeAlias, TypeGuard

from torch.optim import Optimizer

from shardmath.base.text import word_error
from shardmath_torch.checkpoints.files.places import CheckpointError

__all__ = ["Inner", "check_keeps_own", "list_inner"]

STANDARD = ("state", "param_groups")
"""The keys of torch's own state dict of an optimizer."""

HOOKS = ("_optimizer_state_dict_pre_hooks", "_optimizer_state_dict_post_hooks")
"""Where an optimizer keeps the hooks that its state dict calls."""

SHOWN = 8
"""How many optimizers an error lists."""

BY_INDEX: tuple[Any, ...] = (list, tuple, deque)
WITHOUT_INDEX: tuple[Any, ...] = (set, frozenset)
CONTAINERS = (*BY_INDEX, *WITHOUT_INDEX, UserList, Mapping, SimpleNamespace)
INDEXED, ENUMERATED, FIELD = "{}[{!r}]", "[*{}][{}]", "{}.{}"
"""How an item is spelled, given the spelling of its container and its key there."""


class Inner(NamedTuple):
    """An optimizer inside another: a Python expression for it (such as `optimizer.base[0]`), the optimizer that holds
    it, and the holder's attribute that leads to it."""

    path: str
    holder: Optimizer
    attribute: str
    optimizer: Optimizer


class _AccessStep(NamedTuple):
    """The last step of the way to a value, and the steps before it; a linked list, as few of many ways are spelled."""

    before: _AccessStep | None
    form: str
    key: object


_Part: TypeAlias = tuple[str, object, object]
"""An item of a container: its form of spelling, its key, and the item."""


def list_inner(optimizer: Optimizer) -> Iterator[Inner]:
    """Yield the optimizers in the attributes of `optimizer`, at any depth of containers, and in turn the optimizers
    inside of those."""
    yield from _list_inner(optimizer, "optimizer", {id(optimizer): optimizer})


def _list_inner(holder: Optimizer, start: str, seen: dict[int, object]) -> Iterator[Inner]:
    """The inner optimizers, with paths that begin with `start`; objects that were `seen` are skipped."""
    for attribute, value in list(vars(holder).items()):
        if attribute in STANDARD:
            continue
        for step, inner in _find_optimizers(value, seen):
            path = _spell(step, f"{start}.{attribute}")
            yield Inner(path, holder, attribute, inner)
            yield from _list_inner(inner, path, seen)


def _spell(step: _AccessStep | None, start: str) -> str:
    """The expression of the value to which `step`, and the steps before it, lead from the expression `start`."""
    steps = []
    while step is not None:
        steps.append(step)
        step = step.before
    expression = start
    for each in reversed(steps):
        expression = each.form.format(expression, each.key)
    return expression


def _find_optimizers(
    value: object, seen: dict[int, object]
) -> Iterator[tuple[_AccessStep | None, Optimizer]]:
    """The optimizers in a value that were not yet seen, each with the last step of the way to it."""
    unvisited: list[tuple[_AccessStep | None, object]] = [(None, value)]
    while unvisited:
        step, part = unvisited.pop()
        if id(part) in seen:
            continue
        if _is_optimizer(part):
            seen[id(part)] = part
            yield step, part
        elif _is_container(part):
            # Kept, so that no other object gets its id.
            seen[id(part)] = part
            unvisited += reversed(_extend_path(step, part))


def _extend_path(step: _AccessStep | None, holder: object) -> list[tuple[_AccessStep, object]]:
    """The optimizers and containers in a container, each with the step to it."""
    steps: list[tuple[_AccessStep, object]] = []
    for form, key, part in _list_parts(holder):
        if _is_optimizer(part) or _is_container(part):
            steps.append((_AccessStep(step, form, key), part))
    return steps


def _is_optimizer(value: object) -> TypeGuard[Optimizer]:
    """Whether the value's type is an optimizer's; a dead weak proxy would raise if asked for its `__class__`."""
    return issubclass(type(value), Optimizer)


def _is_container(value: object) -> bool:
    kind = type(value)
    return issubclass(kind, CONTAINERS) or dataclasses.is_dataclass(kind)


def _list_parts(value: object) -> Iterator[_Part]:
    """The items and attributes of a value, without calling its methods, which may be endless or read files.

    Each kind is copied into a list at once, as other threads may add to it.
    """
    yield from _list_elements(value)
    as_dict = dict(value) if isinstance(value, MappingProxyType) else value
    if isinstance(as_dict, dict):
        # The methods of dict, which a subclass may override; and keys, too, as an optimizer may be a key.
        yield from ((INDEXED, key, one) for key, one in list(dict.items(as_dict)))
        yield from ((ENUMERATED, i, key) for i, key in enumerate(list(dict.keys(as_dict))))
    yield from ((FIELD, name, one) for name, one in _list_fields(value))


def _list_elements(value: object) -> Iterator[_Part]:
    for kind in (*BY_INDEX, *WITHOUT_INDEX):
        if isinstance(value, kind):
            form = INDEXED if kind in BY_INDEX else ENUMERATED
            yield from ((form, i, one) for i, one in enumerate(list(kind.__iter__(value))))


def _list_fields(value: object) -> Iterator[tuple[str, object]]:
    """The attributes that an object stores, in its dict or in slots; properties are not called."""
    yield from list(_get_own_dict(value).items())
    slots = {name: slot for kind in type(value).__mro__ for name, slot in vars(kind).items()}
    for name, slot in slots.items():
        if isinstance(slot, MemberDescriptorType) and name != "__dict__":
            # The slot may be empty.
            with contextlib.suppress(AttributeError):
                yield name, slot.__get__(value)


def _get_own_dict(value: object) -> dict[str, object]:
    """The dict that stores an object's attributes, even if its class overrides `__dict__`."""
    for kind in type(value).__mro__:
        slot = vars(kind).get("__dict__")
        if slot is not None:
            kinds = GetSetDescriptorType, MemberDescriptorType
            return slot.__get__(value) if isinstance(slot, kinds) else {}
    return {}


def check_keeps_own(optimizer: Optimizer, given: Sequence[Optimizer]) -> None:
    """Raise CheckpointError if a checkpoint of the optimizers in `given` cannot restore all state of `optimizer` and of
    the optimizers inside it. The checkpoint has only each one's `state` and `param_groups`; `given` includes
    `optimizer`.

    It raises for an optimizer that has inner optimizers with separate state that are not `given`, for one that makes
    its state again at each access, and if the state dict of the optimizer, or of an inner one that shares its state,
    has additional entries.
    """
    # Kept in a list: if a state is made at each access, its id would be reused.
    states = [each.state for each in given]
    state_ids = {id(state) for state in states}
    inner = list(list_inner(optimizer))
    # Some wrappers share the state of what they wrap: then none of it is lost.
    apart = [each for each in inner if id(each.optimizer.state) not in state_ids]
    if apart:
        raise CheckpointError(_explain_apart(optimizer, apart))
    _check_keeps_state(optimizer)
    shared = [each for each in inner if each.optimizer.state is optimizer.state]
    # The innermost first: its wrappers' state dicts repeat its entries.
    for each in reversed(shared):
        _check_adds_nothing(each.optimizer, each.path, "")
    _check_adds_nothing(optimizer, "optimizer", shared[0].path if shared else "")


def _check_keeps_state(optimizer: Optimizer) -> None:
    """Raise CheckpointError for an optimizer that makes its state at each access: nothing could be restored into it."""
    if optimizer.state is not optimizer.state:
        what = f"the attribute state of {type(optimizer).__name__} is another object at each access"
        fix = "give the same dict there each time, or give a plain optimizer"
        raise CheckpointError(f"{what}, so state that is loaded into it would be lost; {fix}")


def _explain_apart(optimizer: Optimizer, apart: Sequence[Inner]) -> str:
    """The message of an error about inner optimizers with separate state, and what to give instead."""
    first = apart[0]
    holder_kind, kind = type(first.holder).__name__, type(first.optimizer).__name__
    what = f"{holder_kind} keeps state in its own optimizer, the {kind} in its attribute {first.attribute!r}"
    # Optimizers inside a listed one are checked when that one is given.
    paths: list[str] = []
    for path in (inner.path for inner in apart):
        if not any(f"{outer}." in path for outer in paths):
            paths.append(path)
    listed = ", ".join(paths[:SHOWN])
    listed += f" and {len(paths) - SHOWN} more" if len(paths) > SHOWN else ""
    other = (
        "divide the parameters by FSDP2, or consolidate the state on one rank after the other, and there in a plain "
        "optimizer of all parameters"
    )
    give = _advise_giving(optimizer, apart, listed)
    return (
        f"{what}, which would be lost; {give}, if every rank holds all of that state, else {other}"
    )


def _advise_giving(optimizer: Optimizer, apart: Sequence[Inner], listed: str) -> str:
    """What to give instead of `optimizer`: its inner optimizers `apart`, whose expressions are in `listed`; and
    `optimizer`, too, if its parameters are none of theirs.

    For parameters that both have, it may have additional state, as Lookahead has slow weights.
    """
    trained = _list_trained([optimizer])
    is_separate = trained.isdisjoint(_list_trained(inner.optimizer for inner in apart))
    if trained and is_separate:
        return f"give [optimizer, {listed}]"
    added = _list_added(optimizer)
    if added or any(optimizer.state.values()):
        return _advise_twice(type(optimizer).__name__, listed, added)
    return (
        f"give [{listed}] of it, as long as {type(optimizer).__name__} has nothing in its own state"
    )


def _advise_twice(kind: str, listed: str, added: Sequence[str]) -> str:
    """The advice for an optimizer that has state in addition to the state of the listed inner ones."""
    rest = f"; keep {', '.join(map(repr, added))} as an option of a group" if added else ""
    inner = f"save twice, and load twice, as {kind} has its own state too: [{listed}] of it under one path"
    # "Give" is left out, as the sentence already says what to do.
    outer = _advise_plain("optimizer").removeprefix("give ")
    return f"{inner}, and under another {outer}{rest}"


def _list_trained(optimizers: Iterable[Optimizer]) -> set[int]:
    """The ids of the parameters of the optimizers' groups."""
    found: set[int] = set()
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            found |= {id(parameter) for parameter in group["params"]}
    return found


def _list_added(optimizer: Optimizer) -> list[str]:
    """The keys of an optimizer's state dict besides state and groups; none if it cannot be made."""
    with contextlib.suppress(CheckpointError):
        return _list_extra_keys(optimizer, "optimizer")
    return []


def _check_adds_nothing(optimizer: Optimizer, spelled: str, wrapped: str) -> None:
    """Raise CheckpointError for an optimizer whose state dict has more than state and groups.

    `spelled` is the expression of the optimizer, `wrapped` of an inner one whose state it shares, "" if there is none.
    """
    extra = _list_extra_keys(optimizer, spelled)
    if not extra:
        return
    kind = type(optimizer).__name__
    keys = ", ".join(map(repr, extra))
    if wrapped:
        what = (
            f"{kind} keeps {keys} besides the state of its {wrapped.removeprefix('optimizer.')!r}"
        )
        fix = f"give {wrapped}, and keep the rest as an option of a group in its param_groups"
    else:
        what = f"{kind} keeps {keys} in its state dict besides what its state and param_groups hold"
        fix = f"keep the rest as an option of a group in its param_groups, and {_advise_plain(spelled)}"
    raise CheckpointError(f"{what}, which would be lost; {fix}")


def _list_extra_keys(optimizer: Optimizer, spelled: str) -> list[str]:
    """The keys of a state dict that torch's own lacks. Raises CheckpointError if there is no state dict."""
    is_torchs = getattr(optimizer.state_dict, "__func__", None) is Optimizer.state_dict
    if is_torchs and not any(getattr(optimizer, hooks, None) for hooks in HOOKS):
        return []
    try:
        found: object = optimizer.state_dict()
    except Exception as error:
        kind = type(optimizer).__name__
        what = f"{kind}.state_dict() raises {word_error(error)}"
        fix = _advise_plain(spelled)
        raise CheckpointError(f"{what}, so the state that it keeps is not known; {fix}") from error
    if not isinstance(found, Mapping):
        what = f"{type(optimizer).__name__}.state_dict() gives {type(found).__name__}, not a dict"
        unknown = "so the state that it keeps is not known"
        raise CheckpointError(f"{what}, {unknown}; {_advise_plain(spelled)}")
    # The state dict of a wrapper may repeat what the optimizers inside it hold.
    inner = [each.optimizer for each in list_inner(optimizer)]
    return sorted(map(str, _find_added(found, [optimizer, *inner])))


def _find_added(found: Mapping[Any, Any], holders: Sequence[Optimizer]) -> set[object]:
    """The keys in a state dict, in its state and in its groups that these optimizers do not hold."""
    added = set(found) - set(STANDARD)
    for part in STANDARD:
        known = chain.from_iterable(_list_keys(getattr(each, part)) for each in holders)
        added |= set(_list_keys(found.get(part))).difference(known)
    return added


def _list_keys(held: object) -> list[object]:
    """The keys of all dicts in a list of groups, or in a mapping of parameters' state."""
    dicts: object = held.values() if isinstance(held, Mapping) else held
    if not isinstance(dicts, Iterable):
        return []
    return [*chain.from_iterable(each for each in dicts if isinstance(each, Mapping))]


def _advise_plain(spelled: str) -> str:
    """The advice that always works: give a plain optimizer with only the state and the groups."""
    plain = f"torch.optim.Optimizer({spelled}.param_groups, {{}})"
    return f"give plain = {plain} with plain.state = {spelled}.state"
