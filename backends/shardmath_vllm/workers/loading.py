"""Loading: a running model's tensors in the form in which weights are loaded, a module at a time, and back.

1. vLLM may have repacked or quantized the tensors that it runs. `begin` restores every parameter to its form before
   that, without memory; `materialize` gives memory to the parameters of some modules, and `process` has vLLM make from
   them the tensors that it runs, at their previous addresses (`vllm.model_executor.model_loader.reload`).
2. `undo` restores the running tensors of everything that has not been processed. If `process` raises, it may have freed
   kernels of modules that it has not processed: these get kernels of what has arrived. A torn model must run up to its
   logits, where it refuses: a rank that raised earlier in a step would leave others waiting for it.
3. Some tensors vLLM never takes back: biases, and the corrections of routers. They are written in place, except for
   biases that it has made wider since (`biases`).
4. If an update writes to a module, the module's tensors that only the engine has keep their values.
5. If a kernel has packed a tensor elsewhere, vLLM may leave None, or another object, under its name. vLLM's own
   reload drops that; here it is put back, too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from vllm.config import ModelConfig
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.layerwise import (
    _get_original_loader,
    _layerwise_process,
    _place_kernel_tensors,
    get_layerwise_info,
)
from vllm.model_executor.model_loader.reload.meta import materialize_layer
from vllm.utils.torch_utils import set_default_torch_dtype

import shardmath as sm
import shardmath_torch as smt
from shardmath.base.errors import StoreError
from shardmath.models.storage.stored import Shapes
from shardmath_vllm.converting import convert
from shardmath_vllm.workers.biases import BIAS, materialize_bias, take_back_bias
from shardmath_vllm.workers.memory import Lent, free, take_like
from shardmath_vllm.workers.repacking import (
    drop_kernels,
    packs_apart,
    process_tied,
    repacks_anew,
    replace_kernel,
)

__all__ = ["Loading"]

LARGE = 1 << 20
"""Bytes from which on a module's memory is given back right after the module; smaller modules, such as norms, wait."""


