"""Filling: a module's weights from any checkpoint.

1. A parameter is found under one of its names, as `names` says, or as transformers would convert the checkpoint
   (`converted`). Values are cast to the module's dtypes.
2. Tensors stored as data and scales are dequantized by each rank while it loads (`quantized`), under any layout.
3. All errors except checksums are found before data are read; the module is filled last, with all tensors.
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
from shardmath_torch.checkpoints.files.json_text import shown
from shardmath_torch.checkpoints.files.places import CheckpointError
from shardmath_torch.checkpoints.files.steps import on_all
from shardmath_torch.checkpoints.loading import has_same_bytes
from shardmath_torch.checkpoints.opening import check_one_model, open_checkpoint
from shardmath_torch.checkpoints.states.memory import fill
from shardmath_torch.checkpoints.states.modules import (
    Model,
    agree_on_model,
    call_load_hooks,
    check_one_value,
    check_slots,
)
from shardmath_torch.checkpoints.stored import Checkpoint
from shardmath_torch.checkpoints.weights.converted import add_converted
from shardmath_torch.checkpoints.weights.dequantizing import dequantize
from shardmath_torch.checkpoints.weights.quantized import (
    QuantizedRead,
    check_format,
    find_scales,
    pair,
    say_scaled,
)
from shardmath_torch.groups.agreement.gather import shared
from shardmath_torch.groups.compat import Group, rank_or_0, untraced
from shardmath_torch.moves.observing.bars import Progress

__all__ = ["load_weights"]


class _Weights(NamedTuple):
    """The tensors to read for a module: the checkpoint, and by name in the module their layouts and stored names.

    Layouts have the stored dtypes; `quantized` has tensors with scales, which are listed under additional names.
    """

    checkpoint: Checkpoint
    layouts: dict[str, Layout]
    stored: dict[str, str]
    quantized: dict[str, QuantizedRead]

    def add(self, read: QuantizedRead) -> None:
        """Add the data and the scales of a quantized tensor (`read`) to the tensors to read, the scales under the
        additional name `read.key`."""
        self.quantized[read.name] = read
        self.layouts.update(read.reads())
        self.stored[read.key] = read.stored_scales


@untraced
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
    """Load the parameters and persistent buffers of `module`, in place, from `path`: safetensors files of Hugging Face,
    or a checkpoint by `save` or torch.distributed.checkpoint. `names` maps names in the module to stored names, where
    they differ; `format` is the format of quantized weights, and `verify` compares stored checksums.

    A parameter with several names is found under any of them; if `names` has some of them, only under the stored names
    that `names` gives for these. Tensors that transformers saves under other names, or
    unstacked, are found as it saves them. Values are cast to the module's dtypes; uint8 and FP8 or FP4 are copied as
    bytes into each other.

    With `format`, if `NAME` is stored in the format's dtype, next to `NAME_scale_inv` or `NAME_scale`, and the module's
    dtype is another, the values of both together are filled in. Each rank reads its own part and dequantizes it;
    layouts may cut blocks.

    Collective over the group. Raises CheckpointError on every rank if a tensor is missing or has another shape, if
    `names` differ between ranks or have a name that the module lacks, if the folder has both a checkpoint and a model
    in Hugging Face's files, if a tensor has scales and no `format` fits, and
    if parameters and buffers partly share memory. `mesh` is as in `state_of`, `progress` and `verify` as in `load`.
    """
    with shared(group):
        model = agree_on_model(module, mesh, group)
        match = partial(_match_weights, path, module, model, names, format)
        weights = on_all("match its weights", match, group, claim=_claim_weights)
        checkpoint, layouts, stored, quantized = weights
        found = load(
            checkpoint, layouts, names=stored, group=group, progress=progress, verify=verify
        )
        on_all("dequantize what it has found", partial(_dequantize, quantized, found), group)
        on_all("compare what it has found", partial(check_one_value, model, found), group)
        on_all("fill the module", partial(_fill, module, model, found), group)


def _match_weights(
    path: str | os.PathLike[str],
    module: nn.Module,
    model: Model,
    names: Mapping[str, str] | None,
    format: Format | None,
) -> _Weights:
    """Find the stored tensor of each of the module's, and plan the reads. Raises CheckpointError for errors found
    before data are read."""
    check_slots(model)
    check_names(names)
    _check_here(names or {}, model)
    check_format(format)
    opened = open_checkpoint(path)
    check_one_model(path)
    checkpoint = _add_converted_if_needed(opened, module, model, names or {}, format)
    weights = _Weights(checkpoint, {}, {}, {})
    for name, slot in model.slots.items():
        stored = _find_weight(weights.checkpoint, model.names[name], names or {})
        weights.stored[name] = stored
        weights.layouts[name] = _layout_to_read(slot.layout, weights.checkpoint[stored].dtype)
        read = _find_quantized(weights, name, slot.layout, format)
        if read is not None:
            weights.add(read)
    return weights


def _add_converted_if_needed(
    checkpoint: Checkpoint,
    module: nn.Module,
    model: Model,
    names: Mapping[str, str],
    format: Format | None,
) -> Checkpoint:
    """The checkpoint, with the tensors that transformers would make of it if it lacks any of the module's."""
    found = (_find_weight(checkpoint, model.names[name], names) for name in model.slots)
    if all(stored_name in checkpoint for stored_name in found):
        return checkpoint
    shapes = {name: (slot.layout.shape, slot.layout.dtype) for name, slot in model.slots.items()}
    return add_converted(checkpoint, module, shapes, format)


