"""Export: a model for Hugging Face's tools and engines, from any layouts.

1. To export is to move: every file has a rank that writes it, and a plan sends all of each tensor to that rank.
   Files are dealt to the ranks in turn, and all ranks write at once.
2. In addition to what it held before, a rank holds BATCH bytes of whole tensors at a time, or one tensor if that is
   longer; files of any size are written piece by piece.
3. Collective: an error on one rank raises CheckpointError on all, and the earlier export stays as it was.
   `hf_folder` has the rules of files, names and folders.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardmath.base.digest import digest
from shardmath.layouts.algebra.mesh import Mesh
from shardmath.layouts.holdings import LayoutOrWindows, holdings_digest
from shardmath.layouts.layout import Layout
from shardmath.models.systems.hf import Entry
from shardmath.plans.plan import Plan, plan
from shardmath_torch.checkpoints.checkpoint import check_ranks
from shardmath_torch.checkpoints.exports.sources import (
    ExportSource,
    check_source,
    describe_source,
    lay_out,
    list_ranks,
)
from shardmath_torch.checkpoints.files.places import CheckpointError, local_folder
from shardmath_torch.checkpoints.files.steps import on_all
from shardmath_torch.checkpoints.loading import local_layouts
from shardmath_torch.checkpoints.safetensors.hf_folder import (
    DraftFile,
    check_folder,
    check_tied,
    commit,
    discard,
    locked,
    told,
)
from shardmath_torch.checkpoints.safetensors.hf_split import (
    File,
    check_entries,
    count_bytes,
    file_names,
    size_of,
    split,
)
from shardmath_torch.checkpoints.saving import to_disk
from shardmath_torch.groups import compat
from shardmath_torch.groups.agreement.gather import shared
from shardmath_torch.groups.compat import Group
from shardmath_torch.groups.dtypes import dtype_of
from shardmath_torch.moves.exchange.local import by_key, fits, wanted
from shardmath_torch.moves.movers.compile import compile
from shardmath_torch.moves.observing.bars import Progress, Tally

__all__ = ["BATCH", "export"]

BATCH = 256 << 20
"""The most bytes of whole tensors that a rank holds at a time, unless one tensor is longer."""

ALIKE = (
    "call it with the same arguments on all ranks, and with mesh= if ranks have DTensors on "
    "different meshes"
)


class _ExportTask(NamedTuple):
    """An export that has been checked: its folder, its files by name, and the ranks that write."""

    folder: Path
    files: dict[str, File]
    ranks: tuple[int, ...]
    first: bool
    """Whether this rank takes the lock, and renames the files."""


@compat.untraced
def export(
    path: str | os.PathLike[str],
    source: nn.Module | Mapping[str, Tensor],
    layouts: Mapping[str, LayoutOrWindows | None] | None = None,
    *,
    tied: Mapping[str, str] | None = None,
    max_shard_size: int | str = "5GB",
    mesh: Mesh | None = None,
    group: Group | None = None,
    progress: Progress | None = None,
) -> None:
    """Write the model `source` to the folder `path` as safetensors files; pass `layouts` if it is a dict of local
    tensors. `tied` maps a tied tensor's additional names to the name under which it is stored; `mesh` tells which ranks
    have equal copies of plain (not sharded) tensors.

    `source` is a module (its parameters and persistent buffers under its own names; for transformers' models, named and
    split as by `save_pretrained`); or this rank's local tensors with the `layouts` of all ranks, as `save` takes them;
    or DTensors and plain tensors by name, the plain ones the same on all ranks of `mesh`, by default the largest of the
    DTensors'. `tied` maps additional names to names of tensors; a module's are found. They are listed in the index and
    the header's metadata, and not stored twice.
    `max_shard_size` limits a file: bytes, or text as in transformers, such as "5GB". Add a config.json yourself:
    `model.config.save_pretrained(path)`. `progress` is called with the bytes that this rank has written and will write.

    Collective over `group` (default: all ranks). An earlier export in the folder is replaced in one step when the new
    one is on disk; until then, and if the export fails, it stays as it was. Raises CheckpointError on every rank for a
    folder with weights that no export wrote, for what `save` raises for, and for what safetensors cannot hold: other
    dtypes, per-rank bytes, modules' extra states, no tensor at all; ExchangeError if a rank is lost during the move.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(shared(group))
        check = partial(_check, source, layouts, tied, mesh, progress)
        tally = on_all("export", check, group, claim=lambda _: describe_source(source, layouts))
        given = lay_out(source, layouts, mesh, group)
        given = given._replace(tied={**given.tied, **(tied or {})})
        prepare = partial(_prepare, path, given, max_shard_size, group)
        task = on_all("export", prepare, group, claim=partial(_claim_task, given), fix=ALIKE)
        lock = partial(_lock, task, stack)
        on_all("lock the folder", lock, group)
        _write(task, given, group, tally)


