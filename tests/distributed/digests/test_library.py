"""torch computes the integers that numpy computes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from shardmath import from_ranges
from shardmath.base import dtypes as names
from shardmath.layouts.algebra.runs import identity
from shardmath.values.digests import weighing
from shardmath.values.digests.weighing import NUMPY, weigh
from shardmath_torch.groups import dtypes
from shardmath_torch.moves.digests.library import TORCH, see

SHAPES = [(), (3000,), (700, 3), (5, 7, 11), (2, 700, 2), (0, 4)]


def bits(shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    nbytes = int(np.prod(shape)) * names.itemsize(dtype)
    if not nbytes:
        return torch.empty(shape, dtype=dtypes.dtype_of(dtype))
    drawn = np.random.default_rng(len(shape)).integers(0, 256, nbytes, np.uint8)
    return torch.from_numpy(drawn).view(dtypes.dtype_of(dtype)).reshape(shape)


@pytest.mark.parametrize("dtype", [n for n in sorted(names.ITEMSIZE) if hasattr(torch, n)])
def test_same_integers(dtype: str) -> None:
    """On the CPU, where both can compute, in every way that a tensor may lie."""
    for shape in SHAPES if names.itemsize(dtype) in (1, 2, 16) else SHAPES[:3]:
        tensor = bits(shape, dtype)
        runs = tuple(map(identity, shape))
        if not tensor.numel():
            assert (
                weigh(see(tensor)[0], runs) == weigh(dtypes.words(tensor), runs, library=TORCH) == 0
            )
            continue
        expected = weigh(
            tensor.reshape(-1)
            .view(torch.uint8)
            .numpy()
            .view(f"V{tensor.element_size()}")
            .reshape(shape),
            runs,
        )
        lying = [tensor]
        if len(shape) > 1 and tensor.numel():
            words = dtypes.words(tensor)
            lying += [
                words.mT.contiguous().mT.view(tensor.dtype),
                torch.stack((words, words), -1)[..., 1].view(tensor.dtype),
            ]
        for each in lying:
            array, library = see(each)
            assert library is NUMPY and array.base is not None
            assert weigh(array, runs) == expected
            assert weigh(dtypes.words(each), runs, library=TORCH) == expected


def test_blocks_and_holes(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = bits((2200, 5), "bfloat16")
    runs = (from_ranges([(1001, 2500), 3, (10, 708)]), identity(5))
    expected = weigh(see(tensor)[0], runs, 3)
    monkeypatch.setattr(weighing, "BLOCK", 5000)
    monkeypatch.setattr(weighing, "ROWS", 20_000)
    assert weigh(dtypes.words(tensor), runs, 3, TORCH) == expected


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", ["int8", "bfloat16", "float32", "float64", "complex128"])
def test_on_a_gpu(dtype: str) -> None:
    for shape in [*SHAPES, (4096, 1000)]:
        tensor = bits(shape, dtype)
        runs = tuple(map(identity, shape))
        expected = weigh(see(tensor)[0], runs)
        array, library = see(tensor.cuda())
        assert library is TORCH and weigh(array, runs, library=library) == expected
