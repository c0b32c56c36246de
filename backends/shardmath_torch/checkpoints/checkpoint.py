"""Checkpoints: save what ranks hold under some layouts, load it under any others.

1. `save` writes each element once, whoever holds it; `load` reads what this rank needs and nothing else. Meshes and
   numbers of processes may differ as they like.
2. Both are collective, and what goes wrong on one rank is a CheckpointError on all, naming it.
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
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from shardmath.algebra.mesh import Mesh
from shardmath.base.errors import ShardError
from shardmath.base.given import mapping, plural, shown
from shardmath.layouts.layout import Layout
from shardmath_torch import compat
from shardmath_torch.agreement.gather import gather
from shardmath_torch.checkpoints.loading import LoadPlanner, Reader, local_layouts
from shardmath_torch.checkpoints.saving import Bytes, Layouts, Paths, SavePlanner, check_paths
from shardmath_torch.checkpoints.stored import Checkpoint, open_checkpoint
from shardmath_torch.checkpoints.writing import Writer
from shardmath_torch.compat import Group
from shardmath_torch.files.places import CheckpointError
from shardmath_torch.files.weights import Progress, room

__all__ = ["check_layouts", "check_names", "check_ranks", "load", "on_all", "save"]

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
    "model", as `{"model": {"w": ...}}`; a name that is not in it is one key. `progress` is called with the bytes that
    this rank has just written.

    Collective over `group` (default: all ranks), which has every rank of the layouts. Raises CheckpointError on every
    rank: for tensors that do not fit their layouts, for elements that nobody holds, for a tensor that is Partial, where
    ranks disagree, or for what the system refuses.
    """

    def ready() -> tuple[dict[str, Any], SavePlanner, Writer]:
        check_layouts(layouts)
        check_ranks(layouts, group)
        check_paths({} if paths is None else paths, layouts)
        mapping(tensors, "the tensors are ", "names to tensors", CheckpointError)
        return dict(tensors), SavePlanner(layouts, paths=paths), Writer(path, progress=progress)

    state, planner, writer = on_all("save", ready, group, claim=lambda _: os.fspath(path))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is", category=UserWarning)
        try:
            dcp_save(state, storage_writer=writer, planner=planner, process_group=group)
        except CheckpointException as error:
            writer.abandon()
            failures = {rank: _text(failure[0]) or "" for rank, failure in error.failures.items()}
            mine = error.failures.get(_share(group)[0])
            if mine is not None and not isinstance(mine[0], Exception):
                raise mine[0] from None  # Ctrl-C, which torch has caught to tell the others
            raise _failed("save", failures, group) from error
        except RuntimeError as error:
            writer.abandon()
            raise _gone("save", error) from error
        except BaseException:
            writer.abandon()
            raise
    on_all("remove what was saved before", lambda: writer.clear(_share(group)), group)


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
    different layouts. `progress` is called with the bytes that this rank has just read.

    What `save` wrote has a checksum for every 4 MiB of a box: of what any rank reads, each is looked at by one of the
    ranks that read it, unless not `verify`.

    Collective over `group` (default: all ranks), which waits as long as the group does. Raises CheckpointError on every
    rank: for names, shapes or types that are not those of the checkpoint, for elements that it lacks or has twice, for
    files that are missing or damaged, and for metadata of torch that say something else than what is stored.
    """
    prepare = functools.partial(_ready, path, layouts, names, group, device, progress, verify)
    ready = on_all("load", prepare, group, claim=lambda ready: f"{ready.digest}, verify={verify}")
    touched = ready.reader.touched
    if touched is not None:
        number, count = _share(group)
        ready.reader.share(_gathered("load", touched, count, group), number)
    return on_all("load", lambda: _filled(ready, device), group)


class _Ready(NamedTuple):
    """All that is known before data are read; and which checkpoint it is."""

    reader: Reader
    planner: LoadPlanner
    plan: LoadPlan
    out: dict[str, Tensor]
    digest: str


def _ready(
    path: str | os.PathLike[str] | Checkpoint,
    layouts: Layouts,
    names: Mapping[str, str] | None,
    group: Group | None,
    device: torch.device | str,
    progress: Progress | None,
    verify: bool,
) -> _Ready:
    check_layouts(layouts)
    check_names(names)
    _check_device(device)
    rank, share = compat.rank_or_0(), _share(group)
    checkpoint = path if isinstance(path, Checkpoint) else open_checkpoint(path)
    stored = {name: (names or {}).get(name, name) for name in layouts}
    wanted: dict[str, Layout | tuple[Layout, ...]] = {}
    for name, one in layouts.items():
        if one is None:
            stored[name] = checkpoint.blob(stored[name], rank)
        wanted[name] = _own(checkpoint, stored[name], rank) if one is None else one
    planner = LoadPlanner(wanted, names=stored)
    reader = Reader(
        checkpoint, names=stored.values(), share=share, progress=progress, verify=verify
    )
    metadata = reader.read_metadata()
    out = {key: room(layout, rank) for _, key, layout in local_layouts(wanted, rank)}
    planner.set_up_planner(out, metadata)
    plan = reader.prepare_local_plan(planner.create_local_plan())
    return _Ready(reader, planner, plan, out, checkpoint.digest)


def _filled(ready: _Ready, device: torch.device | str) -> dict[str, Tensor]:
    ready.reader.read_data(ready.plan, ready.planner).wait()
    return {key: tensor.to(device) for key, tensor in ready.out.items()}


def _own(checkpoint: Checkpoint, name: str, rank: int) -> Layout:
    """The layout of bytes that are one rank's."""
    saved = checkpoint[name]
    if (saved.dtype, len(saved.shape)) != ("uint8", 1):
        raise CheckpointError(
            f"{name!r} is a tensor, {saved.dtype}{list(saved.shape)}, not bytes; give it a layout"
        )
    return Layout(saved.shape, Mesh(ranks=[rank]), (), dtype=saved.dtype)


