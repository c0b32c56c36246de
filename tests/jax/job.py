"""One process of two JAX jobs of two processes each, of which one refits the other.

python job.py trainer|engine PLACE OF_JAX MEETING

PLACE is the process's number in its own job, OF_JAX the address at which that job's processes meet, MEETING the address
at which both jobs do. Prints what arrived, as JSON.
"""

from __future__ import annotations

import json
import sys

import jax
import numpy as np
import torch
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import shardmath as sm
import shardmath_jax
import shardmath_torch as smt

EACH = 2
"""Processes of a job; trainers are ranks 0 and 1, engines 2 and 3."""
STEPS = 3
SHAPES = {"gate": (8, 6), "up": (8, 6), "down": (6, 8), "norm": (8,)}
DIVIDED = {"gate": ("d", None), "up": (None, "d"), "down": ("d", None), "norm": (None,)}
"""How the trainer divides each weight."""
SERVED = {"gate": (None, "d"), "up": (None, "d"), "down": ("d", None), "norm": ("d",)}
"""How the engine does."""


def value(name: str, step: int) -> np.ndarray:
    """A weight after a step."""
    size = int(np.prod(SHAPES[name]))
    first = 1000.0 * step + 100.0 * sorted(SHAPES).index(name)
    return (first + np.arange(size, dtype=np.float32)).reshape(SHAPES[name])


def make_shardings(divided: dict[str, tuple[str | None, ...]]) -> dict[str, NamedSharding]:
    """The shardings of a job of one device per process."""
    mesh = Mesh(np.array(jax.devices()), ("d",))
    return {name: NamedSharding(mesh, PartitionSpec(*spec)) for name, spec in divided.items()}


def read_layouts(shardings: dict[str, NamedSharding], first: int) -> dict[str, sm.Layout]:
    """Their layouts, where the job's first process has rank `first` in the joint group."""
    return {
        name: shardmath_jax.from_sharding(
            each, SHAPES[name], rank_of=lambda device: first + device.process_index
        )
        for name, each in shardings.items()
    }


def describe(divided: dict[str, tuple[str | None, ...]], first: int) -> dict[str, sm.Layout]:
    """The layouts of the other job, which this one cannot ask: by the same rule."""
    mesh = sm.Mesh(d=EACH, ranks=range(first, first + EACH))
    layouts = {}
    for name, spec in divided.items():
        words = [f"({axis} n{i})" if axis else f"n{i}" for i, axis in enumerate(spec)]
        layouts[name] = sm.Layout(SHAPES[name], mesh, " ".join(words))
    return layouts


def make_refit(group: smt.JointGroup) -> smt.Refit:
    """The refit, which each process computes by itself."""
    shapes = {name: (shape, "float32") for name, shape in SHAPES.items()}
    planned = sm.refit(describe(DIVIDED, 0), describe(SERVED, EACH), shapes)
    return smt.Refit(planned, group=group)


def train(refit: smt.Refit) -> None:
    """Move the weights of three steps: a JAX array is immutable, so each step has new ones."""
    shardings = make_shardings(DIVIDED)
    layouts = read_layouts(shardings, 0)
    assert layouts == describe(DIVIDED, 0)
    rank = jax.process_index()
    held = {name: torch.empty(each.local_shape(rank)) for name, each in layouts.items()}
    refit.prepare(src=held)
    for step in range(STEPS):
        for name, sharding in shardings.items():
            whole = value(name, step)
            array = jax.make_array_from_callback(whole.shape, sharding, whole.__getitem__)
            (shard,) = shardmath_jax.local_shards(array).values()
            held[name].copy_(torch.from_dlpack(shard))
        refit()


def serve(refit: smt.Refit, rank: int) -> object:
    """Take the weights of three steps into arrays of this job, and add them up: something that needs all processes."""
    shardings = make_shardings(SERVED)
    layouts = read_layouts(shardings, EACH)
    assert layouts == describe(SERVED, EACH)
    memory = {name: torch.empty(each.local_shape(rank)) for name, each in layouts.items()}
    refit.prepare(dst=memory)
    sums = []
    for step in range(STEPS):
        refit()
        for name, sharding in shardings.items():
            # A copy: the next step writes into `memory`, and an array of JAX may share what it is made of.
            shards = {rank: memory[name].clone()}
            array = shardmath_jax.to_array(sharding, SHAPES[name], shards, rank_of=number_engine)
            (shard,) = array.addressable_shards
            assert np.array_equal(shard.data, value(name, step)[shard.index])
            sums.append(float(jax.jit(jax.numpy.sum)(array)))
    return sums


def number_engine(device: jax.Device) -> int:
    """The rank of an engine's device in the joint group."""
    return EACH + int(device.process_index)


def main() -> None:
    """Join the job, if it is one of JAX, and then the group of both jobs."""
    role, place, of_jax, meeting = sys.argv[1:]
    jax.distributed.initialize(of_jax, num_processes=EACH, process_id=int(place))
    rank = int(place) + (0 if role == "trainer" else EACH)
    group = smt.connect(meeting, rank, 2 * EACH, timeout=60.0)
    refit = make_refit(group)
    arrived = train(refit) if role == "trainer" else serve(refit, rank)
    refit.close()
    smt.disconnect(group)
    print(json.dumps(arrived))


if __name__ == "__main__":
    main()
