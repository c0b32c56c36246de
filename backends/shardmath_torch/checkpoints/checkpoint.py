"""Checkpoints: save what ranks hold under some layouts, load it under any others.

1. `save` writes each element once, whoever holds it; `load` reads what this rank needs and nothing else. Meshes and
   numbers of processes may differ as they like.
2. Both are collective, and what goes wrong on one rank is a CheckpointError on all, naming it. So is Ctrl-C, which
   that rank itself goes on with.
3. The folder holds safetensors files, an index in JSON, and torch's own `.metadata`, so that
   torch.distributed.checkpoint reads it too. Nothing is ever unpickled but that file of a checkpoint of torch's own,
   and of that only what is on a list (`unpickled`).
4. A save that ends in the middle leaves what was in the folder before; one that ends well removes what we saved before.
5. Replicas are taken to be equal, bit by bit: any of them may be written, or parts of several.
"""

from __future__ import annotations

import functools
import os
import warnings
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


def save(
    path: str | os.PathLike[str],
    tensors: Mapping[str, Tensor | Bytes],
    layouts: Layouts,
    *,
    paths: Paths | None = None,
    group: Group | None = None,
    progress: Progress | None = None,
) -> None:
    """Saves tensors to the folder `path`, or the URL of one, in place of what was saved there before.

    `tensors` are this rank's local tensors, `layouts` everybody's layouts, the same on all ranks, both by name; a
    tensor held as several windows comes as a tuple of layouts and local tensors `name[0]`, `name[1]`, ... A layout of
    None is for bytes (or a 1-d tensor of uint8) that each rank has of its own; a rank without any leaves the name out.
    `paths` is for torch's own tools, which make nested state dicts: `{"model.w": ("model", "w")}` is found by the key
    "model", as `{"model": {"w": ...}}`; an integer is the number of an item of a list, as in torch's own paths; a name
    that is not in it is one key. `progress` is called with this rank's bytes that are written and all that it writes.

    Collective over `group` (default: all ranks), which has every rank of the layouts. Raises CheckpointError on every
    rank: for tensors that do not fit their layouts, for elements that nobody holds, for a tensor that is Partial, where
    ranks disagree, or for what the system refuses.
    """

    prepare = functools.partial(_prepare_save, path, tensors, layouts, paths, group, progress)
    with shared(group):
        job = on_all("save", prepare, group, claim=lambda _: os.fspath(path))
        try:
            _write(job, group)
        except BaseException:
            job.writer.abandon()
            raise
        share = share_of(group)
        on_all("remove what was saved before", lambda: job.writer.clear(share), group)


class _SaveJob(NamedTuple):
    """All that is known before data are written."""

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
    """Checks what is given, and does nothing yet."""
    windows = check_layouts(layouts)
    check_ranks(windows, group)
    check_paths({} if paths is None else paths, layouts)
    mapping(tensors, "the tensors are ", "names to tensors", CheckpointError)
    planner = SavePlanner(layouts, paths=paths)
    writer = Writer(path, progress=progress)
    return _SaveJob(dict(tensors), planner, writer)


class _Told(CheckpointError):
    """What torch is told of an error, and tells the other ranks."""


class _Teller:
    """A planner or writer as torch calls it: what it raises is kept in `raised`, and told in words.

    torch pickles what is raised, and an exception that does not survive that would break the group.
    """

    def __init__(self, ours: SavePlanner | Writer, raised: list[BaseException]) -> None:
        self._ours = ours
        self._raised = raised

    def __getattr__(self, name: str) -> Any:
        act = getattr(self._ours, name)

        # torch looks at what the methods take
        @functools.wraps(act)
        def tell(*args: Any, **kwargs: Any) -> Any:
            try:
                return act(*args, **kwargs)
            except _Told:  # the planner's, which the writer has asked
                raise
            except BaseException as error:
                self._raised.append(error)
                raise _Told(show_error(error)) from None

        return tell


def _write(job: _SaveJob, group: Group | None) -> None:
    """Has torch go through the steps of a save. Raises CheckpointError, and KeyboardInterrupt where it was pressed."""
    raised: list[BaseException] = []
    writer: Any = _Teller(job.writer, raised)
    planner: Any = _Teller(job.planner, raised)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is", category=UserWarning)
        try:
            with in_step(group):
                dcp_save(job.tensors, storage_writer=writer, planner=planner, process_group=group)
        except CheckpointException as error:
            _end_told(error, raised, group)
        except Exception as error:  # torch raises errors of all kinds where bytes do not come
            if is_alone():
                raise
            lost = step_lost("save", word_lost(error, group, "save"))
            if raised and not isinstance(raised[-1], Exception):
                raise raised[-1] from lost
            raise lost from (raised[-1] if raised else error)


