"""shardmath with Ray: trainers and vLLM engines that are actors.

In reading order:

- `address`: an address found at run time, at which rank 0's actor already serves a store;
- `client`: a trainer's connection to an engine in an actor.
"""

from shardmath_ray.address import find_address
from shardmath_ray.client import RayClient

__all__ = ["RayClient", "find_address"]
