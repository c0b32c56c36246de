"""Ranks of an SGLang engine, each a process: its own model, its weight updater, and the manager that a scheduler has.

SGLang's scheduler, its server and its kernels, which need GPUs, are not there. What SGLang imports and no CPU has is
stood in for by empty modules, as by `tools/sglang_storage.py`.
"""

from __future__ import annotations

import base64
import importlib
import importlib.util
import json
import os
import sys
from importlib.metadata import EntryPoint
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist

__all__ = ["ENTRY", "VERSION", "serve"]

VERSION = "0.5.23"
ENTRY = EntryPoint("shardmath", "shardmath_sglang.plugin:register", "sglang.srt.plugins")
ABSENT = ("IPython", "gguf", "orjson", "triton")
"""What SGLang imports and does not call here, besides what the tool stands in for."""
TOOL = Path(__file__).parents[2] / "tools/sglang_storage.py"


class Start(NamedTuple):
    """How a rank is started: the folder of SGLang's files, that of a checkpoint, and whether our plugin is there."""

    wheel: str
    folder: Path
    tp: int
    port: int
    plugin: bool


def serve(start: Start, rank: int, orders: Connection) -> None:
    """Do what is ordered, on a rank that was started on a checkpoint, until it is None."""
    wheel, folder, tp, port, plugin = start
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    spec = importlib.util.spec_from_file_location("sglang_storage", TOOL)
    assert spec is not None and spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    tool.ABSENT += ABSENT
    sys.path.insert(0, wheel)
    sys.meta_path.append(tool._Finder())
    from transformers import AutoConfig

    dist.init_process_group("gloo", rank=rank, world_size=tp)
    config = AutoConfig.from_pretrained(folder)
    with tool.as_rank(rank, {"tp": tp}, config):
        context = importlib.import_module("sglang.srt.runtime_context")
        context.get_parallel().tp_group.cpu_group = dist.group.WORLD
        if plugin:
            load_plugins()
        engine = Engine(config, {name: file for file, name in tool.FILES.values()})
        engine.load(engine.model, folder)
        orders.send("up")
        while (order := orders.recv()) is not None:
            orders.send(getattr(engine, order[0])(*order[1:]))
    dist.destroy_process_group()


def load_plugins() -> None:
    """What SGLang does as a process starts, with our plugin installed."""
    from sglang.srt import plugins

    with mock.patch.object(plugins, "entry_points", lambda group: [ENTRY] * (ENTRY.group == group)):
        plugins.load_plugins()