def _layout_to_read(layout: Layout, stored: str) -> Layout:
    """The layout in the dtype that is read, to be cast later: the stored one, unless bytes are copied."""
    return layout if has_same_bytes(layout.dtype, stored) else cast(layout, stored)


def _find_quantized(
    weights: _Weights, name: str, layout: Layout, format: Format | None
) -> QuantizedRead | None:
    """The tensor with its scales; None if it has none, or if the module has the stored dtype."""
    checkpoint = weights.checkpoint
    stored = weights.stored[name]
    scales = find_scales(checkpoint, stored)
    if scales is None or has_same_bytes(layout.dtype, checkpoint[stored].dtype):
        return None
    if format is None:
        raise CheckpointError(say_scaled(checkpoint, name, layout, stored, scales))
    return pair(checkpoint, name, layout, stored, scales, format)


def _claim_weights(weights: _Weights) -> dict[str, str]:
    """Facts about a load that must be the same on all ranks: the checkpoint, stored names, and formats."""
    claims = {"the checkpoint": weights.checkpoint.digest}
    for name, stored in weights.stored.items():
        claims[f"the source of {name!r}"] = repr(stored)
    for name, read in weights.quantized.items():
        claims[f"the format of {name!r}"] = repr(read.format)
    return claims


def _check_here(renamed: Mapping[str, str], model: Model) -> None:
    """Raise CheckpointError for a key of `renamed` that is not a name in the module."""
    here = {name for first in model.slots for name in model.names[first]}
    for name, stored in renamed.items():
        if name not in here:
            what = f"names= has {shown(name)}: {shown(stored)}, but the module has no {shown(name)}"
            fix = f"give names of its parameters and persistent buffers, such as {shown(sorted(here)[:8])}"
            raise CheckpointError(f"{what}; {fix}")


def _find_weight(checkpoint: Checkpoint, names: list[str], renamed: Mapping[str, str]) -> str:
    """The stored name of a parameter: the first that exists of its `renamed` names, or of its own names if none is
    renamed; if none exists, the first of all."""
    # Once a name is renamed, values under the others are not meant: the average of the weights, for example, is stored
    # besides the weights.
    candidates = [renamed[name] for name in names if name in renamed] or names
    return next((name for name in candidates if name in checkpoint), candidates[0])


def _dequantize(quantized: Mapping[str, QuantizedRead], found: dict[str, Tensor]) -> None:
    """Replace data by values, tensor by tensor, and drop the scales."""
    rank = rank_or_0()
    for name, read in quantized.items():
        # A rank that is not on a tensor's mesh has loaded neither data nor scales.
        scales = found.pop(read.key, None)
        if scales is not None:
            found[name] = dequantize(read, found[name], scales, rank)


def _fill(module: nn.Module, model: Model, found: Mapping[str, Tensor]) -> None:
    for name, value in found.items():  # without DTensors on meshes that lack this rank
        fill(model.slots[name].local, value)
    call_load_hooks(module)