def _check(
    source: object,
    layouts: Mapping[str, LayoutOrWindows | None] | None,
    tied: object,
    mesh: object,
    progress: Progress | None,
) -> Tally:
    """Check the arguments, and make the tally that reports progress."""
    check_source(source, layouts, tied, mesh)
    return Tally(progress)


def _lock(task: _ExportTask, stack: contextlib.ExitStack) -> None:
    if task.first:
        stack.enter_context(locked(task.folder))


# Preparing


def _prepare(
    path: str | os.PathLike[str], given: ExportSource, limit: int | str, group: Group | None
) -> _ExportTask:
    """Check everything that can be checked before a byte moves, make the folder, and divide tensors into files."""
    check_ranks(given.layouts, group)
    rank = compat.rank_or_0()
    # A save would need the same local tensors of this rank: they must have the layouts' names, shapes and dtypes.
    source, _ = wanted(to_disk(given.layouts), rank)
    fits(source, by_key(source, given.tensors))
    entries = {name: given.entry_of(name) for name in given.layouts}
    if not entries:
        # No reader takes an index without files, and the earlier export would be lost.
        what = "the module or mapping to export has 0 tensors, and an export needs at least one"
        raise CheckpointError(f"{what}; give a module with parameters, or tensors by name")
    check_entries(entries)
    _check_tied(given.tied, entries)
    files = split(entries, size_of(limit))
    folder = local_folder(path).absolute()
    check_folder(folder)
    names = file_names(len(files))
    ranks = list_ranks(group)
    return _ExportTask(folder, dict(zip(names, files, strict=True)), ranks, rank == ranks[0])


def _check_tied(tied: Mapping[str, str], entries: Mapping[str, Entry]) -> None:
    """Raise CheckpointError if a tied name is the name of an exported tensor, or is tied to a name that is not."""
    # Checks the names only: any shape and dtype would do.
    check_entries(dict.fromkeys(tied, ((), "uint8")))
    check_tied(tied)
    for name, kept in tied.items():
        if name in entries:
            fault = f"{name!r} is the name of an exported tensor"
        elif kept not in entries:
            fault = f"{kept!r} is not an exported tensor"
        else:
            continue
        what = f"{name!r} is tied to {kept!r}, but {fault}"
        raise CheckpointError(f"{what}; tie a new name to an exported tensor")


def _claim_task(given: ExportSource, task: _ExportTask) -> dict[str, str]:
    """Facts about an export that must be the same on all ranks, by name: folder, files and layouts."""
    claims = {"the folder": repr(str(task.folder))}
    for file, tensors in task.files.items():
        for name, (shape, dtype) in tensors.items():
            claims[repr(name)] = f"{dtype}{list(shape)} in {file}"
    for name, kept_name in given.tied.items():
        claims[f"the tensor of the name {name!r}"] = repr(kept_name)
    for name, windows in given.layouts.items():
        # By what ranks hold: equal layouts may be spelled in several ways.
        holdings = digest([holdings_digest(layout) for layout in windows])
        claims[f"what ranks hold of {name!r}"] = holdings[:12]
    return claims


# Files


def _write(task: _ExportTask, given: ExportSource, group: Group | None, tally: Tally) -> None:
    """Write all files, one per rank at a time, and rename them once all are written."""
    names = list(task.files)
    count = len(task.ranks)
    drafts: list[DraftFile] = []
    try:
        for first in range(0, len(names), count):
            wave = names[first : first + count]
            _write_wave(task, given, wave, drafts, group, tally)
        on_all("name its files", partial(_commit, task, given), group)
        drafts.clear()
    finally:
        discard(drafts)


