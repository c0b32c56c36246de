"""Tensors are quantized and read as the core does it, to the bit; and what is written to stays where it is."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import shardmath_torch as smt
from shardmath import FormatError
from shardmath.formats import FP8, MXFP8, NVFP4, Format, FP8Blocks
from shardmath.values.formats.casting import cast_array
from shardmath_torch.groups.dtypes import dtype_of
from shardmath_torch.tensors.formats import quantizing, slabs
from shardmath_torch.tensors.formats.quantizing import amax_of

VECTORS = Path(__file__).parents[2] / "vectors" / "mxfp8_blocks.json"
RULES = {"rceil": "te_rceil", "floor": "ocp_floor"}
MX = [MXFP8(*args) for args in itertools.product(("e4m3", "e5m2"), ("rceil", "floor"), (-1, -2))]
TILES = [
    FP8Blocks(),
    FP8Blocks(power_of_two=True),
    FP8Blocks((1, 128), data="e5m2"),
    FP8Blocks((3, 5), True),
    FP8Blocks((2, 3, 4), True, "e5m2"),
]
WHOLE = [FP8(*args) for args in itertools.product(("tensor", "channel"), (False, True))]
KNOWN = [FP8(tensor_amax=3.0), FP8(data="e5m2", tensor_amax=0.0), NVFP4(tensor_amax=5.0)]
FORMATS = [*MX, *TILES, *WHOLE, *KNOWN, NVFP4(), NVFP4(two_d=True)]
EACH = pytest.mark.parametrize("one", FORMATS, ids=lambda one: repr(one).replace(" ", ""))
SHORTS = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
EXTREMES = [0.0, -0.0, 448.0, 464.0, 57344.0, 2.0**-126, 2.0**-127, 2.0**-149, 3.4e38, 1e-40]


def draw_extremes(seed: int, *shape: int) -> torch.Tensor:
    """float32 of random bits in a fourth of the rows; else of one magnitude per row, with some extremes."""
    rng = np.random.default_rng(seed)
    bits = rng.integers(0, 1 << 32, shape, dtype=np.uint32).view(np.float32)
    powers = rng.integers(-149, 128, (*shape[:-1], 1))
    with np.errstate(over="ignore", under="ignore"):
        near = np.ldexp(rng.normal(size=shape), powers).astype(np.float32)
    some = rng.random(shape) < 0.02
    near[some] = rng.choice(np.float32(EXTREMES), some.sum())
    is_wild = rng.random((*shape[:-1], 1)) < 0.25
    return torch.from_numpy(np.where(is_wild, bits, near))


def list_tensors() -> dict[str, torch.Tensor]:
    """What is quantized, by what is special of it."""
    mixed = torch.from_numpy(np.random.default_rng(0).permutation(1 << 16))
    normal = torch.from_numpy(np.random.default_rng(1).normal(size=(3, 66, 90)).astype(np.float32))
    return {
        "each bfloat16": SHORTS.view(torch.bfloat16).view(1, 2048, 32),
        "each bfloat16, mixed": SHORTS[mixed[::4]].view(torch.bfloat16).view(1, 64, 256),
        "float16": SHORTS[::7].view(torch.float16)[:9216].view(1, 72, 128),
        "extremes": draw_extremes(2, 1, 150, 200),
        "tiny": normal * 1e-38,
        "tails": normal.bfloat16(),
        "steps": normal.bfloat16()[::2, ::3, 1:89:2],
        "transposed": normal.transpose(1, 2),
        "repeated": normal[:, :1].expand(3, 66, 90),
        "one": normal[:1, :1, :2],
        "no rows": normal[:, :0],
        "no columns": normal[:, :, :0].half(),
        "zeros": torch.zeros(1, 40, 40) * -1,
    }


TENSORS = list_tensors()


def same(tensor: torch.Tensor, array: Any) -> bool:
    """Whether both have the same type, shape and bits."""
    found = tensor.contiguous().numpy()
    alike = found.dtype == array.dtype and found.shape == array.shape
    return alike and found.tobytes() == array.tobytes()


@EACH
def test_bits_are_those_of_the_core(one: Format) -> None:
    for name, tensor in TENSORS.items():
        expected = one.quantize(tensor.float().numpy().copy())
        parts = smt.quantize(one, tensor)
        for part, found, array in zip(one.parts, parts, expected, strict=True):
            assert same(found, array), (name, part.name)
        numbers = one.dequantize(*expected)
        assert same(smt.dequantize(one, parts, torch.float32), numbers), name
        for dtype in ("bfloat16", "float16"):
            short = smt.dequantize(one, parts, dtype_of(dtype))
            assert same(short.view(torch.uint16), cast_array(numbers, "float32", dtype).view("u2"))


@pytest.mark.parametrize("one", MX, ids=str)
def test_every_amax_of_bfloat16(one: MXFP8) -> None:
    """In short blocks of two numbers, of which the other is 3 / 8 of it."""
    amax = SHORTS[:0x7F80].view(torch.bfloat16)
    tensor = torch.stack([amax, amax * -0.375], -1)
    if one.axis == -2:
        tensor = torch.stack(list(tensor.split(32)), -1).flatten(1)
    expected = one.quantize(tensor.float().numpy())
    for found, array in zip(smt.quantize(one, tensor), expected, strict=True):
        assert same(found, array)


@pytest.mark.parametrize("rounding", RULES)
def test_every_recorded_block(rounding: str) -> None:
    cases = json.loads(VECTORS.read_text())["cases"]
    recorded = [case for case in cases if case[RULES[rounding]] is not None]
    words = [[int(word, 16) for word in case["bf16"]] for case in recorded]
    tensor = torch.tensor(words).to(torch.int16).view(torch.bfloat16)
    data, scales = smt.quantize(MXFP8(rounding=rounding), tensor)
    for i, case in enumerate(recorded):
        wanted = case[RULES[rounding]]
        assert scales[i].item() == wanted["scale"], case["id"]
        assert data[i].numpy().tobytes().hex() == wanted["data"], case["id"]
    assert len(recorded) == (113 if rounding == "rceil" else 107)


@EACH
def test_every_byte_is_read_as_by_the_core(one: Format) -> None:
    """NaN and infinities of others, and scales that quantizing never makes."""
    rng = np.random.default_rng(0)
    for shape in [(1, 256, 64), (2, 65, 70)]:
        arrays = []
        for part in one.parts:
            bits = rng.integers(0, 256, (*part.blocks.count(shape), 4), dtype=np.uint8)
            words = bits.view(part.dtype) if part.dtype == "float32" else bits[..., :1].copy()
            arrays.append(words[..., 0])
        arrays[0].reshape(-1)[:256] = np.arange(256)
        expected = one.dequantize(*arrays)
        found = smt.dequantize(one, [torch.from_numpy(a) for a in arrays], torch.float32).numpy()
        # Which of two NaN a product has is the processor's choice.
        assert (np.isnan(found) == np.isnan(expected)).all()
        assert same(torch.from_numpy(np.nan_to_num(found)), np.nan_to_num(expected))


@EACH
def test_slabs_that_cut_blocks_change_nothing(one: Format, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = TENSORS["extremes"][:, :70, :90]
    expected = smt.quantize(one, tensor)
    numbers = smt.dequantize(one, expected, torch.float32)
    for most in (1 << 6, 1 << 9, 1 << 13):
        monkeypatch.setattr(quantizing, "choose_most", lambda _, most=most: most)
        for found, part in zip(smt.quantize(one, tensor), expected, strict=True):
            assert same(found, part.numpy()), most
        assert same(smt.dequantize(one, expected, torch.float32), numbers.numpy()), most


@EACH
def test_what_is_written_to_stays_where_it_is(one: Format) -> None:
    """Buffers of the types that bytes mean, in larger ones, whose other elements stay as they were."""
    tensor = TENSORS["tails"]
    shape = tuple(tensor.shape)
    expected = smt.quantize(one, tensor)
    for typed in (False, True):
        buffers = []
        for part in one.parts:
            sizes = [n + 2 for n in part.blocks.count(shape)]
            memory = torch.full(sizes, 77, dtype=dtype_of(part.dtype))
            buffers.append(memory.view(dtype_of(part.kind)) if typed else memory)
        inside = [b[tuple(slice(1, -1) for _ in shape)] for b in buffers]
        places = [t.data_ptr() for t in inside]
        written = smt.quantize(one, tensor, out=inside)
        assert all(a is b for a, b in zip(written, inside, strict=True))
        assert [t.data_ptr() for t in written] == places
        for part, found, whole, wanted in zip(one.parts, inside, buffers, expected, strict=True):
            plain = dtype_of(part.dtype)
            assert same(found.view(plain), wanted.numpy()), part.name
            others = whole.view(plain).numel() - wanted.numel()
            assert (whole.view(plain) == 77).sum() >= others
        out = torch.zeros(3, 90, 66, dtype=torch.bfloat16).transpose(1, 2)
        assert smt.dequantize(one, inside, torch.bfloat16, out=out) is out
        assert torch.equal(out, smt.dequantize(one, expected, torch.bfloat16))


@pytest.mark.parametrize("one", [*MX, *TILES, *WHOLE, KNOWN[-1]], ids=str)
def test_parts_with_the_amax_of_all_are_parts_of_all(one: Format) -> None:
    """As ranks do where cuts part blocks: each has the amaxes, the largest are taken, each casts its own."""
    tensor = TENSORS["extremes"][:, :96, :96]
    amax = amax_of(one, tensor)
    assert same(amax, one.amax(tensor.numpy()))
    data, *_ = smt.quantize(one, tensor)
    for d, cut in ((2, 82), (1, 10)):
        part = tensor.narrow(d, 0, cut)
        touched = tuple(map(slice, one.scale_shape(tuple(part.shape))))
        found, *_ = smt.quantize(one, part, amax=amax[touched])
        assert torch.equal(found, data.narrow(d, 0, found.shape[d]))


def test_parameters_are_quantized_without_a_graph() -> None:
    weight = torch.nn.Parameter(torch.ones(32, 32))
    data, scales = smt.quantize(MXFP8(), weight)
    out = torch.nn.Parameter(torch.zeros(32, 32))
    assert smt.dequantize(MXFP8(), (data, scales), torch.float32, out=out) is out
    assert torch.equal(out, weight) and out.grad_fn is None


class Memory(TorchDispatchMode):
    """The bytes of what torch's operations give, of each memory once."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor):
            storage = made.untyped_storage()
            at = storage.data_ptr()
            self.sizes[at] = max(self.sizes.get(at, 0), storage.nbytes())
        return made


