"""Casts and exp on a GPU are those of numpy, bit for bit."""

from __future__ import annotations

import pytest
import torch

from shardmath.transforms import Form, NegativeExp
from shardmath.values.formats.casting import cast_array, is_float
from shardmath_torch.tensors.formats.casting import cast_into
from shardmath_torch.tensors.transforms.functions import finalize
from tests.distributed.transforms.test_casting import NUMBERS, PAIRS, patterns, to_bytes, to_tensor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.mark.parametrize("src", NUMBERS)
def test_casts(src: str) -> None:
    array = patterns(src)
    tensor = to_tensor(array, src).cuda()
    for _, dst in (pair for pair in PAIRS if pair[0] == src):
        out = torch.empty(tensor.shape, dtype=getattr(torch, dst), device="cuda")
        cast_into(tensor, src, dst, out)
        assert to_bytes(out.cpu()) == cast_array(array, src, dst).tobytes(), (src, dst)


@pytest.mark.parametrize("src", [name for name in NUMBERS if is_float(name)])
def test_exp(src: str) -> None:
    array = patterns(src)
    forms = Form(array.shape, src), Form(array.shape, "float32")
    out = torch.empty(array.shape, device="cuda")
    finalize(NegativeExp(), *forms, (to_tensor(array, src).cuda(),), (out,))
    assert to_bytes(out.cpu()) == NegativeExp().finalize((array,), *forms).tobytes()
