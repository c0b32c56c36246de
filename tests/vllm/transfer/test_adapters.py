"""Engines that serve adapters beside the weights that they take."""

from __future__ import annotations

from tests.vllm import checkpoints
from tests.vllm.transfer import inside, trainers
from tests.vllm.transfer.checking import TIMEOUT_S, check_refits
from tests.vllm.transfer.engines import Engines, ask, save


def test_adapters_stay_and_change_the_new_weights(engines: Engines) -> None:
    folders = [save("llama", engines.folder, seed) for seed in range(3)]
    adapter = checkpoints.save_adapter(folders[0], engines.folder / "adapter", rank=8)
    hosts = engines.start(*folders[:2], tp=2, enable_lora=True, max_lora_rank=8)
    adapted = [host.ask(inside.generate, adapter) for host in hosts]
    assert adapted[0] not in [adapted[1], hosts[0].ask(inside.generate)]
    pool = engines.pool(2)
    check_refits(pool, ask(hosts, folders[0], "fsdp", 2), hosts, folders)
    for seed in range(2):
        pool.run(trainers.send, folders[seed], timeout=TIMEOUT_S)
        assert [host.ask(inside.generate, adapter) for host in hosts] == [adapted[seed]] * 2
