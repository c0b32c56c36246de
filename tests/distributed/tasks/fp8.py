"""Refits in FP8: a trainer's bfloat16 weights become an engine's fused data and scales of tiles. No pytest here."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

import shardmath as sm
import shardmath_torch as smt
from shardmath import formats, transforms
from shardmath.storage import Stored, bind, fill, parse
from shardmath.values.formats.casting import cast_array
from tests.distributed.tasks.breaks import ends

HIDDEN, HEADS, KV, INNER = 256, 8, 2, 512
TILES = formats.FP8Blocks((32, 64))
RULES = {"*_proj.weight": transforms.Quantize(TILES)}

ENGINE = """
[layers.{l}. = layers.{l}.]
qkv_proj.weight              = [q k v]_proj.weight              : (tp (q + k + v)) h
qkv_proj.weight_scale_inv    = [q k v]_proj.weight_scale_inv    : (tp (q + k + v)) h
gate_up_proj.weight           = [gate up]_proj.weight            : (tp (gate + up)) h
gate_up_proj.weight_scale_inv = [gate up]_proj.weight_scale_inv  : (tp (gate + up)) h
down_proj.weight             = down_proj.weight                 : n (tp h)
down_proj.weight_scale_inv   = down_proj.weight_scale_inv       : n (tp h)
attn.k_scale                 = attn.k_scale
attn.v_scale                 = attn.v_scale
norm.weight                  = norm.weight
"""

FUSED = {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up"), "down": ("down",)}
"""In the order in which a loader puts them."""

SHAPES = {
    "q_proj.weight": (HEADS * 64, HIDDEN),
    "k_proj.weight": (KV * 64, HIDDEN),
    "v_proj.weight": (KV * 64, HIDDEN),
    "gate_proj.weight": (INNER, HIDDEN),
    "up_proj.weight": (INNER, HIDDEN),
    "down_proj.weight": (HIDDEN, INNER),
    "norm.weight": (HIDDEN,),
    "attn.k_scale": (1,),
    "attn.v_scale": (1,),
}
LAYERS = 2
ENGINES = {"a": range(4, 6), "b": range(6, 8)}

KINDS = {"uint8": "float8_e4m3fn", "uint16": "bfloat16", "float32": "float32"}
"""What the words of an array are."""

Arrays = dict[str, Any]


def _is_quantized(name: str) -> bool:
    return name.endswith("_proj.weight")


def list_held() -> dict[str, tuple[tuple[int, ...], str]]:
    """The trainer's tensors."""
    held = {}
    for layer in range(LAYERS):
        for name, shape in SHAPES.items():
            dtype = "float32" if name.endswith("_scale") else "bfloat16"
            held[f"layers.{layer}.{name}"] = shape, dtype
    return held


def list_served() -> dict[str, tuple[tuple[int, ...], str]]:
    """The engine's."""
    served = {}
    for name, (shape, dtype) in list_held().items():
        served[name] = shape, dtype
        if _is_quantized(name):
            served[name] = shape, "float8_e4m3fn"
            served[f"{name}_scale_inv"] = TILES.scale_shape(shape), "float32"
    return served


def lay_trainer() -> dict[str, sm.Layout]:
    """As FSDP2 over tensor parallelism has it."""
    mesh = sm.Mesh(dp=2, tp=2)
    layouts = {}
    for name, (shape, dtype) in list_held().items():
        text = "(tp dp n) h" if len(shape) == 2 else "n"
        layouts[name] = sm.Layout(shape, mesh, text, dtype=dtype)
    return layouts


def plan(*, recorded: bool = False) -> sm.Refit:
    """The refit of both engines; the first is what its loader was seen to store, where it is `recorded`."""
    engines: dict[str, Any] = dict(_declare())
    if recorded:
        engines["a"] = _record(engines["a"])
    return plan_to(engines, list_served())


def _declare() -> dict[str, Stored]:
    engines = {}
    for name, ranks in ENGINES.items():
        # The second has whole weights, and so other windows of data and of scales.
        text = ENGINE if name == "a" else ENGINE.replace("(tp (", "((").replace("(tp h)", "h")
        engines[name] = Stored(parse(text), (sm.Mesh(tp=2, ranks=ranks),))
    return engines


def plan_to(engines: Mapping[str, Stored], served: Mapping[str, Any], **unused: Any) -> sm.Refit:
    """The refit of these engines."""
    return sm.refit(lay_trainer(), engines, list_held(), served=served, rules=RULES, **unused)


def _record(declared: Stored) -> sm.storage.RecordedSide:
    """The same engine by its loader."""
    served = list_served()
    bound = bind(declared, served)
    ranks = {}
    for tp, rank in enumerate(bound.ranks):
        own = {}
        for (_, name), shape in bound.natives(rank).items():
            dtype = getattr(torch, _find_dtype(name))
            own[name] = torch.empty(shape, dtype=dtype, device="meta")
        ranks[rank] = smt.record(partial(_load, own, tp), served, own)
    return sm.storage.RecordedSide(ranks)


def _find_dtype(native: str) -> str:
    """That of a tensor of the engine."""
    if native.endswith(("_scale", "_scale_inv")):
        return "float32"
    return "float8_e4m3fn" if _is_quantized(native) else "bfloat16"


