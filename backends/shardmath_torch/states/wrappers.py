"""Wrappers: optimizers in optimizers, and what would be lost of either if only state and groups were saved.

1. An optimizer may have others as attributes, in containers however deep, which may have others. Where one has state
   of its own, it has to be given instead.
2. What a state dict has beside state and groups is nowhere else. Only a class that makes its own, or a hook, adds any;
   they are asked.

>>> import torch
>>> from torch.optim import SGD
>>> outer = SGD([torch.ones(1)])
>>> outer.more = {"a": [SGD([torch.ones(1)])]}
>>> [one.path for one in list_inner(outer)]
["more['a'][0]"]
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch.optim import Optimizer

from shardmath_torch.files.places import CheckpointError

__all__ = ["Inner", "check_keeps_own", "list_inner"]

STANDARD = ("state", "param_groups")
"""What an optimizer has by torch's own state dict."""

SHOWN = 8
"""Optimizers that an error lists."""


class Inner(NamedTuple):
    """An optimizer that another one has: how it is reached from the first, and who has it under which attribute."""

    path: str
    holder: Optimizer
    attribute: str
    optimizer: Optimizer


def list_inner(optimizer: Optimizer) -> Iterator[Inner]:
    """The optimizers that attributes are, or have in lists, tuples and dicts however deep, and theirs in turn."""
    yield from _list_inner(optimizer, "", {id(optimizer)})


def _list_inner(holder: Optimizer, start: str, seen: set[int]) -> Iterator[Inner]:
    """The same; paths begin with `start`, and whatever is `seen` is passed over."""
    for attribute, value in vars(holder).items():
        if attribute in STANDARD:
            continue
        for keys, found in _walk(value, seen):
            inside = [f"[{key!r}]" for key in keys]
            path = start + attribute + "".join(inside)
            yield Inner(path, holder, attribute, found)
            yield from _list_inner(found, f"{path}.", seen)


def _walk(value: object, seen: set[int]) -> Iterator[tuple[tuple[object, ...], Optimizer]]:
    """The optimizers in a value that are not yet seen, and the keys that lead to each."""
    if not isinstance(value, Optimizer | list | tuple | dict) or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Optimizer):
        yield (), value
        return
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, one in items:
        for keys, found in _walk(one, seen):
            yield (key, *keys), found


def check_keeps_own(optimizer: Optimizer, given: Sequence[Optimizer]) -> None:
    """Raise CheckpointError for an optimizer that keeps state in others, of its own, that were not given, or something
    besides the state of parameters, itself or in one whose state it has."""
    seen = {id(one.state) for one in given}
    inner = list(list_inner(optimizer))
    # Some wrappers have the state of what they wrap as theirs: then none of it is lost.
    apart = [one for one in inner if id(one.optimizer.state) not in seen]
    if apart:
        raise CheckpointError(_word_apart(apart))
    shared = [one for one in inner if one.optimizer.state is optimizer.state]
    # Of the innermost first: its wrappers say what it says.
    for one in reversed(shared):
        _check_adds_nothing(one.optimizer, f"optimizer.{one.path}", "")
    _check_adds_nothing(optimizer, "optimizer", shared[0].path if shared else "")


def _word_apart(apart: Sequence[Inner]) -> str:
    """What is wrong with optimizers that have their state in others, and what to give instead."""
    holder, attribute, one = apart[0].holder, apart[0].attribute, apart[0].optimizer
    kind, of = type(holder).__name__, type(one).__name__
    what = f"{kind} keeps state in an optimizer of its own, the {of} in its attribute {attribute!r}"
    # Those inside of one that is given are looked at when it is.
    paths: list[str] = []
    for path in (inner.path for inner in apart):
        if not any(path.startswith(f"{outer}.") for outer in paths):
            paths.append(path)
    listed = ", ".join(f"optimizer.{path}" for path in paths[:SHOWN])
    listed += f" and {len(paths) - SHOWN} more" if len(paths) > SHOWN else ""
    give = f"give [{listed}] of it, where every rank holds all of that state"
    other = "else divide the parameters by FSDP2, or consolidate the state in a plain optimizer"
    return f"{what}, which would be lost; {give}, {other}"


def _check_adds_nothing(optimizer: Optimizer, spelled: str, wrapped: str) -> None:
    """Raise CheckpointError for an optimizer whose own state dict has more than state and groups.

    `spelled` is how the user reaches it, `wrapped` how it reaches one whose state it has, "" for none.
    """
    more = _find_more(optimizer, spelled)
    if not more:
        return
    kind = type(optimizer).__name__
    keys = ", ".join(map(repr, more))
    if wrapped:
        what = f"{kind} keeps {keys} beside the state of its {wrapped!r}"
        fix = f"give {spelled}.{wrapped}, and keep the rest as an option of a group in its param_groups"
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
        found = optimizer.state_dict()
    except Exception as error:
        kind = type(optimizer).__name__
        what = f"{kind}.state_dict() raises {type(error).__name__}: {error}"
        fix = _word_plain(spelled)
        raise CheckpointError(f"{what}, and what it keeps is not known; {fix}") from error
    return sorted(str(key) for key in found if key not in STANDARD)


def _word_plain(spelled: str) -> str:
    """What always can be given in place of an optimizer: one that has nothing but its state and its groups."""
    plain = f"torch.optim.Optimizer({spelled}.param_groups, {{}})"
    return f"give plain = {plain} with plain.state = {spelled}.state"
