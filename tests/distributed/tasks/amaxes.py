"""What workers do with quantizers: their own parts of tensors, and the same with something wrong. No pytest here."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import shardmath as sm
import shardmath_torch as smt
from shardmath.formats import Format, FP8Blocks
from tests.distributed.tasks.scenarios import Bytes, tensors_of


@dataclass(frozen=True)
class Quantized:
    """A format, a layout, and every rank's tensor."""

    format: Format
    layout: sm.Layout
    tensors: Mapping[int, Bytes]
    lying: str = "contiguous"


Made = tuple[list[bytes], bool, int]
"""The bytes of data and scales, whether a second call into them gave the same, and bytes that this rank received."""


def quantize(rank: int, cases: Sequence[Quantized]) -> list[Made]:
    """What a rank makes in each case."""
    out = []
    for case in cases:
        tensor: Any = tensors_of(case.tensors.get(rank), case.lying)
        make = smt.compile_quantize(case.format, case.layout, timeout=30.0)
        made = make(tensor)
        first = [read(one) for one in made]
        into = tuple(torch.full_like(one, 7) for one in made)
        again = make(tensor, into)
        same = [one.data_ptr() for one in again] == [one.data_ptr() for one in into]
        same = same and [read(one) for one in into] == first
        out.append((first, same, make.last.received.nbytes if make.last else -1))
    return out


def read(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


LAYOUT = sm.Layout((10, 64), sm.Mesh(tp=6), "(tp n) k", dtype="float32")
FORMAT = FP8Blocks((4, 32))


def wrong_tensor(kind: str, tensor: Any) -> Any:
    """A tensor that cannot be quantized."""
    wrong: dict[str, Any] = {
        "shape": tensor[:, :3],
        "dtype": tensor.double(),
        "missing": None,
        "mapping": {"w": tensor},
    }
    return wrong[kind]


def wrong_out(kind: str, right: Any) -> Any:
    data, scales = right
    wrong: dict[str, Any] = {
        "count": (data,),
        "alone": data,
        "scales": (data, scales.double()),
        "shared": (data, data.view(torch.float32)[: scales.shape[0], : scales.shape[1]]),
    }
    return wrong[kind]


def go_wrong(rank: int, kinds: Sequence[str]) -> list[tuple[str, float, bool, bool]]:
    """Of each kind: the error when rank 1 is wrong, how long it took, whether nothing had changed, and whether the
    right call then works."""
    make = smt.compile_quantize(FORMAT, LAYOUT, timeout=20.0)
    holds = rank in LAYOUT.mesh
    tensor = torch.randn(LAYOUT.local_shape(rank)) if holds else None
    right = make(tensor)
    before = [read(one) for one in right]
    found = []
    for kind in kinds:
        given, out = tensor, right
        if rank == 1:
            is_out = kind in ("count", "alone", "scales", "shared")
            given = tensor if is_out else wrong_tensor(kind, tensor)
            out = wrong_out(kind, right) if is_out else right
        start = time.monotonic()
        try:
            make(given, out)
            said = ""
        except sm.ExchangeError as error:
            said = str(error)
        took = time.monotonic() - start
        unchanged = [read(one) for one in right] == before
        works = [read(one) for one in make(tensor)] == before
        found.append((said, took, unchanged, works))
    return found


def compile_wrong(rank: int, kind: str) -> str:
    """The error of a compile to which rank 1 gives something else, or all give what cannot be quantized."""
    layout = LAYOUT
    format: Any = FORMAT
    if kind == "format" and rank == 1:
        format = FP8Blocks((4, 16))
    elif kind == "none" and rank == 1:
        format = None
    elif kind == "layout" and rank == 1:
        layout = sm.Layout((10, 64), sm.Mesh(tp=6), "n (tp k)", dtype="float32")
    elif kind == "double":
        layout = sm.Layout((10, 64), sm.Mesh(tp=6), "(tp n) k", dtype="float64")
    elif kind == "absent":
        layout = sm.Layout((10, 64), sm.Mesh(tp=9), "(tp n) k", dtype="float32")
    try:
        smt.compile_quantize(format, layout, timeout=20.0)
    except sm.ExchangeError as error:
        return str(error)
    return ""
