"""Models whose engines take weights as they run, from trainers that hold them in different ways."""

from __future__ import annotations

import concurrent.futures
import itertools
import multiprocessing as mp

import pytest

from tests.vllm.transfer import inside, trainers
from tests.vllm.transfer.checking import TIMEOUT_S, check_arrivals, check_refits
from tests.vllm.transfer.engines import Engines, ask, save


@pytest.mark.parametrize(
    ("model", "tp", "sharding", "ranks", "dtype"),
    [
        ("llama", 1, "fsdp x tp", 4, "float32"),
        ("qwen3_moe", 2, "fsdp x tp", 4, "bfloat16"),
        ("qwen3_moe", 1, "hsdp", 4, "bfloat16"),
        ("deepseek_v3", 2, "fsdp", 2, "bfloat16"),
    ],
)
def test_refitted_engines_are_as_those_started_on_the_checkpoint(
    model: str, tp: int, sharding: str, ranks: int, dtype: str, engines: Engines
) -> None:
    folders = [save(model, engines.folder, seed) for seed in range(3)]
    hosts = engines.start(*folders[:2], tp=tp)
    asked = ask(hosts, folders[0], sharding, ranks, dtype=dtype)
    check_refits(engines.pool(ranks), asked, hosts, folders)


def test_a_trainer_of_one_process_without_a_group(engines: Engines) -> None:
    folders = [save("llama-tied", engines.folder, seed) for seed in range(2)]
    hosts = engines.start(*folders, tp=1)
    expected = [host.ask(inside.generate) for host in hosts]
    asked = ask(hosts, folders[0], "none", 1)
    context = mp.get_context("forkserver")
    with concurrent.futures.ProcessPoolExecutor(1, context) as alone:
        sent = [1, 0, 1]
        answers = alone.submit(trainers.send_alone, asked, [folders[seed] for seed in sent])
        assert answers.result(TIMEOUT_S) == [[expected[seed]] * 2 for seed in sent]


def test_biases_that_vllm_has_made_wider(engines: Engines) -> None:
    """As it does on processors with AMX; they are never taken back. Of Qwen2, which has some."""
    folders = [save("qwen2", engines.folder, seed) for seed in range(3)]
    hosts = engines.start(*folders[:2], tp=2)
    pool, asked = engines.pool(2), ask(hosts, folders[0], "fsdp", 2)
    check_refits(pool, asked, hosts, folders)
    for host in hosts:
        host.ask(inside.ask_workers, inside.widen)
    wide = [host.ask(inside.ask_workers, inside.digest) for host in hosts]
    for worker in itertools.chain.from_iterable(wide):
        assert "torch.float32" in worker["model.layers.0.self_attn.qkv_proj.bias"]
    pool.run(trainers.rejoin, asked, timeout=TIMEOUT_S)
    for folder in (folders[0], folders[2]):
        check_arrivals(pool, hosts, folder)
        now = [host.ask(inside.ask_workers, inside.digest) for host in hosts]
        assert (now == wide) == (folder == folders[2])
