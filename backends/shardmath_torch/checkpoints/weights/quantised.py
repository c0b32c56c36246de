"""Quantised: stored tensors of few bits, the scales beside them, and what of both a rank reads.

1. The scales of `NAME` are stored as `NAME_scale_inv` (DeepSeek, transformers) or `NAME_scale` (vLLM). Both multiply.
2. A rank reads of the data what it has of the tensor, and the scales of all blocks of which that has some. Files have
   everything, so a layout may cut blocks anywhere.
3. Data are read as bytes. Scales that a format has as float32 are read as what they are stored as, and converted:
   powers of two may be stored in a byte (E8M0), under its own name or as uint8.
4. Without the format, numbers of few bits would be taken without their scales. That is an error.
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

__all__ = ["E8M0", "QuantisedRead", "check_format", "find_scales", "pair", "say_scaled"]

SUFFIXES = "_scale_inv", "_scale"
"""What scales are called, behind the name of their data."""

E8M0 = "float8_e8m0fnu"
BYTES = E8M0, "uint8"
"""What scales that are bytes may be stored as."""
NUMBERS = "float32", "bfloat16", "float16", *BYTES
"""What scales of float32 may be stored as."""


class QuantisedRead(NamedTuple):
    """A tensor that is stored as data and scales: its layout in the module, and the layouts of what is read."""

    name: str
    format: Format
    layout: Layout
    data: Layout
    scales: Layout
    stored_scales: str

    @property
    def key(self) -> str:
        """Under which name the scales are loaded, beside the names of the module."""
        return f"scales of {self.name}"

    def reads(self) -> Iterator[tuple[str, Layout]]:
        """What is loaded, by name."""
        yield self.name, self.data
        yield self.key, self.scales


def check_format(format: object) -> None:
    """Raises CheckpointError for a format that cannot be read from a tensor and its scales."""
    if format is None:
        return
    if not isinstance(format, Format):
        fix = "give one of shardmath.formats, such as formats.FP8Blocks()"
        raise CheckpointError(f"format={shown(format)} is no format; {fix}")
    if len(format.parts) != 2:
        names = ", ".join(part.name for part in format.parts)
        what = (
            f"{format.name} stores {names}, and a checkpoint's tensor has one of scales beside it"
        )
        raise CheckpointError(f"{what}; load them with smt.load, and dequantise")


def find_scales(checkpoint: Checkpoint, stored: str) -> str | None:
    """The stored name of the scales of what is stored under that name; None where it has none."""
    dtype = checkpoint[stored].dtype
    # No format has integers: they are found so that they are not taken for numbers.
    if dtype != "int8" and not has_same_bytes("uint8", dtype):
        return None
    names = (stored + suffix for suffix in SUFFIXES)
    return next((name for name in names if name in checkpoint), None)


def say_scaled(checkpoint: Checkpoint, name: str, layout: Layout, stored: str, scales: str) -> str:
    """What is wrong where no format says what data and scales stand for."""
    what = f"{name!r} is {layout.dtype} in the module, and {checkpoint[stored].dtype} in the checkpoint"
    fix = "give format=, such as shardmath.formats.FP8Blocks() for tiles of 128 x 128"
    return f"{what}, with scales in {scales!r}; {fix}"


def pair(
    checkpoint: Checkpoint, name: str, layout: Layout, stored: str, scales: str, format: Format
) -> QuantisedRead:
    """The tensor that is stored under these two names. Raises CheckpointError where they do not fit the format."""
    data_part, scale_part = format.parts
    data = checkpoint[stored]
    found = checkpoint[scales]
    fix = "give the format that the checkpoint has"
    if not has_same_bytes(data.dtype, data_part.kind):
        what = f"{name!r} is stored as {data.dtype}, and {format.name} has {data_part.kind}"
        raise CheckpointError(f"{what}; {fix}")
    expected = format.scale_shape(data.shape)
    if found.shape != expected:
        what = f"{scales!r} has shape {found.shape}, and {format.name} has scales {expected}"
        raise CheckpointError(f"{what} of a tensor of shape {data.shape}; {fix}")
    as_bytes = scale_part.dtype == "uint8"
    if found.dtype not in (BYTES if as_bytes else NUMBERS):
        what = f"{scales!r} is stored as {found.dtype}, and {format.name} has {scale_part.kind}"
        raise CheckpointError(f"{what}; {fix}")
    scale_layout = format.scale_layout(layout, name, duplicated=True)
    # Bytes are read as bytes; numbers as they are stored, and converted then.
    read_as = scale_part.dtype if as_bytes else found.dtype
    return QuantisedRead(
        name, format, layout, cast(layout, data_part.dtype), cast(scale_layout, read_as), scales
    )