def _end_told(
    told: CheckpointException, raised: list[BaseException], group: Group | None
) -> NoReturn:
    """Ends the save where all ranks have heard why: by this rank's interrupt, if it has one."""
    number, _ = share_of(group)
    if number in told.failures:
        own, _ = told.failures[number]
        if not isinstance(own, _Told):  # between two calls of ours, as Ctrl-C may be
            raised.append(own)
    if raised and not isinstance(raised[-1], Exception):
        mark_told(raised[-1], group)
        raise raised[-1] from None
    failures = {rank: show_error(failure[0]) for rank, failure in told.failures.items()}
    raise step_failed("save", failures, group) from (raised[-1] if raised else told)


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
    """This rank's local tensors under these layouts, by name: shape `layout.local_shape(rank)`, holes zero.

    `path` is a folder, or the URL of one, that `save` or torch.distributed.checkpoint wrote, its
    HuggingFaceStorageWriter with `save_distributed` too, or safetensors as Hugging Face keeps them;
    `names` says, as {wanted: stored}, what is stored under another name; several may be stored under one. A tuple of
    layouts gives `name[0]`, `name[1]` and so on; a layout of None the bytes that this rank saved, as uint8, or if it
    saved none those of the lowest rank. A rank that is not on a layout's mesh gets nothing of it, and ranks may ask for
    different layouts. `progress` is called with this rank's bytes that are read and all that it reads.

    What `save` wrote has a checksum for every 4 MiB of a box: of what any rank reads, each is looked at by one of the
    ranks that read it, unless not `verify`.

    Collective over `group` (default: all ranks), which waits as long as the group does. Raises CheckpointError on every
    rank: for names, shapes or types that are not those of the checkpoint, for elements that it lacks or has twice, for
    files that are missing or damaged, and for metadata of torch that say something else than what is stored.
    """
    prepare = functools.partial(
        _prepare_load, path, layouts, names, group, device, progress, verify
    )
    with shared(group):
        job = on_all("load", prepare, group, claim=functools.partial(_describe_load, verify))
        touched = job.reader.touched
        number, count = share_of(group)
        said = [] if touched is None else gather_all("load", touched, count, group)
        return on_all("load", lambda: _fill(job, device, said, number), group)


class _LoadJob(NamedTuple):
    """All that is known before data are read; and which checkpoint it is."""

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
    """Checks what is given and what is stored, makes room, and finds out what to read."""
    check_layouts(layouts)
    check_names(names)
    _check_device(device)
    rank = compat.rank_or_0()
    checkpoint = path if isinstance(path, Checkpoint) else open_checkpoint(path)
    wanted, stored = _find_wanted(checkpoint, layouts, names or {}, rank)
    planner = LoadPlanner(wanted, names=stored)
    share = share_of(group)
    reader = Reader(
        checkpoint, names=stored.values(), share=share, progress=progress, verify=verify
    )
    metadata = reader.read_metadata()
    tensors = planner.make_room()
    planner.set_up_planner(tensors, metadata)
    plan = reader.prepare_local_plan(planner.create_local_plan())
    return _LoadJob(reader, planner, plan, tensors, checkpoint.digest)


def _describe_load(verify: bool, job: _LoadJob) -> dict[str, str]:
    """What has to be the same on all ranks; they may want other tensors."""
    return {"the checkpoint": job.digest, "verify": str(verify)}


def _find_wanted(
    checkpoint: Checkpoint, layouts: Layouts, names: Mapping[str, str], rank: int
) -> tuple[dict[str, LayoutOrWindows], dict[str, str]]:
    """The layouts of all that is wanted, bytes of ranks among it, and under which names it is stored."""
    wanted: dict[str, LayoutOrWindows] = {}
    stored: dict[str, str] = {}
    for name, held in layouts.items():
        stored[name] = names.get(name, name)
        if held is None:
            stored[name] = checkpoint.find_blob(stored[name], rank)
            held = layout_of_bytes(checkpoint, stored[name], rank)
        wanted[name] = held
    return wanted, stored


def _fill(
    job: _LoadJob, device: torch.device | str, said: Sequence[bytes], number: int
) -> dict[str, Tensor]:
    """Reads the data, and checks this rank's share of the checksums, if all ranks have said which they touch."""
    if said:
        job.reader.divide_checks(said, number)
    job.reader.read_data(job.plan, job.planner).wait()
    return {key: tensor.to(device) for key, tensor in job.tensors.items()}


# What is given


def check_layouts(layouts: object) -> dict[str, Windows]:
    """The windows of each tensor, without bytes of ranks' own.

    Raises CheckpointError for what is not a mapping from names to Layouts, tuples of them, or None.
    """
    given = mapping(layouts, "layouts is ", "names to layouts", CheckpointError)
    held = {}
    for name, one in given.items():
        text(name, "a tensor's name", CheckpointError)
        if one is not None:
            held[name] = one
    return read_windows(held, CheckpointError)


WANTED = "wanted names to stored ones"


def check_names(names: object) -> None:
    """Raises CheckpointError for what does not say {wanted: stored}."""
    if names is None:
        return
    given = mapping(names, "names is ", WANTED, CheckpointError)
    for wanted, stored in given.items():
        if not isinstance(wanted, str) or not isinstance(stored, str):
            what = f"names has {shown(wanted)}: {shown(stored)}"
            raise CheckpointError(f"{what}, and names are text; give a mapping from {WANTED}")


def _check_device(device: torch.device | str) -> None:
    """Raises CheckpointError for a device on which nothing can be, before anything is read."""
    try:
        torch.empty(0, device=device)
    except Exception as error:  # torch raises errors of all kinds here
        what = f"device={device!r} has no room for tensors: {word_error(error)}"
        raise CheckpointError(f"{what}; give one that torch has here, such as 'cpu'") from error


def check_ranks(side: Mapping[str, Windows], group: Group | None) -> None:
    """Raises CheckpointError unless every rank that holds something is here to save it."""
    here = {0} if is_alone() else set(compat.ranks_of(compat.group_of(group)))
    for name, windows in side.items():
        for layout in windows:
            outside = sorted(set(layout.mesh.ranks) - here)
            if outside:
                what = f"tensor {name!r} is on ranks {outside[:8]} too, the group has {sorted(here)[:8]}"
                raise CheckpointError(f"{what}; give a group of all ranks that hold it")
