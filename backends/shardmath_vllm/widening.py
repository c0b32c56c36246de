"""Widening: tensors that engines store in a wider type than they are sent in.

1. vLLM makes some tensors wider once they are loaded, and never takes them back: on processors with AMX, biases of
   small linears. Its loaders widen what they are given, which loses nothing, and so does a refit.
2. Nothing else is cast at this end: what would lose something is an error when ranks meet.
3. A tensor has one type on all workers.

>>> from shardmath.recordings.pieces import Piece
>>> bias = Native("qkv.bias", (2,), "float32", (Piece("q.bias", 0, 0, ((2, 1, 1),)),), "views", "")
>>> recorded = sm.Recorded((("q.bias", (2,), "bfloat16"),), (bias,))
>>> stored = find_stored(recorded.shapes, [recorded])
>>> stored
{'q.bias': ((2,), 'float32')}
>>> read_as(recorded, stored).shapes == stored
True
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

import shardmath as sm
from shardmath.base.errors import StoreError
from shardmath.recordings.recorded import Native
from shardmath.storage.stored import Shapes

__all__ = ["check_types", "find_stored", "read_as"]

WIDER = frozenset({("bfloat16", "float32"), ("float16", "float32")})
"""Types, and wider ones that have all of their numbers."""

SHOWN = 5
"""Tensors that a message lists."""


def check_types(recorded: sm.Recorded) -> None:
    """Raise StoreError with all tensors that are stored in a type that has not all of their numbers."""
    shapes = recorded.shapes
    faults = []
    for name, native in _list_pairs(recorded):
        _, served = shapes[name]
        if served != native.dtype and (served, native.dtype) not in WIDER:
            faults.append(f"{name!r} comes as {served}, {native.name!r} is {native.dtype}")
    if faults:
        listed = "\n".join(faults[:SHOWN])
        raise StoreError(
            f"{len(faults)} tensors are not of the engine's types\n{listed}\n"
            f"say which engines get: dtype= of TrainerInfo or of read_megatron, served= of a Source"
        )


def _list_pairs(recorded: sm.Recorded) -> Iterator[tuple[str, Native]]:
    """Each tensor whose numbers are stored, and what stores them."""
    for native in recorded.natives:
        # What a function makes is of the type that it is stored in.
        parts = () if native.function else native.pieces
        for name in dict.fromkeys(piece.tensor for piece in parts):
            yield name, native


def find_stored(
    served: Mapping[str, tuple[tuple[int, ...], str]], workers: Iterable[sm.Recorded]
) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype of each tensor as workers store it. Raises StoreError where two store it otherwise."""
    first: dict[str, Native] = {}
    for recorded in workers:
        for name, native in _list_pairs(recorded):
            other = first.setdefault(name, native)
            if other.dtype != native.dtype:
                raise StoreError(
                    f"{name!r} is stored as {other.dtype} in {other.name!r} of one worker, and as {native.dtype} "
                    f"in {native.name!r} of another; have engines run on processors of one kind"
                )
    stored = dict(served)
    for name, native in first.items():
        shape, _ = served[name]
        stored[name] = shape, native.dtype
    return stored


def read_as(recorded: sm.Recorded, stored: Shapes) -> sm.Recorded:
    """The same of tensors that have these types."""
    tensors = [(name, shape, stored[name][1]) for name, shape, _ in recorded.tensors]
    return replace(recorded, tensors=tuple(tensors))
