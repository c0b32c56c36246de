"""Coverage: whether an update writes all that an engine's rank has.

1. Cells that nobody asks for are cells that nobody checks: each tensor of the model is written whole, except for vLLM's
   padding, or not at all, if it is vLLM's own or named in `own`.
2. A loader is recorded once, when ranks connect. So an engine that moves experts between ranks raises StoreError.
   Neither can an engine take weights if a parameter's memory is not its own, but is lent to one layer after another, or
   mapped by other engines.
3. Tensors arrive in the model's type, since nothing casts at this end. A loader of vLLM's would cast, so types are
   checked before weights are taken back for an update.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Any

from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload.utils import get_tensor_load_numel
from vllm.model_executor.offloader import NoopOffloader, UVAOffloader, get_offloader

import shardmath as sm
from shardmath.base.errors import StoreError
from shardmath.models.recordings.pieces import Piece
from shardmath.models.recordings.sides import BoundRecorded
from shardmath.models.storage.names import matches
from shardmath.models.storage.stored import KnownSide
from shardmath_vllm.cells import Cells

__all__ = ["check_coverage", "check_stays", "check_types", "find_engine", "list_written"]

OF_VLLM = (
    "*attn.[kqv]_scale",
    "*attn.[kqv]_zero_point",
    "*attn.prob_scale",
    "*attn._[kqv]_scale",
    "*attn._prob_scale",
    "*attn._fp8_[qkv]_scale",
    "*_expert_map",
    "*.expert_*_to_*",
    "*.expert_mask",
)
"""Tensors that are no checkpoint's: scales and zero points of caches, and where experts are."""

SHOWN = 5
"""Tensors that a message lists."""


def check_stays(config: VllmConfig) -> None:
    """Raise StoreError if the engine of this vLLM configuration runs weights that are not, or not only, where its
    loader stores them: experts that vLLM moves between ranks, layers that it copies from elsewhere for each step, and
    weights in the memory of another process.
    """
    if config.parallel_config.enable_eplb:
        raise StoreError(
            "enable_eplb=True lets vLLM move experts between ranks, but its loader still stores each on its "
            "first rank; start the engine without enable_eplb"
        )
    # A worker has one. UVAOffloader has the parameters themselves in the CPU's memory; PrefetchOffloader has copies of
    # its own there, and every few layers share the memory of their parameters.
    offloader = get_offloader()
    if not isinstance(offloader, NoopOffloader | UVAOffloader):
        raise StoreError(
            f"{type(offloader).__name__} copies offloaded layers over their parameters in every step, so that new "
            f"weights would be lost; start the engine with offload_backend='uva', or without offloading"
        )
    load = config.load_config
    # In the mode "copy", the engine has separate memory.
    extra = load.model_loader_extra_config
    if load.load_format == "ipc_cache" and extra.get("mode") != "copy":
        raise StoreError(
            "load_format='ipc_cache' maps weights that other engines run, too, so that these would get the new "
            "weights; start the engine with another load_format, or with model_loader_extra_config={'mode': 'copy'}"
        )


def check_coverage(recorded: sm.storage.Recorded, model: nn.Module, own: Sequence[str]) -> None:
    """Raise StoreError if the weight loader, by its record `recorded`, leaves elements of `model` unwritten. Only these
    can stay unwritten without an error: padding, and whole tensors that vLLM makes (such as KV cache scales), or whose
    names match a glob in `own`.
    """
    faults = []
    for native in recorded.natives:
        # Numbers are enough: vLLM's loaders copy no element of a checkpoint into padding.
        count = native.unwritten - _count_padding(model, native.label) if native.unwritten else 0
        # The rest of a tensor that is written has no values to keep: the tensor gets new memory, and what the engine
        # runs may be of another form.
        is_own = not native.written and matches(native.label, (*OF_VLLM, *own))
        if count > 0 and not is_own:
            faults.append(f"{count} of {math.prod(native.shape)} elements of {native.label!r}")
    if faults:
        listed = "\n".join(faults)
        raise StoreError(
            f"no tensor of the trainer's is written to\n{listed}\nadd these to the trainer's tensors; tensors that "
            f"only the engine has, and of which no element is sent, can be named in own= of TrainerInfo"
        )


def check_types(recorded: sm.storage.Recorded) -> None:
    """Raise StoreError for tensors in `recorded` that arrive in another dtype than they are stored in."""
    shapes = recorded.shapes
    faults = []
    for native in recorded.natives:
        # What a function makes is of the type that it is stored in.
        parts = () if native.function else native.pieces
        for name in dict.fromkeys(piece.tensor for piece in parts):
            _, served = shapes[name]
            if served != native.dtype:
                faults.append(
                    f"{name!r} arrives as {served}, but {native.name!r} is {native.dtype}"
                )
    if faults:
        listed = "\n".join(faults[:SHOWN])
        raise StoreError(
            f"{len(faults)} tensors are not of the engine's types\n{listed}\n"
            f"send the engine's dtypes: pass dtype= to TrainerInfo or read_megatron, or served= to Source"
        )


def find_engine(planned: sm.Refit, place: int) -> tuple[str, KnownSide]:
    """Return the name of the engine in `planned` to which rank `place` of the refit belongs, and how that engine stores
    its tensors, as a KnownSide.
    """
    for name, engine in planned.engines.items():
        if place in engine.ranks:
            return name, engine
    raise AssertionError("all engines are in all portions")


def list_written(planned: sm.Refit, place: int) -> Cells:
    """Return the elements of stored tensors that an update by `planned` writes on any worker of the vLLM engine to
    which rank `place` of the refit belongs. A tensor is named by (worker, virtual stage, stored name).
    """
    _, engine = find_engine(planned, place)
    assert isinstance(engine, BoundRecorded), "workers have recorded"
    written: dict[Hashable, Sequence[Piece]] = {}
    for worker, rank in enumerate(sorted(engine.ranks)):
        for native in engine.side.ranks[rank].natives:
            # A function makes all that is stored of what arrives.
            whole = Piece("", 0, 0, ((math.prod(native.shape), 1, 1),))
            written[worker, native.chunk, native.name] = (
                [whole] if native.function else native.pieces
            )
    return Cells.of(written)


def _count_padding(model: nn.Module, native: str) -> int:
    """The number of elements that vLLM adds to a stored tensor as padding, so that it divides evenly."""
    prefix, _, name = native.rpartition(".")
    module: Any = model.get_submodule(prefix)
    tensor = getattr(module, name)
    if isinstance(module, VocabParallelEmbedding):
        rows = module.shard_indices.num_org_elements + module.shard_indices.num_added_elements
        return int(tensor.numel() - rows * tensor[0].numel())
    return int(tensor.numel() - get_tensor_load_numel(tensor))
