"""`export`: a model for Hugging Face's tools and engines, from any layouts.

1. To export is to move: every file has a rank that writes it, and a plan takes each tensor whole to that rank. Files
   are dealt to the ranks in turn, and all ranks write at once.
2. A rank holds BATCH bytes of whole tensors at a time, or one tensor where that is longer, beside what it had; files
   of any size are written piece by piece.
3. Collective: what goes wrong on one rank is a CheckpointError on all, and then the former export is as it was.
   `hf_folder` has the rules of files, names and folders.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardmath.algebra.mesh import Mesh
from shardmath.base.digest import digest
from shardmath.base.given import mapping, plural, shown
from shardmath.families.hf import Entry
from shardmath.layouts.layout import Layout
from shardmath.plans.plan import Plan, plan
from shardmath_torch import compat
from shardmath_torch.checkpoints.checkpoint import check_layouts, check_ranks, on_all
from shardmath_torch.checkpoints.loading import local_layouts
from shardmath_torch.checkpoints.saving import to_disk
from shardmath_torch.compat import Group
from shardmath_torch.dtensors.dtensor import from_dtensors, local_of
from shardmath_torch.dtypes import dtype_of
from shardmath_torch.exchange.compile import compile
from shardmath_torch.exchange.local import by_key, fits, wanted
from shardmath_torch.files.places import CheckpointError, local_folder
from shardmath_torch.safetensors.hf_folder import Draft, check_folder, commit, discard, locked, told
from shardmath_torch.safetensors.hf_split import File, check_entries, file_names, size_of, split
from shardmath_torch.safetensors.slices import Progress
from shardmath_torch.states.memory import check_shaped
from shardmath_torch.states.modules import describe, model_of

__all__ = ["BATCH", "export"]

BATCH = 256 << 20
"""Bytes of whole tensors that a rank holds to write them."""

TIED = "names to names of tensors"

Windows: TypeAlias = Layout | tuple[Layout, ...]


class _Given(NamedTuple):
    """What is exported: this rank's tensors by local key, everybody's layouts, and other names of some tensors."""

    tensors: Mapping[str, Tensor]
    layouts: Mapping[str, Windows]
    tied: Mapping[str, str]


class _Task(NamedTuple):
    """What all ranks do: files by name, and the ranks that write."""

    folder: Path
    files: dict[str, File]
    ranks: tuple[int, ...]
    first: bool
    """Whether this rank is the one that takes the lock, and gives the files their names."""


def export(
    path: str | os.PathLike[str],
    source: nn.Module | Mapping[str, Tensor],
    layouts: Mapping[str, Layout | tuple[Layout, ...] | None] | None = None,
    *,
    tied: Mapping[str, str] | None = None,
    max_shard_size: int | str = "5GB",
    mesh: Mesh | None = None,
    group: Group | None = None,
    progress: Progress | None = None,
) -> None:
    """Writes whole tensors to `path` as safetensors with an index, which transformers and engines load.

    `source` is a module (its parameters and persistent buffers, under its own names); or this rank's local tensors with
    everybody's `layouts`, as `save` takes them; or DTensors and plain tensors by name, the plain ones the same on all
    ranks of `mesh`, by default the largest of the DTensors'. `tied` says, as {name: name of a tensor}, which names are
    another's; of a module that is known. They are in the index and the header's metadata, not stored twice.
    `max_shard_size` is of a file: bytes, or text as transformers has it, such as "5GB". A config.json is yours to add:
    `model.config.save_pretrained(path)`. `progress` is called with the bytes that this rank has just written.

    Collective over `group` (default: all ranks). An earlier export in the folder is replaced at once, when the new one
    is on disk; until then, and where this fails, it is as it was. Raises CheckpointError on every rank: for a folder
    with weights that no export wrote, for what `save` refuses, and for what safetensors cannot say: types it has no
    name for, bytes of ranks' own, extra states of modules; ExchangeError where a rank is lost on the way.
    """
    check = partial(_check_given, source, layouts, tied, mesh)
    on_all("export", check, group, claim=lambda _: _kinds(source))
    given = _given(source, layouts, mesh, group)
    given = given._replace(tied={**given.tied, **(tied or {})})
    ready = partial(_ready, path, given, max_shard_size, group)
    task = on_all("export", ready, group, claim=partial(_claim, given))
    with contextlib.ExitStack() as stack:
        on_all(
            "lock the folder",
            lambda: task.first and stack.enter_context(locked(task.folder)),
            group,
        )
        _export(task, given, group, progress)


def _given(
    source: nn.Module | Mapping[str, Tensor],
    layouts: Mapping[str, Windows | None] | None,
    mesh: Mesh | None,
    group: Group | None,
) -> _Given:
    if isinstance(source, nn.Module):
        return _of_module(source, mesh, group)
    if layouts is None:
        return on_all("lay out its tensors", partial(_of_dtensors, source, mesh, group), group)
    return _Given(source, {name: one for name, one in layouts.items() if one is not None}, {})


def _of_module(module: nn.Module, mesh: Mesh | None, group: Group | None) -> _Given:
    described = on_all(
        "describe its module", lambda: describe(module), group, claim=lambda d: d.claim
    )
    model = on_all("lay out its module", lambda: model_of(described, mesh=mesh, group=group), group)

    def checked() -> _Given:
        if model.extra:
            what = f"{next(iter(model.extra))!r} is an extra state, bytes that no safetensors file of weights has"
            raise CheckpointError(
                f"{what}; export tensors and layouts without it: take them from state_of"
            )
        others = {other: first for first, names in model.names.items() for other in names[1:]}
        layouts = {name: slot.layout for name, slot in model.slots.items()}
        return _Given({name: slot.local for name, slot in model.slots.items()}, layouts, others)

    return on_all("export its module", checked, group)


def _check_given(
    tensors: object,
    layouts: Mapping[str, Windows | None] | None,
    tied: object,
    mesh: object,
) -> None:
    if not isinstance(mesh, Mesh | None):
        raise CheckpointError(f"mesh is {shown(mesh)}; give a shardmath.Mesh, or None")
    for name, kept in mapping(
        {} if tied is None else tied, "tied is ", TIED, CheckpointError
    ).items():
        if not isinstance(name, str) or not isinstance(kept, str):
            what = f"tied has {shown(name)}: {shown(kept)}, and names are text"
            raise CheckpointError(f"{what}; give a mapping from {TIED}")
    if isinstance(tensors, nn.Module):
        return
    if not isinstance(tensors, Mapping):
        raise CheckpointError(
            f"a {type(tensors).__name__} is exported; give a module, or tensors by name"
        )
    check_layouts(layouts if layouts is not None else {})
    for name, one in (layouts or {}).items():
        if one is None:
            raise CheckpointError(
                f"{name!r} is bytes of ranks' own, which safetensors have none of; leave it out"
            )
    for name, tensor in tensors.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise CheckpointError(
                f"{name!r} is a {type(tensor).__name__}; give tensors alone, by name"
            )
        check_shaped(name, tensor)


def _kinds(source: nn.Module | Mapping[str, Tensor]) -> str:
    """What has to be the same on all ranks before they ask each other where DTensors lie."""
    if isinstance(source, nn.Module):
        return "a module"
    divided = {n: str(t.placements) for n, t in source.items() if isinstance(t, DTensor)}
    kind = f"tensors, {plural(divided, 'DTensor')} among them"
    return f"{kind}, {digest(sorted(divided.items()))[:12]}"


def _of_dtensors(tensors: Mapping[str, Tensor], mesh: Mesh | None, group: Group | None) -> _Given:
    layouts = from_dtensors({name: t for name, t in tensors.items() if isinstance(t, DTensor)})
    plain = mesh or max(
        (one.mesh for one in layouts.values()), key=lambda m: m.size, default=_all(group)
    )
    found: dict[str, Windows] = {
        name: layouts.get(name) or Layout(tuple(t.shape), plain, {}, dtype=_kind(t))
        for name, t in tensors.items()
    }
    return _Given(
        {n: local_of(t) if isinstance(t, DTensor) else t for n, t in tensors.items()}, found, {}
    )


def _kind(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _ranks(group: Group | None) -> tuple[int, ...]:
    return compat.ranks_of(compat.group_of(group)) if dist.is_initialized() else (0,)


def _all(group: Group | None) -> Mesh:
    ranks = _ranks(group)
    return Mesh(world=len(ranks), ranks=ranks)


def _ready(
    path: str | os.PathLike[str], given: _Given, limit: int | str, group: Group | None
) -> _Task:
    """What to do, after everything is checked that can be before a byte moves."""
    check_ranks(given.layouts, group)
    moved, rank = to_disk(given.layouts), compat.rank_or_0()
    want = wanted(moved, rank)[0]
    fits(want, by_key(want, given.tensors))
    entries = {name: _entry(one) for name, one in given.layouts.items()}
    check_entries(entries)
    _check_tied(given.tied, entries)
    files, folder = split(entries, size_of(limit)), local_folder(path).absolute()
    check_folder(folder)
    ranks = _ranks(group)
    return _Task(
        folder, dict(zip(file_names(len(files)), files, strict=True)), ranks, rank == ranks[0]
    )


def _entry(one: Windows) -> Entry:
    first = one[0] if isinstance(one, tuple) else one
    return first.shape, first.dtype


def _check_tied(tied: Mapping[str, str], entries: Mapping[str, Entry]) -> None:
    check_entries(dict.fromkeys(tied, ((), "uint8")))
    for name, kept in tied.items():
        if kept not in entries or name in entries:
            fault = (
                f"{name!r} is exported itself" if name in entries else f"{kept!r} is not exported"
            )
            raise CheckpointError(
                f"{name!r} is tied to {kept!r}, but {fault}; tie a new name to a tensor that is"
            )


def _claim(given: _Given, task: _Task) -> str:
    """What ranks must have in common."""
    said = digest(
        (
            to_disk(given.layouts).digest,
            sorted(given.tied.items()),
            [list(f) for f in task.files.values()],
        )
    )
    return f"{task.folder}, {len(task.files)} files of tensors and layouts {said[:12]}"


def _export(task: _Task, given: _Given, group: Group | None, progress: Progress | None) -> None:
    count, me = len(task.ranks), task.ranks.index(compat.rank_or_0())
    names = list(task.files)
    drafts: list[Draft] = []
    try:
        for wave in (names[at : at + count] for at in range(0, len(names), count)):
            mine = wave[me] if me < len(wave) else None
            draft = on_all("write its file", partial(_begun, task, given, mine), group)
            drafts += [draft] if draft else []
            for batch in zip_longest(*(_batches(task.files[name]) for name in wave), fillvalue=()):
                whole = _gathered(given, dict(zip(task.ranks, batch, strict=False)), group)
                on_all("write its file", partial(_append, task, draft, whole, progress), group)
            on_all("write its file", partial(_close, task, draft), group)
        on_all("name its files", partial(_commit, task, given), group)
        drafts.clear()
    finally:
        discard(drafts)


def _begun(task: _Task, given: _Given, name: str | None) -> Draft | None:
    if name is None:
        return None
    tensors = task.files[name]
    with told(task.folder):
        return Draft(
            task.folder,
            name,
            tensors,
            {n: kept for n, kept in given.tied.items() if kept in tensors},
        )


def _append(
    task: _Task, draft: Draft | None, whole: Mapping[str, Tensor], progress: Progress | None
) -> None:
    if draft:
        with told(task.folder):
            for tensor in whole.values():
                draft.append(tensor)
                if progress:
                    progress(tensor.nbytes)


def _close(task: _Task, draft: Draft | None) -> None:
    if draft:
        with told(task.folder):
            draft.close()


def _commit(task: _Task, given: _Given) -> None:
    if task.first:
        with told(task.folder):
            commit(task.folder, task.files, given.tied)


def _batches(tensors: File) -> Iterator[tuple[str, ...]]:
    """The names of a file, so many at a time that a rank can hold them."""
    batch: list[str] = []
    room = BATCH
    for name, (shape, dtype) in tensors.items():
        nbytes = torch.Size(shape).numel() * dtype_of(dtype).itemsize
        if batch and nbytes > room:
            yield tuple(batch)
            batch, room = [], BATCH
        batch.append(name)
        room -= nbytes
    if batch:
        yield tuple(batch)


def _gathered(
    given: _Given, by_rank: Mapping[int, tuple[str, ...]], group: Group | None
) -> dict[str, Tensor]:
    """Those tensors whole that are to be at this rank, in their order; all ranks get theirs at once."""
    rank = compat.rank_or_0()
    at = {name: Mesh(ranks=[writer]) for writer, names in by_rank.items() for name in names}
    entries = {name: _entry(given.layouts[name]) for name in at}
    whole = {
        name: Layout(shape, at[name], (), dtype=dtype) for name, (shape, dtype) in entries.items()
    }
    source = {name: given.layouts[name] for name in at}
    device = _device(group)
    src = {key: given.tensors[key].detach().to(device) for _, key, _ in local_layouts(source, rank)}
    here = by_rank.get(rank, ())
    out = {
        name: torch.empty(entries[name][0], dtype=dtype_of(entries[name][1]), device=device)
        for name in here
    }
    _move(plan(source, whole), src, out, group)
    return out


def _device(group: Group | None) -> torch.device:
    """Where the group can send from."""
    nccl = dist.is_initialized() and compat.backend_of(compat.group_of(group)) == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")


def _move(moved: Plan, src: dict[str, Tensor], out: dict[str, Tensor], group: Group | None) -> None:
    if dist.is_initialized():
        compile(moved, group=group)(src or None, out=out or None)
        return
    for t in moved.transfers():  # one process, which has all there is
        out[t.dst_tensor][t.dst_slices] = src[t.src_tensor][t.src_slices]
