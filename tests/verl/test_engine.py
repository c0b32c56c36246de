"""verl's manager has its workers, which are actors of Ray, send their shards into a real vLLM server, on CPUs.

The workers run the wheel's files with the change of docs/verl.md, or without it.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch.distributed as dist
import verl
from torch import device, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from transformers import AutoModelForCausalLM
from verl.checkpoint_engine import CheckpointEngineManager, CheckpointEngineRegistry
from verl.checkpoint_engine.base import CheckpointEngineWorker
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.workers.config import CheckpointEngineConfig, RolloutConfig
from verl.workers.engine_workers import ActorRolloutRefWorker

from shardmath import ExchangeError
from shardmath_verl import ShardCheckpointEngine, engine
from shardmath_vllm import HTTPClient, Trainer, TrainerInfo
from tests.distributed.pool import free_port
from tests.verl.actors import Actor, Adapter
from tests.vllm.served.servers import PROMPT, TP, complete, serve
from tests.vllm.served.sessions import run

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/verl.md"
TINY = re.compile(r"^```python\n(# tiny\.py, .*?)^```\n", re.M | re.S)
CHANGE = re.compile(r"^```python\n(# change_verl\.py, .*?)^```\n", re.M | re.S)
ACTORS = 2
LENGTH = 12

# Of which most is the start of the server.
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint that tiny.py of docs/vllm.md writes."""
    made = tmp_path_factory.mktemp("policy")
    found = TINY.search((ROOT / "docs/vllm.md").read_text())
    assert found is not None
    (made / "tiny.py").write_text(found[1])
    run(["tiny.py", str(made / "tiny"), "0"], {}, made / "log", timeout=100)
    return made / "tiny"


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    with serve([folder], folder.parent, "--dtype=float32") as (started,):
        yield started


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with verl as the page's program changes it."""
    made = tmp_path_factory.mktemp("changed")
    shutil.copytree(Path(verl.__file__).parent, made / "verl")
    found = CHANGE.search(PAGE.read_text())
    assert found is not None
    (made / "change_verl.py").write_text(found[1])
    # A second run changes nothing more. The folder of a program is where Python looks first.
    for _ in range(2):
        run(["change_verl.py"], {}, made / "log", timeout=60)
    return made


@contextmanager
def start_ray(home: Path, *paths: Path) -> Iterator[None]:
    """Ray, whose workers look for packages in these folders first."""
    with pytest.MonkeyPatch.context() as patched:
        # Ray writes a token there.
        patched.setenv("HOME", str(home))
        path = os.pathsep.join([*map(str, paths), os.environ["PYTHONPATH"]])
        patched.setenv("PYTHONPATH", path)
        ray.init(num_cpus=8, include_dashboard=False, object_store_memory=100 << 20)
        try:
            yield
        finally:
            ray.shutdown()


class Replica:
    """A rollout's replica, of which only the workers are verl's: the server is not one that verl has started."""

    def __init__(self, workers: list[Any]) -> None:
        self.workers = workers
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., Any]:
        async def note(**_: Any) -> None:
            self.calls.append(name)

        return note


def start(count: int, kind: type, *args: Any, **kwargs: Any) -> RayWorkerGroup:
    return RayWorkerGroup(
        resource_pool=RayResourcePool([count], use_gpu=False, max_colocate_count=1),
        ray_cls_with_init=RayClassWithInitArgs(ray.remote(kind), *args, **kwargs),
        device_name="cpu",
    )


def make_manager(folder: Path, url: str) -> tuple[CheckpointEngineManager, Replica]:
    """verl's manager, of two actors' ranks and as many workers of a rollout as the server has."""
    kwargs = {"urls": [url], "dtype": "float32"}
    config = CheckpointEngineConfig(
        backend="shardmath",
        engine_kwargs={"shardmath": kwargs},
        custom_backend_module="shardmath_verl",
    )
    rollout = RolloutConfig(name="vllm", checkpoint_engine=config)
    workers = start(TP, CheckpointEngineWorker, rollout, None, server_adapter=Adapter())
    actors = start(ACTORS, Actor, str(folder), kwargs)
    replica = Replica(workers.workers)
    return CheckpointEngineManager(config, actors, [replica]), replica


def test_the_manager_updates_a_server(
    folder: Path, url: str, changed: Path, tmp_path: Path
) -> None:
    before = complete(url)[0]
    with start_ray(tmp_path, changed):
        manager, replica = make_manager(folder, url)
        for step in range(3):
            manager.actor_wg.train()
            manager.update_weights(global_steps=step)
            tokens, asked = manager.actor_wg.generate(PROMPT, LENGTH)[0]
            assert complete(url)[0] == tokens
            assert tokens != before
            assert not asked
            before = tokens
        assert replica.calls[-1] == "resume_generation"

        # Another trainer takes the server: the next update fails on all ranks, and the one after it connects again.
        info = TrainerInfo(f"127.0.0.1:{free_port()}", 1, TP, rank=0, dtype="float32")
        other = AutoModelForCausalLM.from_pretrained(folder)
        Trainer.trainer_init(info, client=HTTPClient(url), source=other).shutdown()
        with pytest.raises(ray.exceptions.RayTaskError, match="ExchangeError"):
            manager.update_weights()
        manager.actor_wg.train()
        manager.update_weights()
        assert complete(url)[0] == manager.actor_wg.generate(PROMPT, LENGTH)[0][0]


