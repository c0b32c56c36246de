"""Worker: an engine's rank, which joins a trainer and takes its weights.

1. The model's own loader is recorded as the rank joins. Each update then writes in place, at the addresses that
   captured graphs have, what arrives where the loader would write it.
2. Every element of a tensor is written, except for the padding of vocabularies, or none of it, if `own` names it.
3. Quantized models are not taken: what runs is not what the loader writes.
4. Experts that SGLang packs into other shapes after loading are not taken either: their loader cannot be recorded.
5. SGLang computes some tensors from others, as for latent attention, at the end of `load_weights`. An update has the
   model compute them again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from sglang.srt.model_executor.model_runner_components.weight_updater import (
    _unsupported_derived_weight_cache_error,
)
from sglang.srt.model_loader.loader import post_load_weights
from sglang.srt.runtime_context import get_parallel
from torch import Tensor, nn

import shardmath as sm
import shardmath_torch as smt
from shardmath.base.errors import ExchangeError, StoreError
from shardmath.base.text import plural
from shardmath.models.storage.names import matches
from shardmath_torch.groups.agreement.turns import as_main
from shardmath_vllm.converting import convert
from shardmath_vllm.infos import Joining, Updating
from shardmath_vllm.link import Life, Link
from shardmath_vllm.meeting import Given, Meeting
from shardmath_vllm.source import Told
from shardmath_vllm.update import Update

__all__ = ["join", "receive"]

SHOWN = 5
"""Tensors that a message lists."""


@dataclass(frozen=True)
class _Joined:
    """A connection to a trainer, and its name."""

    link: Link
    meeting: str


_joined: WeakKeyDictionary[nn.Module, _Joined] = WeakKeyDictionary()
"""The connection of each model of this process."""


def join(updater: Any, said: str) -> None:
    """Join the trainer that the text of an SGLangClient names. Raises ExchangeError or StoreError if that fails, or if
    the model cannot be refitted.
    """
    model = updater.get_model()
    updater._assert_weight_cache_inactive("a refit by shardmath")
    why = _unsupported_derived_weight_cache_error(model)
    if why is not None:
        raise StoreError(why)
    if getattr(model, "quant_config", None) is not None:
        raise StoreError("the engine's model is quantized; start the engine on unquantized weights")
    packed = _find_packed(model)
    if packed is not None:
        what = f"{packed!r} keeps experts in the blocks of FlashInfer's trtllm kernels"
        raise StoreError(f"{what}; start the engine with --moe-runner-backend triton")
    _join(model, Joining(**json.loads(said)))


def receive(updater: Any, said: str) -> None:
    """Take the weights of the update that the text of an SGLangClient names. Raises ExchangeError if that fails."""
    _receive(updater.get_model(), Updating(**json.loads(said)))


def _find_packed(model: nn.Module) -> str | None:
    """The name of a module whose weights SGLang keeps in another shape than its loader writes, or None."""
    for name, module in model.named_modules():
        # FlashInfer's blocks: the only such shapes that SGLang has of weights that are not quantized.
        if getattr(getattr(module, "quant_method", None), "use_flashinfer_trtllm_moe", False):
            return str(name)
    return None


@as_main()
def _join(model: nn.Module, info: Joining) -> None:
    """Connect to a trainer, after disconnecting from any earlier one."""
    if model in _joined:
        _joined.pop(model).link.leave()
    parallel = get_parallel()
    workers = parallel.pp_size * parallel.tp_size
    if info.workers != workers:
        what = f"TrainerInfo has workers={info.workers} for engine {info.engine}"
        raise ExchangeError(f"{what}, which has {workers} ranks; pass TP times PP")

    def record(told: Told) -> sm.storage.Recorded:
        recorded = _record(model, told)
        _check(recorded, info.own, model)
        return recorded

    place = info.first + parallel.pp_rank * parallel.tp_size + parallel.tp_rank
    given = Given(engine=info.engine, record=record)
    _joined[model] = _Joined(Meeting(info, info.meeting, place).join(given), info.meeting)


def _record(model: nn.Module, told: Told) -> sm.storage.Recorded:
    """What the model's loader stores of the trainer's tensors."""

    def load(pairs: Iterable[tuple[str, Tensor]]) -> None:
        given = pairs if told.checkpoint is None else convert(told.checkpoint, pairs)
        model.load_weights(given)  # type: ignore[operator]

    return smt.record(load, told.served, model, form="pairs")


def _check(recorded: sm.storage.Recorded, own: Iterable[str], model: nn.Module) -> None:
    """Raise StoreError for tensors that an update would leave as they are, or that arrive in another dtype."""
    kept = tuple(own)
    faults = []
    for native in recorded.natives:
        if native.unwritten and not _is_expected(native.label, native.written, kept, model):
            count = f"{native.unwritten} of {math.prod(native.shape)} elements"
            faults.append(f"no tensor of the trainer's is written to {count} of {native.label!r}")
        served = {piece.tensor: recorded.shapes[piece.tensor][1] for piece in native.pieces}
        faults += [
            f"{name!r} arrives as {dtype}, but {native.label!r} is {native.dtype}"
            for name, dtype in served.items()
            if dtype != native.dtype
        ]
    if faults:
        listed = "\n".join(faults[:SHOWN])
        what = f"{plural(faults, 'tensor')} of the engine's would be left, or get another dtype"
        raise StoreError(
            f"{what}\n{listed}\nstart trainer and engine from one checkpoint; dtype= of TrainerInfo casts"
        )


def _is_expected(label: str, written: int, own: tuple[str, ...], model: nn.Module) -> bool:
    """Whether an update may leave elements of this tensor of the engine as they are, if it writes `written` others."""
    if not written:
        return matches(label, own)
    # Their loader fills up the last rank's rows of a vocabulary.
    return hasattr(model.get_submodule(label.rpartition(".")[0]), "org_vocab_size")


@as_main()
def _receive(model: nn.Module, told: Updating) -> None:
    """Receive all weights of an update. Raises ExchangeError on all ranks if one fails."""
    joined = _joined.get(model)
    if joined is None or told.meeting != joined.meeting:
        raise ExchangeError(
            "this engine is connected to no trainer, or to another one; call trainer_init"
        )
    Life(joined.link, Update(told.number)).receive(lambda: _write(model, joined.link))


@torch.no_grad()
def _write(model: nn.Module, link: Link) -> None:
    """Write the tensors of an update where they run."""
    running = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for refit in link.refits:
        for name, engine in refit.planned.engines.items():
            if link.place in engine.ranks:
                dst = {native: running[native].data for _, native in engine.natives(link.place)}
                refit.prepare(dst={name: dst}, modules=())
        refit(acknowledge=link.acknowledges)
        refit.release()
    post_load_weights(model)
    if next(model.parameters()).is_cuda:
        torch.cuda.synchronize()
