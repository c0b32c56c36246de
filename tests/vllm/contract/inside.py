"""What is asked of the newer vLLM, in a process that imports it: it is imported in functions alone."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import pkgutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args, get_type_hints

import torch
from torch import Tensor, nn

from tests.distributed.pool import free_port

__all__ = [
    "ask_for_draft",
    "compare_loaders",
    "digest",
    "import_all",
    "list_engine",
    "list_executor",
    "list_methods",
    "list_metadata",
    "list_pauses",
    "list_routes",
    "name_version",
    "queue_while_paused",
    "record_again",
    "refuse_a_method",
    "register",
    "send",
]


def name_version() -> str:
    """Which vLLM it is."""
    import vllm

    return vllm.__version__


def import_all() -> list[str]:
    """All modules that import vLLM, imported."""
    from shardmath_vllm import workers

    importlib.import_module("shardmath_vllm.plugin")
    names = [module.name for module in pkgutil.iter_modules(workers.__path__)]
    for name in names:
        importlib.import_module(f"shardmath_vllm.workers.{name}")
    return names


def list_metadata() -> dict[str, Any]:
    """The fields of ParamMeta, and what its placements are."""
    from vllm.distributed.weight_transfer import ParamMeta, Replicate, Shard

    return {
        "fields": [field.name for field in dataclasses.fields(ParamMeta)],
        "keywords": [field.name for field in dataclasses.fields(ParamMeta) if field.kw_only],
        "Shard": [field.name for field in dataclasses.fields(Shard)],
        "Replicate": [field.name for field in dataclasses.fields(Replicate)],
        "default": str(ParamMeta("w", torch.float32, (2,), owners=(1, 0))),
    }


def list_methods() -> dict[str, list[str]]:
    """The public methods of the classes, with their parameters."""
    from vllm.distributed.weight_transfer import base

    names = ("WeightSource", "WeightTransferEngine", "VLLMWeightSyncClient", "ModuleSource")
    found = {}
    for name in names:
        members = [(key, each) for key, each in vars(getattr(base, name)).items() if key[0] != "_"]
        found[name] = [
            f"{key}({', '.join(inspect.signature(each).parameters)})" if callable(each) else key
            for key, each in members
            if not isinstance(each, (bool, type))
        ]
    return found


def refuse_a_method() -> str:
    """What is said of a source whose metadata is a method, as in 0.32."""
    from vllm.distributed.weight_transfer import WeightSource

    try:
        type("Old", (WeightSource,), {"metadata": lambda self: []})
    except TypeError as error:
        return str(error)
    return ""


def register() -> dict[str, Any]:
    """The plugin's names in vLLM's registries, and whether our trainer counts as one of vLLM's."""
    from vllm.config.weight_transfer import WeightTransferConfig
    from vllm.distributed.weight_transfer.base import TrainerWeightTransferEngine
    from vllm.distributed.weight_transfer.factory import (
        WeightTransferEngineFactory,
        WeightTransferTrainerFactory,
    )

    from shardmath_vllm import Trainer, plugin

    plugin.register()
    plugin.register()
    backend = WeightTransferConfig(backend="shardmath").backend
    return {
        "engine": WeightTransferEngineFactory._registry[backend]().__name__,
        "trainer": WeightTransferTrainerFactory._registry[backend]() is Trainer,
        "is_one": issubclass(Trainer, TrainerWeightTransferEngine),
        "called": list(inspect.signature(WeightTransferTrainerFactory.trainer_init).parameters),
        "ours": list(inspect.signature(Trainer.trainer_init).parameters),
    }


def list_engine() -> dict[str, Any]:
    """What our engine says to what vLLM's base class asks."""
    from shardmath_vllm.workers.worker import WorkerEngine

    return {
        "abstract": sorted(WorkerEngine.__abstractmethods__),
        "drafts": WorkerEngine.supports_draft_weight_update,
        "defers": WorkerEngine.defers_processing,
    }


def ask_for_draft() -> str:
    """What vLLM's worker says if it is to update a draft model by our engine."""
    from vllm.v1.worker.gpu_worker import Worker

    from shardmath_vllm.workers.worker import WorkerEngine

    engine = object.__new__(WorkerEngine)
    worker: Any = SimpleNamespace(weight_transfer_engine=engine)
    worker._check_weight_transfer_engine = lambda: None
    try:
        Worker._start_weight_update(worker, is_draft=True)
    except RuntimeError as error:
        return str(error)
    return ""


def list_executor() -> dict[str, Any]:
    """What `answers` knows of the executor whose call it patches, and how it starts workers."""
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    from shardmath_vllm.workers import answers

    text = inspect.getsource(MultiprocExecutor)
    answers.pass_over_old_answers()
    return {
        "asks": "enqueue((send_method, args, kwargs, output_rank))" in text,
        "reads": "response_mqs: Sequence[MessageQueue] = self.response_mqs" in text,
        "patched": MultiprocExecutor.collective_rpc.__module__,
        "concurrent": hasattr(MultiprocExecutor, "_start_workers_concurrently"),
    }


def list_routes() -> dict[str, list[str]]:
    """What a server takes for a trainer, by route."""
    from vllm.entrypoints.rl.online.api_router import router

    return {
        route.path: list(inspect.signature(route.endpoint).parameters) for route in router.routes
    }


