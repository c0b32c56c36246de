"""What is asked of the newer vLLM, in a process that imports it: it is imported in functions alone."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
from types import SimpleNamespace
from typing import Any, get_args, get_type_hints

import torch
from torch import Tensor, nn

from tests.distributed.pool import free_port

__all__ = [
    "ask_for_draft",
    "import_all",
    "list_engine",
    "list_executor",
    "list_methods",
    "list_metadata",
    "list_pauses",
    "list_routes",
    "name_version",
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
