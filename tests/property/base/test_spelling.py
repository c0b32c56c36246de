"""Names that were spelled the British way are found, with a warning that says what to write."""

from __future__ import annotations

import numpy as np
import pytest

import shardmath as sm
from shardmath import buffers, formats, transforms


@pytest.mark.parametrize(
    ("module", "former", "now"),
    [
        (sm, "recognise", "recognize"),
        (sm, "Relabelling", "Relabeling"),
        (transforms, "Quantise", "Quantize"),
        (transforms, "Dequantise", "Dequantize"),
        (transforms, "Requantise", "Requantize"),
    ],
)
def test_former_names(module: object, former: str, now: str) -> None:
    with pytest.warns(DeprecationWarning, match=rf"\.{former} is .*\.{now}$") as warned:
        found = getattr(module, former)
    assert found is getattr(module, now)
    assert warned[0].filename == __file__


def test_methods_of_formats() -> None:
    mx = formats.MXFP8()
    x = np.arange(32, dtype=np.float32).reshape(1, 32)
    with pytest.warns(DeprecationWarning, match="MXFP8.quantise is MXFP8.quantize$"):
        parts = mx.quantise(x)  # type: ignore[attr-defined]
    with pytest.warns(DeprecationWarning, match="MXFP8.dequantise is MXFP8.dequantize$") as warned:
        numbers = mx.dequantise(*parts)  # type: ignore[attr-defined]
    assert (numbers == mx.dequantize(*mx.quantize(x))).all()
    assert warned[0].filename == __file__


def test_parameters_of_buffers() -> None:
    with pytest.warns(DeprecationWarning, match="Param.quantised is Param.quantized$") as warned:
        made = buffers.Param("w", (4,), quantised="mxfp8")  # type: ignore[call-arg]
    assert warned[0].filename == __file__
    assert made == buffers.Param("w", (4,), quantized="mxfp8")
    with pytest.warns(DeprecationWarning, match="Param.quantised is"):
        assert made.quantised == "mxfp8"  # type: ignore[attr-defined]
