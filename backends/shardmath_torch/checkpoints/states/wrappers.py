"""Wrappers: optimizers in optimizers, and what would be lost of either if only state and groups were saved.

1. An optimizer may have others as attributes, in containers however deep, which may have others. Where one has state
   of its own, it has to be given instead. Containers are looked into where they keep what they have, and run nothing.
2. Other objects are not looked into: an attribute that is a trainer, a monitor or a schedule has optimizers, and is no
   part of one.
3. What a state dict has beside state and groups is nowhere else. Only a class that makes its own, or a hook, adds any;
   they are asked.

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
"""What an optimizer has by torch's own state dict."""

SHOWN = 8
"""Optimizers that an error lists."""

BY_INDEX: tuple[Any, ...] = (list, tuple, deque)
WITHOUT_INDEX: tuple[Any, ...] = (set, frozenset)
CONTAINERS = (*BY_INDEX, *WITHOUT_INDEX, UserList, Mapping, SimpleNamespace)
INDEXED, ENUMERATED, FIELD = "{}[{!r}]", "[*{}][{}]", "{}.{}"
"""How what a container has is spelled, by what the container is and a key."""


class Inner(NamedTuple):
    """An optimizer that another one has: how it is reached from the first, and who has it under which attribute."""

    path: str
    holder: Optimizer
    attribute: str
    optimizer: Optimizer


class _Step(NamedTuple):
    """How a value is reached from where another one is: of many values, few are spelled."""

    before: _Step | None
    form: str
    key: object


_Part: TypeAlias = tuple[str, object, object]
"""How something in a container is spelled, the key of that, and what it is."""


def list_inner(optimizer: Optimizer) -> Iterator[Inner]:
    """The optimizers that attributes are, or have in containers however deep, and theirs in turn."""
    yield from _list_inner(optimizer, "optimizer", {id(optimizer): optimizer})


def _list_inner(holder: Optimizer, start: str, seen: dict[int, object]) -> Iterator[Inner]:
    """The same, with paths that begin with `start`; whatever is `seen` is passed over."""
    for attribute, value in list(vars(holder).items()):
        if attribute in STANDARD:
            continue
        for step, found in _walk(value, seen):
            path = _spell(step, f"{start}.{attribute}")
            yield Inner(path, holder, attribute, found)
            yield from _list_inner(found, path, seen)


def _spell(step: _Step | None, start: str) -> str:
    """The expression that the last step is of."""
    steps = []
    while step is not None:
        steps.append(step)
        step = step.before
    for one in reversed(steps):
        start = one.form.format(start, one.key)
    return start


def _walk(value: object, seen: dict[int, object]) -> Iterator[tuple[_Step | None, Optimizer]]:
    """The optimizers in a value that are not yet seen, and how each is reached."""
    left: list[tuple[_Step | None, object]] = [(None, value)]
    while left:
        step, one = left.pop()
        if id(one) in seen:
            continue
        if _is_optimizer(one):
            seen[id(one)] = one
            yield step, one
        elif _is_container(one):
            # Kept, so that nothing else comes to have its id.
            seen[id(one)] = one
            left += reversed(_list_steps(step, one))


def _list_steps(step: _Step | None, holder: object) -> list[tuple[_Step, object]]:
    """What may have optimizers of what is there, and how it is reached."""
    steps: list[tuple[_Step, object]] = []
    for form, key, part in _list_parts(holder):
        if _is_optimizer(part) or _is_container(part):
            steps.append((_Step(step, form, key), part))
    return steps


def _is_optimizer(value: object) -> TypeGuard[Optimizer]:
    """Whether it is one by its type: proxies of what is gone raise where they are asked for their class."""
    return issubclass(type(value), Optimizer)


def _is_container(value: object) -> bool:
    kind = type(value)
    return issubclass(kind, CONTAINERS) or dataclasses.is_dataclass(kind)


def _list_parts(value: object) -> Iterator[_Part]:
    """What a value has. Its own methods are not called, which may make values without end, or read files.

    Of each there is a list at once: other threads may add to what helpers have.
    """
    yield from _list_elements(value)
    held = dict(value) if isinstance(value, MappingProxyType) else value
    if isinstance(held, dict):
        yield from ((INDEXED, key, one) for key, one in list(dict.items(held)))
        yield from ((ENUMERATED, i, key) for i, key in enumerate(list(dict.keys(held))))
    yield from ((FIELD, name, one) for name, one in _list_fields(value))


def _list_elements(value: object) -> Iterator[_Part]:
    for kind in (*BY_INDEX, *WITHOUT_INDEX):
        if isinstance(value, kind):
            form = INDEXED if kind in BY_INDEX else ENUMERATED
            yield from ((form, i, one) for i, one in enumerate(list(kind.__iter__(value))))


def _list_fields(value: object) -> Iterator[tuple[str, object]]:
    """The attributes that an object has of its own, in a dict or in slots: properties are not asked."""
    yield from list(_get_own_dict(value).items())
    slots = {name: slot for kind in type(value).__mro__ for name, slot in vars(kind).items()}
    for name, slot in slots.items():
        if isinstance(slot, MemberDescriptorType) and name != "__dict__":
            # It may be empty.
            with contextlib.suppress(AttributeError):
                yield name, slot.__get__(value)


def _get_own_dict(value: object) -> dict[str, object]:
    """Where it has its attributes, not by what its class may say of that."""
    for kind in type(value).__mro__:
        slot = vars(kind).get("__dict__")
        if slot is not None:
            kinds = GetSetDescriptorType, MemberDescriptorType
            return slot.__get__(value) if isinstance(slot, kinds) else {}
    return {}


