"""Checkpoints: save what ranks hold under some layouts, load it under any others.

1. `save` writes each element once, whoever holds it; `load` reads what this rank needs and nothing else. Meshes and
   numbers of processes may differ as they like.
2. Both are collective. An error on one rank raises CheckpointError on all ranks, naming the one that failed. Ctrl-C
   raises KeyboardInterrupt on the rank where it was pressed, CheckpointError on the others.
3. The folder holds safetensors files, an index in JSON, and torch's own `.metadata`, so that
   torch.distributed.checkpoint reads it too. The only file ever unpickled is the `.metadata` of a checkpoint that torch
   wrote, and only classes on a list are accepted in it (`unpickled`).
4. A save that is interrupted leaves the folder's earlier save as it was; one that succeeds removes the earlier save.
5. Replicas are assumed equal, bit by bit: any of them may be written, or parts of several.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from shardmath.base.arguments import mapping, text
from shardmath.base.text import shown, word_error
from shardmath.layouts.holdings import LayoutOrWindows, Windows, read_windows
from shardmath_torch.checkpoints.files.places import CheckpointError
from shardmath_torch.checkpoints.files.steps import (
    gather_all,
    is_alone,
    on_all,
    share_of,
    show_error,
    step_failed,
    step_lost,
)
from shardmath_torch.checkpoints.loading import LoadPlanner
from shardmath_torch.checkpoints.opening import open_checkpoint
from shardmath_torch.checkpoints.reading import Reader
from shardmath_torch.checkpoints.saving import (
    Bytes,
    Layouts,
    Paths,
    SavePlanner,
    check_paths,
)
from shardmath_torch.checkpoints.stored import Checkpoint, layout_of_bytes
from shardmath_torch.checkpoints.writing import Writer
from shardmath_torch.groups import compat
from shardmath_torch.groups.agreement.gather import in_step, mark_told, shared, word_lost
from shardmath_torch.groups.compat import Group
from shardmath_torch.moves.observing.bars import Progress

__all__ = ["check_layouts", "check_names", "check_ranks", "load", "save"]

_T = TypeVar("_T")


@compat.untraced
def save(
    path: str | os.PathLike[str],
    tensors: Mapping[str, Tensor | Bytes],
    layouts: Layouts,
    *,
    paths: Paths | None = None,
    group: Group | None = None,
    progress: Progress | None = None,
) -> None:
    """Save this rank's `tensors` (local tensors and bytes by name), together with all other ranks', as a checkpoint at
    `path`, a folder or URL; an older one is replaced. `layouts` maps each name to a layout, or to None for bytes that
    differ per rank; `paths`, only for nested dicts in torch.distributed.checkpoint, maps names to tuples of keys.

    `tensors` are this rank's local tensors, `layouts` the layouts of all ranks, the same on all, both by name; a
    tensor held as several windows comes as a tuple of layouts and local tensors `name[0]`, `name[1]`, ... A layout of
    None is for bytes (or a 1-d tensor of uint8) that differ per rank; a rank without any leaves the name out.
    `paths` is for torch's own tools, which make nested state dicts: `{"model.w": ("model", "w")}` is found by the key
    "model", as `{"model": {"w": ...}}`; an integer is an index into a list, as in torch's own paths; a name without a
    path is one key. `progress` is called with the bytes that this rank has written and the bytes that it will write.

    Collective over `group` (default: all ranks), which has every rank of the layouts. Raises CheckpointError on every
    rank if a tensor does not fit its layout or is Partial, if no rank holds some element, if ranks disagree, or if the
    folder cannot be written.
    """

    prepare = functools.partial(_prepare_save, path, tensors, layouts, paths, group, progress)
    with shared(group):
        job = on_all("save", prepare, group, claim=lambda _: {"the path": repr(os.fspath(path))})
        try:
            _write(job, group)
        except BaseException:
            job.writer.abandon()
            raise
        share = share_of(group)
        on_all("remove what was saved before", lambda: job.writer.clear(share), group)


class _SaveJob(NamedTuple):
    """A save whose arguments have been checked: this rank's tensors, the planner and the writer."""

    tensors: dict[str, Any]
    planner: SavePlanner
    writer: Writer