class Loading:
    """A model that vLLM runs, whose tensors can be brought back into the form in which weights are loaded."""

    def __init__(self, model: nn.Module, config: ModelConfig) -> None:
        self._model = model
        self._config = config
        # Asked before anything is taken back: afterwards tied modules have a tensor each.
        self._tied_names = _find_tied(model)
        self._other_values: dict[nn.Module, dict[str, Any]] = {}
        self._lent = Lent()

    def record(
        self,
        shapes: Shapes,
        checkpoint: sm.storage.Recorded | None = None,
        check: Callable[[sm.storage.Recorded], None] = lambda recorded: None,
    ) -> sm.storage.Recorded:
        """Run the model's weight loader to record where it stores the tensors in `shapes`; call `check` with the
        Recorded, then return it. If given, `checkpoint` says how to convert the tensors in `shapes` to the checkpoint
        tensors that the loader takes.

        The model gets back its earlier tensors, and runs as before afterwards.
        """

        def load(pairs: Iterable[tuple[str, Tensor]]) -> None:
            loader_pairs = pairs if checkpoint is None else convert(checkpoint, pairs)
            self._model.load_weights(loader_pairs)  # type: ignore[operator]

        try:
            self.begin()
            # The recording sees every load: vLLM's loaders of a reload hold loads back until a layer has all.
            for module in self._model.modules():
                for tensor in _list_tensors(module).values():
                    if hasattr(tensor, "weight_loader"):
                        tensor.weight_loader = _get_original_loader(tensor)
            with disable_mtp_completeness_check():
                recorded = smt.record(load, shapes, _Natives(self._list_natives()), form="pairs")
            check(recorded)
            self._check_kept(recorded)
            return recorded
        finally:
            self.undo()

    def _check_kept(self, recorded: sm.storage.Recorded) -> None:
        """Raise StoreError if a written module has another tensor of the engine's, which an update could not keep."""
        written = [native.name for native in recorded.natives if native.pieces or native.function]
        for module, names in self._find_modules(written):
            # For the StoreError that it raises.
            _list_kept(module, set(names.values()))

    def _list_natives(self) -> dict[str, _Place]:
        """The places of parameters and persistent buffers by full name; of a tied one, only under its first name."""
        natives = {}
        for prefix, module in self._model.named_modules():
            hidden = module._non_persistent_buffers_set
            for holder in (module._parameters, module._buffers):
                for name, tensor in holder.items():
                    native = f"{prefix}.{name}"
                    if tensor is not None and name not in hidden and native not in self._tied_names:
                        natives[native] = _Place(holder, name)
        return natives

    @torch.no_grad()
    def begin(self) -> None:
        """Prepare the model for loading: replace its parameters by parameters on the meta device, in the form in which
        they are loaded. The model cannot run until `finish` or `undo`.
        """
        self._other_values = {module: _find_others(module) for module in self._model.modules()}
        self._lent = Lent()
        initialize_layerwise_reload(self._model)
        for module in self._model.modules():
            take_back_bias(module)

    def undo(self) -> None:
        """Undo `begin`: modules get their earlier tensors back, except modules whose new weights vLLM has already
        processed for its kernels.
        """
        self._lent.end()
        for module in self._model.modules():
            # The error that is being handled says more.
            with suppress(Exception):
                replace_kernel(module)
            info = get_layerwise_info(module)
            # vLLM is loading the module: `begin` has prepared it, and `process` has not ended that, and reset `info`.
            is_loading = info.can_load()
            # Or `begin` raised in the middle of the module, after vLLM had set the running tensors aside.
            if is_loading or info.kernel_tensors is not None:
                self._put_back(module)
        # In `begin`, vLLM turned off its own reload of models that torchao quantized, and kept the earlier flag.
        model: Any = self._model
        model._do_torchao_reload = getattr(model, "_original_do_torchao_reload", False)

    @torch.no_grad()
    def materialize(self, natives: Mapping[str, int]) -> dict[str, Tensor]:
        """Allocate missing memory of the tensors named in `natives`, and return these by name. `natives[name]` is the
        number of elements that the loader does not write; if it is not 0, new memory is zeroed.

        Raises StoreError for another tensor of these modules whose loaded values vLLM has converted and dropped.
        """
        tensors = {}
        for module, names in self._find_modules(natives):
            taken_back = {name for name in names.values() if getattr(module, name).is_meta}
            materialize_layer(module, get_layerwise_info(module))
            materialize_bias(module)
            _keep_others(module, set(names.values()))
            # Others are packed beside themselves, for which the memory of a module must be free before the next one.
            lent = self._lent if packs_apart(module) else None
            for native, name in names.items():
                tensor = getattr(module, name)
                if name in taken_back:
                    # In memory of the system, to which it goes back: when the weights have been converted, or, if it
                    # is lent, when no module of the update needs it.
                    tensor.data = take_like(tensor.data, lent)
                    if natives[native]:
                        tensor.data.zero_()
                tensors[native] = tensor.data
        # The memory that is left has other sizes. It goes back before the new tensors, still unwritten, take pages.
        self._lent.drop()
        return tensors

    @torch.no_grad()
    def process(self, natives: Collection[str]) -> None:
        """Have vLLM process each module that has one of the arrived tensors named in `natives`: all of the module's
        tensors are turned from the loaded form into the form that kernels use.
        """
        # In one order on all ranks: vLLM's quantization of a module may be collective over them.
        found = [module for module, _ in self._find_modules(sorted(natives))]
        modules = [module for module in found if get_layerwise_info(module).can_load()]
        apart = [module for module in modules if packs_apart(module)]
        if apart:
            drop_kernels(apart)
            # Before memory for the new kernels is taken, since pieces of it may not fit where others were.
            free()
        # The largest last: vLLM packs it beside itself, and the memory of the others is free then.
        for module in sorted(modules, key=_count_bytes):
            self._process(module, frees=module not in apart)

    def _process(self, module: nn.Module, frees: bool) -> None:
        """Have vLLM process one module. If `frees`, return to the system what that leaves of a large one."""
        large = _count_bytes(module) >= LARGE
        with set_default_torch_dtype(self._config.dtype), repacks_anew(module):
            _layerwise_process(module, get_layerwise_info(module))
        self._other_values.pop(module, None)
        if frees and large:
            free()

    @torch.no_grad()
    def finish(self) -> None:
        """End the loading of weights, so that the model runs again. vLLM now converts the loaded weights of attention
        layers for inference. Other modules that have not received all their weights get their earlier tensors back.
        """
        for module in self._model.modules():
            if get_layerwise_info(module).can_load() and not is_deferred_attention_layer(module):
                self._put_back(module)
        deferred = [m for m in self._model.modules() if is_deferred_attention_layer(m)]
        # `process` ends the loading of a module that was written to.
        written = [module for module in deferred if not get_layerwise_info(module).can_load()]
        # The default dtype is as at the first load: attention makes its empty tensors of it.
        with set_default_torch_dtype(self._config.dtype):
            # What is left are attention layers, which vLLM processes last, except those that were written to.
            finalize_layerwise_reload(self._model, self._config)
            for module in written:
                process: Any = module.process_weights_after_loading
                process(self._config.dtype)
        for module in list(self._other_values):
            self._restore_others(module)
        self._lent.end()
        process_tied(self._model, self._tied_names)

    def _put_back(self, module: nn.Module) -> None:
        """Put the module's running tensors back in place."""
        info = get_layerwise_info(module)
        _place_kernel_tensors(module, info)
        info.reset()
        self._restore_others(module)

    def _restore_others(self, module: nn.Module) -> None:
        """Put back what `begin` found under the names of loaded tensors, other than tensors."""
        for name, other in self._other_values.pop(module, {}).items():
            if other is None:
                module.register_parameter(name, None)
            else:
                setattr(module, name, other)

    def _find_modules(self, natives: Iterable[str]) -> Iterator[tuple[nn.Module, dict[str, str]]]:
        """Yield each module that has some of these tensors, with their names in the module by full name."""
        by_module: dict[str, dict[str, str]] = {}
        for native in natives:
            prefix, _, name = native.rpartition(".")
            by_module.setdefault(prefix, {})[native] = name
        for prefix, names in by_module.items():
            yield self._model.get_submodule(prefix), names


