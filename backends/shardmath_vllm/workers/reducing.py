"""Reducing: workers that quantize together do so in groups of the meeting, which a worker that fails leaves.

1. If a tensor is cut, vLLM's quantization asks all ranks of a group for their largest magnitude. In vLLM's own group,
   the other ranks would wait for a worker that failed until torch's limit, and would be out of step afterwards.
2. A worker whose update fails leaves the groups of its meeting. Their connections close, and so the other ranks stop
   waiting. The next meeting has other groups.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import torch.distributed as dist
from vllm.distributed import parallel_state
from vllm.model_executor.layers.quantization.utils import quant_utils

import shardmath_torch as smt
from shardmath.base.errors import ExchangeError, ShardError
from shardmath.base.text import word_error
from shardmath_torch.groups.agreement.wire import says_ended
from shardmath_torch.groups.compat import Store
from shardmath_vllm.infos import Joining

__all__ = ["join_groups", "reducing"]

GETTERS = {"get_tp_group": "_TP", "get_ep_group": "_EP"}
"""What vLLM's quantization asks for a group, and what `parallel_state` keeps that group in."""


def join_groups(store: Store, joining: Joining) -> dict[str, dist.ProcessGroup]:
    """Connect a process group for each of vLLM's groups (such as tensor parallel) with more than one worker. Return
    these by the name of the group's getter in vLLM, such as "get_tp_group". Workers meet in `store`; `joining`, the
    message that told this worker to connect, has the transport and timeout to use.

    Collective over the engine's workers, which find each other in the meeting's own store.

    Raises ExchangeError if one of them does not come.
    """
    groups: dict[str, dist.ProcessGroup] = {}
    for getter, attribute in GETTERS.items():
        vllm_group = getattr(parallel_state, attribute)
        if vllm_group is None or vllm_group.world_size == 1:
            continue
        ranks = ",".join(map(str, vllm_group.ranks))
        groups[getter] = smt.connect(
            store,
            vllm_group.rank_in_group,
            vllm_group.world_size,
            backend=joining.transport,
            timeout=joining.timeout,
            name=f"engine {joining.engine}/{vllm_group.unique_name}/{ranks}",
        )
    return groups


@contextmanager
def reducing(groups: Mapping[str, dist.ProcessGroup]) -> Iterator[None]:
    """In the `with` block, vLLM's quantization finds the largest magnitude of a sharded tensor over `groups`. `groups`
    maps the name of a function in vLLM, such as "get_tp_group", to the process group to use in place of the function's
    result. Raises ExchangeError if another worker fails and disconnects from one of the groups.
    """
    getters = {getter: getattr(quant_utils, getter) for getter in groups}
    try:
        # Replaced only in quantization: other parts of vLLM would ask torch for these groups, which it does not know.
        for getter, group in groups.items():
            setattr(quant_utils, getter, partial(SimpleNamespace, device_group=group))
        yield
    except ShardError:
        raise
    except (RuntimeError, ValueError) as error:
        # torch logs a collective that failed, and the log raises for a group that torch does not know. Then the failure
        # itself is the error's context.
        cause = error.__context__ or error
        if groups and says_ended(str(cause)):
            what = f"another worker of this engine failed as both quantized ({word_error(cause)})"
            raise ExchangeError(
                f"{what}; mend that worker's error, which the engine's log has, and connect again"
            ) from cause
        raise
    finally:
        for getter, get in getters.items():
            setattr(quant_utils, getter, get)
