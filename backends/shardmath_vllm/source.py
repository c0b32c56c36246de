"""Sources: the tensors of a trainer's rank, and how all of its ranks store them.

1. A module, plain or under FSDP2, HSDP or tensor parallelism, is read. Tensors are sent by its names. If its
   checkpoints have other tensors, as for transformers' experts, vLLM's loaders get those.
2. A trainer that stores its tensors in another way declares how, by rows (`shardmath.storage`), which have the names.
3. The parameters that a module trains are sent. It is an error if a module has got another parameter since.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor, nn

import shardmath as sm
import shardmath_torch as smt
from shardmath.base.dtypes import canonical
from shardmath.base.errors import StoreError
from shardmath.models.refits.coverage import show_native
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

__all__ = ["Chunks", "Source", "Told", "check_kept", "check_types", "read_source", "watch_modules"]

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
    is known; if there are several trainers it must be TrainerInfo's.
    """

    tensors: Chunks
    side: Stored | Mapping[str, sm.Layout]
    shapes: Shapes
    served: Shapes | None = None
    checkpoint: sm.storage.Recorded | None = None
    modules: tuple[nn.Module, ...] = ()
    rank: int | None = None

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


def read_source(given: Any, dtype: str | None = None) -> Source:
    """Return `given` if it is a Source; if it is a torch.nn.Module, or vLLM's ModuleSource around one, return a Source
    made from the module. Engines get the module's parameters in `dtype`, by default the module's.

    Buffers always stay as they are. Collective over the trainer's ranks for a module. Raises ValueError for a source
    and a dtype, or a module without parameters, ExchangeError for one whose parameters FSDP2 has gathered, TypeError
    for anything else.
    """
    if isinstance(given, Source):
        if dtype is not None:
            raise ValueError(
                f"dtype={dtype!r} is given with a Source, which sets the engines' dtypes by served=; "
                f"leave dtype= out, and pass Source(served=) instead"
            )
        return given
    module = getattr(given, "_module", given)
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"source= is {type(given).__name__}, where a model is needed; pass a torch.nn.Module, vLLM's "
            f"ModuleSource, or a Source"
        )
    return _read_module(module, dtype)


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