@pytest.mark.parametrize("one", [MXFP8(), FP8(), NVFP4()], ids=str)
def test_persistent_buffers_are_filled_by_way_of_slabs(one: Format) -> None:
    """Nothing that is made on the way is larger than a slab in float32."""
    tensor = torch.zeros(1 << 10, 1 << 10, dtype=torch.bfloat16)
    out = smt.quantize(one, tensor)
    numbers = torch.empty_like(tensor)
    with Memory() as memory:
        smt.quantize(one, tensor, out=out)
        smt.dequantize(one, out, torch.bfloat16, out=numbers)
    for given in (tensor, numbers, *out):
        memory.sizes.pop(given.data_ptr(), None)
    assert max(memory.sizes.values()) == 4 * slabs.MOST < 2 * tensor.nbytes


BAD: dict[str, tuple[Any, str]] = {
    "no format": (lambda x: smt.quantize("mxfp8", x), "format is 'mxfp8', which is not a format"),
    "no tensor": (lambda x: smt.quantize(MXFP8(), x.numpy()), "pass a torch.Tensor"),
    "float64": (lambda x: smt.quantize(MXFP8(), x.double()), "dtype torch.float64"),
    "a number": (lambda x: smt.quantize(MXFP8(), x[0, 0]), "at least one dimension"),
    "meta": (lambda x: smt.quantize(MXFP8(), x.to("meta")), "meta device"),
    "one dimension": (lambda x: smt.quantize(FP8Blocks(), x[0]), "have 2 dimensions"),
    "odd": (lambda x: smt.quantize(NVFP4(), x[:, :33]), "make its last dimension a multiple of 2"),
    "one out": (lambda x: smt.quantize(MXFP8(), x, out=[x]), "has 2: data, scales; pass these"),
    "dtype of out": (lambda x: smt.quantize(MXFP8(), x, out=[x, x]), "uint8 or float8_e4m3fn"),
    "amax": (lambda x: smt.quantize(MXFP8(), x, amax=x), r"pass one .*: float32 \(64, 2\) on cpu"),
    "amax of numpy": (
        lambda x: smt.quantize(MXFP8(), x, amax=3),
        r"amax= is 3, which is not a tensor; pass",
    ),
    "no parts": (
        lambda x: smt.dequantize(MXFP8(), (), torch.float32),
        "parts= begins with nothing, where",
    ),
    "data alone": (lambda x: smt.dequantize(MXFP8(), (x,), torch.float32), "has 1 tensor"),
    "integers": (
        lambda x: smt.dequantize(MXFP8(), smt.quantize(MXFP8(), x), torch.int32),
        "is not one of bfloat16, float16, float32",
    ),
    "shape of out": (
        lambda x: smt.dequantize(MXFP8(), smt.quantize(MXFP8(), x), x.dtype, out=x[1:]),
        r"where torch.float32 \(64, 64\)",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_told_and_nothing_is_written(name: str) -> None:
    act, message = BAD[name]
    tensor = torch.ones(64, 64)
    with pytest.raises(FormatError, match=message):
        act(tensor)
    assert (tensor == 1).all()


@pytest.mark.parametrize("former", list(smt.FORMER))
def test_former_names_are_found_with_a_warning(former: str) -> None:
    now = smt.FORMER[former]
    with pytest.warns(DeprecationWarning, match=rf"\.{former} is shardmath_torch\.{now}$"):
        found = getattr(smt, former)
    assert found is getattr(smt, now)
