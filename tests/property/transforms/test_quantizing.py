"""Quantized on the way: ranks get parts of what the whole tensor becomes, for every format and at both ends."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import shardmath as sm
from shardmath import formats
from shardmath.transforms import Custom, Dequantize, Form, Quantize, Requantize, Transform
from shardmath.values.formats.casting import cast_array

SHAPE = (512, 512)
AMAX = 4.5

FORMATS: dict[str, formats.Format] = {
    "MXFP8": formats.MXFP8(),
    "MXFP8 columnwise": formats.MXFP8(data="e5m2", rounding="floor", axis=-2),
    "FP8 tiles": formats.FP8Blocks(),
    "FP8 rows of tiles": formats.FP8Blocks((1, 128), power_of_two=True),
    "FP8 channels": formats.FP8("channel"),
    "FP8": formats.FP8(tensor_amax=AMAX),
    "NVFP4": formats.NVFP4(tensor_amax=AMAX),
    "NVFP4 2-D": formats.NVFP4(two_d=True, tensor_amax=AMAX),
}
TEXTS = ["(tp n) k", "n (dp k)", "(dp n) (tp k)", "n k", "(2 tp n) k"]
CHANNELS = ["(tp n) k", "(dp tp n) k", "n k"]
"""Of which rows are whole."""


def draw() -> Any:
    """Numbers in bfloat16, as float32, and some of all kinds."""
    random = np.random.default_rng(3)
    values = random.standard_normal(SHAPE).clip(-AMAX, AMAX).astype(np.float32)
    values[0, :64] = 0
    values[5, 3] = np.nan
    values[6] *= 2.0**-130
    return values


def cut(layout: sm.Layout, rank: int, values: Any) -> Any:
    """What the rank holds of an array."""
    return values[np.ix_(*layout.indices(rank))]


def suffixes(format: formats.Format) -> tuple[str, ...]:
    return tuple(f"_{part.name}" for part in format.parts[1:])


def hold(
    format: formats.Format | None, mesh: sm.Mesh, text: str, dtype: str
) -> dict[str, sm.Layout]:
    """A tensor of that dtype, or the parts of a quantized one."""
    whole = sm.Layout(SHAPE, mesh, text, dtype=dtype)
    if format is None:
        return {"w": whole}
    names = ("w", *(f"w{suffix}" for suffix in suffixes(format)))
    return dict(zip(names, format.layouts(whole), strict=True))


def carry(
    transform: Transform,
    src: dict[str, sm.Layout],
    dst: dict[str, sm.Layout],
    given: dict[str, Any],
) -> dict[int, Any]:
    """What ranks of the destination then hold."""
    t = sm.transforms.transformed(src, dst, {"w": transform})
    plan = sm.plan(t.src, t.dst)
    sm.verify(plan)
    sent = {}
    for rank in plan.src_ranks:
        own = {name: cut(layout, rank, given[name]) for name, layout in src.items()}
        sent[rank] = t.prepare(rank, own)
    arrived = sm.simulate(plan, sent)
    return {rank: t.finalize(rank, arrived[rank]) for rank in plan.dst_ranks}


def check(found: dict[int, Any], dst: dict[str, sm.Layout], wanted: dict[str, Any]) -> None:
    for rank, own in found.items():
        assert own.keys() == dst.keys()
        for name, layout in dst.items():
            expected = cut(layout, rank, wanted[name])
            assert own[name].dtype == expected.dtype
            assert own[name].tobytes() == expected.tobytes(), (rank, name)


DTYPES = ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)]
BYTES = Form((2, 64), "uint8")
HERE, THERE = sm.Mesh(dp=2, tp=2), sm.Mesh(tp=2, dp=2, ranks=(3, 4, 5, 2))


def list_cases(at: str) -> list[tuple[str, str, str]]:
    """Formats, and how a tensor lies at the ends where it may: all rows whole where something is done to channels."""
    cases = []
    for name in FORMATS:
        texts = CHANNELS if name == "FP8 channels" else TEXTS
        for number, text in enumerate(texts):
            other = TEXTS[(number + 1) % len(TEXTS)]
            cases.append((name, text, other) if at == "source" else (name, other, text))
    return cases


@pytest.mark.parametrize(("name", "here", "there"), list_cases("source"))
@pytest.mark.parametrize("dtype", DTYPES)
def test_quantized_at_the_source(name: str, here: str, there: str, dtype: str) -> None:
    check_quantized(name, here, there, dtype, "source")


@pytest.mark.parametrize(("name", "here", "there"), list_cases("destination"))
@pytest.mark.parametrize("dtype", DTYPES)
def test_quantized_at_the_destination(name: str, here: str, there: str, dtype: str) -> None:
    check_quantized(name, here, there, dtype, "destination")


def check_quantized(name: str, here: str, there: str, dtype: str, at: Any) -> None:
    """Rounded to bfloat16 first, wherever that is done."""
    format = FORMATS[name]
    values = draw() * np.float32(1.001)
    src = hold(None, HERE, here, dtype)
    dst = hold(format, THERE, there, "uint8")
    transform = Quantize(format, at, suffixes(format))
    given = cast_array(values, "float32", dtype)
    rounded = cast_array(cast_array(values, "float32", "bfloat16"), "bfloat16", "float32")
    wanted = dict(zip(dst, format.quantize(rounded), strict=True))
    check(carry(transform, src, dst, {"w": given}), dst, wanted)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("at", ["source", "destination"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("here", "there"), [("(tp n) k", "n (dp k)"), ("n (tp k)", "(2 dp n) k")])
def test_dequantized(name: str, at: Any, dtype: str, here: str, there: str) -> None:
    """Also rows of channels that are cut."""
    format = FORMATS[name]
    parts = format.quantize(draw())
    src = hold(format, HERE, here, "uint8")
    dst = hold(None, THERE, there, dtype)
    numbers = cast_array(format.dequantize(*parts), "float32", dtype)
    transform = Dequantize(format, at, suffixes(format))
    check(carry(transform, src, dst, dict(zip(src, parts, strict=True))), dst, {"w": numbers})


PAIRS = [
    ("MXFP8", "FP8 tiles"),
    ("FP8 tiles", "MXFP8 columnwise"),
    ("FP8 channels", "MXFP8"),
    ("NVFP4", "NVFP4 2-D"),
]


@pytest.mark.parametrize(("old", "new"), PAIRS)
@pytest.mark.parametrize("at", ["source", "destination"])
def test_requantized(old: str, new: str, at: Any) -> None:
    first, last = FORMATS[old], FORMATS[new]
    parts = first.quantize(draw())
    src = hold(first, HERE, "(tp n) k", "uint8")
    dst = hold(last, THERE, "(dp n) (tp k)", "uint8")
    transform = Requantize(first, last, at, (suffixes(first), suffixes(last)))
    wanted = dict(zip(dst, last.quantize(first.dequantize(*parts)), strict=True))
    check(carry(transform, src, dst, dict(zip(src, parts, strict=True))), dst, wanted)


def test_equal_formats_move_bytes() -> None:
    """Without a rule; and with one that says nothing."""
    format = FORMATS["MXFP8"]
    parts = format.quantize(draw())
    src = hold(format, HERE, "(tp n) k", "uint8")
    dst = hold(format, THERE, "n (dp k)", "uint8")
    plan = sm.plan(src, dst)
    given = dict(zip(src, parts, strict=True))
    sent = {rank: {n: cut(src[n], rank, given[n]) for n in src} for rank in plan.src_ranks}
    check(sm.simulate(plan, sent), dst, given)
    with pytest.raises(sm.PlanError, match="leave the rule out, then the bytes are moved"):
        Requantize(format, replace(format))


def test_half_the_bytes_travel() -> None:
    """At the source 1 + 1/32 byte a number, at the destination 2."""
    src = hold(None, HERE, "(tp dp n) k", "bfloat16")
    for at, per_number in (("source", 1 + 1 / 32), ("destination", 2)):
        dst = hold(FORMATS["MXFP8"], sm.Mesh(tp=2, ranks=(4, 5)), "(tp n) k", "uint8")
        t = sm.transforms.transformed(src, dst, {"w": Quantize(FORMATS["MXFP8"], at, ("_scales",))})
        plan = sm.plan(t.src, t.dst)
        sent = sum(plan.sent_bytes().values())
        assert sent == 512 * 512 * per_number


def test_certificates_count_what_travels() -> None:
    """Nothing takes less time than the bytes of the busiest rank."""
    bounds = []
    for at in ("source", "destination"):
        src = sm.Layout((4096, 4096), HERE, "(tp dp n) k", dtype="bfloat16")
        dst = sm.Layout((4096, 4096), sm.Mesh(tp=2, ranks=(8, 9)), "(tp n) k", dtype="uint8")
        both = {"w": dst, "w_scale": formats.MXFP8().scale_layout(dst)}
        t = sm.transforms.transformed({"w": src}, both, {"w": Quantize(formats.MXFP8(), at)})  # type: ignore[arg-type]
        certificate = sm.certify(sm.schedule(sm.plan(t.src, t.dst), topology=sm.Topology()))
        bounds.append(certificate.bound_s)
    here, there = bounds
    assert here < 0.55 * there


def refusal(transform: Any, here: str, there: str, dtype: str = "bfloat16") -> str:
    src = hold(None, HERE, here, dtype)
    dst = hold(transform.format, THERE, there, "uint8")
    with pytest.raises(sm.PlanError) as caught:
        sm.transforms.transformed(src, dst, {"w": transform})
    return str(caught.value)


def test_cuts_that_part_blocks_are_errors() -> None:
    tiles = formats.FP8Blocks((128, 128))
    wide = sm.Mesh(tp=8)
    src = {"w": sm.Layout(SHAPE, wide, "n (tp k)", dtype="bfloat16")}
    dst = hold(tiles, THERE, "n k", "uint8")
    with pytest.raises(sm.PlanError) as caught:
        sm.transforms.transformed(src, dst, {"w": Quantize(tiles, suffixes=("_scales",))})
    assert "tensor 'w': rank 0 holds positions 0:64 of dimension 1" in str(caught.value)
    assert "and so cuts a block of 128" in str(caught.value)
    # At the destination blocks are whole.
    sm.transforms.transformed(src, dst, {"w": Quantize(tiles, "destination", ("_scales",))})
    fine = dst | {"w": sm.Layout(SHAPE, wide, "n (tp k)", dtype="uint8")}
    fine["w_scales"] = sm.Layout((4, 4), wide, "n (tp k)")
    with pytest.raises(
        sm.PlanError, match=r"cuts a block of 128 of component 'companion float32 per 128 x 128'"
    ):
        sm.transforms.transformed(src, fine, {"w": Quantize(tiles, "destination", ("_scales",))})


def test_what_shares_a_scale_is_whole() -> None:
    rows = Quantize(formats.FP8("channel"), suffixes=("_scales",))
    said = refusal(rows, "n (tp k)", "n k")
    assert "divides dimension 1, all of which shares scales of FP8 e4m3 per channel" in said
    one = Quantize(formats.NVFP4(), suffixes=("_scales", "_global_scale"))
    assert "give the format tensor_amax=" in refusal(one, "(tp n) k", "n k")


@pytest.mark.parametrize("name", ["FP8", "NVFP4", "NVFP4 2-D"])
@pytest.mark.parametrize("at", ["source", "destination"])
def test_a_rank_without_rows_has_the_scale_of_all(name: str, at: Any) -> None:
    """Every rank holds the scale of a tensor, and may be the one that others have it from."""
    format = FORMATS[name]
    both = sm.Mesh(tp=2)
    row = np.linspace(-AMAX, AMAX, 64, dtype=np.float32).reshape(1, 64)
    row = cast_array(cast_array(row, "float32", "bfloat16"), "bfloat16", "float32")
    names = ("w", *(f"w{one}" for one in suffixes(format)))
    parts = dict(zip(names, format.quantize(row), strict=True))
    few = sm.Layout((1, 64), both, "(tp n) k", dtype="float32")
    assert few.local_shape(1) == (0, 64)
    for text in ("n k", "(tp n) k"):
        lies = format.layouts(sm.Layout((1, 64), both, text))
        dst = dict(zip(names, lies, strict=True))
        quantize = Quantize(format, at, suffixes(format))
        check(carry(quantize, {"w": few}, dst, {"w": row}), dst, parts)


def test_a_rank_without_rows_cannot_tell_an_amax() -> None:
    for format in (formats.FP8(), formats.NVFP4()):
        src = {"w": sm.Layout((1, 64), sm.Mesh(tp=2), "(tp n) k", dtype="bfloat16")}
        lies = format.layouts(sm.Layout((1, 64), sm.Mesh(tp=2), "n k"))
        names = ("w", *(f"w{one}" for one in suffixes(format)))
        rule = {"w": Quantize(format, suffixes=suffixes(format))}
        dst = dict(zip(names, lies, strict=True))
        with pytest.raises(sm.PlanError, match=r"divides dimension 0, all of which shares"):
            sm.transforms.transformed(src, dst, rule)


def test_scales_lie_where_data_do() -> None:
    """Where nothing is done to them, too."""
    here, there = sm.Mesh(ranks=[0]), sm.Mesh(ranks=[1])
    mx = formats.MXFP8()
    data, scales = mx.layouts(sm.Layout((2, 64), here, "n k"))
    away, scales_away = mx.layouts(sm.Layout((2, 64), there, "n k"))
    src = {"w": sm.Layout((2, 64), here, "n k", dtype="bfloat16")}
    rule = {"w": Quantize(mx)}
    with pytest.raises(sm.PlanError, match="'w_scale' has 1 window, and 'w' 2 at the destination"):
        sm.transforms.transformed(src, {"w": (data, away), "w_scale": (scales,)}, rule)
    with pytest.raises(sm.PlanError, match="only one of them has rank 0"):
        sm.transforms.transformed(src, {"w": data, "w_scale": scales_away}, rule)
    with pytest.raises(
        sm.PlanError, match=r"'w_scale' .* at the source, .* only one of them has rank 0"
    ):
        sm.transforms.transformed({"w": data, "w_scale": scales_away}, src, {"w": Dequantize(mx)})


def test_bytes_of_two_numbers_and_numbers_alone() -> None:
    """Known before anything travels."""
    one = sm.Mesh()

    def lay(shape: tuple[int, ...], dtype: str) -> sm.Layout:
        return sm.Layout(shape, one, {}, dtype=dtype)

    four = formats.NVFP4()
    odd = {"w": lay((2, 63), "bfloat16")}
    data = {"w": lay((2, 32), "uint8"), "w_scale": lay((2, 4), "uint8")}
    data["w_scale_2"] = lay((1, 1), "float32")
    for src, dst, rule in ((odd, data, Quantize(four)), (data, odd, Dequantize(four))):
        with pytest.raises(sm.PlanError, match=r"\[2, 63\]: 2 numbers share a byte"):
            sm.transforms.transformed(src, dst, {"w": rule})
    alone = {"w": lay((), "uint8"), "w_scale": lay((), "float32")}
    with pytest.raises(sm.PlanError, match="numbers cannot be quantized"):
        sm.transforms.transformed({"w": lay((), "bfloat16")}, alone, {"w": Quantize(formats.FP8())})


def test_scales_are_of_one_tensor() -> None:
    """Two that are written to one place would be silently wrong."""

    def lay(columns: int, dtype: str) -> sm.Layout:
        return sm.Layout((2, columns), sm.Mesh(), {}, dtype=dtype)

    src = {name: lay(64, "bfloat16") for name in ("w", "w_a")}
    dst = {"w": lay(64, "uint8"), "w_a": lay(64, "uint8"), "w_a_b": lay(2, "uint8")}
    first, last = (Quantize(formats.MXFP8(), suffixes=(one,)) for one in ("_a_b", "_b"))
    with pytest.raises(sm.PlanError, match="'w_a_b' belongs to both 'w_a' and another tensor"):
        sm.transforms.transformed(src, dst, {"w": first, "w_a": last})
    four = Quantize(formats.NVFP4(), suffixes=("_s", "_s"))
    there = {"w": lay(32, "uint8"), "w_s": lay(4, "uint8")}
    with pytest.raises(sm.PlanError, match="has 'w_s' twice for 'w'"):
        sm.transforms.transformed({"w": src["w"]}, there, {"w": four})
    nothing: Any = {"w": lay(64, "uint8"), "w_a_b": None}
    with pytest.raises(sm.PlanError, match=r"tensor 'w \(its companion\)' is None"):
        sm.transforms.transformed({"w": src["w"]}, nothing, {"w": first})


def test_an_engine_with_scales_alone() -> None:
    """They would be left as they are, beside the data of others."""
    tiles = formats.FP8Blocks()
    shape = (256, 256)
    trainer = {"w": sm.Layout(shape, sm.Mesh(), {}, dtype="bfloat16")}
    engines = {}
    for rank, engine in enumerate("AB"):
        data, scales = tiles.layouts(sm.Layout(shape, sm.Mesh(ranks=[rank]), {}))
        engines[engine] = {"w": data, "w_scale_inv": scales}
    del engines["B"]["w"]
    served = {"w": (shape, "uint8"), "w_scale_inv": ((2, 2), "float32")}
    given: Any = engines
    with pytest.raises(sm.PlanError, match="B stores 'w_scale_inv' without 'w'"):
        sm.refit(
            trainer,
            given,
            {"w": (shape, "bfloat16")},
            unused=["w"],
            served=served,
            rules={"w": Quantize(tiles)},
        )


def test_what_does_not_fit_is_named() -> None:
    mx = formats.MXFP8()
    assert "int64 is not a float dtype" in refusal(
        Quantize(mx, suffixes=("_scales",)), "n k", "n k", "int64"
    )
    src = hold(None, HERE, "n k", "bfloat16")
    dst = hold(mx, THERE, "n k", "uint8")
    for wrong, said in (
        (sm.Layout(SHAPE, THERE, "n k"), "float32[512, 512] cannot be the data of MXFP8"),
        (
            sm.Layout((256, 256), THERE, "n k", dtype="uint8"),
            "data of a tensor of shape [512, 512] have shape [512, 512], but",
        ),
    ):
        with pytest.raises(sm.PlanError) as caught:
            sm.transforms.transformed(
                src, dst | {"w": wrong}, {"w": Quantize(mx, suffixes=("_scales",))}
            )
        assert said in str(caught.value)
    for make, said in (
        (lambda: Quantize("MXFP8"), "'MXFP8' is not a format"),
        (
            lambda: Quantize(mx, suffixes=("_a", "_b")),
            "MXFP8 e4m3 rceil rowwise has scales; give one suffix for each",
        ),
        (lambda: Quantize(mx, "here"), "give 'source' or 'destination'"),
        (lambda: Quantize(mx, wire="int8"), "int8 is not a float dtype"),
        (
            lambda: Requantize(mx, formats.NVFP4()).components(BYTES, BYTES),
            "a byte holds 1 and 2 numbers",
        ),
    ):
        with pytest.raises(sm.PlanError) as caught:
            make()
        assert said in str(caught.value)


def test_usual_names() -> None:
    """Those of DeepSeek's checkpoints, and of Model Optimizer's."""
    assert Quantize(formats.FP8Blocks()).suffixes == ("_scale_inv",)
    assert Quantize(formats.MXFP8()).suffixes == ("_scale",)
    assert Dequantize(formats.NVFP4()).suffixes == ("_scale", "_scale_2")


def test_float8_may_be_held_as_what_it_is() -> None:
    """With data of torch's type, whose words are uint8."""
    format = FORMATS["FP8 tiles"]
    dst = hold(format, THERE, "(tp n) k", "uint8")
    dst["w"] = sm.Layout(SHAPE, THERE, "(tp n) k", dtype="float8_e4m3fn")
    values = draw()
    wanted = dict(zip(dst, format.quantize(values), strict=True))
    src = hold(None, HERE, "n k", "float32")
    transform = Quantize(format, "destination", suffixes(format), wire="float32")
    check(carry(transform, src, dst, {"w": values}), dst, wanted)


def test_what_is_held_as_several_is_no_custom() -> None:
    assert not isinstance(Quantize(formats.MXFP8()), Custom)