def _prepare_save(
    path: str | os.PathLike[str],
    tensors: Mapping[str, Tensor | Bytes],
    layouts: Layouts,
    paths: Paths | None,
    group: Group | None,
    progress: Progress | None,
) -> _SaveJob:
    """Check the arguments of a save, and return its tensors, planner and writer. Writes nothing."""
    windows = check_layouts(layouts)
    check_ranks(windows, group)
    check_paths({} if paths is None else paths, layouts)
    mapping(tensors, "the tensors are ", "names to tensors", CheckpointError)
    planner = SavePlanner(layouts, paths=paths)
    writer = Writer(path, progress=progress)
    return _SaveJob(dict(tensors), planner, writer)


class _ReportedError(CheckpointError):
    """The text of an error, in an exception that torch can pickle and send to the other ranks."""


class _ErrorReporter:
    """A planner or writer for torch to call: its errors are kept in `raised`, and raised again as text.

    torch pickles exceptions, and one that cannot be pickled would break the group.
    """

    def __init__(self, ours: SavePlanner | Writer, raised: list[BaseException]) -> None:
        self._ours = ours
        self._raised = raised

    def __getattr__(self, name: str) -> Any:
        act = getattr(self._ours, name)

        # torch inspects the methods' signatures
        @functools.wraps(act)
        def report(*args: Any, **kwargs: Any) -> Any:
            try:
                return act(*args, **kwargs)
            except _ReportedError:  # from the planner, which the writer has called
                raise
            except BaseException as error:
                self._raised.append(error)
                raise _ReportedError(show_error(error)) from None

        return report


def _write(job: _SaveJob, group: Group | None) -> None:
    """Run torch's distributed save of `job`. Raises CheckpointError, or KeyboardInterrupt on the rank where it was
    pressed."""
    if is_alone():
        # Without a process group torch's function warns, and a filter of warnings would be for all threads.
        on_all("save", functools.partial(_write_alone, job), group)
        return
    # At most one error: after it torch calls neither the writer nor the planner again.
    raised: list[BaseException] = []
    writer: Any = _ErrorReporter(job.writer, raised)
    planner: Any = _ErrorReporter(job.planner, raised)
    try:
        with in_step(group):
            dcp_save(job.tensors, storage_writer=writer, planner=planner, process_group=group)
    except CheckpointException as error:
        _raise_failure(error, raised, group)
    except Exception as error:  # torch raises errors of all kinds if a message does not arrive
        lost = step_lost("save", word_lost(error, group, "save"))
        if raised and not isinstance(raised[-1], Exception):
            raise raised[-1] from lost
        raise lost from (raised[-1] if raised else error)


def _write_alone(job: _SaveJob) -> None:
    """Take the steps of torch's distributed save of `job` as the only process."""
    _, planner, writer = job
    planner.set_up_planner(job.tensors, writer.storage_meta(), is_coordinator=True)
    plan = writer.prepare_local_plan(planner.create_local_plan())
    plans, metadata = planner.create_global_plan([plan])
    (plan,) = writer.prepare_global_plan(plans)
    results = writer.write_data(planner.finish_plan(plan), planner)
    writer.finish(metadata, [results.value()])


def _raise_failure(
    failed: CheckpointException, raised: list[BaseException], group: Group | None
) -> NoReturn:
    """Raise the error of a save whose failures all ranks know: this rank's interrupt, or a CheckpointError."""
    rank, _ = share_of(group)
    if rank in failed.failures:
        local_error, _ = failed.failures[rank]
        # A reported error is in `raised` already; another is a Ctrl-C between two calls of ours.
        if not isinstance(local_error, _ReportedError):
            raised.append(local_error)
    if raised and not isinstance(raised[-1], Exception):
        # All ranks know of this interrupt, so the group stays usable.
        mark_told(raised[-1], group)
        raise raised[-1] from None
    failures = {rank: show_error(failure[0]) for rank, failure in failed.failures.items()}
    raise step_failed("save", failures, group) from (raised[-1] if raised else failed)