def make_engine(*urls: str) -> ShardCheckpointEngine:
    made = CheckpointEngineRegistry.new("shardmath", 1 << 20, is_master=True, urls=urls)
    assert isinstance(made, ShardCheckpointEngine)
    return made


def test_verl_without_the_change_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wheel's own worker passes a generator, of which nothing is gathered."""
    # If the installed verl is changed, it then does what verl does without the change.
    monkeypatch.setattr(ShardCheckpointEngine, "takes_training_engine", False)
    training = SimpleNamespace(get_per_tensor_param=lambda: (iter([1]), None))
    worker = SimpleNamespace(
        actor=SimpleNamespace(engine=training),
        checkpoint_engine=make_engine("http://127.0.0.1:8000"),
    )
    with pytest.raises(TypeError, match=r"passes list_iterator .* change verl as docs/verl.md"):
        asyncio.run(ActorRolloutRefWorker.update_weights(worker, mode="shardmath"))


@pytest.mark.parametrize("urls", [(), ("http://a:1", "http://b:1")], ids=["none", "uneven"])
def test_servers_that_do_not_divide_the_workers_are_an_error(urls: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="3 workers of the rollout cannot be divided"):
        make_engine(*urls).init_process_group(0, actors=2, workers=3, address="127.0.0.1:1", run="")


def test_urls_that_are_text_are_an_error() -> None:
    with pytest.raises(ValueError, match=r"pass urls=\['http://a:1'\]"):
        ShardCheckpointEngine(1 << 20, True, urls="http://a:1")


class Connection:
    """What an engine does with a Trainer, without servers."""

    def __init__(self, notes: list[str], info: TrainerInfo, error: BaseException | None) -> None:
        self.notes = notes
        self.error = error
        notes.append(f"connect {info.trainers} to {info.engines}")

    def send_weights(self) -> None:
        self.notes.append("send")
        if self.error is not None:
            raise self.error

    def shutdown(self) -> None:
        self.notes.append("shutdown")


def watch(patch: pytest.MonkeyPatch, error: BaseException | None = None) -> list[str]:
    """The notes of what engines do from now on, whose sends raise this error."""
    notes: list[str] = []

    def trainer_init(info: TrainerInfo, **_: Any) -> Connection:
        return Connection(notes, info, error)

    patch.setattr(engine, "Trainer", SimpleNamespace(trainer_init=trainer_init))
    return notes


def update(made: ShardCheckpointEngine, module: Any, actors: int = 1, workers: int = 2) -> None:
    """An update as verl's manager has it."""
    made.init_process_group(0, actors=actors, workers=workers, address="127.0.0.1:1", run="")
    asyncio.run(made.send_weights(SimpleNamespace(module=module)))


def test_ranks_connect_again_if_something_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """New replicas would else never get weights, nor would servers get those of another module."""
    notes = watch(monkeypatch)
    made = make_engine("http://a:1")
    module = nn.Linear(2, 2)
    update(made, module)
    update(made, module)
    assert notes == ["connect 1 to (2,)", "send", "send"]
    for change in ({"workers": 4}, {"actors": 2}, {"module": nn.Linear(2, 2)}):
        notes.clear()
        update(made, **({"module": module} | change))
        assert [note.split()[0] for note in notes] == ["shutdown", "connect", "send"]


@pytest.mark.parametrize("error", [ExchangeError("lost"), RuntimeError("other")], ids=str)
def test_an_update_that_fails_disconnects(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    notes = watch(monkeypatch, error)
    made = make_engine("http://a:1")
    module = nn.Linear(2, 2)
    for _ in range(2):
        with pytest.raises(type(error), match=str(error)):
            update(made, module)
    assert notes == 2 * ["connect 1 to (2,)", "send", "shutdown"]


def test_other_strategies_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flat parameters of FSDP1, verl's default, would be sent as whole ones."""
    notes = watch(monkeypatch)
    made = make_engine("http://a:1")
    with pytest.raises(ValueError, match=r"is a list, as of Megatron.*actor.strategy=fsdp2"):
        update(made, [nn.Linear(2, 2)])
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        inner = FullyShardedDataParallel(nn.Linear(2, 2), device_id=device("cpu"))
        for module in (inner, nn.Sequential(inner)):
            with pytest.raises(ValueError, match=r"under FSDP1.*actor.strategy=fsdp2"):
                update(made, module)
    finally:
        dist.destroy_process_group()
    assert not notes