def _write_wave(
    task: _ExportTask,
    given: ExportSource,
    names: Sequence[str],
    drafts: list[DraftFile],
    group: Group | None,
    tally: Tally,
) -> None:
    """Write several files at the same time, the i-th of `names` on the i-th rank, which adds its draft to `drafts`."""
    place = task.ranks.index(compat.rank_or_0())
    name = names[place] if place < len(names) else None
    draft = on_all("write its file", partial(_open_draft, task, given, name, tally), group)
    if draft is not None:
        drafts.append(draft)
    batches = [_list_batches(task.files[each]) for each in names]
    # In step: at a time, every rank that writes holds one batch of its file.
    for batch_of_each in zip_longest(*batches, fillvalue=()):
        # Not strict: there may be fewer files than ranks.
        by_rank = dict(zip(task.ranks, batch_of_each, strict=False))
        tensors = _gather(given, by_rank, group)
        append = partial(_append, task, draft, tensors, tally)
        on_all("write its file", append, group)
    on_all("write its file", partial(_close, task, draft), group)


def _open_draft(
    task: _ExportTask, given: ExportSource, name: str | None, tally: Tally
) -> DraftFile | None:
    """The draft of this rank's next file; None if there are no more files for this rank."""
    place = task.ranks.index(compat.rank_or_0())
    # All files that this rank ever writes: `begin` only notes their total, so that each call may repeat it.
    files = list(task.files.values())[place :: len(task.ranks)]
    tally.begin(sum(count_bytes(entry) for file in files for entry in file.values()))
    if name is None:
        return None
    tensors = task.files[name]
    tied = {other: kept for other, kept in given.tied.items() if kept in tensors}
    with told(task.folder):  # an OSError becomes a CheckpointError
        return DraftFile(task.folder, name, tensors, tied)


def _append(
    task: _ExportTask, draft: DraftFile | None, tensors: Mapping[str, Tensor], tally: Tally
) -> None:
    if draft is None:
        return
    with told(task.folder):
        for tensor in tensors.values():
            draft.append(tensor, tally)


def _close(task: _ExportTask, draft: DraftFile | None) -> None:
    if draft is not None:
        with told(task.folder):
            draft.close()


def _commit(task: _ExportTask, given: ExportSource) -> None:
    if task.first:
        with told(task.folder):
            commit(task.folder, task.files, given.tied)


def _list_batches(tensors: File) -> Iterator[tuple[str, ...]]:
    """The names of a file's tensors, in batches of at most BATCH bytes or one tensor."""
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


# Moves


def _gather(
    given: ExportSource, by_rank: Mapping[int, tuple[str, ...]], group: Group | None
) -> dict[str, Tensor]:
    """Move each of the whole tensors to the rank that writes it, and return this rank's, in order."""
    rank = compat.rank_or_0()
    goal = _list_goals(given, by_rank)
    source = {name: given.layouts[name] for name in goal}
    device = _device_of(group)
    sent: dict[str, Tensor] = {}
    for _, key, _ in local_layouts(source, rank):
        local = given.tensors[key].detach()
        sent[key] = local.to(device)
    received: dict[str, Tensor] = {}
    for name in by_rank.get(rank, ()):
        layout = goal[name]
        dtype = dtype_of(layout.dtype)
        received[name] = torch.empty(layout.shape, dtype=dtype, device=device)
    _move(plan(source, goal), sent, received, group)
    return received


def _list_goals(given: ExportSource, by_rank: Mapping[int, tuple[str, ...]]) -> dict[str, Layout]:
    """The layout of each whole tensor on the rank that writes it."""
    goal: dict[str, Layout] = {}
    for writer, names in by_rank.items():
        mesh = Mesh(ranks=[writer])
        for name in names:
            held = given.layouts[name][0]
            goal[name] = Layout(held.shape, mesh, (), dtype=held.dtype)
    return goal


def _device_of(group: Group | None) -> torch.device:
    """The device that the group's backend sends from."""
    if dist.is_initialized():
        backend = compat.backend_of(compat.group_of(group))
        if backend == "nccl":
            return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _move(
    plan: Plan, sent: dict[str, Tensor], received: dict[str, Tensor], group: Group | None
) -> None:
    """Move tensors by `plan` from `sent` into `received`; without a process group, by copying."""
    if dist.is_initialized():
        compile(plan, group=group)(sent or None, out=received or None)
        return
    for transfer in plan.transfers():
        cells = received[transfer.dst_tensor][transfer.dst_slices]
        cells.copy_(sent[transfer.src_tensor][transfer.src_slices])
