"""Sources: the tensors of a trainer's rank, and how all of its ranks store them.

1. A module, plain or under FSDP2, HSDP or tensor parallelism, is read. Tensors are sent by its names. If its
   checkpoints have other tensors, as for transformers' experts, vLLM's loaders get those.
2. A trainer that stores its tensors in another way declares how, by rows (`shardmath.storage`), which have the names.
3. A WeightSource of vLLM declares layouts, too. Its tensors are asked for at each update, in pieces where it has them.
4. The parameters that a module trains are sent. It is an error if a module has got another parameter since.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from typing import Any, TypeAlias

from torch import Tensor, nn

import shardmath as sm
import shardmath_torch as smt
from shardmath.base.dtypes import canonical
from shardmath.base.errors import StoreError
from shardmath.layouts.placement import Spec
from shardmath.models.refits.coverage import Native, show_native
from shardmath.models.storage.stored import KnownSide, Shapes, Stored
from shardmath.values.transforms.pointwise import Cast
from shardmath_torch.groups import compat
from shardmath_torch.tensors.conversions.saved import record_conversion
from shardmath_torch.tensors.refits.gathered import check_not_gathered
from shardmath_torch.tensors.refits.holders import (
    Watched,
    find_owners,
    find_removed,
    find_replaced,
    watch,
)
from shardmath_torch.tensors.refits.views import name_natives

__all__ = [
    "Chunks",
    "Source",
    "Told",
    "check_kept",
    "check_types",
    "read_layout",
    "read_source",
    "watch_modules",
]

Chunks: TypeAlias = Mapping[str, Tensor] | Sequence[Mapping[str, Tensor]]
"""Tensors by name, or those of each virtual stage."""


@dataclass(frozen=True)
class Source:
    """The tensors of one rank of a trainer, and a description of how all ranks of the trainer store them.

    `tensors` are this rank's, by the trainer's names, or one such mapping per virtual stage. `side` is how all of the
    trainer's ranks store them: rows, or a layout of each. `shapes` has shape and dtype of each tensor by the name that
    vLLM's loader knows, or that `checkpoint` has; `served` has the same as engines get them, if they get another type.
    `checkpoint` says how vLLM's loader gets these tensors, if it does not get the tensors themselves (`converting`). It
    is an error if a parameter of `modules` was replaced by another one. `rank` is this process's rank in `side`, if it
    is known; if there are several trainers it must be TrainerInfo's. If `renew` is given, each update calls it for the
    tensors, and keeps them until its end; `tensors` may then be {}.
    """

    tensors: Chunks
    side: Stored | Mapping[str, sm.Layout]
    shapes: Shapes
    served: Shapes | None = None
    checkpoint: sm.storage.Recorded | None = None
    modules: tuple[nn.Module, ...] = ()
    rank: int | None = None
    renew: Callable[[], Chunks] | None = None

    def renewed(self) -> Source:
        """Return this Source with the tensors that `renew` returns now; without `renew`, the Source itself."""
        return self if self.renew is None else replace(self, tensors=self.renew())

    def released(self) -> Source:
        """Return this Source without the tensors that `renew` returned; without `renew`, the Source itself."""
        return self if self.renew is None else replace(self, tensors={})

    def list_chunks(self) -> list[Mapping[str, Tensor]]:
        """Return the mapping from name to tensor of each virtual stage, as a list."""
        return [self.tensors] if isinstance(self.tensors, Mapping) else list(self.tensors)

    def select(self, natives: Iterable[Native]) -> list[dict[str, Tensor]]:
        """Return the tensors that `natives` names by virtual stage and stored name, and that are there: a dict for each
        virtual stage."""
        chunks = self.list_chunks()
        selected: list[dict[str, Tensor]] = [{} for _ in chunks]
        for number, name in natives:
            if name in chunks[number]:
                selected[number][name] = chunks[number][name]
        return selected

    def tell(self) -> Told:
        """Return a Told, the facts that ranks need to plan: how all of the trainer's ranks store its tensors, with
        shapes and dtypes.
        """
        shapes = dict(self.shapes)
        return Told(self.side, shapes, dict(self.served or shapes), self.checkpoint)


@dataclass(frozen=True)
class Told:
    """The facts about a trainer's tensors that all of its ranks share: storage, shapes and dtypes."""

    side: Stored | Mapping[str, sm.Layout]
    shapes: Shapes
    served: Shapes
    checkpoint: sm.storage.Recorded | None

    @property
    def rules(self) -> dict[str, Cast]:
        """The cast of each tensor that engines get in another dtype than the trainer's, by name."""
        rules = {}
        for name, (_, dtype) in self.served.items():
            if self.shapes[name][1] != dtype:
                rules[name] = Cast(dtype)
        return rules


