"""Engines: hosts and trainers that belong to one another, made where they are asked for and ended together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.distributed.pool import Pool, free_port
from tests.vllm import checkpoints
from tests.vllm.cases import fields
from tests.vllm.transfer.hosts import Host
from tests.vllm.transfer.trainers import Asked

__all__ = ["Engines", "ask", "save"]

WIDE = {"hidden_size": 256, "intermediate_size": 128, "head_dim": 32}
"""A head is 32 wide at least, which vLLM's attention on a CPU asks for."""


def save(model: str, folder: Path, seed: int, **more: Any) -> Path:
    """A checkpoint of random weights."""
    given: dict[str, Any] = {}
    if model != "deepseek_v3":
        given |= WIDE
    if model == "qwen3_moe":
        given["moe_intermediate_size"] = 64
    given |= more
    return checkpoints.save(fields(model, **given), folder / model / str(seed), seed)


class Engines:
    """Hosts, and the ranks of trainers, that live as long as a test needs them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._hosts: list[Host] = []
        self._pools: dict[int, Pool] = {}

    def start(self, *folders: Path, tp: int, **more: Any) -> list[Host]:
        """An engine on each checkpoint, started beside each other."""
        hosts = [Host(folder, tp, **more) for folder in folders]
        self._hosts += hosts
        return [host.wait() for host in hosts]

    def pool(self, ranks: int) -> Pool:
        """So many ranks of a trainer; new ones after a test that failed."""
        pool = self._pools.get(ranks)
        if pool is None or pool.broken:
            if pool is not None:
                pool.close()
            pool = self._pools[ranks] = Pool(ranks)
        return pool

    def close(self) -> None:
        """End all of them."""
        for pool in self._pools.values():
            pool.close()
        # All are told before any is waited for.
        for host in self._hosts:
            host.let_go()
        for host in self._hosts:
            host.close()


def ask(hosts: list[Host], folder: Path, sharding: str, ranks: int, **more: Any) -> Asked:
    """A trainer of these engines."""
    return Asked(
        folder,
        sharding,
        ranks,
        f"127.0.0.1:{free_port()}",
        tuple(host.address for host in hosts),
        tuple(host.workers for host in hosts),
        **more,
    )