def _load(own: Mapping[str, Tensor], tp: int, given: Mapping[str, Tensor]) -> None:
    """A rank's loader as vLLM has it: one for data and for scales, of which there are fewer rows."""
    for name, tensor in own.items():
        prefix, fused, kind = name.rpartition("_proj")
        layer, _, parts = prefix.rpartition(".")
        if not fused:
            tensor.copy_(given[name])
            continue
        at = 0
        for part in FUSED[parts]:
            whole = given[f"{layer}.{part}_proj{kind}"]
            own_part = whole.chunk(2, dim=1 if part == "down" else 0)[tp]
            tensor.narrow(0, at, len(own_part)).copy_(own_part)
            at += len(own_part)


def draw(seed: int) -> Arrays:
    """Logical tensors, as numpy has bfloat16."""
    random = np.random.default_rng(seed)
    drawn = {}
    for name, (shape, dtype) in list_held().items():
        values = random.standard_normal(shape).astype(np.float32)
        drawn[name] = cast_array(values, "float32", dtype)
    return drawn


def serve(arrays: Arrays) -> Arrays:
    """What the engine is to have of them: each tensor quantized whole."""
    served = {}
    for name, array in arrays.items():
        served[name] = array
        if _is_quantized(name):
            numbers = cast_array(array, "bfloat16", "float32")
            served[name], served[f"{name}_scale_inv"] = TILES.quantize(numbers)
    return served


def to_tensor(array: Any, dtype: str) -> Tensor:
    """The array's words as elements of this type."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor.view(getattr(torch, dtype))


def _fill(bound: Any, arrays: Arrays, rank: int) -> dict[str, Tensor]:
    """What an engine's rank is to store."""
    filled = fill(bound, serve(arrays), rank)
    return {name: to_tensor(array, KINDS[str(array.dtype)]) for (_, name), array in filled.items()}


def _cut(rank: int, arrays: Arrays) -> dict[str, Tensor]:
    """What a trainer's rank stores."""
    own = {}
    for name, layout in lay_trainer().items():
        array = arrays[name][np.ix_(*layout.indices(rank))]
        own[name] = to_tensor(array, layout.dtype)
    return own


def compare(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> list[str]:
    """The names of tensors that are not bit for bit as wanted."""
    return [
        n
        for n, t in wanted.items()
        if not torch.equal(found[n].view(torch.uint8), t.view(torch.uint8))
    ]


def steps(rank: int, options: dict[str, Any], recorded: bool = False) -> list[Any]:
    """What is wrong after each of three steps, of which the last changes one tensor."""
    planned = plan(recorded=recorded)
    # Rows say what is right, however the engine was planned.
    declared = plan().engines if recorded else planned.engines
    refit = smt.Refit(planned, timeout=30.0, **options)
    mine = {name: declared[name] for name, ranks in ENGINES.items() if rank in ranks}
    src = _cut(rank, draw(0)) if rank < 4 else None
    zeros = {name: array * 0 for name, array in draw(0).items()}
    dst = {name: _fill(bound, zeros, rank) for name, bound in mine.items()}
    at = [tensor.data_ptr() for own in dst.values() for tensor in own.values()]
    refit.prepare(src, dst)
    found: list[Any] = []
    arrays = draw(0)
    for step in range(3):
        if step == 1:
            arrays = draw(1)
        elif step == 2:
            arrays["layers.1.up_proj.weight"] = draw(2)["layers.1.up_proj.weight"]
        if src is not None:
            for name, tensor in _cut(rank, arrays).items():
                src[name].copy_(tensor)
        found.append(ends(lambda: refit(acknowledge=True)))
        for name, bound in mine.items():
            found.extend(compare(dst[name], _fill(bound, arrays, rank)))
    stayed = at == [tensor.data_ptr() for own in dst.values() for tensor in own.values()]
    found.append("" if stayed else "buffers moved")
    return found


# Memory

ROWS, COLUMNS = 4096, 8192
LIMIT = 4 << 20


def measure_memory(rank: int, dtype: str, at: str) -> tuple[int, int]:
    """Bytes that two steps take at their peak beside the tensors, and those of wire tensors; of one 32 Mi weight."""
    mx = formats.MXFP8()
    shape = ROWS, COLUMNS
    held = sm.Layout(shape, sm.Mesh(ranks=[0]), "n k", dtype=dtype)
    served = sm.Layout(shape, sm.Mesh(ranks=[1]), "n k", dtype="uint8")
    scales = mx.scale_layout(served)
    vocabulary = {"w": (shape, dtype)}
    quantized = {"w": (shape, "uint8"), "w_scale": (scales.shape, "uint8")}
    rules = {"w": transforms.Quantize(mx, at)}  # type: ignore[arg-type]
    planned = sm.refit(
        {"w": held}, {"w": served, "w_scale": scales}, vocabulary, served=quantized, rules=rules
    )
    refit = smt.Refit(planned, timeout=60.0, max_inflight_bytes=LIMIT)
    src = {"w": torch.randn(shape).to(getattr(torch, dtype))} if rank == 0 else None
    dst = None
    if rank == 1:
        dst = {
            "w": torch.zeros(shape, dtype=torch.uint8),
            "w_scale": torch.zeros(scales.shape, dtype=torch.uint8),
        }
    refit.prepare(src, dst)
    before = _read_memory("VmRSS")
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    for _ in range(2):
        refit(acknowledge=True)
    return _read_memory("VmHWM") - before, refit.wire_bytes


def _read_memory(what: str) -> int:
    """Resident bytes of this process, now or at their peak."""
    with open("/proc/self/status") as file:
        line = next(line for line in file if line.startswith(what))
    return int(line.split()[1]) << 10
