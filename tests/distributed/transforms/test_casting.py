"""Casts and exp in torch are those of numpy bit for bit, and casts are torch's own wherever the result is a number."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import shardmath as sm
from shardmath.base.dtypes import ITEMSIZE, is_bool, is_integer
from shardmath.transforms import Cast, Custom, Form, NegativeExp
from shardmath.values.formats.casting import NAN, cast_array, is_float, refuse_cast
from shardmath.values.formats.elements import numpy_type
from shardmath.values.transforms.components import Component
from shardmath_torch.tensors.formats.casting import cast_into
from shardmath_torch.tensors.transforms.functions import finalize, prepare

NUMBERS = [name for name in ITEMSIZE if is_float(name) or is_integer(name) or is_bool(name)]
PAIRS = [(a, b) for a in NUMBERS for b in NUMBERS if not refuse_cast(a, b, lossy=True)]


def patterns(dtype: str) -> Any:
    """All bits of a type of 16 at most; of a larger one random bits, and those around ties, infinities and zeros."""
    kind = numpy_type(dtype)
    if is_bool(dtype):
        return np.array([False, True, True])
    if kind.itemsize <= 2:
        return np.arange(1 << 8 * kind.itemsize).astype(f"uint{8 * kind.itemsize}").view(kind)
    rng = np.random.default_rng(kind.itemsize)
    drawn = np.frombuffer(rng.bytes(kind.itemsize << 15), kind)
    if is_integer(dtype):
        small = rng.integers(0, 1 << 20, 1 << 14).astype(kind)
        return np.concatenate([drawn, small, -small])
    # bfloat16 and float16 between two neighbors, and what is subnormal there or too large.
    words = np.arange(1 << 16, dtype=np.uint32)
    ties = np.concatenate([words << 16 | low for low in (0x7FFF, 0x8000, 0x8001)]).view(np.float32)
    halves = words.astype(np.uint16).view(np.float16).astype(np.float64)
    with np.errstate(all="ignore"):
        middles = (halves + np.nextafter(halves.astype(np.float16), np.float16(np.inf))) / 2
        near = [ties.astype(kind), middles.astype(kind)]
    together = np.concatenate([drawn, *near])
    # An odd step meets every kind of them.
    return together if dtype == "float32" else together[::5]


def to_tensor(array: Any, dtype: str) -> torch.Tensor:
    plain = torch.from_numpy(array.copy().view(np.uint8))
    return plain.view(getattr(torch, dtype))


def to_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("src", NUMBERS)
def test_torch_casts_as_numpy_does(src: str) -> None:
    array = patterns(src)
    tensor = to_tensor(array, src)
    for _, dst in (pair for pair in PAIRS if pair[0] == src):
        out = torch.empty(tensor.shape, dtype=getattr(torch, dst))
        cast_into(tensor, src, dst, out)
        wanted = cast_array(array, src, dst)
        assert to_bytes(out) == wanted.tobytes(), (src, dst)
        # torch's own cast of bits that are numbers; of others, it has several.
        own = tensor.to(getattr(torch, dst))
        numbers = ~tensor.isnan() if is_float(src) else slice(None)
        assert to_bytes(own[numbers]) == to_bytes(out[numbers]), (src, dst)
        if is_float(src) and is_float(dst) and src != dst:
            kind = numpy_type(dst)
            bits = wanted[tensor.isnan().numpy()].view(f"uint{8 * kind.itemsize}")
            assert set(bits.tolist()) <= {NAN[dst]}


@pytest.mark.parametrize("dst", ["bfloat16", "float16"])
def test_rounding_is_to_nearest_even(dst: str) -> None:
    """As another library has it, from float32."""
    array = patterns("float32")
    numbers = array[~np.isnan(array)]
    with np.errstate(all="ignore"):
        wanted = numbers.astype(ml_dtypes.bfloat16 if dst == "bfloat16" else np.float16)
    assert cast_array(numbers, "float32", dst).tobytes() == wanted.tobytes()


@pytest.mark.parametrize("src", ["bfloat16", "float16", "float32", "float64"])
def test_exp_is_the_same_everywhere_and_right(src: str) -> None:
    array = patterns(src)
    form, out_form = Form(array.shape, src), Form(array.shape, "float32")
    with np.errstate(all="ignore"):
        made = NegativeExp().finalize((array,), form, out_form)
        exact = -np.exp(cast_array(array, src, "float64")).astype(np.float32)
    out = torch.empty(array.shape)
    finalize(NegativeExp(), form, out_form, (to_tensor(array, src),), (out,))
    assert to_bytes(out) == made.tobytes()
    numbers = ~np.isnan(exact)
    assert np.array_equal(made[numbers], exact[numbers])
    assert np.isnan(made[~numbers]).all()


@pytest.mark.parametrize("shape", [(), (0, 3), (4,), (2, 3)])
@pytest.mark.parametrize("at", ["source", "destination"])
def test_both_ends_cast_alike(shape: tuple[int, ...], at: str) -> None:
    """A cast of a strided tensor there and back, at each end, and by functions of arrays."""
    rng = np.random.default_rng(3)
    array = rng.standard_normal((*shape, 2)).astype(np.float32)[..., 0] * 3
    form = Form(shape, "float32")
    cast = Cast("bfloat16", at=at)  # type: ignore[arg-type]
    by_arrays = Custom(
        "c",
        cast.components(form, form),
        lambda x: cast.prepare(x, form, form),
        lambda xs: cast.finalize(xs, form, form),
    )
    results = []
    for transform in (cast, by_arrays):
        (part,) = cast.components(form, form)
        sent = torch.empty(shape, dtype=getattr(torch, part.dtype))
        values = torch.from_numpy(np.array(array))
        if cast.as_held(form, form).source:
            sent.copy_(values)
        else:
            prepare(transform, form, form, (values,), (sent,))
        out = torch.empty(shape)
        finalize(transform, form, form, (sent,), (out,))
        results.append(out)
    wanted = torch.from_numpy(np.array(array)).to(torch.bfloat16).float()
    assert torch.equal(results[0], wanted) and torch.equal(results[1], wanted)


def test_functions_cannot_write_to_the_source() -> None:
    def double(array: Any) -> Any:
        array *= 2
        return (array,)

    form = Form((4,), "float32")
    custom = Custom("double", (Component("data", "float32"),), double)
    held, array = torch.ones(4), np.ones(4, np.float32)
    with pytest.raises(ValueError, match="read-only"):
        prepare(custom, form, form, (held,), (torch.empty(4),))
    layout = sm.Layout((4,), sm.Mesh(), "n")
    with pytest.raises(ValueError, match="read-only"):
        sm.transforms.transformed(layout, layout, {"*": custom}).prepare(0, array)
    assert held.tolist() == array.tolist() == [1.0] * 4


def test_what_arrays_make_is_looked_at() -> None:
    form = Form((4,), "float32")
    out = (torch.empty(4, dtype=torch.bfloat16),)
    part = (Component("data", "bfloat16"),)
    for bad, words in (
        (lambda x: (x, x), "makes 2 arrays, not 1: bfloat16[4]"),
        (
            lambda x: (x,),
            "has dtype float32, not bfloat16; pass an array of uint16, the bits of bfloat16",
        ),
        (lambda x: (x.astype(">u2"),), "has dtype >u2, of another byte order"),
        (
            lambda x: (x[:2].astype(np.uint16),),
            "makes bfloat16[2] at the source, where bfloat16[4] is needed",
        ),
    ):
        with pytest.raises(sm.ShardError) as caught:
            prepare(Custom("c", part, bad), form, form, (torch.zeros(4),), out)
        assert words in str(caught.value)