def read_source(
    given: Any, dtype: str | None = None, *, rank: int = 0, trainers: int = 1
) -> Source:
    """Return `given` if it is a Source; if it is a torch.nn.Module, or vLLM's ModuleSource around one, return a Source
    made from the module; if it is another WeightSource of vLLM, return a Source that asks it for tensors at each
    update. Engines get the module's parameters, or the WeightSource's tensors, in `dtype`, by default the trainer's.

    `rank` of `trainers` is this process; only a WeightSource needs it. Buffers of modules always stay as they are.
    Collective over the trainer's ranks for a module. Raises ValueError for a source and a dtype, or a module without
    parameters, ExchangeError for one whose parameters FSDP2 has gathered, TypeError for anything else.
    """
    if isinstance(given, Source):
        if dtype is not None:
            raise ValueError(
                f"dtype={dtype!r} is given with a Source, which sets the engines' dtypes by served=; "
                f"leave dtype= out, and pass Source(served=) instead"
            )
        return given
    module = _find_module(given)
    if module is not None:
        return _read_module(module, dtype)
    if hasattr(type(given), "metadata"):
        return _read_weights(given, dtype, rank, trainers)
    raise TypeError(
        f"source= is {type(given).__name__}, where a model is needed; pass a torch.nn.Module, a WeightSource of "
        f"vLLM, or a Source"
    )


def _find_module(given: Any) -> nn.Module | None:
    """The module that is given, or of which vLLM's own ModuleSource is given; None for anything else."""
    if isinstance(given, nn.Module):
        return given
    module = getattr(given, "_module", None)
    # Of a subclass that declares or yields other tensors, the metadata is read, not the module.
    is_source = hasattr(type(given), "metadata")
    is_plain = is_source and all(_is_inherited(type(given), name) for name in CONTRACT)
    return module if isinstance(module, nn.Module) and is_plain else None


CONTRACT = ("metadata", "owned_names", "held_names", "iter_full", "iter_local", "__iter__")
"""What subclasses of WeightSource may define, in vLLM 0.32 or 0.33."""


def _is_inherited(cls: type, name: str) -> bool:
    """Whether no class but vLLM's own defines this method for `cls`."""
    definers = [base for base in cls.__mro__ if name in vars(base)]
    return not definers or definers[0].__module__.startswith("vllm.")


def _read_module(module: nn.Module, dtype: str | None) -> Source:
    """The Source that describes a module's parameters and persistent buffers."""
    layouts = smt.layout_of(module)
    tensors: dict[str, Tensor] = dict(module.named_parameters())
    if not tensors:
        raise ValueError(
            f"source= is {type(module).__name__}, which has no parameters; pass the module that is trained"
        )
    # A gathered parameter is a copy of what is trained, as it is now.
    check_not_gathered(name_natives(tensors))
    side = {name: layouts[name] for name in tensors}
    # Each rank has all of a buffer: the largest mesh has all ranks.
    mesh = max((layout.mesh for layout in side.values()), key=lambda mesh: mesh.size)
    buffers = _find_buffers(module)
    for name, buffer in buffers.items():
        dtype_name = str(buffer.dtype).removeprefix("torch.")
        side[name] = sm.Layout(tuple(buffer.shape), mesh, {}, dtype=dtype_name)
    shapes = {name: (layout.shape, layout.dtype) for name, layout in side.items()}
    served = dict(shapes)
    if dtype is not None:
        served |= {name: (shapes[name][0], dtype) for name in tensors}
    checkpoint = record_conversion(module, served)
    rank = compat.rank_or_0()
    return Source(tensors | buffers, side, shapes, served, checkpoint, (module,), rank)


def _find_buffers(module: nn.Module) -> dict[str, Tensor]:
    """The persistent buffers, which checkpoints have, such as a router's correction, by name."""
    persistent = module.state_dict(keep_vars=True)
    return {name: buffer for name, buffer in module.named_buffers() if name in persistent}


def _read_weights(given: Any, dtype: str | None, rank: int, trainers: int) -> Source:
    """The Source of a WeightSource, with the layouts that its metadata declares; no tensor is asked for yet.

    Without `iter_local` its tensors are whole: one owner of each sends it, and no rank keeps the others' share.
    """
    # A method in vLLM 0.32, an attribute since.
    metadata = given.metadata
    layouts = _read_layouts(metadata() if callable(metadata) else metadata, trainers)
    iterate, is_local = _find_iteration(given)
    side = layouts if is_local else _deal(layouts)
    shapes = {name: (layout.shape, layout.dtype) for name, layout in side.items()}
    served = {name: (shape, dtype or own) for name, (shape, own) in shapes.items()}
    owned = [name for name, layout in layouts.items() if rank in layout.mesh.ranks]
    kept = {name for name in owned if rank in side[name].mesh.ranks}
    return Source({}, side, shapes, served, renew=partial(_collect, iterate, owned, kept))


def _read_layouts(declared: Iterable[Any], trainers: int) -> dict[str, sm.Layout]:
    """The layouts that a WeightSource's metadata declares, by name, in its order."""
    layouts: dict[str, sm.Layout] = {}
    for meta in declared:
        if meta.name in layouts:
            raise ValueError(f"source= declares {meta.name!r} twice; declare each name once")
        layouts[meta.name] = read_layout(meta, trainers)
    return layouts