def list_pauses() -> list[str]:
    """The modes of /pause."""
    from vllm.entrypoints.rl.online import api_router

    hints = get_type_hints(api_router.pause_generation, include_extras=False)
    return list(get_args(hints["mode"]))


def queue_while_paused() -> dict[str, bool]:
    """Whether a request waits that comes during a pause, by mode; another one gets an error at once."""
    from vllm.v1.engine.core import EngineCoreProc

    found = {}
    for mode in list_pauses():
        core: Any = SimpleNamespace(
            pause_scheduler=lambda mode, clear_cache: None,
            scheduler=SimpleNamespace(has_request=lambda request: False),
            errors=[],
        )
        core._send_finish_outputs_to_client = lambda *told, core=core: core.errors.append(told[-1])
        EngineCoreProc.pause_generation(core, mode)
        request = SimpleNamespace(
            request_id="new", client_index=0, abort_immediately=False, kv_transfer_params=None
        )
        rejected = EngineCoreProc._reject_add_while_paused(core, request)
        assert rejected == any(error.retryable for error in core.errors)
        found[mode] = not rejected
    return found


def compare_loaders(folder: Path) -> list[str]:
    """What the newer loader of a saved model stores otherwise than rows declare."""
    from tests.vllm import test_recording

    return [fault for tp in test_recording.SIZES for fault in test_recording.compare(folder, tp)]


def record_again(folder: Path, tp: int, quantization: dict[str, str] | None) -> list[str]:
    """What the worker records of each rank's model, which may quantize again what is quantized."""
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

    from shardmath_vllm.workers.loading import Loading
    from tests.vllm import checkpoints, engine

    shapes = checkpoints.shapes_of(folder)
    more: dict[str, Any] = {"quantization_config": quantization} if quantization else {}
    config = engine.configure(folder, tp, **more).model_config
    digests = []
    for rank in range(tp):
        with engine.built(folder, rank, tp, "cpu", **more) as model:
            record_metadata_for_reloading(model)
            layer = model.get_submodule("model.layers.0.mlp.down_proj")
            source: Any = getattr(layer.quant_method, "requantization_source", None)
            assert (source is not None) == bool(more)
            digests.append(Loading(model, config).record(shapes).digest)
    return digests


def digest(folder: Path, tp: int) -> tuple[list[dict[str, str]], dict[str, int], dict[str, int]]:
    """What vLLM's checker computes of each worker's weights, and what ours does of all weights, and of the file's."""
    from vllm.model_executor.model_loader.weight_checksum import compute_tensor_digests

    import shardmath as sm
    from shardmath.models.systems.hugging_face import hugging_face, logical_shapes
    from shardmath.models.systems.vllm import vllm
    from tests.vllm import checkpoints, engine

    config = json.loads((folder / "config.json").read_text())
    shapes = checkpoints.shapes_of(folder)
    logical = logical_shapes(config, shapes)

    def digest_stored(side: Any, held: dict[int, list[tuple[str, Tensor]]]) -> dict[str, int]:
        # numpy has no bfloat16: its bits.
        stored = {
            rank: {(0, name): each.detach().view(torch.uint16).numpy() for name, each in pairs}
            for rank, pairs in held.items()
        }
        arrays = sm.storage.gather(sm.storage.bind(side, logical), stored, list(held))
        mesh = sm.Mesh()
        layouts = {
            name: sm.Layout(each.shape, mesh, {}, dtype="bfloat16") for name, each in arrays.items()
        }
        found = sm.content.digest_of(layouts, {0: arrays})
        assert isinstance(found, dict)
        return found

    theirs = []
    held = {}
    for rank in range(tp):
        with engine.built(folder, rank, tp, "cpu") as model:
            model.load_weights(checkpoints.read(folder))
            theirs.append(compute_tensor_digests(model))
            held[rank] = list(model.named_parameters())
    ours = digest_stored(vllm(config, ranks=range(tp), tp=tp), held)
    file = digest_stored(hugging_face(config, shapes), {0: list(checkpoints.read(folder))})
    return theirs, ours, file


def send() -> list[bool]:
    """Whether an engine of this process has what vLLM's ModuleSource, and a subclass of it, holds at each update."""
    from vllm.distributed.weight_transfer import ModuleSource

    import shardmath_vllm as sv
    from tests.distributed.transfer.plain_engine import PlainEngine

    class Doubled(ModuleSource):
        """Other values than the module has."""

        def iter_local(self) -> Any:
            for name, tensor in super().iter_local():
                yield name, tensor.detach() * 2

    found = []
    for kind, factor in ((ModuleSource, 1), (Doubled, 2)):
        trained = nn.Linear(3, 2)
        engine = PlainEngine(nn.Linear(3, 2))
        info = sv.TrainerInfo(f"127.0.0.1:{free_port()}", 1, 1, rank=0, timeout=60.0)
        trainer = sv.Trainer.trainer_init(info, client=engine, source=kind(trained))
        for _ in range(2):
            trained.weight.data.add_(1)
            trainer.send_weights()
            arrived: Tensor = engine.module.get_parameter("weight")
            found.append(torch.equal(arrived, trained.weight * factor))
        trainer.shutdown()
        assert engine.link is not None
        engine.link.leave()
    return found
