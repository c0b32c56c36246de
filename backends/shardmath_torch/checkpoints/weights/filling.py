"""Filling: a module's weights from any checkpoint.

1. Names meet under one of a parameter's names, or as `names` say, or as transformers would convert the checkpoint
   (`converted`). Values are cast to the module's types.
2. What is stored as data and scales is dequantised by each rank as it arrives (`quantised`), whatever the layout.
3. All that can be wrong is known before data are read, but for checksums; a module is filled last, and then whole.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

from torch import Tensor, nn

from shardmath.layouts.algebra.mesh import Mesh
from shardmath.layouts.edits import cast
from shardmath.layouts.layout import Layout
from shardmath.values.formats.format import Format
from shardmath_torch.checkpoints.checkpoint import check_names, load
from shardmath_torch.checkpoints.files.places import CheckpointError
from shardmath_torch.checkpoints.files.steps import on_all
from shardmath_torch.checkpoints.loading import has_same_bytes
from shardmath_torch.checkpoints.opening import open_checkpoint
from shardmath_torch.checkpoints.states.memory import fill
from shardmath_torch.checkpoints.states.modules import (
    Model,
    agree_on_model,
    check_one_value,
    check_slots,
)
from shardmath_torch.checkpoints.stored import Checkpoint
from shardmath_torch.checkpoints.weights.converted import add_converted
from shardmath_torch.checkpoints.weights.dequantising import dequantise
from shardmath_torch.checkpoints.weights.quantised import (
    QuantisedRead,
    check_format,
    find_scales,
    pair,
    say_scaled,
)
from shardmath_torch.groups.agreement.gather import shared
from shardmath_torch.groups.compat import Group, rank_or_0
from shardmath_torch.moves.observing.bars import Progress

__all__ = ["load_weights"]


class _Weights(NamedTuple):
    """What is to be read: the checkpoint, layouts of its types, stored names, and what has scales, by name in the
    module; scales have names of their own."""

    checkpoint: Checkpoint
    layouts: dict[str, Layout]
    stored: dict[str, str]
    quantised: dict[str, QuantisedRead]

    def add(self, one: QuantisedRead) -> None:
        """A tensor that is read as data and scales."""
        self.quantised[one.name] = one
        self.layouts.update(one.reads())
        self.stored[one.key] = one.stored_scales


def load_weights(
    path: str | os.PathLike[str],
    module: nn.Module,
    *,
    names: Mapping[str, str] | None = None,
    format: Format | None = None,
    mesh: Mesh | None = None,
    group: Group | None = None,
    progress: Progress | None = None,
    verify: bool = True,
) -> None:
    """Fills the module's parameters and persistent buffers, in place, from any checkpoint that `load` reads.

    `names` says, as {name in the module: stored name}, what is stored under another name. A parameter with several
    names is found under any of them. What transformers saves of a model of its own under other names, or of a stack one
    by one, is found as it is saved. Values are cast to the module's types; uint8 and types of 8 or 4 bits are taken
    for each other as bytes.

    `format` says what stands in a checkpoint of quantised weights: where `NAME` is of the format's type and there is
    `NAME_scale_inv` or `NAME_scale`, and the module's type is another, the numbers that both stand for are filled in.
    Each rank reads its own part and dequantises it; layouts may cut blocks.

    Collective over the group; raises CheckpointError on every rank for what is missing or has another shape, where
    `names` are not the same on all ranks, for numbers with scales that no `format`, or another, can read, and for
    parameters and buffers that have a part of their memory in common. `mesh` is as in `state_of`, `progress` and
    `verify` as in `load`.
    """
    with shared(group):
        model = agree_on_model(module, mesh, group)
        match = partial(_match, path, module, model, names, format)
        weights = on_all("match its weights", match, group, claim=_describe)
        checkpoint, layouts, stored, quantised = weights
        found = load(
            checkpoint, layouts, names=stored, group=group, progress=progress, verify=verify
        )
        on_all("dequantise what it has found", partial(_dequantise, quantised, found), group)
        on_all("compare what it has found", partial(check_one_value, model, found), group)
        on_all("fill the module", partial(_fill, model, found), group)


def _match(
    path: str | os.PathLike[str],
    module: nn.Module,
    model: Model,
    names: Mapping[str, str] | None,
    format: Format | None,
) -> _Weights:
    """What is to be read. Raises CheckpointError for all that can be known before data are."""
    check_slots(model)
    check_names(names)
    check_format(format)
    checkpoint = _complete(open_checkpoint(path), module, model, names or {}, format)
    weights = _Weights(checkpoint, {}, {}, {})
    for name, slot in model.slots.items():
        stored = _find_weight(weights.checkpoint, model.names[name], names or {})
        weights.stored[name] = stored
        weights.layouts[name] = _choose_type(slot.layout, weights.checkpoint[stored].dtype)
        one = _find_quantised(weights, name, slot.layout, format)
        if one is not None:
            weights.add(one)
    return weights


def _complete(
    found: Checkpoint,
    module: nn.Module,
    model: Model,
    names: Mapping[str, str],
    format: Format | None,
) -> Checkpoint:
    """The checkpoint with what transformers would make of it, if it lacks something that the module has."""
    if all(_find_weight(found, model.names[name], names) in found for name in model.slots):
        return found
    shapes = {name: (slot.layout.shape, slot.layout.dtype) for name, slot in model.slots.items()}
    return add_converted(found, module, shapes, format)


def _choose_type(layout: Layout, stored: str) -> Layout:
    """The layout of the type that is read, which is cast then; bytes are not."""
    return layout if has_same_bytes(layout.dtype, stored) else cast(layout, stored)


def _find_quantised(
    weights: _Weights, name: str, layout: Layout, format: Format | None
) -> QuantisedRead | None:
    """The tensor with its scales; None where it has none, or is wanted as it is stored."""
    checkpoint = weights.checkpoint
    stored = weights.stored[name]
    scales = find_scales(checkpoint, stored)
    if scales is None or has_same_bytes(layout.dtype, checkpoint[stored].dtype):
        return None
    if format is None:
        raise CheckpointError(say_scaled(checkpoint, name, layout, stored, scales))
    return pair(checkpoint, name, layout, stored, scales, format)


def _describe(weights: _Weights) -> dict[str, str]:
    """What has to be the same on all ranks: the checkpoint, and what goes where."""
    said = {"the checkpoint": weights.checkpoint.digest}
    for name, stored in weights.stored.items():
        said[f"the source of {name!r}"] = repr(stored)
    for name, one in weights.quantised.items():
        said[f"the format of {name!r}"] = repr(one.format)
    return said


def _find_weight(found: Checkpoint, names: list[str], renamed: Mapping[str, str]) -> str:
    """The stored name of a parameter: what is said of one of its names, or the first of them that is there."""
    told = [renamed[name] for name in names if name in renamed]
    candidates = [*told, *names]
    return next((name for name in candidates if name in found), candidates[0])


def _dequantise(quantised: Mapping[str, QuantisedRead], found: dict[str, Tensor]) -> None:
    """Puts numbers in the place of data, tensor by tensor, and drops the scales."""
    rank = rank_or_0()
    for name, one in quantised.items():
        # A rank that is not on a tensor's mesh has found nothing of it.
        scales = found.pop(one.key, None)
        if scales is not None:
            found[name] = dequantise(one, found[name], scales, rank)


def _fill(model: Model, found: Mapping[str, Tensor]) -> None:
    for name, value in found.items():  # without a DTensor of other ranks' mesh
        fill(model.slots[name].local, value)
