"""A model's tensors as they are loaded, and back: of a small model, without an engine."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from vllm.config import LoadConfig, ParallelConfig
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.model_loader.reload import record_metadata_for_reloading
from vllm.model_executor.offloader import PrefetchOffloader, UVAOffloader, set_offloader
from vllm.platforms import current_platform

import shardmath as sm
from shardmath import ExchangeError, StoreError
from shardmath_vllm.board import Board
from shardmath_vllm.cells import Cells
from shardmath_vllm.infos import Updating
from shardmath_vllm.meeting import Given
from shardmath_vllm.source import Told
from shardmath_vllm.workers import loading as loading_module
from shardmath_vllm.workers import worker as worker_module
from shardmath_vllm.workers.coverage import check_coverage
from shardmath_vllm.workers.loading import Loading
from shardmath_vllm.workers.refusing import accept, refuse
from shardmath_vllm.workers.worker import WorkerEngine


class Part(nn.Module):
    """A weight that is loaded, beside what is the engine's own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(64, 64), requires_grad=False)
        self.gain = nn.Parameter(torch.full((4096,), 7.0), requires_grad=False)
        self.register_buffer("steps", torch.full((8,), 3.0))
        self.bias = nn.Parameter(torch.full((4,), 5.0), requires_grad=False)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = Part()

    def load_weights(self, pairs: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in pairs:
            self.get_parameter(name).data.copy_(tensor)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return hidden


@pytest.fixture
def model() -> Model:
    made = Model()
    record_metadata_for_reloading(made)
    return made


def test_what_is_the_engines_own_stays(model: Model) -> None:
    """Beside what is written in its module: not whatever the memory had that it gets meanwhile."""
    config: Any = SimpleNamespace(dtype=torch.float32)
    loading = Loading(model, config)
    recorded = loading.record({"part.weight": ((64, 64), "float32")})
    assert recorded.unwritten == {"part.gain": 4096, "part.steps": 8, "part.bias": 4}
    # Memory of that size that is given again.
    junk = [torch.full((4096,), 13.0) for _ in range(8)]
    del junk
    loading.begin()
    made = loading.materialize({"part.weight": 0})
    made["part.weight"].fill_(2.0)
    loading.process(["part.weight"])
    loading.finish()
    assert [float(one.unique()) for one in model.state_dict().values()] == [2.0, 7.0, 5.0, 3.0]


def test_what_a_kernel_has_packed_elsewhere(model: Model) -> None:
    """As of INT8 weights on a CPU: nothing is left of a tensor but its name, or what is none."""
    packed = object()
    model.part.weight = None  # type: ignore[assignment]
    del model.part.gain
    model.part.gain = packed  # type: ignore[assignment]
    config: Any = SimpleNamespace(dtype=torch.float32)
    seen = []
    loading = Loading(model, config)
    loading.record(
        {"part.weight": ((64, 64), "float32"), "part.gain": ((4096,), "float32")},
        check=lambda recorded: seen.append(model.part.weight.shape),
    )
    assert seen == [(64, 64)]
    assert model.part.weight is None and model.part.gain is packed


def test_a_bias_that_was_made_wider(model: Model) -> None:
    """Is loaded as it was before, and stays where nothing is written to it."""
    model.part.params_dtype = torch.bfloat16  # type: ignore[assignment]
    config: Any = SimpleNamespace(dtype=torch.float32)
    loading = Loading(model, config)
    running = model.part.bias
    shapes = {"part.weight": ((64, 64), "float32"), "part.bias": ((4,), "bfloat16")}
    natives = {native.name: native.dtype for native in loading.record(shapes).natives}
    assert natives["part.bias"] == "bfloat16" and model.part.bias is running
    for written, value in (["part.weight"], 5.0), (["part.weight", "part.bias"], 9.0):
        loading.begin()
        made = loading.materialize(dict.fromkeys(written, 0))
        for tensor in made.values():
            tensor.fill_(9.0)
        loading.process(written)
        loading.finish()
        assert model.part.bias is running and running.dtype == torch.float32
        assert float(running.unique()) == value


def test_ranks_process_modules_in_one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """In whatever order a rank knows its tensors: vLLM asks all ranks together for the scales of what it quantizes."""
    model: Any = nn.Module()
    model.first, model.second = Part(), Part()
    record_metadata_for_reloading(model)
    config: Any = SimpleNamespace(dtype=torch.float32)
    loading = Loading(model, config)
    processed = []
    monkeypatch.setattr(
        loading_module, "_layerwise_process", lambda module, info: processed.append(module)
    )
    natives = ["first.weight", "second.weight"]
    for known in (natives, natives[::-1]):
        loading.begin()
        loading.materialize(dict.fromkeys(known, 0))
        loading.process(known)
        loading.undo()
    assert processed == [model.first, model.second] * 2


def test_kernels_go_before_new_ones_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of all modules that arrive together, so that the memory of a layer is enough for its new kernels."""
    model: Any = nn.Module()
    model.first, model.second, model.third = Part(), Part(), Part()
    record_metadata_for_reloading(model)
    config: Any = SimpleNamespace(dtype=torch.float32)
    loading = Loading(model, config)
    seen = []
    monkeypatch.setattr(loading_module, "packs_apart", lambda module: module is not model.third)
    monkeypatch.setattr(
        loading_module,
        "_layerwise_process",
        lambda module, info: seen.append((model.first.cpu_linear, model.second.cpu_linear)),
    )
    model.first.cpu_linear = model.second.cpu_linear = "packed"
    natives = ["first.weight", "second.weight", "third.weight"]
    loading.begin()
    loading.materialize(dict.fromkeys(natives, 0))
    loading.process(natives)
    loading.undo()
    assert seen == [(None, None)] * 3


@pytest.mark.skipif(not current_platform.is_cpu(), reason="other devices pack nothing")
def test_a_module_that_was_not_processed_still_has_a_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else its rank would raise in the middle of a step, and others would wait for it in vLLM's collectives."""

    def fail(module: nn.Module, info: object) -> None:
        raise ArithmeticError("this layer cannot be processed")

    model: Any = nn.Module()
    model.first, model.second = Part(), Part()
    for part in model.first, model.second:
        del part.gain, part.steps, part.bias
        part.quant_method = UnquantizedLinearMethod()
    record_metadata_for_reloading(model)
    for part in model.first, model.second:
        part.quant_method.process_weights_after_loading(part)
    config: Any = SimpleNamespace(dtype=torch.float32)
    loading = Loading(model, config)
    monkeypatch.setattr(loading_module, "_layerwise_process", fail)
    loading.begin()
    for tensor in loading.materialize({"first.weight": 0, "second.weight": 0}).values():
        tensor.fill_(1.0)
    with pytest.raises(ArithmeticError):
        loading.process(["first.weight", "second.weight"])
    loading.undo()
    for part in model.first, model.second:
        out = part.quant_method.apply(part, torch.ones(2, 64))
        torch.testing.assert_close(out, torch.full((2, 64), 64.0))


class Joining:
    """A meeting in which a worker is asked for what it stores."""

    def __init__(self, *where: Any) -> None:
        pass

    def join(self, given: Given) -> Any:
        assert given.record is not None
        shapes = {"part.weight": ((64, 64), "float32")}
        recorded = given.record(Told({}, shapes, shapes, None))
        side = {"part.weight": sm.Layout((64, 64), sm.Mesh(ranks=[0]), "n m")}
        engines = {"engine 0": sm.storage.RecordedSide({1: recorded})}
        return SimpleNamespace(place=1, planned=sm.refit(side, engines, shapes))


def join(
    model: Model,
    monkeypatch: pytest.MonkeyPatch,
    moves: bool = False,
    device: str = "cpu",
    load: LoadConfig | None = None,
) -> None:
    """Have a worker meet a trainer, over gloo."""
    monkeypatch.setattr(worker_module, "Meeting", Joining)
    engine: Any = object.__new__(WorkerEngine)
    config: Any = SimpleNamespace(dtype=torch.float32)
    engine.model, engine._link, engine._loading = model, None, Loading(model, config)
    engine.parallel_config = ParallelConfig()
    engine.parallel_config.enable_eplb = moves
    engine.vllm_config = SimpleNamespace(
        quant_config=None,
        parallel_config=engine.parallel_config,
        load_config=load or LoadConfig(),
    )
    engine.device = torch.device(device)
    told = {"workers": 1, "own": ["part.*"], "meeting": "here", "transport": "gloo"}
    engine.init_transfer_engine(SimpleNamespace(**told, engine=0, first=1))


@pytest.mark.parametrize("moves", [False, True])
def test_an_engine_that_rebalances_experts_is_refused(
    model: Model, moves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM for CPUs starts none."""
    if moves:
        with pytest.raises(StoreError, match="start the engine without enable_eplb"):
            join(model, monkeypatch, moves)
    else:
        join(model, monkeypatch, moves)


@pytest.mark.parametrize("kind", [PrefetchOffloader, UVAOffloader])
def test_an_engine_whose_layers_share_memory_is_refused(
    model: Model, kind: type[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM copies each layer there from where no update writes. It offloads nothing on CPUs."""
    set_offloader(kind.__new__(kind))
    try:
        if kind is PrefetchOffloader:
            with pytest.raises(StoreError, match=r"PrefetchOffloader copies .* lost; start the"):
                join(model, monkeypatch)
        else:
            join(model, monkeypatch)
    finally:
        set_offloader(None)


@pytest.mark.parametrize("mode", ["", "zero_copy", "copy"])
def test_an_engine_that_maps_a_cache_of_weights_is_refused(
    model: Model, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other engines map the same memory, unless each has a copy. vLLM has no such cache on CPUs."""
    extra = {"mode": mode} if mode else {}
    load = LoadConfig(load_format="ipc_cache", model_loader_extra_config=extra)
    if mode == "copy":
        join(model, monkeypatch, load=load)
    else:
        with pytest.raises(StoreError, match="load_format='ipc_cache' maps weights that other"):
            join(model, monkeypatch, load=load)


def test_an_engine_on_gpus_is_refused_over_gloo(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ExchangeError, match="runs on 'cuda'; pass transport='nccl'"):
        join(model, monkeypatch, device="cuda")


@pytest.mark.parametrize("workers", [1, 3])
def test_an_engine_of_another_number_of_workers_is_refused(workers: int) -> None:
    """On each of its workers, also on the first, which alone would record a part of the model."""
    engine: Any = object.__new__(WorkerEngine)
    engine._link = None
    engine.parallel_config = ParallelConfig(tensor_parallel_size=2)
    for rank in range(2):
        engine.parallel_config.rank = rank
        said = rf"workers={workers} for engine 0, .* its worker {rank}, .* has 2 workers; pass TP"
        with pytest.raises(ExchangeError, match=said):
            engine.init_transfer_engine(SimpleNamespace(workers=workers, engine=0))


def test_an_engine_that_has_joined_no_trainer() -> None:
    """Raises what vLLM's own engines raise, and ours."""
    engine: Any = object.__new__(WorkerEngine)
    engine._link = None
    for kind in (RuntimeError, ExchangeError):
        with pytest.raises(kind, match="is not connected to a trainer"):
            engine.receive_weights(SimpleNamespace(number=1, meeting=""))


def test_what_no_update_can_keep_is_refused_as_ranks_meet(model: Model) -> None:
    """And not in the middle of an update."""
    model.part.gain = nn.Parameter(torch.ones(2), requires_grad=False)
    config: Any = SimpleNamespace(dtype=torch.float32)
    with pytest.raises(StoreError, match="the trainer sends nothing for 'gain' of Part"):
        Loading(model, config).record({"part.weight": ((64, 64), "float32")})
    assert float(model.part.gain.sum()) == 2.0


class Fused(Model):
    """Stores "q" and "k" as one."""

    def load_weights(self, pairs: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in pairs:
            self.part.weight.data["qk".index(name) * 32 :][:32].copy_(tensor)


def test_of_a_tensor_that_is_the_engines_own_no_part_is_written() -> None:
    """New memory would have zeros for the rest."""
    model = Fused()
    record_metadata_for_reloading(model)
    config: Any = SimpleNamespace(dtype=torch.float32)
    shapes = dict.fromkeys("qk", ((32, 64), "float32"))
    both, half = (
        Loading(model, config).record({name: shapes[name] for name in names})
        for names in ("qk", "q")
    )
    check_coverage(both, model, ["part.*"])
    with pytest.raises(StoreError, match=r"\n4096 of 4096 elements of 'part.gain'\n"):
        check_coverage(both, model, [])
    for own in ("part.*", "*", "part.weight"):
        with pytest.raises(StoreError, match=r"to\n2048 of 4096 elements of 'part.weight'\nadd"):
            check_coverage(half, model, ["part.[gsb]*", own])
    # Unless that is padding, as vLLM says.
    vars(model.part.weight)["weight_loader_numel"] = 2048
    check_coverage(half, model, ["part.[gsb]*"])


class Pooling(Model):
    """A model that has logits, and is not asked for them."""

    def __init__(self) -> None:
        super().__init__()
        self.pooler = nn.Identity()

    def compute_logits_local(self, hidden: object) -> object:
        """By which vLLM samples a part of a batch on each rank."""
        return hidden


def test_a_torn_model_refuses_by_whatever_it_is_asked() -> None:
    made = Pooling()
    refuse(made, "an update failed")
    for ask in (made.pooler, made.compute_logits, made.compute_logits_local):
        with pytest.raises(ExchangeError, match="weights are torn"):
            ask(torch.ones(1))
    accept(made)
    for ask in (made.pooler, made.compute_logits, made.compute_logits_local):
        assert ask(torch.ones(1)) == 1.0


def test_what_is_the_engines_own_and_made_into_something_else(model: Model) -> None:
    """Cannot be kept, and nobody knows how it was loaded."""
    model.part.gain = nn.Parameter(torch.ones(2), requires_grad=False)
    config: Any = SimpleNamespace(dtype=torch.float32)
    loading = Loading(model, config)
    loading.begin()
    with pytest.raises(StoreError, match="the trainer sends nothing for 'gain' of Part"):
        loading.materialize({"part.weight": 0})
    loading.undo()
    assert float(model.part.gain.sum()) == 2.0


class Moving:
    """The link of the first of two ranks, of which the other one says whether it is ready."""

    refits = ()
    place = 0
    group = None
    beside: ClassVar[dict[str, Any]] = {}

    def __init__(self, other: str = "") -> None:
        self.update_numbers: list[int] = []
        self.trainers = 1
        self.board = Board(dist.HashStore(), 0, trainers=1, size=2, timeout=5.0)
        self.board.store.set("begin update 1/1", other)

    def leave(self) -> None:
        """Nothing: no group is there."""


def make_engine(model: nn.Module, link: Moving, meeting: str = "") -> Any:
    """A worker's engine that has met others."""
    engine: Any = object.__new__(WorkerEngine)
    config: Any = SimpleNamespace(dtype=torch.float32)
    engine.model, engine._link, engine._meeting = model, link, meeting
    engine._loading = Loading(model, config)
    engine._writes, engine._torn = Cells({"part.weight": np.array([0, 1])}), Cells({})
    return engine


def test_a_rank_that_has_all_while_another_failed(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refuses too: the other may be of its engine."""

    def fail(*given: object) -> None:
        raise ExchangeError("worker 1 could not end update 1")

    monkeypatch.setattr("shardmath_vllm.link.together", fail)
    engine = make_engine(model, Moving())
    with monkeypatch.context() as patch:
        patch.setattr("shardmath_vllm.board.HEARD_S", 0.0)
        with pytest.raises(ExchangeError, match="worker 1 could not end update 1"):
            engine.receive_weights(Updating(1))
    with pytest.raises(ExchangeError, match=r"weights are torn.*worker 1"):
        model.compute_logits(torch.ones(1))


def test_a_rank_on_which_nothing_has_begun_answers(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardmath_vllm.board.HEARD_S", 0.0)
    engine = make_engine(model, Moving("not what was planned"))
    with pytest.raises(ExchangeError, match="worker 0 could not begin update 1: not what was"):
        engine.receive_weights(Updating(1))
    assert model.compute_logits(torch.ones(1)) == 1.0


def test_a_trainer_that_is_gone_before_a_rank_has_voted_leaves_its_weights(model: Model) -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", server.port, is_master=False)
    link = Moving()
    link.place, link.board = 1, Board(client, 1, trainers=1, size=2, timeout=5.0)
    del server
    engine = make_engine(model, link)
    with pytest.raises(ExchangeError, match="trainer rank 0 left, has stopped or is gone"):
        engine.receive_weights(Updating(1))
    assert model.compute_logits(torch.ones(1)) == 1.0


def test_a_trainer_that_another_has_replaced_is_told_at_once(model: Model) -> None:
    engine = make_engine(model, Moving(), "later")
    with pytest.raises(ExchangeError, match="has joined another trainer since"):
        engine.receive_weights(Updating(1, "earlier"))
    assert model.compute_logits(torch.ones(1)) == 1.0


def test_a_reload_that_fails_at_its_end(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves a model that refuses, with all of its tensors there."""

    def fail() -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr("shardmath_vllm.board.HEARD_S", 0.0)
    engine = make_engine(model, Moving())
    monkeypatch.setattr(engine._loading, "finish", fail)
    with pytest.raises(RuntimeError, match="no memory"):
        engine.receive_weights(Updating(1))
    assert not any(tensor.is_meta for tensor in model.state_dict().values())
    with pytest.raises(ExchangeError, match=r"weights are torn.*no memory"):
        model.compute_logits(torch.ones(1))
