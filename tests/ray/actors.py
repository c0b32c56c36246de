"""Actors that have a client's methods and no engine, and what ranks of a trainer do in theirs."""

from __future__ import annotations

import os
import time
from typing import Any

import psutil
import ray
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import shardmath_torch as smt
from shardmath_ray import find_address

TIMEOUT_S = 100.0


class Engine:
    """An actor that keeps what it is told, raises, hangs, or dies."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.told = init_info

    def start_weight_update(self) -> None:
        raise KeyError("no engine")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        time.sleep(TIMEOUT_S)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        os._exit(3)

    def tell(self) -> dict[str, Any]:
        return self.told


class Rank:
    """A process that meets another one at an address."""

    def find_address(self) -> tuple[str, str]:
        return find_address()

    def meet(self, address: str, run: str, rank: int) -> float:
        """A sum of both ranks' numbers, by torch's own group, after they met as shardmath has it, twice."""
        dist.init_process_group("gloo", f"tcp://{address}", rank=rank, world_size=2)
        for _ in range(2):
            smt.disconnect(smt.connect(address, rank, 2, timeout=TIMEOUT_S, run=run))
        number = torch.tensor(float(10**rank))
        dist.all_reduce(number)
        return number.item()


def list_shards(policy: Any) -> list[tuple[int, int]]:
    """Elements of each parameter of a policy's rank, and those which this rank has."""
    shards = []
    for parameter in policy.model.parameters():
        assert isinstance(parameter, DTensor)
        shards.append((parameter.numel(), parameter.to_local().numel()))
    return shards


def send_and_kill(policy: Any, engine: Any, pid: int, portion: int) -> None:
    """Send, and have Ray kill the engine, whose process is `pid`, once some portions of the weights have moved."""
    refit = policy.trainer.link.refits[portion]
    prepare = refit.prepare

    def kill_and_prepare(**given: Any) -> None:
        process = psutil.Process(pid)
        ray.kill(engine, no_restart=False)
        process.wait(TIMEOUT_S)
        prepare(**given)

    refit.prepare = kill_and_prepare
    policy.trainer.send_weights()
