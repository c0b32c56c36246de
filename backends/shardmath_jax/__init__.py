"""shardmath_jax: shardings of JAX arrays as layouts, and layouts as shardings.

    layout = shardmath_jax.layout_of(array)              # a rank is a device, by its id
    sharding = shardmath_jax.to_sharding(layout)
    array = shardmath_jax.to_array(sharding, shape, {0: ..., 1: ...})
    layout, part = shardmath_jax.held_by_process(array)  # a rank is a process

Inside one JAX job, `jax.device_put(array, sharding)` moves arrays, faster than pieces from Python could. Between two
jobs that shard an array differently, or into torch, shardmath moves it: each process is a rank of `shardmath_torch`.
"""

from shardmath_jax.shardings import from_sharding as from_sharding
from shardmath_jax.shardings import held_by_process as held_by_process
from shardmath_jax.shardings import layout_of as layout_of
from shardmath_jax.shardings import local_shards as local_shards
from shardmath_jax.shardings import to_array as to_array
from shardmath_jax.shardings import to_sharding as to_sharding

__all__ = [
    "from_sharding",
    "held_by_process",
    "layout_of",
    "local_shards",
    "to_array",
    "to_sharding",
]