@compat.untraced
def load(
    path: str | os.PathLike[str] | Checkpoint,
    layouts: Layouts,
    *,
    names: Mapping[str, str] | None = None,
    group: Group | None = None,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
    verify: bool = True,
) -> dict[str, Tensor]:
    """Read the checkpoint at `path`, and return a dict of this rank's local tensors by name, divided as `layouts` say.
    `names` maps wanted names to names in the checkpoint, if they differ; with `verify`, the checksums of what is read
    are checked.

    A local tensor has the shape `layout.local_shape(rank)`; positions without an element are zero.

    `path` is a folder, or the URL of one, that `save` or torch.distributed.checkpoint wrote (also by its
    HuggingFaceStorageWriter with `save_distributed`), or safetensors files as Hugging Face keeps them.
    `names` maps wanted names to stored ones, if they differ; several may be stored under one. Each wanted name must be
    in this rank's `layouts`. A tuple of layouts gives
    `name[0]`, `name[1]` and so on; a layout of None gives the bytes that this rank saved, as uint8, or if it saved
    none, the bytes of the lowest rank that did. A rank that is not on a layout's mesh gets no tensor for it, and ranks
    may ask for different layouts. `progress` is called with the bytes that this rank has read and will read.

    What `save` wrote has a checksum for every 4 MiB of a box. With `verify`, each checksum of a chunk that is read is
    checked by one of the ranks that read it.

    Collective over `group` (default: all ranks), which waits as long as the group does. Raises CheckpointError on every
    rank if names, shapes or types differ from the checkpoint's, if it lacks elements or has them twice, if files are
    missing or damaged, or if torch's metadata contradict what is stored.
    """
    prepare = functools.partial(
        _prepare_load, path, layouts, names, group, device, progress, verify
    )
    with shared(group):
        job = on_all("load", prepare, group, claim=functools.partial(_describe_load, verify))
        own_marks = job.reader.touched
        rank, count = share_of(group)
        # No marks if no checksums are checked.
        all_marks = [] if own_marks is None else gather_all("load", own_marks, count, group)
        return on_all("load", lambda: _fill(job, device, all_marks, rank), group)


class _LoadJob(NamedTuple):
    """A load whose arguments have been checked, with memory for its tensors; `digest` identifies the checkpoint."""

    reader: Reader
    planner: LoadPlanner
    plan: LoadPlan
    tensors: dict[str, Tensor]
    digest: str


def _prepare_load(
    path: str | os.PathLike[str] | Checkpoint,
    layouts: Layouts,
    names: Mapping[str, str] | None,
    group: Group | None,
    device: torch.device | str,
    progress: Progress | None,
    verify: bool,
) -> _LoadJob:
    """Check the arguments of a load and the checkpoint, allocate this rank's tensors, and plan what to read."""
    check_layouts(layouts)
    check_names(names)
    _check_wanted(names or {}, layouts)
    _check_device(device)
    rank = compat.rank_or_0()
    checkpoint = path if isinstance(path, Checkpoint) else open_checkpoint(path)
    wanted, stored_names = _find_wanted(checkpoint, layouts, names or {}, rank)
    planner = LoadPlanner(wanted, names=stored_names)
    share = share_of(group)
    reader = Reader(
        checkpoint, names=stored_names.values(), share=share, progress=progress, verify=verify
    )
    metadata = reader.read_metadata()
    tensors = planner.make_room()
    planner.set_up_planner(tensors, metadata)
    plan = reader.prepare_local_plan(planner.create_local_plan())
    return _LoadJob(reader, planner, plan, tensors, checkpoint.digest)


def _describe_load(verify: bool, job: _LoadJob) -> dict[str, str]:
    """Facts about a load that must be the same on all ranks, by name; wanted tensors may differ."""
    return {"the checkpoint": job.digest, "verify": str(verify)}


