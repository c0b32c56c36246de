"""Jobs: a trainer of some processes under FSDP2, an engine of vLLM beside it, and updates by each way in turn.

1. Rank 0 has the engine; its workers are processes of their own. The engine starts on weights that vLLM draws.
2. Each update has the weights of its seed: both ways move the same ones, after which the engine's tokens have to be the
   same.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.bench.engines import costs
from tests.bench.engines.costs import Cost

__all__ = [
    "ENVIRONMENT",
    "FLOOR",
    "OURS",
    "PEER",
    "WAYS",
    "Case",
    "Update",
    "count_parameters",
    "train",
]

OURS, PEER = "shardmath", "whole_gloo"
FLOOR = "repacking alone"
"""No way to update an engine, but what each of them has to wait for."""

WAYS = (OURS, PEER)
"""In this order ours has other weights to replace, and the peer says what tokens are then."""

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
TIMEOUT_S = 120.0
TOKENS = 8
PROMPT = (3, 40, 77, 14)


@dataclass(frozen=True)
class Case:
    """A model like Llama, who trains and who serves it, and the seeds of the weights that are moved by each way."""

    layers: int
    hidden: int
    inner: int
    vocab: int
    trainers: int
    tp: int
    seeds: tuple[int, ...]
    max_inflight_bytes: int
    ways: tuple[str, ...] = WAYS
    has_floor: bool = False
    """Whether workers also repack weights that are there, as often as there are seeds."""

    def configure(self) -> Any:
        """Its transformers configuration: heads of 64, four of which share keys and values."""
        import transformers

        return transformers.LlamaConfig(
            hidden_size=self.hidden,
            intermediate_size=self.inner,
            num_hidden_layers=self.layers,
            num_attention_heads=self.hidden // 64,
            num_key_value_heads=self.hidden // 256,
            vocab_size=self.vocab,
            max_position_embeddings=64,
            tie_word_embeddings=False,
            architectures=["LlamaForCausalLM"],
            dtype="bfloat16",
        )


@dataclass(frozen=True)
class Update:
    """An update as rank 0 saw it, and what each worker received and took.

    `stored` is what each worker's loader stores, of all tensors and of the fullest layer; `processed` are seconds in
    which vLLM makes what it runs of that. Both are of shardmath's updates alone.
    """

    way: str
    seed: int
    seconds: float
    tokens: tuple[int, ...]
    received: tuple[int, ...]
    costs: tuple[Cost, ...]
    stored: tuple[tuple[int, int], ...]
    processed: tuple[float, ...]


def count_parameters(case: Case) -> int:
    """Elements of the model."""
    attention = case.hidden * case.hidden * 5 // 2
    layer = attention + 3 * case.hidden * case.inner + 2 * case.hidden
    return case.layers * layer + 2 * case.vocab * case.hidden + case.hidden


def train(
    rank: int, case: Case, folder: Path, ports: Sequence[int], say: Callable[[Any], None]
) -> None:
    """A rank of the trainer: of each update it says the way, what it took for it, and as rank 0 the update."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    engine = _start_engine(case, folder) if rank == 0 else nullcontext()
    with engine as llm:
        store = dist.TCPStore("127.0.0.1", ports[0], None, rank == 0, wait_for_workers=False)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=case.trainers)
        _Job(rank, case, ports, llm).run(say)
        dist.barrier()
        dist.destroy_process_group()


