"""What workers do with checkpoints. Imported by workers, so no pytest here."""

from __future__ import annotations

import math
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import shardmath as sm
import shardmath_torch as smt
from shardmath_torch.checkpoints.loading import LoadPlanner
from shardmath_torch.checkpoints.safetensors import archive, hf_folder
from shardmath_torch.checkpoints.saving import SavePlanner
from shardmath_torch.groups.dtypes import dtype_of
from shardmath_torch.tensors.dtensors.dtensor import local_of
from tests.distributed.tasks.dtensors import caught, device_mesh, placements_of, whole


def elements(shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    """The element numbers, as numbers or, where the type has too few, as bytes."""
    numbers = torch.arange(math.prod(shape), dtype=torch.int64) % 251
    kind = dtype_of(dtype)
    if kind.itemsize == 1 and kind != torch.uint8:
        return (
            (numbers % (2 if kind == torch.bool else 120)).to(torch.uint8).view(kind).reshape(shape)
        )
    return numbers.to(kind).reshape(shape)


def held(layout: sm.Layout, rank: int) -> torch.Tensor:
    """What the rank holds of the element numbers; holes are zero."""
    full = elements(layout.shape, layout.dtype)
    raw = full.reshape(-1).view(torch.uint8).numpy().reshape(*full.shape, full.itemsize)
    for d, index in enumerate(layout.indices(rank)):
        raw = (
            np.take(raw, index.clip(0), axis=d)
            * np.expand_dims(index >= 0, [*range(d), *range(d + 1, raw.ndim)]).astype(np.uint8)
            if raw.shape[d]
            else raw[tuple([slice(None)] * d + [slice(0, 0)])]
        )
    shape = layout.local_shape(rank)
    return torch.from_numpy(np.ascontiguousarray(raw).reshape(-1)).view(full.dtype).reshape(shape)


def windows(one: Any) -> tuple[sm.Layout, ...]:
    """The layouts of one tensor."""
    return one if isinstance(one, tuple) else (one,)


def keyed(layouts: dict[str, Any], rank: int) -> dict[str, torch.Tensor]:
    """The rank's local tensors of the element numbers, by local buffer key."""
    out = {}
    for name, one in layouts.items():
        each = windows(one)
        for i, layout in enumerate(each):
            if rank in layout.mesh:
                out[name if len(each) == 1 else f"{name}[{i}]"] = held(layout, rank)
    return out


def saved(rank: int, path: str, layouts: dict[str, Any]) -> None:
    """Saves the element numbers."""
    smt.save(path, keyed(layouts, rank), layouts)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Of one shape and type, byte by byte."""
    raw = [x.contiguous().reshape(-1).view(torch.uint8) for x in (a, b)]
    return (a.shape, a.dtype) == (b.shape, b.dtype) and raw[0].equal(raw[1])


def loaded(
    rank: int, path: str, layouts: dict[str, Any], names: dict[str, str] | None = None
) -> list[str]:
    """Loads, and the keys of what is not the element numbers."""
    found, wanted = smt.load(path, layouts, names=names), keyed(layouts, rank)
    return sorted({*found} ^ {*wanted}) + [
        key for key in wanted if not same(found[key], wanted[key])
    ]


def attempted(rank: int, step: str, path: str, layouts: dict[str, Any], spoil: Any = None) -> Any:
    """Saves or loads, after `spoil` = (rank, key, value) replaced one rank's tensor, or layout for the rank alone."""
    tensors = keyed({k: v for k, v in layouts.items() if v is not None}, rank)
    if spoil is not None and spoil[0] == rank:
        key, value = spoil[1:]
        if isinstance(value, sm.Layout):
            layouts = {**layouts, key: value}
        elif value is None:
            tensors.pop(key)
        else:
            tensors[key] = value
    if step == "save":
        return caught(lambda: smt.save(path, tensors, layouts))
    return caught(lambda: sorted(smt.load(path, layouts)))


def own_bytes(rank: int, path: str, having: tuple[int, ...], asking: tuple[int, ...]) -> Any:
    """Ranks save bytes of their own, odd ones the same; what each of `asking` gets back."""
    mine = {"state": b"odd" if rank % 2 else bytes([rank] * (rank + 1))} if rank in having else {}
    smt.save(path, mine, {"state": None})
    return (
        bytes(smt.load(path, {"state": None})["state"].tolist())
        if rank in asking
        else smt.load(path, {}) and None
    )


def by_torchs_reader(rank: int, path: str, reader: str) -> Any:
    """What torch's own readers make of our checkpoint: a plain tensor, and a DTensor."""
    mesh = device_mesh(range(8), (8,))
    into = {
        "a": torch.full((9, 4), -1.0),
        "b": distribute_tensor(torch.full((16, 3), -1.0), mesh, [Shard(0)], src_data_rank=None),
        "s": torch.tensor(-1.0),
    }
    made = (
        dcp.HuggingFaceStorageReader(path)
        if reader == "safetensors"
        else dcp.FileSystemReader(path)
    )
    dcp.load(into, storage_reader=made)
    whole_b = into["b"].full_tensor()
    return into["a"].equal(whole((9, 4))), whole_b.equal(whole((16, 3))), float(into["s"])


def by_torchs_writer(rank: int, path: str) -> None:
    """torch saves a plain tensor, DTensors, one that is not contiguous, an object and a scalar."""
    line, plane = device_mesh(range(8), (8,)), device_mesh(range(8), (4, 2))
    dcp.save(
        {
            "plain": whole((9, 4)),
            "shard": distribute_tensor(whole((16, 6)), line, [Shard(0)], src_data_rank=None),
            "plane": distribute_tensor(
                whole((9, 5)), plane, [Shard(1), Replicate()], src_data_rank=None
            ),
            "column": DTensor.from_local(
                whole((16, 3)).t()[:, rank * 2 : rank * 2 + 2], line, [Shard(1)]
            ),
            "scalar": torch.tensor(2.5, dtype=torch.bfloat16),
            "nested": {"lr": 0.125, "names": ["x", "y"]},
        },
        checkpoint_id=path,
    )


def by_torchs_sharded_writer(rank: int, path: str, how: dict[str, Any]) -> None:
    """torch leaves safetensors in shards: uneven and empty ones, along either dimension, replicas, plain tensors."""
    line, plane = device_mesh(range(8), (8,)), device_mesh(range(8), (4, 2))
    state = {
        "rows": distribute_tensor(
            elements((13, 6), "float32"), line, [Shard(0)], src_data_rank=None
        ),
        "few": distribute_tensor(
            elements((3, 2), "bfloat16"), line, [Shard(0)], src_data_rank=None
        ),
        "plane": distribute_tensor(
            elements((9, 5), "int64"), plane, [Shard(1), Shard(0)], src_data_rank=None
        ),
        "columns": distribute_tensor(
            elements((4, 7), "float16"), plane, [Replicate(), Shard(1)], src_data_rank=None
        ),
        "plain": elements((5,), "float64"),
        "scalar": elements((), "float32"),
    }
    dcp.save(state, storage_writer=dcp.HuggingFaceStorageWriter(path, save_distributed=True, **how))


def exported(
    rank: int, path: str, layouts: dict[str, Any], how: dict[str, Any], spoil: int | None = None
) -> Any:
    """Exports the element numbers; one rank may find that its file cannot be written."""
    before = hf_folder.DraftFile.append
    if rank == spoil:
        hf_folder.DraftFile.append = _full  # type: ignore[method-assign]
    try:
        return caught(lambda: smt.export(path, keyed(layouts, rank), layouts, **how))
    finally:
        hf_folder.DraftFile.append = before  # type: ignore[method-assign]


def _full(*_: object) -> None:
    raise OSError(28, "No space left on device", "the disk")


def attempted_export(rank: int, path: str) -> Any:
    """One rank asks for files of another size."""
    layouts = {name: sm.Layout((8,), sm.Mesh(dp=8), "(dp n)") for name in ("v", "w")}
    return caught(
        lambda: smt.export(
            path, keyed(layouts, rank), layouts, max_shard_size=32 if rank == 3 else 64
        )
    )


def exported_dtensors(
    rank: int, path: str, states: dict[str, torch.Tensor], tied: dict[str, str]
) -> Any:
    """DTensors in uneven rows, norms as plain tensors."""
    line = device_mesh(range(8), (8,))
    parts = {
        n: distribute_tensor(t, line, [Shard(0)], src_data_rank=None)
        for n, t in states.items()
        if t.ndim > 1
    }
    smt.export(path, {**states, **parts}, max_shard_size=2000, tied=tied)


def differing_dtensors(rank: int, path: str, what: str) -> Any:
    """A DTensor of one name and the same placements, which is another tensor on rank 3."""
    shape = (16, 2) if what == "shape" and rank == 3 else (8, 2)
    dtype = torch.float64 if what == "dtype" and rank == 3 else torch.float32
    whole = torch.ones(shape, dtype=dtype)
    line = device_mesh(range(8), (8,))
    given = distribute_tensor(whole, line, [Shard(0)], src_data_rank=None)
    return caught(lambda: smt.export(path, {"w": given}))


def exported_by_fsdp2(rank: int, path: str) -> Any:
    """A module under FSDP2, with a weight that has two names, and a buffer."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    module = torch.nn.Module()
    module.embed, module.norm = torch.nn.Embedding(11, 5), torch.nn.BatchNorm1d(5)
    module.head = torch.nn.Linear(5, 11, bias=False)
    module.head.weight = module.embed.weight
    whole = {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}
    fully_shard(module, mesh=device_mesh(range(8), (8,)))
    smt.export(path, module, max_shard_size=100)
    return whole


def by_both(rank: int, path: str, layouts: dict[str, sm.Layout], into: dict[str, sm.Layout]) -> Any:
    """Our planners with torch's own storage."""
    state = keyed(layouts, rank)
    dcp.save(dict(state), storage_writer=dcp.FileSystemWriter(path), planner=SavePlanner(layouts))
    found = {key: torch.zeros_like(t) for key, t in keyed(into, rank).items()}
    dcp.load(found, storage_reader=dcp.FileSystemReader(path), planner=LoadPlanner(into))
    return [key for key, t in keyed(into, rank).items() if not same(found[key], t)]


def linear(mesh: tuple[int, int], rows: int, columns: int) -> Any:
    """A column-parallel Linear under FSDP2, its weight the element numbers."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    devices = device_mesh(range(8), mesh, ("dp", "tp"))
    module = torch.nn.Sequential(torch.nn.Linear(columns, rows, bias=False))
    with torch.no_grad():
        module[0].weight.copy_(whole((rows, columns)))
    parallelize_module(module, devices["tp"], {"0": ColwiseParallel()})
    fully_shard(module, mesh=devices["dp"])
    return module


def fsdp2_by_torch(rank: int, path: str, mesh: tuple[int, int], rows: int) -> Any:
    """torch saves FSDP2 over tensor parallel and loads it again: which rows are not what was saved."""
    module = linear(mesh, rows, 2)
    state = {"weight": module[0].weight}
    try:
        dcp.save(state, checkpoint_id=path)
    except BaseException as error:
        return f"save: {error}"
    with torch.no_grad():
        local_of(module[0].weight).fill_(-1.0)
    try:
        dcp.load(state, checkpoint_id=path)
    except BaseException as error:
        return f"load: {error}"
    return module[0].weight.full_tensor()[:, 0].tolist()


def plain_by_torch(rank: int, path: str) -> Any:
    """The tensor whole from torch's checkpoint of FSDP2, and a checkpoint of a whole one into FSDP2, by torch."""
    out = []
    module = linear((4, 2), 9, 2)
    for state, folder in (
        ({"weight": torch.zeros(9, 2)}, path),
        ({"weight": module[0].weight}, f"{path}-plain"),
    ):
        if folder != path:
            dcp.save({"weight": whole((9, 2))}, checkpoint_id=folder)
        try:
            dcp.load(state, checkpoint_id=folder)
            out.append("loaded")
        except BaseException as error:
            out.append(f"{type(error).__name__}: {error}")
    return out


def fsdp2_by_us(rank: int, path: str, mesh: tuple[int, int], rows: int) -> Any:
    """The same by us, and onto the transposed mesh: whether all is as it was."""
    module = linear(mesh, rows, 2)
    smt.save(
        path, {"weight": local_of(module[0].weight)}, {"weight": smt.layout_of(module)["0.weight"]}
    )
    other = linear((mesh[1], mesh[0]), rows, 2)
    right = []
    for target in (module, other):
        layout = smt.layout_of(target)["0.weight"]
        found = smt.load(path, {"weight": layout})["weight"]
        right.append(found.equal(local_of(target[0].weight)))
    return right


def strided_by_torch(
    rank: int, path: str, mesh: tuple[int, ...], text: str, shape: tuple[int, ...], step: str
) -> Any:
    """torch's save of a strided DTensor (c06), or its load of a whole tensor into one (c07, c08): what comes of it."""
    devices = device_mesh(range(math.prod(mesh)), mesh)
    made = distribute_tensor(whole(shape), devices, placements_of(text), src_data_rank=None)
    wanted = local_of(made).clone()
    try:
        if step == "save":
            dcp.save({"w": made}, checkpoint_id=path)
            return "saved"
        dcp.save({"w": whole(shape)}, checkpoint_id=path)
        local_of(made).fill_(-1.0)
        dcp.load({"w": made}, checkpoint_id=path)
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return rank >= math.prod(mesh) or local_of(made).equal(wanted)


def strided_by_us(
    rank: int, path: str, mesh: tuple[int, ...], text: str, shape: tuple[int, ...]
) -> Any:
    """The same by us, both ways: from the DTensor to a plain tensor, and back into the DTensor."""
    devices = device_mesh(range(math.prod(mesh)), mesh)
    made = distribute_tensor(whole(shape), devices, placements_of(text), src_data_rank=None)
    layout = smt.from_dtensor(made, reading="placement")
    plain = sm.Layout(shape, sm.Mesh(world=8), {})
    mine = {"w": local_of(made)} if rank in layout.mesh else {}
    smt.save(path, mine, {"w": layout})
    all_of_it = smt.load(path, {"w": plain})["w"]
    smt.save(path, {"w": all_of_it}, {"w": plain})
    back = smt.load(path, {"w": layout})
    return all_of_it.equal(whole(shape)), rank not in layout.mesh or back["w"].equal(local_of(made))


def vocabulary(rank: int, path: str, by: str) -> Any:
    """GPT-2's vocabulary of 50,257 rows on (dp=4, tp=2)."""
    if by == "torch":
        return fsdp2_by_torch(rank, path, (4, 2), 50_257)
    return fsdp2_by_us(rank, path, (4, 2), 50_257)


def elsewhere(rank: int, step: str, paths: list[str], layouts: dict[str, Any]) -> Any:
    """Saves or loads, rank 2 another folder."""
    path = paths[rank == 2]
    if step == "save":
        return caught(lambda: smt.save(path, keyed(layouts, rank), layouts))
    return caught(lambda: smt.load(path, layouts))


def wrong_on_one(rank: int, path: str, layouts: dict[str, Any], what: str) -> Any:
    """Saves, rank 2 with something that is wrong before anything is asked."""
    given: list[Any] = [path, keyed(layouts, rank), layouts]
    if rank == 2:
        outside = {"w": sm.Layout((8, 2), sm.Mesh(dp=2, ranks=(7, 8)), "(dp n) h")}
        at, value = {
            "text": (2, {"w": "n h"}),
            "ranks": (2, outside),
            "no tensors": (1, None),
            "no path": (0, None),
        }[what]
        given[at] = value
    return caught(lambda: smt.save(*given))


def lost(rank: int, path: str, layouts: dict[str, Any]) -> Any:
    """Saves, but rank 1 ends while it writes."""
    if rank == 1:
        archive.write = lambda *args, **kwargs: os._exit(7)
    return caught(lambda: saved(rank, path, layouts))


class Two(Exception):
    """Is pickled, and not unpickled: made of two arguments, and has one."""

    def __init__(self, what: str, why: str) -> None:
        super().__init__(f"{what} {why}")


class Locked(Exception):
    """Is not pickled."""

    def __init__(self) -> None:
        super().__init__("locked")
        self.lock = threading.Lock()


class Silent(Exception):
    """Says nothing of itself."""

    def __str__(self) -> str:
        raise self


class Stopped(BaseException):
    """An interrupt that is neither."""

    def __init__(self, what: str, why: str) -> None:
        super().__init__()
        self.lock = threading.Lock()


ODD_ERRORS: dict[str, BaseException] = {
    "two": Two("the disk", "is tired"),
    "locked": Locked(),
    "silent": Silent(),
    "stopped": Stopped("", ""),
}


def odd_error(
    rank: int, path: str, layouts: dict[str, Any], where: str, at: int, kind: str
) -> tuple[str, bool, Any]:
    """Saves, or loads, but rank `at` raises an error: in `progress` there, or in a method of the planner.

    How that ends, and whether the error is it or its cause; then how a save and a load end without.
    """
    error = ODD_ERRORS[kind]

    def fail(*_: object) -> Any:
        if rank == at:
            raise error

    in_progress = where in ("save", "load")
    progress = fail if in_progress else None
    real = vars(SavePlanner).get(where)
    if rank == at and not in_progress:
        setattr(SavePlanner, where, fail)
    said, found = "", None
    try:
        if where == "load":
            smt.load(path, layouts, progress=progress)
        else:
            smt.save(path, keyed(layouts, rank), layouts, progress=progress)
    except sm.ShardError as ended:
        said, found = str(ended), ended.__cause__
    except BaseException as ended:
        said, found = type(ended).__name__, ended
    finally:
        if rank == at and not in_progress:
            setattr(SavePlanner, where, real)
    return said, found is error, caught(lambda: again(rank, path, layouts))


def again(rank: int, path: str, layouts: dict[str, Any]) -> list[str]:
    """Saves and loads."""
    saved(rank, path, layouts)
    return loaded(rank, path, layouts)


def among_some(rank: int, path: str, ranks: tuple[int, ...], layouts: dict[str, Any]) -> Any:
    """Saves and loads with a group of some ranks."""
    group = dist.new_group(list(ranks))
    if rank not in ranks:
        return []
    smt.save(path, keyed(layouts, rank), layouts, group=group)
    found, wanted = smt.load(path, layouts, group=group), keyed(layouts, rank)
    return [key for key in wanted if not same(found[key], wanted[key])]


def files(path: str) -> list[str]:
    """The names in a folder."""
    return sorted(os.listdir(path)) if Path(path).is_dir() else []


def world(rank: int) -> int:
    """How many ranks there are."""
    return dist.get_world_size()


def disk_full(rank: int, path: str, layouts: dict[str, Any], where: int) -> Any:
    """Saves, but one rank's disk is full when it has written."""
    real = archive.write

    def write(*args: Any, **kwargs: Any) -> Any:
        real(*args, **kwargs)
        raise OSError(28, "No space left on device")

    if rank == where:
        archive.write = write
    try:
        return caught(lambda: saved(rank, path, layouts))
    finally:
        archive.write = real


def at_url(
    rank: int, url: str, environment: dict[str, str], layouts: dict[str, Any], other: dict[str, Any]
) -> Any:
    """Saves there twice, loads under other layouts; in this environment."""
    before = {key: os.environ.get(key) for key in environment}
    os.environ.update(environment)
    try:
        saved(rank, url, layouts)
        saved(rank, url, layouts)
        return loaded(rank, url, other)
    finally:
        for key, value in before.items():
            os.environ.pop(key) if value is None else os.environ.update({key: value})


EXPORTS: dict[str, tuple[dict[str, Any], str]] = {
    "a type": ({"tensor": "quint8"}, "'w' is quint8, a type that layouts do not have"),
    "a mesh": ({"mesh": "x"}, "mesh= is 'x', not a shardmath.Mesh"),
    "ties": ({"tied": 5}, "tied is 5; give a mapping from names"),
    "a tie": ({"tied": {"v": 5}}, "tied= has 'v': 5, where both must be str"),
    "layouts": ({"layouts": 5}, "layouts is 5; give a mapping from names to layouts"),
    "a nested tensor": ({"tensor": "nested"}, "'w' is a nested tensor"),
    "a DTensor": ({"tensor": "divided"}, "call it with the same arguments on all ranks"),
}
"""What rank 1 gives, and what is said on all."""


def export_addends(rank: int, path: str) -> Any:
    layout = sm.Layout((8,), sm.Mesh(tp=8), "n {sum: tp}")
    return caught(lambda: smt.export(path, {"w": torch.ones(8)}, {"w": layout}))


def odd_export(rank: int, path: str, case: str) -> Any:
    """Exports, rank 1 something odd."""
    options: dict[str, Any] = dict(EXPORTS[case][0]) if rank == 1 else {}
    kind = options.pop("tensor", "plain")
    tensors = {
        "plain": lambda: torch.ones(8),
        "quint8": lambda: torch.quantize_per_tensor(torch.ones(8), 1.0, 0, torch.quint8),
        "nested": lambda: torch.nested.nested_tensor([torch.ones(3), torch.ones(5)]),
        "divided": lambda: DTensor.from_local(torch.ones(1), line, [Shard(0)], run_check=False),
    }
    line = device_mesh(range(8), (8,)) if case == "a DTensor" else None
    return caught(lambda: smt.export(path, {"w": tensors[kind]()}, **options))