def _deal(layouts: Mapping[str, sm.Layout]) -> dict[str, sm.Layout]:
    """The layouts in which one rank of each has the whole tensor: the rank that has the fewest bytes so far."""
    loads: Counter[int] = Counter()
    side = {}
    for name, layout in layouts.items():
        owner = min(layout.mesh.ranks, key=loads.__getitem__)
        loads[owner] += layout.itemsize * math.prod(layout.shape)
        side[name] = sm.Layout(layout.shape, sm.Mesh(ranks=[owner]), {}, dtype=layout.dtype)
    return side


def _find_iteration(given: Any) -> tuple[Callable[[], Iterable[tuple[str, Tensor]]], bool]:
    """The method by which a WeightSource yields tensors, and whether these are only the rank's own pieces. Raises
    TypeError for a WeightSource of vLLM 0.32 that does not yield whole tensors on all ranks.
    """
    kind = type(given).__name__
    if hasattr(given, "implements_iter_local"):
        return (
            (given.iter_local, True) if given.implements_iter_local() else (given.iter_full, False)
        )
    if not callable(getattr(given, "__iter__", None)):
        raise TypeError(
            f"source= is {kind}, which has metadata but no iter_local; pass a WeightSource of vLLM"
        )
    if hasattr(given, "mesh") or getattr(given, "held_names", lambda: None)() is not None:
        what = f"source= is {kind}, a WeightSource of vLLM 0.32 that is divided over ranks"
        raise TypeError(f"{what}; pass the module, a WeightSource of vLLM 0.33, or a Source")
    return given.__iter__, False


def read_layout(meta: Any, trainers: int) -> sm.Layout:
    """The layout that a ParamMeta declares. Each `Shard` splits what earlier axes of the mesh have left. One of vLLM
    0.32 declares none: each of `trainers` ranks has the whole tensor.
    """
    owners = getattr(meta, "owners", None) or range(trainers)
    sizes = getattr(meta, "mesh_shape", None) or (len(owners),)
    mesh = sm.Mesh({f"d{axis}": size for axis, size in enumerate(sizes)}, ranks=owners)
    placements = getattr(meta, "placements", None) or (None,) * len(sizes)
    spec = tuple(_translate(placement, meta.name) for placement in placements)
    return sm.Layout(tuple(meta.shape), mesh, spec, dtype=canonical(meta.dtype))


def _translate(placement: Any, name: str) -> Spec:
    """The shardmath placement for one of vLLM's, or of torch's by the same names. None is vLLM's for a replica."""
    match type(placement).__name__:
        case "NoneType" | "Replicate":
            return sm.Replicate()
        case "Shard":
            return sm.Shard(placement.dim)
    raise TypeError(
        f"source= declares {name!r} with the placement {placement}, where Shard and Replicate are known; for tensor "
        f"parallelism that FSDP divides further, list owners with the axis of tensor parallelism first"
    )


def _collect(
    iterate: Callable[[], Iterable[tuple[str, Tensor]]], owned: Sequence[str], kept: Set[str]
) -> dict[str, Tensor]:
    """The tensors whose names are in `kept`, of those that a WeightSource yields. Raises StoreError unless these are
    the `owned` ones in the order of metadata.
    """
    tensors = {}
    names = []
    for name, tensor in iterate():
        names.append(name)
        if name in kept:
            tensors[name] = tensor
    for name, expected in zip_longest(names, owned, fillvalue="nothing"):
        if name != expected:
            what = f"source= yields {name!r} where this rank owns {expected!r} by its metadata"
            raise StoreError(f"{what}; yield the tensors that a rank owns in metadata's order")
    return tensors


def watch_modules(source: Source) -> list[Watched]:
    """Return a Watched for each tensor of `source`, for later checks: its memory, and which of the source's modules
    hold it.
    """
    watched = watch("the trainer's", given=None, natives=name_natives(source.tensors))
    find_owners(watched, [part for module in source.modules for part in module.modules()])
    return watched


def check_kept(watched: list[Watched], source: Source) -> None:
    """Raise StoreError if a tensor in `watched` was replaced in, or removed from, the modules of `source`."""
    # Without modules there are no places to look at, so both find nothing.
    gone = find_replaced(watched) or find_removed(watched, source.modules)
    if gone is not None:
        raise StoreError(
            f"{gone} is no longer the tensor that its module has, as after load_state_dict(assign=True); "
            f"connect to the engines again by trainer_init"
        )


def check_types(source: Source, bound: KnownSide, place: int) -> None:
    """Raise StoreError if a tensor of `source` has another dtype now than planned. The planned dtypes are those in
    `bound`, the trainer's planned storage, for the rank with number `place`.
    """
    natives = name_natives(source.tensors)
    for name, slot in bound.slots(place).items():
        # A function of a tensor is not sent.
        if slot.function:
            continue
        native = slot.chunk, slot.native
        # A missing tensor is another error, which the caller finds.
        if native not in natives:
            continue
        dtype = canonical(natives[native].dtype)
        planned_dtype = bound.layouts[name].dtype
        if dtype != planned_dtype:
            raise StoreError(
                f"{show_native(native)} is {dtype}, but was {planned_dtype} when the engines connected; "
                f"connect to them again by trainer_init"
            )
