"""One process of a JAX job of several devices each: what it holds of arrays, against what JAX says.

python held.py PLACE PROCESSES OF_JAX

Prints how many arrays were read, what is said of those that are not, and of one that only process 0 has.
"""

from __future__ import annotations

import itertools
import json
import sys

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import shardmath
import shardmath_jax

WHOLE = np.arange(16 * 24, dtype=np.float32).reshape(16, 24)
SPECS = [(), ("a",), (None, "a"), (("a", "b"),), ("a", "b"), ("b", "a")]
GRIDS = [(2, 4), (4, 2)]


def check(devices: list[jax.Device], grid: tuple[int, int], spec: tuple[object, ...]) -> str:
    """What is said of an array that is not read; "" after one that is."""
    mesh = Mesh(np.array(devices).reshape(grid), ("a", "b"))
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    array = jax.make_array_from_callback(WHOLE.shape, sharding, WHOLE.__getitem__)
    try:
        layout, part = shardmath_jax.held_by_process(array)
    except ValueError as error:
        return str(error)
    assert layout.mesh.ranks == tuple(range(jax.process_count()))
    assert np.array_equal(part, WHOLE[np.ix_(*layout.indices(jax.process_index()))])
    return ""


def main() -> None:
    """All shardings, on devices in their order and process by process in turn."""
    place, processes, of_jax = sys.argv[1:]
    jax.distributed.initialize(of_jax, num_processes=int(processes), process_id=int(place))
    devices = jax.devices()
    half = len(devices) // 2
    in_turn = [each for pair in zip(devices[:half], devices[half:], strict=True) for each in pair]
    said = [check(*case) for case in itertools.product((devices, in_turn), GRIDS, SPECS)]
    first = [each for each in devices if each.process_index == 0]
    mesh = Mesh(np.array(first), ("a",))
    array = jax.make_array_from_callback(
        WHOLE.shape, NamedSharding(mesh, PartitionSpec("a")), WHOLE.__getitem__, dtype=WHOLE.dtype
    )
    try:
        absent = str(shardmath_jax.held_by_process(array)[0])
    except shardmath.LayoutError as error:
        absent = str(error)
    print(json.dumps([said.count(""), sorted(set(said) - {""}), absent]))


if __name__ == "__main__":
    main()
