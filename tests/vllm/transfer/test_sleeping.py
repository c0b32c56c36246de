"""Engines that sleep while a trainer computes, as engines on the trainer's GPUs do, and wake up for its weights.

On a CPU the engine's core does all that it does on a GPU; its workers log that they do not free memory.
"""

from __future__ import annotations

import pytest
import vllm

from tests.vllm.transfer import inside, trainers
from tests.vllm.transfer.checking import TIMEOUT_S, fails
from tests.vllm.transfer.engines import Engines, ask, save


def test_weights_come_while_only_the_cache_sleeps(engines: Engines) -> None:
    """At both levels. Sleeping weights are refused, and an update is taken afterwards. Level 0 only pauses."""
    folders = [save("llama", engines.folder, seed) for seed in range(2)]
    engine, other = engines.start(*folders, tp=1)
    expected = [host.ask(inside.generate) for host in (engine, other)]
    pool = engines.pool(2)
    asked = ask([engine], folders[0], "fsdp", 2)
    pool.run(trainers.join, asked, timeout=TIMEOUT_S)
    for level, seed in ((1, 1), (2, 0)):
        engine.ask(inside.sleep, level)
        for said in fails(pool, trainers.send, folders[seed]):
            assert "this engine sleeps, so its weights have no memory" in said
        assert not engine.ask(inside.wake, ["weights"])
        pool.run(trainers.send, folders[seed], timeout=TIMEOUT_S)
        assert engine.ask(inside.wake)
        assert engine.ask(inside.generate) == expected[seed]
    engine.ask(inside.sleep, 0)
    pool.run(trainers.send, folders[1], timeout=TIMEOUT_S)
    assert engine.ask(inside.wake, ["scheduling"])
    assert engine.ask(inside.generate) == expected[1]
    # To connect needs no weights.
    engine.ask(inside.sleep, 1)
    pool.run(trainers.rejoin, asked, timeout=TIMEOUT_S)
    engine.ask(inside.wake)
    pool.run(trainers.send, folders[0], timeout=TIMEOUT_S)
    assert engine.ask(inside.generate) == expected[0]


def test_vllm_refuses_sleep_mode_on_cpus(engines: Engines) -> None:
    """So that memory is freed, which only GPUs do: what the page says has not run."""
    folder = save("llama", engines.folder, 0)
    with pytest.raises(ValueError, match="Sleep mode is not supported on current platform"):
        vllm.LLM(str(folder), skip_tokenizer_init=True, enable_sleep_mode=True)