class Engine:
    """A model, and what SGLang has around it for updates."""

    def __init__(self, config: Any, files: dict[str, str]) -> None:
        from sglang.srt.managers.scheduler_components.weight_updater import (
            SchedulerWeightUpdaterManager,
        )
        from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
        from sglang.srt.runtime_context import get_parallel
        from sglang.srt.utils import MultiprocessingSerializer

        self.config = config
        self.files = files
        self.model = self.build()
        self.flushes = 0
        rank = get_parallel().tp_rank
        updater = WeightUpdater(
            tp_rank=rank,
            device="cpu",
            gpu_id=0,
            model_config=None,
            custom_weight_loaders={},
            get_model=lambda: self.model,
            update_model_fields=print,
            recapture_cuda_graph=print,
            get_model_runner=print,
        )
        runner = SimpleNamespace(weight_updater=updater)
        worker = SimpleNamespace(
            weight_update_runners=lambda: [("target", runner)],
            deserialize_own_rank=lambda each: MultiprocessingSerializer.deserialize(each[rank]),
        )
        self.manager = SchedulerWeightUpdaterManager(
            tp_worker=worker,
            draft_worker=None,
            memory_saver_adapter=None,
            flush_cache=self.flush,
            is_fully_idle=lambda **_: True,
            scheduler=SimpleNamespace(record_weight_version_change=lambda **_: None),
        )

    def build(self) -> Any:
        """SGLang's own model of this rank."""
        (name,) = self.config.architectures
        module = importlib.import_module(f"sglang.srt.models.{self.files[name]}")
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            return getattr(module, name)(config=self.config)
        finally:
            torch.set_default_dtype(before)

    def load(self, model: Any, folder: Path) -> None:
        """Load a checkpoint by the model's own loader."""
        from tests.vllm import checkpoints

        for tensor in model.parameters():
            tensor.data.zero_()
        model.load_weights(iter(checkpoints.read(folder)))

    def flush(self, **_: Any) -> bool:
        """Count what drops the cache."""
        self.flushes += 1
        return True

    def fail(self, rank: int, why: str) -> None:
        """Have each later update fail on a rank, once all has arrived there; on none, if `why` is empty."""
        from sglang.srt.model_loader.loader import post_load_weights
        from sglang.srt.runtime_context import get_parallel

        from shardmath_sglang import worker

        failing = mock.Mock(side_effect=RuntimeError(why))
        is_failing = why and get_parallel().tp_rank == rank
        worker.post_load_weights = failing if is_failing else post_load_weights

    def spoil(self, kind: str, undo: bool) -> None:
        """Have the engine be of a kind that cannot be refitted, or no longer."""
        from sglang.srt.model_executor.model_runner_components import weight_updater
        from sglang.srt.runtime_context import get_model

        shared = SimpleNamespace(weight_cache_mode="off" if undo else "attach")
        if kind == "cache":
            weight_updater.get_model = get_model if undo else lambda: shared
        elif kind == "packed":
            method = next(
                m.quant_method for m in self.model.modules() if hasattr(m, "quant_method")
            )
            method.use_flashinfer_trtllm_moe = not undo
        else:
            attribute = {"quantized": "quant_config", "derived": "_derived_weight_cache_error"}
            setattr(self.model, attribute[kind], None if undo else "cannot be renewed")

    def send(self, load_format: str | None, folder: Path) -> bool:
        """Whether SGLang's own updater takes a checkpoint, in a format of its own."""
        from sglang.srt.managers import io_struct

        from tests.vllm import checkpoints

        pairs = list(checkpoints.read(folder))
        if load_format == "direct":
            model = self.build()
            self.load(model, folder)
            pairs = [(name, each.data) for name, each in model.named_parameters()]
        given = io_struct.UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=[], load_format=load_format
        )
        self.manager.begin_weight_update(io_struct.BeginWeightUpdateReqInput(selector="target"))
        # SGLang serializes tensors of GPUs only.
        with mock.patch.object(self.manager.tp_worker, "deserialize_own_rank", return_value=pairs):
            answer = self.manager.update_weights_from_tensor(given)
        self.manager.end_weight_update(io_struct.EndWeightUpdateReqInput())
        return bool(answer.success)

    def post(self, route: str, text: str) -> tuple[bool, str]:
        """What a scheduler answers to a request that the server passes on."""
        from sglang.srt.managers import io_struct

        kinds = {
            "begin_weight_update": io_struct.BeginWeightUpdateReqInput,
            "update_weights_from_tensor": io_struct.UpdateWeightsFromTensorReqInput,
            "end_weight_update": io_struct.EndWeightUpdateReqInput,
        }
        said = json.loads(text)
        if "serialized_named_tensors" in said:
            entries = map(base64.b64decode, said["serialized_named_tensors"])
            said["serialized_named_tensors"] = list(entries)
        answer = getattr(self.manager, route)(kinds[route](**said))
        return answer.success, answer.message

    def compare(self, folder: Path) -> tuple[list[str], int]:
        """The tensors that are not as the model's own loader loads them from a checkpoint, and how often the cache was
        dropped.
        """
        expected = self.build()
        self.load(expected, folder)
        running = dict(self.model.named_parameters())
        different = [
            name for name, each in expected.named_parameters() if not each.equal(running[name])
        ]
        return different, self.flushes
