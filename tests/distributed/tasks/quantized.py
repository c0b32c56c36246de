"""What workers do with checkpoints of quantized weights. Imported by workers, so no pytest here."""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor, distribute_tensor

import shardmath as sm
import shardmath_torch as smt
from shardmath import formats
from shardmath_torch.tensors.dtensors.dtensor import local_of
from tests.distributed.tasks.checkpoints import elements, same
from tests.distributed.tasks.dtensors import device_mesh, placements_of


def numbers(shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Random float32."""
    made: np.ndarray = np.random.default_rng(seed).normal(size=shape).astype(np.float32)
    return made


def parts_of(one: formats.Format, x: np.ndarray) -> dict[str, torch.Tensor]:
    """Data, scales, and what else there is, of the types that files have."""
    made = zip(one.parts, one.quantize(x), strict=True)
    return {part.name: seen_as(torch.from_numpy(array), part.kind) for part, array in made}


def seen_as(tensor: torch.Tensor, kind: str) -> torch.Tensor:
    """The bytes as numbers of that type."""
    return tensor.view(getattr(torch, kind))


def taken(whole: torch.Tensor, layout: sm.Layout, rank: int) -> torch.Tensor:
    """What the rank holds of a tensor of few bits, as bytes, holes zero."""
    raw = whole.numpy() if whole.dtype == torch.float32 else whole.view(torch.uint8).numpy()
    for d, index in enumerate(layout.indices(rank)):
        raw = np.take(raw, index.clip(0), axis=d)
        shape = [1] * raw.ndim
        shape[d] = len(index)
        raw = np.where((index >= 0).reshape(shape), raw, raw.dtype.type(0))
    return torch.from_numpy(np.ascontiguousarray(raw)).view(whole.dtype)


def resharded(
    rank: int, path: str, one: formats.Format, shape: tuple[int, ...], texts: tuple[str, str]
) -> list[str]:
    """Saves data and padded scales under one layout, loads them under another, padded or not; what is wrong."""
    whole = parts_of(one, numbers(shape, 0))
    mesh = sm.Mesh(dp=2, tp=4)
    before, after = (sm.Layout(shape, mesh, text) for text in texts)
    src = named(one, before, kinds=True, duplicated=True)
    # Ranks save their scales as kernels store them.
    src["scales"] = one.pad_layout(src["scales"])
    smt.save(path, {name: taken(whole[name], lies, rank) for name, lies in src.items()}, src)
    wrong = []
    for kinds in (False, True):
        for padded in (False, True):
            dst = named(one, after, kinds=kinds, duplicated=True)
            if padded:
                dst["scales"] = one.pad_layout(dst["scales"])
            found = smt.load(path, dst)
            for name, lies in dst.items():
                wanted = seen_as(taken(whole[name], lies, rank), lies.dtype)
                if not same(found[name], wanted):
                    wrong.append(f"{name} padded={padded} kinds={kinds}")
    return wrong


def named(one: formats.Format, layout: sm.Layout, **how: bool) -> dict[str, sm.Layout]:
    """The layout of each part of a tensor, by name."""
    names = [part.name for part in one.parts]
    return dict(zip(names, one.layouts(layout, **how), strict=True))


def swizzled(rank: int, path: str, one: formats.Format, texts: tuple[str, str]) -> list[bool]:
    """Saves scales as each rank has swizzled its own, loads them swizzled under another layout, and compact."""
    shape = (256, 256)
    mesh = sm.Mesh(dp=2, tp=4)
    scales = parts_of(one, numbers(shape, 1))["scales"].view(torch.uint8)
    before, after = (one.scale_layout(sm.Layout(shape, mesh, text)) for text in texts)
    own = formats.swizzle(taken(scales, before, rank).numpy())
    smt.save(path, {"s": torch.from_numpy(own)}, {"s": formats.swizzled(before)})
    kernels = smt.load(path, {"s": formats.swizzled(after)})["s"]
    compact = smt.load(path, {"s": formats.flattened(after)})["s"]
    wanted = taken(scales, after, rank)
    return [
        kernels.numpy().tobytes() == formats.swizzle(wanted.numpy()).tobytes(),
        compact.equal(wanted.reshape(-1)),
    ]


# Beside torch

WRITTEN = {"rows": ((8,), "S0"), "columns": ((4, 2), "R S1"), "both": ((4, 2), "S1 S0")}
READ = {"rows": ((4, 2), "S1 R"), "columns": ((8,), "S0"), "both": ((2, 4), "S0 S1")}


def placed(bits: torch.Tensor, how: tuple[tuple[int, ...], str]) -> DTensor:
    """A DTensor of few bits. torch divides one as bytes only, and then sees it as what it is."""
    mesh = device_mesh(range(8), how[0])
    placements = placements_of(how[1])
    raw = distribute_tensor(bits.view(torch.uint8), mesh, placements, src_data_rank=None)
    local = local_of(raw).view(bits.dtype)
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=raw.shape, stride=raw.stride()
    )


def cases(dtype: str) -> dict[str, torch.Tensor]:
    """Tensors of that type, of uneven rows and columns, by name."""
    return {how: elements((19, 13), dtype) for how in WRITTEN}


def by_torch(rank: int, path: str, dtype: str) -> list[str]:
    """torch saves DTensors, we load any layout, also as bytes; names of what is wrong."""
    whole = cases(dtype)
    dcp.save(
        {name: placed(full, WRITTEN[name]) for name, full in whole.items()}, checkpoint_id=path
    )
    wrong = []
    for text in ("(tp dp n) h", "(n dp 2) (tp h)"):
        for kind in (dtype, "uint8"):
            lies = sm.Layout((19, 13), sm.Mesh(dp=4, tp=2), text, dtype=kind)
            for name, found in smt.load(path, dict.fromkeys(whole, lies)).items():
                if not same(found, taken(seen_as(whole[name], kind), lies, rank)):
                    wrong.append(f"{name} as {text} {kind}")
    return wrong


def into_torch(rank: int, path: str, dtype: str) -> list[str]:
    """We save any layout, torch loads plain tensors and DTensors; names of what is wrong."""
    whole = cases(dtype)
    texts = zip(whole, ("(tp dp n) h", "(n dp 2) (tp h)", "([9 10] tp n) h"), strict=True)
    src = {
        name: sm.Layout((19, 13), sm.Mesh(dp=4, tp=2), text, dtype=dtype) for name, text in texts
    }
    smt.save(path, {name: taken(whole[name], lies, rank) for name, lies in src.items()}, src)
    plain = {name: make_room(full) for name, full in whole.items()}
    dcp.load(plain, checkpoint_id=path)
    wrong = [f"plain {name}" for name, full in whole.items() if not same(plain[name], full)]
    state = {name: placed(make_room(full), READ[name]) for name, full in whole.items()}
    dcp.load(state, checkpoint_id=path)
    for name, full in whole.items():
        if not same(local_of(state[name]), local_of(placed(full, READ[name]))):
            wrong.append(f"divided {name}")
    return wrong


def make_room(like: torch.Tensor) -> torch.Tensor:
    """Zero bytes of the same shape and type."""
    return torch.zeros(like.shape, dtype=torch.uint8).view(like.dtype)
