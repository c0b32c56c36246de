"""Tensors quantized and read again on one core, beside torchao's own functions in the same run.

    python tests/bench/bench_formats.py [megabytes] [repeats]

Figures are GB of bfloat16 per second of a core: process CPU time of one thread, the best of the repeats. Functions of
shardmath write to tensors that are there; torchao's make theirs. Nothing is compiled.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import MXTensor
from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale
from torchao.quantization.granularity import PerBlock, PerRow, PerTensor
from torchao.quantization.quantize_.workflows.float8.float8_tensor import Float8Tensor

import shardmath_torch as smt
from shardmath.formats import FP8, MXFP8, NVFP4, Format, FP8Blocks
from tests.bench.bench_digest import best
from tests.bench.section import arguments, show

HEAD = ["format", "quantize", "torchao's", "dequantize", "torchao's"]
ROWS = 4096
MODES = {"floor": ScaleCalculationMode.FLOOR, "rceil": ScaleCalculationMode.RCEIL}
GRANULARITIES = {
    FP8(): PerTensor(),
    FP8("channel"): PerRow(),
    FP8Blocks(): PerBlock([128, 128]),
    FP8Blocks((1, 128)): PerBlock([1, 128]),
}
FORMATS: list[Format] = [
    MXFP8(),
    MXFP8(rounding="floor"),
    MXFP8("e5m2"),
    MXFP8(axis=-2),
    *GRANULARITIES,
    FP8Blocks(power_of_two=True),
    NVFP4(),
    NVFP4(two_d=True),
]

Peer: TypeAlias = Callable[[], torch.Tensor]


def find_peer(one: Format, tensor: torch.Tensor) -> Peer | None:
    """How torchao quantizes to the format; None where it does not."""
    if isinstance(one, MXFP8) and one.axis == -1:
        element = getattr(torch, one.element.dtype)
        return lambda: MXTensor.to_mx(tensor, element, 32, MODES[one.rounding])
    granularity = GRANULARITIES.get(one)  # type: ignore[call-overload]
    if granularity is not None:
        return lambda: Float8Tensor.from_hp(tensor, granularity=granularity)
    if one == NVFP4():
        # The largest magnitude of all is part of the work.
        return lambda: NVFP4Tensor.to_nvfp4(
            tensor, per_tensor_scale=per_tensor_amax_to_scale(tensor.abs().amax())
        )
    return None


def weigh(one: Format, tensor: torch.Tensor, repeats: int) -> list[str]:
    """A row of the table."""
    parts = smt.quantize(one, tensor)
    numbers = torch.empty_like(tensor)
    peer = find_peer(one, tensor)
    ways: list[Callable[[], object] | None] = [
        lambda: smt.quantize(one, tensor, out=parts),
        peer,
        lambda: smt.dequantize(one, parts, tensor.dtype, out=numbers),
        None if peer is None else peer().dequantize,
    ]
    rates = [
        "-" if way is None else f"{tensor.nbytes / best(way, repeats) / 1e9:.2f}" for way in ways
    ]
    return [one.name, *rates]


def main(megabytes: int = 64, repeats: int = 7, page: Path | None = None) -> None:
    """Weighs all formats and shows the table."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    tensor = torch.randn(ROWS, megabytes * 2**20 // 2 // ROWS).bfloat16()
    found = [weigh(one, tensor, repeats) for one in FORMATS]
    about = (
        f"Figures are GB of bfloat16 that one core converts per second, from a tensor of {megabytes} MB. torchao runs "
        f"without torch.compile."
    )
    show(page, "Quantized formats", about, HEAD, found)


if __name__ == "__main__":
    given = arguments(__doc__ or "", megabytes=64, repeats=7)
    main(given.megabytes, given.repeats, given.page)