class _Engine(AbstractContextManager[Any]):
    """vLLM, whose processes end with the block."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm

    def __enter__(self) -> Any:
        return self._llm

    def __exit__(self, *failure: object) -> None:
        self._llm.llm_engine.engine_core.shutdown()


def _start_engine(case: Case, folder: Path) -> _Engine:
    import vllm

    case.configure().save_pretrained(folder)
    llm = vllm.LLM(
        str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="bfloat16",
        max_model_len=64,
        max_num_seqs=2,
        # It measures a step of as many tokens as it starts.
        max_num_batched_tokens=64,
        tensor_parallel_size=case.tp,
        weight_transfer_config={"backend": OURS},
        worker_extension_cls="tests.bench.engines.worker.Extension",
    )
    return _Engine(llm)


def _build(case: Case) -> Any:
    """The model under FSDP2, without a whole tensor anywhere."""
    import torch
    import transformers
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(case.configure())
    model.to(torch.bfloat16)
    mesh = init_device_mesh("cpu", (case.trainers,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model.to_empty(device="cpu")


class _Job:
    """One rank's updates."""

    def __init__(self, rank: int, case: Case, ports: Sequence[int], llm: Any) -> None:
        self.rank = rank
        self.case = case
        self.ports = ports
        self.llm = llm
        self.model = _build(case)
        self.seed = 0
        self._draw()

    def run(self, say: Callable[[Any], None]) -> None:
        """An update of each seed by each way, in turn, so that a machine that is busy is busy for both."""
        trainers = {}
        for way in self.case.ways:
            self._use(way)
            trainers[way] = self._meet(way)
        for seed in self.case.seeds:
            self._turn(seed)
            for way, trainer in trainers.items():
                self._use(way)
                say((way, *self._update(way, seed, trainer)))
        for way, trainer in trainers.items():
            self._use(way)
            trainer.shutdown()
        if self.case.has_floor and self.llm is not None:
            # At the end, since the engine's weights are others afterwards.
            for seed in self.case.seeds:
                say((FLOOR, *self._repack(seed)))

    def _repack(self, seed: int) -> tuple[Cost, Update]:
        """What it takes when all workers repack weights that are there, at the same time."""
        self._ask("begin_repacking")
        self._ask("begin_measuring")
        since = costs.begin()
        start = time.perf_counter()
        self._ask("repack")
        seconds = time.perf_counter() - start
        own = since.end()
        theirs = tuple(costs.Cost(*one) for one in self._ask("end_measuring"))
        return own, Update(FLOOR, seed, seconds, (), (), theirs, (), ())

    def _use(self, way: str) -> None:
        if self.llm is not None:
            self.llm.collective_rpc("use_backend", args=(way,))

    def _meet(self, way: str) -> Any:
        import shardmath_vllm as sv
        from tests.bench.engines import peer

        peer.register()
        client = None if self.llm is None else sv.LLMClient(self.llm)
        if way == OURS:
            info = sv.TrainerInfo(
                f"127.0.0.1:{self.ports[1]}",
                trainers=self.case.trainers,
                workers=self.case.tp,
                timeout=TIMEOUT_S,
                max_inflight_bytes=self.case.max_inflight_bytes,
                rank=self.rank,
            )
            return sv.Trainer.trainer_init(info, client=client or [], source=self.model)
        from vllm.distributed.weight_transfer.base import ModuleSource
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

        whole = peer.PeerInfo(self.ports[2], self.case.tp, rank=self.rank)
        source = ModuleSource(self.model)
        return WeightTransferTrainerFactory.trainer_init(whole, client=client, source=source)

    def _draw(self) -> None:
        """Weights at random."""
        import torch

        random = torch.Generator().manual_seed(self.rank)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.to_local().normal_(std=parameter.shape[-1] ** -0.5, generator=random)

    def _turn(self, seed: int) -> None:
        """Weights of this seed: those drawn, each row turned by so many columns, since drawing takes longer."""
        import torch

        with torch.no_grad():
            for parameter in self.model.parameters():
                local = parameter.to_local()
                local.copy_(local.roll(seed - self.seed, -1))
        self.seed = seed

    def _update(self, way: str, seed: int, trainer: Any) -> tuple[Cost, Update | None]:
        """What an update takes on this rank, and what rank 0 has to say of it."""
        import torch.distributed as dist

        self._ask("begin_measuring")
        since = costs.begin()
        dist.barrier()
        start = time.perf_counter()
        trainer.send_weights()
        seconds = time.perf_counter() - start
        own = since.end()
        if self.llm is None:
            return own, None
        theirs = tuple(costs.Cost(*one) for one in self._ask("end_measuring"))
        received = tuple(self._ask("count_received"))
        stored = tuple(self._ask("count_stored")) if way == OURS else ()
        processed = tuple(self._ask("count_processed")) if way == OURS else ()
        tokens = self._generate()
        return own, Update(way, seed, seconds, tokens, received, theirs, stored, processed)

    def _ask(self, name: str) -> list[Any]:
        """What each worker says; nothing on ranks that have no engine."""
        return [] if self.llm is None else self.llm.collective_rpc(name)

    def _generate(self) -> tuple[int, ...]:
        """Greedy tokens after a prompt."""
        import vllm

        greedy = vllm.SamplingParams(
            temperature=0, max_tokens=TOKENS, detokenize=False, ignore_eos=True
        )
        prompt = {"prompt_token_ids": list(PROMPT)}
        (answer,) = self.llm.generate([prompt], greedy, use_tqdm=False)
        return tuple(answer.outputs[0].token_ids)