def check_keeps_own(optimizer: Optimizer, given: Sequence[Optimizer]) -> None:
    """Raise CheckpointError for an optimizer that keeps state in others, of its own, that were not given, that makes it
    when it is asked, or that keeps something besides the state of parameters, itself or in one whose state it has."""
    # Kept: of state that is made when it is asked for, the id would soon be of another.
    states = [one.state for one in given]
    seen = {id(state) for state in states}
    inner = list(list_inner(optimizer))
    # Some wrappers have the state of what they wrap as theirs: then none of it is lost.
    apart = [one for one in inner if id(one.optimizer.state) not in seen]
    if apart:
        raise CheckpointError(_word_apart(optimizer, apart))
    _check_keeps_state(optimizer)
    shared = [one for one in inner if one.optimizer.state is optimizer.state]
    # Of the innermost first: its wrappers say what it says.
    for one in reversed(shared):
        _check_adds_nothing(one.optimizer, one.path, "")
    _check_adds_nothing(optimizer, "optimizer", shared[0].path if shared else "")


def _check_keeps_state(optimizer: Optimizer) -> None:
    """Raise CheckpointError for an optimizer of which nothing can be filled."""
    if optimizer.state is not optimizer.state:
        what = f"{type(optimizer).__name__} makes its state anew whenever it is asked for it"
        fix = "keep the state in one dict that its attribute state always gives, or in a plain optimizer"
        raise CheckpointError(f"{what}, and nothing that is loaded would stay in it; {fix}")


def _word_apart(optimizer: Optimizer, apart: Sequence[Inner]) -> str:
    """What is wrong with optimizers that have their state in others, and what to give instead."""
    holder, attribute, one = apart[0].holder, apart[0].attribute, apart[0].optimizer
    kind, of = type(holder).__name__, type(one).__name__
    what = f"{kind} keeps state in an optimizer of its own, the {of} in its attribute {attribute!r}"
    # Those inside of one that is given are looked at when it is.
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
    give = _word_giving(optimizer, apart, listed)
    return f"{what}, which would be lost; {give}, where every rank holds all of that state, else {other}"


def _word_giving(optimizer: Optimizer, apart: Sequence[Inner], listed: str) -> str:
    """What to give of an optimizer that has these others: it itself too, as far as it has parameters of its own.

    Of parameters that both have, it may have state beside that of the others, as Lookahead has slow weights.
    """
    own = _list_trained([optimizer])
    if own and not own & _list_trained(inner.optimizer for inner in apart):
        return f"give [optimizer, {listed}]"
    added = _find_added(optimizer)
    if added or any(optimizer.state.values()):
        return _word_twice(type(optimizer).__name__, listed, added)
    return (
        f"give [{listed}] of it, as long as {type(optimizer).__name__} has nothing in its own state"
    )


def _word_twice(kind: str, listed: str, added: Sequence[str]) -> str:
    """What to do with an optimizer of this kind, that has state of its own beside the state of those listed."""
    rest = f"; keep {', '.join(map(repr, added))} as an option of a group" if added else ""
    twice = f"save twice, and load twice, as {kind} has state of its own too: [{listed}] of it under one path"
    return f"{twice}, and under another {_word_plain('optimizer').removeprefix('give ')}{rest}"


def _list_trained(optimizers: Iterable[Optimizer]) -> set[int]:
    """The ids of the parameters of their groups."""
    found: set[int] = set()
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            found |= {id(parameter) for parameter in group["params"]}
    return found


def _find_added(optimizer: Optimizer) -> list[str]:
    """What the state dict of an optimizer has beside state and groups, as far as it gives one."""
    with contextlib.suppress(CheckpointError):
        return _find_more(optimizer, "optimizer")
    return []


def _check_adds_nothing(optimizer: Optimizer, spelled: str, wrapped: str) -> None:
    """Raise CheckpointError for an optimizer whose own state dict has more than state and groups.

    `spelled` is how the user reaches it, `wrapped` one whose state it has, "" for none.
    """
    more = _find_more(optimizer, spelled)
    if not more:
        return
    kind = type(optimizer).__name__
    keys = ", ".join(map(repr, more))
    if wrapped:
        what = f"{kind} keeps {keys} beside the state of its {wrapped.removeprefix('optimizer.')!r}"
        fix = f"give {wrapped}, and keep the rest as an option of a group in its param_groups"
    else:
        what = f"{kind} keeps {keys} in its state dict beside 'state' and 'param_groups'"
        fix = (
            f"keep the rest as an option of a group in its param_groups, and {_word_plain(spelled)}"
        )
    raise CheckpointError(f"{what}, which would be lost; {fix}")


def _find_more(optimizer: Optimizer, spelled: str) -> list[str]:
    """What the state dict has that torch's own has not. Raises CheckpointError where there is no state dict."""
    own = getattr(optimizer.state_dict, "__func__", None) is Optimizer.state_dict
    if own and not getattr(optimizer, "_optimizer_state_dict_post_hooks", None):
        return []
    try:
        found: object = optimizer.state_dict()
    except Exception as error:
        kind = type(optimizer).__name__
        what = f"{kind}.state_dict() raises {word_error(error)}"
        fix = _word_plain(spelled)
        raise CheckpointError(f"{what}, and what it keeps is not known; {fix}") from error
    if not isinstance(found, Mapping):
        what = f"{type(optimizer).__name__}.state_dict() gives {type(found).__name__}, not a dict"
        raise CheckpointError(f"{what}, and what it keeps is not known; {_word_plain(spelled)}")
    return sorted(str(key) for key in found if key not in STANDARD)


def _word_plain(spelled: str) -> str:
    """What always can be given in place of an optimizer: one that has nothing but its state and its groups."""
    plain = f"torch.optim.Optimizer({spelled}.param_groups, {{}})"
    return f"give plain = {plain} with plain.state = {spelled}.state"
