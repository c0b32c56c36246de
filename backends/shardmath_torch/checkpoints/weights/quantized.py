"""Quantized: stored tensors with scales, and the parts of both that a rank reads.

1. The scales of `NAME` are stored as `NAME_scale_inv` (DeepSeek, transformers) or `NAME_scale` (vLLM). Both multiply.
2. A rank reads the data of its part of the tensor, and the scales of all blocks that its part touches. Files have
   everything, so a layout may cut blocks anywhere.
3. Data are read as bytes. Scales that are float32 in the format are read in their stored dtype, and converted: powers
   of two may be stored in a byte (E8M0), labeled as that or as uint8.
4. Without the format, data would be taken without their scales. That raises.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from shardmath.layouts.edits import cast
from shardmath.layouts.layout import Layout
from shardmath.values.formats.format import Format
from shardmath_torch.checkpoints.files.json_text import shown
from shardmath_torch.checkpoints.files.places import CheckpointError
from shardmath_torch.checkpoints.loading import has_same_bytes
from shardmath_torch.checkpoints.stored import Checkpoint

__all__ = ["E8M0", "QuantizedRead", "check_format", "find_scales", "pair", "say_scaled"]

SUFFIXES = "_scale_inv", "_scale"
"""Suffixes of the names of scales, after the name of their data."""

E8M0 = "float8_e8m0fnu"
BYTES = E8M0, "uint8"
"""Stored dtypes of scales that are bytes in the format."""
NUMBERS = "float32", "bfloat16", "float16", *BYTES
"""Stored dtypes of scales that are float32 in the format."""


class QuantizedRead(NamedTuple):
    """A quantized tensor to read: its layout in the module, and the layouts in which its data and scales are read."""

    name: str
    format: Format
    layout: Layout
    data: Layout
    scales: Layout
    stored_scales: str

    @property
    def key(self) -> str:
        """The key of this tensor's scales in the dict of loaded tensors, where the tensor's quantized data has the key
        `name`."""
        return f"scales of {self.name}"

    def reads(self) -> Iterator[tuple[str, Layout]]:
        """Yield (name, layout) of the two tensors to load: the data, under the tensor's own name, and the scales, under
        `key`."""
        yield self.name, self.data
        yield self.key, self.scales


def check_format(format: object) -> None:
    """Raise CheckpointError unless `format` is None, or is a Format that stores a tensor as data and one tensor of
    scales."""
    if format is None:
        return
    if not isinstance(format, Format):
        fix = "give one of shardmath.formats, such as formats.FP8Blocks()"
        raise CheckpointError(f"format={shown(format)} is not a shardmath Format; {fix}")
    if len(format.parts) != 2:
        names = ", ".join(part.name for part in format.parts)
        what = f"format {format.name} stores a tensor as {names}, not as data and scales"
        fix = "load these with shardmath_torch.load, and dequantize them with shardmath_torch.dequantize"
        raise CheckpointError(f"{what}; {fix}")


def find_scales(checkpoint: Checkpoint, stored: str) -> str | None:
    """Return the name under which `checkpoint` has the scales of a quantized tensor, whose data it has under the name
    `stored`. Returns None if it has no such scales, or if the data's dtype is not int8, uint8, FP8 or FP4."""
    dtype = checkpoint[stored].dtype
    # int8 is not in a format; its scales are found so that it is not loaded without them.
    if dtype != "int8" and not has_same_bytes("uint8", dtype):
        return None
    names = (stored + suffix for suffix in SUFFIXES)
    return next((name for name in names if name in checkpoint), None)


def say_scaled(checkpoint: Checkpoint, name: str, layout: Layout, stored: str, scales: str) -> str:
    """Return the error message for a quantized tensor that was loaded without the argument `format=`. The module has it
    as `name`, with `layout`; the checkpoint has its data as `stored` and its scales as `scales`."""
    what = f"{name!r} is {layout.dtype} in the module, but {checkpoint[stored].dtype} in the checkpoint"
    fix = "give format=, such as shardmath.formats.FP8Blocks() for tiles of 128 x 128"
    return f"{what}, with scales in {scales!r}; {fix}"


def pair(
    checkpoint: Checkpoint, name: str, layout: Layout, stored: str, scales: str, format: Format
) -> QuantizedRead:
    """Return a description of how to read a quantized tensor, which has `name` and `layout` in the module. `stored` and
    `scales` are the names under which `checkpoint` has its quantized data and its scales.

    Raises CheckpointError if data and scales do not fit `format`.
    """
    data_part, scale_part = format.parts
    data = checkpoint[stored]
    scales_tensor = checkpoint[scales]
    fix = "give format= as the checkpoint was quantized"
    if not has_same_bytes(data.dtype, data_part.kind):
        what = f"{name!r} is stored as {data.dtype}, but format {format.name} has {data_part.kind}"
        raise CheckpointError(f"{what}; {fix}")
    expected = format.scale_shape(data.shape)
    if scales_tensor.shape != expected:
        has = f"{scales!r} has shape {scales_tensor.shape}"
        what = f"{has}, but format {format.name} has scales {expected}"
        raise CheckpointError(f"{what} of a tensor of shape {data.shape}; {fix}")
    as_bytes = scale_part.dtype == "uint8"
    if scales_tensor.dtype not in (BYTES if as_bytes else NUMBERS):
        has = f"{scales!r} is stored as {scales_tensor.dtype}"
        what = f"{has}, but format {format.name} has {scale_part.kind}"
        raise CheckpointError(f"{what}; {fix}")
    scale_layout = format.scale_layout(layout, name, duplicated=True)
    # Scales that are bytes are read as bytes; others in their stored dtype, and converted later.
    read_as = scale_part.dtype if as_bytes else scales_tensor.dtype
    return QuantizedRead(
        name, format, layout, cast(layout, data_part.dtype), cast(scale_layout, read_as), scales
    )