def _find_wanted(
    checkpoint: Checkpoint, layouts: Layouts, names: Mapping[str, str], rank: int
) -> tuple[dict[str, LayoutOrWindows], dict[str, str]]:
    """The layout and the stored name of each tensor that this rank wants. A name without a layout stands for bytes of
    each rank, which are read as a tensor of uint8."""
    wanted: dict[str, LayoutOrWindows] = {}
    stored: dict[str, str] = {}
    for name, layout in layouts.items():
        stored[name] = names.get(name, name)
        if layout is None:
            stored[name] = checkpoint.find_blob(stored[name], rank)
            layout = layout_of_bytes(checkpoint, stored[name], rank)
        wanted[name] = layout
    return wanted, stored


def _fill(
    job: _LoadJob, device: torch.device | str, packed: Sequence[bytes], rank: int
) -> dict[str, Tensor]:
    """Read this rank's tensors from the files, check its share of the checksums, and return the tensors by name.

    `packed` are all ranks' packed marks of the chunks that they read, in the group's order, in which this rank is
    number `rank`. They are empty if no checksums are checked.
    """
    if packed:
        job.reader.divide_checks(packed, rank)
    job.reader.read_data(job.plan, job.planner).wait()
    return {key: tensor.to(device) for key, tensor in job.tensors.items()}


# Arguments


def check_layouts(layouts: object) -> dict[str, Windows]:
    """Check the `layouts` of a save or load, and return a dict from each tensor's name to its Windows: a tuple of one
    layout, or of several that each cover only some of the tensor's elements. Names with None, for bytes that differ per
    rank, are left out.

    Raises CheckpointError unless `layouts` maps names to Layouts, tuples of them, or None.
    """
    given = mapping(layouts, "layouts is ", "names to layouts", CheckpointError)
    tensor_layouts = {}
    for name, layout in given.items():
        text(name, "a tensor's name", CheckpointError)
        if layout is not None:
            tensor_layouts[name] = layout
    return read_windows(tensor_layouts, CheckpointError)


WANTED = "wanted names to stored ones"


def check_names(names: object) -> None:
    """Raise CheckpointError unless `names` is None, or a mapping from wanted names to stored names, all of type str."""
    if names is None:
        return
    given = mapping(names, "names is ", WANTED, CheckpointError)
    for wanted, stored in given.items():
        if not isinstance(wanted, str) or not isinstance(stored, str):
            what = f"names= has {shown(wanted)}: {shown(stored)}, where both must be str"
            raise CheckpointError(f"{what}; give a mapping from {WANTED}")


def _check_wanted(names: Mapping[str, str], layouts: Layouts) -> None:
    """Raise CheckpointError for a key of `names` that is not a name in `layouts`."""
    for wanted, stored in names.items():
        if wanted not in layouts:
            what = (
                f"names= has {shown(wanted)}: {shown(stored)}, but layouts has no {shown(wanted)}"
            )
            fix = (
                f"map names that layouts has, such as {shown(sorted(layouts)[:8])}, to stored ones"
            )
            raise CheckpointError(f"{what}; {fix}")


def _check_device(device: torch.device | str) -> None:
    """Raise CheckpointError for a device that cannot hold a tensor, before anything is read."""
    try:
        torch.empty(0, device=device)
    except Exception as error:  # torch raises errors of all kinds here
        what = f"torch cannot make a tensor on device={device!r}: {word_error(error)}"
        fix = "give a device that this machine has, such as device='cpu'"
        raise CheckpointError(f"{what}; {fix}") from error


def check_ranks(side: Mapping[str, Windows], group: Group | None) -> None:
    """Raise CheckpointError unless all ranks of the layouts in `side` are members of the process group `group`."""
    members = {0} if is_alone() else set(compat.ranks_of(compat.group_of(group)))
    for name, windows in side.items():
        for layout in windows:
            outside = sorted(set(layout.mesh.ranks) - members)
            if outside:
                has = f"the group has only ranks {sorted(members)[:8]}"
                what = f"the layout of tensor {name!r} has ranks {outside[:8]}, but {has}"
                raise CheckpointError(f"{what}; give group= of all ranks that hold the tensor")
