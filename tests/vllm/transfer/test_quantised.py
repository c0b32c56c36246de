"""Engines whose weights are quantised: as they load them, or before."""

from __future__ import annotations

from tests.vllm import checkpoints
from tests.vllm.transfer import stored
from tests.vllm.transfer.checking import check_refits
from tests.vllm.transfer.engines import Engines, ask, save


def test_engines_that_quantise_what_they_load(engines: Engines) -> None:
    """FP8 with a scale for each row; of rows that are cut, the two workers find the scale together."""
    folders = [save("llama", engines.folder, seed) for seed in range(3)]
    hosts = engines.start(*folders[:2], tp=2, quantization="fp8_per_channel")
    check_refits(engines.pool(2), ask(hosts, folders[0], "fsdp", 2), hosts, folders)


def test_engines_of_quantised_checkpoints(engines: Engines) -> None:
    """INT8 with a scale for each row, of a trainer that has both."""
    folders = []
    for seed in range(3):
        whole = save("llama", engines.folder, seed)
        folders.append(checkpoints.quantise_int8(whole, engines.folder / f"int8 {seed}"))
    hosts = engines.start(*folders[:2], tp=2)
    asked = ask(hosts, folders[0], "rows", 2)
    check_refits(engines.pool(2), asked, hosts, folders, stored)