def _together() -> bool:
    """Whether there are processes to do this with."""
    return dist.is_available() and dist.is_initialized()


def _share(group: Group | None) -> tuple[int, int]:
    """This rank's number in the group, and how many there are. Raises ExchangeError for a rank outside."""
    if not _together():
        return 0, 1
    found = compat.group_of(group)
    return dist.get_rank(found), dist.get_world_size(found)


def on_all(
    step: str,
    act: Callable[[], _T],
    group: Group | None,
    *,
    claim: Callable[[_T], str] | None = None,
) -> _T:
    """What `act`, which talks to nobody, returns. Raises CheckpointError on every rank where it raises on one, or where
    what ranks claim is not the same."""
    count = _share(group)[1]
    done: list[_T] = []
    error: Exception | None = None
    claimed = ""
    try:
        done.append(act())
        claimed = claim(done[0]) if claim is not None else ""
    except Exception as raised:
        error = raised
    mine = _text(error), claimed
    said: list[Any] = _gathered(step, mine, count, group)
    failures = {i: text for i, (text, _) in enumerate(said) if text is not None}
    if failures:
        raise _failed(step, failures, group) from error
    other = next((i for i, (_, theirs) in enumerate(said) if theirs != said[0][1]), None)
    if other is not None:
        what = f"it is {said[other][1]!r} here and {said[0][1]!r} on the first rank of the group"
        raise _failed(
            step,
            {other: f"{what}; call it with the same on all ranks, and not while it is saved"},
            group,
        )
    return done[0]


def _gathered(step: str, mine: object, count: int, group: Group | None) -> list[Any]:
    if not _together():
        return [mine] * count
    return gather(mine, group, functools.partial(_gone, step))


def _text(error: BaseException | None) -> str | None:
    if error is None or isinstance(error, ShardError):
        return None if error is None else str(error)
    return f"{type(error).__name__}: {error}"


def _gone(step: str, error: RuntimeError) -> CheckpointError:
    """The error where ranks no longer hear of each other."""
    fix = "see which rank ended first, start the ranks again, and load what was saved last"
    return CheckpointError(f"a rank is gone, the others could not {step}: {error}; {fix}")


def _failed(step: str, failures: Mapping[int, str], group: Group | None) -> CheckpointError:
    """The error of the first rank that has one, ranks of the group as global ones."""
    first = min(failures)
    ranks = [dist.get_global_rank(group, i) if group is not None else i for i in sorted(failures)]
    others = f" (and {plural(len(ranks) - 1, 'other')})" if len(ranks) > 1 else ""
    return CheckpointError(f"rank {ranks[0]}{others} could not {step}: {failures[first]}")


def check_layouts(layouts: object) -> None:
    """Raises CheckpointError for what is no mapping from names to layouts, tuples of them, or None."""
    if not isinstance(layouts, Mapping):
        raise CheckpointError(
            f"layouts is a {type(layouts).__name__}; give a mapping from names to layouts"
        )
    for name, one in layouts.items():
        for layout in one if isinstance(one, tuple) else (one,):
            if (
                not isinstance(name, str)
                or not (layout is None or isinstance(layout, Layout))
                or one == ()
            ):
                raise CheckpointError(
                    f"{name!r} has the layout {one!r}; names are text, layouts a Layout, some, or None"
                )


def check_names(names: object) -> None:
    """Raises CheckpointError for what does not say {wanted: stored}."""
    given = {} if names is None else mapping(names, "names is ", WANTED, CheckpointError)
    for wanted, stored in given.items():
        if not isinstance(wanted, str) or not isinstance(stored, str):
            what = f"names has {shown(wanted)}: {shown(stored)}"
            raise CheckpointError(f"{what}, and names are text; give a mapping from {WANTED}")


WANTED = "wanted names to stored ones"


def _check_device(device: torch.device | str) -> None:
    """Raises CheckpointError for a device on which nothing can be, before anything is read."""
    try:
        torch.empty(0, device=device)
    except Exception as error:  # torch raises errors of all kinds here
        what = f"device={device!r} has no room for tensors: {type(error).__name__}: {error}"
        raise CheckpointError(f"{what}; give one that torch has here, such as 'cpu'") from error


def check_ranks(layouts: Layouts, group: Group | None) -> None:
    """Every rank that holds something is here to save it."""
    here = set(compat.ranks_of(compat.group_of(group))) if _together() else {0}
    for name, one in layouts.items():
        for layout in one if isinstance(one, tuple) else (one,):
            if layout is not None and not here.issuperset(layout.mesh.ranks):
                outside = sorted(set(layout.mesh.ranks) - here)
                what = f"tensor {name!r} is on ranks {outside[:8]} too, the group has {sorted(here)[:8]}"
                raise CheckpointError(f"{what}; save with a group of all ranks that hold it")
