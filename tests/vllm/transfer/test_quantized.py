"""Engines whose weights are quantized: as they load them, or before."""

from __future__ import annotations

import time

from tests.vllm import checkpoints
from tests.vllm.transfer import inside, stored, trainers
from tests.vllm.transfer.checking import TIMEOUT_S, check_refits, fails
from tests.vllm.transfer.engines import Engines, ask, save


def test_engines_that_quantize_what_they_load(engines: Engines) -> None:
    """FP8 with a scale for each row; of rows that are cut, the two workers find the scale together."""
    folders = [save("llama", engines.folder, seed) for seed in range(3)]
    hosts = engines.start(*folders[:2], tp=2, quantization="fp8_per_channel")
    check_refits(engines.pool(2), ask(hosts, folders[0], "fsdp", 2), hosts, folders)


def test_a_worker_that_fails_as_all_quantize_is_not_waited_for(engines: Engines) -> None:
    """The other one is in a collective of vLLM's, and that is not over before half an hour is."""
    folders = [save("llama", engines.folder, seed) for seed in range(2)]
    (host,) = engines.start(folders[0], tp=2, quantization="fp8_per_channel")
    before = host.ask(inside.generate)
    pool = engines.pool(1)
    pool.run(trainers.join, ask([host], folders[0], "none", 1), timeout=TIMEOUT_S)
    host.ask(inside.ask_workers, inside.fail, 1, 1, "raise")
    start = time.monotonic()
    (said,) = fails(pool, trainers.send, folders[1])
    assert "this layer cannot be processed" in said
    assert host.ask(inside.ask_workers, inside.is_refusing) == [True, True]
    assert time.monotonic() - start < trainers.TIMEOUT_S / 2
    host.ask(inside.ask_workers, inside.mend)
    # Its own groups are as they were: whole updates go on.
    pool.run(trainers.rejoin, ask([host], folders[0], "none", 1), timeout=TIMEOUT_S)
    pool.run(trainers.send, folders[1], timeout=TIMEOUT_S)
    assert host.ask(inside.generate) != before
    pool.run(trainers.send, folders[0], timeout=TIMEOUT_S)
    assert host.ask(inside.generate) == before
    pool.run(trainers.leave)


def test_engines_of_quantized_checkpoints(engines: Engines) -> None:
    """INT8 with a scale for each row, of a trainer that has both."""
    folders = []
    for seed in range(3):
        whole = save("llama", engines.folder, seed)
        folders.append(checkpoints.quantize_int8(whole, engines.folder / f"int8 {seed}"))
    hosts = engines.start(*folders[:2], tp=2)
    asked = ask(hosts, folders[0], "rows", 2)
    check_refits(engines.pool(2), asked, hosts, folders, stored)