class _Place(NamedTuple):
    """The place of a tensor: a dict of parameters or buffers, and the name in it."""

    holder: dict[str, Any]
    name: str


class _Natives(MutableMapping[str, Tensor]):
    """A mapping from full names to modules' tensors, which also replaces them in the modules."""

    def __init__(self, places: dict[str, _Place]) -> None:
        self._places = places

    def __getitem__(self, native: str) -> Tensor:
        place = self._places[native]
        tensor: Tensor = place.holder[place.name]
        return tensor

    def __setitem__(self, native: str, tensor: Tensor) -> None:
        place = self._places[native]
        place.holder[place.name] = tensor

    def __delitem__(self, native: str) -> None:
        raise TypeError(
            f"the loader deletes {native!r}, which the model must keep; assign another tensor instead"
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def _list_tensors(module: nn.Module) -> dict[str, Tensor]:
    """The module's own parameters and buffers."""
    both = {**module._parameters, **module._buffers}
    return {name: tensor for name, tensor in both.items() if tensor is not None}


def _count_bytes(module: nn.Module) -> int:
    """The bytes of the module's own parameters and buffers."""
    return sum(tensor.nbytes for tensor in _list_tensors(module).values())


def _find_tied(model: nn.Module) -> dict[str, str]:
    """The names of parameters that another module has too, each with the parameter's first name."""
    first_names: dict[int, str] = {}
    tied = {}
    for prefix, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                native = f"{prefix}.{name}"
                first_name = first_names.setdefault(id(parameter), native)
                if first_name != native:
                    tied[native] = first_name
    return tied


def _find_others(module: nn.Module) -> dict[str, Any]:
    """The attributes that have replaced loaded tensors under their names, and are not tensors of the module."""
    parameters, buffers = get_layerwise_info(module).restore_metadata
    running = _list_tensors(module)
    others = {}
    for name in parameters | buffers:
        if name not in running and hasattr(module, name):
            others[name] = getattr(module, name)
    return others


def _keep_others(module: nn.Module, written: set[str]) -> None:
    """Copy the running values into the module's tensors that are not `written`."""
    for tensor, running in _list_kept(module, written):
        tensor.data.copy_(running)


def _list_kept(module: nn.Module, written: set[str]) -> list[tuple[Tensor, Tensor]]:
    """Pairs (as loaded, as run) of tensors that are not `written`. Raises StoreError for one that was converted."""
    parameters, buffers = get_layerwise_info(module).kernel_tensors
    running = parameters | buffers
    pairs = []
    for name, tensor in _list_tensors(module).items():
        if name in written or name in module._non_persistent_buffers_set:
            continue
        run = running.get(name)
        if run is tensor:
            continue
        # A bias that was made wider has what was loaded, in another type.
        if run is None or run.shape != tensor.shape or (run.dtype != tensor.dtype and name != BIAS):
            kind = type(module).__name__
            raise StoreError(
                f"the trainer sends nothing for {name!r} of {kind}, whose loaded values vLLM has converted and "
                f"dropped; add {name!r} to the trainer's tensors"
            )
        pairs.append((tensor, run))
    return pairs
