"""Operations: what an operation of torch reads and writes, by its schema."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor

__all__ = ["CALLS_PYTHON", "GIVES_MEMORY", "find_written", "list_tensors", "makes_views"]

GIVES_MEMORY = {Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__dlpack__}
"""Functions that read memory outside of operations, or let others read it."""
CALLS_PYTHON = {Tensor.apply_, Tensor.map_, Tensor.map2_}
"""Functions that change their first tensor outside of operations, by a Python function of the elements of all tensors
that they get. Without data they do nothing."""


def find_written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors into which the torch operation `func` writes, among its arguments and in lists there."""
    written: list[Tensor] = []
    for i, name in _list_written(func):
        value = args[i] if i < len(args) else kwargs.get(name)
        written += list_tensors(value)
    return written


@functools.cache
def makes_views(func: Any) -> bool:
    """Whether all results of the torch operation `func` are views of its arguments."""
    results = [result.alias_info for result in func._schema.returns]
    return bool(results) and all(alias and not alias.is_write for alias in results)


@functools.cache
def _list_written(func: Any) -> tuple[tuple[int, str], ...]:
    """(position, name) of each argument into which the operation writes."""
    written = []
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written.append((i, argument.name))
    return tuple(written)


def list_tensors(values: object) -> Iterator[Tensor]:
    """Yield the tensors in `values`, an operation's arguments or results, and in collections there."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, Mapping):
        yield from list_tensors(values.values())
    elif isinstance(values, Iterable) and not isinstance(values, str):
        for value in values:
            yield from list_tensors(value)
