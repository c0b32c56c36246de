"""Address: where ranks meet, found at run time, with a store that is served there from then on.

A port that is only looked for may be taken by another process before rank 0 serves its store. Here the store is served
first, at a port that the operating system chooses. torch lets all stores of a process share the server of a port, so
that `Trainer.trainer_init` and `init_process_group` of that process later find their server running.
"""

from __future__ import annotations

import secrets

import ray

from shardmath_vllm.meeting import serve_store

__all__ = ["find_address"]


def find_address() -> tuple[str, str]:
    """Return an address and a run for `TrainerInfo(address=, run=)` on all ranks. Call it in the actor of rank 0, which
    serves a store at this address until the actor ends.

    Further calls in the same actor return the same address, each with another run.
    """
    return serve_store(ray.util.get_node_ip_address()), secrets.token_hex(8)
